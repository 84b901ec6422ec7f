"""Plans by their long runs: the joint choice, spares, objectives, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mofa
from mofa.errors import NothingFits, SpecError, StrategyError
from mofa.faults.ledger import PARTS
from mofa.faults.outlook import failure_clock
from mofa.faults.simulate import simulate_long_runs
from mofa.faults.spares import waiting_share
from mofa.plan.goodput_by_scale import VariantPoint
from mofa.plan.long_run import FIGURES, Days, Objective
from mofa.plan.result import Plan, PlanReport
from mofa.plan.step_parts import TIME_COMPONENTS
from mofa.search.goodput import ACTIVITIES, LongRunObjective, average_step_watts
from mofa.search.legality.masks import JobAndMachines, check_strategies
from mofa.search.long_run import fewer_nodes
from mofa.search.long_run.goodput_by_scale import VARIANTS, goodput_by_scale
from mofa.search.long_run.sensitivity import FACTORS, ettr_sensitivities
from mofa.search.long_run.spare_nodes import without_spares
from mofa.search.one_plan import plan_in_closed_form
from mofa.search.search_result import Search
from mofa.search.space import combinations_table, default_space, with_first_option_set, without_indivisible_degrees
from mofa.specs.faults import FaultSpec, PowerDrawSpec
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.load import load_faults
from mofa.specs.strategy import AS_GIVEN
from mofa.specs.workload import WorkloadSpec

JOB = mofa.load_workload("llama3-8b", tokens="1T")
NODES = mofa.load_cluster("h100-hgx", 64, overrides={"gpu.memory_bytes": "81.5 GiB"})
"""As much more memory than an H100 has as lets plans fit of which the tests compare the long runs."""
SMALL = mofa.load_workload("llama3-8b", tokens="1T", global_batch=128)
"""Of few micro-batches: the fastest step has two pipeline stages, the best run under frequent failures one."""
MEGATRON = mofa.load_framework("megatron")
FIX: dict[str, Any] = {
    "fix": {"recompute": "none"}, "without": ("vpp", "cp"), "maximum": {"micro_batch": 2, "pp": 5}, "offers": False,
}  # fmt: skip


def facts(**changes: Any) -> FaultSpec:
    return load_faults("llama3", {key.replace("__", "."): value for key, value in changes.items()})


def search(faults: FaultSpec, **options: Any) -> Search:
    """The best long runs of the same job, each searched once."""
    key = repr((faults, sorted(options.items())))
    if key not in _searched:
        _searched[key] = mofa.find_long_runs(JOB, NODES, faults, framework=MEGATRON, top=5, **{**FIX, **options})
    return _searched[key]


_searched: dict[str, Search] = {}
_planned: dict[tuple[object, ...], list[tuple[ClusterSpec, Plan]]] = {}
"""Plans of a job, a framework, a strategy and a number of GPUs, with their machines."""


def planned_once(job: WorkloadSpec, machines: ClusterSpec, strategy: object, *, framework: FrameworkSpec) -> Plan:
    """A plan at one size, which does not depend on spares, checkpoints or failures."""
    same = _planned.setdefault((job, framework, repr(strategy), machines.num_gpus), [])
    for known, plan in same:
        if known == machines:
            return plan
    same.append((machines, plan_in_closed_form(job, machines, strategy, framework=framework)))
    return same[-1][1]


@pytest.fixture(autouse=True)
def plans_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the plan of each size once for all numbers of spares that stand by and for all scales."""
    monkeypatch.setattr(fewer_nodes, "plan_in_closed_form", planned_once)
    monkeypatch.setattr("mofa.search.long_run.goodput_by_scale.plan_in_closed_form", planned_once)


def test_every_part_of_a_step_has_a_power() -> None:
    assert sorted(part for parts in ACTIVITIES.values() for part in parts) == sorted(TIME_COMPONENTS)
    waits = np.eye(len(TIME_COMPONENTS))[:, [TIME_COMPONENTS.index("bubble")]]
    idle = average_step_watts(waits, PowerDrawSpec(), 700.0)
    assert float(idle[0]) == pytest.approx(0.19 * 700)


def test_a_search_keeps_every_promise() -> None:
    found = search(facts(), objective="tokens")
    for plan in found.report.plans:
        assert plan.long_run is not None and plan.ettr is not None and plan.days is not None
        assert sum(getattr(plan.long_run.ledger, part) for part in PARTS) == pytest.approx(1)
        assert plan.unknown == {"usd": "no price given"}
        assert plan.days.p10 >= plan.days_without_failures
    best = [p.effective_tokens_per_s_per_gpu or 0.0 for p in found.report.plans]
    assert best == sorted(best, reverse=True)
    assert found.report.cluster.num_gpus == 64


def test_the_key_of_a_row_is_that_of_its_plan() -> None:
    """The search ranks by arrays what a plan carries as numbers."""
    plain = mofa.find_plans(JOB, NODES, framework=MEGATRON, top=3, replay=False, **FIX)
    for objective in ("tokens", "kwh"):
        judge = LongRunObjective(JOB, NODES, MEGATRON, facts(), objective)  # type: ignore[arg-type]
        timed = plain.costed.select_rows(np.flatnonzero(np.isfinite(plain.costed.step_s)))
        keys = judge.ranking_key(timed)
        of_plans = [judge.plan_ranking_key(plan) for plan in plain.report.plans]
        for plan, value in zip(plain.report.plans, of_plans, strict=True):
            near = np.abs(timed.step_s - plan.step_s) < 1e-9
            assert np.any(np.isclose(keys[near], value, rtol=1e-9)), objective


def test_a_faster_step_may_lose() -> None:
    """Two pipeline stages make the faster step; one, whose ranks save less each, the better run where nodes fail often
    and write slowly."""
    slow = {"value": "0.3 GB/s", "provenance": "assumed", "source": "a test"}
    harsh = facts(reliability__failures_per_node_day=100.0, storage__node_bytes_per_s=slow, spares=0)
    alone: dict[str, Any] = {
        "framework": MEGATRON, "top": 1, "replay": False, "without": ["tp_overlap"],
        "maximum": {"cp": 1, "pp": 4, "micro_batch": 1}, "closed_form_margin": False, "offers": False,
    }  # fmt: skip
    by_run = mofa.find_long_runs(SMALL, NODES, harsh, **alone).report.plans[0]
    by_step = mofa.find_plans(SMALL, NODES, **alone).report.plans[0]
    judge = LongRunObjective(SMALL, NODES, MEGATRON, harsh)
    lost = judge.with_long_run_figures(by_step)
    assert by_step.strategy.pp > by_run.strategy.pp
    assert by_step.step_s < by_run.step_s
    assert judge.plan_ranking_key(by_run) < judge.plan_ranking_key(by_step)
    assert (by_run.effective_tokens_per_s_per_gpu or 0) > (lost.effective_tokens_per_s_per_gpu or 0)
    assert (by_run.ettr or 0) > (lost.ettr or 0)
    assert (by_run.checkpoint_bytes or 0) < (by_step.checkpoint_bytes or 0)


def test_a_run_that_hardly_gets_on() -> None:
    hopeless = search(facts(reliability__failures_per_node_day=500.0, spares=0)).report.plans[0]
    assert hopeless.ettr is not None and hopeless.ettr < 1e-3
    assert hopeless.days is None and "hardly gets on" in hopeless.unknown["days"]


def test_kwh_is_least_for_the_objective_kwh() -> None:
    energy = [search(facts(spares=0), objective=o).report.plans[0].kwh for o in ("kwh", "tokens")]
    assert energy[0] is not None and energy[1] is not None and energy[0] <= energy[1]
    plans = search(facts(spares=0), objective="kwh").report.plans
    judge = LongRunObjective(JOB, NODES, MEGATRON, facts(spares=0), "kwh")
    joules_per_kwh = [judge.plan_ranking_key(plan) / (plan.kwh or 0.0) for plan in plans]
    assert len(plans) > 1 and joules_per_kwh == pytest.approx([joules_per_kwh[0]] * len(plans), rel=1e-9)


def test_spares_win_where_replacements_are_slow() -> None:
    slow = facts(restart__reschedule_s="20 d", restart__repair_s="10 min", reliability__failures_per_node_day=0.05)
    found = search(slow)
    best = found.report.plans[0]
    assert best.spare_gpus >= 8
    s = best.strategy
    assert s.tp * s.pp * s.cp * s.dp == 64 - best.spare_gpus
    assert "tried" in found.report.defaults["spare nodes"]
    quick = search(facts(restart__reschedule_s="1 s"))
    assert quick.report.plans[0].spare_gpus == 0


def test_numbers_of_spares() -> None:
    assert search(facts(spares=3)).report.plans[0].spare_gpus == 24
    never = search(facts(reliability__failures_per_node_day=1e-9)).report
    assert never.plans[0].spare_gpus == 0
    assert without_spares(NODES, 7, "x").num_gpus == 8
    with pytest.raises(SpecError, match="at most 7"):
        without_spares(NODES, 8, "x")


@pytest.mark.parametrize(("batch", "objective"), [(840, "tokens"), (1024, "kwh")])
def test_the_number_of_spares_is_that_of_whole_searches(batch: int, objective: Objective) -> None:
    """What the closed forms and the searches around the best plans leave out is not what a search of all finds."""
    job = mofa.load_workload("llama3-8b", tokens="1T", global_batch=batch)
    nodes = mofa.load_cluster("h100-hgx", 128)
    harsh = facts(
        restart__reschedule_s="2 h", restart__repair_s="30 min", reliability__failures_per_node_day=0.05,
    )  # fmt: skip
    asked: dict[str, Any] = {
        "framework": MEGATRON, "top": 1, "objective": objective, "replay": False,
        "maximum": {"cp": 1, "pp": 2, "vpp": 1, "micro_batch": 2}, "without": ("full",), "offers": False,
    }  # fmt: skip
    found = mofa.find_long_runs(job, nodes, harsh, **asked)
    each = {}
    for spares in range(5):
        try:
            one = mofa.find_long_runs(job, nodes, harsh.model_copy(update={"spares": spares}), **asked)
        except SpecError:
            continue
        if one.report.plans:
            plan = one.report.plans[0]
            judge = LongRunObjective(job, without_spares(nodes, spares, "x"), MEGATRON, harsh, objective, spares)
            each[spares] = judge.plan_ranking_key(plan)
    best = min(each, key=each.__getitem__)
    assert found.report.plans[0].spare_gpus == 8 * best, each
    assert best == (1 if batch == 840 else 0)


def test_what_divides_is_all_that_can_run() -> None:
    """A space of what divides GPUs and batch has every legal strategy of the whole space."""
    smaller = without_spares(NODES, 1, "x")
    whole = with_first_option_set(default_space(JOB, smaller, MEGATRON))
    lean = without_indivisible_degrees(whole, smaller.num_gpus, JOB.batch.global_batch)
    legal = []
    for space in (whole, lean):
        table = combinations_table(space, smaller, MEGATRON)
        ok = np.flatnonzero(check_strategies(JobAndMachines(JOB, smaller, MEGATRON), table).reason < 0)
        legal.append({str(table.row(int(i), "megatron")) for i in ok})
    assert legal[0] == legal[1] and len(legal[0]) > 100
    assert len(lean.pp) < len(whole.pp)


def with_host_memory(num_gpus: int, host_bytes: float) -> ClusterSpec:
    host = NODES.node.host_memory_bytes.model_copy(update={"value": host_bytes})
    return NODES.model_copy(
        update={"num_gpus": num_gpus, "node": NODES.node.model_copy(update={"host_memory_bytes": host})}
    )


def test_host_memory_rejects_by_name() -> None:
    peer = facts(checkpoint__mode="peer", spares=0)
    found = mofa.find_long_runs(JOB, with_host_memory(64, 1e9), peer, framework=MEGATRON, top=2, **FIX)
    assert found.report.plans == ()
    assert found.report.rejected["host_memory"] > 0
    assert found.report.nearest_miss["host_memory"].unit == "B"


def test_as_many_gpus_as_hosts_memory_takes() -> None:
    """112 GB of states four times over need at least 45 nodes of 10 GB; two nodes' GPUs would hold them."""

    def report(num_gpus: int) -> PlanReport:
        machines, peer = with_host_memory(num_gpus, 10e9), facts(checkpoint__mode="peer", spares=0)
        return mofa.find_long_runs(JOB, machines, peer, framework=MEGATRON, top=1, replay=False, **FIX).report

    short = report(64)
    assert not short.plans and short.min_gpus is not None
    assert 45 * 8 <= short.min_gpus <= 64 * 8
    assert report(short.min_gpus).plans
    assert not report(short.min_gpus - 8).plans


def test_what_is_unknown_is_said() -> None:
    bare = FaultSpec(name="bare", source="a test")
    plan = search(bare).report.plans[0]
    assert set(plan.unknown) == set(FIGURES)
    rsc = search(load_faults("rsc-1")).report.plans[0]
    assert "no storage given" in rsc.unknown["ettr"]
    without_tokens = mofa.load_workload("llama3-8b", overrides={"tokens": None})
    judge = LongRunObjective(without_tokens, NODES, MEGATRON, facts())
    assert set(judge.unknown_figures()) == {"days", "gpu_hours", "usd", "kwh"}
    for objective in ("days", "usd", "kwh"):
        with pytest.raises(SpecError, match="not known"):
            search(bare, objective=objective)
    with pytest.raises(SpecError, match="unknown; use one of"):
        search(bare, objective="speed")


def test_no_profile_has_no_name() -> None:
    bare = load_faults(None, {"price.usd_per_gpu_hour": {"value": 2.0, "provenance": "assumed", "source": "a bill"}})
    assert search(bare).report.defaults["fault profile"] == "none with reliability"
    assert search(facts(spares=0)).report.defaults["fault profile"] == "llama3"


def test_figures_that_contradict_are_refused() -> None:
    plan = search(facts(spares=0)).report.plans[0]
    fields = {name: getattr(plan, name) for name in Plan.model_fields}
    Plan(**fields)
    with pytest.raises(ValueError, match="usd must be there exactly if it is null"):
        Plan(**{**fields, "unknown": {}})
    with pytest.raises(ValueError, match="productive share"):
        Plan(**{**fields, "ettr": 0.5})
    with pytest.raises(ValueError, match="exactly if ettr is known"):
        Plan(**{**fields, "long_run": None})
    with pytest.raises(ValueError, match="p10"):
        Days(p10=2.0, p50=1.0, p90=3.0)


def test_key_factors() -> None:
    plan = search(facts(spares=0)).report.plans[0]
    factors, ettr = ettr_sensitivities(LongRunObjective(JOB, NODES, MEGATRON, facts()), plan)
    assert {item.factor for item in factors} == set(FACTORS)
    by = {item.factor: item for item in factors}
    assert by["failure rate"].ettr_doubled < ettr < by["failure rate"].ettr_halved
    assert by["storage write rate"].ettr_halved <= ettr
    assert by["repairing nodes"].swing == 0  # nothing stands by
    assert ettr == pytest.approx(plan.ettr)


@pytest.mark.parametrize(
    ("weak", "replan", "batch"),
    [(False, False, 1024), (False, False, 480), (True, False, 480), (False, True, 480)],
)
def test_every_variant_has_the_whole_batch(weak: bool, replan: bool, batch: int) -> None:
    """What computes and what stands by are all GPUs, and every replica takes as many whole micro-batches.

    Of 8 layers where plans are searched anew, which have fewer pipelines: none of it depends on their number.
    """
    short = {"model.num_layers": 8} if replan else None
    job = mofa.load_workload("llama3-8b", tokens="1T", global_batch=batch, overrides=short)
    plan = None if replan else "tp=2 pp=4 micro_batch=2"
    scales = [32] if replan else [64, 128]
    report = goodput_by_scale(
        job, NODES, facts(spares=2), scales, MEGATRON, strategy=plan, weak=weak, replan=replan
    )  # fmt: skip
    assert [point.num_gpus for point in report.points] == scales
    for point in report.points:
        assert point.global_batch == (batch * point.num_gpus // 64 if weak else batch)
        assert list(point.variants) == [name for name, _, _ in VARIANTS]
        for name, found in point.variants.items():
            s, stands_by = found.strategy, "spares" in name
            assert found.num_gpus + 8 * found.spares == point.num_gpus
            assert found.spares >= 2 if stands_by else found.spares == 0
            assert s.tp * s.cp * s.pp * s.dp == found.num_gpus
            assert found.global_batch == point.global_batch
            assert found.global_batch % (s.micro_batch * s.dp) == 0
            if not replan:
                assert (s.tp, s.micro_batch) == (2, 2) and s.pp <= 4 and s.dp <= point.num_gpus // 8
            tokens = found.global_batch * JOB.batch.seq_len / found.step_s
            assert found.effective_tokens_per_s_per_gpu == pytest.approx(tokens * found.ettr / point.num_gpus)


def test_a_smaller_plan_shards_as_its_framework_does() -> None:
    """torchtitan keeps weights gathered under a pipeline, and shards them too without one."""
    framework = mofa.load_framework("torchtitan")
    job = mofa.load_workload("llama3-8b", tokens="1T", global_batch=512)
    point = goodput_by_scale(job, NODES, facts(), [256], framework, strategy="pp=2 recompute=full").points[0]
    assert point.strategy is not None and (point.strategy.pp, point.strategy.zero) == (2, 2)
    left = point.variants["async, spares"]
    assert (left.strategy.pp, left.strategy.dp, left.strategy.zero) == (1, 128, 3)


def test_a_scale_whose_replicas_the_batch_does_not_divide() -> None:
    job = mofa.load_workload("llama3-8b", tokens="1T", global_batch=96)
    points = goodput_by_scale(job, NODES, facts(), [64, 128, 256], MEGATRON, strategy="tp=4").points
    assert points[1].variants and not points[2].variants
    assert points[2].why is not None and "global_batch (96) must be a multiple of dp (64)" in points[2].why


@pytest.mark.parametrize(("strategy", "says"), [(None, "nothing fits 1 GPU"), ("tp=4", "must be a multiple of tp (4)")])
def test_a_scale_that_nothing_fits_says_so_beside_the_others(strategy: str | None, says: str) -> None:
    points = goodput_by_scale(JOB, NODES, facts(), [1, 64, 128], MEGATRON, strategy=strategy).points
    assert not points[0].variants and points[0].why is not None and says in points[0].why
    assert points[1].strategy is not None and points[2].strategy is not None
    assert points[2].strategy.dp == 2 * points[1].strategy.dp
    refused, words = (
        (NothingFits, r"; give more GPUs, or --replan$") if strategy is None else (StrategyError, r"tp \(4\)")
    )
    with pytest.raises(refused, match=words) as error:
        goodput_by_scale(JOB, NODES, facts(), [1, 2], MEGATRON, strategy=strategy)
    assert str(error.value).count(";") == 1


def test_replanned_variants_are_the_best_by_their_long_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way to keep checkpoints has the plan that runs best with it, not the one with the fastest step; with
    tensor-parallel overlap one plan would be both."""
    monkeypatch.setattr("mofa.search.space.searched_option_sets", lambda *_: (AS_GIVEN,))
    slow = {"value": "0.3 GB/s", "provenance": "assumed", "source": "a test"}
    harsh = facts(reliability__failures_per_node_day=100.0, storage__node_bytes_per_s=slow)
    point = goodput_by_scale(SMALL, NODES, harsh, [64], MEGATRON, replan=True).points[0]
    chosen = point.variants["blocking"]
    alone = mofa.find_long_runs(
        SMALL, NODES, harsh.model_copy(update={"spares": 0}), framework=MEGATRON, top=1, replay=False,
        closed_form_margin=False,
    ).report.plans[0]  # fmt: skip
    assert chosen.strategy == alone.strategy != point.strategy
    assert chosen.step_s > (point.step_s or 0)
    assert chosen.ettr == pytest.approx(alone.ettr)


def test_replicas_leave_in_whole_experts_groups_or_not_at_all() -> None:
    job = mofa.load_workload("deepseek-v3")
    nodes = mofa.load_cluster("h100-hgx", 2048)
    wide = goodput_by_scale(job, nodes, facts(), [2048], MEGATRON, strategy="tp=1 pp=16 ep=64 recompute=full").points[0]
    left = wide.variants["async, spares"].strategy
    assert left.ep == 64 and left.dp % 64 == 0 and left.pp * left.dp < 2048
    few = {"strategy": "tp=1 pp=1 ep=64 recompute=full"}
    small = mofa.load_workload("qwen3-30b-a3b")
    alone = goodput_by_scale(small, nodes, facts(), [64], MEGATRON, **few).points[0]  # type: ignore[arg-type]
    assert "async, spares" not in alone.variants and "async" in alone.variants
    assert alone.why is not None and "no replicas of the plan" in alone.why
    with pytest.raises(SpecError, match="--spares: with 1 of 8 nodes standing by no replicas"):
        goodput_by_scale(small, nodes, facts(spares=1), [64], MEGATRON, **few)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "strategy", "rate"),
    [
        (1024, "tp=2 pp=2 micro_batch=1", 0.3),
        (192, "tp=4 pp=2 vpp=2 micro_batch=1", 0.003),
        (320, "tp=2 micro_batch=2", 0.3),
    ],
)
def test_the_number_of_spares_pays_most(batch: int, strategy: str, rate: float) -> None:
    """What is printed without ``--spares`` is the best of what is printed with every number of them."""
    job = mofa.load_workload("llama3-8b", tokens="1T", global_batch=batch)
    changes = {"reliability__failures_per_node_day": rate, "restart__repair_s": "20 h"}

    def printed(spares: int | None) -> dict[str, VariantPoint]:
        more = changes if spares is None else {**changes, "spares": spares}
        return goodput_by_scale(job, NODES, facts(**more), [64], MEGATRON, strategy=strategy).points[0].variants

    chosen, alone = printed(None), [printed(spares) for spares in range(1, 7)]
    for name in ("async, spares", "peer replicas, spares"):
        best = max((found[name] for found in alone if name in found), key=lambda v: v.effective_tokens_per_s_per_gpu)
        assert chosen[name] == best


def test_more_spares_than_the_fewest_may_pay() -> None:
    """3.2 of 64 nodes are in repair: 4 spares wait 12 % of the time, 8 hardly ever for 7 % fewer replicas."""
    job, nodes = mofa.load_workload("llama3-70b", global_batch=1680), mofa.load_cluster("h100-hgx", 512)
    plan = {"strategy": "tp=4 pp=4 cp=2 cp_kind=allgather micro_batch=1 recompute=none"}
    often = {"reliability__failures_per_node_day": 3.2 / 64 / 0.7494, "restart__repair_s": "24 h"}

    def printed(**more: object) -> VariantPoint:
        point = goodput_by_scale(job, nodes, facts(**often, **more), [512], MEGATRON, **plan).points[0]  # type: ignore[arg-type]
        return point.variants["async, spares"]

    chosen = printed()
    assert (chosen.spares, chosen.strategy.dp) == (8, 14)
    assert chosen.ledger.waiting < 0.01
    assert waiting_share(3.2 / 86400, 86400.0, 4) == pytest.approx(0.12, abs=0.01)


def test_copies_need_nodes() -> None:
    node = mofa.load_cluster("h100-hgx", 8)
    with pytest.raises(SpecError, match=r"2 copies .* need as many nodes, not 1"):
        mofa.find_long_runs(JOB, node, facts(checkpoint__mode="peer"), framework=MEGATRON, top=1, replay=False, **FIX)
    point = goodput_by_scale(JOB, node, facts(), [8], MEGATRON, strategy="tp=2").points[0]
    assert set(point.variants) == {"blocking", "async"} and point.why is not None
    two = mofa.load_cluster("h100-hgx", 16)
    found = mofa.find_long_runs(
        JOB, two, facts(checkpoint__mode="peer", checkpoint__interval_s="1 h"), framework=MEGATRON, top=1, replay=False,
        **FIX,
    )  # fmt: skip
    assert found.report.plans[0].spare_gpus == 0


@pytest.mark.parametrize("lemons", [False, True])
def test_days_are_those_of_simulated_whole_runs(lemons: bool) -> None:
    """The plan's band against runs of the whole length that draw their failure rate, their lemons and their luck."""

    def fact(value: float) -> dict[str, object]:
        return {"value": value, "provenance": "assumed", "source": "a test"}

    some = {"reliability__lemon_fraction": fact(0.1), "reliability__lemon_multiple": fact(8.0)} if lemons else {}
    spec = facts(
        reliability__failures_per_node_day=0.8, reliability__counted_failures=50.0, checkpoint__mode="async", spares=0,
        **some,
    )  # fmt: skip
    plan = mofa.estimate_long_run(JOB, NODES, "tp=2 pp=2", spec, framework=MEGATRON, replay=False)
    judge = LongRunObjective(JOB, NODES, MEGATRON, spec)
    found = judge.outlook_of_plan(plan)
    work = float(judge.productive_run_s(np.array([plan.step_s]))[0])
    assert spec.reliability is not None
    clock = failure_clock(spec.reliability, float(found.mtbf_s[0]), judge.num_nodes)
    days = simulate_long_runs(found.run_to_simulate(0, work, clock), 2000, seed=5).wall_s / 86400
    assert plan.days is not None
    width = float(np.std(days))
    for quantile, value in ((0.1, plan.days.p10), (0.5, plan.days.p50), (0.9, plan.days.p90)):
        # errors of 2000 and of 1000 runs at the density of a bell, and what the mean of an endless run leaves out
        assert value == pytest.approx(float(np.quantile(days, quantile)), abs=3 * 2.0 * width / np.sqrt(1000))
    assert plan.days.p90 - plan.days.p10 > 0.01 * plan.days.p50
