"""Re-rank the best rows of a search by replay.

The steps of these rows are replayed and ranked, then the memory of the best. A row that does not fit recomputes more
layers, if it can, and is ranked anew. Else it is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, takewhile
from operator import not_
from typing import TYPE_CHECKING

from mofa.plan.result import Plan
from mofa.replay.garbage_collection import without_garbage_collection
from mofa.search.to_plan.builder import CandidatePlan, replay_workers
from mofa.search.to_plan.steps_on_hosts import cost_on_all_hosts
from mofa.search.workers import WorkerProcesses

if TYPE_CHECKING:
    from mofa.replay.time.time_replayed import ReplayedTime

REPLAYED = 30
"""Rows that are ranked again by their replayed steps. [-]"""
PATIENCE = 2 * REPLAYED
"""Rows replayed at most where too few fit, as long as one does. [-]"""
DISAGREEMENT = 0.02
"""Share of its closed form by which a played step may be shorter: 99 % of 500 random strategies differ by 1.9 % at most
(docs/evidence/agreement.md). [-]"""
MORE_LAYERS = 3
"""Larger numbers of recomputed layers that are tried for one row. [-]"""


@dataclass
class _Row:
    """A row: its place by the closed form, its candidate, and how many candidates were tried before."""

    place: int
    row: int
    candidate: CandidatePlan
    tried: int = 0
    closed: float = -math.inf
    """The key to minimise in closed form, where it may say that the row need not be played."""


_FittingPlan = tuple[float, float, _Row, Plan]
"""The key to minimise, the bytes that the plan lacks (negative: free), its row, and the plan."""


@dataclass
class ReplayedRanking:
    """The plans, best first, and their ``rows``; which rows do not fit, with the bytes that they lack. [B]

    ``changed`` are the rows that recompute more layers than the search chose, whether or not they fit.
    """

    plans: list[Plan] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    lacking_bytes: dict[int, float] = field(default_factory=dict)
    changed: dict[int, CandidatePlan] = field(default_factory=dict)


def replay_best_rows(
    rows: Sequence[int],
    candidate: Callable[[int], CandidatePlan],
    top: int,
    progress: Callable[[int, int], None] | None = None,
    order: Callable[[Plan], float] | None = None,
    workers: WorkerProcesses | None = None,
    closed: Sequence[float] | None = None,
) -> ReplayedRanking:
    """Replay the steps of the first :data:`REPLAYED` rows, rank by them, and replay the memory of the best that fit.

    Parameters
    ----------
    rows
        In the order of the closed forms, the best first.
    candidate
        Gives the strategy of a row.
    top
        How many plans are wanted. Of the best plan all ranks are replayed that may not fit, of all the fullest.
    progress
        Called with the number of replayed rows, and of rows to replay.
    order
        The key to minimise; the time of a step where absent.
    workers
        Processes that replay; this one alone where absent.
    closed
        The key of each row in closed form; all are played where absent.

    Notes
    -----
    A row is not played whose closed form passes the last of the wanted plans by more than :data:`DISAGREEMENT`.
    Memory is replayed in the order of the steps until ``top`` plans fit: the same plans come out as if all memory were
    replayed. If fewer rows fit, more are replayed, :data:`REPLAYED` at a time. That ends at :data:`PATIENCE` rows, or
    at the last row where none fits.

    The search may have solved for too few recomputed layers, by the replay. Then the row goes on with more
    (:func:`mofa.search.recomputed_layers.more_recomputed_layers`), :data:`MORE_LAYERS` times at most. It is ranked anew
    among these rows, or later if the closed form finds it slower than all of these.

    Examples
    --------
    >>> replay_best_rows([], lambda row: None, 10).plans
    []
    """
    out = ReplayedRanking()
    bar = _Bar(progress, min(len(rows), REPLAYED) + min(top, len(rows), REPLAYED))
    fitting_plans: list[_FittingPlan] = []
    later: list[_Row] = []
    seen = 0
    with without_garbage_collection():  # what is played of most rows is gone before it would be looked through
        while seen < len(rows) and (not fitting_plans or (len(fitting_plans) < min(top, REPLAYED) and seen < PATIENCE)):
            some = [
                _Row(i, rows[i], candidate(rows[i]), closed=-math.inf if closed is None else closed[i])
                for i in range(seen, min(seen + REPLAYED, len(rows)))
            ]
            seen += len(some)
            last = some[-1].candidate if seen < len(rows) else None
            due, later = _due(later, last, order)
            wanted = min(top, REPLAYED) - len(fitting_plans)
            fitting, postponed = _fitting([*some, *due], last, wanted, out, bar, order, workers)
            fitting_plans += fitting
            later += postponed
        for _, _, row, plan in sorted(fitting_plans, key=_fitting_key)[:top]:
            out.plans.append(plan if out.plans else row.candidate.plan_with_certain_verdict(workers))
            out.rows.append(row.row)
    bar.end()
    return out


def _fitting(
    rows: Sequence[_Row], last: CandidatePlan | None, wanted: int, out: ReplayedRanking, bar: _Bar,
    order: Callable[[Plan], float] | None, workers: WorkerProcesses | None,
) -> tuple[list[_FittingPlan], list[_Row]]:  # fmt: skip
    """The best fitting rows, and rows for later: they recompute more now and come after the ``last`` of these rows.

    Verdicts on the others are added to ``out``.
    """
    workers = replay_workers([row.candidate for row in rows], workers)
    unplayed, ranked = sorted(rows, key=lambda row: (row.closed, row.place)), list[tuple[float, _Row]]()
    fitting_plans: list[_FittingPlan] = []
    later: list[_Row] = []
    while (ranked or unplayed) and len(fitting_plans) < wanted:
        while some := _next_to_play(unplayed, ranked, wanted - len(fitting_plans)):
            del unplayed[: len(some)]
            ranked = sorted([*ranked, *_ranked(some, bar, order, workers)], key=_key)
        next_ = _shared_out(ranked[: wanted - len(fitting_plans)])
        del ranked[: len(next_)]
        cost_on_all_hosts([row.candidate for _, row in next_])
        changed: list[_Row] = []
        for (value, row), plan in zip(next_, workers.map(_plan, [row.candidate for _, row in next_]), strict=True):
            lacking = -plan.memory.free_bytes
            if plan.memory.fits:
                fitting_plans.append((value, lacking, row, plan))
                _forget_all_but_best(fitting_plans)
                bar.step()
            elif (
                row.tried < MORE_LAYERS
                and (with_more := row.candidate.with_more_recomputed_layers(lacking)) is not None
            ):
                changed.append(replace(row, candidate=with_more, tried=row.tried + 1, closed=-math.inf))
                out.changed[row.row] = with_more
            else:
                out.lacking_bytes[row.row] = lacking
            if not plan.memory.fits:
                row.candidate.forget_played_ranks()
        due, postponed = _due(changed, last, order)
        later += postponed
        ranked = sorted([*ranked, *_ranked(due, bar, order, workers)], key=_key)
    return fitting_plans, later


def _next_to_play(unplayed: list[_Row], ranked: list[tuple[float, _Row]], wanted: int) -> list[_Row]:
    """The first rows, in the order of their closed forms, that may be among the wanted ones beside those played."""
    if len(ranked) < wanted:
        return unplayed[: wanted - len(ranked)]
    last = ranked[wanted - 1][0]
    return list(takewhile(lambda row: row.closed * (1.0 - DISAGREEMENT) <= last, unplayed))


def _fitting_key(fitting: _FittingPlan) -> tuple[float, float, int]:
    return *fitting[:2], fitting[2].row


def _forget_all_but_best(fitting_plans: Sequence[_FittingPlan]) -> None:
    """Drop what was played of rows that another one beats: all ranks are asked for of the best one alone."""
    best = min(fitting_plans, key=_fitting_key)
    for fitting in fitting_plans:
        if fitting is not best:
            fitting[2].candidate.forget_played_ranks()


def _due(
    rows: list[_Row], last: CandidatePlan | None, order: Callable[[Plan], float] | None
) -> tuple[list[_Row], list[_Row]]:
    """The rows that the closed form ranks before the last replayed one, all where it is None; and the other rows."""
    if not rows or last is None:
        return rows, []
    slowest = _closed(last, order)
    after = [_closed(row.candidate, order) > slowest for row in rows]
    return list(compress(rows, map(not_, after))), list(compress(rows, after))


def _ranked(
    rows: Sequence[_Row], bar: _Bar, order: Callable[[Plan], float] | None, workers: WorkerProcesses
) -> list[tuple[float, _Row]]:  # fmt: skip
    """The rows ranked by the key to minimise, after a replay of their steps."""
    ranked: list[tuple[float, _Row]] = []
    alike = sorted(rows, key=lambda row: row.candidate.order_key)  # neighbours share what is made of an order
    for row, time in zip(alike, workers.map(_time, [row.candidate for row in alike]), strict=True):
        row.candidate.replayed_time = time
        value = time.step_s if order is None else order(row.candidate.plan_with_replayed_time())
        ranked.append((round(value, 12), row))
        bar.step()
    return sorted(ranked, key=_key)


def _key(ranked: tuple[float, _Row]) -> tuple[float, int]:
    return ranked[0], ranked[1].place


def _closed(candidate: CandidatePlan, order: Callable[[Plan], float] | None) -> float:
    """The key to minimise, in closed form."""
    plan = candidate.plan_in_closed_form(banded=False)
    return round(plan.step_s if order is None else order(plan), 12)


def _shared_out(ranked: list[tuple[float, _Row]]) -> list[tuple[float, _Row]]:
    """Rows in an order for :class:`WorkerProcesses`: others begin at the front, this process at the back.

    The best row comes last, so that this process has its ranks when all of them are asked for.
    """
    best, *others = ranked
    others.sort(key=lambda item: -item[1].candidate.num_layer_forwards)
    return [*others[::2], *others[1::2][::-1], best]


class _Bar:
    """A count of replayed rows for a progress bar."""

    def __init__(self, progress: Callable[[int, int], None] | None, expected: int) -> None:
        self.progress, self.expected, self.done = progress, expected, 0

    def step(self) -> None:
        """Count one more replayed row."""
        self.done += 1
        self.expected = max(self.expected, self.done)
        if self.progress is not None:
            self.progress(self.done, self.expected)

    def end(self) -> None:
        """Show the count as complete."""
        if self.progress is not None and self.done:
            self.progress(self.expected, self.expected)


def _time(candidate: CandidatePlan) -> ReplayedTime:
    with without_garbage_collection():
        return candidate.replayed_time


def _plan(candidate: CandidatePlan) -> Plan:
    with without_garbage_collection():
        return candidate.replayed_plan(replay=True, explain=False)
