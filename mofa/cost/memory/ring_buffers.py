"""Buffers of context-parallel rings that were freed and that the device still uses when a later loss comes.

Closed form of what :mod:`mofa.replay.memory.stage_outputs` plays: NCCL's stream uses the buffers of a ring's exchanges,
of which the allocator is told, so that they come back only as the device gets there
(:mod:`mofa.cost.allocations.host_lead`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.elementwise import any_true
from mofa.cost.block.host_clock import NEVER
from mofa.cost.kernels.launch_queue import QUEUE
from mofa.cost.rows import GatheredRows

ArrayN = NDArray[np.float64]


def late_freed_ring_bytes(rows: GatheredRows) -> ArrayN:
    """What layers have let go of rings, or to the host, and the allocator has not back as a step's last loss comes.
    (n, R) [B]

    A pass takes the device as long as the slowest host of its peers at least
    (:func:`mofa.cost.allocations.host_lead.pass_times_of_fastest_peer`). By what the device is slower than its host,
    forward ``f`` and backward ``b``, the host gains a lead of ``max(n (f + b) + f, n (f + b), f, 0)`` over ``n``
    micro-batches and a forward, as it never falls behind the device. What was let go in the device's last so many
    seconds waits, and no more than in the launches that the queue takes. Takes a pass's buffers to be spread evenly
    over it, and all chunks of a stage to run before the loss.
    """
    lay = rows.stage_layers
    rings = rows.costs.context.cp_ring & (rows.costs.context.cp > 1)
    if not any_true(rings) and not rows.framework.offloaded_activations.offloads_any:
        return np.zeros((len(rows.k), len(lay.shown.shown_stages)))

    def summed(by_mode: ArrayN) -> ArrayN:
        return rows.sum_over_layers(by_mode, lay.base_mode, lay.fully_recomputed, "nkr,nk->nr")

    sent_and_launched, layers = rows.layers.nccl_freed_bytes_and_launches, rows.layers
    sent_f, sent_b, launched_f, launched_b = (summed(sent_and_launched[..., i]) for i in range(4))
    both = layers.forward_clocks, layers.backward_clocks
    waits = sum(summed(np.asarray(grid[..., 2] > NEVER / 2, dtype=float)) for grid in both)
    peers, of_row = np.unique(rows.table.tp * rows.table.cp, return_inverse=True)
    slowest_by_fastest = np.array([rows.cluster.slowest_over_fastest_host(num) for num in peers.tolist()])[of_row][
        :, None
    ]
    (device_f, host_f), (device_b, host_b) = ((summed(grid[..., 0]), summed(grid[..., 3])) for grid in both)
    device_f, device_b = (
        np.maximum(device_f, host_f * slowest_by_fastest),
        np.maximum(device_b, host_b * slowest_by_fastest),
    )
    head_device, head_host = (
        sum(
            np.asarray(phase.clocks[i])[rows.k][:, None]
            for phase in (rows.costs.head.forward, rows.costs.head.backward)
        )
        * rows.is_head_stage
        for i in (0, 3)
    )
    forward_s, backward_s = device_f - host_f, device_b - host_b + head_device - head_host
    before_s = (rows.num_micro_batches[:, None] - 1.0) * (forward_s + backward_s)
    lead_s = np.maximum(np.maximum(before_s + forward_s, before_s), np.maximum(forward_s, 0.0))

    def recent(amount: ArrayN | float, forward: ArrayN, backward: ArrayN) -> ArrayN:
        """What was let go in the last ``amount`` of passes that take so much each, the last one a forward."""
        full_cycles, rest = np.divmod(amount, np.maximum(forward + backward, 1e-9))
        of_forward = np.minimum(rest / np.maximum(forward, 1e-9), 1.0)
        of_backward = np.maximum(rest - forward, 0.0) / np.maximum(backward, 1e-9)
        return np.asarray(full_cycles * (sent_f + sent_b) + of_forward * sent_f + of_backward * sent_b)

    waiting = np.minimum(recent(lead_s, device_f, device_b + head_device), recent(QUEUE, launched_f, launched_b))
    return np.where(waits > 0, 0.0, waiting)
