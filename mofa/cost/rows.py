"""What the candidates of one pp x vpp gather from the blocks: layers, micro-batches in flight, shards of parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.build import layer_kind
from mofa.blocks.fp8 import transformer_engine_recipe
from mofa.cost.block.block_cost import (
    PrecisionMode,
    base_recompute_mode,
    full_recompute_mode,
    process_groups_of_rows,
    unique_rows,
)
from mofa.cost.block.costs import BlockCost, BlockCosts
from mofa.cost.block.tape_clock import COMPUTED, EXPOSED
from mofa.cost.kernels.topology import ProcessGroup
from mofa.cost.optimizer import ParameterShards, StaticBytes, embedding_gradient_extra_bytes, static_bytes
from mofa.cost.stage_layers import StageLayers, count_stage_layers
from mofa.cost.stages import Stages
from mofa.schedules import SCHEDULES, Schedule
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.params import embedding_params, head_params, layer_params, mtp_params
from mofa.specs.strategy import RecomputeSpec, StrategyTable
from mofa.specs.workload import WorkloadSpec

ArrayN = NDArray[np.float64]
IntN = NDArray[np.int64]


@dataclass(frozen=True)
class LayerArrays:
    """Block costs of all modes and kinds, stacked when asked for: axes (modes, K) lead, then kinds and parts."""

    modes: list[tuple[BlockCost, ...]]

    def only_in_modes(self, used: Sequence[int]) -> LayerArrays:
        """The arrays in some of the modes alone: a used one stands in for each other, which is not costed."""
        return LayerArrays([self.modes[n if n in used else used[0]] for n in range(len(self.modes))])

    def stack_of_blocks(self, pick: Callable[[BlockCost], ArrayN]) -> ArrayN:
        """What is picked of each block. (modes, K, kinds, parts)"""
        array = np.array([[pick(cost) for cost in kinds] for kinds in self.modes])  # modes, kinds, parts, K
        return np.ascontiguousarray(array.transpose(0, -1, *range(1, array.ndim - 1)))

    @cached_property
    def exposed_by_family_s(self) -> ArrayN:
        """What of a layer each family exposes."""
        return self.stack_of_blocks(lambda c: c.forward.exposed + c.backward.exposed)

    @cached_property
    def hidden_by_family_s(self) -> ArrayN:
        """Communication of a layer that is hidden, by family."""
        return self.stack_of_blocks(lambda c: c.forward.hidden + c.backward.hidden)

    @cached_property
    def forward_s(self) -> ArrayN:
        """What a layer's forward takes. [s]"""
        return self.stack_of_blocks(lambda c: c.forward.total_s)

    @cached_property
    def backward_s(self) -> ArrayN:
        """What a layer's backward takes. [s]"""
        return self.stack_of_blocks(lambda c: c.backward.total_s)

    @cached_property
    def issue_s(self) -> ArrayN:
        """What the host takes to issue a layer. [s]"""
        return self.stack_of_blocks(lambda c: c.forward.issue + c.backward.issue)

    @cached_property
    def weight_cast_issue_s(self) -> ArrayN:
        """What the host takes to issue the casts of a layer's weights to fp8. [s]"""
        return self.stack_of_blocks(lambda c: c.weight_cast_issue_s)

    @cached_property
    def layer_flops(self) -> ArrayN:
        """What a layer computes. [FLOP]"""
        return self.stack_of_blocks(lambda c: c.forward_flops + c.backward_flops)

    @cached_property
    def saved_bytes(self) -> ArrayN:
        """What a layer keeps for its backward. [B]"""
        return self.stack_of_blocks(lambda c: c.memory.saved)

    @cached_property
    def saved_bytes_by_kind(self) -> ArrayN:
        """What a layer keeps, by kind of tensor. [B]"""
        return self.stack_of_blocks(lambda c: c.memory.saved_kinds)

    @cached_property
    def saved_rounding_bytes(self) -> ArrayN:
        """What the allocator's rounding adds to kept tensors. [B]"""
        return self.stack_of_blocks(lambda c: c.memory.saved_slack)

    @cached_property
    def forward_peak_bytes(self) -> ArrayN:
        """The most that a forward has alive. [B]"""
        return self.stack_of_blocks(lambda c: c.memory.forward_peak)

    @cached_property
    def forward_peak_bytes_by_kind(self) -> ArrayN:
        """What is alive at the peak of a forward, by kind of tensor. [B]"""
        return self.stack_of_blocks(lambda c: c.memory.forward_kinds)

    @cached_property
    def backward_peak_bytes(self) -> ArrayN:
        """The most that a backward has alive. [B]"""
        return self.stack_of_blocks(lambda c: c.memory.backward_peak)

    @cached_property
    def backward_peak_bytes_by_kind(self) -> ArrayN:
        """What is alive at the peak of a backward, by kind of tensor. [B]"""
        return self.stack_of_blocks(lambda c: c.memory.backward_kinds)

    @cached_property
    def pool_peaks_beyond_layer_peak_bytes(self) -> ArrayN:
        """Peaks of streams' memory pools beyond what is alive at the layer's peak. [B]"""
        return self.stack_of_blocks(lambda c: c.memory.pool_slack)

    @cached_property
    def other_stream_pool_peak_bytes(self) -> ArrayN:
        """Peaks of the pools of all streams but the computing one. [B]"""
        return self.stack_of_blocks(lambda c: c.memory.other_pools)

    @cached_property
    def largest_tensor_bytes(self) -> ArrayN:
        """The largest tensor. [B]"""
        return self.stack_of_blocks(lambda c: c.memory.largest)

    @cached_property
    def saved_large_tensor_bytes(self) -> ArrayN:
        """Large tensors that a layer keeps, by size last. [B]"""
        return self.stack_of_blocks(lambda c: c.memory.large_tensors_saved)

    @cached_property
    def forward_large_tensor_peak_bytes(self) -> ArrayN:
        """The most alive of large tensors in a forward, by size last. [B]"""
        return self.stack_of_blocks(lambda c: c.memory.large_tensors_forward)

    @cached_property
    def large_tensor_peak_beyond_kept_bytes(self) -> ArrayN:
        """The most alive of large tensors beyond what is kept, by size last. [B]"""
        return self.stack_of_blocks(lambda c: c.memory.large_tensors_peak)

    @cached_property
    def nccl_freed_bytes_and_launches(self) -> ArrayN:
        """Rows of :func:`mofa.cost.block.liveness.nccl_freed_bytes_and_launches` last."""
        return self.stack_of_blocks(lambda c: c.nccl_freed_bytes_and_launches)

    @cached_property
    def pinned_bytes(self) -> ArrayN:
        """Of the host, for a forward's copies there. [B]"""
        return self.stack_of_blocks(lambda c: c.pinned_bytes)

    @cached_property
    def copies_to_host_s(self) -> ArrayN:
        """Seconds of a forward's copies to the host. [s]"""
        return self.stack_of_blocks(lambda c: c.copies_to_host_s)

    @cached_property
    def watchdog_held_bytes(self) -> ArrayN:
        """Rows of :func:`mofa.cost.block.liveness.watchdog_held_bytes` last."""
        return self.stack_of_blocks(lambda c: c.watchdog_held_bytes)

    @cached_property
    def autocast_cached_bytes(self) -> ArrayN:
        """Of weight copies that autocast makes in a forward. [B]"""
        return self.stack_of_blocks(lambda c: c.autocast_cached_bytes)

    @cached_property
    def forward_clocks(self) -> ArrayN:
        """Rows of :class:`mofa.cost.block.host_clock.ClockAdvance` last."""
        return self.stack_of_blocks(lambda c: c.forward.clocks)

    @cached_property
    def backward_clocks(self) -> ArrayN:
        """Rows of :class:`mofa.cost.block.host_clock.ClockAdvance` last."""
        return self.stack_of_blocks(lambda c: c.backward.clocks)

    @cached_property
    def weights_s(self) -> ArrayN:
        """What of a backward makes weights' gradients. [s]"""
        return self.stack_of_blocks(lambda c: c.backward.weights)

    @cached_property
    def backward_busy_s(self) -> ArrayN:
        """What of ``backward_s`` the compute stream does itself, copies of FSDP included. [s]"""
        return self.stack_of_blocks(lambda c: c.backward.busy)

    @cached_property
    def backward_slack_s(self) -> ArrayN:
        """What computing may lose in ``backward_s`` and make nothing later. [s]"""
        return self.stack_of_blocks(lambda c: c.backward.slack)

    @cached_property
    def backward_hidden_s(self) -> ArrayN:
        """Communication that runs beside computing in ``backward_s``. [s]"""
        return self.stack_of_blocks(lambda c: c.backward.hidden.sum(axis=0))

    @cached_property
    def exposed_s(self) -> ArrayN:
        """All that is exposed of a layer. (modes, K, kinds) [s]"""
        return np.asarray(self.exposed_by_family_s.sum(axis=-1))

    @cached_property
    def forward_besides_host_s(self) -> ArrayN:
        """What a layer's forward exposes besides waits for the host. (modes, K, kinds) [s]"""
        host = EXPOSED.index("host_idle")
        return self.stack_of_blocks(lambda c: c.forward.total_s - c.forward.exposed[host])

    @cached_property
    def attention_passes_s(self) -> tuple[ArrayN, ArrayN]:
        """What products of dense weights and attention take in a forward and a backward: with experts, next to all that
        is ahead of these in a forward and behind them in a backward. (modes, K, kinds) each [s]"""
        names = [EXPOSED.index(name) for name in ("gemm", "attention")]
        return (
            self.stack_of_blocks(lambda c: c.forward.exposed[names].sum(axis=0)),
            self.stack_of_blocks(lambda c: c.backward.exposed[names].sum(axis=0)),
        )

    @cached_property
    def computing_s(self) -> ArrayN:
        """What of it is computing on the slowest GPU, or a copy of weights and gradients. (modes, K, kinds) [s]"""
        return np.asarray(self.exposed_by_family_s[..., COMPUTED].sum(axis=-1))


@dataclass(frozen=True, eq=False)  # so that what costs much is computed once of each
class GatheredRows:
    """The candidates of one pp x vpp and everything gathered for them; ``k`` (n,) indexes the unique combinations."""

    workload: WorkloadSpec
    cluster: ClusterSpec
    framework: FrameworkSpec
    table: StrategyTable
    costs: BlockCosts
    mode: PrecisionMode
    schedule: str
    k: NDArray[np.intp]
    base_mode_index: NDArray[np.intp]
    full_mode_index: NDArray[np.intp]
    layers: LayerArrays
    mtp: LayerArrays | None
    stage_layers: StageLayers
    num_micro_batches: IntN
    grid_index: NDArray[np.intp]
    """Which of the grids of ranks each candidate has: what is below is the same for all that share one. (n,)"""
    first_row_of_grid: NDArray[np.intp]
    """The first candidate of each grid. (g,)"""
    grids: StrategyTable
    """A candidate of each grid. (g,)"""
    groups: dict[str, ProcessGroup]
    """Of each grid. (g,)"""
    params: ArrayN
    """Dense and expert parameters of every chunk on one rank, of each grid. (2, g, R, vpp) [params]"""
    shards: ParameterShards
    """Of each grid. (g, R)"""
    static: StaticBytes
    """Of each grid. (g, R)"""

    @property
    def last_layer_kind(self) -> int:
        """The kind of the model's last layer, by its place among the stages' kinds."""
        model = self.workload.model
        return self.stage_layers.stages.kinds.index(layer_kind(model, model.num_layers - 1))

    @property
    def schedule_record(self) -> Schedule:
        """What their schedule does."""
        return SCHEDULES[self.schedule]

    def in_base_and_full_mode(self, by_mode: ArrayN) -> tuple[ArrayN, ArrayN]:
        """A stacked quantity of the base mode and of full recomputation. (n, kinds, ...)"""
        return by_mode[self.base_mode_index, self.k], by_mode[self.full_mode_index, self.k]

    def sum_over_layers(self, by_mode: ArrayN, num_plain: ArrayN, num_full: ArrayN, subscripts: str) -> ArrayN:
        """A per-layer quantity times numbers of layers, those recomputed whole and others, summed as einsum says."""
        lay = self.stage_layers
        some = (
            np.einsum(subscripts, num_plain, by_mode[self.base_mode_index, self.k])
            if lay.any_base_mode or not lay.any_fully_recomputed
            else 0.0
        )
        if lay.any_fully_recomputed:
            some = some + np.einsum(subscripts, num_full, by_mode[self.full_mode_index, self.k])
        return np.asarray(some)

    def mtp_layer_quantity(self, name: str) -> ArrayN | None:
        """A quantity of one multi-token-prediction layer, None without: (n, ...).

        Megatron recomputes it whole only under uniform full recomputation; the block method skips it
        (multi_token_prediction.py).
        """
        if self.mtp is None:
            return None
        return np.asarray(getattr(self.mtp, name)[self.mtp_mode_indices, self.k, 0])

    @cached_property
    def mtp_mode_indices(self) -> NDArray[np.intp]:
        """How each candidate runs its multi-token-prediction layers. (n,)"""
        table = self.table
        uniform = (table.recompute_layers < 0) & np.array([s.kind == "full" for s in table.recompute_modes])[
            table.recompute
        ]
        return np.where(uniform, self.full_mode_index, self.base_mode_index)

    def sum_layers_by_stage(self, by_mode: ArrayN) -> ArrayN:
        """A per-layer quantity summed over the layers of each stage. (n, R)"""
        return self.sum_over_layers(
            by_mode, self.stage_layers.base_mode, self.stage_layers.fully_recomputed, "nkr,nk->nr"
        )

    def largest_layer_by_stage(self, by_mode: ArrayN) -> ArrayN:
        """The most of a per-layer quantity among the layers of each stage, 0 where it has none. (n, R)"""
        most = np.zeros((len(self.k), len(self.stage_layers.shown.shown_stages)))
        for mode, has in self._modes_there:
            values = by_mode[mode, self.k]
            for kind, there in enumerate(has):  # one after the other: NumPy is slow along a short axis in the middle
                np.maximum(most, values[:, kind, None], out=most, where=there)
        return most

    @cached_property
    def _modes_there(self) -> list[tuple[NDArray[np.intp], list[NDArray[np.bool_]]]]:
        """Each mode that any candidate has layers of, and on which stages they are, by kind of layer. (n, R) each"""
        lay = self.stage_layers
        both = (
            (lay.any_base_mode, lay.base_mode, self.base_mode_index),
            (lay.any_fully_recomputed, lay.fully_recomputed, self.full_mode_index),
        )
        return [(mode, list(np.moveaxis(some > 0, 1, 0))) for there, some, mode in both if there]

    @cached_property
    def is_embedding_stage(self) -> ArrayN:
        """1 on the stage with the embedding, 0 elsewhere. (R,)"""
        return np.asarray(self.stage_layers.stages_with_embedding, dtype=float)

    @cached_property
    def is_head_stage(self) -> ArrayN:
        """1 on the stage with the head, 0 elsewhere. (R,)"""
        return np.asarray(self.stage_layers.stages_with_head, dtype=float)

    @cached_property
    def is_prediction_stage(self) -> ArrayN:
        """1 on the stage with the multi-token-prediction layers, 0 elsewhere. (R,)"""
        return np.asarray(self.stage_layers.stages_with_predictions, dtype=float)

    @cached_property
    def is_last_stage(self) -> ArrayN:
        """1 on the last stage, 0 elsewhere. (R,)"""
        return np.asarray(self.stage_layers.is_last_stage, dtype=float)

    def spread_to_all_stages(self, shown: ArrayN) -> ArrayN:
        """What is known of the stages that are shown, for all. (n, R) -> (n, pp)"""
        return shown[:, self.stage_layers.shown.shown_index]

    def sum_over_stages(self, shown: ArrayN) -> ArrayN:
        """The sum over all stages of what is known of those that are shown. (n, R) -> (n,)"""
        return np.asarray(shown @ self.stage_layers.shown.num_stages_alike)

    def sum_over_stages_ahead(self, shown: ArrayN) -> ArrayN:
        """The sum over the stages ahead of each that is shown. (n, R) -> (n, R)"""
        return np.asarray(shown @ self.stage_layers.shown.num_stages_alike_ahead)

    def end_blocks_by_stage(self, embedding: ArrayN, head: ArrayN, mtp_layer: ArrayN | None) -> ArrayN:
        """Something of the embedding, the heads and the multi-token-prediction layers, on their stages. (n, R)"""
        depth = self.workload.model.num_mtp_layers
        heads = (head[self.k] * (1 + depth))[:, None] * self.is_head_stage
        if mtp_layer is not None:
            heads = heads + (depth * mtp_layer)[:, None] * self.is_prediction_stage
        return embedding[self.k][:, None] * self.is_embedding_stage + heads


def gather_rows(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, table: StrategyTable, costs: BlockCosts,
    k: NDArray[np.intp], stages: Stages, schedule: str, mode: PrecisionMode, layers: LayerArrays,
    mtp: LayerArrays | None, modes: list[RecomputeSpec], *, every_stage: bool = True,
) -> GatheredRows:  # fmt: skip
    """Gather everything that the candidates of one pp x vpp need, for every stage or for those that differ."""
    m = np.maximum(workload.batch.global_batch // (table.dp * table.micro_batch), 1)
    base, full = recompute_mode_indices(modes, table)
    lay = count_stage_layers(table, stages, schedule, m, every_stage=every_stage)
    first, grid = rank_grids_of_rows(table)
    grids = table.select_rows(first)
    groups = dict(costs.groups) if len(costs.index) == 1 else process_groups_of_rows(cluster, framework, grids)
    params, shards, static = params_and_static_bytes_of_grids(workload, cluster, framework, grids, groups, lay, mode)
    return GatheredRows(
        workload, cluster, framework, table, costs, mode, schedule, k, base, full, layers, mtp, lay, m, grid, first,
        grids, groups, params, shards, static,
    )  # fmt: skip


def recompute_mode_indices(
    modes: Sequence[RecomputeSpec], table: StrategyTable
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Which of the ``modes`` each row's layers run in, those that are not recomputed whole and those that are. (n,)

    0 where the row has none of them.
    """
    base, full = np.array(_places_of_modes(tuple(modes), table.recompute_modes), dtype=np.intp)
    return base[table.recompute], full[table.recompute]


@lru_cache(maxsize=64)
def _places_of_modes(
    modes: tuple[RecomputeSpec, ...], specs: tuple[RecomputeSpec, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:  # fmt: skip
    """Where among the ``modes`` layers of each of the ``specs`` are that are not recomputed whole, and that are."""
    place = {mode: n for n, mode in enumerate(modes)}
    base, full = (
        [place.get(of_spec(spec), 0) for spec in specs] for of_spec in (base_recompute_mode, full_recompute_mode)
    )
    return tuple(base), tuple(full)


def params_and_static_bytes_of_grids(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, grids: StrategyTable,
    groups: dict[str, ProcessGroup], lay: StageLayers, mode: PrecisionMode,
) -> tuple[ArrayN, ParameterShards, StaticBytes]:  # fmt: skip
    """Parameters of every chunk on one rank, those of every stage, and the static bytes of a stage.

    Of each grid of ranks: (2, g, R, vpp), (g, R), (g, R).
    """
    params = chunk_params(workload, framework, grids, lay)
    shards = param_shards_of_stages(framework, params, groups)
    static = static_bytes(
        workload, framework, shards, mode.precision, mode.pipelined, grids.zero[:, None], grids.dp[:, None],
        grids.ep[:, None], cluster.gpu.fp8_transposes,
        params_in_layers(workload, grids, lay) if transformer_engine_recipe(workload, framework) else None,
        grids.tp[:, None], mode.amp,
    )  # fmt: skip
    is_first = np.asarray(lay.stages_with_embedding, dtype=float)
    more = embedding_gradient_extra_bytes(workload, framework, mode.precision, mode.pipelined, grids.tp, is_first)
    return params, shards, replace(static, grads=static.grads + more)


def rank_grids_of_rows(table: StrategyTable) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The first row of each grid of ranks, and each row's grid, of rows of one pp x vpp. (g,), (n,)"""
    return unique_rows(columns_that_rank_grids_read(table))


def columns_that_rank_grids_read(table: StrategyTable) -> list[IntN]:
    """What the grid of a row's ranks, and what lies on it, depends on besides the pipeline. (n,) each"""
    columns = [table.tp, table.cp, table.cp_kind, table.dp, table.ep, table.etp, table.zero, table.balancing]
    return [*columns, table.options]


def param_shards_of_stages(
    framework: FrameworkSpec, params: ArrayN, groups: dict[str, ProcessGroup]
) -> ParameterShards:
    """Parameters of every stage on one rank, of each grid of ranks; ``params`` are its chunks'."""
    dense, expert = params.sum(axis=3)
    ranks = ("fsdp", "efsdp") if framework.shards_params else ("dp_cp", "edp")
    return ParameterShards(
        dense, expert, groups[ranks[0]].size[:, None].astype(float), groups[ranks[1]].size[:, None].astype(float)
    )


def chunk_layer_params(workload: WorkloadSpec, table: StrategyTable, lay: StageLayers) -> ArrayN:
    """Dense and expert parameters of the layers of every chunk on one rank, of each grid. (2, g, R, vpp) [params]"""
    model, counts = workload.model, lay.stages.layer_counts[:, lay.shown.shown_stages]
    tp, spread = table.tp[:, None], (table.ep * table.etp)[:, None]
    params = np.zeros((2, len(table), *counts.shape[1:]))
    dense, expert = params
    for i, kind in enumerate(lay.stages.kinds):
        p = layer_params(model, kind.moe)
        dense += counts[i] * ((p.matrices_tp + p.shared) / tp + p.replicated)[..., None]
        expert += counts[i] * (p.routed / spread)[..., None]
    return params


def params_in_layers(workload: WorkloadSpec, table: StrategyTable, lay: StageLayers) -> ArrayN:
    """Parameters of all layers of a stage on one rank, those of predictions' counted, of each grid. (g, R) [params]"""
    model = workload.model
    params = chunk_layer_params(workload, table, lay).sum(axis=(0, 3))
    if model.num_mtp_layers:  # each has a layer like the last
        p = layer_params(model, model.is_moe_layer(model.num_layers - 1))
        prediction_params = (p.matrices_tp + p.shared) / table.tp + p.replicated + p.routed / (table.ep * table.etp)
        params += model.num_mtp_layers * lay.stages_with_predictions * prediction_params[:, None]
    return np.asarray(params)


def chunk_params(workload: WorkloadSpec, framework: FrameworkSpec, table: StrategyTable, lay: StageLayers) -> ArrayN:
    """Dense and expert parameters of every chunk on one rank, of each grid of ranks. (2, g, R, vpp) [params]"""
    model, tp, spread = workload.model, table.tp[:, None], (table.ep * table.etp)[:, None]
    params = chunk_layer_params(workload, table, lay)
    dense, expert = params
    unit = framework.vocab_divisor * tp
    padding = (np.ceil(model.vocab / unit) * unit - model.vocab) * model.hidden if framework.vocab_divisor > 1 else 0.0
    # Megatron's positions and the norm behind them are whole on every rank
    looked_up = model.vocab * model.hidden
    position_params = embedding_params(model) - looked_up
    first, head = lay.stages_with_embedding, lay.stages_with_head
    dense[:, :, 0] += first * ((looked_up + padding) / tp + position_params / (tp if framework.shards_params else 1))
    output = head_params(model) or (model.vocab * model.hidden if lay.stages.rank_with_head != 0 else 0)
    dense[:, :, -1] += head * ((output + (padding if output else 0.0)) / tp + model.hidden)
    if model.num_mtp_layers:
        p, there = mtp_params(model), lay.stages_with_predictions
        dense[:, :, -1] += there * model.num_mtp_layers * ((p.matrices_tp + p.shared) / tp + p.replicated)
        expert[:, :, -1] += there * model.num_mtp_layers * p.routed / spread
        if lay.stages.pp > 1:  # the prediction layers hold a copy of the embedding
            dense[:, :, -1] += there * model.vocab * model.hidden / tp
    return params
