"""The last word on the best rows of a search: their steps are played out, they are ranked again, and what is returned
has its memory played too and is dropped where it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mofa.replay.collection import no_collection
from mofa.search.plan import Candidate, enough
from mofa.search.result import Plan
from mofa.search.workers import Workers

if TYPE_CHECKING:
    from mofa.replay.timed import TimeReplayed

REPLAYED = 30
"""Rows whose steps are played and that are ranked again by them. [-]"""
PATIENCE = 2 * REPLAYED
"""Rows looked at where too few of them fit, as long as one has been found to. [-]"""

_Found = tuple[float, float, int, Candidate, Plan]
"""What is made smallest, the bytes that the plan lacks (negative: free), its row, itself."""


@dataclass
class Final:
    """The plans, best first, and their ``rows``; which rows do not fit, with the bytes that they lack. [B]"""

    plans: list[Plan] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    too_big: dict[int, float] = field(default_factory=dict)


def replay_best(
    rows: Sequence[int],
    candidate: Callable[[int], Candidate],
    top: int,
    progress: Callable[[int, int], None] | None = None,
    order: Callable[[Plan], float] | None = None,
    workers: Workers | None = None,
) -> Final:
    """Play the steps of the first :data:`REPLAYED` rows, rank them by that, and play the memory of the best that fit.

    Parameters
    ----------
    rows
        From the best on, as the closed forms rank them.
    candidate
        Gives the strategy of a row.
    top
        How many plans are wanted. Of the best all ranks are played, of the others the fullest.
    progress
        Told how many rows are played and how many there are to play.
    order
        What is made smallest; the time of a step where absent.
    workers
        What plays; this process alone where absent.

    Notes
    -----
    Memory is played in the order of the steps until ``top`` plans are found to fit, so that which plans are returned is
    what playing all of it would give. Where fewer of these rows fit, more are looked at, :data:`REPLAYED` at a time:
    :data:`PATIENCE` in all, and on to the last row where none does.

    Examples
    --------
    >>> replay_best([], lambda row: None, 10).plans
    []
    """
    out = Final()
    bar = _Bar(progress, min(len(rows), REPLAYED) + min(top, len(rows), REPLAYED))
    found: list[_Found] = []
    seen = 0
    while seen < len(rows) and (not found or (len(found) < min(top, REPLAYED) and seen < PATIENCE)):
        some = rows[seen : seen + REPLAYED]
        seen += len(some)
        found += _fitting(some, candidate, min(top, REPLAYED) - len(found), out.too_big, bar, order, workers)
    for _, _, row, one, plan in sorted(found, key=lambda item: item[:3])[:top]:
        out.plans.append(plan if out.plans else one.plan(replay=True, workers=workers))
        out.rows.append(row)
    bar.end()
    return out


def _fitting(
    rows: Sequence[int], candidate: Callable[[int], Candidate], wanted: int, too_big: dict[int, float], bar: _Bar,
    order: Callable[[Plan], float] | None, workers: Workers | None,
) -> list[_Found]:  # fmt: skip
    """The best of some rows that fit; those found to be ``too_big`` are put there."""
    ones = [candidate(row) for row in rows]
    workers = enough(ones, workers)
    ranked: list[tuple[float, int]] = []
    alike = sorted(range(len(ones)), key=lambda i: ones[i].pipeline)  # neighbours share what is made of an order
    for i, time in zip(alike, workers.map(_time, [ones[i] for i in alike]), strict=True):
        ones[i].time = time
        value = time.step_s if order is None else order(ones[i].timed())
        ranked.append((round(value, 12), i))
        bar.step()
    ranked.sort()
    found: list[_Found] = []
    while ranked and len(found) < wanted:
        next_ = ranked[: wanted - len(found)]
        del ranked[: len(next_)]
        next_ = _shared_out(next_, ones)
        for (value, i), plan in zip(next_, workers.map(_plan, [ones[i] for _, i in next_]), strict=True):
            if plan.memory.fits:
                found.append((value, -plan.memory.free_bytes, rows[i], ones[i], plan))
                bar.step()
            else:
                too_big[rows[i]] = -plan.memory.free_bytes
    return found


def _shared_out(ranked: list[tuple[float, int]], ones: Sequence[Candidate]) -> list[tuple[float, int]]:
    """In an order of which other processes begin at the one end and this one at the other, the longest first, but for
    the best: that one last, so that this process has its ranks when all of them are asked for."""
    best, *others = ranked
    others.sort(key=lambda item: -ones[item[1]].passes)
    return [*others[::2], *others[1::2][::-1], best]


class _Bar:
    """Counts what is played."""

    def __init__(self, progress: Callable[[int, int], None] | None, expected: int) -> None:
        self.progress, self.expected, self.done = progress, expected, 0

    def step(self) -> None:
        """One more is played."""
        self.done += 1
        self.expected = max(self.expected, self.done)
        if self.progress is not None:
            self.progress(self.done, self.expected)

    def end(self) -> None:
        """All is."""
        if self.progress is not None and self.done:
            self.progress(self.expected, self.expected)


def _time(one: Candidate) -> TimeReplayed:
    with no_collection():
        return one.time


def _plan(one: Candidate) -> Plan:
    with no_collection():
        return one.plan(replay=True, explain=False)
