"""The wall clock in closed form where the time between failures of a job is Weibull, anew after each failure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mofa.errors import SpecError
from mofa.faults.checks import FloatN, check_above_zero, check_at_least_zero
from mofa.faults.closed_forms.intervals import exact_interval_s
from mofa.faults.failures.rates import weibull_scale_s

SOUGHT, WIDE = 96, 30.0
"""Intervals that are tried before the best is refined, and how far they reach to both sides of the exponential one:
where failures are regular the ETTR has several peaks. [-]"""
MOST_TERMS = 100_000
"""Checkpoints that are summed one by one; those behind them are an integral. [-]"""


def weibull_ledger_shares(
    interval_s: float, block_s: float, mtbf_s: float, restart_s: float, persist_s: float = 0.0, shape: float = 1.0
) -> dict[str, float]:
    """Exact shares of the wall clock of a long run per part of the ledger; ``productive`` is the ETTR. [-]

    Parameters
    ----------
    interval_s, block_s, mtbf_s, restart_s, persist_s
        As in :func:`mofa.faults.ledger.expected_ledger_shares`; the interval above 0. [s]
    shape
        Weibull shape; 1 is exponential, and then this is that. [-]

    Raises
    ------
    SpecError
        If a time is none, or the shape is not from 0.1 to 10.

    Notes
    -----
    From one failure to the next, which takes M on average, the run restarts and then banks its j-th checkpoint if the
    next failure comes later than ``R + P + j L``: the ETTR is ``tau / M * sum_{j >= 1} S(R + P + j L)``, S the survival
    of the time between failures. With ``G(t)``, its integral from 0 to t, restarts take ``G(R) / M``, checkpoints
    ``sum_j (G(R + j L) - G(R + j L - delta)) / M``; what is left is lost. It holds for any distribution whose clock
    each failure sets to zero: one clock of the job (:class:`mofa.faults.failures.clocks.FailureClock` without nodes).
    Many nodes with a clock each fail all but like Poisson together.

    Examples
    --------
    >>> found = weibull_ledger_shares(19 * 60.0, 60.0, 185.6 * 60, 600.0, shape=0.5)
    >>> round(found["productive"], 4), round(sum(found.values()), 12)
    (0.8738, 1.0)
    """
    run = _FromFailureToFailure(
        float(check_above_zero("interval_s", interval_s)), float(check_at_least_zero("block_s", block_s)),
        float(check_above_zero("mtbf_s", mtbf_s)),
        float(check_at_least_zero("restart_s", restart_s)), float(check_at_least_zero("persist_s", persist_s)), shape,
    )  # fmt: skip
    if not 0.1 <= shape <= 10:
        raise SpecError(f"shape: is {shape:g}; give a Weibull shape from 0.1 to 10, 1 for exponential")
    parts = {"productive": run.productive(), "checkpoint": run.checkpoint(),
             "restart": 1 - float(run.survived(np.asarray(run.restart_s))), "waiting": 0.0}  # fmt: skip
    return {**parts, "lost": max(1 - sum(parts.values()), 0.0)}


@dataclass(frozen=True)
class _FromFailureToFailure:
    """Checkpoints between two failures, as in the notes of :func:`weibull_ledger_shares`; its times are checked. [s]"""

    interval_s: float
    block_s: float
    mtbf_s: float
    restart_s: float
    persist_s: float
    shape: float

    @cached_property
    def scale_s(self) -> float:
        return float(weibull_scale_s(self.mtbf_s, self.shape))

    @property
    def length_s(self) -> float:
        return self.interval_s + self.block_s

    @cached_property
    def ends(self) -> FloatN:
        """When checkpoints end that are summed one by one; beyond exp(-40) nothing is left. [s]"""
        span_s = max(self.scale_s * 40 ** (1 / self.shape) - self.restart_s, 0.0)
        num = int(min(span_s / self.length_s + 1, MOST_TERMS))
        return np.asarray(self.restart_s + np.arange(1.0, num + 1.0) * self.length_s)

    def survived(self, since: FloatN) -> FloatN:
        """The integral of S from ``since`` on, over M. [-]"""
        from scipy import special  # a third of a second to load

        return np.asarray(special.gammaincc(1 / self.shape, (since / self.scale_s) ** self.shape))

    def productive(self) -> float:
        """The ETTR. [-]"""
        banked = float(np.exp(-(((self.ends + self.persist_s) / self.scale_s) ** self.shape)).sum()) / self.mtbf_s
        last_banked = float(self.survived(self.ends[-1] + self.persist_s + self.length_s / 2)) / self.length_s
        return self.interval_s * (banked + last_banked)

    def checkpoint(self) -> float:
        """The share of checkpoints; each of those behind the last stands for half a length around its middle. [-]"""
        behind = float(self.survived(self.ends[-1] + self.interval_s / 2)) / self.length_s
        one_by_one = float((self.survived(self.ends - self.block_s) - self.survived(self.ends)).sum())
        return one_by_one + behind * self.block_s


def weibull_interval_s(
    block_s: float, mtbf_s: float, restart_s: float, persist_s: float = 0.0, shape: float = 1.0
) -> float:  # fmt: skip
    """The interval at which :func:`weibull_ledger_shares` has the highest ETTR; 0 where a checkpoint costs nothing. [s]

    Parameters
    ----------
    block_s, mtbf_s, restart_s, persist_s, shape
        As in :func:`weibull_ledger_shares`.

    Notes
    -----
    A scan, and the bounded minimisation of Brent between the neighbours of its best (:mod:`scipy.optimize`). Unlike
    with exponential failures the optimum depends on restart and persistence.

    Examples
    --------
    >>> round(weibull_interval_s(300.0, 21600.0, 600.0)), round(float(exact_interval_s(300.0, 21600.0)))
    (3403, 3403)
    """
    from scipy import optimize

    first = float(exact_interval_s(block_s, mtbf_s))
    if first == 0:
        return 0.0
    weibull_ledger_shares(first, block_s, mtbf_s, restart_s, persist_s, shape)  # which checks the times and the shape

    def missed(log: float) -> float:
        interval_s = float(np.exp(log))
        return -_FromFailureToFailure(interval_s, block_s, mtbf_s, restart_s, persist_s, shape).productive()

    logs = np.linspace(np.log(first / WIDE), np.log(first * WIDE), SOUGHT + 1)  # the exponential one amid them
    values = np.array([missed(float(log)) for log in logs])
    best = int(values.argmin())
    between = (float(logs[max(best - 1, 0)]), float(logs[min(best + 1, SOUGHT)]))
    minimum = optimize.minimize_scalar(missed, bounds=between, method="bounded", options={"xatol": 1e-6})
    return float(np.exp(minimum.x if minimum.fun <= values[best] else logs[best]))
