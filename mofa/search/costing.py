"""Cost the legal rows of a search: memory of all, time of those that fit. Many rows are costed in parts that share no
block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mofa.cost.block.routing_loads import RoutingLoads
from mofa.cost.breakdown import TIME_COMPONENTS, Breakdown
from mofa.cost.estimate import TableEstimator
from mofa.cost.memory.row_memory import RowMemory
from mofa.cost.shared_blocks import estimators_sharing_blocks
from mofa.search.legality.masks import CHECKS, JobAndMachines
from mofa.search.legality.named_check import Verdicts
from mofa.search.recomputed_layers import RowsWithOpenRecomputation, solve_recomputed_layers
from mofa.search.space import SOLVED, SpaceCombinations
from mofa.search.to_plan.builder import device_bytes_to_fit, memory_limit_bytes
from mofa.search.workers import WorkerProcesses
from mofa.specs.strategy import StrategyTable

FloatN = NDArray[np.float64]
IntN = NDArray[np.int64]
NEEDLESS, MEMORY, HOST_MEMORY, SLOWER = range(len(CHECKS), len(CHECKS) + 4)
"""Reasons for rejecting a row that passes all checks: it says the same as another row, its memory does not fit, its
checkpoints do not fit the hosts, or it cannot be among the best."""
AT_ONCE = 200_000
"""Rows timed in one call. [-]"""
MANY = 40_000
"""Rows above which they are costed in parts, by all processes. [-]"""
PARTS = 1
"""Parts for each process. More would repeat what parts share: small arrays, dependency levels of pipelines. [-]"""


@dataclass(frozen=True)
class CostedRows:
    """The rows of a table that were costed: their position in it and what they cost. (n,); ``exposed_s`` (14, n)

    Rows that cannot fit have ``device_bytes`` alone; all else is NaN, as nobody asks how fast they would be. Rows that
    are too big but allocate no more than fits are borderline (:mod:`mofa.search.borderline`) and timed too.
    """

    rows: NDArray[np.intp]
    table: StrategyTable
    step_s: FloatN
    device_bytes: FloatN
    allocated_bytes: FloatN
    exposed_s: FloatN
    checkpoint_bytes: FloatN

    @classmethod
    def from_memory(cls, rows: NDArray[np.intp], table: StrategyTable, device_bytes: FloatN) -> CostedRows:
        """Rows of which the memory alone is known."""
        step, allocated, checkpoint = (np.full(len(rows), np.nan) for _ in range(3))
        return cls(
            rows, table, step, device_bytes, allocated, np.full((len(TIME_COMPONENTS), len(rows)), np.nan), checkpoint
        )

    def overwrite(self, positions: NDArray[np.intp], costed: Breakdown) -> None:
        """Set what the rows at these positions cost."""
        self.step_s[positions], self.allocated_bytes[positions] = costed.step_s, costed.allocated_bytes
        self.exposed_s[:, positions], self.checkpoint_bytes[positions] = costed.exposed_s, costed.checkpoint_bytes

    def select_rows(self, positions: NDArray[np.intp]) -> CostedRows:
        """The rows at these positions."""
        return CostedRows(
            self.rows[positions], self.table.select_rows(positions),
            self.step_s[positions], self.device_bytes[positions],
            self.allocated_bytes[positions],
            self.exposed_s[:, positions], self.checkpoint_bytes[positions],
        )  # fmt: skip


@dataclass(frozen=True)
class CostedSpace:
    """A space whose rows were checked and costed.

    ``reason`` is the index of the check that rejects a row, -1 where it fits. ``shortfall`` is by how much it missed.
    (n,)
    """

    space: SpaceCombinations
    costed: CostedRows
    reason: Verdicts
    shortfall: FloatN

    def with_recompute_layers(self, some: Mapping[int, Breakdown]) -> CostedSpace:
        """A copy in which the rows at these positions in ``costed`` recompute so many layers and cost what is given."""
        layers, costed = self.space.recompute_layers.copy(), self.costed.select_rows(np.arange(len(self.costed.rows)))
        for i, costs in some.items():
            positions = np.array([i])
            number = costs.table.recompute_layers
            layers[costed.rows[positions]] = costed.table.recompute_layers[positions] = number
            costed.device_bytes[positions] = costs.device_bytes
            costed.overwrite(positions, costs)
        return replace(self, space=replace(self.space, recompute_layers=layers), costed=costed)

    def with_costs_and_verdicts(self, some: CostedRows, reason: Verdicts, shortfall: FloatN) -> CostedSpace:
        """A copy in which ``some`` of the costed rows cost what is given, and have these verdicts. (n,)"""
        layers, costed = self.space.recompute_layers.copy(), self.costed.select_rows(np.arange(len(self.costed.rows)))
        verdicts, misses = self.reason.copy(), self.shortfall.copy()
        place = np.full(len(self.space), -1, dtype=np.intp)
        place[costed.rows] = np.arange(len(costed.rows))
        positions, rows = place[some.rows], some.rows
        layers[rows] = costed.table.recompute_layers[positions] = some.table.recompute_layers
        verdicts[rows], misses[rows] = reason[rows], shortfall[rows]
        for name in ("step_s", "device_bytes", "allocated_bytes", "exposed_s", "checkpoint_bytes"):
            getattr(costed, name)[..., positions] = getattr(some, name)
        return CostedSpace(replace(self.space, recompute_layers=layers), costed, verdicts, misses)


@dataclass(frozen=True)
class SpacePart:
    """Some degrees of a search in all modes, and which of these rows are to be costed. ``legal`` (c * M,)"""

    job: JobAndMachines
    loads: RoutingLoads
    space: SpaceCombinations
    legal: NDArray[np.bool_]


@dataclass(frozen=True)
class SpacePartCosts:
    """Verdicts on the legal rows of a part, in their order, and the costs of the ``timed`` ones, in theirs.

    ``device_bytes`` is NaN where no number of recomputed layers was worth costing.
    """

    reason: Verdicts
    shortfall: FloatN
    layers: IntN
    device_bytes: FloatN
    timed: NDArray[np.bool_]
    step_s: FloatN
    allocated_bytes: FloatN
    exposed_s: FloatN
    checkpoint_bytes: FloatN


def cost_all_legal_rows(
    job: JobAndMachines, loads: RoutingLoads, space: SpaceCombinations, reason: Verdicts, shortfall: FloatN,
    progress: Callable[[int, int], None] | None, workers: WorkerProcesses,
) -> CostedSpace:  # fmt: skip
    """Cost every row that no check rejects.

    Parameters
    ----------
    reason, shortfall
        Results of the checks. Rows that pass them and do not fit are marked there as well. (n,)
    progress
        Told rows done and rows in all.
    workers
        Cost parts in other processes where there are many rows. The results are the same.
    """
    legal = reason < 0
    num_legal = int(np.count_nonzero(legal))
    parts = split_space_into_equal_parts(space, legal, PARTS * workers.jobs if num_legal > MANY else 1)
    rows = np.concatenate([np.empty(0, dtype=np.intp), *(legal_rows_of_degrees(space, legal, some) for some in parts)])
    tasks = [part_with_same_options(job, loads, space, some, legal) for some in parts]
    done = [0] * len(tasks)

    def tell(number: int, count: int) -> None:
        done[number] = count
        if progress is not None:
            progress(sum(done), num_legal)

    tell_of = {id(task): partial(tell, number) for number, task in enumerate(tasks)}
    parts_costed = []
    for number, costs in enumerate(
        workers.map(cost_space_part, tasks, local=lambda part: cost_space_part(part, tell_of[id(part)]))
    ):
        parts_costed.append(costs)
        tell(number, len(costs.reason))
    return merge_part_costs(space, rows, parts_costed, reason, shortfall)


def merge_part_costs(
    space: SpaceCombinations, rows: NDArray[np.intp], parts: Sequence[SpacePartCosts], reason: Verdicts,
    shortfall: FloatN,
) -> CostedSpace:  # fmt: skip
    """Merge what costing the parts of some ``rows`` of a space says, whose verdicts are put into ``reason`` and
    ``shortfall``.

    ``parts`` have the rows one after the other. What is costed is in the order of the space, rows whose layers were
    solved for last.
    """
    if not parts:
        return CostedSpace(space, CostedRows.from_memory(rows, space.select_rows(rows), np.zeros(0)), reason, shortfall)

    def of_all(name: str) -> NDArray[np.generic]:
        return np.concatenate([getattr(costs, name) for costs in parts], axis=-1)

    solved = space.recompute_layers[rows] == SOLVED
    layers = space.recompute_layers.copy()
    reason[rows], shortfall[rows], layers[rows] = of_all("reason"), of_all("shortfall"), of_all("layers")
    space = SpaceCombinations(space.degrees, space.recompute, layers)
    device, timed = of_all("device_bytes"), np.flatnonzero(of_all("timed"))
    order = np.lexsort((rows, solved))
    order = order[~solved[order] | ~np.isnan(device[order])]
    costed = CostedRows.from_memory(rows[order], space.select_rows(rows[order]), device[order])
    place = np.empty(len(rows), dtype=np.intp)
    place[order] = np.arange(len(order))
    for name in ("step_s", "allocated_bytes", "exposed_s", "checkpoint_bytes"):
        getattr(costed, name)[..., place[timed]] = of_all(name)
    return CostedSpace(space, costed, reason, shortfall)


def split_space_into_equal_parts(
    space: SpaceCombinations, legal: NDArray[np.bool_], parts: int
) -> list[NDArray[np.intp]]:
    """Degrees with legal rows that choose the same options, cut into parts of about equally many rows.

    Parts of the same options differ in tp and cp, on which all blocks depend: no block is costed in two parts.
    """
    return [
        part for _, of_options in space.degrees.rows_by_options()
        for part in _split(space.degrees, of_options, legal.reshape(-1, len(space.recompute)).sum(axis=1), parts)
    ]  # fmt: skip


def _split(table: StrategyTable, degrees: NDArray[np.intp], num_rows: IntN, parts: int) -> list[NDArray[np.intp]]:
    """Some degrees, each with so many legal rows, in parts. ``num_rows`` (c,)"""
    some = degrees[num_rows[degrees] > 0]
    if parts == 1 or len(some) == 0:
        return [some] if len(some) else []
    code = table.tp[some] * 4096 + table.cp[some]
    total = np.cumsum(num_rows[some])
    bounds = np.concatenate([[0], 1 + np.flatnonzero(np.diff(code)), [len(some)]])
    before = np.concatenate([[0], total])[bounds]
    wanted = np.arange(1, parts) * (total[-1] / parts)
    cuts = np.unique(bounds[np.argmin(np.abs(before[:, None] - wanted), axis=0)])
    return [part for part in np.split(some, cuts) if len(part)]


def legal_rows_of_degrees(
    space: SpaceCombinations, legal: NDArray[np.bool_], degrees: NDArray[np.intp]
) -> NDArray[np.intp]:
    """The legal rows of degrees, those of each together."""
    of, mode = np.nonzero(legal.reshape(-1, len(space.recompute))[degrees])
    return np.asarray(degrees[of] * len(space.recompute) + mode)


def part_with_same_options(
    job: JobAndMachines,
    loads: RoutingLoads,
    space: SpaceCombinations,
    degrees: NDArray[np.intp],
    legal: NDArray[np.bool_],
) -> SpacePart:
    """The part of some degrees that choose the same options."""
    of_part = space.rows_of_degrees(degrees)
    legal_rows = np.asarray(legal.reshape(-1, len(space.recompute))[degrees].reshape(-1))
    return SpacePart(job.with_options(of_part.degrees.common_options), loads, of_part, legal_rows)


def cost_space_part(part: SpacePart, on_rows_costed: Callable[[int], None] | None = None) -> SpacePartCosts:
    """Cost the memory of a part's legal rows, solve for their recomputed layers where open, and time what may fit.

    ``on_rows_costed`` is called with the number of rows whose memory is known.
    """
    rows = np.flatnonzero(part.legal)
    return cost_rows_of_part(part, estimator_of_part(part), rows, on_rows_costed)


def estimator_of_part(part: SpacePart) -> TableEstimator:
    """The blocks of a part's legal rows, in their order."""
    job, rows = part.job, np.flatnonzero(part.legal)
    table, by_row = part.space.select_rows(rows), job.counts_gpus_by_row
    return TableEstimator(job.workload, job.cluster, job.framework, table, part.loads, counts_gpus_by_row=by_row)


def estimators_of_parts(job: JobAndMachines, parts: Sequence[SpacePart]) -> list[TableEstimator]:
    """Estimators of the legal rows of parts of one space that choose different options, with shared blocks."""
    tables = [part.space.select_rows(np.flatnonzero(part.legal)) for part in parts]
    if not parts:
        return []
    given = job.workload, job.cluster, job.framework, tables, parts[0].loads
    return estimators_sharing_blocks(*given, counts_gpus_by_row=job.counts_gpus_by_row)


def cost_rows_of_part(
    part: SpacePart, estimator: TableEstimator, rows: NDArray[np.intp], tell: Callable[[int], None] | None = None
) -> SpacePartCosts:
    """Cost some of a part's legal rows as :func:`cost_space_part` does all.

    Parameters
    ----------
    estimator
        Of all legal rows of the part.
    rows
        Those to cost, in order. With a row whose recomputed layers are open come those of the same degrees that
        recompute none and all.
    """
    job, space = part.job, part.space
    limit = memory_limit_bytes(job.cluster, job.framework)
    legal_rows = np.flatnonzero(part.legal)
    position = np.full(len(space), -1, dtype=np.intp)
    position[legal_rows] = np.arange(len(legal_rows))
    (device, to_fit), shortfall = np.full((2, len(space)), np.nan), np.zeros(len(space))
    pp = space.degrees.pp.repeat(len(space.recompute))
    allocated, saved = np.zeros((2, len(space)))
    may_fit = np.zeros(len(space), dtype=bool)
    reason = np.full(len(space), -1, dtype=np.int8)
    layers = space.recompute_layers.astype(np.int64)

    def needed(some: NDArray[np.intp], weighed: RowMemory) -> FloatN:
        return device_bytes_to_fit(job.framework, pp[some], weighed, in_closed_form=job.is_judged_in_closed_form)

    def put(some: NDArray[np.intp], weighed: RowMemory) -> None:
        device[some], allocated[some] = weighed.device_bytes, weighed.allocated_bytes
        saved[some] = weighed.checkpoint_bytes
        to_fit[some] = needed(some, weighed)
        may_fit[some] = weighed.least_bytes <= limit
        bad = some[to_fit[some] > limit]
        reason[bad], shortfall[bad] = MEMORY, to_fit[bad] - limit

    is_open = layers[rows] == SOLVED
    legal, open_rows = rows[~is_open], RowsWithOpenRecomputation.of_space(job, space, rows[is_open])
    of, number = open_rows.rows_with_every_number_of_layers
    weighed = estimator.memory_of_rows(
        position[np.concatenate([legal, open_rows.rows[of]])], np.concatenate([layers[legal], number]),
        lambda count: None if tell is None else tell(min(count, len(legal))),
    )  # fmt: skip
    put(legal, weighed.select_rows(slice(len(legal))))
    of_numbers = weighed.select_rows(slice(len(legal), None))
    numbers, lacking_bytes = solve_recomputed_layers(
        open_rows, to_fit, needed(open_rows.rows[of], of_numbers),
        lambda some, tried: needed(
            open_rows.rows[some], estimator.memory_of_rows(position[open_rows.rows[some]], tried)
        ), limit,
    )  # fmt: skip
    is_solved, too_big = numbers > 0, lacking_bytes > 0.0
    needless = open_rows.rows[~is_solved & ~too_big]
    reason[needless], shortfall[needless] = NEEDLESS, 1.0
    reason[open_rows.rows[too_big]], shortfall[open_rows.rows[too_big]] = MEMORY, lacking_bytes[too_big]
    solved = open_rows.rows[is_solved]
    layers[solved] = numbers[is_solved]
    if len(of):
        put(solved, of_numbers.select_rows((number == numbers[of]).nonzero()[0]))
    else:
        put(solved, estimator.memory_of_rows(position[solved], layers[solved]))
    timed = (reason[rows] < 0) | ((reason[rows] == MEMORY) & may_fit[rows])
    to_time = rows[timed]
    times = [
        estimator.exposed_and_hidden_seconds(position[some], recompute_layers=layers[some])[0]
        for start in range(0, len(to_time), AT_ONCE) for some in (to_time[start : start + AT_ONCE],)
    ]  # fmt: skip
    exposed = np.concatenate(times, axis=-1) if times else np.zeros((len(TIME_COMPONENTS), 0))
    return SpacePartCosts(
        reason[rows],
        shortfall[rows],
        layers[rows],
        device[rows],
        timed,
        _summed(exposed),
        allocated[to_time],
        exposed,
        saved[to_time],
    )


def _summed(exposed: FloatN) -> FloatN:
    """Steps from their parts, one part after the other: NumPy sums those of a single row in another order. (n,) [s]"""
    step_s = np.zeros(exposed.shape[1:])
    for part in exposed:
        step_s += part
    return step_s
