"""What DDP leaves exposed: gradients summed in buckets behind every backward (PyTorch 2.11, ``reducer.cpp``)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.cost.kernels.collectives import collective_s
from mofa.cost.kernels.compute import memory_bound_bytes_per_s
from mofa.cost.rank_rules import DDP_BUCKET_BYTES, ddp_gradient_bytes_per_param
from mofa.cost.rows import GatheredRows
from mofa.cost.step_time.communication_outside import CommunicationOutsideBlocks
from mofa.cost.step_time.gradient_buckets import first_chunk_buckets
from mofa.cost.step_time.micro_batch import HostBoundPasses
from mofa.cost.step_time.slowdown_of_stages import slowdown_of_passes, slowdown_of_stages

ArrayN = NDArray[np.float64]


def ddp_communication(
    rows: GatheredRows, backward_s: ArrayN, num_micro_batches: ArrayN, none: CommunicationOutsideBlocks,
    host_bound: HostBoundPasses | None,
) -> CommunicationOutsideBlocks:  # fmt: skip
    """DDP, which replicas without a shard group are as well: buckets of 100 MiB behind every backward.

    The last to be reduced holds the embedding, whose gradient comes last and fills a bucket by itself. Every gradient
    is copied into its bucket and back, 16 bytes an fp32 parameter (reducer.cpp, without ``gradient_as_bucket_view``).

    A backward under a late host hides more: what is left behind it is counted for a host that is ahead, and for one
    that the device waits for all along. Computing slower beside reductions then makes nothing later.
    """
    s, width = rows.shards, ddp_gradient_bytes_per_param(rows)
    params = s.dense + s.expert
    buckets = first_chunk_buckets(rows, np.full(len(params), DDP_BUCKET_BYTES / width), experts_separate=False)
    sizes = buckets.sizes[0]
    last_params = np.minimum(buckets.last_params, params[:, 0])
    payloads = np.concatenate([sizes.shares * params[:, 0], last_params[None]]) * width
    *each_s, last_s = collective_s("all_reduce", payloads, rows.groups["dp"], rows.costs.machine.network_fabric)
    once, last_s = (sizes.numbers * each_s).sum(axis=0)[rows.grid_index], last_s[rows.grid_index]
    params = params[rows.grid_index]
    # the first bucket is full with the head's gradient; where reducing takes longer than computing, computing slower
    # beside it makes nothing later
    room, slow = (
        np.maximum(backward_s[:, 0] - rows.costs.head.backward.total_s[rows.k], 0.0),
        slowdown_of_stages(rows, "dp")[:, 0],
    )
    if host_bound is not None:
        index, head, backward = host_bound.rows, rows.costs.head.backward.clocks, host_bound.with_full_queue[1]
        on_device_s, late_s = backward.device_s[:, 0, 0], backward.device_behind_host_s[:, 0, 0]
        room[index] = np.maximum(on_device_s - head[0, rows.k[index]], 0.0)
        passes_s = (host_bound.forward.device_s + host_bound.backward.device_s)[:, :, 0]
        slow[index] = slowdown_of_passes(rows, host_bound, passes_s, "dp")[:, 0]
    beside = np.minimum(once - last_s, room / (1.0 - slow))
    left_s = np.maximum(last_s + slow * beside, once - room)
    copies = np.where(
        rows.table.dp > 1, params[:, 0] * 4.0 * width / memory_bound_bytes_per_s(rows.cluster.gpu, "copy"), 0.0
    )
    each = left_s + copies
    late_each = None
    if host_bound is not None:
        late_room = np.maximum(late_s - head[1, rows.k[index]], 0.0)
        late_each = np.maximum(last_s[index], once[index] - late_room) + copies[index]
    return CommunicationOutsideBlocks(
        num_micro_batches * each,
        num_micro_batches * np.minimum(once, room),
        none.before_forward,
        after_each_backward_s=each,
        after_late_backward_s=late_each,
    )
