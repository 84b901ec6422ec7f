"""What a stage takes once and keeps outside of all tapes: workspaces, dummy gradients, tables of rotations."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.cost.rank_rules import framework_buffer_bytes, rotary_tables_of_stages
from mofa.cost.rows import GatheredRows

ArrayN = NDArray[np.float64]

PYTORCH_WORKSPACE = 32 * 2**20
"""cuBLAS's for each thread that launches products, the main one and autograd's: PyTorch's default on Hopper, per handle
and stream (CUDABlas, ``:4096:8``); 8.1 MiB on older GPUs. [B]"""


def persistent_buffer_bytes(rows: GatheredRows) -> ArrayN:
    """What the framework allocates once and keeps, with the head's share on its stage. (n, R) [B]

    Where layers are a library's only the head's products are PyTorch's, which work in memory of PyTorch's.
    """
    tables = rotary_tables_of_stages(rows)
    of_tables = tables.number * (tables.nbytes[:, None] + sum(tables.from_start))
    with_products = rows.is_head_stage if rows.framework.library else 1.0
    return np.asarray(framework_buffer_bytes(rows) + of_tables + 2.0 * PYTORCH_WORKSPACE * with_products)
