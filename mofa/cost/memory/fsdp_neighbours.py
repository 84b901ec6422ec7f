"""What FSDP holds of a block's neighbours in its backward, where these differ from the block itself.

The weights of the block before it are gathered ahead, and the gradients of the block behind it are being reduced. A
block's tape has both of a block like itself. At the ends of the model one of the two is the embedding's or the head's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.float8 import fp8_gathered_share
from mofa.cost.memory.fsdp_root import gathers_model_ends_separately
from mofa.cost.rows import GatheredRows
from mofa.specs.params import embedding_params, layer_params

ArrayN = NDArray[np.float64]


def first_block_gathered_bytes_beyond_middle_block(rows: GatheredRows, kind: int) -> ArrayN | float:
    """What the backward of the model's first block holds more than one in the middle: the embedding's gathered weights
    in place of a block's, less than nothing where the embedding is the smaller.

    Nothing where that block is of another kind. (n, 1) [B]
    """
    if not gathers_model_ends_separately(rows) or rows.stage_layers.stages.layers[0][0][0] != kind:
        return 0.0
    if not rows.framework.reshard_after_forward:
        return 0.0
    ctx = rows.costs.context
    each = 2.0 - fp8_gathered_share(ctx.model, ctx.framework, ctx.float8)
    more = 2.0 * embedding_params(rows.workload.model) / rows.grids.tp - each * _own_params(rows, kind)
    gathered = np.where(rows.shards.dense_ranks[:, 0] > 1, more, 0.0)
    return np.asarray(gathered[rows.grid_index, None])


def last_block_gradient_bytes_beyond_middle_block(rows: GatheredRows, kind: int) -> ArrayN | float:
    """What the backward of the model's last block holds more than one in the middle: the head's gradients on their way
    in place of a block's. Nothing where that block is of another kind, or where its experts are reduced by themselves,
    midway. (n, 1) [B]"""
    if not gathers_model_ends_separately(rows) or rows.stage_layers.stages.layers[-1][-1][-1] != kind:
        return 0.0
    model, width = rows.workload.model, rows.framework.reduced_bytes_per_param
    more = width * (model.vocab * model.hidden / rows.grids.tp + model.hidden - _own_params(rows, kind))
    together = rows.grids.ep == 1 if rows.stage_layers.stages.kinds[kind].moe else np.ones(len(rows.grids), dtype=bool)
    return np.asarray(np.where(together, more, 0.0)[rows.grid_index, None])


def _own_params(rows: GatheredRows, kind: int) -> ArrayN:
    """Parameters of a block's own group, without experts that have one of their own. (g,)"""
    p, t = layer_params(rows.workload.model, rows.stage_layers.stages.kinds[kind].moe), rows.grids
    own = (p.matrices_tp + p.shared) / t.tp + p.replicated
    return np.asarray(own + np.where(t.ep > 1, 0.0, p.routed / (t.ep * t.etp)))
