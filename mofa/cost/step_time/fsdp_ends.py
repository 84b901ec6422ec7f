"""What the ends of a model spare a step of FSDP whose gathers and reductions take longer than what is computed.

Layers are timed as among others like them: each gathers one ahead and waits for the reduction of the one before. The
embedding and the head wait for the first layer besides, and the head gathers the last one again. Over all layers that
is a gather and a reduction of a layer too many, and those of an end too few. Where communication sets the time of
layers, the difference is spared.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.build import kind_of_each_layer
from mofa.blocks.work import CollectiveKind
from mofa.cost.kernels.collectives import collective_s
from mofa.cost.kernels.computing_slowdown import collective_slowdown
from mofa.cost.rank_rules import gradient_reducer
from mofa.cost.rows import GatheredRows, LayerArrays
from mofa.specs.params import layer_params

ArrayN = NDArray[np.float64]
GATHERED_BYTES_PER_PARAM = 2.0
"""Of parameters as FSDP gathers them, bf16. [B]"""


def seconds_spared_at_model_ends(rows: GatheredRows) -> tuple[ArrayN, ArrayN]:
    """What a micro-batch's forward and backward take less than layers that are all among others. (n,) each [s]

    Of a single stage whose layers are gathered for each use; nothing elsewhere.
    """
    nothing = np.zeros(len(rows.table))
    if gradient_reducer(rows) != "FSDP by block":
        return nothing, nothing
    kinds = kind_of_each_layer(rows.workload.model)
    first, last = (rows.stage_layers.stages.kinds.index(kinds[n]) for n in (0, -1))
    embedding, head = _params_of_ends(rows)
    gathers_s, reductions_s = _seconds(rows, "all_gather"), _seconds(rows, "reduce_scatter")
    of_first, of_last = _layer_params(rows, 0), _layer_params(rows, -1)
    less_gathered_s = np.maximum(gathers_s(of_first) - gathers_s(head), 0.0)
    less_gathered_again_s = np.maximum(gathers_s(of_last) - gathers_s(embedding), 0.0)
    less_reduced_s = np.maximum(reductions_s(of_first) - reductions_s(head), 0.0)
    curves = rows.cluster.gpu.curves
    of_layers = collective_slowdown(curves, rows.costs.machine.groups["fsdp"])
    slow = collective_slowdown(curves, rows.groups["fsdp"])[rows.grid_index]
    waited_s = (
        rows.layers.stack_of_blocks(lambda cost: cost.forward.waits_s(of_layers)),
        rows.layers.stack_of_blocks(lambda cost: cost.backward.waits_s(of_layers)),
    )
    lay, modes = rows.stage_layers, [rows.in_base_and_full_mode(seconds) for seconds in waited_s]
    first_is_full, last_is_full = lay.fully_recomputed[:, first, 0] > 0, lay.base_mode[:, last, 0] == 0

    def waited(direction: int, kind: int, is_full: NDArray[np.bool_]) -> ArrayN:
        """What a layer waits, which is recomputed whole or not. (n,) [s]"""
        base, full = modes[direction]
        return np.where(is_full, full[:, kind], base[:, kind])

    def spared_s(waited_s: ArrayN, less_s: ArrayN) -> ArrayN:
        """Of so much less communication: all that is waited for, else what computing loses beside it."""
        return np.minimum(np.maximum(waited_s, slow * less_s), less_s)

    forward = spared_s(waited(0, last, last_is_full), less_gathered_s)
    if len(kinds) == 1:
        return forward, spared_s(waited(1, last, last_is_full), less_gathered_again_s + less_reduced_s)
    gathered_again_s = spared_s(waited(1, last, last_is_full), less_gathered_again_s)
    return forward, gathered_again_s + spared_s(waited(1, first, first_is_full), less_reduced_s)


def most_spared_at_model_ends_s(layers: LayerArrays) -> ArrayN:
    """What both are at most together, whichever layers are first and last. (K,) [s]"""
    forward_s = layers.stack_of_blocks(lambda cost: cost.forward.waits_s(0.0))
    backward_s = layers.stack_of_blocks(lambda cost: cost.backward.waits_s(0.0))
    return np.asarray(forward_s.max(axis=(0, 2)) + 2.0 * backward_s.max(axis=(0, 2)))


def _seconds(rows: GatheredRows, kind: CollectiveKind) -> Callable[[ArrayN], ArrayN]:
    group, fabric = rows.groups["fsdp"], rows.costs.machine.network_fabric
    width = GATHERED_BYTES_PER_PARAM if kind == "all_gather" else rows.framework.reduced_bytes_per_param

    def seconds(params: ArrayN) -> ArrayN:
        return np.asarray(collective_s(kind, width * params, group, fabric))[rows.grid_index]

    return seconds


def _layer_params(rows: GatheredRows, number: int) -> ArrayN:
    """Of a layer, what is in the group of its dense parameters. (g,) [params]"""
    model, grids = rows.workload.model, rows.grids
    layer = layer_params(model, model.is_moe_layer(number % model.num_layers))
    dense = (layer.matrices_tp + layer.shared) / grids.tp + layer.replicated
    has_own_group = rows.groups["fsdp"].size != rows.groups["efsdp"].size
    return np.asarray(dense + np.where(has_own_group, 0.0, layer.routed / (grids.ep * grids.etp)))


def _params_of_ends(rows: GatheredRows) -> tuple[ArrayN, ArrayN]:
    """What is gathered again for the embedding's backward, and with the head. (g,) each [params]"""
    model, framework, tp = rows.workload.model, rows.framework, rows.grids.tp
    embedding = np.asarray(model.vocab * model.hidden / tp)
    head = 0.0 * embedding if model.tied_embeddings else embedding
    if framework.flat_params or not framework.ends_apart:  # both are the root's, which stays gathered
        return 0.0 * embedding, 0.0 * embedding
    return embedding, head
