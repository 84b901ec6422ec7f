"""FSDP under pipelines: weights stay gathered and gradients whole, for a step or as long as a chunk needs them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.cost.optimizer import optimizer_dtype_bytes
from mofa.cost.rows import Rows

ArrayN = NDArray[np.float64]
CHUNKS_AHEAD = 3
"""Chunks that PyTorch's schedules of several a rank gather ahead (schedules.py, ``_add_unshard_reshard``).

A fourth one's weights are taken to be gathered in front of its first forward, and none to go before its last backward.
[-]"""


def gathered_bytes_and_unreduced_share(rows: Rows, grads: ArrayN) -> tuple[ArrayN, ArrayN]:
    """Bytes of all gathered weights, and what is left of the gradients when they are reduced, as a share of ``grads``,
    the whole ones. (n, R) each [B, -]"""
    shards, grid = rows.shards, rows.grid_index
    each = rows.framework.grads_bytes_per_param * optimizer_dtype_bytes(rows.workload, rows.mode.precision) / 4.0
    return shards.unsharded(2.0)[grid], shards.sharded(each)[grid] / np.maximum(grads, 1.0)
