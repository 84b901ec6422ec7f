"""Checkpoints at several levels: the closed form against its linear system, brute force and the simulation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mofa.errors import SpecError
from mofa.faults.closed_forms.checkpoint_levels import (
    best_checkpoint_pattern,
    ettr_of_checkpoint_levels,
    ledger_shares_of_levels,
    mean_blocking_s,
)
from mofa.faults.closed_forms.renewal import effective_restart_s, levels_ettr, renewal_ettr
from mofa.faults.closed_forms.two_levels import two_level_ettr
from mofa.faults.failures.clocks import FailureClock
from mofa.faults.ledger import expected_ledger_shares
from mofa.faults.level_calculator import calculate_checkpoint_levels
from mofa.faults.simulate import LongRunToSimulate, SimulatedCheckpointLevel, SimulatedFailureKind, simulate_long_runs

TIMES = st.floats(0.0, 2000.0)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.data())
def test_the_closed_form_is_the_linear_system(num_levels: int, data: st.DataObject) -> None:
    blocks, restarts = (data.draw(st.lists(TIMES, min_size=num_levels, max_size=num_levels)) for _ in range(2))
    weights = data.draw(st.lists(st.floats(0.01, 1.0), min_size=num_levels, max_size=num_levels))
    ratios = data.draw(st.lists(st.integers(1, 4), min_size=num_levels - 1, max_size=num_levels - 1))
    interval, mtbf = data.draw(st.floats(1.0, 5000.0)), data.draw(st.floats(500.0, 1e6))
    shares = [w / sum(weights) for w in weights]
    every = list(itertools.accumulate([1, *ratios], lambda a, b: a * b))
    slow = levels_ettr(interval, every, blocks, mtbf, shares, restarts)
    assert float(ettr_of_checkpoint_levels(interval, ratios, blocks, mtbf, shares, restarts)) == pytest.approx(
        slow, rel=1e-6
    )


def test_one_and_two_levels_are_those_known() -> None:
    mtbf = np.array([1e3, 1e4, np.inf])
    one = ettr_of_checkpoint_levels(600.0, (), (60.0,), mtbf, (1.0,), (300.0,))
    assert one == pytest.approx(renewal_ettr(600.0, 60.0, mtbf, 300.0), rel=1e-9)
    two = ettr_of_checkpoint_levels(600.0, (np.array([4, 7, 3]),), (1.0, 60.0), mtbf, (0.75, 0.25), (60.0, 600.0))
    known = two_level_ettr(600.0, np.array([4, 7, 3]), (1.0, 60.0), mtbf, (60.0, 600.0), 0.75)
    assert two == pytest.approx(known, rel=1e-9)


@pytest.mark.parametrize("mtbf", [1500.0, 11135.0, 86400.0])
@pytest.mark.parametrize("blocks", [(1.0, 60.0), (5.0, 20.0), (2.0, 300.0)])
@pytest.mark.parametrize("quick", [0.25, 0.75, 0.99])
def test_no_pattern_of_two_levels_is_much_better(mtbf: float, blocks: tuple[float, float], quick: float) -> None:
    shares, restarts = (quick, 1 - quick), (60.0, 300.0)
    interval, ratios = best_checkpoint_pattern(blocks, mtbf, shares, restarts)
    found = float(ettr_of_checkpoint_levels(interval, ratios, blocks, mtbf, shares, restarts))
    tried = np.geomspace(1.0, 3e4, 400)[:, None]
    every = ettr_of_checkpoint_levels(tried, (np.arange(1.0, 300.0),), blocks, mtbf, shares, restarts)
    assert found == pytest.approx(float(every.max()), abs=1e-3)


@pytest.mark.parametrize("mtbf", [3000.0, 11135.0])
def test_no_pattern_of_three_levels_is_much_better(mtbf: float) -> None:
    blocks, shares, restarts = (1.0, 6.0, 90.0), (0.5, 0.4, 0.1), (60.0, 120.0, 600.0)
    interval, ratios = best_checkpoint_pattern(blocks, mtbf, shares, restarts)
    found = float(ettr_of_checkpoint_levels(interval, ratios, blocks, mtbf, shares, restarts))
    tried = np.geomspace(10.0, 3e3, 80)[:, None, None]
    few, many = np.arange(1.0, 25.0)[:, None], np.arange(1.0, 25.0)
    every = ettr_of_checkpoint_levels(tried, (few, many), blocks, mtbf, shares, restarts)
    assert found == pytest.approx(float(every.max()), abs=1e-3)
    assert found > float(
        ettr_of_checkpoint_levels(*(float(x) for x in (interval,)), (1, 1), blocks, mtbf, shares, restarts)
    )


def test_three_levels_are_what_the_simulation_finds() -> None:
    blocks, shares, restarts = (1.0, 6.0, 90.0), (0.5, 0.4, 0.1), (60.0, 120.0, 600.0)
    levels = (
        SimulatedCheckpointLevel(1.0),
        SimulatedCheckpointLevel(6.0, every=5),
        SimulatedCheckpointLevel(90.0, every=20),
    )
    kinds = tuple(SimulatedFailureKind(p, r, k) for k, (p, r) in enumerate(zip(shares, restarts, strict=True)))
    played = simulate_long_runs(
        LongRunToSimulate(20 * 86400.0, 240.0, levels, kinds, FailureClock(11135.0)), 2000, seed=3
    )
    expected = float(ettr_of_checkpoint_levels(240.0, (5, 4), blocks, 11135.0, shares, restarts))
    assert played.ettr == pytest.approx(expected, abs=3.5 * played.standard_error + 1e-4)


def test_the_ledger_of_levels_is_what_the_simulation_finds() -> None:
    """Checkpoints that differ much and failures that are frequent: those who write seldom lose much of it."""
    blocks, shares, restarts, mtbf = (1.0, 600.0), (0.5, 0.5), (60.0, 300.0), 3000.0
    levels, kinds = (
        (SimulatedCheckpointLevel(1.0), SimulatedCheckpointLevel(600.0, every=12)),
        (SimulatedFailureKind(0.5, 60.0, 0), SimulatedFailureKind(0.5, 300.0, 1)),
    )
    parts = ledger_shares_of_levels(120.0, (12,), blocks, mtbf, shares, restarts)
    assert float(parts["productive"]) == float(ettr_of_checkpoint_levels(120.0, (12,), blocks, mtbf, shares, restarts))
    played = simulate_long_runs(
        LongRunToSimulate(1440.0 * 2000, 120.0, levels, kinds, FailureClock(mtbf)), 200, seed=1
    ).ledger()
    for part, found in played.model_dump().items():
        assert found == pytest.approx(float(parts[part]), abs=1e-3), part
    by_mean = expected_ledger_shares(
        120.0, mean_blocking_s((12,), blocks), mtbf, float(effective_restart_s(restarts, shares, mtbf))
    )
    assert abs(float(by_mean["checkpoint"]) - played.checkpoint) > 0.02  # what a mean would say of them


@pytest.mark.parametrize("interval", [None, 100.0])
def test_the_calculator_finds_the_best_pattern(interval: float | None) -> None:
    blocks, shares, restarts = (2.0, 45.0), (0.6, 0.4), (60.0, 300.0)
    found = calculate_checkpoint_levels(9000.0, blocks, restarts, shares, interval_s=interval, days=1, num_runs=10)
    tried = np.geomspace(20.0, 2e3, 1500)[:, None] if interval is None else np.array([[interval]])
    best = float(ettr_of_checkpoint_levels(tried, (np.arange(1.0, 120.0),), blocks, 9000.0, shares, restarts).max())
    assert found.ettr == pytest.approx(best, abs=2e-6)
    assert interval is None or found.at_interval_s == interval


@settings(max_examples=40, deadline=None)
@given(st.floats(200.0, 1e6), st.floats(1.0, 5000.0), st.integers(1, 40), st.floats(0.0, 1.0))
@example(mtbf=200.0, interval=4535.0, ratio=2, quick=0.5)  # a segment in 10 ** 10 survives
def test_shares_of_levels_close(mtbf: float, interval: float, ratio: int, quick: float) -> None:
    parts = ledger_shares_of_levels(interval, (ratio,), (1.0, 60.0), mtbf, (quick, 1 - quick), (60.0, 600.0))
    assert float(sum(parts.values())) == pytest.approx(1.0, abs=1e-9)
    assert min(float(part) for part in parts.values()) >= 0


def test_mean_blocking_is_that_of_the_pattern() -> None:
    assert float(mean_blocking_s((5, 4), (1.0, 6.0, 90.0))) == pytest.approx((16 * 1 + 3 * 6 + 90) / 20)


def test_what_does_not_match_is_refused() -> None:
    with pytest.raises(SpecError, match="one of each per level"):
        ettr_of_checkpoint_levels(600.0, (4,), (1.0,), 1e4, (1.0,), (60.0,))
    with pytest.raises(SpecError, match="shares: is 1"):
        ettr_of_checkpoint_levels(600.0, (), (1.0,), 1e4, (1.5,), (60.0,))
