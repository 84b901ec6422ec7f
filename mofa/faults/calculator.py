"""The plain calculator: intervals and ETTR out of three times, with the simulation beside the closed form."""

from __future__ import annotations

import math
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from mofa.errors import SpecError
from mofa.faults.checks import MOST_TIME_S, check_above_zero, check_plausible_s
from mofa.faults.closed_forms.intervals import (
    daly_higher_order_interval_s,
    daly_interval_s,
    exact_interval_s,
    young_interval_s,
)
from mofa.faults.closed_forms.renewal import meta_ettr
from mofa.faults.closed_forms.weibull import weibull_interval_s, weibull_ledger_shares
from mofa.faults.failures.clocks import FailureClock
from mofa.faults.ledger import PARTS, Ledger, expected_ledger_shares
from mofa.faults.simulate import LongRunToSimulate, SimulatedCheckpointLevel, SimulatedFailureKind, simulate_long_runs
from mofa.specs.base import Spec
from mofa.units import SECONDS_PER_DAY

MAX_EVENTS, MAX_EACH = 5e6, 5000.0
"""Failures simulated in all and of one run; a longer run is cut, which leaves its ETTR as it is. [-]"""
FEWER = 50
"""With a Weibull shape or checkpoints restorable later so many times fewer runs, of as many times the length: the
closed form is that of an endless run, and how one begins and ends would show. [-]"""
MOST_EDGE = 0.025
"""Of the waits for a first checkpoint against the segments of a run, above which its end would show. [-]"""
SETTLED, LEAST_SETTLED = 0.6, 32
"""Failures come early where a run begins, which adds half the variance of the times between them to the failures of
each run. So many runs of a given length in all keep that below a third of their standard error; fewer say nothing. [-]
"""
LEAST_WORK_S = 1e-3
"""Productive time of the shortest run. [s]"""
LEAST_ETTR = 1e-3
"""Below it a run all but stands still, and is not simulated. [-]"""


class Intervals(Spec):
    """Compute time between checkpoints, by each formula. [s]"""

    young: float = Field(ge=0, description="sqrt(2 delta M). [s]")
    daly: float = Field(ge=0, description="sqrt(2 delta M) - delta. [s]")
    daly_higher_order: float = Field(ge=0, description="Daly's higher order. [s]")
    exact: float = Field(ge=0, description="The optimum: Lambert W; with a Weibull shape, by numbers. [s]")


class MonteCarlo(Spec):
    """A simulated ETTR: all productive time over all wall-clock time."""

    mean: float = Field(ge=0, le=1, description="ETTR. [-]")
    standard_error: float | None = Field(ge=0, description="Of the mean; null where no failure was drawn. [-]")
    failures: int = Field(ge=0, description="Drawn in all runs together. [-]")
    runs: int = Field(gt=0, description="Simulated runs. [-]")
    productive_days: float = Field(gt=0, description="Work of each. [d]")


class GoodputCalculation(Spec):
    """What ``mofa goodput --mtbf ... --checkpoint ... --restart ... --json`` prints."""

    schema_version: str = Field(default="2.1", description="Version of this contract.")
    mtbf_s: float = Field(gt=0, description="Mean time between failures of the job. [s]")
    checkpoint_s: float = Field(ge=0, description="Time for which a checkpoint blocks computing. [s]")
    persist_s: float = Field(ge=0, description="From then until it can be restored. [s]")
    restart_s: float = Field(ge=0, description="From a failure to computing again. [s]")
    shape: float = Field(gt=0, description="Weibull shape of the time between failures; 1 is exponential. [-]")
    interval_s: Intervals = Field(description="Intervals by each formula; exact alone heeds the shape.")
    ettr: float = Field(ge=0, le=1, description="At the exact interval, or the one asked for. [-]")
    at_interval_s: float = Field(ge=0, description="The interval of ettr, its ledger and its simulation. [s]")
    ettr_by_formula: Intervals = Field(description="ETTR at the interval of each formula. [-]")
    meta_ettr: float | None = Field(ge=0, le=1, description="Meta's approximation; null at an interval of 0. [-]")
    ettr_monte_carlo: MonteCarlo | None = Field(
        description="The simulation; null where the run hardly gets on, or in segments too few for when they persist."
    )
    ledger: Ledger = Field(description="Expected shares of the wall-clock time; they sum to 1.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if abs(self.ledger.productive - self.ettr) > 1e-9:
            raise ValueError(f"ettr ({self.ettr:.9g}) must be the ledger's productive share")
        return self


def calculate_goodput(
    mtbf_s: float, checkpoint_s: float, restart_s: float, *, persist_s: float = 0.0, interval_s: float | None = None,
    days: float = 54.0, num_runs: int = 10_000, seed: int = 0, shape: float = 1.0,
) -> GoodputCalculation:  # fmt: skip
    """Intervals and ETTR of a job.

    Parameters
    ----------
    mtbf_s
        Mean time between failures of the whole job, which strike at any time, in checkpoints and restarts too. [s]
    checkpoint_s, persist_s, restart_s
        Blocking time of a checkpoint, from then until it can be restored, and restart. [s]
    interval_s
        Compute time between checkpoints; the exact optimum where absent. [s]
    days
        Productive time of the simulated runs, cut where they would fail too often in all. [d]
    num_runs, seed
        Of the simulation.
    shape
        Weibull shape of the time between failures of the job, whose clock each failure starts anew. Young's and Daly's
        intervals stay those of exponential failures, which cost little (Levy and Ferreira 2016). [-]

    Raises
    ------
    SpecError
        If a time is negative, the mean time between failures 0, or the interval longer than the run.

    Examples
    --------
    >>> found = calculate_goodput(6 * 3600.0, 300.0, 600.0, days=5, num_runs=1000)
    >>> round(found.ettr, 4), round(found.interval_s.exact)
    (0.8194, 3403)
    """
    mtbf = check_plausible_s("mtbf_s", mtbf_s)
    block = check_plausible_s("checkpoint_s", checkpoint_s, zero=True)
    restart = check_plausible_s("restart_s", restart_s, zero=True)
    persist = check_plausible_s("persist_s", persist_s, zero=True)
    work = productive_s_of_days(days)
    if num_runs < 2:
        raise SpecError(f"num_runs: is {num_runs}; give at least 2, which have a spread")
    intervals = Intervals(
        young=float(young_interval_s(block, mtbf)), daly=float(daly_interval_s(block, mtbf)),
        daly_higher_order=float(daly_higher_order_interval_s(block, mtbf)),
        exact=(
            float(exact_interval_s(block, mtbf))
            if shape == 1
            else weibull_interval_s(block, mtbf, restart, persist, shape)
        ),
    )  # fmt: skip
    used_s = intervals.exact
    if interval_s is not None:
        used_s = check_plausible_s("interval_s", interval_s)
        if used_s > work:
            raise SpecError(
                f"interval_s: is {used_s:g} s, longer than the run of {work:g} s; shorten it or lengthen the run"
            )

    def shares(interval: float) -> dict[str, float]:
        if shape == 1 or interval == 0:
            with np.errstate(all="ignore"):  # what underflows is 0
                by_part = expected_ledger_shares(interval, block, mtbf, restart, persist)
            return check_shares_sum({name: float(v) for name, v in by_part.items()})
        return check_shares_sum(weibull_ledger_shares(interval, block, mtbf, restart, persist, shape))

    if shape != 1 and used_s == 0:
        raise SpecError("shape: needs an interval above 0; give checkpoints a time, or --checkpoint-interval")
    parts = shares(used_s)
    value = parts["productive"]
    by = {name: shares(getattr(intervals, name))["productive"] for name in Intervals.model_fields}
    return GoodputCalculation(
        mtbf_s=mtbf, checkpoint_s=block, persist_s=persist, restart_s=restart, interval_s=intervals, ettr=value,
        shape=shape, at_interval_s=used_s, ettr_by_formula=Intervals(**by),
        meta_ettr=float(meta_ettr(used_s, block, mtbf, restart + persist)) if used_s > 0 else None,
        ettr_monte_carlo=_simulated(mtbf, block, persist, restart, used_s, value, work, num_runs, seed, shape),
        ledger=Ledger(**{part: parts[part] for part in PARTS}),
    )  # fmt: skip


def _gap_variance(shape: float) -> float:
    """Variance of a Weibull time between failures over its mean's square. [-]

    Examples
    --------
    >>> round(_gap_variance(1.0), 9), round(_gap_variance(0.5), 9)
    (1.0, 5.0)
    """
    return math.exp(math.lgamma(1 + 2 / shape) - 2 * math.lgamma(1 + 1 / shape)) - 1


def productive_s_of_days(days: float) -> float:
    """Productive time of a run of so many days. [s]"""
    work = float(check_above_zero("days", days, "d")) * SECONDS_PER_DAY
    if not LEAST_WORK_S <= work <= MOST_TIME_S:
        raise SpecError(f"days: is {days:g} d; give a run of {LEAST_WORK_S:g} to {MOST_TIME_S:g} s")
    return work


def check_shares_sum(parts: dict[str, float]) -> dict[str, float]:
    """Shares that are none below 0, and sum to 1 beyond what rounding of each leaves."""
    parts = {name: max(value, 0.0) for name, value in parts.items()}
    total = math.fsum(parts.values())
    if not math.isclose(total, 1.0, rel_tol=0.0, abs_tol=1e-6):
        raise SpecError(
            f"mtbf_s: times as far apart as these have shares that sum to {total:.6g}, not to 1; give times of one run"
        )
    return {name: min(value / total, 1.0) for name, value in parts.items()}


def _simulated(
    mtbf: float, block: float, persist: float, restart: float, interval_s: float, expected: float, work: float,
    num_runs: int, seed: int, shape: float,
) -> MonteCarlo | None:  # fmt: skip
    if expected < LEAST_ETTR:
        return None
    interval = interval_s or 1e-9 * mtbf  # as good as all the time
    each = MAX_EACH
    if shape != 1 or persist > 0:
        num_runs, work, each = max(num_runs // FEWER, min(num_runs, FEWER)), work * FEWER, each * 10
    if shape < 1:
        means = num_runs * min(work / expected / mtbf, MAX_EVENTS / num_runs, each)  # of all runs together
        settled = int(SETTLED * math.sqrt(means / _gap_variance(shape)))
        if settled < LEAST_SETTLED:
            return None
        num_runs, work = min(num_runs, settled), work * max(num_runs / settled, 1.0)
        each = max(each, MAX_EVENTS / num_runs)
    work = min(work, min(MAX_EVENTS / num_runs, each) * mtbf * expected)
    # whole segments, so that what is simulated is the interval asked for, as the closed form has it
    segments = math.ceil(work / interval * (1 - 1e-12))
    if math.expm1(min(persist / mtbf, 700.0)) > MOST_EDGE * segments:
        return None
    work = segments * interval
    run = LongRunToSimulate(
        work,
        interval,
        (SimulatedCheckpointLevel(block, persist_s=persist),),
        (SimulatedFailureKind(1.0, restart),),
        FailureClock(mtbf, shape),
    )
    out = simulate_long_runs(run, num_runs, seed)
    drawn = int(out.failures.sum())
    return MonteCarlo(
        mean=out.ettr, standard_error=out.standard_error if drawn else None, failures=drawn, runs=num_runs,
        productive_days=run.work_s / SECONDS_PER_DAY,
    )  # fmt: skip
