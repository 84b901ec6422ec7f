"""Reduced gradients of FSDP's replicated shard groups (HSDP) that wait for their sum over the replicas."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.cost.rows import GatheredRows

ArrayN = NDArray[np.float64]


def waiting_replica_sums_bytes(rows: GatheredRows) -> ArrayN | float:
    """What the groups' reduced gradients take at a backward's end beside those of earlier micro-batches. (n, R) [B]

    FSDP2 holds what it sums over replicas until the end of the backward (torch/distributed/fsdp/_fully_shard/
    _fsdp_param_group.py, ``AllReduceState``). A step's first micro-batch has none beside: its sums become the
    gradients. Pipelines reduce once, at the end of a step.
    """
    fw, mode, each = rows.framework, rows.mode, float(rows.costs.context.stored_bytes_per_param)
    if not fw.shards_params or fw.dp_replicate == 1 or mode.precision != "mixed" or mode.pipelined:
        return 0.0
    several = (rows.num_micro_batches > 1).astype(float)[:, None]
    return np.asarray(several * rows.shards.sharded_bytes(each)[rows.grid_index])
