"""The calculator of several levels: the best pattern of their checkpoints, with the simulation beside it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from mofa.errors import SpecError
from mofa.faults.calculator import LEAST_ETTR, MAX_EACH, MAX_EVENTS, MonteCarlo, check_shares_sum, productive_s_of_days
from mofa.faults.checks import FloatN, check_plausible_s, checked_share
from mofa.faults.closed_forms.checkpoint_levels import (
    MAX_PATTERN,
    best_checkpoint_pattern,
    ettr_of_checkpoint_levels,
    ledger_shares_of_levels,
)
from mofa.faults.closed_forms.intervals import two_level_intervals_s
from mofa.faults.failures.clocks import FailureClock
from mofa.faults.ledger import PARTS, Ledger
from mofa.faults.simulate import LongRunToSimulate, SimulatedCheckpointLevel, SimulatedFailureKind, simulate_long_runs
from mofa.specs.base import Spec
from mofa.units import SECONDS_PER_DAY

MOST_LEVELS = 4
"""Levels that are searched together. [-]"""


class LevelCalculated(Spec):
    """One level of checkpoints and how often it is written."""

    checkpoint_s: float = Field(ge=0, description="Time for which one blocks computing. [s]")
    restart_s: float = Field(ge=0, description="From a failure that reads it to computing again. [s]")
    share: float = Field(ge=0, le=1, description="Of failures, of which it is the lowest level to survive. [-]")
    first_order_s: float | None = Field(
        description="Interval by sqrt(2 delta M / share); null where none reads it. [s]"
    )
    every: int = Field(ge=1, description="Every so manieth checkpoint is of this level or a rarer one. [-]")


class LevelCalculation(Spec):
    """What ``mofa goodput --mtbf ... --checkpoint T,T --restart T,T --shares P,P --json`` prints."""

    schema_version: str = Field(default="1.0", description="Version of this contract.")
    mtbf_s: float = Field(gt=0, description="Mean time between failures of the job. [s]")
    levels: tuple[LevelCalculated, ...] = Field(min_length=2, description="The most frequent first.")
    at_interval_s: float = Field(gt=0, description="Compute time between checkpoints of any level. [s]")
    ettr: float = Field(ge=0, le=1, description="Exact, at this interval and these levels. [-]")
    ettr_monte_carlo: MonteCarlo | None = Field(description="The simulation; null where the run hardly gets on.")
    ledger: Ledger = Field(description="Expected shares of the wall-clock time; they sum to 1.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if abs(self.ledger.productive - self.ettr) > 1e-9:
            raise ValueError(f"ettr ({self.ettr:.9g}) must be the ledger's productive share")
        return self


def calculate_checkpoint_levels(
    mtbf_s: float, checkpoint_s: Sequence[float], restart_s: Sequence[float], shares: Sequence[float], *,
    interval_s: float | None = None, days: float = 54.0, num_runs: int = 2000, seed: int = 0,
) -> LevelCalculation:  # fmt: skip
    """The best interval and pattern of several levels of checkpoints, and the ETTR.

    Parameters
    ----------
    mtbf_s
        Mean time between failures of the whole job. [s]
    checkpoint_s, restart_s
        Blocking time of each level and restart from it, the most frequent level first. (levels,) [s]
    shares
        Share of failures that each level is the lowest to survive; they sum to 1. (levels,) [-]
    interval_s
        Compute time between checkpoints of any level; the best where absent. [s]
    days, num_runs, seed
        Of the simulation, as in :func:`mofa.faults.calculator.calculate_goodput`.

    Raises
    ------
    SpecError
        If lists differ in length, a time is negative, the lowest level takes no time, or shares don't sum to 1.

    Examples
    --------
    >>> found = calculate_checkpoint_levels(11135.0, (1.0, 60.0), (60.0, 600.0), (0.75, 0.25), days=5, num_runs=100)
    >>> [round(level.first_order_s) for level in found.levels], found.levels[1].every
    ([172, 2312], 13)
    """
    count = len(checkpoint_s)
    if not 2 <= count <= MOST_LEVELS or len(restart_s) != count or len(shares) != count:
        raise SpecError(f"shares: {count} checkpoints, {len(restart_s)} restarts and {len(shares)} shares are given; "
                        f"give 2 to {MOST_LEVELS} levels, one of each for every level")  # fmt: skip
    mtbf = check_plausible_s("mtbf_s", mtbf_s)
    blocks = [check_plausible_s("checkpoint_s", b, zero=True) for b in checkpoint_s]
    restarts = [check_plausible_s("restart_s", r, zero=True) for r in restart_s]
    parts = [float(checked_share("shares", p)) for p in shares]
    work = productive_s_of_days(days)
    if num_runs < 2:
        raise SpecError(f"num_runs: is {num_runs}; give at least 2, which have a spread")
    if abs(math.fsum(parts) - 1) > 1e-6:
        raise SpecError(f"shares: sum to {math.fsum(parts):.6g}; make them sum to 1")
    if blocks[0] == 0:
        raise SpecError("checkpoint_s: the first level takes 0 s, so that it is written all the time; give it a time")
    if any(b > a for b, a in itertools.pairwise(blocks)):
        raise SpecError("checkpoint_s: a level takes longer than the next, which would do in its place; write the "
                        "quickest first")  # fmt: skip
    if interval_s is not None and check_plausible_s("interval_s", interval_s) > work:
        raise SpecError(f"interval_s: is {interval_s:g} s, longer than the run of {work:g} s; shorten it")
    with np.errstate(all="ignore"):
        interval, ratios = _refined(blocks, mtbf, parts, restarts, interval_s)
    with np.errstate(all="ignore"):  # what underflows is 0
        by_part = ledger_shares_of_levels(interval, ratios, blocks, mtbf, parts, restarts)
    ledger = check_shares_sum({k: float(v) for k, v in by_part.items()})
    every = list(itertools.accumulate([1, *ratios], lambda a, b: a * b))
    with np.errstate(divide="ignore"):
        first = [float(two_level_intervals_s((b, b), mtbf, p)[0]) for b, p in zip(blocks, parts, strict=True)]
    levels = tuple(
        LevelCalculated(checkpoint_s=b, restart_s=r, share=p, first_order_s=f if math.isfinite(f) else None, every=e)
        for b, r, p, f, e in zip(blocks, restarts, parts, first, every, strict=True)
    )
    value = ledger["productive"]
    return LevelCalculation(
        mtbf_s=mtbf, levels=levels, at_interval_s=interval, ettr=value,
        ettr_monte_carlo=_simulated(mtbf, levels, interval, value, work, num_runs, seed),
        ledger=Ledger(**{part: ledger[part] for part in PARTS}),
    )  # fmt: skip


def _refined(
    blocks: list[float], mtbf: float, shares: list[float], restarts: list[float], interval_s: float | None
) -> tuple[float, tuple[int, ...]]:
    """The best pattern near that of :func:`best_checkpoint_pattern`: intervals and ratios around it, tried together."""
    start, first = best_checkpoint_pattern(blocks, mtbf, shares, restarts, interval_s)
    interval, ratios = float(start), tuple(int(r) for r in first)
    for width in (0.5, 0.2, 0.05, 0.01):
        near = np.array([interval]) if interval_s is not None else interval * np.exp(np.linspace(-width, width, 41))
        axes: list[FloatN] = [near]
        for ratio in ratios:
            around = np.unique(np.clip(np.round(ratio * np.exp(np.linspace(-width, width, 9))), 1, MAX_PATTERN))
            axes.append(np.unique(np.concatenate([around, [max(ratio - 1, 1), ratio, ratio + 1]])))
        grid = np.meshgrid(*axes, indexing="ij", sparse=True)
        number = np.prod(np.broadcast_arrays(*grid[1:]), axis=0)
        values = np.where(
            number <= MAX_PATTERN, ettr_of_checkpoint_levels(grid[0], grid[1:], blocks, mtbf, shares, restarts), -1.0
        )
        best = np.unravel_index(int(np.argmax(values)), values.shape)
        interval = float(axes[0][best[0]])
        ratios = tuple(int(axis[i]) for axis, i in zip(axes[1:], best[1:], strict=True))
    return interval, ratios


def _simulated(
    mtbf: float, levels: tuple[LevelCalculated, ...], interval: float, expected: float, work: float, num_runs: int,
    seed: int,
) -> MonteCarlo | None:  # fmt: skip
    if expected < LEAST_ETTR:
        return None
    work = min(work, min(MAX_EVENTS / num_runs, MAX_EACH) * mtbf * expected)
    pattern = interval * levels[-1].every  # whole patterns, as the closed form has it
    work = max(math.ceil(work / pattern * (1 - 1e-12)), 1) * pattern
    run = LongRunToSimulate(
        work, interval, tuple(SimulatedCheckpointLevel(level.checkpoint_s, level.every) for level in levels),
        tuple(SimulatedFailureKind(level.share, level.restart_s, k) for k, level in enumerate(levels)),
        FailureClock(mtbf),
    )  # fmt: skip
    out = simulate_long_runs(run, num_runs, seed)
    drawn = int(out.failures.sum())
    return MonteCarlo(
        mean=out.ettr, standard_error=out.standard_error if drawn else None, failures=drawn, runs=num_runs,
        productive_days=work / SECONDS_PER_DAY,
    )  # fmt: skip
