"""How long to compute between two checkpoints.

Notation of this room: M = mean time between failures of the whole job, tau = compute time between checkpoints (without
the checkpoint), delta = time for which one checkpoint blocks computing, R = time of a restart.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from mofa.faults.checks import FloatN, check_above_zero, check_at_least_zero, checked_share


def _both(block_s: ArrayLike, mtbf_s: ArrayLike) -> tuple[FloatN, FloatN]:
    return check_at_least_zero("block_s", block_s), check_above_zero("mtbf_s", mtbf_s, finite=False)


def young_interval_s(block_s: ArrayLike, mtbf_s: ArrayLike) -> FloatN:
    """Young's interval, ``sqrt(2 delta M)``. [s]

    Parameters
    ----------
    block_s
        Time for which one checkpoint blocks computing. Any shape. [s]
    mtbf_s
        Mean time between failures of the job; infinite without failures. [s]

    References
    ----------
    Young 1974, "A first order approximation to the optimum checkpoint interval", doi:10.1145/361147.361115.

    Examples
    --------
    >>> float(young_interval_s(300.0, 86400.0)) / 60
    120.0
    """
    block, mtbf = _both(block_s, mtbf_s)
    with np.errstate(invalid="ignore"):
        return np.where(block == 0, 0.0, np.sqrt(2 * block * mtbf))


def daly_interval_s(block_s: ArrayLike, mtbf_s: ArrayLike) -> FloatN:
    """Daly's first-order interval, ``sqrt(2 delta M) - delta``: Young's without the checkpoint itself; at least 0. [s]

    Examples
    --------
    >>> float(daly_interval_s(300.0, 86400.0)) / 60
    115.0
    """
    return np.maximum(young_interval_s(block_s, mtbf_s) - np.asarray(block_s, dtype=np.float64), 0.0)


def daly_with_restart_interval_s(block_s: ArrayLike, mtbf_s: ArrayLike, restart_s: ArrayLike) -> FloatN:
    """The other first-order form that goes by Daly's name, ``sqrt(2 delta (M + R))``. [s]

    Examples
    --------
    >>> round(float(daly_with_restart_interval_s(300.0, 86400.0, 600.0)) / 60, 2)
    120.42
    """
    block, mtbf = _both(block_s, mtbf_s)
    return young_interval_s(block, mtbf + check_at_least_zero("restart_s", restart_s))


def daly_higher_order_interval_s(block_s: ArrayLike, mtbf_s: ArrayLike) -> FloatN:
    """Daly's higher-order interval. [s]

    ``sqrt(2 delta M) (1 + sqrt(delta / 2M) / 3 + (delta / 2M) / 9) - delta`` where ``delta < 2M``, else ``M``.

    References
    ----------
    Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), equation 20,
    doi:10.1016/j.future.2004.11.016.

    Examples
    --------
    >>> round(float(daly_higher_order_interval_s(300.0, 6 * 3600.0)) / 60, 3)
    56.713
    """
    block, mtbf = _both(block_s, mtbf_s)
    half = block / (2 * mtbf)
    series = young_interval_s(block, mtbf) * (1 + np.sqrt(half) / 3 + half / 9) - block
    return np.where(half < 1, series, mtbf)


def exact_interval_s(block_s: ArrayLike, mtbf_s: ArrayLike) -> FloatN:
    """The interval that makes the expected time smallest where failures are Poisson, whatever a restart takes. [s]

    ``M (1 + W0(-exp(-1 - delta / M)))``, W0 the principal branch of Lambert's function: where the derivative of
    ``tau / (exp((tau + delta) / M) - 1)`` vanishes. 0 where a checkpoint costs nothing, infinite without failures.

    References
    ----------
    Bougeret, Casanova, Rabie, Robert, Vivien 2011, "Checkpointing strategies for parallel jobs",
    doi:10.1145/2063384.2063428.

    Examples
    --------
    >>> [round(float(exact_interval_s(300.0, m)) / 60, 3) for m in (86400.0, 21600.0, 900.0)]
    [116.69, 56.714, 9.167]
    """
    from scipy.special import lambertw  # a third of a second to load

    block, mtbf = _both(block_s, mtbf_s)
    x = block / mtbf
    # near the branch point the argument of W0 rounds away what matters: its series in p = sqrt(2 (1 + e z)) there
    p = np.sqrt(-2 * np.expm1(-x))
    near = p * (1 + p * (-1 / 3 + p * (11 / 72 + p * (-43 / 540 + p * 769 / 17280))))
    argument = np.asarray(-np.exp(-1 - x), dtype=np.float64)
    far = 1 + np.real(lambertw(argument, 0))
    with np.errstate(invalid="ignore"):
        interval_s = mtbf * np.where(x < 1e-4, near, far)
    return np.where(block == 0, 0.0, np.where(np.isinf(mtbf), np.inf, interval_s))


def highest_availability_interval_s(block_s: ArrayLike, mtbf_s: ArrayLike, restart_s: ArrayLike) -> FloatN:
    """The interval that makes availability largest, by its first order: ``sqrt(2 (M + R) delta + delta^2)``. [s]

    The source gives the period from checkpoint to checkpoint, ``delta`` more.

    References
    ----------
    Saxena et al. 2024, "Optimal checkpoint interval under availability", arXiv 2410.18124, abstract.

    Examples
    --------
    >>> round(float(highest_availability_interval_s(60.0, 11135.0, 300.0)), 1)
    1172.9
    """
    block, mtbf = _both(block_s, mtbf_s)
    return np.sqrt(2 * (mtbf + check_at_least_zero("restart_s", restart_s)) * block + block**2)


def overlapped_interval_s(block_s: ArrayLike, mtbf_s: ArrayLike, down_s: ArrayLike, work_rate: ArrayLike) -> FloatN:
    """First-order interval where computing goes on at a share w of its speed while a checkpoint is written. [s]

    Period ``sqrt(2 (1 - w) C (M - (D + R + w C)))`` less the checkpoint C, with ``down_s`` = D + R; at least 0. It
    follows from a waste of ``(1 - w) C / T`` without failures and ``(D + R + w C + T / 2) / M`` with them.

    References
    ----------
    Aupy, Benoit, Hérault, Robert, Dongarra 2013, "Optimal checkpointing period: time vs. energy", hal-00926199.

    Examples
    --------
    >>> float(overlapped_interval_s(300.0, 86700.0, 300.0, 0.0)) == float(daly_interval_s(300.0, 86400.0))
    True
    """
    block, mtbf = _both(block_s, mtbf_s)
    rate = checked_share("work_rate", work_rate)
    rest = np.maximum(mtbf - (check_at_least_zero("down_s", down_s) + rate * block), 0.0)
    return np.maximum(np.sqrt(2 * (1 - rate) * block * rest) - block, 0.0)


def least_interval_s(
    checkpoint_bytes: ArrayLike, write_bytes_per_s: ArrayLike, block_s: ArrayLike, in_flight: ArrayLike = 1.0
) -> FloatN:
    """The shortest compute time between checkpoints that storage can follow. [s]

    A checkpoint must be written before the next one begins to be, or ``in_flight`` of them may be under way:
    ``P / n - delta`` with ``P = bytes / rate``. A blocking checkpoint (delta = P) has no such bound.

    Examples
    --------
    >>> float(least_interval_s(5.29e12, 52.9e9, 10.0)), float(least_interval_s(5.29e12, 52.9e9, 10.0, in_flight=4))
    (90.0, 15.0)
    """
    persist = check_at_least_zero("checkpoint_bytes", checkpoint_bytes, "B") / check_above_zero(
        "write_bytes_per_s", write_bytes_per_s, "B/s", finite=False
    )
    spacing = persist / check_above_zero("in_flight", in_flight, "")
    return np.maximum(spacing - check_at_least_zero("block_s", block_s), 0.0)


def two_level_intervals_s(
    block_s: tuple[ArrayLike, ArrayLike], mtbf_s: ArrayLike, recoverable: ArrayLike
) -> tuple[FloatN, FloatN]:
    """First-order intervals of a fast level and a safe one: ``sqrt(2 delta_i M / share_i)``. [s]

    Parameters
    ----------
    block_s
        Blocking times of the fast and of the safe level. [s]
    mtbf_s
        Mean time between failures of the job. [s]
    recoverable
        Share of failures after which the fast level can be read; the safe one serves the rest. [-]

    Returns
    -------
    tuple
        Intervals of the two; infinite for a level that no failure needs. [s]

    Examples
    --------
    >>> [round(float(t)) for t in two_level_intervals_s((1.0, 60.0), 3.093 * 3600, 0.75)]
    [172, 2312]
    """
    fast, mtbf = _both(block_s[0], mtbf_s)
    safe = check_at_least_zero("block_s[1]", block_s[1])
    p = checked_share("recoverable", recoverable)
    with np.errstate(divide="ignore", invalid="ignore"):
        fast_s = np.where(p > 0, np.sqrt(2 * fast * mtbf / p), np.inf)
        slow_s = np.where(p < 1, np.sqrt(2 * safe * mtbf / (1 - p)), np.inf)
    return fast_s, slow_s
