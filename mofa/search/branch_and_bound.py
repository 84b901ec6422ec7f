"""Cost only the rows that may be among the best: lower bounds of memory and of the key cut the others.

Three bounds, each dearer and closer than the one before: static memory, without any block; the key of degrees that
recompute nothing, which no recomputation is below; the key of each row. The best degrees by the second come first, so
that the best rows found soon say what to cut. The search ends where no bound is below the worst of the best rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.frameworks.recompute import largest_step_share_saved_by_recomputing
from mofa.cost.block.routing_loads import RoutingLoads
from mofa.cost.estimate import TableEstimator
from mofa.cost.lower_bounds.static_memory import memory_lower_bounds
from mofa.cost.lower_bounds.steps import step_lower_bounds_s, weighted_computing_lower_bounds
from mofa.cost.option_sets import option_set_groups_sharing_blocks
from mofa.cost.shared_blocks import estimators_sharing_blocks
from mofa.search.costing import (
    MEMORY,
    SLOWER,
    CostedSpace,
    SpacePart,
    SpacePartCosts,
    cost_rows_of_part,
    cost_space_part,
    estimators_of_parts,
    legal_rows_of_degrees,
    merge_part_costs,
    part_with_same_options,
)
from mofa.search.goals import BestRowsGoal, ParetoFrontGoal, SearchGoal
from mofa.search.legality.masks import JobAndMachines
from mofa.search.legality.named_check import Verdicts
from mofa.search.objective import SearchObjective, ranking_keys_and_missing_host_bytes
from mofa.search.recomputed_layers import rows_recomputing_none_and_all
from mofa.search.space import SOLVED, SpaceCombinations
from mofa.search.to_plan.builder import memory_limit_bytes
from mofa.specs.strategy import RecomputeSpec

FloatN = NDArray[np.float64]
Rows = NDArray[np.intp]

FEW_ROWS = 1_000
"""Legal rows up to which all are costed: bounding them takes as long. [-]"""
FIRST_DEGREES = 400
"""Best degrees of the first batch, whose rows are costed before those of its others can be cut. [-]"""
FIRST_BATCH = 800
"""Degrees of the first batch, whose rows are bounded together: blocks of twice as many combinations as those of
:data:`FIRST_DEGREES` take little longer, and most searches end within them. [-]"""
FURTHER_BATCH = 12_800
"""Degrees of each further batch: it takes some 20 ms for each pp x vpp, however few its rows, and some 100,000 rows
are bounded at once. [-]"""
NEAR_MISSES, GROWTH = 64, 3
"""Degrees that are costed at first to find which of those without memory misses by least, and how many times as many
each further time. [-]"""


def cost_best_rows(
    job: JobAndMachines, loads: RoutingLoads, space: SpaceCombinations, reason: Verdicts, shortfall: FloatN,
    objective: SearchObjective,
    wanted: int, progress: Callable[[int, int], None] | None,
) -> CostedSpace:  # fmt: skip
    """Cost the rows that may be among the best ones.

    Parameters
    ----------
    reason, shortfall
        Results of the checks, into which verdicts on rows that pass them are put. ``shortfall`` of rows that are cut is
        what they are slower than the last of the best, at least. (n,)
    objective
        The key that is made smallest.
    wanted
        How many of the best rows are wanted. [-]
    progress
        Told rows with a verdict, and rows in all.

    Returns
    -------
    Found
        Rows of which none has a smaller key than the best ``wanted`` of those that fit, as costing every row has them.
    """
    search = _BranchAndBound(job, loads, space, reason, shortfall, BestRowsGoal(objective, wanted), progress)
    search.run()
    search.cost_nearest_miss()
    return search.result()


def cost_pareto_front(
    job: JobAndMachines,
    loads: RoutingLoads,
    space: SpaceCombinations,
    reason: Verdicts,
    shortfall: FloatN,
    objective: SearchObjective,
    longest: float = np.inf,
) -> CostedSpace:
    """Cost the rows that no other may beat in key and memory at once, by arguments as in :func:`cost_best_rows`.

    ``longest`` is how many times the smallest key those of the front are at most.
    """
    return cost_rows_for_goal(job, loads, space, reason, shortfall, ParetoFrontGoal(objective, longest))


def cost_rows_for_goal(
    job: JobAndMachines,
    loads: RoutingLoads,
    space: SpaceCombinations,
    reason: Verdicts,
    shortfall: FloatN,
    goal: SearchGoal,
) -> CostedSpace:
    """Cost the rows that a goal may still want, by arguments as in :func:`cost_best_rows`; it takes note of them."""
    search = _BranchAndBound(job, loads, space, reason, shortfall, goal, None)
    search.run()
    return search.result()


def degrees_and_bounds_that_goal_may_want(
    job: JobAndMachines, loads: RoutingLoads, space: SpaceCombinations, reason: Verdicts, goal: SearchGoal
) -> tuple[Rows, FloatN]:
    """Degrees of a space that may fit and whose bound in any mode the goal may want, and that bound. (k,) each

    ``reason`` has the results of the checks.
    """
    search = _BranchAndBound(job, loads, space, reason.copy(), np.zeros(len(reason)), goal, None)
    degrees = np.flatnonzero(search.legal.any(axis=1))
    floor = search.floor(degrees)
    wanted = ~goal.is_dominated(floor, np.zeros(len(degrees)))  # blocks of few combinations take less than memory
    degrees, floor = degrees[wanted], floor[wanted]
    fits = np.isin(degrees, search.that_may_fit(degrees))
    wanted = fits & ~goal.is_dominated(floor, search.least_bytes[degrees])
    return degrees[wanted], floor[wanted]


@dataclass(frozen=True)
class _BoundedRows:
    """Degrees that choose the same options, and bounds of the keys of their legal rows. (n,) each"""

    part: SpacePart
    estimator: TableEstimator
    degrees: Rows
    of: Rows
    """Which of the degrees each row has."""
    rows: Rows
    """Its place in the part."""
    of_space: Rows
    """Its place in the space."""
    is_open: NDArray[np.bool_]
    """Whether its number of recomputed layers is solved for."""
    bound: FloatN


class _BranchAndBound:
    """A search under way: what is costed, and what is cut."""

    def __init__(
        self, job: JobAndMachines, loads: RoutingLoads, space: SpaceCombinations, reason: Verdicts, shortfall: FloatN,
        goal: SearchGoal,
        progress: Callable[[int, int], None] | None,
    ) -> None:  # fmt: skip
        self.job, self.loads, self.space, self.goal = job, loads, space, goal
        self.reason, self.shortfall, self.progress = reason, shortfall, progress
        self.legal = (reason < 0).reshape(-1, len(space.recompute))
        self.num_legal = int(np.count_nonzero(self.legal))
        self.limit = memory_limit_bytes(job.cluster, job.framework)
        self.least_bytes = np.full(len(self.legal), np.nan)
        """Static memory of all degrees that have legal rows, at least. [B]"""
        self.least_key = np.full(len(self.legal), np.nan)
        """The bound of degrees in any mode, of those that may fit."""
        self.costed: list[tuple[Rows, SpacePartCosts]] = []
        self.num_done = 0

    def run(self) -> None:
        """Bound, cost and cut until the rows that are sought are certain."""
        left = self.that_may_fit(np.flatnonzero(self.legal.any(axis=1)))
        size, num_first = FIRST_BATCH, FIRST_DEGREES
        self.least_key[left] = self.floor(left)
        left = left[np.argsort(self.least_key[left], kind="stable")]
        while len(left):
            left = self._not_beaten(left)
            first = np.zeros(len(self.legal), dtype=bool)
            first[left[:num_first]] = True
            for some in self._sharing_blocks(left[:size]):  # those with the best degrees may beat all of the others
                self._cost(self._not_beaten(some), first)
            left = left[size:]
            size = num_first = FURTHER_BATCH

    def result(self) -> CostedSpace:
        """What was costed, and verdicts on all rows."""
        slower = self.reason == SLOWER
        self.shortfall[slower] = (
            self.goal.excess_over_last_wanted_key(self.shortfall[slower]) / self.goal.objective.key_of_one_unit
        )
        rows = np.concatenate([np.empty(0, dtype=np.intp), *(rows for rows, _ in self.costed)])
        return merge_part_costs(self.space, rows, [costs for _, costs in self.costed], self.reason, self.shortfall)

    def that_may_fit(self, degrees: Rows) -> Rows:
        """The degrees that static memory does not cut; those that it does are kept, the least too big first."""
        given = self.job.workload, self.job.cluster, self.job.framework
        least_bytes, device_bytes = memory_lower_bounds(*given, self.space.degrees.select_rows(degrees))
        self.least_bytes[degrees] = least_bytes
        may_fit = least_bytes <= self.limit
        too_big, over = degrees[~may_fit], device_bytes[~may_fit] - self.limit
        order = np.argsort(over, kind="stable")
        self.too_big, self.over = too_big[order], over[order]
        rows = self._rows_of(self.too_big)
        self.reason[rows], self.shortfall[rows] = MEMORY, np.repeat(self.over, self._num_rows(self.too_big))
        self._tell(len(rows))
        return degrees[may_fit]

    def _by_options(self, degrees: Rows) -> list[tuple[JobAndMachines, Rows]]:
        """Degrees by the options that they choose, each with its job."""
        sets = self.space.degrees.rows_by_options(degrees) if len(degrees) else []
        return [(self.job.with_options(options), degrees[rows]) for options, rows in sets]

    def _sharing_blocks(self, degrees: Rows) -> list[Rows]:
        """Degrees whose options share blocks, together: those of the first degree first."""
        sets = self.space.degrees.rows_by_options(degrees) if len(degrees) else []
        together = option_set_groups_sharing_blocks([options for options, _ in sets])
        positions = [np.sort(np.concatenate([sets[n][1] for n in numbers])) for numbers in together]
        return [degrees[some] for some in sorted(positions, key=lambda some: int(some[0]))]

    def _not_beaten(self, degrees: Rows) -> Rows:
        """The degrees that the goal may want in any mode; the others are cut."""
        beaten = self.goal.is_dominated(self.least_key[degrees], self.least_bytes[degrees])
        rows = self._rows_of(degrees[beaten])
        self._mark_slower(rows, self.least_key[rows // len(self.space.recompute)])
        return degrees[~beaten]

    def _num_rows(self, degrees: Rows) -> Rows:
        """How many legal rows degrees have. (degrees,)"""
        return np.asarray(np.count_nonzero(self.legal[degrees], axis=1))

    def _rows_of(self, degrees: Rows) -> Rows:
        """The legal rows of degrees, those of each together."""
        return legal_rows_of_degrees(self.space, self.legal, degrees)

    def floor(self, degrees: Rows) -> FloatN:
        """The bound of degrees in any mode, from blocks that recompute nothing. (degrees,)

        Recomputing may make a step :func:`largest_step_share_saved_by_recomputing` shorter, no more.
        """
        floor, place = np.full(len(degrees), np.inf), np.full(len(self.legal), -1)
        place[degrees] = np.arange(len(degrees))
        sets, shortest = (
            [some for _, some in self._by_options(degrees)],
            1.0 - largest_step_share_saved_by_recomputing(self.job.framework),
        )
        for number in sorted({mode.token_chunks for mode in self.space.degrees.recompute_modes}):
            modes = (RecomputeSpec(token_chunks=number),)
            tables = [replace(self.space.degrees.select_rows(some), recompute_modes=modes) for some in sets]
            given = self.job.workload, self.job.cluster, self.job.framework, tables, self.loads
            estimators = estimators_sharing_blocks(*given, counts_gpus_by_row=self.job.counts_gpus_by_row)
            for some, estimator in zip(sets, estimators, strict=True):
                bound = self._bound(estimator, np.zeros(len(some), dtype=bool), at_rest=False)
                floor[place[some]] = np.minimum(floor[place[some]], bound * shortest)
        return floor

    def _bound(self, estimator: TableEstimator, is_open: NDArray[np.bool_], *, at_rest: bool) -> FloatN:
        """A number below the key of each row of an estimator. (n,)"""
        objective = self.goal.objective
        step_s = step_lower_bounds_s(estimator, is_open, at_rest=at_rest)
        weights = objective.computing_weights
        computing = weighted_computing_lower_bounds(estimator, is_open, weights) if weights else np.zeros_like(step_s)
        return objective.ranking_key_lower_bound(step_s, computing)

    def _cost(self, degrees: Rows, is_first: NDArray[np.bool_]) -> None:
        """Cost the rows of degrees that are not beaten: those of the first ones ahead of the others.

        ``is_first`` is of every degree of the space.
        """
        sets = [np.sort(some) for _, some in self._by_options(degrees)]
        parts = [self._part(some) for some in sets]
        bounded = [
            self._bounded(some, part, estimator)
            for some, part, estimator in zip(sets, parts, estimators_of_parts(self.job, parts), strict=True)
        ]
        for rows in bounded:
            self._cost_bounded(rows, is_first[rows.degrees])
        for rows in bounded:
            self._cost_bounded(rows, ~is_first[rows.degrees])

    def _bounded(self, degrees: Rows, part: SpacePart, estimator: TableEstimator) -> _BoundedRows:
        """Degrees that choose the same options, in order, with bounds of their legal rows."""
        rows = np.flatnonzero(part.legal)
        is_open = part.space.recompute_layers[rows] == SOLVED
        of = np.repeat(np.arange(len(degrees)), self._num_rows(degrees))
        bound = self._bound(estimator, is_open, at_rest=True)
        return _BoundedRows(part, estimator, degrees, of, rows, self._rows_of(degrees), is_open, bound)

    def _cost_bounded(self, bounded: _BoundedRows, chosen_degrees: NDArray[np.bool_]) -> None:
        """Cost what is not beaten of the rows of some degrees. ``chosen_degrees`` (degrees,)"""
        of_chosen = np.flatnonzero(chosen_degrees[bounded.of])
        if not len(of_chosen):
            return
        part, rows, bound = bounded.part, bounded.rows[of_chosen], bounded.bound[of_chosen]
        of_space = bounded.of_space[of_chosen]
        wanted = np.zeros(len(part.legal), dtype=bool)
        wanted[rows] = ~self.goal.is_dominated(bound, self.least_bytes[bounded.degrees[bounded.of[of_chosen]]])
        open_rows = rows[bounded.is_open[of_chosen] & wanted[rows]]
        for needed in rows_recomputing_none_and_all(part.space, open_rows) if len(open_rows) else ():
            if needed is not None:
                wanted[needed] = part.legal[needed]
        costed, cut = np.flatnonzero(wanted), ~wanted[rows]
        costs = cost_rows_of_part(part, bounded.estimator, costed)
        self.costed.append((of_space[~cut], costs))
        self._take(part, costed, costs)
        self._tell(len(costed))
        self._mark_slower(of_space[cut], bound[cut])

    def _part(self, degrees: Rows) -> SpacePart:
        return part_with_same_options(self.job, self.loads, self.space, degrees, self.legal)

    def _take(self, part: SpacePart, rows: Rows, costs: SpacePartCosts) -> None:
        """Let the goal take note of rows that fit."""
        verdicts = np.where(part.legal, np.int8(-1), np.int8(0)), np.zeros(len(part.legal))
        of_part = merge_part_costs(part.space, rows, [costs], *verdicts)
        key, _ = ranking_keys_and_missing_host_bytes(self.goal.objective, of_part.costed)
        fits = (of_part.reason[of_part.costed.rows] < 0) & np.isfinite(key)
        self.goal.note_costed_rows(key[fits], of_part.costed.device_bytes[fits])

    def _mark_slower(self, rows: Rows, bound: FloatN) -> None:
        """Reject rows whose keys are at least these."""
        self.reason[rows], self.shortfall[rows] = SLOWER, bound
        self._tell(len(rows))

    def cost_nearest_miss(self) -> None:
        """Cost what static memory cuts until it is certain which row without memory misses by least."""
        misses = [costs.shortfall[costs.reason == MEMORY] for _, costs in self.costed]
        least = min((float(shortfall.min()) for shortfall in misses if len(shortfall)), default=np.inf)
        begin, size = 0, NEAR_MISSES
        while begin < len(self.too_big) and self.over[begin] < least:
            end = min(begin + size, int(np.searchsorted(self.over, least)))
            for _, some in self._by_options(self.too_big[begin:end]):
                degrees = np.sort(some)
                costs = cost_space_part(self._part(degrees))
                self.costed.append((self._rows_of(degrees), costs))
                least = min(least, float(costs.shortfall.min(initial=np.inf)))
            begin, size = end, size * GROWTH

    def _tell(self, number: int) -> None:
        """Tell that so many more rows have a verdict."""
        self.num_done += number
        if self.progress is not None:
            self.progress(self.num_done, self.num_legal)
