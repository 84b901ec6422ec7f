"""What neighbours of another kind spare a step of FSDP, or cost it, whose blocks were timed as among others like them.

Each layer gathers one ahead of itself, and its reduction runs beside the layer behind it. So a layer is taken to
compute beside a gather and a reduction of its own kind, and an end beside its own. In a step all move by one: the first
layer's gather is waited for, the last one computes beside the head's. In the backward the last layer computes beside
the head's reduction, the first one gathers the embedding, and the embedding waits for the first layer's reduction. So
does a dense layer compute beside what a layer of experts gathers and reduces, where both are in one group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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
from mofa.specs.model import ModelSpec
from mofa.specs.params import layer_params

ArrayN = NDArray[np.float64]
ArrayK = NDArray[np.float64]
GATHERED_BYTES_PER_PARAM = 2.0
"""Of parameters as FSDP gathers them, bf16. [B]"""
ROUNDING = 1e-6
"""By how much of it a sum of what computing loses may be off. [-]"""


@dataclass(frozen=True)
class LayersBesideOthers:
    """Layers of one kind that have the same neighbours, which are not both of their kind, and what each takes less than
    among others like it, by how it is recomputed; below 0 where it takes more. (modes, K) each [s]"""

    kind: int
    numbers: tuple[int, ...]
    """Of the layers, in the order of the model."""
    forward_s: ArrayK
    backward_s: ArrayK


@dataclass(frozen=True)
class TimeSavingsBesideOthers:
    """What a micro-batch takes less than blocks that are all among others like them; below 0 where it takes more."""

    layers: tuple[LayersBesideOthers, ...]
    head_forward_s: ArrayK
    """(K,) [s]"""
    head_backward_s: ArrayK
    """(K,) [s]"""

    @classmethod
    def from_blocks(cls, costs: BlockCosts, layers: LayerArrays) -> TimeSavingsBesideOthers:
        """Of a single stage whose layers are gathered for each use."""
        model, slowdown, num_kinds = costs.context.model, _slowdown(costs), len(layers.modes[0])
        embedding, head = _params_of_ends(costs)
        params = [*_params_of_kinds(costs), embedding, head]  # the ends' kinds are behind those of layers
        gather_s, reduce_s = ([seconds(each) for each in params] for seconds in _gathers_and_reductions(costs))
        if not costs.machine.framework.reshard_after_forward:  # no backward gathers
            gather_again_s = [0.0 * seconds for seconds in gather_s]
        else:
            gather_again_s = gather_s

        def less_s(kind: int, more_s: ArrayK, pick: Callable[[BlockCost], TapeTime]) -> ArrayK:
            """What a layer spares beside so many more seconds of collectives. (modes, K) [s]"""
            return np.array([-_longer_by_s(more_s, pick(blocks[kind]), slowdown) for blocks in layers.modes])

        out = []
        for (before, kind, behind), numbers in _layers_by_neighbours(model, num_kinds).items():
            more_forward_s = gather_s[behind] - gather_s[kind]
            more_backward_s = reduce_s[behind] - reduce_s[kind] + gather_again_s[before] - gather_again_s[kind]
            forward_s = less_s(kind, more_forward_s, lambda block: block.forward)
            backward_s = less_s(kind, more_backward_s, lambda block: block.backward)
            out.append(LayersBesideOthers(kind, numbers, forward_s, backward_s))
        of_head = -_longer_by_s(-gather_s[-1], costs.head.forward, slowdown)
        return cls(tuple(out), of_head, -_longer_by_s(-reduce_s[-1], costs.head.backward, slowdown))


def _layers_by_neighbours(model: ModelSpec, num_kinds: int) -> dict[tuple[int, int, int], tuple[int, ...]]:
    """Layers whose neighbours are not both of their kind, by the kinds ahead of them, of themselves and behind them;
    the embedding's is ``num_kinds``, the head's one more."""
    known = distinct_layer_kinds(model)
    kinds = [num_kinds, *(known.index(layer_kind(model, n)) for n in range(model.num_layers)), num_kinds + 1]
    layers: dict[tuple[int, int, int], tuple[int, ...]] = {}
    for number, (before, kind, behind) in enumerate(zip(kinds, kinds[1:], kinds[2:], strict=False)):
        if not before == kind == behind:
            layers[before, kind, behind] = (*layers.get((before, kind, behind), ()), number)
    return layers


def time_savings_beside_others(rows: GatheredRows) -> tuple[ArrayN, ArrayN]:
    """What a micro-batch's forward and backward take less than if all blocks were among others like them; below 0 where
    they take more. (n,) each [s]

    Of a single stage whose layers are gathered for each use; nothing elsewhere.
    """
    if gradient_reducer(rows) != "FSDP by block":
        nothing = np.zeros(len(rows.table))
        return nothing, nothing
    spared = TimeSavingsBesideOthers.from_blocks(rows.costs, rows.layers)
    forward_s, backward_s = spared.head_forward_s[rows.k], spared.head_backward_s[rows.k]
    for some in spared.layers:
        number = len(some.numbers)
        forward_s = forward_s + number * _of_recomputed(rows, some, some.forward_s)
        backward_s = backward_s + number * _of_recomputed(rows, some, some.backward_s)
    return forward_s, backward_s


def backward_savings_of_layers(rows: GatheredRows) -> dict[int, ArrayN]:
    """What the backward of single layers takes less than among others like them, by their numbers in the model.
    (n,) each [s]"""
    spared = TimeSavingsBesideOthers.from_blocks(rows.costs, rows.layers)
    return {
        number: saved_s
        for some in spared.layers
        for saved_s in (_of_recomputed(rows, some, some.backward_s),)
        for number in some.numbers
    }


def _of_recomputed(rows: GatheredRows, some: LayersBesideOthers, by_mode_s: ArrayK) -> ArrayN:
    """Of (modes, K), what each row has: the first and the last layer are recomputed as they are, others as their kind
    is in the mean. (n,) [s]"""
    lay = rows.stage_layers
    num_full, counts = lay.fully_recomputed[:, some.kind, 0], lay.layer_counts[:, some.kind, 0]
    share = num_full / np.maximum(counts, 1.0)
    if 0 in some.numbers:
        share = np.where(num_full > 0, 1.0, 0.0)
    elif rows.workload.model.num_layers - 1 in some.numbers:
        share = np.where(num_full == counts, 1.0, 0.0)
    plain, full = (by_mode_s[mode, rows.k] for mode in (rows.base_mode_index, rows.full_mode_index))
    return np.asarray((1.0 - share) * plain + share * full)


def most_time_savings_beside_others_s(costs: BlockCosts, layers: LayerArrays, modes: NDArray[np.intp]) -> ArrayK:
    """The most that a micro-batch saves by blocks' neighbours, by any of some modes of recomputation. (K,) [s]"""
    spared = TimeSavingsBesideOthers.from_blocks(costs, layers)
    saved_s = spared.head_forward_s + spared.head_backward_s
    for some in spared.layers:
        saved_s = saved_s + len(some.numbers) * (some.forward_s[modes] + some.backward_s[modes]).max(axis=0)
    return np.asarray(saved_s)


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


def _gathers_and_reductions(costs: BlockCosts) -> tuple[Callable[[ArrayK], ArrayK], Callable[[ArrayK], ArrayK]]:
    """What gathering so many parameters takes, and what reducing them does. [s]"""
    group, machine = costs.machine.groups["fsdp"], costs.machine

    def seconds(kind: CollectiveKind, width: float, params: ArrayK) -> ArrayK:
        return np.asarray(collective_s(kind, width * params, group, machine.network_fabric))

    reduced = machine.framework.reduced_bytes_per_param
    return partial(seconds, "all_gather", GATHERED_BYTES_PER_PARAM), partial(seconds, "reduce_scatter", reduced)


def _params_of_kinds(costs: BlockCosts) -> list[ArrayK]:
    """Of a layer of each kind, what is in the group of its dense parameters. (K,) each [params]"""
    ctx, groups = costs.context, costs.machine.groups
    has_own_group = groups["fsdp"].size != groups["efsdp"].size
    params = []
    for kind in distinct_layer_kinds(ctx.model):
        layer = layer_params(ctx.model, kind.moe)
        dense = (layer.matrices_tp + layer.shared) / ctx.tp + layer.replicated
        params.append(np.asarray(dense + np.where(has_own_group, 0.0, layer.routed / (ctx.ep * ctx.etp))))
    return params


def _params_of_ends(costs: BlockCosts) -> tuple[ArrayK, ArrayK]:
    """What is gathered again for the embedding's backward, and with the head. (K,) each [params]"""
    ctx, framework = costs.context, costs.machine.framework
    embedding = np.full(costs.machine.num_k, ctx.model.vocab * ctx.model.hidden / ctx.tp)
    head = 0.0 * embedding if ctx.model.tied_embeddings else embedding
    if framework.flat_params or not framework.ends_apart:  # both are the root's, which stays gathered
        return 0.0 * embedding, 0.0 * embedding
    return embedding, head
