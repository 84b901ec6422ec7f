"""Rows that a search cut by the split of their framework: with another layout they may be among the best."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mofa.search.costing import MEMORY, NEEDLESS, SLOWER, CostedRows, cost_all_legal_rows
from mofa.search.job_setup import routing_loads_by_ep
from mofa.search.legality.masks import JobAndMachines
from mofa.search.legality.named_check import Verdicts
from mofa.search.near_best import best_fitting_rows
from mofa.search.search_result import Search
from mofa.search.space import SpaceCombinations
from mofa.search.workers import WorkerProcesses
from mofa.specs.strategy import StrategyTable

BLOCK_COLUMNS = ("tp", "sp", "cp", "cp_kind", "ep", "etp", "micro_batch", "balancing", "options")
"""Columns of a strategy table that say what a layer takes; the pipeline and the recomputation do not."""


@dataclass(frozen=True)
class RowsTimedUnderOwnSplit:
    """Strategies with their steps in closed form under the framework's own split, and whether they fit. (n,) each"""

    table: StrategyTable
    step_s: NDArray[np.float64]
    fits: NDArray[np.bool_]


def timed_rows_of_all_pipelines(search: Search) -> RowsTimedUnderOwnSplit:
    """What a search costed, and what it cut of strategies like its best ones but for the pipeline.

    Parameters
    ----------
    search
        What :func:`mofa.find_plans` returned.

    Returns
    -------
    RowsTimedUnderOwnSplit
        Those whose step is known.

    Notes
    -----
    A search cuts a row whose lower bound, under the framework's own split of the layers, passes the best steps. With
    another layout that bound does not hold. Such rows are costed where tp, cp, experts, micro-batch and options are
    together those of a plan near the best, and so is the recomputation.
    """
    parts = [_with_known_steps(search.costed, search.reasons)]
    if search.enumerated is not None:
        parts.append(_cut_rows(search, search.enumerated))
    return RowsTimedUnderOwnSplit(
        StrategyTable.concatenated([part.table for part in parts]),
        np.concatenate([part.step_s for part in parts]), np.concatenate([part.fits for part in parts]),
    )  # fmt: skip


def _with_known_steps(costed: CostedRows, reasons: Verdicts) -> RowsTimedUnderOwnSplit:
    some = costed.select_rows(np.flatnonzero(~np.isnan(costed.step_s)))
    return RowsTimedUnderOwnSplit(some.table, some.step_s, reasons[some.rows] < 0)


def _cut_rows(search: Search, space: SpaceCombinations) -> RowsTimedUnderOwnSplit:
    """Rows of a space that were cut as slower and are near the best, costed."""
    best, num_modes = best_fitting_rows(search.costed, search.reasons), len(space.recompute)
    degrees = np.flatnonzero(_like(space.degrees, best) & (space.degrees.pp > 1))
    reasons = search.reasons.reshape(-1, num_modes)[degrees]
    wanted = (reasons == SLOWER) & np.isin(space.recompute, best.recompute)
    degrees, reasons, wanted = (of[wanted.any(axis=1)] for of in (degrees, reasons, wanted))
    # an open number of recomputed layers is solved from the rows that recompute none and all
    kinds = np.array([space.degrees.recompute_modes[number].kind for number in space.recompute])
    is_legal = (reasons < 0) | np.isin(reasons, (NEEDLESS, MEMORY, SLOWER))
    solves = (wanted & (kinds == "full")).any(axis=1)[:, None]
    is_costed = wanted | (is_legal & solves & np.isin(kinds, ("none", "full")))
    reason = np.where(is_costed, np.int8(-1), np.int8(0)).reshape(-1)
    some = space.rows_of_degrees(degrees)
    job = JobAndMachines(
        search.workload, search.cluster, search.framework, is_judged_in_closed_form=search.is_judged_in_closed_form
    )
    loads = routing_loads_by_ep(search.workload, some.degrees)
    checked = cost_all_legal_rows(job, loads, some, reason, np.zeros(len(reason)), None, WorkerProcesses(1))
    of_wanted = np.flatnonzero(wanted.reshape(-1)[checked.costed.rows])
    return _with_known_steps(checked.costed.select_rows(of_wanted), checked.reason)


def _like(table: StrategyTable, best: StrategyTable) -> NDArray[np.bool_]:
    """Whether rows of a table have blocks as one of the best rows has. (n,)"""
    columns = [np.stack([getattr(of, name) for name in BLOCK_COLUMNS], axis=1) for of in (table, best)]
    like = np.zeros(len(table), dtype=bool)
    for row in np.unique(columns[1], axis=0):
        like |= (columns[0] == row).all(axis=1)
    return like
