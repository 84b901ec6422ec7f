"""What the ends of a model spare a step of FSDP, or cost it, whose blocks were timed as among others like them.

Each layer gathers one ahead of itself, and its reduction runs beside the layer behind it. So a layer is taken to
compute beside a gather and a reduction of its own kind, and an end beside its own. In a step all move by one: the first
layer's gather is waited for, the last one computes beside the head's. In the backward the last layer computes beside
the head's reduction, the first one gathers the embedding, and the embedding waits for the first layer's reduction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.build import distinct_layer_kinds, layer_kind
from mofa.blocks.work import CollectiveKind
from mofa.cost.block.costs import BlockCost, BlockCosts
from mofa.cost.block.tape_clock import TapeTime
from mofa.cost.kernels.collectives import collective_s
from mofa.cost.kernels.computing_slowdown import collective_slowdown
from mofa.cost.layer_arrays import LayerArrays
from mofa.cost.rank_rules import gradient_reducer
from mofa.cost.rows import GatheredRows
from mofa.specs.params import layer_params

ArrayN = NDArray[np.float64]
ArrayK = NDArray[np.float64]
GATHERED_BYTES_PER_PARAM = 2.0
"""Of parameters as FSDP gathers them, bf16. [B]"""
ROUNDING = 1e-6
"""By how much of it a sum of what computing loses may be off. [-]"""


@dataclass(frozen=True)
class TimeSavingsAtModelEnds:
    """What a micro-batch takes less than blocks that are all among others like them, by how its first and its last
    layer are recomputed; below 0 where it takes more. (modes, K) each [s]"""

    forward_s: ArrayK
    """In the forward of the last layer and the head."""
    backward_of_last_s: ArrayK
    """In the backward of the head and the last layer."""
    backward_of_first_s: ArrayK
    """In the backward of the first layer; of a model of one layer in the other."""

    @classmethod
    def from_blocks(cls, costs: BlockCosts, layers: LayerArrays) -> TimeSavingsAtModelEnds:
        """Of a single stage whose layers are gathered for each use."""
        model, slowdown = costs.context.model, _slowdown(costs)
        first, last = (distinct_layer_kinds(model).index(layer_kind(model, n)) for n in (0, model.num_layers - 1))
        (embedding, head), of_first, of_last = _params_of_ends(costs), _layer_params(costs, 0), _layer_params(costs, -1)
        gather_s, reduce_s = _seconds(costs, "all_gather"), _seconds(costs, "reduce_scatter")

        def less_s(kind: int, more_s: ArrayK, pick: Callable[[BlockCost], TapeTime]) -> ArrayK:
            """What a layer spares beside so many more seconds of collectives. (modes, K) [s]"""
            return np.array([-_longer_by_s(more_s, pick(blocks[kind]), slowdown) for blocks in layers.modes])

        forward_s = less_s(last, gather_s(head) - gather_s(of_last), lambda block: block.forward)
        forward_s -= _longer_by_s(-gather_s(head), costs.head.forward, slowdown)
        more_reduced_s, more_gathered_s = reduce_s(head) - reduce_s(of_last), gather_s(embedding) - gather_s(of_first)
        if not costs.machine.framework.reshard_after_forward:  # no backward gathers
            more_gathered_s = 0.0 * more_gathered_s
        if model.num_layers == 1:
            more_reduced_s, more_gathered_s = more_reduced_s + more_gathered_s, 0.0 * more_gathered_s
        of_last_s = less_s(last, more_reduced_s, lambda block: block.backward)
        of_last_s -= _longer_by_s(-reduce_s(head), costs.head.backward, slowdown)
        return cls(forward_s, of_last_s, less_s(first, more_gathered_s, lambda block: block.backward))


def time_savings_at_model_ends(rows: GatheredRows) -> tuple[ArrayN, ArrayN]:
    """What a micro-batch's forward and backward take less at the model's ends than if all blocks were among others like
    them; below 0 where they take more. (n,) each [s]

    Of a single stage whose layers are gathered for each use; nothing elsewhere.
    """
    if gradient_reducer(rows) != "FSDP by block":
        nothing = np.zeros(len(rows.table))
        return nothing, nothing
    spared, model, lay = (
        TimeSavingsAtModelEnds.from_blocks(rows.costs, rows.layers),
        rows.workload.model,
        rows.stage_layers,
    )
    first, last = (lay.stages.kinds.index(layer_kind(model, n)) for n in (0, model.num_layers - 1))
    first_mode = np.where(lay.fully_recomputed[:, first, 0] > 0, rows.full_mode_index, rows.base_mode_index)
    last_mode = np.where(lay.base_mode[:, last, 0] == 0, rows.full_mode_index, rows.base_mode_index)
    backward_s = spared.backward_of_last_s[last_mode, rows.k] + spared.backward_of_first_s[first_mode, rows.k]
    return spared.forward_s[last_mode, rows.k], backward_s


def most_time_savings_at_model_ends_s(costs: BlockCosts, layers: LayerArrays, modes: NDArray[np.intp]) -> ArrayK:
    """The most that a micro-batch saves at the model's ends, by any of some modes of recomputation. (K,) [s]"""
    spared = TimeSavingsAtModelEnds.from_blocks(costs, layers)
    passes = spared.forward_s, spared.backward_of_last_s, spared.backward_of_first_s
    return np.asarray(sum(of_modes[modes].max(axis=0) for of_modes in passes))


def _longer_by_s(more_s: ArrayK, block: TapeTime, slowdown: ArrayK) -> ArrayK:
    """What a block takes more beside so many more seconds of collectives, which may be below 0. (K,) [s]

    Computing loses by collectives beside it, and waits for what they take longer: whichever of both is more.
    """
    beyond_s = block.beyond_computing_s
    waits = beyond_s > block.lost_aside * (1.0 + ROUNDING)
    computing_s = np.where(waits, block.aside - beyond_s, block.busy)

    def beyond_computing_s(lasting_s: ArrayK) -> ArrayK:
        return np.maximum(slowdown * np.maximum(lasting_s, 0.0), lasting_s - computing_s)

    return np.asarray(beyond_computing_s(block.aside + more_s) - beyond_computing_s(block.aside))


def _slowdown(costs: BlockCosts) -> ArrayK:
    machine = costs.machine
    return collective_slowdown(machine.cluster.gpu.curves, machine.groups["fsdp"], machine.network_fabric)


def _seconds(costs: BlockCosts, kind: CollectiveKind) -> Callable[[ArrayK], ArrayK]:
    group, machine = costs.machine.groups["fsdp"], costs.machine
    width = GATHERED_BYTES_PER_PARAM if kind == "all_gather" else machine.framework.reduced_bytes_per_param

    def seconds(params: ArrayK) -> ArrayK:
        return np.asarray(collective_s(kind, width * params, group, machine.network_fabric))

    return seconds


def _layer_params(costs: BlockCosts, number: int) -> ArrayK:
    """Of a layer, what is in the group of its dense parameters. (K,) [params]"""
    ctx, groups = costs.context, costs.machine.groups
    layer = layer_params(ctx.model, ctx.model.is_moe_layer(number % ctx.model.num_layers))
    dense = (layer.matrices_tp + layer.shared) / ctx.tp + layer.replicated
    has_own_group = groups["fsdp"].size != groups["efsdp"].size
    return np.asarray(dense + np.where(has_own_group, 0.0, layer.routed / (ctx.ep * ctx.etp)))


def _params_of_ends(costs: BlockCosts) -> tuple[ArrayK, ArrayK]:
    """What is gathered again for the embedding's backward, and with the head. (K,) each [params]"""
    ctx, framework = costs.context, costs.machine.framework
    embedding = np.full(costs.machine.num_k, ctx.model.vocab * ctx.model.hidden / ctx.tp)
    head = 0.0 * embedding if ctx.model.tied_embeddings else embedding
    if framework.flat_params or not framework.ends_apart:  # both are the root's, which stays gathered
        return 0.0 * embedding, 0.0 * embedding
    return embedding, head
