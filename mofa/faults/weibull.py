"""ETTR in closed form where the time between failures of a job is Weibull, and every failure starts it anew."""

from __future__ import annotations

import numpy as np
from scipy import special

from mofa.errors import SpecError
from mofa.faults.checks import above_zero, at_least_zero
from mofa.faults.rates import weibull_scale_s

MOST_TERMS = 100_000
"""Checkpoints that are summed one by one; those behind them are an integral. [-]"""


def weibull_ettr(
    interval_s: float, block_s: float, mtbf_s: float, restart_s: float, persist_s: float = 0.0, shape: float = 1.0
) -> float:
    """Exact share of wall-clock time that is productive in a long run. [-]

    ``tau / M * sum_{j >= 1} S(R + P + j L)``, S the survival of the time between failures.

    Parameters
    ----------
    interval_s, block_s, mtbf_s, restart_s, persist_s
        As in :func:`mofa.faults.renewal.ettr`. [s]
    shape
        Weibull shape; 1 is exponential, and then this is :func:`mofa.faults.renewal.ettr`. [-]

    Raises
    ------
    SpecError
        If a time is none, or the shape is not from 0.1 to 10.

    Notes
    -----
    From one failure to the next, which takes M on average, the run restarts and then banks its j-th checkpoint if the
    next failure comes later than ``R + P + j L``. It holds for any distribution whose clock each failure sets to zero:
    one clock of the job (:class:`mofa.faults.clocks.Clock` without nodes). Many nodes with a clock each fail all but
    like Poisson together.

    Examples
    --------
    >>> round(weibull_ettr(19 * 60.0, 60.0, 185.6 * 60, 600.0, shape=0.5), 4)
    0.8738
    """
    tau = float(above_zero("interval_s", interval_s))
    length = tau + float(at_least_zero("block_s", block_s))
    mtbf = float(above_zero("mtbf_s", mtbf_s))
    begun = float(at_least_zero("restart_s", restart_s)) + float(at_least_zero("persist_s", persist_s))
    if not 0.1 <= shape <= 10:
        raise SpecError(f"shape: is {shape:g}; give a Weibull shape from 0.1 to 10, 1 for exponential")
    scale = float(weibull_scale_s(mtbf, shape))
    # beyond exp(-40) nothing is left
    terms = int(min(max(scale * 40 ** (1 / shape) - begun, 0.0) / length + 1, MOST_TERMS))
    banked = float(np.exp(-(((begun + np.arange(1, terms + 1) * length) / scale) ** shape)).sum())
    rest = ((begun + (terms + 0.5) * length) / scale) ** shape
    tail = scale / shape * special.gamma(1 / shape) * special.gammaincc(1 / shape, rest)
    return float(tau / mtbf * (banked + tail / length))
