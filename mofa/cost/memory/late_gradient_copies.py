"""Copies of parameters' gradients behind CUDA graphs, which are let go before the device has used them.

Behind each backward graph every gradient is copied, and the parameter's hook uses the copy on the stream on which
modules were wrapped: Megatron-LM makes that a side stream, for captures' sake (training/training.py, ``get_model``). So
the allocator has the memory back only once the device is there (CUDACachingAllocator.cpp, ``recordStream``), and a host
that is far ahead takes new memory for each layer and micro-batch, as long as there is any.

Within the graph of a full iteration, memory that
another stream uses comes back at the end of the capture alone: so it is with the gradient of the embedding, which
autograd makes in two bytes and the hook adds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.build import distinct_layer_kinds
from mofa.blocks.elementwise import broadcast_to_combinations
from mofa.blocks.tapes import layer_label
from mofa.cost.rows import GatheredRows
from mofa.specs.params import embedding_params
from mofa.specs.residuals import load_closed_form_residuals, load_residuals

ArrayN = NDArray[np.float64]
COPIES = "graph.copy_parameters_gradients"
"""The op of a layer's backward whose temporaries they are."""


def late_gradient_copies_bytes(rows: GatheredRows) -> ArrayN:
    """Gradient copies that wait in memory of their own at the end of a step's backwards. (n, R) [B]

    Over ``m`` micro-batches a host that takes ``h`` for one and a device that takes ``d`` leave ``m (1 - h / d)`` of
    them waiting, each with two bytes for every parameter that graphs hold.
    """
    graphs, lay = rows.framework.graphs, rows.stage_layers
    shape = len(rows.k), len(lay.shown.shown_stages)
    if not graphs.captures_any:
        return np.zeros(shape)
    if graphs.full_iteration:
        embedding = 2.0 * embedding_params(rows.workload.model) / rows.table.tp
        return np.asarray((rows.num_micro_batches * embedding)[:, None] * rows.is_embedding_stage)
    counts = lay.stages.layer_counts[:, lay.shown.shown_stages].sum(axis=2).astype(float)  # (kinds, R)
    copied = np.zeros(shape)
    for kind, number in zip(distinct_layer_kinds(rows.workload.model), counts, strict=True):
        mode = next(iter(rows.costs.blocks))
        ops = rows.costs.tapes[layer_label(kind, mode)].backward.ops
        each = sum((op.scratch for op in ops if op.name == COPIES), 0.0)
        num_k = rows.costs.embedding.forward.total_s.shape[-1]
        copied += broadcast_to_combinations(each, num_k)[rows.k][:, None] * number
    device_s, host_s = (_micro_batch_s(rows, i) for i in (0, 3))
    waiting = np.maximum(1.0 - host_s / np.maximum(device_s, 1e-12), 0.0) * rows.num_micro_batches[:, None]
    return np.asarray(copied * waiting)


def bytes_free_beside_waiting_copies(rows: GatheredRows) -> float:
    """Memory that waiting gradient copies must leave free. [B]

    A plan's margin; minus infinity where a graph holds a whole iteration, which must have room anyhow.
    """
    if rows.framework.graphs.full_iteration:
        return -np.inf
    return float(load_residuals().memory_margin(rows.framework.graphs).value * rows.cluster.gpu.capacity_bytes.value)


def room_for_waiting_copies_bytes(rows: GatheredRows, reserved: ArrayN, outside: ArrayN) -> ArrayN:
    """What is left for copies that wait: where there is none, the allocator waits for the device and takes theirs
    (``synchronize_and_free_events``). Closed forms leave as much more as they are off. (n, R) [B]"""
    off = load_closed_form_residuals().reserved_memory_residual(rows.framework.name, rows.stage_layers.stages.pp).value
    free = (
        rows.cluster.gpu.capacity_bytes.value
        - bytes_free_beside_waiting_copies(rows)
        - outside
        - (1.0 + off) * reserved
    )
    return np.maximum(free, 0.0)


def _micro_batch_s(rows: GatheredRows, clock: int) -> ArrayN:
    """One clock of a micro-batch's passes through each stage: 0 the device's, 3 the host's. (n, R) [s]"""
    lay = rows.stage_layers
    layers = sum(
        rows.sum_over_layers(by_mode[..., clock], lay.base_mode, lay.fully_recomputed, "nkr,nk->nr")
        for by_mode in (rows.layers.forward_clocks, rows.layers.backward_clocks)
    )
    ends = sum(
        np.asarray(phase.clocks[clock])[rows.k][:, None] * there
        for end, there in ((rows.costs.embedding, rows.is_embedding_stage), (rows.costs.head, rows.is_head_stage))
        for phase in (end.forward, end.backward)
    )
    return np.asarray(layers + ends)
