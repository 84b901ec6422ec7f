"""What a stage takes once and keeps outside of all tapes: workspaces, dummy gradients, tables of rotations."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.elementwise import per_combination
from mofa.blocks.frameworks.megatron.persistent import rotations
from mofa.cost.rows import Rows

ArrayN = NDArray[np.float64]

PYTORCH_WORKSPACE = 32 * 2**20
"""cuBLAS's for each thread that launches products, the main one and autograd's: PyTorch's default on Hopper, per handle
and stream (CUDABlas, ``:4096:8``); 8.1 MiB on older GPUs. [B]"""


def lasting_bytes(rows: Rows) -> ArrayN:
    """What the framework allocates once and keeps, with the head's share on its stage. (n, R) [B]

    Where layers are a library's only the head's products are PyTorch's, which work in memory of PyTorch's.
    """
    costs = rows.costs
    body = costs.persistent[rows.k][:, None] + _rotations(rows)
    with_products = rows.is_head if rows.framework.library else 1.0
    of_head = (costs.persistent_head - costs.persistent)[rows.k][:, None] * rows.is_head
    return np.asarray(body + of_head + 2.0 * PYTORCH_WORKSPACE * with_products)


def _rotations(rows: Rows) -> ArrayN | float:
    """The tables of rotations that Megatron keeps; of latent attention each layer's. (n, R)"""
    if not rows.framework.library:
        return 0.0
    tables = rotations(rows.costs.context)
    table = per_combination(tables.table, len(rows.costs.persistent))[rows.k][:, None]
    if not tables.of_layers:
        return np.asarray(table * rows.layout.stages.vpp)
    return np.asarray((table + sum(tables.built)) * rows.layout.counts.sum(axis=1))
