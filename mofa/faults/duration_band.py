"""How long a run may take: what is not known of its failure rate and its own luck, together."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.faults.failures.clocks import FailureClock
from mofa.faults.failures.rates import lemon_rate_factor, true_over_estimated_rate
from mofa.faults.simulate import LongRunToSimulate, simulate_long_runs

FloatN = NDArray[np.float64]
QUANTILES = (0.1, 0.5, 0.9)


def true_failure_rate_factors(clock: FailureClock, num_runs: int, seed: int = 0) -> FloatN:
    """True failure rates of runs over the expected one: what a count leaves open, and how many lemons each meets. [-]

    Both are drawn at evenly spaced quantiles in random order, so that few runs show the whole distribution.

    Parameters
    ----------
    clock
        With its lemons and the failures that were counted; all ones without either.
    num_runs, seed
        How many, and of the order.

    Examples
    --------
    >>> found = true_failure_rate_factors(FailureClock(1e4, counted_failures=100), 2000)
    >>> round(float(found.mean()), 3), round(float(found.std()), 3)  # (n + 1/2) / n, sqrt(n + 1/2) / n
    (1.005, 0.1)
    """
    rng = np.random.default_rng(seed)
    even = (np.arange(num_runs) + 0.5) / num_runs
    factors = np.ones(num_runs)
    if clock.counted_failures is not None:
        factors = factors * true_over_estimated_rate(clock.counted_failures, rng.permutation(even))
    if clock.lemon_fraction and clock.num_nodes is not None:
        from scipy import stats  # half a second to load

        nodes, more = clock.num_nodes, clock.lemon_multiple - 1
        lemons = stats.binom.ppf(rng.permutation(even), nodes, clock.lemon_fraction)
        mean = float(lemon_rate_factor(clock.lemon_fraction, clock.lemon_multiple))
        factors = factors * (nodes + lemons * more) / (nodes * mean)
    return factors


def run_duration_band_s(
    played: LongRunToSimulate, work_s: float, mean_s: FloatN, factors: FloatN, seed: int = 0
) -> tuple[float, ...]:
    """Wall clock that one run in ten, one in two and nine in ten are over by. [s]

    Parameters
    ----------
    played
        The run at its expected rate, or a shorter one of the same facts, which is simulated.
    work_s
        Productive time of the whole run. [s]
    mean_s
        Expected wall clock at the failure rate of each run. (runs,) [s]
    factors
        Those rates over the expected one. (runs,) [-]

    Notes
    -----
    The wall clock of a long run is a sum of independent stretches, so that its luck grows with the root of its length
    and of its failures: deviations from the mean are scaled by ``sqrt(work / played * factor)``. What the rate makes of
    the mean is not scaled: it lasts as long as the run.

    Examples
    --------
    >>> from mofa.faults.simulate import SimulatedFailureKind, SimulatedCheckpointLevel
    >>> level, kind = SimulatedCheckpointLevel(60.0), SimulatedFailureKind(1.0, 600.0)
    >>> run = LongRunToSimulate(864000.0, 1800.0, (level,), (kind,), FailureClock(36000.0))
    >>> short, _, long = run_duration_band_s(run, 864000.0, np.full(500, 9.5e5), np.ones(500))
    >>> 9.3e5 < short < 9.5e5 < long < 9.7e5
    True
    """
    wall = simulate_long_runs(played, len(mean_s), seed).wall_s
    luck = (wall - wall.mean()) * np.sqrt(work_s / played.work_s * factors)
    return tuple(float(q) for q in np.quantile(np.maximum(mean_s + luck, work_s), QUANTILES))
