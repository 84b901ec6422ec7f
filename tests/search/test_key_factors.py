"""Key factors: plans on changed machines are those of searches there, and optimisations add up."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import mofa
from mofa.errors import NothingFits, SpecError
from mofa.plan.factor_results import FactorPlan, KeyFactors
from mofa.search.analysis.analyse import resource_changes
from mofa.search.key_factors import changed_machines
from mofa.search.key_factors.ablation import ablation
from mofa.search.key_factors.factor_search import FactorSearch, best_plan_or_refusal
from mofa.search.key_factors.optimisations import OPTIMISATIONS, why_optimisation_unavailable
from mofa.specs.changed_resources import MEMORY_CAPACITY, RESOURCES, cluster_with_resource
from mofa.specs.hardware import ClusterSpec
from mofa.specs.workload import WorkloadSpec

SMALL = {"tp": 2, "pp": 2, "vpp": 2, "cp": 1, "micro_batch": 1}
EXPERTS = {"tp": 1, "pp": 1, "vpp": 1, "cp": 1, "micro_batch": 1}


@pytest.fixture(scope="module")
def job() -> WorkloadSpec:
    return mofa.load_workload("llama3-8b", global_batch=64, tokens="1T")


@pytest.fixture(scope="module")
def machines() -> ClusterSpec:
    return mofa.load_cluster("h100-hgx", 16)


@pytest.fixture(scope="module")
def dense(job: WorkloadSpec, machines: ClusterSpec) -> KeyFactors:
    return mofa.key_factors(job, machines, maximum=SMALL)


@pytest.fixture(scope="module")
def experts() -> KeyFactors:
    """Of a model with experts, whose failures are counted."""
    job = mofa.load_workload("deepseek-v2-lite", global_batch=32, tokens="1T")
    faults = mofa.load_faults("llama3", {"spares": 0})
    fix = {"dispatcher": "alltoall"}
    return mofa.key_factors(job, mofa.load_cluster("h100-hgx", 8), faults=faults, maximum=EXPERTS, fix=fix)


@pytest.fixture
def few_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three resources alone are changed, memory among them; ``dense`` and ``experts`` change them all."""
    few = (MEMORY_CAPACITY, "matrix products and attention", "power limit")
    monkeypatch.setattr(changed_machines, "RESOURCES", {name: RESOURCES[name] for name in few})


@pytest.fixture(params=["dense", "experts"])
def factors(request: pytest.FixtureRequest) -> KeyFactors:
    factors: KeyFactors = request.getfixturevalue(request.param)
    return factors


def test_the_best_plan_is_that_of_a_search(job: WorkloadSpec, machines: ClusterSpec, dense: KeyFactors) -> None:
    plan = mofa.find_plans(job, machines, maximum=SMALL, top=1, replay=False, banded=False).report.plans[0]
    assert (dense.best.strategy, dense.best.step_s, dense.best.value) == (plan.strategy, plan.step_s, plan.step_s)
    assert dense.best.device_bytes == plan.memory.device_bytes
    assert dense.best.days == plan.days_without_failures
    assert (dense.objective, dense.value_unit, dense.computing_gpus) == ("step", "s", 16)


def test_plans_on_changed_machines_are_those_of_a_search_and_an_estimate_there(
    job: WorkloadSpec, machines: ClusterSpec, dense: KeyFactors
) -> None:
    for resource in dense.resources[:3]:
        for side in (resource.less, resource.more):
            changed = cluster_with_resource(machines, resource.resource, side.factor)
            searched = mofa.find_plans(job, changed, maximum=SMALL, top=1, replay=False, banded=False).report.plans[0]
            same = mofa.estimate(job, changed, dense.best.strategy, replay=False)
            assert side.planned_again is not None
            assert (side.planned_again.strategy, side.planned_again.step_s) == (searched.strategy, searched.step_s)
            assert (side.same_plan.step_s, side.same_plan_fits) == (same.step_s, same.memory.fits)


def test_a_report_says_the_same_of_the_same_plan(job: WorkloadSpec, machines: ClusterSpec, dense: KeyFactors) -> None:
    plan = mofa.estimate(job, machines, dense.best.strategy, replay=False)
    reported = {each.resource: each for each in resource_changes(job, machines, mofa.load_framework("megatron"), plan)}
    for resource in dense.resources:
        change = reported.pop(resource.resource)
        assert dense.change_from_best_plan(resource.less.same_plan) == pytest.approx(change.step_change_less, abs=1e-12)
        assert dense.change_from_best_plan(resource.more.same_plan) == pytest.approx(change.step_change_more, abs=1e-12)
        assert (resource.less.same_plan_fits, resource.more.same_plan_fits) == (change.fits_less, change.fits_more)
    assert reported == {}


def test_a_search_is_never_worse_than_the_same_plan(factors: KeyFactors) -> None:
    assert sorted(resource.resource for resource in factors.resources) == sorted(RESOURCES)
    for resource in factors.resources:
        for side in (resource.less, resource.more):
            if side.same_plan_fits:
                assert side.planned_again is not None
                assert side.planned_again.value <= side.same_plan.value * (1 + 1e-12)
            assert side.is_other_plan == (side.planned_again is not None
                                          and side.planned_again.strategy != factors.best.strategy)  # fmt: skip


def test_more_of_anything_is_never_slower_and_less_never_faster(factors: KeyFactors) -> None:
    for resource in factors.resources:
        more, less = resource.more.planned_again, resource.less.planned_again
        assert more is not None and more.value <= factors.best.value * (1 + 1e-12), resource.resource
        assert less is None or less.value >= factors.best.value * (1 - 1e-12), resource.resource


def test_the_strongest_resource_comes_first(factors: KeyFactors) -> None:
    swings = [resource.relative_swing(factors.best.value) for resource in factors.resources]
    assert swings == sorted(swings, reverse=True)


def test_more_memory_drops_no_plan(job: WorkloadSpec, machines: ClusterSpec) -> None:
    """What fits with some memory fits with more, row by row."""
    fitting = []
    for factor in (0.9, 1.0, 1.1):
        changed = cluster_with_resource(machines, MEMORY_CAPACITY, factor)
        search = mofa.find_plans(job, changed, maximum=SMALL, replay=False, every_row=True, without=["fewer_gpus"])
        table = search.table()
        table = table[table["fits"] & ~table["recompute"].str.startswith("full:")]  # full:n solves for other numbers
        names = [name for name in table.columns if name not in ("fits", "device_bytes", "allocated_bytes")]
        fitting.append({tuple(map(str, row)) for row in table[names].itertuples(index=False)})
    assert fitting[0] < fitting[1] < fitting[2]


def values(plans: list[FactorPlan | None]) -> list[float]:
    return [float("inf") if plan is None else plan.value for plan in plans]


def test_optimisations_that_are_added_up_never_slow_down(factors: KeyFactors) -> None:
    reached = values([factors.without_optimisations, *(row.added_up for row in factors.ablation)])
    assert reached == sorted(reached, reverse=True)
    assert reached[-1] < reached[0]
    for row, added in zip(factors.ablation, reached[1:], strict=True):
        (alone,) = values([row.alone])
        assert alone <= reached[0] and added <= alone * (1 + 1e-12)


def test_without_words_all_optimisations_are_the_best_plan(dense: KeyFactors) -> None:
    rows = {row.optimisation: row for row in dense.ablation}
    assert list(rows) == [
        "sequence parallelism", "interleaving", "recomputation", "overlap of communication", "fp8 products",
    ]  # fmt: skip
    everything = rows["overlap of communication"].added_up
    assert everything is not None and everything.value <= dense.best.value
    assert everything.value == pytest.approx(dense.best.value, rel=1e-4)  # overlap may cost what its copies take
    assert [name for name, row in rows.items() if row.changes_numerics] == ["fp8 products"]


def test_rows_are_searches_with_the_switches_of_the_search(
    job: WorkloadSpec, machines: ClusterSpec, dense: KeyFactors
) -> None:
    off = {"overlap_grad_reduce": False, "overlap_param_gather": False}
    framework = mofa.load_framework("megatron", overrides=off)
    rows = {row.optimisation: row for row in dense.ablation}

    def step_s(*without: str) -> float:
        search = mofa.find_plans(
            job, machines, framework=framework, maximum=SMALL, top=1, replay=False, banded=False,
            without=["fewer_gpus", *without],
        )  # fmt: skip
        return search.report.plans[0].step_s

    assert dense.without_optimisations is not None
    assert dense.without_optimisations.step_s == step_s("sp", "vpp", "recompute", "tp_overlap")
    recomputing, interleaved = rows["recomputation"], rows["interleaving"]
    assert recomputing.alone is not None and recomputing.added_up is not None and interleaved.added_up is not None
    assert recomputing.alone.step_s == min(step_s("sp", "vpp", "tp_overlap"), dense.without_optimisations.step_s)
    assert interleaved.added_up.step_s == min(
        step_s("recompute", "tp_overlap", *off) for off in ((), ("vpp",), ("sp", "vpp"))
    )


def test_what_cannot_be_taken_out_says_why() -> None:
    job = mofa.load_workload("deepseek-v2-lite", global_batch=32)
    search = FactorSearch(job, mofa.load_cluster("h100-hgx", 8), mofa.load_framework("megatron"))
    notes = {each.name: why_optimisation_unavailable(each, search) for each in OPTIMISATIONS}
    assert notes.pop("MicroMoE") == "routing is balanced: there is nothing to balance"
    assert set(notes.values()) == {""}
    asked = dataclasses.replace(
        search, fix={"recompute": "full"}, with_=("fp8-blockwise", "token_chunks"), without=("sp",)
    )
    notes = {each.name: why_optimisation_unavailable(each, asked) for each in OPTIMISATIONS}
    assert notes["recomputation"] == "as --fix recompute has it"
    assert notes["fp8 products"] == "--with fp8-blockwise is in every plan"
    assert notes["token chunks"] == "--with token_chunks is in every plan"
    assert notes["sequence parallelism"] == "--without sp takes it out"
    both = dataclasses.replace(search, without=("full", "selective"))
    notes = {each.name: why_optimisation_unavailable(each, both) for each in OPTIMISATIONS}
    assert notes["recomputation"] == "--without full --without selective take it out"
    for word in ("full", "selective"):
        kept = dataclasses.replace(search, without=(word,))
        assert not why_optimisation_unavailable(
            next(each for each in OPTIMISATIONS if each.name == "recomputation"), kept
        )
    on_pytorch = dataclasses.replace(search, framework=mofa.load_framework("torchtitan"))
    notes = {each.name: why_optimisation_unavailable(each, on_pytorch) for each in OPTIMISATIONS}
    assert notes["overlap of communication"] == "torchtitan always overlaps"
    only_its_own = dataclasses.replace(both, framework=mofa.load_framework("torchtitan"))  # it has ops and every
    notes = {each.name: why_optimisation_unavailable(each, only_its_own) for each in OPTIMISATIONS}
    assert notes["recomputation"] == ""


def test_micro_moe_brings_time_where_routing_is_uneven() -> None:
    """Its row is what searches with and without its word say; under balanced routing it has nothing to do."""
    job = mofa.load_workload("deepseek-v2-lite", global_batch=64, overrides={"routing": {"kind": "zipf", "s": 1.2}})
    machines = mofa.load_cluster("h100-hgx", 8)
    fix = {"tp": 1, "cp": 1, "pp": 1, "micro_batch": 4, "etp": 1, "recompute": "full", "dispatcher": "alltoall"}
    study = FactorSearch(job, machines, mofa.load_framework("megatron"), fix=fix)
    best = study.best_plan()
    assert best is not None
    added = ablation(study, best, lambda searches: [best_plan_or_refusal(search) for search in searches])
    rows = {row.optimisation: row for row in added.rows}
    row = rows["MicroMoE"]
    assert row.note == "" and row.alone is not None and row.alone.strategy.balancing == "micro_moe"
    without = ["fewer_gpus", "tp_overlap"]
    off = {"overlap_grad_reduce": False, "overlap_param_gather": False}
    framework = mofa.load_framework("megatron", overrides=off)

    def step_s(*words: str) -> float:
        search = mofa.find_plans(
            job, machines, framework=framework, fix=fix, without=without, with_=words, top=1, replay=False, banded=False
        )
        return search.report.plans[0].step_s

    assert row.alone.step_s == step_s("micro_moe") < 0.9 * step_s()
    assert row.added_up is not None and rows["token chunks"].added_up is not None
    assert row.added_up.step_s < 0.99 * rows["token chunks"].added_up.step_s
    assert row.added_up.strategy.balancing == "micro_moe"


@pytest.mark.parametrize(
    ("options", "notes"),
    [
        ({"fix": {"pp": 1}}, {"interleaving": "needs pp above 1: --fix pp=1"}),
        ({"maximum": {"pp": 1}}, {"interleaving": "needs pp above 1: --max pp=1"}),
        ({"maximum": {"vpp": 1}}, {"interleaving": "needs vpp above 1: --max vpp=1"}),
        ({"fix": {"schedule": "1f1b"}}, {"interleaving": "needs vpp above 1: --fix schedule=1f1b"}),
        ({"without": ("tp",)}, {"sequence parallelism": "needs tp above 1: --without tp"}),
        ({"fix": {"tp": (1, 2)}, "maximum": {"pp": 2}}, {}),
        ({"fix": {"cp": 1, "tp": 2, "dp": 8}}, {"interleaving": "needs pp above 1: --fix tp=2 --fix dp=8 on 16 GPUs"}),
        ({"fix": {"cp": 1, "tp": 2, "dp": (4, 8)}}, {}),
        ({"maximum": {"ep": 1}},
         dict.fromkeys(("expert overlap", "MicroMoE"), "needs ep above 1: --max ep=1")),
    ],
)  # fmt: skip
def test_options_that_leave_an_optimisation_nothing_to_do_are_said(
    options: dict[str, Any], notes: dict[str, str]
) -> None:
    job = mofa.load_workload("deepseek-v2-lite", global_batch=32)
    search = FactorSearch(job, mofa.load_cluster("h100-hgx", 16), mofa.load_framework("megatron"), **options)
    given = {each.name: why_optimisation_unavailable(each, search) for each in OPTIMISATIONS}
    if "MicroMoE" not in notes:
        assert given.pop("MicroMoE").startswith("routing is balanced")
    assert {name: note for name, note in given.items() if note} == notes


def test_an_objective_needs_what_it_is_known_from(job: WorkloadSpec, machines: ClusterSpec) -> None:
    price = mofa.load_faults(
        None, {"price.usd_per_gpu_hour": {"value": 2.0, "provenance": "assumed", "source": "a bill"}}
    )
    for faults in (None, price):
        with pytest.raises(SpecError, match=r"^--objective kwh: needs failures, storage and tokens; give --faults"):
            mofa.key_factors(job, machines, faults=faults, objective="kwh")
    for faults in (None, mofa.load_faults("llama3")):
        with pytest.raises(SpecError, match=r"^objective: 'nonsense' is unknown; use one of tokens, days, usd, kwh$"):
            mofa.key_factors(job, machines, faults=faults, objective="nonsense")  # type: ignore[arg-type]


def test_failures_make_wall_clock_time_of_steps(experts: KeyFactors) -> None:
    assert (experts.objective, experts.faults, experts.spare_nodes) == ("wall-clock time of a step", "llama3", 0)
    for resource in experts.resources:
        for plan in (resource.less.same_plan, resource.more.planned_again):
            assert plan is not None and plan.ettr is not None and plan.days is not None
            assert plan.value == pytest.approx(plan.step_s / plan.ettr)


def test_stages_say_where_a_played_step_goes(factors: KeyFactors) -> None:
    assert len(factors.stages) == factors.best.strategy.pp
    for stage in factors.stages:
        assert sum(stage.exposed.values()) == pytest.approx(factors.played_step_s)
        assert stage.exposed[stage.bottleneck] == max(
            stage.exposed[name] for name in ("recompute", "host_idle", "tp", "cp", "ep", "pp", "dp", "bubble")
        )
    assert max(stage.device_bytes or 0 for stage in factors.stages) == pytest.approx(factors.best.device_bytes)


@pytest.mark.usefixtures("few_resources")
def test_processes_change_nothing(job: WorkloadSpec, machines: ClusterSpec) -> None:
    one = {"tp": 2, "pp": 1, "cp": 1, "micro_batch": 1, "recompute": "none"}
    alike = [mofa.key_factors(job, machines, fix=one, optimisations=False, jobs=jobs) for jobs in (1, 2)]
    assert alike[0] == alike[1] and alike[0].ablation == ()


@pytest.mark.usefixtures("few_resources")
def test_played_plans_are_those_of_estimates(machines: ClusterSpec) -> None:
    job = mofa.load_workload("llama3-8b", global_batch=16, overrides={"model.num_layers": 4})
    one = {"tp": 2, "pp": 2, "vpp": 1, "cp": 1, "micro_batch": 1, "zero": 1, "recompute": "full"}
    framework = mofa.load_framework("megatron")
    factors = mofa.key_factors(
        job, machines, framework=framework, fix=one, without=["tp_overlap", "overlap_param_gather"], replay=True,
        optimisations=False,
    )  # fmt: skip
    assert factors.costed_by == "replay"
    assert factors.best.step_s == pytest.approx(mofa.estimate(job, machines, factors.best.strategy).step_s)
    for resource in factors.resources:
        assert resource.more.planned_again is not None and resource.less.planned_again is not None
        assert resource.more.planned_again.step_s <= factors.best.step_s * (1 + 1e-12)
        assert resource.more.planned_again.step_s == resource.more.same_plan.step_s


@pytest.mark.usefixtures("few_resources")
def test_gpus_that_the_best_plan_leaves_idle_are_paid_for() -> None:
    """40 GPUs do not divide the batch: fewer compute, in all plans of the study."""
    job, machines = mofa.load_workload("llama3-8b", global_batch=32, tokens="1T"), mofa.load_cluster("h100-hgx", 40)
    small = {"tp": 2, "pp": 1, "cp": 1, "vpp": 1, "micro_batch": 1}
    plan = mofa.find_plans(job, machines, maximum=small, top=1, replay=False, banded=False).report.plans[0]
    price = mofa.load_faults(
        None, {"price.usd_per_gpu_hour": {"value": 2.0, "provenance": "assumed", "source": "a bill"}}
    )
    factors = mofa.key_factors(job, machines, maximum=small, faults=price, optimisations=False)
    assert factors.computing_gpus == 40 - plan.idle_gpus < 40
    assert (factors.idle_gpus, factors.idle_note) == (plan.idle_gpus, plan.notes[0])
    assert (factors.best.strategy, factors.best.step_s) == (plan.strategy, plan.step_s)
    assert factors.best.days is not None and (factors.objective, factors.faults) == ("step", None)
    assert factors.best.usd == pytest.approx(factors.best.days * 24 * 40 * 2.0)


@pytest.mark.usefixtures("few_resources")
def test_where_nothing_fits_rows_say_so(job: WorkloadSpec) -> None:
    """34 GiB hold plans that recompute, with a tenth less none at all; 44 GiB one that splits sequences."""
    tight = mofa.load_cluster("h100-hgx", 8, overrides={"gpu.capacity_bytes": "34 GiB"})
    small = {"tp": 4, "pp": 1, "vpp": 1, "cp": 1, "micro_batch": 1}
    factors = mofa.key_factors(job, tight, maximum=small)
    rows = {row.optimisation: row for row in factors.ablation}
    assert factors.without_optimisations is None and rows["sequence parallelism"].added_up is None
    assert rows["recomputation"].added_up is not None and rows["overlap of communication"].alone is None
    memory = factors.resources[0]
    assert (memory.resource, memory.relative_swing(factors.best.value)) == (MEMORY_CAPACITY, float("inf"))
    assert memory.less.planned_again is None and not memory.less.same_plan_fits and not memory.less.is_other_plan
    assert factors.change_from_best_plan(None) is None
    tiny = mofa.load_cluster("h100-hgx", 8, overrides={"gpu.capacity_bytes": "12 GiB"})
    with pytest.raises(NothingFits, match=r"nothing fits; .* GPUs would do"):
        mofa.key_factors(job, tiny, fix={"tp": 2})
