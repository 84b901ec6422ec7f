"""Checkpoints at several levels, each of which blocks computing: exact expectations, and the best pattern of them.

Level j is written behind every so manieth segment in the place of those below. A failure that level k is the lowest to
survive takes the run back to the last checkpoint of level k or above.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from mofa.errors import SpecError
from mofa.faults.checks import FloatN, check_above_zero, check_at_least_zero, checked_share
from mofa.faults.closed_forms.intervals import exact_interval_s, two_level_intervals_s
from mofa.faults.closed_forms.renewal import effective_restart_s

MAX_PATTERN = 1024
"""Most segments from one checkpoint of the highest level to the next. [-]"""
LEAST_SHARE = 1e-4
"""Share of failures below which a level's interval is no longer stretched for its own sake. [-]"""
NEAR = (0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0)
"""Ratios of intervals that are tried, over those of first order. [-]"""


@dataclass(frozen=True)
class _SegmentPart:
    """Time from a segment's begin, ``fixed + onward * (time from its end) + back * (time from a failure that no level
    inside survives)``, and how much of it checkpoints take; arrays of one shape. [s], [s], [-], [-]"""

    fixed: FloatN
    writing: FloatN
    onward: FloatN
    back: FloatN

    def then(self, other: _SegmentPart) -> _SegmentPart:
        return _SegmentPart(
            self.fixed + self.onward * other.fixed, self.writing + self.onward * other.writing,
            self.onward * other.onward, self.back + self.onward * other.back,
        )  # fmt: skip

    def repeated(self, times: FloatN) -> _SegmentPart:
        """So many of them one after the other, 0 of them included."""
        falls = 1 - self.onward
        with np.errstate(all="ignore"):
            number = np.where(falls > 1e-12, -np.expm1(times * np.log1p(-falls)) / falls, times)
        return _SegmentPart(self.fixed * number, self.writing * number, (1 - falls) ** times, self.back * number)


@dataclass(frozen=True)
class _Levels:
    """Facts of every level: blocking, share and restart, and how many of a level make the next one. Arrays."""

    interval_s: FloatN
    block_s: list[FloatN]
    mtbf_s: FloatN
    shares: list[FloatN]
    restart_s: list[FloatN]
    ratios: list[FloatN]

    def resume(self, level: int) -> FloatN:
        return np.asarray(np.exp(-self.restart_s[level] / self.mtbf_s))

    def segment(self, level: int, last: int) -> _SegmentPart:
        """From one checkpoint of at least this level to the next one of it, the last of which is of level ``last``."""
        if level < 0:
            computes = np.exp(-self.interval_s / self.mtbf_s)
            survives = np.exp(-(self.interval_s + self.block_s[last]) / self.mtbf_s)
            return _SegmentPart(
                self.mtbf_s * (1 - survives), self.mtbf_s * (computes - survives), survives, 1 - survives
            )
        inner = self.segment(level - 1, last)
        if level > 0:
            inner = self.segment(level - 1, level - 1).repeated(self.ratios[level - 1] - 1).then(inner)
        # a failure within goes back to this stretch's begin with the share and restart of this level, or beyond it
        share, a = self.shares[level], self.resume(level)
        fails = sum((self.shares[k] * (1 - self.resume(k)) for k in range(level + 1)), np.zeros_like(a))
        comes = sum((self.shares[k] * self.resume(k) for k in range(level + 1)), np.zeros_like(a))
        again = (1 - a) * share / (1 - fails)
        fixed = share * self.mtbf_s * (1 - a) + again * self.mtbf_s * fails
        begin = share * a + again * comes
        keeps = 1 - inner.back * begin
        return _SegmentPart(
            (inner.fixed + inner.back * fixed) / keeps, inner.writing / keeps, inner.onward / keeps,
            inner.back * (1 + again) / keeps,
        )  # fmt: skip


def ettr_of_checkpoint_levels(
    interval_s: ArrayLike, ratios: Sequence[ArrayLike], block_s: Sequence[ArrayLike], mtbf_s: ArrayLike,
    shares: Sequence[ArrayLike], restart_s: Sequence[ArrayLike],
) -> FloatN:  # fmt: skip
    """Exact ETTR of checkpoints at several levels, of any number of candidates at once. [-]

    Parameters
    ----------
    interval_s
        Compute time between two checkpoints of any level. Any shapes that broadcast. [s]
    ratios
        How many checkpoints of each level but the highest make one of the next, itself included. (levels - 1,) [-]
    block_s, restart_s
        Blocking time of each level, and restart from it. (levels,) [s]
    mtbf_s
        Mean time between failures. [s]
    shares
        Share of failures that each level is the lowest to survive. (levels,) [-]

    Notes
    -----
    :func:`mofa.faults.closed_forms.renewal.levels_ettr`, whose linear system has two unknowns a segment, solved from
    the inside: from a segment's begin the time is linear in the time from its end and in that from a failure which no
    level inside survives. Stretches in a row multiply, and a failure that goes back to a stretch's own begin is solved
    for.

    Examples
    --------
    >>> from mofa.faults.closed_forms.renewal import levels_ettr
    >>> facts = (1.0, 9.0, 60.0), 11135.0, (0.6, 0.3, 0.1), (60.0, 200.0, 600.0)
    >>> slow = levels_ettr(300.0, (1, 4, 12), *facts)
    >>> abs(float(ettr_of_checkpoint_levels(300.0, (4, 3), *facts)) - slow) < 1e-12
    True
    """
    return _up(interval_s, ratios, block_s, mtbf_s, shares, restart_s)[0]


def _up(
    interval_s: ArrayLike, ratios: Sequence[ArrayLike], block_s: Sequence[ArrayLike], mtbf_s: ArrayLike,
    shares: Sequence[ArrayLike], restart_s: Sequence[ArrayLike],
) -> tuple[FloatN, FloatN]:  # fmt: skip
    """Shares of the wall clock that are productive and that checkpoints take. [-]"""
    if not len(ratios) + 1 == len(block_s) == len(shares) == len(restart_s):
        got = f"{len(block_s)}, {len(shares)} and {len(restart_s)} entries beside {len(ratios)} ratios"
        raise SpecError(f"levels: block_s, shares and restart_s have {got}; give one of each per level")
    mtbf = check_above_zero("mtbf_s", mtbf_s, finite=False)
    interval = check_above_zero("interval_s", interval_s)
    blocks = [check_at_least_zero("block_s", b) for b in block_s]
    steps = [np.maximum(check_above_zero("ratios", r, ""), 1.0) for r in ratios]
    parts = [checked_share("shares", p) for p in shares]
    restarts = [check_at_least_zero("restart_s", r) for r in restart_s]
    shape = np.broadcast_shapes(*(x.shape for x in (interval, mtbf, *blocks, *steps, *parts, *restarts)))
    finite = np.where(np.isinf(mtbf), 1.0, mtbf) + np.zeros(shape)
    facts = _Levels(interval + np.zeros(shape), blocks, finite, parts, restarts, steps)
    top = len(blocks) - 1
    number = np.prod(np.broadcast_arrays(np.ones(shape), *steps), axis=0)
    mean = mean_blocking_s(ratios, block_s)
    with np.errstate(all="ignore"):
        pattern = facts.segment(top, top)
        fractions = (number * interval / pattern.fixed, pattern.writing / pattern.fixed)
    plain = (interval / (interval + mean), mean / (interval + mean))
    # where all but no segment survives, what is left of 1 is rounding
    productive, writing = (np.clip(np.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0), 0.0, 1.0) for x in fractions)
    return np.where(np.isinf(mtbf), plain[0], productive), np.where(np.isinf(mtbf), plain[1], writing)


def mean_blocking_s(ratios: Sequence[ArrayLike], block_s: Sequence[ArrayLike]) -> FloatN:
    """Blocking time behind a segment, on average over a pattern. [s]

    Examples
    --------
    >>> float(mean_blocking_s((4,), (1.0, 61.0)))
    16.0
    """
    blocks = [np.asarray(b, dtype=np.float64) for b in block_s]
    mean = blocks[-1]
    for ratio, block in zip(reversed(ratios), reversed(blocks[:-1]), strict=True):
        # of the segments that end with this level or a higher one, all but one in ``ratio`` are of this one
        mean = np.asarray(block + (mean - block) / np.maximum(ratio, 1.0))
    return mean


def ledger_shares_of_levels(
    interval_s: ArrayLike, ratios: Sequence[ArrayLike], block_s: Sequence[ArrayLike], mtbf_s: ArrayLike,
    shares: Sequence[ArrayLike], restart_s: Sequence[ArrayLike],
) -> dict[str, FloatN]:  # fmt: skip
    """Expected shares of the wall clock per part of the ledger; parameters as in :func:`ettr_of_checkpoint_levels`. [-]

    All are exact: :func:`ettr_of_checkpoint_levels`'s stretches count the time in checkpoints beside their own,
    restarting depends on no checkpoint, and what remains is lost.

    Examples
    --------
    >>> parts = ledger_shares_of_levels(172.0, (13,), (1.0, 60.0), 11135.0, (0.75, 0.25), (60.0, 600.0))
    >>> round(float(sum(parts.values())), 12)
    1.0
    """
    mtbf = check_above_zero("mtbf_s", mtbf_s, finite=False)
    columns = np.broadcast_arrays(mtbf, *shares, *restart_s)
    number = len(shares)
    weights, back = np.stack(columns[1 : number + 1], axis=-1), np.stack(columns[number + 1 :], axis=-1)
    total = weights.sum(axis=-1, keepdims=True)
    restart = effective_restart_s(
        back, np.where(total > 0, weights / np.where(total > 0, total, 1.0), 1 / number), mtbf
    )
    ends = np.isinf(np.asarray(interval_s, dtype=np.float64))
    known, writes = _up(np.where(ends, 1.0, interval_s), ratios, block_s, mtbf, shares, restart_s)
    up = np.exp(-restart / mtbf)
    productive = np.minimum(np.where(ends, 1.0, known), up)
    checkpoint = np.minimum(np.where(ends, 0.0, writes), up - productive)
    lost = np.maximum(up - productive - checkpoint, 0.0)
    return {
        "productive": productive, "checkpoint": checkpoint, "lost": lost, "restart": 1 - up,
        "waiting": np.zeros_like(lost),
    }  # fmt: skip


def best_checkpoint_pattern(
    block_s: Sequence[ArrayLike], mtbf_s: ArrayLike, shares: Sequence[ArrayLike], restart_s: Sequence[ArrayLike],
    interval_s: ArrayLike | None = None,
) -> tuple[FloatN, tuple[FloatN, ...]]:  # fmt: skip
    """The interval of the lowest level and the ratios of the levels above with the highest ETTR. [s], [-]

    Parameters
    ----------
    block_s, mtbf_s, shares, restart_s
        As in :func:`ettr_of_checkpoint_levels`.
    interval_s
        The lowest level's interval where it is given; the best one where absent. [s]

    Notes
    -----
    Ratios around those of first order, ``sqrt(2 delta_j M / p_j)`` each, delta_j what a level takes beyond the one
    below it; for each the interval of first order in the pattern's mean blocking time and of higher order. Within
    1e-3 in ETTR of all patterns where tests try them all.

    Examples
    --------
    >>> interval, (ratio,) = best_checkpoint_pattern((1.0, 60.0), 3.093 * 3600, (0.75, 0.25), (60.0, 600.0))
    >>> 150 < float(interval) < 190 and 10 <= float(ratio) <= 16  # first order: 172 s and 2312 s
    True
    """
    blocks = [check_at_least_zero("block_s", b) for b in block_s]
    mtbf = check_above_zero("mtbf_s", mtbf_s, finite=False)
    parts = [np.maximum(checked_share("shares", p), LEAST_SHARE) for p in shares]
    beyond = [np.maximum(b - a, 1e-3 * b) for a, b in itertools.pairwise(blocks)]
    wanted = [two_level_intervals_s((d, d), mtbf, p)[0] for d, p in zip([blocks[0], *beyond], parts, strict=True)]
    if interval_s is not None:
        wanted[0] = check_above_zero("interval_s", interval_s, finite=False)
    with np.errstate(all="ignore"):
        first = [np.nan_to_num(b / a, nan=1.0, posinf=MAX_PATTERN) for a, b in itertools.pairwise(wanted)]
    best, chosen = np.asarray(-1.0), (np.asarray(np.inf), tuple(np.asarray(1.0) for _ in first))
    for factors in itertools.product(NEAR, repeat=len(first)):
        ratios: tuple[FloatN, ...] = ()
        span = np.ones(())
        for r, f in zip(first, factors, strict=True):
            ratios = (*ratios, np.clip(np.round(r * f), 1.0, np.floor(MAX_PATTERN / span)))
            span = span * ratios[-1]
        block, spans = mean_blocking_s(ratios, blocks), [np.ones(()), *itertools.accumulate(ratios, np.multiply)]
        wide = sum((p * e for p, e in zip(parts, spans, strict=True)), np.zeros(()))
        own = (two_level_intervals_s((block, block), mtbf / wide, 1.0)[0], exact_interval_s(block, mtbf / wide))
        for interval in own if interval_s is None else (wanted[0],):
            valid_interval = np.where(np.isfinite(interval) & (interval > 0), interval, 1.0)
            value = np.where(
                np.isinf(mtbf), 1.0, ettr_of_checkpoint_levels(valid_interval, ratios, block_s, mtbf, shares, restart_s)
            )
            take = value > best
            chosen = (
                np.where(take, interval, chosen[0]),
                tuple(np.where(take, new, old) for new, old in zip(ratios, chosen[1], strict=True)),
            )
            best = np.where(take, value, best)
    return chosen
