"""Buffers of context-parallel rings that were freed and that the device still uses when a later loss comes.

Closed form of what :mod:`mofa.replay.memory.stage_outputs` plays: NCCL's stream uses the buffers of a ring's exchanges,
of which the allocator is told, so that they come back only as the device gets there
(:mod:`mofa.cost.allocations.host_lead`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.elementwise import anywhere
from mofa.cost.block.host_clock import NEVER
from mofa.cost.kernels.launch_queue import QUEUE
from mofa.cost.rows import Rows

ArrayN = NDArray[np.float64]


def late_bytes(rows: Rows) -> ArrayN:
    """What layers have let go of rings and the allocator has not back, as a step's last loss comes. (n, R) [B]

    The device is behind by as many launches as the queue takes, or by what it is slower than its host since the step
    began; what was let go since then waits. Takes a pass's buffers to be spread evenly over its launches, and all
    chunks of a stage to run before the loss.
    """
    lay = rows.layout
    if not anywhere(rows.costs.context.cp_ring & (rows.costs.context.cp > 1)):
        return np.zeros((len(rows.k), len(lay.shown.stage)))

    def summed(grid: ArrayN) -> ArrayN:
        return rows.over_layers(grid, lay.plain, lay.full, "nkr,nk->nr")

    sent_and_launched, layers = rows.layers.sent_and_launched, rows.layers
    sent_f, sent_b, launched_f, launched_b = (summed(sent_and_launched[..., i]) for i in range(4))
    both = layers.forward_clocks, layers.backward_clocks
    device, host = (sum(summed(grid[..., i]) for grid in both) for i in (0, 3))
    waits = sum(summed(np.asarray(grid[..., 2] > NEVER / 2, dtype=float)) for grid in both)
    degrees, of_row = np.unique(rows.table.cp, return_inverse=True)
    host_spread = np.array([rows.cluster.hosts_apart(cp) for cp in degrees.tolist()])[of_row][:, None]
    ratio = np.where(waits > 0, 0.0, np.maximum(device / np.maximum(host, 1e-9), host_spread))
    turn = np.maximum(launched_f + launched_b, 1.0)
    launched = (rows.num_micro_batches[:, None] - 1.0) * turn + launched_f
    ahead = np.minimum(QUEUE, launched * (1.0 - 1.0 / np.maximum(ratio, 1.0)))
    full_passes, rest = np.divmod(ahead, turn)
    of_forward = np.minimum(rest / np.maximum(launched_f, 1.0), 1.0)
    of_backward = np.maximum(rest - launched_f, 0.0) / np.maximum(launched_b, 1.0)
    return np.asarray(full_passes * (sent_f + sent_b) + of_forward * sent_f + of_backward * sent_b)
