"""Plans on fewer GPUs: no faster one is missed, no slower one is shown, and all say what they leave idle."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import mofa
from mofa.errors import StrategyError
from mofa.plan.result import PlanReport
from mofa.search import branch_and_bound
from mofa.search.costing import cost_all_legal_rows
from mofa.search.fewer_gpus import numbers_together
from mofa.search.fewer_gpus.faster_rows import faster_rows_on_fewer_gpus, fewer_numbers_of_gpus
from mofa.search.fewer_gpus.fewer_replicas import RowsOnAllGpus
from mofa.search.fewer_gpus.numbers_together import RowsOnFewerGpus
from mofa.search.goals import BestRowsGoal
from mofa.search.job_setup import routing_loads_by_ep
from mofa.search.legality.masks import JobAndMachines, check_strategies
from mofa.search.objective import SHORTEST_STEP, ranking_keys_and_missing_host_bytes
from mofa.search.search_result import Search
from mofa.search.space import SOLVED, StrategySpace, combinations_of_space, constrain_space, default_space
from mofa.search.workers import WorkerProcesses
from mofa.specs.hardware import ClusterSpec
from mofa.specs.model import ModelSpec
from mofa.specs.strategy import StrategySpec
from tests.cost.toy import cluster, framework, llama, mla_moe, moe_llama, workload

HEADS = {"kind": "gqa", "num_heads": 16, "num_kv_heads": 8, "head_dim": 128}
BIG = {"hidden": 2048, "vocab": 32768, "mlp": {"ffn_hidden": 8192}, "attention": HEADS}


class JobOnGpus(NamedTuple):
    """A model, a framework, GPUs, the global batch, a GPU's memory [GiB], and what of the space is searched."""

    model: ModelSpec
    framework: str
    gpus: int
    batch: int
    memory_gib: float
    maximum: dict[str, int]


PIPELINES = {"tp": 2, "cp": 2, "pp": 3, "vpp": 2, "micro_batch": 1}
MICRO_BATCHES = {"tp": 4, "cp": 1, "pp": 3, "vpp": 1, "micro_batch": 2}
EXPERTS = {"tp": 2, "cp": 1, "pp": 3, "vpp": 1, "micro_batch": 2}
DENSE_10, EXPERTS_8 = llama(num_layers=10, **BIG), moe_llama(num_layers=8, **BIG)
FEW_EXPERTS = moe_llama(num_layers=8, **BIG, moe={"num_experts": 8, "top_k": 2, "expert_hidden": 2048})
JOBS = {
    "no dp of three nodes divides the batch": JobOnGpus(DENSE_10, "megatron", 24, 16, 12.0, PIPELINES),
    "all GPUs are as fast": JobOnGpus(DENSE_10, "megatron", 24, 96, 12.0, MICRO_BATCHES),
    "every degree": JobOnGpus(DENSE_10, "megatron", 24, 96, 12.0, {"cp": 2, "vpp": 2, "micro_batch": 2}),
    "hardly any batch": JobOnGpus(DENSE_10, "megatron", 24, 3, 16.0, PIPELINES),
    "experts": JobOnGpus(FEW_EXPERTS, "megatron", 24, 16, 16.0, EXPERTS),
    "latents": JobOnGpus(mla_moe(num_layers=8), "megatron", 24, 16, 8.0, {**EXPERTS, "micro_batch": 1}),
    "torchtitan": JobOnGpus(DENSE_10, "torchtitan", 24, 32, 12.0, {**PIPELINES, "cp": 1}),
    "torchtitan with experts": JobOnGpus(EXPERTS_8, "torchtitan", 24, 16, 16.0, {**EXPERTS, "tp": 1}),
    "part of a node": JobOnGpus(DENSE_10, "megatron", 6, 4, 20.0, {**PIPELINES, "micro_batch": 2, "cp": 1}),
}  # fmt: skip
UNLIMITED = ("no dp of three nodes divides the batch", "every degree", "hardly any batch", "experts", "torchtitan",
             "part of a node")  # fmt: skip
"""One of each kind of blocks and numbers of GPUs, which are searched without a limit too; one whose siblings are so
many that bounds half too high miss some."""
TOGETHER = ("every degree", "hardly any batch", "latents", "torchtitan with experts")
"""Jobs whose numbers of GPUs are costed together under a limit; the others' are without one."""


def job_on(name: str, num_gpus: int | None = None) -> JobAndMachines:
    job = JOBS[name]
    machines = cluster(num_gpus or job.gpus, memory_gib=job.memory_gib)
    return JobAndMachines(workload(job.model, seq_len=4096, global_batch=job.batch), machines, framework(job.framework))


def searched(name: str, num_gpus: int | None = None, **options: Any) -> Search:
    job = job_on(name, num_gpus)
    return mofa.find_plans(
        job.workload, job.cluster, framework=job.framework, top=1, replay=False, banded=False,
        maximum=JOBS[name].maximum, closed_form_margin=False, **options,
    )  # fmt: skip


@cache
def on_all(name: str, num_gpus: int | None = None) -> Search | None:
    """A search that costs every row and uses all GPUs; None where none divides the batch."""
    try:
        return searched(name, num_gpus, every_row=True, without=("fewer_gpus",))
    except StrategyError:
        return None


def steps_of(search: Search | RowsOnFewerGpus | None) -> dict[StrategySpec, float]:
    """The steps of all costed rows that fit. [s]"""
    if search is None:
        return {}
    costed, key = search.costed, ranking_keys_and_missing_host_bytes(SHORTEST_STEP, search.costed)[0]
    fits = np.flatnonzero((search.reasons[costed.rows] < 0) & np.isfinite(key))
    return {costed.table.row(int(i), "megatron"): float(key[i]) for i in fits}


@pytest.mark.parametrize(
    ("name", "limited", "together"),
    [*((name, True, name in TOGETHER) for name in JOBS), *((name, False, name not in TOGETHER) for name in UNLIMITED)],
)
def test_no_faster_row_is_missed(name: str, limited: bool, together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best rows of all smaller numbers of GPUs are those of searches that cost every row there.

    Limited by the best on all GPUs, whose rows then bound their siblings, and without a limit; one number after the
    other, and ``together``.
    """
    if together:
        monkeypatch.setattr(numbers_together, "FEW_NUMBERS", 0)
    monkeypatch.setattr(branch_and_bound, "FEW_ROWS", 0)  # bounds however few rows there are, in several batches
    monkeypatch.setattr(branch_and_bound, "FIRST_DEGREES", 6)
    job, wanted, everywhere = job_on(name), 40, dict[StrategySpec, float]()
    whole = on_all(name)
    limit = min(steps_of(whole).values(), default=np.inf) if limited else np.inf
    for number in fewer_numbers_of_gpus(job.cluster):
        everywhere |= steps_of(on_all(name, number))
    expected = dict(sorted((item for item in everywhere.items() if item[1] < limit), key=lambda item: item[1])[:wanted])
    constrained = partial(_constrained, JOBS[name].maximum)
    solved = np.array([number == SOLVED for _, number in constrained(_space(job), job.cluster).recompute])
    empty = searched(name, fix={"pp": 1, "tp": 1, "cp": 1}, without=("fewer_gpus",)) if whole is None else whole
    rows = RowsOnAllGpus(job, empty.costed, empty.reasons, solved)
    goal = BestRowsGoal(SHORTEST_STEP, wanted, limit)
    found: dict[StrategySpec, float] = {}
    for some in faster_rows_on_fewer_gpus(job, constrained, goal, rows):
        found |= steps_of(some)
    assert sorted(found.values())[:wanted] == pytest.approx(sorted(expected.values()), rel=1e-9)
    assert expected.keys() <= found.keys() or len(found) >= wanted


def _constrained(maximum: dict[str, int], space: StrategySpace, machines: ClusterSpec) -> StrategySpace:
    return constrain_space(space, fix={}, maximum=maximum, with_=(), without=())


def _space(job: JobAndMachines) -> StrategySpace:
    return default_space(job.workload, job.cluster, job.framework)


MACHINES = mofa.load_cluster("h100-hgx", 88)
ODD_NODES: dict[str, Any] = {
    "fix": {"tp": 2, "cp": 1, "vpp": 1, "micro_batch": 1}, "top": 3, "offers": False,
}  # fmt: skip


@cache
def report_of(*without: str) -> PlanReport:
    """Llama 3 8B on 11 nodes: the batch leaves them pp 11 alone."""
    job = mofa.load_workload("llama3-8b", global_batch=64)
    return mofa.find_plans(job, MACHINES, replay=False, banded=False, without=without, **ODD_NODES).report


def test_plans_say_what_they_leave_idle() -> None:
    report, all_gpus = report_of(), report_of("fewer_gpus")
    best = report.plans[0]
    used = best.strategy.tp * best.strategy.pp * best.strategy.dp
    assert best.idle_gpus == 88 - used > 0 and used % 8 == 0
    assert not any(plan.idle_gpus for plan in all_gpus.plans)
    assert best.step_s < all_gpus.plans[0].step_s
    assert best.notes[0].startswith(f"uses {used} of 88 GPUs: the best plan on all takes")
    assert report.cluster.num_gpus == 88 and best.to_row()["idle_gpus"] == 88 - used
    shown = [plan for plan in report.plans if plan.idle_gpus]
    assert all(plan.step_s < all_gpus.plans[0].step_s for plan in shown)
    assert best.tokens_per_s_per_gpu == pytest.approx(64 * 8192 / best.step_s / used)
    assert PlanReport.model_validate_json(report.model_dump_json()) == report


def test_a_plan_on_fewer_gpus_is_that_of_an_estimate() -> None:
    best = report_of().plans[0]
    job, used = mofa.load_workload("llama3-8b", global_batch=64), mofa.load_cluster("h100-hgx", 88 - best.idle_gpus)
    assert mofa.estimate(job, used, best.strategy, replay=False).step_s == pytest.approx(best.step_s, rel=1e-9)


def test_all_gpus_are_paid_for() -> None:
    """A price alone ranks by steps, with GPUs idle; the run costs the time of all of them."""
    job = mofa.load_workload("llama3-8b", global_batch=64, tokens="1T")
    price = mofa.load_faults(
        None, {"price.usd_per_gpu_hour": {"value": 2.0, "provenance": "assumed", "source": "a bill"}}
    )
    best = mofa.find_long_runs(job, MACHINES, price, replay=False, **ODD_NODES).report.plans[0]
    assert best.idle_gpus > 0 and best.days_without_failures is not None
    assert best.gpu_hours == pytest.approx(best.days_without_failures * 24 * 88)


def test_numbers_are_whole_nodes() -> None:
    assert fewer_numbers_of_gpus(mofa.load_cluster("h100-hgx", 8)) == [7, 6, 5, 4, 3, 2, 1]
    assert fewer_numbers_of_gpus(mofa.load_cluster("h100-hgx", 32)) == [24, 16, 8]


def test_a_batch_that_all_gpus_cannot_divide_is_trained_on_fewer() -> None:
    job = mofa.load_workload("llama3-8b", global_batch=32)
    five = mofa.load_cluster("h100-hgx", 40)
    fixed: dict[str, Any] = {"maximum": {"pp": 2, "cp": 1, "vpp": 1}, "replay": False, "banded": False, "top": 1}
    with pytest.raises(StrategyError, match="is a multiple of no dp that 40 GPUs leave"):
        mofa.find_plans(job, five, without=("fewer_gpus",), **fixed)
    report = mofa.find_plans(job, five, **fixed).report
    assert report.plans[0].idle_gpus == 8
    assert "no plan runs and fits on all" in report.plans[0].notes[0]
    assert report.min_gpus is None and report.feasible >= 1


def test_costs_of_several_numbers_are_those_of_each() -> None:
    """Rows that are costed with those of other numbers of GPUs cost what they cost on their own: chips that differ by
    a hundredth make the slowest of many slower than that of few."""
    machines = mofa.load_cluster("h100-hgx", 64)
    assert machines.gpu.curves.chip_spread is not None
    job = mofa.load_workload("llama3-8b")
    job = job.model_copy(update={"batch": job.batch.model_copy(update={"global_batch": 7})})
    megatron = mofa.load_framework("megatron")
    legal = []
    for number in (56, 48, 32, 8):
        on_some = JobAndMachines(job, machines.model_copy(update={"num_gpus": number}), megatron)
        space = _constrained({"cp": 1, "vpp": 2, "micro_batch": 1}, _space(on_some), on_some.cluster)
        rows = combinations_of_space(space, on_some.cluster, megatron)
        verdict = check_strategies(on_some, rows)
        assert np.any(verdict.reason < 0)
        legal.append(numbers_together.LegalRowsOfGpuCount(on_some, rows, verdict.reason, verdict.shortfall))
    sets = {some.rows.degrees.option_sets for some in legal}
    assert len(sets) == 1
    together = numbers_together.cost_all_legal_rows_of_gpu_counts(legal, BestRowsGoal(SHORTEST_STEP, 10))
    for some, costed in zip(legal, together, strict=True):
        loads = routing_loads_by_ep(job, some.rows.degrees)
        verdicts = check_strategies(some.job, some.rows)
        with WorkerProcesses(1) as workers:
            own = cost_all_legal_rows(some.job, loads, some.rows, verdicts.reason, verdicts.shortfall, None, workers)
        np.testing.assert_array_equal(costed.reasons, own.reason)
        np.testing.assert_array_equal(costed.costed.rows, own.costed.rows)
        np.testing.assert_allclose(costed.costed.step_s, own.costed.step_s, rtol=1e-12)
        np.testing.assert_allclose(costed.costed.device_bytes, own.costed.device_bytes, rtol=1e-12)
