"""What the candidates of one pp x vpp gather from the blocks: layers, micro-batches in flight, shards of parameters."""

from __future__ import annotations

from collections.abc import Sequence
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
from mofa.cost.block.costs import BlockCosts
from mofa.cost.kernels.topology import ProcessGroup
from mofa.cost.layer_arrays import LayerArrays
from mofa.cost.optimizer import ParameterShards, StaticBytes, embedding_gradient_extra_bytes, static_bytes
from mofa.cost.stage_layers import StageLayers, count_stage_layers
from mofa.cost.stages import Stages
from mofa.schedules import SCHEDULES, Schedule
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.params import embedding_params, head_params, layer_params, mtp_layer_params
from mofa.specs.strategy import RecomputeSpec, StrategyTable
from mofa.specs.workload import WorkloadSpec

ArrayN = NDArray[np.float64]
IntN = NDArray[np.int64]


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
        return np.asarray(shown @ self.stage_layers.shown.num_equal_stages)

    def sum_over_stages_ahead(self, shown: ArrayN) -> ArrayN:
        """The sum over the stages ahead of each that is shown. (n, R) -> (n, R)"""
        return np.asarray(shown @ self.stage_layers.shown.num_equal_stages_ahead)

    def sum_of_end_blocks_by_stage(self, embedding: ArrayN, head: ArrayN, mtp_layer: ArrayN | None) -> ArrayN:
        """A quantity of the embedding, the heads and the multi-token-prediction layers, summed by stage. (n, R)"""
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
        p, there = mtp_layer_params(model), lay.stages_with_predictions
        dense[:, :, -1] += there * model.num_mtp_layers * ((p.matrices_tp + p.shared) / tp + p.replicated)
        expert[:, :, -1] += there * model.num_mtp_layers * p.routed / spread
        if lay.stages.pp > 1:  # the prediction layers hold a copy of the embedding
            dense[:, :, -1] += there * model.vocab * model.hidden / tp
    return params
