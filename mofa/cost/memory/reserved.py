"""What PyTorch's caching allocator holds, from its own rules.

Follows :mod:`mofa.replay.allocator.caching`, which plays them: requests up to 1 MiB are cut from segments of 2 MiB in a
pool of their own, those under 10 MiB from segments of 20 MiB, larger ones from segments of their own rounded to 2 MiB;
a block goes where the smallest free one fits, and a segment is never given back. So a request that is larger than every
hole takes a new segment, whatever is free: what smaller tensors held before stays beside what larger ones hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mofa.cost.block.liveness import BlockMemory
from mofa.cost.memory.ring_buffers import late_freed_ring_bytes
from mofa.cost.optimizer import embedding_gradient_extra_bytes, torchtitan_optimizer_element_bytes
from mofa.cost.rank_rules import (
    has_flat_gradient_buffers,
    keeps_params_gathered,
    shards_optimizer_states,
    shards_params,
)
from mofa.cost.rows import GatheredRows
from mofa.specs.params import embedding_params, layer_params

ArrayN = NDArray[np.float64]
_MIB = 2.0**20
SMALL, SMALL_SEGMENT, LARGE_SEGMENT, MIN_OWN, ROUND = _MIB, 2 * _MIB, 20 * _MIB, 10 * _MIB, 2 * _MIB
"""PyTorch 2.11, CUDACachingAllocator.cpp: kSmallSize, kSmallBuffer, kLargeBuffer, kMinLargeAlloc, kRoundLarge. [B]"""


def segment_bytes_per_block(nbytes: ArrayN) -> ArrayN:
    """What many blocks of one size take of segments, each. [B]

    Examples
    --------
    Two of 0.75 MiB fill a segment of 2 MiB, three of 6 MiB one of 20 MiB:

    >>> [float(b) / 2**20 for b in segment_bytes_per_block(np.array([0.75, 6.0, 11.0]) * 2**20)]
    [1.0, 6.666666666666667, 12.0]
    """
    size = np.maximum(np.ceil(nbytes / 512.0) * 512.0, 512.0)
    segment = np.where(size <= SMALL, SMALL_SEGMENT, LARGE_SEGMENT)
    shared = segment / np.maximum(np.floor(segment / size), 1.0)
    return np.asarray(np.where(size < MIN_OWN, shared, np.ceil(size / ROUND) * ROUND))


def freed_segment_bytes(nbytes: ArrayN) -> ArrayN:
    """The free block that many of one size leave, all let go: their segment's. [B]

    Examples
    --------
    >>> [float(b) / 2**20 for b in freed_segment_bytes(np.array([0.75, 6.0, 11.0]) * 2**20)]
    [2.0, 20.0, 12.0]
    """
    own = np.where(nbytes <= SMALL, SMALL_SEGMENT, np.ceil(nbytes / ROUND) * ROUND)
    return np.asarray(np.where((nbytes > SMALL) & (nbytes < MIN_OWN), LARGE_SEGMENT, own))


@dataclass(frozen=True)
class LivePeaks:
    """The most alive of each stage, -inf where there is no such instant. (n, R) [B]

    Inside layers' forwards and in any layer, in the loss and its backward, at all. ``no_grads`` is the most that is no
    gradient, in layers' forwards and at all; ``grads`` are all gradients, ``buffers`` what is allocated for good.
    """

    forward: ArrayN
    layers: ArrayN
    loss: ArrayN
    overall: ArrayN
    forward_no_grads: ArrayN
    no_grads: ArrayN
    grads: ArrayN
    buffers: ArrayN


def whole_segment_bytes(rows: GatheredRows, alive: LivePeaks) -> ArrayN:
    """What the allocator reserves of whole segments, but for what rounding and other streams add. (n, R) [B]

    - The loss's tensors are larger than any of a layer; those of the embedding's backward may be. They come when layers
      have taken what they need, and none of it is of use to them: see :func:`_with_loss`.
    - The tensors of a layer are cut from each other's blocks, and what is left of these is not whole when the largest
      is asked for: of that there is one more, where holes don't take the others.
    - Megatron's start leaves holes: :func:`megatron_start_holes_bytes` and :func:`_beside_holes`. FSDP's groups under
    pipelines:
      :func:`_unsharded`.
    """
    bulk = _bulk(rows.costs.embedding.memory)[rows.k][:, None] * rows.is_embedding_stage
    late_states, widest = _late_states(rows), rows.largest_layer_by_stage(rows.layers.largest_tensor_bytes)
    if keeps_params_gathered(rows):
        return _unsharded(rows, alive, late_states, bulk)
    if not has_flat_gradient_buffers(rows):
        ahead = alive.forward - late_states
        most = np.maximum(np.maximum(alive.overall, alive.layers + bulk), _with_loss(rows, alive, ahead, widest))
        if rows.framework.deepspeed:  # whose states are parts of flat tensors, not one a weight
            return most
        loss = _bulk(rows.costs.head.memory)[rows.k][:, None] * rows.is_head_stage
        large = _states_larger_than(rows, widest)
        most = np.maximum(most, alive.layers - late_states + np.maximum(large, bulk + loss))
        return np.maximum(most, alive.layers + _scratch_in_pieces(rows, alive, large))
    made = weight_bytes_at_megatron_start(rows)
    lost, pieces = megatron_start_holes_bytes(rows, made, alive.overall)
    most, ahead = _beside_holes(rows, made, alive.buffers)
    ahead, late_freed = np.maximum(alive.forward - late_states, ahead), late_freed_ring_bytes(rows)
    layers = alive.layers + np.maximum(pieces, widest) + bulk + late_freed
    in_pieces = np.maximum(alive.overall + np.maximum(lost, pieces), layers)
    # holes take what is in pieces
    return np.maximum(np.maximum(in_pieces, most), _with_loss(rows, alive, ahead, 0.0, late_freed))


def _bulk(memory: BlockMemory) -> ArrayN:
    """The most alive of an end of the model in tensors larger than any of a layer. (K,) [B]"""
    return np.asarray(memory.large_tensors_saved[-1] + memory.large_tensors_peak[-1])


def _late_states(rows: GatheredRows) -> ArrayN:
    """The states that appear at the end of the first step: Megatron's main copies are there before. (n, R) [B]"""
    num_moments = rows.workload.optimizer.traits.num_moments
    return rows.static.states[rows.grid_index] * (
        num_moments / (num_moments + 1.0) if has_flat_gradient_buffers(rows) else 1.0
    )


def _states_larger_than(rows: GatheredRows, widest: ArrayN) -> ArrayN:
    """Moments, and what the optimizer's step has beside them, in tensors larger than any of a layer: they find no room
    in what layers let go. (n, R) [B]

    Parameters
    ----------
    widest
        The largest tensor of each stage's layers. (n, R) [B]
    """
    weights, ranks, static = rows.costs.weights, rows.shards, rows.static
    counts = rows.stage_layers.stages.layer_counts[:, rows.stage_layers.shown.shown_stages].sum(axis=2).astype(float)
    layers = np.concatenate([counts, rows.is_embedding_stage[None], rows.is_head_stage[None]])[
        weights.block_of_each_weight
    ]  # (weights, R)
    num_moments = rows.workload.optimizer.traits.num_moments
    beside = (static.step_scratch / np.maximum(static.states / num_moments, 1.0))[rows.grid_index]
    wide = torchtitan_optimizer_element_bytes(rows.workload, rows.mode.precision)
    sharded = shards_params(rows)
    large = np.zeros(widest.shape)
    for w, is_expert in enumerate(weights.is_expert_weight.tolist()):
        shared = (ranks.expert_ranks if is_expert else ranks.dense_ranks)[rows.grid_index, 0] if sharded else 1.0
        state = wide * weights.params_of_each_weight[w, rows.k] / shared
        each = (weights.number_of_each_weight[w, rows.k] * segment_bytes_per_block(state))[:, None] * layers[w]
        large += np.where(state[:, None] > np.maximum(widest, MIN_OWN), each, 0.0)
    return np.asarray((num_moments + beside) * large)


def _scratch_in_pieces(rows: GatheredRows, alive: LivePeaks, large_states: ArrayN) -> ArrayN:
    """Of what the optimizer's step has beside its states what layers can't use. (n, R) [B]

    States and this are cut from what the first step's layers let go. Where that is not enough, it is in pieces of its
    own, smaller than the tensors of layers, which take new segments in the second step.
    """
    static = rows.static
    states, scratch = static.states[rows.grid_index], static.step_scratch[rows.grid_index]
    in_layers = alive.layers - static.params[rows.grid_index] - states - alive.buffers
    in_layers = in_layers - rows.largest_layer_by_stage(rows.layers.other_stream_pool_peak_bytes)
    in_large = large_states * scratch / np.maximum(states + scratch, 1.0)
    unfitting = np.clip(states + scratch - in_layers, 0.0, scratch)
    return np.asarray(np.minimum(np.maximum(unfitting - in_large, 0.0), np.maximum(in_layers, 0.0)))


def _with_loss(
    rows: GatheredRows, alive: LivePeaks, ahead: ArrayN, pieces: ArrayN | float, late_freed: ArrayN | float = 0.0
) -> ArrayN:  # fmt: skip
    """What the stage with the head reserves for its layers and the loss, -inf elsewhere. (n, R) [B]

    Of layers' segments, ``ahead`` of them by the first loss, none is of use to its larger tensors. Later, states and
    gradients that came behind the first loss have taken room of what the layers hold beside it; as much as does not fit
    any more goes into the loss's blocks, smallest first, none of which is whole again for the next loss: so many of its
    largest are taken once more as hold what did not fit. So it is with what comes back ``late_freed``.
    """
    memory = rows.costs.head.memory
    bulk, largest = _bulk(memory)[rows.k][:, None], memory.largest[rows.k][:, None]
    displaced = np.maximum(alive.loss + late_freed - bulk - ahead, 0.0)
    again = np.ceil(displaced / np.maximum(largest, 1.0)) * largest
    return np.where((rows.is_head_stage > 0) & (bulk > 0), ahead + pieces + bulk + again, -np.inf)


def megatron_start_holes_bytes(
    rows: GatheredRows, made: WeightBytesAtMegatronStart, allocated: ArrayN
) -> tuple[ArrayN, ArrayN]:
    """What Megatron's start leaves, and what of it nothing can use: whole holes, or pieces of them. (n, R) each [B]

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
    lay, costs, static, grid = rows.stage_layers, rows.costs, rows.static, rows.grid_index
    start = _start(made, 1.0 + rows.workload.optimizer.traits.num_moments)
    saved, peak = rows.layers.saved_large_tensor_bytes[..., 0], rows.layers.large_tensor_peak_beyond_kept_bytes[..., 0]
    large = rows.sum_over_layers(saved, lay.base_mode_in_flight, lay.fully_recomputed_in_flight, "nkr,nk->nr")
    head = costs.head.memory
    of_head = (head.large_tensors_saved[0] + head.large_tensors_peak[0])[rows.k][:, None]
    peak = np.maximum(rows.largest_layer_by_stage(peak), of_head * rows.is_head_stage)
    # what is neither a buffer nor a small state may lie in the holes
    others = allocated - (static.params + static.grads + start.small - start.waste)[grid]
    more = np.maximum(large + peak + (start.large + start.holes)[grid] - others, 0.0)
    # pieces of holes that no tensor takes
    pieces = rows.largest_layer_by_stage(rows.layers.forward_peak_bytes)
    return start.waste[grid] + more, np.minimum(pieces, start.holes[grid])


def _beside_holes(rows: GatheredRows, made: WeightBytesAtMegatronStart, buffers: ArrayN) -> tuple[ArrayN, ArrayN]:
    """What Megatron reserves at least, and before its first loss, for tensors that no hole takes. (n, R) each [B]

    For each of the sizes that most parameters are in: holes of up to this size are there, and so is what is larger and
    alive, which fits none of them: states and activations. The largest such sum is what is reserved if all else fits
    somewhere. Of Megatron's buffers the fp8 copies of weights come with the first forward, two in the hole of one.
    """
    lay, static, grid, layers = rows.stage_layers, rows.static, rows.grid_index, rows.layers
    fixed = (static.params + static.grads - static.buffers)[grid] + buffers
    most, ahead = np.zeros(fixed.shape), np.zeros(fixed.shape)
    num_states = 1.0 + rows.workload.optimizer.traits.num_moments
    of_state = (static.step_scratch / np.maximum(static.states / num_states, 1.0))[grid]  # at the optimizer's step
    ends = [(end.large_tensors_saved + end.large_tensors_peak, there) for end, there in
            ((rows.costs.head.memory, rows.is_head_stage), (rows.costs.embedding.memory,
            rows.is_embedding_stage))]  # fmt: skip
    for i, (holes, states, copies) in enumerate(_by_size(rows, made), start=1):
        saved = rows.sum_over_layers(
            layers.saved_large_tensor_bytes[..., i],
            lay.base_mode_in_flight,
            lay.fully_recomputed_in_flight,
            "nkr,nk->nr",
        )
        peak = rows.largest_layer_by_stage(layers.large_tensor_peak_beyond_kept_bytes[..., i])
        for large, there in ends:
            peak = np.maximum(peak, large[i, rows.k][:, None] * there)
        beside = fixed + (holes + copies)[grid] + saved
        stepping = fixed + (holes + copies + num_states * states)[grid] + of_state * states[grid]
        most = np.maximum(np.maximum(most, stepping), beside + num_states * states[grid] + peak)
        of_layers = rows.largest_layer_by_stage(layers.forward_large_tensor_peak_bytes[..., i])
        ahead = np.maximum(ahead, beside + states[grid] + of_layers)
    return most, ahead


def _by_size(rows: GatheredRows, made: WeightBytesAtMegatronStart) -> Iterator[tuple[ArrayN, ArrayN, ArrayN]]:
    """For each of the sizes that most parameters are in, holes of up to it, and states of one kind and fp8 copies of
    weights that are larger. (g, R) each [B]"""
    states = made.owned * made.state_segment_bytes
    each = (made.kind < len(made.layers) - 2)[:, None] * made.number * made.freed_block_bytes  # of layers alone
    share = rows.static.buffers / np.maximum(made.sum_by_stage(each), 1.0)
    for size in 2.0 * rows.costs.weights.largest_and_commonest_weight_params[1:, rows.k[rows.first_row_of_grid]]:
        yield (
            made.sum_by_stage(np.where(made.freed_block_bytes <= size, made.freed_segment_bytes, 0.0)),
            made.sum_by_stage(np.where(made.state > freed_segment_bytes(size), states, 0.0)),
            made.sum_by_stage(np.where(made.freed_block_bytes / 2.0 > freed_segment_bytes(size), each, 0.0)) * share,
        )


@dataclass(frozen=True)
class WeightBytesAtMegatronStart:
    """What Megatron's start makes of each weight, of each grid of ranks. (weights, g) each [B]"""

    layers: ArrayN
    """Layers of each kind on the stages, then the embedding and the head. (kinds, R)"""
    kind: NDArray[np.intp]
    """Of each weight. (weights,)"""
    number: ArrayN
    freed_block_bytes: ArrayN
    freed_segment_bytes: ArrayN
    """Segments of all that are alike, once copied and let go."""
    owned: ArrayN
    """How many of them a rank of the distributed optimizer steps, on average over the ranks. [-]"""
    state: ArrayN
    state_segment_bytes: ArrayN
    """A state of each of these, and what it takes of segments."""

    def sum_by_stage(self, of_weights: ArrayN) -> ArrayN:
        """Sums over the weights of each stage. (weights, g) -> (g, R)"""
        of_kinds = np.zeros((len(self.layers), of_weights.shape[1]))
        np.add.at(of_kinds, self.kind, of_weights)
        return np.asarray(of_kinds.T @ self.layers)


def weight_bytes_at_megatron_start(rows: GatheredRows) -> WeightBytesAtMegatronStart:
    """What the start makes of the weights of every grid of ranks."""
    weights, ranks, counts = (
        rows.costs.weights,
        rows.shards,
        rows.stage_layers.stages.layer_counts[:, rows.stage_layers.shown.shown_stages],
    )
    layers = np.concatenate([counts.sum(axis=2), rows.is_embedding_stage[None], rows.is_head_stage[None]])
    k = rows.k[rows.first_row_of_grid]  # a weight is the same for all candidates of a grid
    number, hole = weights.number_of_each_weight[:, k], 2.0 * weights.params_of_each_weight[:, k]
    shared = np.where(weights.is_expert_weight[:, None], ranks.expert_ranks[:, 0], ranks.dense_ranks[:, 0])
    shared = np.where(shards_optimizer_states(rows), shared, 1.0)
    # a rank's part of a chunk's buffer holds tensors whole, where it is no smaller than they are
    dense, expert = rows.params.max(axis=(2, 3))  # of the largest chunk: how many stages are shown is the table's
    has_experts = rows.grids.ep > 1
    buffer = np.where(
        weights.is_expert_weight[:, None] & has_experts, expert, dense + np.where(has_experts, 0.0, expert)
    )
    each = rows.framework.states_bytes_per_param / 6.0
    state = each * np.minimum(hole, 2.0 * buffer / shared)
    owned = number * each * hole / shared / np.maximum(state, 1.0)
    room = number * segment_bytes_per_block(hole) * (hole > SMALL)
    return WeightBytesAtMegatronStart(
        layers, weights.block_of_each_weight, number, hole, room, owned, state, segment_bytes_per_block(state)
    )


@dataclass(frozen=True)
class _Start:
    """What Megatron's start makes on each stage, of each grid of ranks. (g, R) each [B]"""

    holes: ArrayN
    """Segments of the parameters that were copied and let go."""
    small: ArrayN
    """Blocks of states of up to 1 MiB, which are in a pool of their own."""
    waste: ArrayN
    """What segments that several states share take beyond their bytes."""
    fitting: ArrayN
    large: ArrayN
    """Larger states, that find a hole and that find none."""


def _start(made: WeightBytesAtMegatronStart, num_states: float) -> _Start:
    """The holes and states of every stage: of each kind's layers, then times their number. Axes: weights, grids.

    ``num_states`` counts main copy and moments. [-]
    """
    hole, state, room, layers = (
        freed_segment_bytes(made.freed_block_bytes),
        made.state,
        made.freed_segment_bytes,
        made.layers,
    )
    is_small = state <= SMALL
    needed = num_states * made.owned * made.state_segment_bytes
    large = np.zeros((hole.shape[1], layers.shape[1]))
    w, some = np.nonzero((state > SMALL) & (state > hole))  # where states are hardly shared out
    if len(w):
        wider = made.sum_by_stage(np.where(hole[:, some] >= state[w, some], room[:, some], 0.0))
        np.add.at(large, some, np.maximum(needed[w, some, None] * layers[made.kind[w]] - wider, 0.0))
    waste = np.where(state < MIN_OWN, needed - num_states * made.owned * state, 0.0)
    return _Start(
        made.sum_by_stage(room), made.sum_by_stage(np.where(is_small, needed, 0.0)), made.sum_by_stage(waste),
        made.sum_by_stage(np.where(is_small, 0.0, needed)) - large, large,
    )  # fmt: skip


def _unsharded(rows: GatheredRows, alive: LivePeaks, late_states: ArrayN, bulk: ArrayN) -> ArrayN:
    """What FSDP's groups and all else reserve under pipelines. (n, R) [B]

    - The gather stream's pool keeps what two groups' gathers held at once, the reduction stream's sharded gradients.
    - Groups are reduced from one fp32 buffer each, when all activations have gone: it fits into none of their blocks. A
      stage with the embedding takes the embedding's, one with the head has the loss's blocks for it where they are as
      large, any other takes two layers', of which one is reduced while the last is let go. In the second step these lie
      under what the optimizer's states have displaced, and the same is taken once more.
    - So are on the first stage the tensors of the embedding's backward and its whole fp32 gradient, where they are
      larger than any of a layer, as far as the states displace them: that is what the second step takes, no less than
      the states.
    - Unsharded gradients that are larger than any activation of a layer do not fit where activations were; others do.
    - What comes while a layer's forward holds most lies in the loss's blocks as well, and all but temporaries stays: of
      these the widest is gone by the next loss.
    """
    model, lay, table, costs, grid = rows.workload.model, rows.stage_layers, rows.grids, rows.costs, rows.grid_index
    p = layer_params(model, lay.stages.kinds[-1].moe)
    layer = ((p.total_params - p.routed) / table.tp + p.routed / (table.ep * table.etp))[grid, None]
    end = (embedding_params(model) / table.tp)[grid, None]
    first, head = rows.is_embedding_stage > 0, rows.is_head_stage > 0
    ends = np.where(end > layer, np.where(first, 2.0 * (end + layer), 4.0 * layer + 2.0 * end), 4.0 * layer)
    ends = ends + np.where(first & (end <= layer), 2.0 * end, 0.0)  # the first, which no layer's gather fits
    source = 2.0 / rows.shards.dense_ranks[grid] * np.where(first, np.maximum(end, layer), layer)
    pools = np.where(first | head, ends, 4.0 * layer) + source
    pools = pools + rows.shards.sharded_bytes(rows.framework.grads_bytes_per_param)[grid]
    largest, loss = (c.memory.largest[rows.k][:, None] for c in (costs.embedding, costs.head))
    widest = rows.largest_layer_by_stage(rows.layers.largest_tensor_bytes)
    embedding_grads = embedding_gradient_extra_bytes(
        rows.workload, rows.framework, "mixed", True, table.tp, rows.is_embedding_stage
    )[grid]
    embedding_grads = (4.0 * end + embedding_grads) * first
    embedding_grads = np.where(embedding_grads > widest, embedding_grads, 0.0)
    displaced = bulk + embedding_grads + np.where(4.0 * end > largest, 4.0 * end, 0.0) * first
    again = np.clip(late_states, np.maximum(largest, embedding_grads) * first, np.maximum(displaced, largest * first))
    once = (
        alive.layers - late_states + np.maximum(displaced - embedding_grads, 0.0)
    )  # by the first step, which has no states yet
    embedding = np.where(first, once + np.maximum(again, late_states), -np.inf)
    group = np.maximum(end, layer)
    two = np.where(loss >= 4.0 * layer, 4.0 * end, 4.0 * (group + layer))
    buffer = np.where(head, np.where(loss >= 4.0 * group, 0.0, two), 8.0 * layer) * ~first
    unfitting = np.maximum(alive.no_grads + _unfitting_gradients(rows)[rows.k] * alive.grads - alive.overall, 0.0)
    reserved = alive.overall + unfitting + 2.0 * buffer + np.where(unfitting > 0, loss * head, 0.0)
    beside = alive.forward - widest + _bulk(costs.head.memory)[rows.k][:, None]
    loss_first = replace(alive, loss=np.maximum(alive.loss, beside))
    reserved = np.maximum(reserved, _with_loss(rows, loss_first, alive.forward_no_grads - late_states, widest))
    return np.asarray(np.maximum(reserved, embedding) + pools)


def _unfitting_gradients(rows: GatheredRows) -> ArrayN:
    """Share of each stage's unsharded gradients in blocks that are larger than any activation of a layer. (K, R) [-]"""
    weights, shown = rows.costs.weights, rows.stage_layers.shown.shown_stages
    largest = np.max([cost.memory.largest for blocks in rows.costs.blocks.values() for cost in blocks], axis=0)
    counts = np.concatenate(
        [
            rows.stage_layers.stages.layer_counts[:, shown].sum(axis=2),
            rows.is_embedding_stage[None],
            rows.is_head_stage[None],
        ]
    )[weights.block_of_each_weight]  # (weights, R)
    params = weights.params_of_each_weight * weights.number_of_each_weight
    larger = np.where(4.0 * weights.params_of_each_weight > largest, params, 0.0)
    return np.asarray((larger.T @ counts) / (params.T @ counts))


def fsdp_shard_waste_bytes(rows: GatheredRows) -> ArrayN:
    """What the segments of FSDP's shards of the parameters take beyond their bytes. (n, R) [B]

    Parameters come one by one, as do without pipelines their gradients' shards in the reduction stream's pool. What no
    op of a tape names (norms) is taken to be spread over those that are named: each is a little more than its bytes.
    """
    weights, ranks = rows.costs.weights, rows.shards
    counts = rows.stage_layers.stages.layer_counts[:, rows.stage_layers.shown.shown_stages].sum(axis=2)
    layers = np.concatenate([counts, rows.is_embedding_stage[None], rows.is_head_stage[None]])[
        weights.block_of_each_weight
    ]  # (weights, R)
    k = rows.k[rows.first_row_of_grid]
    shared = np.where(weights.is_expert_weight[:, None], ranks.expert_ranks[:, 0], ranks.dense_ranks[:, 0])
    narrow = torchtitan_optimizer_element_bytes(rows.workload, rows.mode.precision) / 4.0
    shard = narrow * rows.framework.params_bytes_per_param * weights.params_of_each_weight[:, k] / shared
    waste = weights.number_of_each_weight[:, k] * (segment_bytes_per_block(shard + 1.0) - shard)
    return np.asarray((waste.T @ layers)[rows.grid_index])
