"""Activations on hosts: what a node pins for its ranks until their backward, and what a last layer keeps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.cost.host_optimizer import optimizer_host_bytes_of_node
from mofa.cost.rows import GatheredRows
from mofa.errors import SpecError
from mofa.units import format_bytes

ArrayN = NDArray[np.float64]


def pinned_bytes_of_node(rows: GatheredRows) -> ArrayN:
    """What a node pins for activations of all micro-batches in flight, if all its ranks are of the fullest stage. (n,)
    [B]

    The last layer counts too, though it keeps its own on the device: never too few.

    PyTorch rounds pinned blocks up to powers of two (ATen/core/CachingHostAllocator.h, ``allocate``). They stay for the
    next micro-batch: Megatron-Core has a pool of them by shape, PyTorch one for experts' tensors.
    """
    lay = rows.stage_layers
    in_flight = lay.base_mode_in_flight, lay.fully_recomputed_in_flight
    of_rank = rows.sum_over_layers(rows.layers.pinned_bytes, *in_flight, "nkr,nk->nr").max(axis=1)
    return np.asarray(of_rank * min(rows.cluster.num_gpus, rows.cluster.node.gpus_per_node))


def offloaded_optimizer_bytes_of_node(rows: GatheredRows) -> float:
    """What an offloaded optimizer takes of a node's memory, which activations cannot be pinned in. [B]"""
    return optimizer_host_bytes_of_node(rows.workload, rows.cluster, rows.framework)


def pinned_excess_bytes(rows: GatheredRows) -> ArrayN:
    """What activations exceed the rest of a node's memory by, 0 where they fit. (n,) [B]"""
    if not rows.framework.offloaded_activations.offloads_any:
        return np.zeros(len(rows.k))
    room_bytes = rows.cluster.node.host_memory_bytes.value - offloaded_optimizer_bytes_of_node(rows)
    return np.maximum(pinned_bytes_of_node(rows) - room_bytes, 0.0)


def refuse_pinned_beyond_host_memory(rows: GatheredRows) -> None:
    """Refuse a strategy whose activations exceed what the optimizer leaves of the hosts' memory.

    Raises
    ------
    SpecError
        With the bytes of both and what to change.
    """
    if not pinned_excess_bytes(rows).any():
        return
    has_bytes, optimizer_bytes = rows.cluster.node.host_memory_bytes.value, offloaded_optimizer_bytes_of_node(rows)
    beside = f", of which the optimizer takes {format_bytes(optimizer_bytes)}" if optimizer_bytes else ""
    raise SpecError(
        f"activation_offload ({rows.framework.activation_offload}): a node would pin "
        f"{format_bytes(float(pinned_bytes_of_node(rows)[0]))} for activations and has {format_bytes(has_bytes)}"
        f"{beside}; offload fewer modules, or lower micro_batch"
    )


def kept_layer_bytes(rows: GatheredRows) -> ArrayN:
    """What the last layer keeps on the device of what others offload, on the last stage. (n, R) [B]"""
    if not rows.framework.offloaded_activations.offloads_any:
        return np.zeros((len(rows.k), len(rows.stage_layers.shown.shown_stages)))
    of_layer = rows.costs.kept_layer_extra_bytes[rows.base_mode_index, rows.k, rows.last_layer_kind]
    return np.asarray(of_layer[:, None] * rows.is_last_stage)
