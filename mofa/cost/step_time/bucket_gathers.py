"""A first forward of Megatron's that gathers its parameters bucket by bucket as the host gets to each layer.

Behind each bucket that a layer waits for the next one is launched (Megatron-Core 0.16.1, distributed/
param_and_grad_buffer.py, ``finish_param_sync``): of a layer's buckets the first is launched a layer ahead, the others
one by one as the host gets there. So a late host launches them late.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mofa.cost.block.host_clock import NEVER, ClockAdvance
from mofa.cost.rows import GatheredRows

ArrayN = NDArray[np.float64]
IntA = NDArray[np.intp]


class FirstStageBucketGathers(NamedTuple):
    """Gathers of the first stage's buckets, of each grid of ranks. [s]"""

    embedding_s: ArrayN
    """Of the bucket with the embedding, ahead of all. (g,)"""
    first_s: ArrayN
    """Of a layer's first bucket, by its kind. (kinds, g)"""
    others_s: ArrayN
    """Of a layer's other buckets, by its kind. (kinds, g)"""
    head_s: ArrayN
    """Of the head's buckets. (g,)"""


def first_forward_clock_advance_behind_gathers(
    rows: GatheredRows, index: IntA, gathers: FirstStageBucketGathers, like: ClockAdvance, slow: ArrayN
) -> ClockAdvance:
    """How host and device of a single stage advance in the step's first forward.

    Parameters
    ----------
    index
        Rows. (late rows,)
    like
        Forwards of these rows without gathers, which are no longer. (late rows, 1, 1)
    slow
        What computing loses beside gathers. (late rows,) [-]

    Returns
    -------
    ClockAdvance
        (late rows, 1, 1) each
    """
    lay, grid = rows.stage_layers, rows.grid_index[index]
    counts, num_full = lay.stages.layer_counts[:, 0, 0], lay.fully_recomputed_by_chunk[lay.recompute_choice[index]]
    plain, full = (
        rows.layers.forward_clocks[mode[index], rows.k[index]] for mode in (rows.base_mode_index, rows.full_mode_index)
    )  # (late rows, kinds, 5)
    embedding, head = (cost.forward.clocks[:, rows.k[index]].T for cost in (rows.costs.embedding, rows.costs.head))
    walk = _Walk.beginning(slow)
    walk.add(gathers.embedding_s[grid], np.zeros(len(index)), embedding)
    for kind, count in enumerate(counts.tolist()):
        first_s, others_s = gathers.first_s[kind, grid], gathers.others_s[kind, grid]
        for number in range(int(count)):
            is_full = (number < num_full[:, kind, 0, 0])[:, None]
            walk.add(first_s, others_s, np.where(is_full, full[:, kind], plain[:, kind]))
    if lay.stages.pp == 1:
        walk.add(gathers.head_s[grid], np.zeros(len(index)), head)
    passed = [times[:, None, None] for times in (*walk.device_s, *walk.host_s)]
    return ClockAdvance(*(np.maximum(*both) for both in zip(passed, like[:4], strict=True)))


class _Walk:
    """Where the device, the host and the gathers are, of a device and of a host that begin at 0 with the other far
    ahead. No gather begins before the device has stepped what is gathered. (2, late rows) each [s]"""

    def __init__(self, device_s: ArrayN, host_s: ArrayN, slow: ArrayN) -> None:
        self.device_s, self.host_s, self.slow = device_s, host_s, slow
        self.launched_s, self.gathered_s = host_s, device_s

    @classmethod
    def beginning(cls, slow: ArrayN) -> _Walk:
        nothing, never = np.zeros_like(slow), np.full_like(slow, NEVER)
        return cls(np.stack([nothing, never]), np.stack([never, nothing]), slow)

    def add(self, first_s: ArrayN, others_s: ArrayN, clocks: ArrayN) -> None:
        """Go on behind one more piece, whose ``clocks`` are (late rows, 5)."""
        device_s, behind_host_s, woken_s, host_s = clocks.T[:4]
        gathered = np.maximum(self.gathered_s, self.launched_s) + first_s
        gathered = np.where(others_s > 0.0, np.maximum(gathered, self.host_s) + others_s, gathered)
        begun, launched = np.maximum(self.device_s, gathered), self.host_s
        beside_s = np.minimum(first_s + others_s, device_s / (1.0 - self.slow))
        device_s = device_s + self.slow * beside_s
        self.device_s = np.maximum(begun + device_s, launched + behind_host_s)
        self.host_s = np.maximum(begun + woken_s, launched + host_s)
        self.gathered_s, self.launched_s = gathered, launched
