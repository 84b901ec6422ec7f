"""What PyTorch's watchdog still holds when a pass is through: closed form of :mod:`mofa.cost.allocations.watchdog`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.elementwise import any_true
from mofa.cost.allocations.watchdog import WATCHDOG_S
from mofa.cost.kernels.launch_queue import QUEUE
from mofa.cost.rows import GatheredRows

ArrayN = NDArray[np.float64]


def watchdog_held_bytes(rows: GatheredRows) -> tuple[ArrayN | float, ArrayN | float]:
    """What layers have given up and the watchdog has not let go, behind a forward and behind a backward. (n, R) [B]

    What was given up in its tenth of a second before, and in the lead that the host has, spread evenly over the passes:
    of a forward in front of a loss, then of the backward before it, and so on, or the other way round.
    """
    lay, layers = rows.stage_layers, rows.layers
    if not any_true(layers.watchdog_held_bytes > 0):
        return 0.0, 0.0

    def summed(by_mode: ArrayN) -> ArrayN:
        return rows.sum_over_layers(by_mode, lay.base_mode, lay.fully_recomputed, "nkr,nk->nr")

    forward, backward = (summed(layers.watchdog_held_bytes[..., i]) for i in range(2))
    (device_f, host_f), (device_b, host_b) = (
        (summed(grid[..., 0]), summed(grid[..., 3])) for grid in (layers.forward_clocks, layers.backward_clocks)
    )
    launched = summed(layers.nccl_freed_bytes_and_launches[..., 2]) + summed(
        layers.nccl_freed_bytes_and_launches[..., 3]
    )
    took_f, took_b = np.maximum(device_f, host_f), np.maximum(device_b, host_b)
    turn = np.maximum(took_f + took_b, 1e-9)
    ratio = np.maximum((device_f + device_b) / np.maximum(host_f + host_b, 1e-9), 1.0)
    passes = rows.num_micro_batches[:, None] - 1.0 + took_f / turn  # behind the last forward
    lead_s = np.minimum(QUEUE / np.maximum(launched, 1.0), passes * (1.0 - 1.0 / ratio)) * turn
    since = WATCHDOG_S + lead_s

    def within(first: ArrayN, first_s: ArrayN, second: ArrayN, second_s: ArrayN) -> ArrayN:
        full_cycles, rest = np.divmod(since, turn)
        some = first * np.minimum(rest / np.maximum(first_s, 1e-9), 1.0)
        more = second * np.maximum(rest - first_s, 0.0) / np.maximum(second_s, 1e-9)
        return np.asarray(full_cycles * (first + second) + some + more)

    return within(forward, took_f, backward, took_b), within(backward, took_b, forward, took_f)
