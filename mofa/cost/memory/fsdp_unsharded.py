"""FSDP under pipelines: weights stay gathered and gradients whole, for a step or as long as a chunk needs them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.cost.optimizer import torchtitan_optimizer_element_bytes
from mofa.cost.rows import GatheredRows
from mofa.specs.params import embedding_params, layer_params

ArrayN = NDArray[np.float64]
CHUNKS_AHEAD = 3
"""Chunks that PyTorch's schedules of several a rank gather ahead (schedules.py, ``_add_unshard_reshard``).

A fourth one's weights are taken to be gathered in front of its first forward, and none to go before its last backward.
[-]"""


def gathered_bytes_and_unreduced_share(rows: GatheredRows, grads: ArrayN) -> tuple[ArrayN, ArrayN]:
    """Bytes of all gathered weights, and what is left of the gradients when they are reduced, as a share of ``grads``,
    the whole ones. (n, R) each [B, -]"""
    shards, grid = rows.shards, rows.grid_index
    each = (
        rows.framework.grads_bytes_per_param
        * torchtitan_optimizer_element_bytes(rows.workload, rows.mode.precision)
        / 4.0
    )
    return shards.unsharded_bytes(2.0)[grid], shards.sharded_bytes(each)[grid] / np.maximum(grads, 1.0)


def chunk_reduction_bytes(rows: GatheredRows) -> ArrayN:
    """What reducing a chunk's gradients takes at most beside all of its gathered weights and whole gradients.

    Its groups are reduced one after the other: a group's weights go and the fp32 buffer that is sent comes. Of those
    before it weights are gone and gradients shared out. So it is most at the first group, or the first of a larger
    kind. (n, R, vpp) [B]
    """
    model, t, stages, shards = rows.workload.model, rows.grids, rows.stage_layers.stages, rows.shards
    out = np.zeros((len(t), len(rows.stage_layers.shown.shown_stages), stages.vpp))
    of_kind = []
    for kind in stages.kinds:
        p, ways = layer_params(model, kind.moe), t.ep * t.etp
        of_kind.append(((p.total_params - p.routed) / t.tp, p.routed / ways))
    known: dict[tuple[int, ...], ArrayN] = {}
    for r, stage in enumerate(rows.stage_layers.shown.shown_stages.tolist()):
        for c, layers in enumerate(stages.layers[stage]):
            groups = (-1, *layers) if rows.is_embedding_stage[r] > 0 and c == 0 else layers
            if groups not in known:
                before, most, seen = np.zeros(len(t)), np.zeros(len(t)), set[int]()
                for kind in groups:
                    dense, expert = of_kind[kind] if kind >= 0 else (embedding_params(model) / t.tp, 0.0)
                    most = most if kind in seen else np.maximum(most, 2.0 * (dense + expert) - before)
                    seen.add(kind)
                    if len(seen) == len(set(groups)):
                        break
                    shared = dense / shards.dense_ranks[:, 0] + expert / shards.expert_ranks[:, 0]
                    before = before + 6.0 * (dense + expert) - 4.0 * shared
                known[groups] = most
            out[:, r, c] = known[groups]
    return np.asarray(out[rows.grid_index])
