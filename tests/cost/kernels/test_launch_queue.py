"""What an op takes of the launch queue."""

from __future__ import annotations

import numpy as np

from mofa.blocks.op import Op
from mofa.blocks.work import Gemm, MemoryBound
from mofa.cost.kernels.launch_queue import num_queued_kernels


def test_a_memset_is_ahead_of_a_large_product() -> None:
    """Of Llama 3 8B on 8,192 rows: keys' and values' products have 256 tiles, the queries' 1,024."""
    product = Op("product", "gemm", Gemm(8192.0, np.array([1024.0, 4096.0, 14336.0]), 4096.0))
    assert list(np.asarray(num_queued_kernels(product))) == [1.0, 2.0, 2.0]


def test_other_ops_are_their_launches() -> None:
    fp8 = Op("product", "gemm", Gemm(8192.0, 14336.0, 4096.0, "fp8"))
    assert float(np.asarray(num_queued_kernels(fp8))) == 1.0
    assert float(np.asarray(num_queued_kernels(Op("norm", "memory_bound", MemoryBound(1e6), launches=3)))) == 3.0
