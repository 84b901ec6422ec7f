"""What a report says of a plan besides: its roofline, changed choices, changed machines, and the nearest runs."""

from __future__ import annotations

from functools import cache
from math import log
from typing import Any

import numpy as np
import pytest

import mofa
from mofa.blocks.work import Attention, Gemm, GroupedGemm
from mofa.cost.roofline import kernel_totals_by_kind, least_bytes_of_work
from mofa.plan.result import Plan
from mofa.search.analysis.analyse import resource_changes
from mofa.search.analysis.near_runs import NEAREST, nearest_measured_runs
from mofa.search.analysis.strategy_changes import strategy_changes
from mofa.search.one_plan import plan_in_closed_form, step_s_of_strategy
from mofa.search.space import SpaceCombinations, combinations_of_space, default_space
from mofa.search.space_constraints import SpaceConstraints
from mofa.search.strategy_estimator import strategy_estimator
from mofa.specs.changed_resources import RESOURCES, cluster_with_resource
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.params import num_params
from mofa.specs.scored_runs import load_scored_runs
from mofa.specs.strategy import AS_GIVEN, StrategySpec
from mofa.specs.workload import WorkloadSpec
from tests.committed import ROOT

DENSE = "tp=2 pp=2 dp=4 micro_batch=1 recompute=selective"
MEGATRON = mofa.load_framework("megatron")


@pytest.fixture(scope="module")
def job() -> WorkloadSpec:
    return mofa.load_workload("llama3-8b", global_batch=64)


@pytest.fixture(scope="module")
def machines() -> ClusterSpec:
    return mofa.load_cluster("h100-hgx", 16)


@pytest.mark.parametrize("resource", RESOURCES)
def test_as_much_of_a_resource_changes_nothing(job: WorkloadSpec, machines: ClusterSpec, resource: str) -> None:
    same = cluster_with_resource(machines, resource, 1.0)
    steps = [step_s_of_strategy(job, on, DENSE, framework=MEGATRON, replay=False) for on in (machines, same)]
    assert steps[0] == pytest.approx(steps[1], rel=2e-5)  # rates of scaled curves have five digits


def test_more_of_a_resource_is_never_slower(job: WorkloadSpec, machines: ClusterSpec) -> None:
    framework = mofa.load_framework("megatron")
    plan = plan_in_closed_form(job, machines, DENSE, framework)
    changes = resource_changes(job, machines, framework, plan)
    assert changes[0].resource == "matrix products and attention"
    assert sorted(change.resource for change in changes) == sorted(RESOURCES)
    for change in changes:
        assert change.step_change_more <= 1e-4 and change.step_change_less >= -1e-4
        assert abs(change.step_change_less) < 1 / 0.9 - 1 + 1e-4  # none is more than all of the step


def test_a_power_limit_moves_the_clock_by_its_root(machines: ClusterSpec) -> None:
    """By hand: draws go with the square of the clock, so that 1.21 times the power gives 1.1 times the clock."""
    curves = machines.gpu.curves
    more = cluster_with_resource(machines, "power limit", 1.21).gpu
    before, after = curves.gemm["bf16"], more.curves.gemm["bf16"]
    assert before.clock < 0.9
    assert after.clock == pytest.approx(1.1 * before.clock, rel=1e-4)  # written with five digits
    assert after.form == before.form and after.full_load_flops == before.full_load_flops
    assert curves.stream_clock is not None and more.curves.stream_clock is not None
    assert more.curves.stream_clock.value == pytest.approx(1.1 * curves.stream_clock.value)
    assert more.tdp_w.value == pytest.approx(1.21 * machines.gpu.tdp_w.value)
    full = cluster_with_resource(machines, "power limit", 4.0).gpu.curves.gemm["bf16"]
    assert full.clock == full.sustained == full.alone == 1.0


def test_kernels_of_another_release_of_pytorch_change_too(job: WorkloadSpec, machines: ClusterSpec) -> None:
    """They stand in for the GPU's own after the change; they were left out once, and products seemed to buy nothing."""
    framework = mofa.load_framework("megatron", overrides={"pytorch": "2.1"})
    assert "2.1" in machines.gpu.curves.releases
    plan = mofa.estimate(job, machines, DENSE, framework=framework, replay=False)
    changes = {change.resource: change for change in resource_changes(job, machines, framework, plan)}
    assert changes["matrix products and attention"].step_change_more < -0.05
    assert changes["power limit"].step_change_more < -0.01


def test_less_memory_may_not_fit_and_more_always_does(job: WorkloadSpec, machines: ClusterSpec) -> None:
    framework = mofa.load_framework("megatron")
    plan = plan_in_closed_form(job, machines, DENSE, framework)
    full = plan.memory.model_copy(update={"device_bytes": 0.95 * plan.memory.limit_bytes})
    plan = plan.model_copy(update={"memory": full})
    changes = {change.resource: change for change in resource_changes(job, machines, framework, plan)}
    memory = changes.pop("memory capacity")
    assert (memory.fits_less, memory.fits_more) == (False, True)
    assert (memory.step_change_less, memory.step_change_more) == (0.0, 0.0)
    assert all(change.fits_less and change.fits_more for change in changes.values())


def test_products_have_the_flops_of_the_model(job: WorkloadSpec, machines: ClusterSpec) -> None:
    """Six FLOPs a parameter and token in products, two of them forward; the embedding and norms have none."""
    costs = strategy_estimator(job, machines, mofa.load_framework("megatron"), "pp=2 recompute=none").parts[0].costs
    totals = kernel_totals_by_kind(costs, job.model)
    multiplied = num_params(job.model) - job.model.vocab * job.model.hidden
    assert totals["gemm"].flops == pytest.approx(6 * multiplied * job.batch.seq_len, rel=1e-3)
    hidden, length = job.model.hidden, job.batch.seq_len
    pairs = length * (length + 1) / 2
    attention = job.model.num_layers * pairs * hidden * (4 + 10)
    assert totals["attention"].flops == pytest.approx(attention, rel=1e-3)


def test_tensor_parallel_ranks_share_the_flops(job: WorkloadSpec, machines: ClusterSpec) -> None:
    framework = mofa.load_framework("megatron")
    flops = []
    for text in ("tp=1 recompute=none", "tp=4 recompute=none"):
        costs = strategy_estimator(job, machines, framework, text).parts[0].costs
        flops.append(kernel_totals_by_kind(costs, job.model)["gemm"].flops)
    assert flops[0] == pytest.approx(4 * flops[1], rel=1e-3)  # Megatron pads the vocabulary


def test_no_kernel_is_above_its_roof() -> None:
    job, machines = mofa.load_workload("deepseek-v2-lite", global_batch=64), mofa.load_cluster("h100-hgx", 8)
    costs = strategy_estimator(job, machines, mofa.load_framework("megatron"), "ep=8 recompute=full").parts[0].costs
    totals = kernel_totals_by_kind(costs, job.model)
    assert set(totals) == {"gemm", "grouped_gemm", "attention", "memory_bound"}
    bandwidth = machines.gpu.memory_bandwidth_bytes_per_s.value
    for name in ("gemm", "grouped_gemm", "attention"):
        total = totals[name]
        assert total.flops / total.seconds < min(total.peak_flops_per_s, total.flops / total.bytes * bandwidth)


def test_bytes_are_every_operand_and_result_once() -> None:
    """By hand: elements of each, two bytes, of fp8 operands one."""
    assert least_bytes_of_work(Gemm(m=8.0, n=4.0, k=2.0, format="fp8", count=3.0)) == 3 * ((8 + 4) * 2 + 2 * 32)
    assert least_bytes_of_work(GroupedGemm(rows=16.0, groups=2.0, n=4.0, k=8.0)) == 2 * (16 * 8 + 2 * 8 * 4 + 16 * 4)
    wgrad = GroupedGemm(rows=16.0, groups=2.0, n=4.0, k=8.0, wgrad=True)
    assert least_bytes_of_work(wgrad) == 2 * (16 * (4 + 8) + 2 * 4 * 8)
    forward = Attention(batch=1.0, heads=4.0, q_len=10.0, pairs=55.0, d_qk=8.0, d_v=8.0, kv_heads=2.0)
    assert least_bytes_of_work(forward) == 2 * 10 * (4 * 16 + 2 * 16)
    assert least_bytes_of_work(object()) == 0.0


def test_single_changes_are_what_estimates_say(job: WorkloadSpec, machines: ClusterSpec) -> None:
    framework = mofa.load_framework("megatron")
    plan = plan_in_closed_form(job, machines, DENSE, framework)
    changes = strategy_changes(job, machines, framework, plan.strategy)
    assert {change.field for change in changes} == {"tp", "pp", "cp", "vpp", "micro_batch", "zero", "recompute"}
    for change in changes:
        strategy = change.strategy
        if change.refused is not None:
            with pytest.raises(mofa.SpecError):
                mofa.estimate(job, machines, strategy, framework=framework, replay=False)
            continue
        assert strategy.tp * strategy.pp * strategy.cp * strategy.dp == machines.num_gpus
        other = mofa.estimate(job, machines, strategy, framework=framework, replay=False)
        assert change.step_change == pytest.approx(other.step_s / plan.step_s - 1)
        assert change.device_bytes == other.memory.device_bytes
        assert str(getattr(strategy, change.field)) == change.value
        more = {name: other.time.exposed[name] - plan.time.exposed[name] for name in plan.time.exposed}
        if change.most_changed is not None and change.step_change:
            most = max(more, key=lambda name: more[name] * (1 if change.step_change > 0 else -1))
            assert change.most_changed == most and change.most_changed_s == pytest.approx(more[most])


def test_a_change_takes_the_best_options_that_are_searched() -> None:
    """As the search's own rows: with tp comes its overlap, which a fixed option keeps away."""
    job, cluster, framework = (
        mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 64), mofa.load_framework("megatron")
    )  # fmt: skip
    search = mofa.find_plans(job, cluster, fix={"pp": 2, "vpp": 4, "micro_batch": 1, "cp": 1}, top=1, replay=False)
    strategy = search.report.plans[0].strategy
    rows = search.table()
    assert strategy.tp == 1
    alike = rows[(rows["tp"] == 2) & (rows["schedule"] == strategy.schedule) & rows["fits"]]
    row = alike[(alike["recompute"] == strategy.recompute)]["step_s"].min()
    changes = {(c.field, c.value): c for c in strategy_changes(job, cluster, framework, strategy)}
    change = changes["tp", "2"]
    assert change.strategy.tp_overlap and change.strategy.sp and change.step_change is not None
    assert change.step_change == pytest.approx(row / search.report.plans[0].step_s - 1, abs=1e-9)
    as_given = strategy_changes(job, cluster, framework, strategy, option_sets=[AS_GIVEN])
    dearer = next(c for c in as_given if (c.field, c.value) == ("tp", "2"))
    assert dearer.step_change is not None and dearer.step_change > change.step_change


@pytest.mark.usefixtures("strategies_costed_once")
def test_what_is_fixed_is_not_changed(job: WorkloadSpec, machines: ClusterSpec) -> None:
    framework = mofa.load_framework("megatron")
    strategy = plan_in_closed_form(job, machines, DENSE, framework).strategy
    fixed: dict[str, object] = {"tp": (2, 4), "pp": 2, "micro_batch": 1, "sp": False}
    changes = strategy_changes(job, machines, framework, strategy, SpaceConstraints(fixed))
    assert {(c.field, c.value) for c in changes if c.field in fixed} == {("tp", "4")}
    assert not any(c.strategy.sp for c in changes if c.field == "tp")
    assert strategy_changes(job, machines, framework, strategy, SpaceConstraints({"dp": 4}))[0].field not in (
        "tp", "pp", "cp",
    )  # fmt: skip


_planned: dict[tuple[str, StrategySpec], Plan] = {}
"""Plans in closed form of a model's strategies on 16 GPUs."""


@pytest.fixture
def strategies_costed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cost each strategy once for all sets of constraints: what a strategy costs does not depend on them."""

    def planned(job: WorkloadSpec, cluster: ClusterSpec, strategy: StrategySpec, framework: FrameworkSpec) -> Plan:
        if (job.name, strategy) not in _planned:
            _planned[job.name, strategy] = plan_in_closed_form(job, cluster, strategy, framework)
        return _planned[job.name, strategy]

    monkeypatch.setattr("mofa.search.analysis.strategy_changes.plan_in_closed_form", planned)


@cache
def rows_of_everything(model: str) -> set[tuple[Any, ...]]:
    """All of a model's strategies on 16 GPUs, as a search enumerates them."""
    job, cluster = mofa.load_workload(model, global_batch=64), mofa.load_cluster("h100-hgx", 16)
    megatron = mofa.load_framework("megatron")
    return _rows_of(combinations_of_space(default_space(job, cluster, megatron), cluster, megatron))


@pytest.mark.parametrize("options", [
    {"maximum": {"tp": 4, "pp": 2, "micro_batch": 1}},
    {"without": ["cp", "selective", "sp", "tp_overlap"]},
    {"without": ["recompute", "vpp", "ep", "dispatcher"], "maximum": {"tp": 2}},
    {"fix": {"micro_batch": (1, 2), "zero": 1}, "without": ["full", "pp"]},
])  # fmt: skip
@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b"])
@pytest.mark.usefixtures("strategies_costed_once")
def test_changes_keep_to_the_space_that_was_searched(model: str, options: dict[str, Any]) -> None:
    """A change that could run is a row of the restricted space, or of none: no row that a constraint took away."""
    job, cluster = mofa.load_workload(model, global_batch=64), mofa.load_cluster("h100-hgx", 16)
    search = mofa.find_plans(job, cluster, top=1, replay=False, banded=False, **options)
    strategy = search.report.plans[0].strategy
    of_framework = search.framework, strategy, search.constraints, search.combinations.degrees.option_sets
    changes = strategy_changes(job, cluster, *of_framework)
    assert changes and len(changes) < len(strategy_changes(job, cluster, search.framework, strategy))
    restricted, unrestricted = _rows_of(search.combinations), rows_of_everything(model)
    for change in changes:
        row = _row_of(change.strategy)
        if change.refused is None and row in unrestricted:
            assert row in restricted, (change.field, change.value)


NAMES = ("tp", "sp", "pp", "vpp", "cp", "ep", "etp", "dp", "micro_batch", "zero")


def _rows_of(combinations: SpaceCombinations) -> set[tuple[Any, ...]]:
    """Degrees and kinds of recomputation of a search's space."""
    table = combinations.select_rows(np.arange(len(combinations)))
    kinds = np.array([mode.kind for mode in table.recompute_modes], dtype=object)[table.recompute]
    return set(zip(*(getattr(table, name).tolist() for name in NAMES), kinds.tolist(), strict=True))


def _row_of(strategy: StrategySpec) -> tuple[Any, ...]:
    return (*(getattr(strategy, name) for name in NAMES), strategy.recompute.split(":")[0])


def test_illegal_changes_say_why(job: WorkloadSpec, machines: ClusterSpec) -> None:
    strategy = StrategySpec(tp=8, dp=2, sp=True, micro_batch=32)
    changes = strategy_changes(job, machines, mofa.load_framework("megatron"), strategy)
    refused = [change for change in changes if change.refused]
    assert refused and all(change.step_change is None and len(str(change.refused)) > 10 for change in refused)


def test_torchtitan_shards_as_its_pipeline_lets_it(job: WorkloadSpec, machines: ClusterSpec) -> None:
    framework = mofa.load_framework("torchtitan")
    plan = mofa.estimate(job, machines, "dp=16 micro_batch=1 recompute=full", framework=framework, replay=False)
    changes = {
        (change.field, change.value): change for change in strategy_changes(job, machines, framework, plan.strategy)
    }
    assert changes["pp", "2"].strategy.zero == 2 and changes["pp", "2"].step_change is not None
    assert changes["tp", "2"].step_change is not None
    assert not {"selective", "0"} & {value for _, value in changes}  # it has no such modes


def test_the_nearest_runs_differ_least(job: WorkloadSpec, machines: ClusterSpec) -> None:
    runs = nearest_measured_runs(job, machines, mofa.load_framework("megatron"), 0.0)
    counts = [len(run.differs_in) for run in runs]
    assert len(runs) == NEAREST and counts == sorted(counts) and counts[0] <= 1
    for same in set(counts):
        away = [abs(log(run.num_gpus / machines.num_gpus)) for run in runs if len(run.differs_in) == same]
        assert away == sorted(away)
    assert any(run.model.startswith("llama3-8b") for run in runs)


def test_scored_runs_are_those_of_the_accuracy_page() -> None:
    """Errors as the page rounds them; what ran under a profiler is on the page alone."""
    page = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    shown = {}
    for line in page.split("## Repeats")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 13 and cells[5].endswith("%"):
            shown.setdefault(cells[0], (cells[1], cells[2], cells[5], cells[8]))
    runs = {run.id: run for run in load_scored_runs()}
    assert set(runs) == {name for name in shown if not name.endswith("-traced")}
    for name, run in runs.items():
        gpus, strategy, step, memory = shown[name]
        assert (gpus, strategy) == (f"{run.num_gpus} {run.gpu}", run.strategy)
        assert float(step.removesuffix(" %")) == pytest.approx(run.step_error * 100, abs=0.0505), name
        assert (memory == "–") == (run.memory_error is None)
