"""Balanced steps: what scheduling costs and gains, where it is legal, and what the search makes of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import mofa
from mofa.cost.block.routing_loads import LoadsWithTokenScheduling, RoutingLoads
from mofa.cost.estimate import estimate_table
from mofa.errors import SpecError, StrategyError
from mofa.routing.balance.setup import BalanceSetup
from mofa.routing.rank_load import routing_loads
from mofa.routing.scheduled import loads_with_token_scheduling, token_scheduling_host_s
from mofa.search.experts.balance import balance_experts
from mofa.search.experts.balanced_step import balance_report_with_step, scheduled_replica_setup
from mofa.search.one_strategy import checked_strategy_row
from mofa.specs.optimizers import OptimizerTraits
from mofa.specs.routing import RoutingSpec
from mofa.specs.workload import WorkloadSpec

JOB = mofa.load_workload("mixtral-8x7b", overrides={"routing.kind": "zipf", "routing.s": 0.8})
CLUSTER = mofa.load_cluster("h100-hgx", 32)
MEGATRON = mofa.load_framework("megatron")
STRATEGY = "pp=4 ep=4 micro_batch=1"


def step_s(strategy: str, loads: RoutingLoads) -> float:
    row = checked_strategy_row(JOB, CLUSTER, MEGATRON, strategy)
    return float(estimate_table(JOB, CLUSTER, MEGATRON, row, loads).step_s[0])


def test_the_host_waits_for_every_schedule_of_the_slowest_stage() -> None:
    """8 layers a stage, 32 micro-batches a rank (256 over dp 8): what the host computes comes on top, in full, and once
    more for each of the pp - 1 micro-batches of the bubble."""

    def given(host_s: float) -> RoutingLoads:
        return RoutingLoads({}, {}, {4: LoadsWithTokenScheduling(1.0, 1.0, 1.0, host_s)})

    slow, slower = (step_s(f"{STRATEGY} balancing=micro_moe", given(h)) for h in (2e-3, 3e-3))
    assert slower - slow == pytest.approx(1e-3 * 8 * (32 + 3), rel=0.02)


def test_played_out_the_host_is_waited_for_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """A millisecond more of scheduling lengthens a played step as it does the closed form's: 8 layers of 32 + 3
    micro-batches."""
    balanced = f"{STRATEGY} balancing=micro_moe"
    before = mofa.estimate(JOB, CLUSTER, balanced)
    monkeypatch.setattr(
        "mofa.routing.scheduled.token_scheduling_host_s", lambda *given: token_scheduling_host_s(*given) + 1e-3
    )
    after = mofa.estimate(JOB, CLUSTER, balanced)
    assert after.step_s - before.step_s == pytest.approx(1e-3 * 8 * (32 + 3), rel=0.02)
    closed = mofa.estimate(JOB, CLUSTER, balanced, replay=False)
    assert after.step_s == pytest.approx(closed.step_s, rel=0.01)


def test_without_skew_scheduling_only_costs() -> None:
    balanced = RoutingLoads({}, {}, {4: LoadsWithTokenScheduling(1.0, 1.0, 1.0, 0.4e-3)})
    assert step_s(f"{STRATEGY} balancing=micro_moe", balanced) > step_s(STRATEGY, balanced)


def test_loads_of_the_search_are_the_densities() -> None:
    plain = routing_loads(JOB.routing, JOB.model, [2, 4, 8])
    loads = loads_with_token_scheduling(plain, JOB.routing, JOB.model, [1, 2, 4, 8])
    assert set(loads.scheduled_over_replicas) == {2, 4}  # ep 1 exchanges nothing, ep 8 leaves one expert a GPU
    for ep, load in loads.scheduled_over_replicas.items():
        assert 1.0 <= load.slowest_rows_over_mean <= plain.slowest_rows_over_mean[ep]
        assert load.slowest_rows_over_mean <= load.quantile_rows_over_mean <= plain.quantile_rows_over_mean[ep]
    even = loads_with_token_scheduling(RoutingLoads({}, {}), RoutingSpec(), JOB.model, [4]).scheduled_over_replicas[4]
    assert even.slowest_rows_over_mean == even.quantile_rows_over_mean == pytest.approx(1.0)
    assert even.sent_bytes_over_mean == pytest.approx(
        (1 - 1 / 4) / (1 - 1 / 8)
    )  # a quarter of the tokens is for the own experts


def test_the_step_before_and_after() -> None:
    experts, gpus, ep = scheduled_replica_setup(JOB, CLUSTER, MEGATRON, STRATEGY)
    assert (experts, gpus, ep) == (8, 8, 4)
    report = balance_report_with_step(
        JOB, CLUSTER, STRATEGY, BalanceSetup(experts, gpus, ep), framework=MEGATRON, micro_batches=4
    )
    step = report.step
    assert step is not None
    assert step.balanced_s < step.after_s < step.before_s
    assert step.gain_fraction == pytest.approx(step.before_s / step.after_s - 1)
    assert step.after_bytes < step.before_bytes
    assert report.group.layers == 32 and len(report.layers) == 32
    assert report.max_over_mean["plain"] > report.max_over_mean["micro_moe"] >= report.max_over_mean["lower_bound"]
    # popular experts stay: placements follow them, and moving them pays
    assert step.balanced_s < step.adaptive_s < step.after_s and step.capacity_s < step.eplb_s < step.before_s
    assert report.adaptive.migration_s is not None and step.payback_steps is not None
    assert step.payback_steps == pytest.approx(report.adaptive.migration_s / (step.after_s - step.adaptive_s))


def test_states_that_move_are_those_of_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an optimizer of one moment, as of moments in bf16, 2 B of weights and 8 / 2 B of states a parameter, not
    12 / 2."""

    def migration_s(job: WorkloadSpec) -> float:
        report = balance_report_with_step(
            job, CLUSTER, STRATEGY, BalanceSetup(8, 8, 4), framework=MEGATRON, micro_batches=3
        )
        assert report.adaptive.migration_s is not None
        return report.adaptive.migration_s

    adam_s = migration_s(JOB)
    narrow = JOB.model_copy(update={"precision": JOB.precision.model_copy(update={"moments": "bf16"})})
    assert migration_s(narrow) / adam_s == pytest.approx((2 + 8 / 2) / (2 + 12 / 2))
    monkeypatch.setattr("mofa.specs.workload.OPTIMIZERS", {"adamw": OptimizerTraits(("moments",))})
    assert migration_s(JOB) / adam_s == pytest.approx((2 + 8 / 2) / (2 + 12 / 2))


def test_the_cost_of_moving_experts_by_hand() -> None:
    """Mixtral: 3 x 4096 x 14336 parameters an expert, 2 B of weights and 12 / 2 B of states each; 8 layers of a stage
    over NVLink, by the replicas that the busiest GPU received, on average."""
    setup = BalanceSetup(8, 8, 4)
    report = balance_report_with_step(JOB, CLUSTER, STRATEGY, setup, framework=MEGATRON, micro_batches=3)
    replica = 3 * 4096 * 14336 * (2 + 12 / 2)
    assert report.adaptive.migration_s is not None
    moved = report.adaptive.migration_s * CLUSTER.node.intra.bandwidth_bytes_per_s.value / (replica * 8)
    assert report.adaptive.new_placements == 32 and 1 <= moved <= setup.experts_per_gpu
    assert moved * 32 == pytest.approx(round(moved * 32))


def test_the_search_takes_scheduling_where_it_pays_and_only_if_asked() -> None:
    fixed = {"tp": 1, "pp": 4, "ep": 4, "cp": 1, "micro_batch": 1}
    without = mofa.find_plans(JOB, CLUSTER, fix=fixed, top=1, replay=False, banded=False).report
    with_ = mofa.find_plans(JOB, CLUSTER, fix=fixed, top=1, with_=["micro_moe"], replay=False, banded=False).report
    assert without.plans[0].strategy.balancing == "none"
    assert with_.plans[0].strategy.balancing == "micro_moe"
    assert any(note.startswith("balancing micro_moe: 344") for note in with_.plans[0].notes)
    assert with_.plans[0].step_s < without.plans[0].step_s
    assert with_.space == 2 * without.space


@pytest.mark.parametrize(
    ("strategy", "framework"),
    [
        ("pp=4 ep=8", "megatron"),  # one EP group, one expert a GPU
        ("pp=4 ep=1", "megatron"),
        ("pp=8 ep=4", "megatron"),  # dp 4: one EP group
        ("pp=4 ep=4", "torchtitan"),
    ],
)
def test_where_the_prerequisites_fail(strategy: str, framework: str) -> None:
    facts = mofa.load_framework(framework)
    assert checked_strategy_row(JOB, CLUSTER, facts, strategy) is not None
    with pytest.raises(StrategyError, match="balancing micro_moe needs"):
        checked_strategy_row(JOB, CLUSTER, facts, f"{strategy} balancing=micro_moe")


def test_dense_models_and_doubled_words_are_refused() -> None:
    with pytest.raises(SpecError, match="has no experts"):
        scheduled_replica_setup(mofa.load_workload("llama3-8b"), CLUSTER, MEGATRON, "tp=2")
    with pytest.raises(SpecError, match="balancing is costed both ways"):
        scheduled_replica_setup(JOB, CLUSTER, MEGATRON, f"{STRATEGY} balancing=none")


def test_dropping_and_scheduling_exclude_each_other() -> None:
    dropping = JOB.model_copy(update={"routing": JOB.routing.model_copy(update={"capacity_factor": 1.0})})
    with pytest.raises(SpecError, match="balancing micro_moe drops no tokens"):
        mofa.estimate(dropping, CLUSTER, f"{STRATEGY} balancing=micro_moe", replay=False)
    with pytest.raises(SpecError, match="dropping is a baseline here"):
        balance_report_with_step(
            dropping, CLUSTER, STRATEGY, BalanceSetup(8, 8, 4), framework=MEGATRON, micro_batches=1
        )


def test_the_table_keeps_its_column() -> None:
    row = checked_strategy_row(JOB, CLUSTER, MEGATRON, f"{STRATEGY} balancing=micro_moe")
    assert row.row(0, "megatron").balancing == "micro_moe"
    assert replace(row, balancing=np.array([0])).row(0, "megatron").balancing == "none"


def test_experts_alone() -> None:
    report = balance_experts(BalanceSetup(32, 8, 4), RoutingSpec(kind="zipf", s=0.9), micro_batches=5)
    assert report.step is None and report.group.name == "experts" and report.group.assignments == 65_536
    assert report.max_over_mean["micro_moe"] == pytest.approx(report.max_over_mean["lower_bound"], abs=8 / 65_536)
    with pytest.raises(SpecError, match=r"assignments \(10\)"):
        balance_experts(BalanceSetup(32, 8, 4), RoutingSpec(), assignments=10)


def test_searching_for_token_scheduling_changes_no_other_plan() -> None:
    """It dropped the experts' shares once: under ``--with micro_moe`` plans without it lost their kernel selection."""
    job = mofa.load_workload("deepseek-v2-lite", global_batch=64, overrides={"routing": {"kind": "zipf", "s": 1.2}})
    machines, fix = mofa.load_cluster("h100-hgx", 8), {"tp": 1, "cp": 1, "pp": 1, "micro_batch": 4, "recompute": "full"}
    tables = [
        mofa.find_plans(job, machines, fix=fix, with_=words, top=1, replay=False, banded=False, every_row=True).table()
        for words in ([], ["micro_moe"])
    ]
    alone, beside = (table[table["balancing"] == "none"].reset_index(drop=True) for table in tables)
    assert len(tables[1]) > len(beside) == len(alone) > 3
    assert beside.equals(alone)
    loads = routing_loads(job.routing, job.model, [4, 8])
    scheduled = loads_with_token_scheduling(loads, job.routing, job.model, [4])
    assert replace(scheduled, scheduled_over_replicas={}) == loads and scheduled.scheduled_over_replicas
