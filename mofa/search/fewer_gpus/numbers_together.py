"""Cost the rows of several numbers of GPUs: those of many that have few rows each in one go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mofa.search.branch_and_bound import cost_rows_for_goal, degrees_and_bounds_that_goal_may_want
from mofa.search.costing import CostedRows, CostedSpace, cost_all_legal_rows
from mofa.search.goals import TIED, BestRowsGoal
from mofa.search.job_setup import routing_loads_by_ep
from mofa.search.legality.named_check import JobAndMachines, Verdicts
from mofa.search.objective import ranking_keys_and_missing_host_bytes
from mofa.search.space import SpaceCombinations
from mofa.search.workers import WorkerProcesses
from mofa.specs.hardware import ClusterSpec
from mofa.specs.strategy import FrameworkOptions, StrategyTable

FEW_NUMBERS = 8
"""Numbers of GPUs up to which each is costed by itself: that cuts rows by bounds, and takes as long. [-]"""
FIRST_ROWS, GROWTH = 1_024, 4
"""Legal rows that are costed together at first, and how much more each further time. [-]"""
MANY_ROWS = 200_000
"""Legal rows that are bounded together where those of one number are more than are costed together. [-]"""


class RowsOnFewerGpus(NamedTuple):
    """The rows of a number of GPUs that are sought, as a search has its own."""

    cluster: ClusterSpec
    """These GPUs alone."""
    enumerated: SpaceCombinations | None
    combinations: SpaceCombinations
    costed: CostedRows
    reasons: Verdicts
    short: NDArray[np.float64]


class LegalRowsOfGpuCount(NamedTuple):
    """Rows of a number of GPUs, with what checks and siblings say of them."""

    job: JobAndMachines
    rows: SpaceCombinations
    reason: Verdicts
    shortfall: NDArray[np.float64]


def cost_wanted_rows_of_gpu_count(legal: LegalRowsOfGpuCount, goal: BestRowsGoal) -> RowsOnFewerGpus:
    """The rows of one number of GPUs that the goal may still be after, costed."""
    loads = routing_loads_by_ep(legal.job.workload, legal.rows.degrees)
    rows = cost_rows_for_goal(legal.job, loads, legal.rows, legal.reason, legal.shortfall, goal)
    return RowsOnFewerGpus(legal.job.cluster, legal.rows, rows.space, rows.costed, rows.reason, rows.shortfall)


def cost_wanted_rows_least_bound_first(legal: list[LegalRowsOfGpuCount], goal: BestRowsGoal) -> list[RowsOnFewerGpus]:
    """The rows of several numbers of GPUs that the goal may want, costed: numbers of the least bound first.

    Where no strategy runs on all GPUs, thousands of smaller numbers may have a few rows each. One number alone takes as
    long as hundreds of rows, so that many are costed in one go: first a few, whose best rows cut the others' degrees.
    """
    bounded, out = _that_may_win(legal, goal), list[RowsOnFewerGpus]()
    joins, most = len(bounded) > FEW_NUMBERS and _counts_chips_alone(legal[0].job), FIRST_ROWS
    while bounded and bounded[0][0] <= goal.last_wanted_key * (1.0 + TIED):
        left = [rows for _, rows in bounded]
        number = _number_together(left, most) if joins else 1
        if number > 1:
            out += cost_all_legal_rows_of_gpu_counts(left[:number], goal)
            bounded, most = _that_may_win(left[number:], goal), most * GROWTH
        elif joins and (number := _number_together(left, MANY_ROWS)) > 1:
            out += cost_wanted_rows_of_gpu_counts(left[:number], goal)
            bounded = _that_may_win(left[number:], goal)
        else:
            out.append(cost_wanted_rows_of_gpu_count(left[0], goal))
            bounded = bounded[1:]
    return out


def _counts_chips_alone(job: JobAndMachines) -> bool:
    """Whether a step depends on the cluster's number of GPUs by their slowest chip alone: what hosts do, and hold of
    what is offloaded, goes by the number as well."""
    offloads = job.framework.optimizer_offload > 0.0 or job.framework.activation_offload != "none"
    return job.cluster.node.hosts == "own" and not offloads


def _number_together(legal: Sequence[LegalRowsOfGpuCount], most_rows: int) -> int:
    """How many of the first numbers of GPUs are costed together: those of the same options, with few rows in all."""
    rows = np.cumsum([np.count_nonzero(some.reason < 0) for some in legal])
    options = legal[0].rows.degrees.option_sets
    other = next((i for i, some in enumerate(legal) if some.rows.degrees.option_sets != options), len(legal))
    return max(1, min(other, int(np.searchsorted(rows, most_rows, side="right"))))


def cost_all_legal_rows_of_gpu_counts(
    legal: Sequence[LegalRowsOfGpuCount], goal: BestRowsGoal
) -> list[RowsOnFewerGpus]:
    """All legal rows of several numbers of GPUs, costed in one go."""
    job, space, reason, shortfall = _joined(legal)
    loads = routing_loads_by_ep(job.workload, space.degrees)
    with WorkerProcesses(1) as workers:
        costed = cost_all_legal_rows(job, loads, space, reason, shortfall, None, workers)
    key, _ = ranking_keys_and_missing_host_bytes(goal.objective, costed.costed)
    fits = (costed.reason[costed.costed.rows] < 0) & np.isfinite(key)
    goal.note_costed_rows(key[fits], costed.costed.device_bytes[fits])
    return _by_number(legal, costed)


def cost_wanted_rows_of_gpu_counts(legal: Sequence[LegalRowsOfGpuCount], goal: BestRowsGoal) -> list[RowsOnFewerGpus]:
    """The rows of several numbers of GPUs that the goal may still be after, costed in one go."""
    job, space, reason, shortfall = _joined(legal)
    loads = routing_loads_by_ep(job.workload, space.degrees)
    return _by_number(legal, cost_rows_for_goal(job, loads, space, reason, shortfall, goal))


def _joined(
    legal: Sequence[LegalRowsOfGpuCount],
) -> tuple[JobAndMachines, SpaceCombinations, Verdicts, NDArray[np.float64]]:
    """A job whose strategies have the GPUs that their degrees make, the rows of all numbers, and verdicts on them."""
    table = StrategyTable.concatenated([some.rows.degrees for some in legal])
    layers = np.concatenate([some.rows.recompute_layers for some in legal])
    most = max(legal, key=lambda some: some.job.cluster.num_gpus)
    space = SpaceCombinations(table, most.rows.recompute, layers)
    reason, shortfall = (np.concatenate([getattr(some, name) for some in legal]) for name in ("reason", "shortfall"))
    return replace(most.job, counts_gpus_by_row=True), space, reason, shortfall


def _by_number(legal: Sequence[LegalRowsOfGpuCount], costed: CostedSpace) -> list[RowsOnFewerGpus]:
    """What was costed of rows that were joined, of each number of GPUs."""
    out, begin = [], 0
    for some in legal:
        end = begin + len(some.rows)
        own = np.flatnonzero((costed.costed.rows >= begin) & (costed.costed.rows < end))
        rows = costed.costed.select_rows(own)
        rows = replace(rows, rows=rows.rows - begin)
        own_space = SpaceCombinations(some.rows.degrees, some.rows.recompute, costed.space.recompute_layers[begin:end])
        verdicts = costed.reason[begin:end].copy(), costed.shortfall[begin:end].copy()
        out.append(RowsOnFewerGpus(some.job.cluster, some.rows, own_space, rows, *verdicts))
        begin = end
    return out


def _that_may_win(legal: list[LegalRowsOfGpuCount], goal: BestRowsGoal) -> list[tuple[float, LegalRowsOfGpuCount]]:
    """Those of the rows that lower bounds leave, each number of GPUs with its least bound, the least first. [s]

    Blocks of all numbers are bounded together.
    """
    by_sets: dict[tuple[FrameworkOptions, ...], list[LegalRowsOfGpuCount]] = {}
    for rows in legal:
        by_sets.setdefault(rows.rows.degrees.option_sets, []).append(rows)
    left = []
    for alike in by_sets.values():
        table = StrategyTable.concatenated([rows.rows.degrees for rows in alike])
        layers = np.concatenate([rows.rows.recompute_layers for rows in alike])
        reason = np.concatenate([rows.reason for rows in alike])
        joined = SpaceCombinations(table, alike[0].rows.recompute, layers)
        job = min((rows.job for rows in alike), key=lambda job: job.cluster.num_gpus)  # the slowest of fewer is faster
        loads = routing_loads_by_ep(job.workload, table)
        wanted, floor = degrees_and_bounds_that_goal_may_want(job, loads, joined, reason, goal)
        begin = 0
        for rows in alike:
            end = begin + len(rows.rows.degrees)
            own = (wanted >= begin) & (wanted < end)
            if own.any():
                left.append((float(floor[own].min()), _of_degrees(rows, np.sort(wanted[own]) - begin)))
            begin = end
    return sorted(left, key=lambda item: item[0])


def _of_degrees(rows: LegalRowsOfGpuCount, degrees: NDArray[np.intp]) -> LegalRowsOfGpuCount:
    """The rows of some degrees."""
    num_modes = len(rows.rows.recompute)
    reason = rows.reason.reshape(-1, num_modes)[degrees].reshape(-1)
    shortfall = rows.shortfall.reshape(-1, num_modes)[degrees].reshape(-1)
    return LegalRowsOfGpuCount(rows.job, rows.rows.rows_of_degrees(degrees), reason, shortfall)
