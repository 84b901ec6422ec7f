"""What PyTorch's caching allocator holds beyond the live tensors, from its own rules.

Follows :mod:`mofa.replay.allocator`, which plays them: requests up to 1 MiB are cut from segments of 2 MiB in a pool of
their own, those under 10 MiB from segments of 20 MiB, larger ones from segments of their own rounded to 2 MiB; a block
goes where the smallest free one fits, and a segment is never given back. So a request that is larger than every hole
takes a new segment, whatever is free.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.cost.rows import Rows
from mofa.specs.params import embedding_params, layer_params

ArrayN = NDArray[np.float64]
_MIB = 2.0**20
SMALL, SMALL_SEGMENT, LARGE_SEGMENT, MIN_OWN, ROUND = _MIB, 2 * _MIB, 20 * _MIB, 10 * _MIB, 2 * _MIB
"""PyTorch 2.11, CUDACachingAllocator.cpp: kSmallSize, kSmallBuffer, kLargeBuffer, kMinLargeAlloc, kRoundLarge. [B]"""


def taken_bytes(nbytes: ArrayN) -> ArrayN:
    """What many blocks of one size take of segments, each. [B]

    Examples
    --------
    Two of 0.75 MiB fill a segment of 2 MiB, three of 6 MiB one of 20 MiB:

    >>> [float(b) / 2**20 for b in taken_bytes(np.array([0.75, 6.0, 11.0]) * 2**20)]
    [1.0, 6.666666666666667, 12.0]
    """
    size = np.maximum(np.ceil(nbytes / 512.0) * 512.0, 512.0)
    segment = np.where(size <= SMALL, SMALL_SEGMENT, LARGE_SEGMENT)
    shared = segment / np.maximum(np.floor(segment / size), 1.0)
    return np.asarray(np.where(size < MIN_OWN, shared, np.ceil(size / ROUND) * ROUND))


def holes_bytes(rows: Rows, allocated: ArrayN) -> ArrayN:
    """What Megatron's start leaves, and what of it nothing can use. (n, R) [B]

    Parameters are made one by one, copied into one buffer and let go: their segments, 2 bytes a parameter, are there
    when the fp32 copies, the states and the activations come. Those go into these holes where they fit, a weight's own
    or a larger one's; what finds none takes segments besides. Blocks of states of up to 1 MiB are in a pool of their
    own, for which the holes are nothing.

    Parameters
    ----------
    allocated
        The peak of the live tensors. (n, R) [B]
    """
    lay, costs, static, at = rows.layout, rows.costs, rows.static, rows.grid
    ranks = {
        expert: np.where(rows.grids.zero >= 1, ranks[:, 0], 1.0)[at]
        for expert, ranks in ((False, rows.shards.dense_ranks), (True, rows.shards.expert_ranks))
    }
    states = rows.framework.states_bytes_per_param / 3.0
    small = np.zeros(allocated.shape)
    waste, holes, large_states, fits = small.copy(), small.copy(), small.copy(), small.copy()
    one = np.ones(len(rows.table))

    kinds = [(weights, lay.counts[:, i]) for i, weights in enumerate(costs.weights.layers)]
    kinds.append((costs.weights.embedding, np.broadcast_to(rows.is_first, allocated.shape)))
    kinds.append((costs.weights.head, np.broadcast_to(rows.is_head, allocated.shape)))
    every = [
        (weight, 2.0 * weight.params[rows.k] * one, weight.number[rows.k] * one, kind)
        for kind, (weights, _) in enumerate(kinds) for weight in weights
    ]  # fmt: skip
    rooms = [number * taken_bytes(hole) * (hole > SMALL) for _, hole, number, _ in every]
    # what a layer of a kind has of them, then times its layers: few arrays of all stages
    of_kind = np.zeros((len(kinds), 4, len(rows.table)))
    for room, (weight, hole, number, kind) in zip(rooms, every, strict=True):
        state = states * hole / 2.0 / ranks[weight.expert]
        taken = taken_bytes(state)
        is_small = state <= SMALL
        needed = 3.0 * number * taken
        sums = of_kind[kind]
        sums[0] += room
        sums[1] += 3.0 * number * (taken - state) * is_small
        sums[2] += needed * is_small
        sums[3] += needed * ~is_small
        some = np.flatnonzero((state > SMALL) & (state > hole))
        if len(some):  # where states are hardly shared out
            here = zip(rooms, every, strict=True)
            wider = sum((r[some] * (w[1][some] >= state[some]))[:, None] * kinds[w[3]][1][some] for r, w in here)
            apart = np.maximum(needed[some, None] * kinds[kind][1][some] - wider, 0.0)
            large_states[some] += apart
            fits[some] -= apart
    for (_, layers), sums in zip(kinds, of_kind, strict=True):
        for total, each in zip((holes, waste, small, fits), sums, strict=True):
            total += each[:, None] * layers
    large = rows.over_layers(rows.layers.large_saved, lay.plain_in_flight, lay.full_in_flight, "nkr,nk->nr")
    plain, full = rows.gather(rows.layers.large_peak)
    peak = np.where(lay.plain > 0, plain[:, :, None], 0.0).max(axis=1)
    peak = np.maximum(peak, np.where(lay.full > 0, full[:, :, None], 0.0).max(axis=1))
    head = costs.head.memory
    peak = np.maximum(peak, (head.large_saved + head.large_peak)[rows.k][:, None] * rows.is_head)
    large = large + peak + large_states
    buffers = (static.params + static.grads)[at]
    # what is neither a buffer nor a small state may lie in the holes
    others = allocated - buffers - (small - waste)
    more = np.maximum(large + holes - others, 0.0)
    # the holes that are left do not take the moments, which come behind the first step: they go into the loss's blocks
    cut = np.where(fits + large_states > holes, head.largest[rows.k][:, None] * rows.is_head, 0.0)
    return np.asarray(waste + more + cut)


def unsharded_bytes(rows: Rows, allocated: ArrayN, without_grads: ArrayN, grads: ArrayN) -> ArrayN:
    """What FSDP's groups take under pipelines beyond what is alive at the peak. (n, R) [B]

    - The gather stream's pool keeps what two groups' gathers held at once, the reduction stream's sharded gradients.
    - Groups are reduced from one fp32 buffer each, when all activations have gone: it fits into none of their blocks. A
      stage with the embedding takes the embedding's, one with the head has the loss's blocks for it where they are as
      large, any other takes two layers', of which one is reduced while the last is let go. In the second step these lie
      under what the optimizer's states have displaced, and the same is taken once more.
    - Unsharded gradients that are larger than any activation of a layer do not fit where activations were.

    Parameters
    ----------
    without_grads
        The most alive that is no gradient. (n, R) [B]
    grads
        All gradients of a stage. (n, R) [B]
    """
    model, lay, table, costs = rows.workload.model, rows.layout, rows.grids, rows.costs
    p = layer_params(model, lay.stages.kinds[-1].moe)
    layer = ((p.total - p.routed) / table.tp + p.routed / (table.ep * table.etp))[rows.grid, None]
    end = (embedding_params(model) / table.tp)[rows.grid, None]
    ranks = rows.shards.dense_ranks[rows.grid]
    at_end = (rows.is_first + rows.is_head)[None] > 0
    gathers = np.where(at_end, 2.0 * (end + layer), 4.0 * layer) + 2.0 / ranks * np.where(
        at_end, np.maximum(end, layer), layer
    )
    sharded = rows.shards.sharded(rows.framework.grads_bytes_per_param)[rows.grid]
    loss = costs.head.memory.largest[rows.k][:, None]
    buffer = np.where(rows.is_first > 0, 4.0 * end, 8.0 * layer)
    buffer = np.where(rows.is_head > 0, np.where(loss >= 4.0 * end, 0.0, 4.0 * end), buffer)
    largest = np.max([cost.memory.largest for blocks in costs.blocks.values() for cost in blocks], axis=0)
    apart = (4.0 * costs.weights.largest() > largest)[rows.k][:, None]
    late = np.where(apart, np.maximum(without_grads + grads - allocated, 0.0), 0.0)
    return np.asarray(gathers + sharded + 2.0 * buffer + late)
