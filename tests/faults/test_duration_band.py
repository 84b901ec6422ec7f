"""The band of a run's length: what is unknown of the rate and the run's own luck, against runs that draw both."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mofa.errors import SpecError
from mofa.faults.closed_forms.renewal import renewal_ettr
from mofa.faults.duration_band import QUANTILES, run_duration_band_s, true_failure_rate_factors
from mofa.faults.failures.clocks import FailureClock
from mofa.faults.failures.rates import estimate_failure_rate, true_over_estimated_rate
from mofa.faults.simulate import LongRunToSimulate, SimulatedCheckpointLevel, SimulatedFailureKind, simulate_long_runs

DAY = 86400.0


@pytest.mark.parametrize(
    ("clock", "days"),
    [
        (FailureClock(20_000.0, counted_failures=20), 10.0),
        (FailureClock(20_000.0, counted_failures=2000), 60.0),
        (FailureClock(20_000.0, num_nodes=40, lemon_fraction=0.15, lemon_multiple=5.0), 10.0),
        (FailureClock(20_000.0, num_nodes=40, lemon_fraction=0.15, lemon_multiple=5.0, counted_failures=40), 60.0),
        (FailureClock(20_000.0, num_nodes=64, shape=0.7, counted_failures=30), 10.0),
    ],
)
def test_the_band_is_that_of_runs_that_draw_their_rate(clock: FailureClock, days: float) -> None:
    """Whole runs at rates of their own, none of which uses a closed form."""
    from scipy import stats  # half a second to load, which collecting need not take

    work, tau, block, restart = days * DAY, 1200.0, 30.0, 600.0
    run = LongRunToSimulate(work, tau, (SimulatedCheckpointLevel(block),), (SimulatedFailureKind(1.0, restart),), clock)
    wall = simulate_long_runs(run, 4000, seed=7).wall_s
    factors = true_failure_rate_factors(clock, 4000)
    mean = work / renewal_ettr(tau, block, clock.mtbf_s / factors, restart)
    steady = replace(clock, lemon_fraction=0.0, counted_failures=None)
    played = replace(run, work_s=min(work, 8 * DAY), clock=steady)
    found = np.array(run_duration_band_s(played, work, mean, factors))
    expected = np.quantile(wall, QUANTILES)
    # three standard errors of an empirical quantile of either sample, at the density of a bell of this width
    width = float(wall.std())
    error = [np.sqrt(p * (1 - p) / 4000) / stats.norm.pdf(stats.norm.ppf(p)) * width for p in QUANTILES]
    # a few Weibull clocks over 8 days are not yet the steady sum that the scaling takes them for
    slack = 0.1 * width if clock.shape != 1 else 0.0
    assert np.all(np.abs(found - expected) < 3 * np.sqrt(2) * np.array(error) + slack), (found - expected, error)


@pytest.mark.parametrize(
    "clock",
    [
        FailureClock(20_000.0, counted_failures=20),
        FailureClock(20_000.0, num_nodes=40, lemon_fraction=0.15, lemon_multiple=5.0),
        FailureClock(20_000.0, num_nodes=40, lemon_fraction=0.15, lemon_multiple=5.0, counted_failures=40),
    ],
)
def test_the_simulated_ettr_is_the_closed_form_at_each_rate(clock: FailureClock) -> None:
    """All productive over all wall-clock time, of runs with lemons and rates of their own."""
    run = LongRunToSimulate(
        60 * DAY, 1200.0, (SimulatedCheckpointLevel(30.0),), (SimulatedFailureKind(1.0, 600.0),), clock
    )
    found = simulate_long_runs(run, 4000, seed=11)
    mean = 60 * DAY / renewal_ettr(1200.0, 30.0, clock.mtbf_s / true_failure_rate_factors(clock, 4000), 600.0)
    assert abs(found.ettr - 60 * DAY / mean.mean()) < 3.5 * found.standard_error


def test_a_poorly_known_rate_widens_the_band() -> None:
    def width(counted: float | None) -> float:
        clock = FailureClock(20_000.0, counted_failures=counted)
        run = LongRunToSimulate(
            100 * DAY,
            1200.0,
            (SimulatedCheckpointLevel(30.0),),
            (SimulatedFailureKind(1.0, 600.0),),
            FailureClock(20_000.0),
        )
        factors = true_failure_rate_factors(clock, 1000)
        low, _, high = run_duration_band_s(
            run, 100 * DAY, 100 * DAY / renewal_ettr(1200.0, 30.0, 20_000.0 / factors, 600.0), factors
        )
        return high - low

    known, well, poorly = width(None), width(10_000), width(10)
    assert known == pytest.approx(well, rel=0.1)
    assert poorly > 3 * known


@pytest.mark.parametrize("failures", [1, 5, 419])
def test_jeffreys_lies_within_garwood(failures: int) -> None:
    interval = estimate_failure_rate(failures, 1000.0, confidence=0.9)
    low, high = true_over_estimated_rate(failures, np.array([0.05, 0.95])) * interval.rate_per_node_day
    assert interval.low_per_node_day < low < high < interval.high_per_node_day
    # over many true rates the interval holds the true one nine times in ten: counts drawn at rates drawn evenly
    rng = np.random.default_rng(3)
    truth = failures * rng.uniform(0.5, 2.0, 20_000)
    counts = rng.poisson(truth)
    some = counts > 0
    inside = [
        float(a) <= t <= float(b)
        for t, a, b in zip(
            truth[some], true_over_estimated_rate(counts[some], 0.05) * counts[some],
            true_over_estimated_rate(counts[some], 0.95) * counts[some], strict=True,
        )
    ]  # fmt: skip
    assert np.mean(inside) == pytest.approx(0.9, abs=0.02 if failures > 1 else 0.06)


def test_what_is_no_count_is_refused() -> None:
    with pytest.raises(SpecError, match="counted_failures"):
        FailureClock(1e4, counted_failures=0.0)
    with pytest.raises(SpecError, match="failures"):
        true_over_estimated_rate(0, 0.5)
    with pytest.raises(SpecError, match="probability"):
        true_over_estimated_rate(4, 1.5)
