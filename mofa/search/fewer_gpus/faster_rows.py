"""Rows on fewer GPUs that are faster than every row on all of them, by closed forms: exact, though few are costed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mofa.errors import SpecError
from mofa.search.costing import SLOWER, CostedSpace
from mofa.search.fewer_gpus.block_work import least_block_gpu_seconds
from mofa.search.fewer_gpus.fewer_replicas import RowsOnAllGpus
from mofa.search.fewer_gpus.numbers_together import (
    FEW_NUMBERS,
    LegalRowsOfGpuCount,
    RowsOnFewerGpus,
    cost_wanted_rows_least_bound_first,
    cost_wanted_rows_of_gpu_count,
)
from mofa.search.fewer_gpus.rows_that_may_win import SpaceOnFewerGpus
from mofa.search.goals import TIED, BestRowsGoal
from mofa.search.legality.masks import JobAndMachines, check_strategies
from mofa.search.near_best import best_fitting_rows, space_with_degrees_near_best
from mofa.search.objective import SearchObjective, ranking_keys_and_missing_host_bytes
from mofa.search.space import SOLVED, StrategySpace, default_space, searched_recompute_modes
from mofa.specs.hardware import ClusterSpec

Constrained = Callable[[StrategySpace, ClusterSpec], StrategySpace]
"""The part of a cluster's space that is searched."""


def fewer_numbers_of_gpus(cluster: ClusterSpec) -> list[int]:
    """Numbers of GPUs below a cluster's: whole nodes, or any of a node where it has no more. The largest first.

    Examples
    --------
    >>> from mofa.specs.load import load_cluster
    >>> fewer_numbers_of_gpus(load_cluster("h100-hgx", 32)), fewer_numbers_of_gpus(load_cluster("h100-hgx", 4))
    ([24, 16, 8], [3, 2, 1])
    """
    node = cluster.node.gpus_per_node
    step = node if cluster.num_gpus > node else 1
    return list(range((cluster.num_gpus - 1) // step * step, 0, -step))


def faster_rows_on_fewer_gpus_near_best(
    job: JobAndMachines, constrained: Constrained, objective: SearchObjective, wanted: int, searched_rows: CostedSpace,
    key: NDArray[np.float64], is_solved: NDArray[np.bool_],
) -> list[RowsOnFewerGpus]:  # fmt: skip
    """The rows on fewer GPUs that are faster than all on all GPUs, near the best of these; anywhere where none fits.

    Parameters
    ----------
    job
        On all GPUs.
    constrained
        Applies the user's constraints to a cluster's space.
    objective, wanted
        As of the search on all GPUs.
    searched_rows, key
        What that found, and the keys of what it costed. (n,)
    is_solved
        Modes whose number of recomputed layers it solved for. (M,)
    """
    costed, reasons = searched_rows.costed, searched_rows.reason
    fits, best = reasons[costed.rows] < 0, best_fitting_rows(costed, reasons)

    def near_best(space: StrategySpace, cluster: ClusterSpec) -> StrategySpace:
        some = constrained(space, cluster)
        return space_with_degrees_near_best(best, some, job.workload.model.num_layers) if len(best) else some

    goal = BestRowsGoal(objective, wanted, float(key[fits].min(initial=np.inf)))
    return faster_rows_on_fewer_gpus(job, near_best, goal, RowsOnAllGpus(job, costed, reasons, is_solved))


def faster_rows_on_fewer_gpus(
    job: JobAndMachines, constrained: Constrained, goal: BestRowsGoal, on_all: RowsOnAllGpus
) -> list[RowsOnFewerGpus]:
    """The best rows on fewer GPUs whose steps are shorter than a goal's limit, by number of GPUs, the largest first.

    Parameters
    ----------
    job
        On all GPUs.
    constrained
        The part of a cluster's space that is searched.
    goal
        How many rows are sought, on all numbers together, by the time of their steps. Its limit is that of the best row
        on all GPUs; infinite where none fits.
    on_all
        What was costed on all GPUs.

    Notes
    -----
    Numbers come in the order of the least that their steps take. A number is left where that is not below the last of
    the best rows so far. Of the others a row is left where its sibling on all GPUs says that it is slower, or its
    bound (:mod:`mofa.search.branch_and_bound`). What may be among the best is costed, so that none is missed.
    """
    parts = _parts(job, constrained, goal.last_wanted_key)
    bounds = {id(part): part.least_step_s(goal.last_wanted_key) for part in parts}
    left = sorted((part for part in parts if np.isfinite(bounds[id(part)])), key=lambda part: bounds[id(part)])
    found_rows: list[RowsOnFewerGpus] = []
    tried = 0
    while left and np.isinf(goal.last_wanted_key):  # nothing to hold others against yet
        number = 1 if tried < FEW_NUMBERS else tried
        first, left, tried = left[:number], left[number:], tried + number
        legal = [rows for part in first if (rows := _legal_rows(part, goal, on_all)) is not None]
        found_rows += (
            [cost_wanted_rows_of_gpu_count(rows, goal) for rows in legal]
            if number == 1
            else cost_wanted_rows_least_bound_first(legal, goal)
        )
    legal = [rows for part in left if (rows := _legal_rows(part, goal, on_all)) is not None]
    found_rows += cost_wanted_rows_least_bound_first(legal, goal)
    best_rows = [rows for rows in found_rows if _keep_best(rows, goal)]
    return sorted(best_rows, key=lambda rows: -rows.cluster.num_gpus)


def _parts(job: JobAndMachines, constrained: Constrained, limit: float) -> list[SpaceOnFewerGpus]:
    """The numbers of GPUs whose strategies are bounded, each with its space."""
    numbers = fewer_numbers_of_gpus(job.cluster)
    if not numbers:
        return []
    clusters = [job.cluster.model_copy(update={"num_gpus": number}) for number in numbers]
    modes = searched_recompute_modes(job.workload, job.framework)
    on_all_gpus = constrained(default_space(job.workload, job.cluster, job.framework, modes), job.cluster)
    work = least_block_gpu_seconds(replace(job, cluster=clusters[-1]), on_all_gpus)
    least_s = min((float(each.gpu_s.min(initial=np.inf)) for each in work.values()), default=np.inf)
    parts = []
    for machines in clusters:
        if not least_s / machines.num_gpus < limit:
            break
        try:
            space = constrained(default_space(job.workload, machines, job.framework, modes), machines)
        except SpecError:  # what the user fixed does not go with so few
            continue
        parts.append(SpaceOnFewerGpus(replace(job, cluster=machines), space, work))
    return parts


def _legal_rows(part: SpaceOnFewerGpus, goal: BestRowsGoal, on_all: RowsOnAllGpus) -> LegalRowsOfGpuCount | None:
    """The rows of a number of GPUs that the goal may want, by what their blocks take and by their siblings."""
    if (rows_and_work := part.rows_below_step_limit(goal.last_wanted_key)) is None:
        return None
    rows, gpu_s = rows_and_work
    verdict = check_strategies(part.job, rows)
    if np.isfinite(goal.last_wanted_key):
        slower = (verdict.reason < 0) & (
            on_all.step_bounds_from_siblings_s(rows, gpu_s) > goal.last_wanted_key * (1.0 + TIED)
        )
        # layers to recompute are solved for between none and all, whose rows are costed with them
        open_ = (~slower & (verdict.reason < 0) & (rows.recompute_layers == SOLVED)).reshape(-1, len(rows.recompute))
        verdict.reason[slower & ~np.repeat(open_.any(axis=1), len(rows.recompute))] = SLOWER
    return (
        LegalRowsOfGpuCount(part.job, rows, verdict.reason, verdict.shortfall) if np.any(verdict.reason < 0) else None
    )


def _keep_best(rows: RowsOnFewerGpus, goal: BestRowsGoal) -> bool:
    """Reject the rows that are not among the best; whether some are."""
    key, _ = ranking_keys_and_missing_host_bytes(goal.objective, rows.costed)
    fits = (rows.reasons[rows.costed.rows] < 0) & np.isfinite(key)
    last = min(goal.limit, goal.last_wanted_key * (1.0 + TIED))
    slower = np.flatnonzero(fits & ~(key < last))
    rows.reasons[rows.costed.rows[slower]] = SLOWER
    rows.short[rows.costed.rows[slower]] = (key[slower] - last) / goal.objective.key_of_one_unit
    return bool(np.any(fits & (key < last)))
