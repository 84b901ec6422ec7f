"""Kernels that are loaded: what the device waits for, where the host loses its lead; by hand, and played."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mofa.blocks.op import Op, Tape
from mofa.blocks.work import HostSync, MemoryBound
from mofa.cost.estimate import TableEstimator
from mofa.cost.kernels.lazy_loading import kernel_load_idle_s, tape_with_kernel_loads
from mofa.measure.records import read_record
from mofa.replay.replayer import Replayer
from mofa.search.job_setup import routing_loads_by_ep
from mofa.search.one_strategy import checked_strategy_row
from mofa.specs.run_files import resolve_run
from mofa.validate.routing_counts import with_routing_counts
from tests.blocks.roles import as_named

RECORDS = Path(__file__).parents[3] / "reference_runs" / "measured"
LOAD_S = 2.0


def op(name: str, loads: object = 0.0, rounds: float = 4.0) -> Op:
    return as_named(Op(name, "grouped_gemm", MemoryBound(1.0), (), (name,), kernel_loads=loads, expert_loops=rounds))  # type: ignore[arg-type]


def tape(*ops: Op) -> Tape:
    return Tape(ops, {}, (), ())


def idle(loads: float, device_s: float, host_s: float) -> float:
    found, took, _ = tape_with_kernel_loads(tape(op("a", loads)), [device_s], [host_s], LOAD_S)
    return float(kernel_load_idle_s(found, took))


def test_nothing_changes_where_nothing_is_loaded() -> None:
    given = tape(op("a"), op("b", np.zeros(3)))
    seconds, issue = [1.0, 1.0], [1.0, 1.0]
    found = tape_with_kernel_loads(given, seconds, issue, LOAD_S)
    assert found[0] is given
    assert found[1:] == (seconds, issue)


@pytest.mark.parametrize("ahead", [-3.0, 0.0, 0.5, 2.0, 5.0, 100.0])
def test_the_device_waits_for_what_the_host_s_lead_leaves_of_a_load(ahead: float) -> None:
    """The mean over where in the loop it is; a host that is late has no lead."""
    leads = np.linspace(0.0, 1.0, 100001) * max(ahead, 0.0)
    assert idle(1.0, 10.0 + ahead, 10.0) == pytest.approx(np.maximum(LOAD_S - leads, 0.0).mean(), rel=1e-3)
    assert idle(0.3, 10.0 + ahead, 10.0) == pytest.approx(0.3 * idle(1.0, 10.0 + ahead, 10.0))


def test_the_host_loses_its_lead_where_a_load_has_drained_it() -> None:
    loads = np.array([0.0, 0.01, 1.0])
    found, _, issue = tape_with_kernel_loads(tape(op("a", loads)), [4.0], [1.0], LOAD_S, drained=True)
    waits, _, loaded, _ = found.ops
    assert isinstance(waits.work, HostSync)
    assert np.asarray(waits.present).tolist() == [False, True, True]
    assert loaded.work is None
    assert issue[2] == pytest.approx(LOAD_S * loads)
    kept, _, _ = tape_with_kernel_loads(tape(op("a", loads)), [4.0], [1.0], LOAD_S)
    assert kept.ops == found.ops[1:]


def test_a_step_is_the_mean_of_passes_that_loaded_a_kernel_and_passes_that_did_not(tmp_path: Path) -> None:
    """Experts one after the other behind a head that takes the device long: the lead is worth tens of milliseconds."""
    record = read_record(RECORDS / "mc2-dp2-ep2-gptoss20b-3l-2k-skewed-third.yaml")
    workload, cluster, framework, strategy = resolve_run(with_routing_counts(record, tmp_path), RECORDS)
    row = checked_strategy_row(workload, cluster, framework, strategy)
    mixed = TableEstimator(workload, cluster.with_host_speed(1e-5), framework, row, routing_loads_by_ep(workload, row))
    mixed.rests = False  # at one clock: a shorter step's optimizer gives back a larger share
    share = float(mixed.drains[0])
    n = expected_loads(mixed)
    assert share == pytest.approx(1.0 - np.exp(-n))
    assert 0.2 < share < 0.6
    step, drained = float(mixed.breakdown().step_s[0]), float(mixed.without_host_lead.breakdown().step_s[0])
    assert not mixed.without_host_lead.drains.any()
    mixed.drains = np.zeros(1)
    kept = float(mixed.breakdown().step_s[0])
    assert drained > 1.1 * kept
    assert step == pytest.approx((1.0 - share) * kept + share * drained)
    mixed.drains = np.array([share])
    assert Replayer(mixed).replayed_time.step_s == pytest.approx(step, rel=0.05)


def expected_loads(estimator: TableEstimator) -> float:
    """By the end of a layer's loop over experts, in the mean over the layers of a pass back."""
    tapes = estimator.parts[0].costs.tapes.values()
    return max(
        sum(float(one.kernel_loads * one.mean_loops_before) for one in block.backward.ops if not one.name.endswith("~"))
        for block in tapes
    )


def test_what_is_computed_again_has_its_kernels() -> None:
    again = op("a~", 1.0)
    assert [one.name for one in tape_with_kernel_loads(tape(again), [1.0], [1.0], LOAD_S)[0].ops] == ["a~"]


def test_a_loop_loads_ahead_of_all_its_ops_and_others_ahead_of_themselves() -> None:
    ops = op("x", rounds=1.0), op("a", 0.2), op("b", 0.1), op("y", 0.3, rounds=1.0)
    found, took, _ = tape_with_kernel_loads(tape(*ops), [1.0] * 4, [1.0] * 4, LOAD_S)
    assert [one.name for one in found.ops] == ["x", "a.loads", "a.loaded", "a", "b", "y.loads", "y.loaded", "y"]
    assert float(kernel_load_idle_s(found, took)) == pytest.approx(0.6 * LOAD_S)
