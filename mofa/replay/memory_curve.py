"""A rank's memory over the seconds of a step: its timeline put on its clock, and thinned out for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mofa.replay.allocator.timeline import Journal
from mofa.replay.time.time_replayed import Computation

STRETCHES = 60
"""Stretches of a step that keep their highest and their lowest instant. [-]"""


@dataclass(frozen=True)
class MemoryOverTime:
    """Memory at some instants of a step: ``alive`` (instants, GROUPS); ``peak`` is the highest's index. [s], [B]"""

    time_s: NDArray[np.float64]
    reserved: NDArray[np.int64]
    alive: NDArray[np.int64]
    peak: int


def memory_over_last_step(journal: Journal, spans: Sequence[Computation], stretches: int = STRETCHES) -> MemoryOverTime:
    """Memory over the last step of a journal, on the clock.

    Parameters
    ----------
    spans
        The computations of the rank's step in order, the optimizer last.
    stretches
        How many stretches of equal time are told apart.

    Notes
    -----
    Of each computation the highest instant, put at its middle, and the last. Rounds that were not played look like
    those before them.
    """
    first = journal.steps[-1]
    total = journal.allocated_bytes_from_event(first)
    points: list[tuple[float, int]] = [(0.0, 0)]
    for start, end, begin_s, end_s in _passages(journal, spans):
        if end > start:
            points.append(((begin_s + end_s) / 2, start - first + int(total[start - first : end - first].argmax())))
        points.append((end_s, max(end - 1, first) - first))
    time_s = np.array([t for t, _ in points])
    events = np.array([event for _, event in points])
    keep = _extremes(time_s, total[events], stretches)
    time_s, events = time_s[keep], events[keep]
    marks = np.array([event for event, _ in journal.grown])
    reserved_after = np.array([reserved for _, reserved in journal.grown])
    reserved = reserved_after[np.maximum(np.searchsorted(marks, events + first, side="right") - 1, 0)]
    return MemoryOverTime(
        time_s,
        np.maximum(reserved, total[events]),
        journal.live_bytes_by_group(events + first),
        int(total[events].argmax()),
    )


def _passages(journal: Journal, spans: Sequence[Computation]) -> Iterator[tuple[int, int, float, float]]:
    """(first event, event after the last, start, end) of every computation of the last step, left out ones included."""
    first = journal.steps[-1]
    before = sum(1 for mark in journal.computations if mark[0] < first)
    before = next(i for i, mark in enumerate(journal.computations) if i >= before and mark[1] == "start")
    played = list(journal.computation_spans(first))[-(len(journal.computations) - before) :]
    gaps = {
        computation - before: (skipped, period)
        for computation, skipped, period in journal.skipped_rounds
        if computation > before
    }
    order: list[int] = []
    for i in range(len(played)):
        if i in gaps:
            skipped, period = gaps[i]
            order += [i - period + j % period for j in range(skipped)]
        order.append(i)
    clock = iter(spans)
    now = 0.0
    for i in order:
        start, end, kind, _, _ = played[i]
        if kind == "start":
            yield start, end, 0.0, 0.0
            continue
        if kind == "reduce":
            yield start, end, now, now
            continue
        span = next(clock, None)
        begin_s, now = (span.start_s, span.end_s) if span is not None else (now, now)
        yield start, end, begin_s, now


def _extremes(time_s: NDArray[np.float64], size: NDArray[np.int64], stretches: int) -> NDArray[np.intp]:
    """Positions of the highest and the lowest of every stretch, in their order, with the first and the last."""
    end_s = max(float(time_s[-1]), 1e-12)
    bin_of = np.minimum((time_s / end_s * stretches).astype(int), stretches - 1)
    keep = {0, len(time_s) - 1}
    for s in np.unique(bin_of):
        members = np.flatnonzero(bin_of == s)
        keep |= {int(members[size[members].argmax()]), int(members[size[members].argmin()])}
    return np.array(sorted(keep))
