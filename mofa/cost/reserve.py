"""What PyTorch's caching allocator holds beyond the live tensors, from its own rules.

Follows :mod:`mofa.replay.allocator`, which plays them: requests up to 1 MiB are cut from segments of 2 MiB in a pool of
their own, those under 10 MiB from segments of 20 MiB, larger ones from segments of their own rounded to 2 MiB; a block
goes where the smallest free one fits, and a segment is never given back. So a request that is larger than every hole
takes a new segment, whatever is free.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    own, for which the holes are nothing. What is cut from a hole leaves a piece. Which pieces are of use depends on the
    order of all requests; they are taken to be useless up to what a layer's forward holds, as with more of them some
    would fit its tensors.

    Parameters
    ----------
    allocated
        The peak of the live tensors. (n, R) [B]
    """
    lay, costs, static, at = rows.layout, rows.costs, rows.static, rows.grid
    start = _start(rows)
    large = rows.over_layers(rows.layers.large_saved, lay.plain_in_flight, lay.full_in_flight, "nkr,nk->nr")
    peak = rows.most_of_layers(rows.layers.large_peak)
    head = costs.head.memory
    peak = np.maximum(peak, (head.large_saved + head.large_peak)[rows.k][:, None] * rows.is_head)
    # what is neither a buffer nor a small state may lie in the holes
    others = allocated - (static.params + static.grads + start.small - start.waste)[at]
    more = np.maximum(large + peak + (start.large + start.holes)[at] - others, 0.0)
    # the holes that are left do not take the moments, which come behind the first step: they go into the loss's blocks
    left = (start.fitting + start.large <= start.holes)[at]
    cut = np.where(left, 0.0, head.largest[rows.k][:, None] * rows.is_head)
    # pieces of holes that no tensor takes
    plain, full = rows.gather(rows.layers.forward_peak)
    pieces = np.where(lay.plain > 0, plain[:, :, None], 0.0).max(axis=1)
    pieces = np.maximum(pieces, np.where(lay.full > 0, full[:, :, None], 0.0).max(axis=1))
    return np.asarray(np.maximum(start.waste[at] + more + cut, np.minimum(pieces, start.holes[at])))


@dataclass(frozen=True)
class _Start:
    """What Megatron's start makes on each stage, of each grid of ranks. (g, R) each [B]"""

    holes: ArrayN
    """Segments of the parameters that were copied and let go."""
    small: ArrayN
    """Blocks of states of up to 1 MiB, which are in a pool of their own."""
    waste: ArrayN
    """What of them the pool's segments take beyond their bytes."""
    fitting: ArrayN
    large: ArrayN
    """Larger states, that find a hole and that find none."""


def _start(rows: Rows) -> _Start:
    """The holes and states of every stage: of each kind's layers, then times their number. Axes: weights, grids."""
    weights, ranks, counts = rows.costs.weights, rows.shards, rows.layout.stages.counts[:, rows.layout.shown.stage]
    layers = np.concatenate([counts.sum(axis=2), rows.is_first[None], rows.is_head[None]])  # of each kind, (kinds, R)
    of_kind, expert = weights.kind, weights.expert[:, None]
    k = rows.k[rows.first]  # a weight is the same for all candidates of a grid
    number, hole = weights.numbers[:, k], 2.0 * weights.params[:, k]
    shared = np.where(expert, ranks.expert_ranks[:, 0], ranks.dense_ranks[:, 0])
    state = rows.framework.states_bytes_per_param / 6.0 * hole / np.where(rows.grids.zero >= 1, shared, 1.0)
    is_small = state <= SMALL
    taken = taken_bytes(state)
    needed, room = 3.0 * number * taken, number * taken_bytes(hole) * (hole > SMALL)

    def staged(of_weights: ArrayN) -> ArrayN:
        """Sums over the weights of each stage. (weights, g) -> (g, R)"""
        of_kinds = np.zeros((len(layers), of_weights.shape[1]))
        np.add.at(of_kinds, of_kind, of_weights)
        return np.asarray(of_kinds.T @ layers)

    large = np.zeros((len(k), layers.shape[1]))
    for w in np.flatnonzero(np.any((state > SMALL) & (state > hole), axis=1)):  # where states are hardly shared out
        some = np.flatnonzero((state[w] > SMALL) & (state[w] > hole[w]))
        wider = staged(np.where(hole[:, some] >= state[w, some], room[:, some], 0.0))
        large[some] += np.maximum(needed[w, some, None] * layers[of_kind[w]] - wider, 0.0)
    waste = np.where(is_small, needed - 3.0 * number * state, 0.0)
    return _Start(
        staged(room), staged(np.where(is_small, needed, 0.0)), staged(waste),
        staged(np.where(is_small, 0.0, needed)) - large, large,
    )  # fmt: skip


def unsharded_bytes(rows: Rows, allocated: ArrayN, without_grads: ArrayN, grads: ArrayN) -> ArrayN:
    """What FSDP's groups take under pipelines beyond what is alive at the peak. (n, R) [B]

    - The gather stream's pool keeps what two groups' gathers held at once, the reduction stream's sharded gradients.
    - Groups are reduced from one fp32 buffer each, when all activations have gone: it fits into none of their blocks. A
      stage with the embedding takes the embedding's, one with the head has the loss's blocks for it where they are as
      large, any other takes two layers', of which one is reduced while the last is let go. In the second step these lie
      under what the optimizer's states have displaced, and the same is taken once more.
    - Unsharded gradients that are larger than any activation of a layer do not fit where activations were; others do.

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
    late = np.maximum(without_grads + _apart(rows)[rows.k] * grads - allocated, 0.0)
    return np.asarray(gathers + sharded + 2.0 * buffer + late)


def _apart(rows: Rows) -> ArrayN:
    """Share of each stage's unsharded gradients in blocks that are larger than any activation of a layer. (K, R) [-]"""
    weights, shown = rows.costs.weights, rows.layout.shown.stage
    largest = np.max([cost.memory.largest for blocks in rows.costs.blocks.values() for cost in blocks], axis=0)
    counts = np.concatenate([rows.layout.stages.counts[:, shown].sum(axis=2), rows.is_first[None], rows.is_head[None]])[
        weights.kind
    ]  # (weights, R)
    params = weights.params * weights.numbers
    larger = np.where(4.0 * weights.params > largest, params, 0.0)
    return np.asarray((larger.T @ counts) / (params.T @ counts))
