"""A fast level of checkpoints and a safe one, each restorable some time after it was written: the exact ETTR."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from mofa.faults.checks import FloatN, check_above_zero, check_at_least_zero, checked_share


def two_level_ettr(
    interval_s: ArrayLike, segments: ArrayLike, block_s: tuple[ArrayLike, ArrayLike], mtbf_s: ArrayLike,
    restart_s: tuple[ArrayLike, ArrayLike], recoverable: ArrayLike, persist_s: tuple[ArrayLike, ArrayLike] = (0.0, 0.0),
    work_s: ArrayLike = np.inf,
) -> FloatN:  # fmt: skip
    """ETTR of a fast level behind every segment, and a safe one behind every ``segments``-th in its place. [-]

    Parameters
    ----------
    interval_s
        Compute time between two checkpoints of any level. Any shapes that broadcast. [s]
    segments
        Segments from one safe checkpoint to the next; at least 1. [-]
    block_s, restart_s, persist_s
        Of the fast and of the safe level: blocking, restart, and time until it can be restored; the fast one no later
        than the safe one. [s]
    mtbf_s
        Mean time between failures. [s]
    recoverable
        Share p of failures that the fast level survives. [-]
    work_s
        Productive time of the run; endless where absent. [s]

    Notes
    -----
    :func:`mofa.faults.closed_forms.renewal.levels_ettr` for two levels, solved: with ``a_k = exp(-R_k / M)``,
    ``A = p a_1 + q a_2``, ``D = q + p a_1``, ``u = p a_1 / D``, ``c = M (p (1 - a_1) + q (1 - a_2) / A) / D`` and for a
    segment that survives with b: ``g = 1 - (1 - b) u``, ``beta = b / g``, ``kappa = (1 - b) (M + c) / g``, the pattern
    takes ``kappa_1 / beta_2 (beta_1^-(n-1) - 1) / (1 - beta_1) + kappa_2 / beta_2``.

    A fast checkpoint that can be restored P_1 later shifts the ends of all segments behind a restart by P_1, as if the
    restart took that much longer. Of the safe one :func:`share_of_completed_patterns_kept` are left.

    A run that ends before storage keeps anything loses no more than what it has: as one that begins anew at each of the
    failures which only the safe level survives, x of which are expected, ``x / (exp(x) - 1)`` is left. Of these two,
    which both say too little, the larger is taken.

    Examples
    --------
    >>> from mofa.faults.closed_forms.renewal import levels_ettr
    >>> args = (600.0, 4, (1.0, 60.0), 11135.0, (60.0, 600.0), 0.75)
    >>> exact = levels_ettr(600.0, (1, 4), (1.0, 60.0), 11135.0, (0.75, 0.25), (60.0, 600.0))
    >>> round(float(two_level_ettr(*args)) - exact, 12)
    0.0
    """
    interval, n = (
        check_above_zero("interval_s", interval_s),
        np.maximum(check_above_zero("segments", segments, ""), 1.0),
    )
    mtbf = check_above_zero("mtbf_s", mtbf_s, finite=False)
    p = checked_share("recoverable", recoverable)
    blocks = [check_at_least_zero("block_s", b) for b in block_s]
    persist = check_at_least_zero("persist_s", persist_s[1])
    shift = np.minimum(check_at_least_zero("persist_s", persist_s[0]), persist)
    r1, r2 = (check_at_least_zero("restart_s", r) + shift for r in restart_s)
    lengths = (interval + blocks[0], interval + blocks[1])
    with np.errstate(all="ignore"):
        a1, a2 = np.exp(-r1 / mtbf), np.exp(-r2 / mtbf)
        both, some = p * a1 + (1 - p) * a2, (1 - p) + p * a1
        u, v = p * a1 / some, (1 - p) / some
        c = mtbf * (p * -np.expm1(-r1 / mtbf) + (1 - p) * -np.expm1(-r2 / mtbf) / both) / some
        fails = [-np.expm1(-length / mtbf) for length in lengths]
        kappa = [f * (mtbf + c) / (1 - f * u) for f in fails]
        falls = fails[0] * v / (1 - fails[0] * u)  # 1 - beta of the fast level
        again = np.where(falls > 1e-12, np.expm1(-(n - 1) * np.log1p(-falls)) / falls, n - 1)
        pattern = (kappa[0] * again + kappa[1]) * (1 - fails[1] * u) / (1 - fails[1])
        in_pattern = n * interval / pattern
    productive = share_of_completed_patterns_kept(n, lengths, mtbf, u, persist - shift)
    plain = n * interval / (n * interval + (n - 1) * blocks[0] + blocks[1])
    with np.errstate(all="ignore"):
        anew = (1 - p) / (mtbf * in_pattern) * np.asarray(work_s, dtype=np.float64)
        begun = np.where(anew > 0, anew / np.expm1(anew), 1.0)
        left = np.fmax(productive, np.where(np.isinf(anew), 0.0, begun))
    return np.where(np.isinf(mtbf), plain, in_pattern * np.where(p == 1, 1.0, left))


def share_of_completed_patterns_kept(
    segments: ArrayLike, length_s: tuple[ArrayLike, ArrayLike], mtbf_s: ArrayLike, resumes: ArrayLike,
    persist_s: ArrayLike,
) -> FloatN:  # fmt: skip
    """Share of the patterns completed that a failure which only the safe level survives finds kept. [-]

    Parameters
    ----------
    segments
        Segments n of a pattern, behind the last of which a safe checkpoint is written. [-]
    length_s
        Of a segment that ends with a fast checkpoint, and of the last one. [s]
    mtbf_s
        Mean time between failures of any kind. [s]
    resumes
        Chance u that computing goes on after a failure before one comes that only the safe level survives. [-]
    persist_s
        P, until a safe checkpoint can be restored; any failure before undoes it. [s]

    Notes
    -----
    From the moment a safe checkpoint was written, it or a later one is kept with ``s + w x`` of that same chance x:
    ``s = exp(-P / M)`` that nothing fails until then, w that something does and the run still gets to the end of the
    pattern in which it resumes. So ``x = s / (1 - w)``. With ``beta = b / (1 - (1 - b) u)`` for a segment which
    survives with b, v the product over a pattern and T its length, ``w = v - s reach`` where P lies within a pattern,
    reach the chance from P on; of each whole pattern that P takes, ``v - exp(-T / M)``.

    Examples
    --------
    >>> from math import exp
    >>> float(share_of_completed_patterns_kept(1, (600.0, 600.0), 6000.0, 0.0, 600.0)) == exp(-0.1)  # the safe level
    True
    """
    n, mtbf = np.asarray(segments, dtype=np.float64), np.asarray(mtbf_s, dtype=np.float64)
    persist, u = np.asarray(persist_s, dtype=np.float64), np.asarray(resumes, dtype=np.float64)
    fast, last = (np.asarray(x, dtype=np.float64) for x in length_s)

    def survives(seconds: FloatN) -> FloatN:
        return np.asarray(np.exp(-seconds / mtbf))

    def ends(seconds: FloatN) -> FloatN:
        """That a segment ends, begun anew as often as it takes."""
        return np.asarray(survives(seconds) / (1 + np.expm1(-seconds / mtbf) * u))

    with np.errstate(all="ignore"):
        pattern_s = (n - 1) * fast + last
        patterns = np.floor(persist / pattern_s)
        rest = persist - patterns * pattern_s
        number = np.minimum(np.floor(rest / fast), n - 1)
        is_last = number == n - 1
        left = np.where(is_last, last, fast) - (rest - number * fast)
        begun = survives(left) - np.expm1(-left / mtbf) * u * np.where(is_last, ends(last), ends(fast))
        reach = begun * np.where(is_last, 1.0, ends(fast) ** (n - 2 - number) * ends(last))
        through = ends(fast) ** (n - 1) * ends(last)
        before = np.expm1(-patterns * pattern_s / mtbf) / np.expm1(-pattern_s / mtbf)
        fails = (through - survives(pattern_s)) * before
        fails = fails + survives(patterns * pattern_s) * (through - survives(rest) * reach)
        return np.asarray(survives(persist) / (1 - fails))
