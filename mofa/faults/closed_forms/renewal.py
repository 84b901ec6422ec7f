"""What a run with failures expects: closed forms of the time that a segment takes and of what is lost.

A *segment* is ``interval_s`` of computing and the checkpoint behind it. Failures are Poisson with mean time ``mtbf_s``
and strike at any time, also in a checkpoint and in a restart; after one, the run restarts and begins its segment anew.
ETTR, the effective training time ratio, is productive time over wall-clock time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from mofa.errors import SpecError
from mofa.faults.checks import FloatN, check_above_zero, check_at_least_zero, checked_share

MOST_SOLVED = 1024
"""Segments of a pattern whose linear system is solved. [-]"""


def expected_segment_s(
    interval_s: ArrayLike, block_s: ArrayLike, mtbf_s: ArrayLike, restart_s: ArrayLike, persist_s: ArrayLike = 0.0
) -> FloatN:
    """Expected wall-clock time of one segment, ``M exp((R + P) / M) (exp((tau + delta) / M) - 1)``. [s]

    Parameters
    ----------
    interval_s
        Compute time between checkpoints. Any shapes that broadcast. [s]
    block_s
        Time for which a checkpoint blocks computing. [s]
    mtbf_s
        Mean time between failures of the job; infinite without. [s]
    restart_s
        From a failure to computing again: one number, or :func:`effective_restart_s` of several kinds. [s]
    persist_s
        For an asynchronous checkpoint, the time from the end of blocking until it can be restored. [s]

    Notes
    -----
    With ``P`` it is the mean over a long run: after a restart the first checkpoint can be restored ``tau + delta + P``
    later, each further one ``tau + delta`` after the one before, so that a failure-free stretch X banks
    ``floor((X - P) / (tau + delta))`` segments, and ``sum_j P(X >= P + j L) = exp(-P / M) / (exp(L / M) - 1)``. Where
    ``P > tau + delta`` several checkpoints are under way at once.

    References
    ----------
    Daly 2006, doi:10.1016/j.future.2004.11.016, equation 13 (``P = 0``).

    Examples
    --------
    >>> hour = 3600.0
    >>> round(float(expected_segment_s(3402.84, 300.0, 6 * hour, 600.0)) * 500 * hour / 3402.84 / hour, 2)
    610.22
    """
    interval, block = (
        check_at_least_zero("interval_s", interval_s, finite=False),
        check_at_least_zero("block_s", block_s),
    )
    mtbf = check_above_zero("mtbf_s", mtbf_s, finite=False)
    after = check_at_least_zero("restart_s", restart_s, finite=False) + check_at_least_zero("persist_s", persist_s)
    length = interval + block
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(np.isinf(mtbf), length, mtbf * np.exp(after / mtbf) * np.expm1(length / mtbf))


def renewal_ettr(
    interval_s: ArrayLike, block_s: ArrayLike, mtbf_s: ArrayLike, restart_s: ArrayLike, persist_s: ArrayLike = 0.0
) -> FloatN:
    """Share of wall-clock time that is productive: ``tau`` over :func:`expected_segment_s`, with its parameters. [-]

    Examples
    --------
    >>> float(renewal_ettr(19 * 60.0, 60.0, 185.6 * 60, 600.0)).__round__(4)
    0.8525
    >>> float(renewal_ettr(600.0, 60.0, np.inf, 0.0)) == 1 / 1.1
    True
    """
    interval, block = (
        check_at_least_zero("interval_s", interval_s, finite=False),
        check_at_least_zero("block_s", block_s),
    )
    mtbf = check_above_zero("mtbf_s", mtbf_s, finite=False)
    segment = expected_segment_s(interval, block, mtbf, restart_s, persist_s)
    after = np.asarray(restart_s, dtype=np.float64) + np.asarray(persist_s, dtype=np.float64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        share = np.where(np.isinf(interval), np.where(np.isinf(mtbf), 1.0, 0.0), interval / segment)
        free = np.exp(-after / mtbf)  # checkpoints that cost nothing, taken all the time
    return np.where((interval == 0) & (block == 0), free, share)


def effective_restart_s(restart_s: ArrayLike, shares: ArrayLike, mtbf_s: ArrayLike) -> FloatN:
    """The single restart time that stands for several kinds of failure: ``-M ln(sum_k p_k exp(-R_k / M))``. [s]

    A restart that a failure interrupts begins anew with the kind of that failure, so that an attempt succeeds with
    ``A = sum p_k exp(-R_k / M)`` and failure to resumption takes ``M (1 / A - 1)``; the mean where failures are rare.

    Parameters
    ----------
    restart_s
        Restart time per kind. (..., kinds) [s]
    shares
        Share of failures of each kind, which sum to 1. (kinds,) or (..., kinds) [-]
    mtbf_s
        Mean time between failures of any kind. (...,) [s]

    Examples
    --------
    >>> float(effective_restart_s([300.0, 300.0], [0.3, 0.7], 6000.0)).__round__(6)
    300.0
    """
    restart, weights = check_at_least_zero("restart_s", restart_s, finite=False), checked_share("shares", shares)
    total = weights.sum(axis=-1)
    if not np.allclose(total, 1.0, atol=1e-9):
        raise SpecError(f"shares: sum to {float(np.max(total)):.9g}; make them sum to 1")
    mtbf = check_above_zero("mtbf_s", mtbf_s, finite=False)
    least = restart.min(axis=-1)  # taken out, so that long restarts don't underflow
    with np.errstate(invalid="ignore", over="ignore"):
        spread = np.exp(-(restart - least[..., None]) / mtbf[..., None])
        effective_s = least - mtbf * np.log((spread * weights).sum(axis=-1))
        mean = (restart * weights).sum(axis=-1)
    return np.asarray(np.where(np.isinf(mtbf) | np.isinf(mean), mean, effective_s))


def expected_lost_s_per_failure(interval_s: ArrayLike, block_s: ArrayLike, mtbf_s: ArrayLike) -> FloatN:
    """Time since the segment began when a failure strikes in it, ``M - L / (exp(L / M) - 1)``. [s]

    Half of the segment where it is short against M, M where it is long.

    Examples
    --------
    >>> [round(float(expected_lost_s_per_failure(*each)), 4) for each in ((10.0, 0.0, 1e6), (1e6, 0.0, 10.0))]
    [5.0, 10.0]
    """
    length = check_at_least_zero("interval_s", interval_s) + check_at_least_zero("block_s", block_s)
    mtbf = check_above_zero("mtbf_s", mtbf_s)
    x = length / mtbf
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        small = length * (0.5 - x / 12)
        return np.where(x < 1e-4, small, mtbf - length / np.expm1(x))


def first_order_waste(
    interval_s: ArrayLike, block_s: ArrayLike, mtbf_s: ArrayLike, restart_s: ArrayLike, persist_s: ArrayLike = 0.0
) -> FloatN:
    """``delta / tau + (tau / 2 + P + R) / M``: what is not productive, to first order in 1 / M. [-]

    Examples
    --------
    >>> float(first_order_waste(1000.0, 10.0, 10000.0, 100.0)).__round__(9)
    0.07
    """
    interval, block = check_above_zero("interval_s", interval_s), check_at_least_zero("block_s", block_s)
    mtbf = check_above_zero("mtbf_s", mtbf_s, finite=False)
    after = check_at_least_zero("restart_s", restart_s) + check_at_least_zero("persist_s", persist_s)
    return block / interval + (interval / 2 + after) / mtbf


def expected_uncheckpointed_work_s(work_s: ArrayLike, mtbf_s: ArrayLike) -> FloatN:
    """Expected time of work that is never checkpointed and restarts at once, ``M (exp(W / M) - 1)``. [s]

    Examples
    --------
    >>> float(expected_uncheckpointed_work_s(7200.0, 3600.0)) / 3600  # doctest: +ELLIPSIS
    6.389...
    """
    return expected_segment_s(check_above_zero("work_s", work_s), 0.0, mtbf_s, 0.0)


def meta_ettr(
    interval_s: ArrayLike, block_s: ArrayLike, mtbf_s: ArrayLike, restart_s: ArrayLike
) -> FloatN:  # fmt: skip
    """Meta's approximation, ``(1 - (u0 + tau / 2) / M) / (1 + w_cp / tau)``; at least 0. [-]

    Within 0.011 of the exact value up to 12,000 GPUs at their rates; too low where ``(u0 + tau / 2) / M`` nears 1.

    References
    ----------
    Kokolis et al. 2025, "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", HPCA,
    arXiv 2410.21680v2.

    Examples
    --------
    >>> float(meta_ettr(7.016 * 60, 10.0, 86400 / (1500 * 6.5e-3), 300.0)).__round__(4)
    0.9205
    """
    interval, block = check_above_zero("interval_s", interval_s), check_at_least_zero("block_s", block_s)
    mtbf = check_above_zero("mtbf_s", mtbf_s, finite=False)
    return np.maximum(1 - (check_at_least_zero("restart_s", restart_s) + interval / 2) / mtbf, 0.0) / (
        1 + block / interval
    )


def meta_ettr_queued(
    interval_s: ArrayLike, mtbf_s: ArrayLike, restart_s: ArrayLike, queue_s: ArrayLike, run_s: ArrayLike = np.inf
) -> FloatN:
    """ETTR of a run of ``run_s`` productive seconds that queues after every interruption, without write time. [-]

    With ``g = 1 - (u0 + tau / 2) / M``: ``g / ((1 + u0 / R) (1 + q / M) + (q / R) g)``, derived anew from the first
    version's definitions: the run is scheduled ``(R + u0) / g``, is interrupted that over M times, and queues once more
    at its start. At least 0.

    References
    ----------
    Kokolis et al., arXiv 2410.21680v1, its definitions of productive, unproductive and queued time.

    Examples
    --------
    >>> round(float(meta_ettr_queued(1800.0, 86400 / (1000 * 6.5e-3), 300.0, 60.0)), 3)
    0.906
    """
    mtbf = check_above_zero("mtbf_s", mtbf_s, finite=False)
    restart, queue = check_at_least_zero("restart_s", restart_s), check_at_least_zero("queue_s", queue_s)
    run = check_above_zero("run_s", run_s, finite=False)
    productive = np.maximum(1 - (restart + check_at_least_zero("interval_s", interval_s) / 2) / mtbf, 0.0)
    return productive / ((1 + restart / run) * (1 + queue / mtbf) + queue / run * productive)


def wasted_per_failure_s(checkpoint_s: ArrayLike, interval_s: ArrayLike, retrieve_s: ArrayLike) -> FloatN:
    """Expected time that one failure wastes with checkpoints in the background, ``t_ckpt + 1 / (2 f) + t_rtvl``. [s]

    Parameters
    ----------
    checkpoint_s
        From the begin of a checkpoint until it can be restored. [s]
    interval_s
        From one checkpoint to the next, 1 / f: no shorter than a checkpoint, nor than a step. [s]
    retrieve_s
        To load it. [s]

    References
    ----------
    Wang et al. 2023, "GEMINI", SOSP, doi:10.1145/3600006.3613145, section 3.

    Examples
    --------
    >>> float(wasted_per_failure_s(10.0, 10.0, 30.0))
    45.0
    """
    checkpoint, interval = check_at_least_zero("checkpoint_s", checkpoint_s), check_above_zero("interval_s", interval_s)
    if np.any(interval < checkpoint):
        raise SpecError("interval_s: is shorter than a checkpoint takes; let one end before the next begins")
    return checkpoint + interval / 2 + check_at_least_zero("retrieve_s", retrieve_s)


def two_level_waste(
    interval_s: tuple[ArrayLike, ArrayLike], block_s: tuple[ArrayLike, ArrayLike], mtbf_s: ArrayLike,
    restart_s: tuple[ArrayLike, ArrayLike], recoverable: ArrayLike,
) -> FloatN:  # fmt: skip
    """First-order waste of a fast level, which serves a share p of failures, and a safe one. [-]

    ``d1 / t1 + d2 / t2 + (p (R1 + t1 / 2) + (1 - p) (R2 + t2 / 2)) / M``.

    Examples
    --------
    >>> one = first_order_waste(1000.0, 10.0, 10000.0, 100.0)
    >>> float(two_level_waste((1000.0, 1e12), (10.0, 0.0), 10000.0, (100.0, 0.0), 1.0)) == float(one)
    True
    """
    (t1, t2), (d1, d2) = interval_s, block_s
    p = checked_share("recoverable", recoverable)
    mtbf = check_above_zero("mtbf_s", mtbf_s, finite=False)
    fast, safe = check_above_zero("interval_s", t1), check_above_zero("interval_s", t2)
    r1, r2 = (check_at_least_zero("restart_s", r) for r in restart_s)
    lost = p * (r1 + fast / 2) + (1 - p) * (r2 + safe / 2)
    return check_at_least_zero("block_s", d1) / fast + check_at_least_zero("block_s", d2) / safe + lost / mtbf


def levels_ettr(
    interval_s: float, every: Sequence[int], block_s: Sequence[float], mtbf_s: float,
    shares: Sequence[float], restart_s: Sequence[float],
) -> float:  # fmt: skip
    """Exact ETTR of checkpoints at several levels. [-]

    Parameters
    ----------
    interval_s
        Compute time between two checkpoints of the lowest level. [s]
    every
        Level i is written behind every ``every[i]``-th segment in the place of those below; the first is 1 and each a
        multiple of the one before. (levels,) [segments]
    block_s
        Time that a checkpoint of each level blocks. (levels,) [s]
    mtbf_s
        Mean time between failures. [s]
    shares
        Share of failures that level i is the lowest to survive. (levels,) [-]
    restart_s
        Restart time from each level. (levels,) [s]

    Notes
    -----
    In a pattern of ``n = every[-1]`` segments, T_i is the expected time from the begin of segment i to the pattern's
    end and F_i that from a failure in it: ``T_i = M (1 - b_i) + b_i T_{i+1} + (1 - b_i) F_i``, ``b_i = exp(-L_i / M)``;
    ``F_i = sum_k p_k (M (1 - a_k) + a_k T_r + (1 - a_k) F_r)``, ``a_k = exp(-R_k / M)``, r the last segment whose begin
    level k has. The linear system is solved; every checkpoint is restorable when its blocking ends.

    Examples
    --------
    >>> two = levels_ettr(600.0, (1, 1), (60.0, 60.0), 11135.0, (0.4, 0.6), (300.0, 300.0))
    >>> round(two - float(renewal_ettr(600.0, 60.0, 11135.0, 300.0)), 12)
    0.0
    """
    check_checkpoint_levels(every, block_s, shares, restart_s)
    mtbf, n = float(check_above_zero("mtbf_s", mtbf_s, finite=False)), every[-1]
    of = [max(j for j, step in enumerate(every) if (i + 1) % step == 0) for i in range(n)]
    lengths = float(check_above_zero("interval_s", interval_s)) + np.array([block_s[j] for j in of])
    if np.isinf(mtbf):
        return float(n * interval_s / lengths.sum())
    survive, resume = np.exp(-lengths / mtbf), np.exp(-np.asarray(restart_s, dtype=float) / mtbf)
    matrix, known = np.eye(2 * n), np.zeros(2 * n)
    for i in range(n):
        known[i] = mtbf * (1 - survive[i])
        matrix[i, n + i] -= 1 - survive[i]
        if i + 1 < n:
            matrix[i, i + 1] -= survive[i]
        for k, p in enumerate(shares):
            r = i // every[k] * every[k]
            known[n + i] += p * mtbf * (1 - resume[k])
            matrix[n + i, r] -= p * resume[k]
            matrix[n + i, n + r] -= p * (1 - resume[k])
    return float(n * interval_s / np.linalg.solve(matrix, known)[0])


def check_checkpoint_levels(
    every: Sequence[int], block_s: Sequence[float], shares: Sequence[float], restart_s: Sequence[float],
    most: int = MOST_SOLVED,
) -> None:  # fmt: skip
    """Refuse levels whose steps don't nest or take more than ``most`` segments, whose shares don't sum to 1 or whose
    lists differ in length."""
    if not len(every) == len(block_s) == len(shares) == len(restart_s) >= 1:
        raise SpecError(
            f"levels: every, block_s, shares and restart_s have {len(every)}, {len(block_s)}, {len(shares)} and "
            f"{len(restart_s)} entries; give one of each per level"
        )
    if every[0] != 1 or any(b < 1 or b % a for a, b in itertools.pairwise(every)) or every[-1] > most:
        raise SpecError(
            f"every: is {tuple(every)}; begin with 1 and let each be a multiple of the one before, to {most}"
        )
    check_at_least_zero("block_s", block_s)
    check_at_least_zero("restart_s", restart_s)
    if abs(float(checked_share("shares", shares).sum()) - 1) > 1e-9:
        raise SpecError(f"shares: sum to {sum(shares):.9g}; make them sum to 1")
