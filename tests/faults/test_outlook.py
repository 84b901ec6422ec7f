"""From facts to expectations, against the simulation of the same facts, and their invariants."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mofa.cost.checkpoint import CheckpointTimes, checkpoint_times
from mofa.errors import SpecError
from mofa.faults.closed_forms.renewal import renewal_ettr
from mofa.faults.ledger import PARTS, Ledger
from mofa.faults.outlook import failure_clock, failures_per_node_day, long_run_outlook
from mofa.faults.simulate import simulate_long_runs
from mofa.specs.faults import CHECKPOINT_MODES, FaultSpec
from mofa.specs.load import load_cluster, load_faults

CLUSTER = load_cluster("h100-hgx", 16384)


def facts(mode: str = "blocking", **changes: Any) -> FaultSpec:
    return load_faults("llama3", {"checkpoint.mode": mode, "storage.write_bytes_per_s": "100 GB/s", **changes})


def failing(spec: FaultSpec, rate: float) -> FaultSpec:
    """The profile with another rate, which may be the limit of none that no profile may name."""
    assert spec.reliability is not None and spec.reliability.failures_per_node_day is not None
    fact = spec.reliability.failures_per_node_day.model_copy(update={"value": rate})
    return spec.model_copy(update={"reliability": spec.reliability.model_copy(update={"failures_per_node_day": fact})})


def times_of(spec: FaultSpec, per_rank: Any = 0.35e9) -> CheckpointTimes:
    assert spec.storage is not None
    return checkpoint_times(np.atleast_1d(np.asarray(per_rank, float)), 5.7e12, CLUSTER, spec.storage, spec.checkpoint)


@pytest.mark.parametrize("mode", CHECKPOINT_MODES)
@pytest.mark.parametrize("spares", [None, 40])
def test_expectations_are_what_the_simulation_finds(mode: str, spares: int | None) -> None:
    spec = facts(mode)
    found = long_run_outlook(spec, times_of(spec), 20.0, 16384, 2048, 8, spares=spares)
    run = found.run_to_simulate(0, 120 * 86400.0)
    played = simulate_long_runs(run, 300, seed=1)
    # a run begins and ends, which an endless one does not
    assert played.ettr == pytest.approx(float(found.ettr[0]), abs=4 * played.standard_error + 2e-4)
    ledger = played.ledger()
    for part in PARTS:
        assert getattr(ledger, part) == pytest.approx(float(found.parts[part][0]), abs=4e-3)


@pytest.mark.parametrize("mode", CHECKPOINT_MODES)
def test_a_table_is_its_rows(mode: str) -> None:
    spec, per_rank, step = facts(mode), np.array([0.2e9, 0.35e9, 2e9]), np.array([5.0, 20.0, 31.0])
    together = long_run_outlook(spec, times_of(spec, per_rank), step, 16384, 2048, 8, spares=10)
    for i in range(3):
        alone = long_run_outlook(spec, times_of(spec, per_rank[i]), step[i], 16384, 2048, 8, spares=10)
        assert alone.ettr[0] == pytest.approx(float(together.ettr[i]), rel=1e-12)
        assert alone.interval_s[0] == together.interval_s[i]


@settings(max_examples=25, deadline=None)
@given(
    mode=st.sampled_from(CHECKPOINT_MODES), per_rank=st.floats(1e6, 5e10), step=st.floats(0.1, 100.0),
    nodes=st.integers(2, 16384), spares=st.none() | st.integers(0, 100), rate=st.floats(0.0, 0.05),
)  # fmt: skip
def test_the_ledger_closes_whatever_the_facts(
    mode: str, per_rank: float, step: float, nodes: int, spares: int | None, rate: float
) -> None:
    spec = failing(facts(mode), rate)
    found = long_run_outlook(spec, times_of(spec, per_rank), step, 8 * nodes, nodes, 8, spares=spares, work_s=1e7)
    ledger = Ledger(**{name: float(found.parts[name][0]) for name in PARTS})
    assert 0 <= ledger.productive <= 1
    steps = float(found.interval_s[0]) / step
    assert steps == pytest.approx(round(steps)) and steps >= 1
    if rate == 0:
        assert ledger.lost == pytest.approx(0, abs=1e-12)
        assert ledger.restart == ledger.waiting == 0
    more = long_run_outlook(
        spec, times_of(spec, per_rank), step, 8 * nodes + 8, nodes + 1, 8, spares=spares, work_s=1e7
    )
    if mode == "blocking":
        assert more.ettr[0] <= found.ettr[0] * (1 + 1e-3)  # intervals are whole steps


def test_better_machinery_never_loses() -> None:
    modes = {mode: float(long_run_outlook(facts(mode), times_of(facts(mode)), 20.0, 16384, 2048, 8).ettr[0])
             for mode in CHECKPOINT_MODES}  # fmt: skip
    assert modes["blocking"] < modes["async"] < modes["memory"] < modes["peer"]


def test_no_failures_and_nothing_to_save() -> None:
    spec = failing(facts(), 0.0)
    still = long_run_outlook(spec, times_of(spec), 20.0, 16384, 2048, 8, work_s=1e7)
    block = float(still.levels[0].block_s[0])
    assert float(still.interval_s[0]) == pytest.approx(1e7, rel=1e-5)  # one checkpoint, at the end
    assert float(still.ettr[0]) == pytest.approx(1e7 / (1e7 + block), rel=1e-5)
    endless = long_run_outlook(spec, times_of(spec), 20.0, 16384, 2048, 8)
    assert float(endless.ettr[0]) == 1.0
    empty = long_run_outlook(facts(), times_of(facts(), 0.0), 20.0, 8, 1, 8)
    assert 0.9 < float(empty.ettr[0]) <= 1.0


def test_rate_follows_the_gpus_of_a_node() -> None:
    reliability = load_faults("delta").reliability
    assert reliability is not None
    assert failures_per_node_day(reliability, 8) == pytest.approx(2 * 8.31e-2)
    assert failure_clock(reliability, 1e4, 76).num_nodes == 76


def test_intervals_that_cannot_be_are_refused() -> None:
    spec = facts("async", **{"checkpoint.interval_s": "1 d"})
    with pytest.raises(SpecError, match="longer than the run"):
        long_run_outlook(spec, times_of(spec), 20.0, 16384, 2048, 8, work_s=3600.0)
    spec = facts("async", **{"checkpoint.interval_s": "20 s"})
    with pytest.raises(SpecError, match="shorter than a checkpoint takes"):
        long_run_outlook(spec, times_of(spec), 20.0, 16384, 2048, 8)
    kept = facts("async", **{"checkpoint.interval_s": "10 min"})
    assert float(long_run_outlook(kept, times_of(kept), 20.0, 16384, 2048, 8).interval_s[0]) == 600.0
    with pytest.raises(SpecError, match="has no restart"):
        long_run_outlook(spec.model_copy(update={"restart": None}), times_of(spec), 20.0, 16384, 2048, 8)


def test_asynchronous_checkpoints_wait_for_storage() -> None:
    spec = facts("async", **{"storage.write_bytes_per_s": "5 GB/s"})
    times = times_of(spec)
    found = long_run_outlook(spec, times, 20.0, 16384, 2048, 8)
    assert float(found.interval_s[0]) >= float(times.write_s[0]) - float(times.copy_s[0])
    several = facts("async", **{"storage.write_bytes_per_s": "5 GB/s", "checkpoint.in_flight": 4})
    assert long_run_outlook(several, times_of(several), 20.0, 16384, 2048, 8).interval_s[0] < found.interval_s[0]


def test_one_kind_in_one_place_is_the_closed_form() -> None:
    spec = load_faults("rsc-1", {"checkpoint.interval_s": "30 min", "restart.reschedule_s": "2 min"})
    spec = spec.model_copy(update={"storage": facts().storage})
    times = times_of(spec)
    found = long_run_outlook(spec, times, 1.0, 16384, 2048, 8)
    restart = 150 + 120 + 1.33e-3 * 16384 + 30 + float(times.load_s[0])
    expected = renewal_ettr(1800.0, float(times.blocking_s[0]), 86400 / (2048 * 6.5e-3), restart)
    assert float(found.ettr[0]) == pytest.approx(float(expected), rel=1e-9)


WRITES, SIZES = ("2 TB/s", "100 GB/s", "10 GB/s"), ((64, 10e9), (2048, 0.35e9), (2048, 10e9), (16384, 10e9))


@pytest.mark.parametrize(
    ("mode", "write", "nodes", "per_rank"),
    [(mode, WRITES[(i + j) % 3], *size) for i, mode in enumerate(CHECKPOINT_MODES) for j, size in enumerate(SIZES)],
)
def test_no_whole_number_of_steps_is_better(mode: str, write: str, nodes: int, per_rank: float) -> None:
    """Every interval that storage can follow, tried: also where a fast level and storage decide together."""
    spec = facts(mode, **{"storage.write_bytes_per_s": write})
    times = times_of(spec, per_rank)
    found = long_run_outlook(spec, times, 1.0, 8 * nodes, nodes, 8, work_s=1e8)
    tried = np.arange(1.0, 20001.0)
    every = long_run_outlook(spec, times, np.ones_like(tried), 8 * nodes, nodes, 8, work_s=1e8, interval_s=tried)
    must = {"async": times.write_s[0], "peer": times.peer_s[0]}.get(mode, 0.0)
    best = float(
        every.ettr[tried + float(found.levels[0].block_s[0]) * (not spec.checkpoint.waits_for_copies) >= must].max()
    )
    assert float(found.ettr[0]) == pytest.approx(best, abs=1e-3 if "level" in mode else 3e-4)
    assert float(found.ettr[0]) <= best + 1e-12


def test_storage_follows_what_hosts_hold() -> None:
    """Checkpoints in storage lie as far apart as one takes to write, though that is thousands of the host's."""
    spec = facts("memory", **{"storage.write_bytes_per_s": "100 MB/s"})
    times = times_of(spec, 0.01e9)
    found = long_run_outlook(spec, times, 1.0, 512, 64, 8)
    fast, safe = found.levels
    apart = float(safe.every[0]) * (float(found.interval_s[0]) + float(fast.block_s[0]))
    assert apart >= float(times.write_s[0]) - 1e-6 and safe.every[0] > 1024
    played = simulate_long_runs(found.run_to_simulate(0, 1e8), 100, seed=1)
    assert played.ettr == pytest.approx(float(found.ettr[0]), abs=4 * played.standard_error)
