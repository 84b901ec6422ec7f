"""A lower bound on the step of every candidate: the device time of its layers along the pipeline's longest path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.build import distinct_layer_kinds, layer_kind
from mofa.blocks.tapes import layer_label
from mofa.cost.block.block_cost import recomputes_layers_whole, unique_rows
from mofa.cost.block.tape_clock import EXPOSED, TapeTime
from mofa.cost.estimate import PrecisionModeCosts, TableEstimator
from mofa.cost.lower_bounds.paired_layers import least_pass_quantity_in_pairs, least_seconds_in_pairs
from mofa.cost.rank_rules import gradient_reducer_of_precision_mode
from mofa.cost.rows import recompute_mode_indices
from mofa.cost.stages import Stages, stages_of_row
from mofa.cost.step_time.critical_path import critical_path_may_be_too_low
from mofa.cost.step_time.fsdp_ends import most_time_savings_beside_others_s
from mofa.cost.step_time.power_averaging import RESTED, power_averaged_idle_share
from mofa.schedules import SCHEDULE_NAMES, SCHEDULES, Schedule
from mofa.specs.hardware import ClusterSpec

ArrayN = NDArray[np.float64]
BoolN = NDArray[np.bool_]
IntN = NDArray[np.intp]
Layers = NDArray[np.int64]
"""Numbers of layers. (kinds, pp, vpp)"""
ROUNDING = 1e-9
"""By how much of it a bound is lowered: sums in another order may differ in their last bits. [-]"""


def step_lower_bounds_s(estimator: TableEstimator, is_open: BoolN, *, at_rest: bool = True) -> ArrayN:
    """A time below the step of every row of a table, as
    :meth:`mofa.cost.estimate.TableEstimator.exposed_and_hidden_seconds`
    costs it.

    Parameters
    ----------
    estimator
        Of the table's rows.
    is_open
        Rows whose number of wholly recomputed layers is still open: at least 1 of each chunk. (n,)
    at_rest
        Whether blocks are costed at the clock of waiting ranks too. If not, their rates are taken to grow by all the
        power that waits save, which is more than they do.

    Returns
    -------
    array
        (n,) [s]

    Notes
    -----
    With m micro-batches, ``T_r`` what the device of rank r computes for one, and ``C_q`` the part of it in the first
    chunk of rank q:

        step >= max over r of (m T_r + sum of C_q over the ranks q ahead of r)

    Rank r begins behind the first forwards of the ranks ahead of it, and the last gradient goes back through them.
    Schedules that defer weights' gradients may end otherwise: for these ``m T_r`` alone counts. Left out are waits for
    the host, hand-overs, gathers and reductions once a step, and the optimizer, none of which is below 0.

    A block counts the lesser of its time with the host's own lead and of that with the host far ahead. Where the power
    limit lets a waiting rank compute faster (:mod:`mofa.cost.step_time.power_averaging`), the bound lies between those
    at both clocks, by the largest share that such a wait may be of this step.
    """
    bound_s = _undisturbed_s(estimator, is_open)
    drained_share = estimator.drains
    if drained_share.any():
        bound_s = bound_s + drained_share * (_undisturbed_s(estimator.without_host_lead, is_open) - bound_s)
    share = _most_rest(estimator, bound_s)
    if share.any():
        rested_s = (
            _undisturbed_s(estimator.at_clock_of_longest_waits, is_open)
            if at_rest
            else _most_speed(estimator) * bound_s
        )
        bound_s = bound_s + share * np.minimum(rested_s - bound_s, 0.0)
    return np.asarray(bound_s * _runs(estimator) * (1.0 - ROUNDING))


def weighted_computing_lower_bounds(estimator: TableEstimator, is_open: BoolN, weights: Mapping[str, float]) -> ArrayN:
    """A weighted sum below that of the seconds that the slowest rank of every row computes in a step. (n,)

    ``weights`` are by families of ``EXPOSED`` that compute. Other arguments as in :func:`step_lower_bounds_s`.
    """
    families = [EXPOSED.index(name) for name in weights]
    each = np.array(list(weights.values()))

    def weighed(phase: TapeTime) -> ArrayN:
        return np.asarray(each @ phase.exposed[families])

    bound = np.empty(len(estimator.table))
    for rows, bounds in _parts(estimator, is_open, weighed):
        bound[rows] = bounds.of_lightest_ranks()
    share = _most_rest(estimator, step_lower_bounds_s(estimator, is_open, at_rest=False))
    slowest_share = 1.0 - share * (1.0 - _most_speed(estimator))
    return np.asarray(bound * slowest_share * _runs(estimator) * (1.0 - ROUNDING))


def micro_batch_lower_bounds_s(estimator: TableEstimator, *, halved: bool = False) -> tuple[ArrayN, ArrayN]:
    """What a micro-batch of every row takes at least on all ranks together, and in a layer of each kind.

    It recomputes nothing. No pipeline computes less, whatever its stages hold; :func:`power_averaged_lower_bound_s` is
    left to the caller.

    Parameters
    ----------
    estimator
        Of the table's rows.
    halved
        Whether backwards of layers may run in two halves. What an end takes is then left out.

    Returns
    -------
    tuple of arrays
        (n,), (kinds of layers, n) [s]
    """
    work_s = _work_s(estimator, halved)
    drained_share = estimator.drains
    if drained_share.any():
        work_s = work_s + drained_share * (_work_s(estimator.without_host_lead, halved) - work_s)
    work_s = work_s * (1.0 - ROUNDING)
    return work_s[0], work_s[1:]


def _work_s(estimator: TableEstimator, halved: bool) -> ArrayN:
    """The same at the clock of the estimator's blocks, one below the other. (1 + kinds, n) [s]"""
    work_s = np.empty((1 + len(distinct_layer_kinds(estimator.workload.model)), len(estimator.table)))
    for rows, bounds in _parts(estimator, np.zeros(len(estimator.table), dtype=bool), _least_s):
        work_s[:, rows] = bounds.of_all_layers(halved)
    return work_s


def power_averaged_lower_bound_s(cluster: ClusterSpec, step_s: ArrayN) -> ArrayN:
    """What a step that takes at least ``step_s`` takes where waits of its pipeline let GPUs compute faster. (n,) [s]"""
    limit = cluster.gpu.curves.power_limit
    if limit is None:
        return step_s
    longest = np.full(len(step_s), np.inf)
    at_least_s = np.maximum(step_s, 1e-12)
    share = power_averaged_idle_share(limit, longest, longest, at_least_s, at_least_s) / RESTED
    return np.asarray(step_s * (1.0 - share * (1.0 - limit.mix_weight_beside_idle(RESTED))))


def _runs(estimator: TableEstimator) -> ArrayN | float:
    return estimator.runs_per_step(estimator.table) if estimator.loads.over_budget_fraction else 1.0


def _most_rest(estimator: TableEstimator, bound_s: ArrayN) -> ArrayN:
    """The most that a step may be towards one at the clock of rest, as a share. (n,) [-]"""
    if not estimator.rests:
        return np.zeros(len(bound_s))
    wait_s = np.where(estimator.table.pp > 1, np.inf, 0.0)
    limit, longest = estimator.cluster.gpu.curves.power_limit, np.full(len(bound_s), np.inf)
    at_least_s = np.maximum(bound_s, 1e-12)
    share = power_averaged_idle_share(limit, wait_s, longest, at_least_s, at_least_s)
    return np.asarray(share / RESTED)


def _most_speed(estimator: TableEstimator) -> float:
    """What computing takes at least at the clock of rest, over what it takes without. [-]"""
    limit = estimator.cluster.gpu.curves.power_limit
    return 1.0 if limit is None else limit.mix_weight_beside_idle(RESTED)


def _least_s(phase: TapeTime) -> ArrayN:
    """The least that a pass through a block takes, with its host far ahead or as late as it is by itself. (K,) [s]"""
    return np.asarray(np.minimum(phase.total_s, phase.clocks[0]))


def _undisturbed_s(estimator: TableEstimator, is_open: BoolN) -> ArrayN:
    """The bound at the clock of the estimator's blocks, of one run of a step. (n,) [s]"""
    bound_s = np.empty(len(estimator.table))
    for rows, bounds in _parts(estimator, is_open, _least_s):
        bound_s[rows] = bounds.of_longest_paths()
    return bound_s


def _parts(
    estimator: TableEstimator, is_open: BoolN, pick: Callable[[TapeTime], ArrayN]
) -> Iterator[tuple[IntN, _PartBounds]]:
    for number, part in enumerate(estimator.parts):
        rows = np.flatnonzero(estimator.of == number)
        if len(rows):  # else other rows have these blocks
            yield rows, _PartBounds(estimator, part, rows, is_open[rows], pick)


class _PartBounds:
    """Bounds of rows that share their blocks, by something ``pick``ed of a forward and of a backward."""

    def __init__(
        self,
        estimator: TableEstimator,
        part: PrecisionModeCosts,
        rows: IntN,
        is_open: BoolN,
        pick: Callable[[TapeTime], ArrayN],
    ) -> None:
        self.estimator, self.part, self.k, self.is_open = estimator, part, estimator.place[rows], is_open
        table = estimator.table.select_rows(rows)
        self.table = replace(table, recompute_layers=np.where(is_open, 1, table.recompute_layers))
        self.base, self.full = recompute_mode_indices(part.modes, self.table)
        batch = estimator.workload.batch.global_batch
        self.num_micro_batches = np.maximum(batch // (table.dp * table.micro_batch), 1).astype(float)
        self.layers = part.layers.stack_of_blocks(lambda cost: pick(cost.forward) + pick(cost.backward))
        if estimator.framework.expert_overlap == "combined":
            in_pairs = (
                least_seconds_in_pairs(part.costs)
                if pick is _least_s
                else least_pass_quantity_in_pairs(part.costs, pick)
            )
            self.layers = np.minimum(self.layers, in_pairs)
        ends = part.costs.embedding, part.costs.head
        embedding, head = ((pick(cost.forward) + pick(cost.backward))[self.k] for cost in ends)
        depth = estimator.workload.model.num_mtp_layers
        self.embedding, self.heads, self.predictions = embedding, (1 + depth) * head, np.zeros(len(rows))
        if pick is _least_s and gradient_reducer_of_precision_mode(estimator.framework, part.mode) == "FSDP by block":
            used = np.unique([self.base, self.full])
            self.heads = self.heads - most_time_savings_beside_others_s(part.costs, part.layers, used)[self.k]
        if part.mtp is not None:
            each = part.mtp.stack_of_blocks(lambda cost: pick(cost.forward) + pick(cost.backward))[..., 0]
            # a prediction's layer is like the model's last; what is ahead of it is left out
            if estimator.framework.expert_overlap == "combined":
                model = estimator.workload.model
                last = distinct_layer_kinds(model).index(layer_kind(model, model.num_layers - 1))
                each = np.minimum(each, self.layers[..., last])
            self.predictions = depth * np.minimum(each[self.base, self.k], each[self.full, self.k])

    def of_all_layers(self, halved: bool) -> ArrayN:
        """What all layers and ends have together, and a layer of each kind. (1 + kinds, n)"""
        layers = (self.halved_layers if halved else self.layers)[self.base, self.k]
        counts = stages_of_row(self.estimator.workload, self.estimator.framework, self.table, 0).layer_counts.sum(
            (1, 2)
        )
        ends = np.zeros(len(layers)) if halved else self.embedding + self.heads + self.predictions
        return np.concatenate([(layers @ counts + ends)[None], layers.T])

    def of_longest_paths(self) -> ArrayN:
        """What the longest path through the pipeline has. (n,)"""
        most = np.empty(len(self.table))
        for rows, schedule, stages, recomputed in self._groups():
            summed = _Summed(self, rows, schedule, stages, recomputed)
            path_counts = self._path_counts(rows, schedule, stages)
            paths = np.zeros(len(rows))
            for rank in _last_alike(stages, recomputed):
                path = self.num_micro_batches[rows] * summed.of_rank(rank)
                if rank > 0:
                    path = path + path_counts * summed.first_chunks_ahead_of(rank)
                np.maximum(paths, path, out=paths)
            most[rows] = paths
        return most

    def of_lightest_ranks(self) -> ArrayN:
        """What the rank with the least has in all micro-batches. (n,)"""
        least = np.empty(len(self.table))
        for rows, schedule, stages, recomputed in self._groups():
            summed = _Summed(self, rows, schedule, stages, recomputed)
            of_ranks = [summed.of_rank(rank) for rank in _last_alike(stages, recomputed)]
            least[rows] = self.num_micro_batches[rows] * np.minimum.reduce(of_ranks)
        return least

    def _groups(self) -> Iterator[tuple[IntN, Schedule, Stages, Layers]]:
        """Rows whose ranks hold the same layers, and the layers that they recompute whole."""
        table, estimator = self.table, self.estimator
        recomputes_layers = np.array([recomputes_layers_whole(spec) for spec in table.recompute_modes])[table.recompute]
        choice = [np.where(recomputes_layers, column, -1) for column in (table.recompute, table.recompute_layers)]
        columns = [table.pp, table.vpp, table.schedule, table.layout, *choice, self.is_open.astype(np.int64)]
        _, code = unique_rows(columns)
        order = np.argsort(code, kind="stable")
        bounds = [0, *(np.flatnonzero(np.diff(code[order])) + 1).tolist(), len(order)]
        for rows in (order[begin:end] for begin, end in pairwise(bounds)):
            first = int(rows[0])
            spec = table.recompute_modes[int(table.recompute[first])]
            stages = stages_of_row(estimator.workload, estimator.framework, table, first)
            recomputed = stages.num_recomputed_layers(spec, int(table.recompute_layers[first]))
            yield rows, SCHEDULES[SCHEDULE_NAMES[int(table.schedule[first])]], stages, recomputed

    def _path_counts(self, rows: IntN, schedule: Schedule, stages: Stages) -> BoolN | float:
        """Whether what is ahead of a rank surely counts. (n,)"""
        if schedule.defers_weight_gradients:
            return 0.0
        if schedule.has_closed_form:
            return 1.0
        plan = schedule.name, self.estimator.framework.traits.runtime, stages.pp, stages.vpp
        return ~critical_path_may_be_too_low(plan, self.num_micro_batches[rows].astype(np.int64))

    @cached_property
    def halved_layers(self) -> ArrayN:
        """Of layers whose backward may run in two halves: the least of both ways. (modes, K, kinds) [s]"""
        kinds, split_backward = (
            distinct_layer_kinds(self.estimator.workload.model),
            self.part.costs.split_backward_clock_advances,
        )

        def less_s(name: str, backward: TapeTime) -> ArrayN:
            halves_s = sum(clocks[0] for clocks in split_backward[name])
            return np.asarray(np.minimum(halves_s - _least_s(backward), 0.0))

        less = [
            [less_s(layer_label(kind, mode), block.backward) for kind, block in zip(kinds, blocks, strict=True)]
            for mode, blocks in self.part.costs.blocks.items()
        ]
        return np.asarray(self.layers + np.moveaxis(np.array(less), 2, 1))


class _Summed:
    """Something summed over the layers of ranks, for rows whose ranks hold the same layers."""

    def __init__(self, part: _PartBounds, rows: IntN, schedule: Schedule, stages: Stages, recomputed: Layers) -> None:
        self.stages, self.recomputed, self.plain = stages, recomputed, stages.layer_counts - recomputed
        halved, k = schedule.defers_weight_gradients, part.k[rows]
        layers = part.halved_layers if halved else part.layers
        self.any_recomputed = bool(recomputed.any())
        self.of_base = layers[part.base[rows], k]
        if self.any_recomputed:
            self.of_full = layers[part.full[rows], k]
            if part.is_open[rows[0]]:  # of those behind the first any number may be recomputed
                self.of_base = np.minimum(self.of_base, self.of_full)
        nothing = np.zeros(len(rows))  # what an end takes in two halves is left out
        ends = part.embedding, part.heads, part.predictions
        self.embedding, self.heads, self.predictions = (nothing if halved else end[rows] for end in ends)

    def of_rank(self, rank: int) -> ArrayN:
        """Of one micro-batch in all chunks of a rank. (n,)"""
        some, stages = self._over(self.plain[:, rank].sum(axis=1), self.recomputed[:, rank].sum(axis=1)), self.stages
        ends = (
            (stages.ranks_with_embedding, self.embedding), (stages.ranks_with_head, self.heads),
            (stages.ranks_with_predictions, self.predictions),
        )  # fmt: skip
        for has, end in ends:
            if has[rank]:
                some = some + end
        return some

    def first_chunks_ahead_of(self, rank: int) -> ArrayN:
        """Of one micro-batch in the first chunks of the ranks ahead of one. (n,)"""
        ahead = (layers[:, :rank, 0].sum(axis=1) for layers in (self.plain, self.recomputed))
        return self._over(*ahead) + self.embedding

    def _over(self, plain: NDArray[np.int64], recomputed: NDArray[np.int64]) -> ArrayN:
        """Over so many layers of each kind. (n,)"""
        some = self.of_base @ plain
        return np.asarray(some + self.of_full @ recomputed if self.any_recomputed else some)


def _last_alike(stages: Stages, recomputed: Layers) -> list[int]:
    """Of ranks that compute the same the last: the most is ahead of it."""
    last = {}
    for rank in range(stages.pp):
        ends = (
            bool(stages.ranks_with_embedding[rank]),
            bool(stages.ranks_with_head[rank]),
            bool(stages.ranks_with_predictions[rank]),
        )
        last[stages.layer_counts[:, rank].sum(axis=1).tobytes(), recomputed[:, rank].sum(axis=1).tobytes(), ends] = rank
    return list(last.values())
