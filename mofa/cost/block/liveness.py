"""Memory of a block: which tensors are alive at each op of its forward and backward tape, and the peaks.

A tensor lives from the op that writes it to the last op that reads it; what a backward op reads has therefore been
kept. A view has no bytes of its own and keeps its source alive. The two tapes are joined, so that a tensor kept by two
ops counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.build import BlockTapes
from mofa.blocks.elementwise import BoolK, FloatK, any_true, largest_in_each_part, maximum, stack_rows, where
from mofa.blocks.lifetimes import NUMBER, AllocationInterval, BlockLifetimes
from mofa.blocks.op import KINDS, Op, Tensor

ArrayK = NDArray[np.float64]
IntA = NDArray[np.intp]
EXPERT_GRADIENTS, BLOCK_GRADIENTS = "efsdp.accumulate", "fsdp.accumulate"
"""The ops that make a block's fp32 gradients (:mod:`mofa.blocks.frameworks.torchtitan.fsdp`)."""
FEW = 64
"""Combinations up to which several blocks, and tensors of several sizes, are looked at in one go. [-]"""


@dataclass(frozen=True)
class BlockMemory:
    """Bytes of one block and one micro-batch; arrays of shape (K,), by kind (len(KINDS), K). [B]

    ``saved`` is what stays between forward and backward, the block's input counted and its output not.
    ``forward_peak`` and ``backward_peak`` are the most alive at one op, ``saved`` included in the latter; ``*_kinds``
    split them by :data:`mofa.blocks.op.KINDS`. ``forward_op`` and ``backward_op`` index the op at the peak.
    """

    saved: ArrayK
    saved_kinds: ArrayK
    saved_slack: ArrayK
    """What the allocator's rounding adds to the kept tensors. [B]"""
    largest: ArrayK
    """The largest tensor that the block allocates on the computing stream. [B]"""
    large_tensors_saved: ArrayK
    large_tensors_forward: ArrayK
    large_tensors_peak: ArrayK
    """Of the computing stream's tensors larger than each of the sizes given: what is kept, and the most alive in the
    forward and at all beyond what is kept. (sizes, K) [B]"""
    freed_before_last_weight: ArrayK
    """Of what was kept, what the backward reads only before it comes to the last weight. [B]"""
    pool_slack: ArrayK
    """Peaks of the streams' memory pools beyond what is alive of them at the block's peak. [B]"""
    other_pools: ArrayK
    """Peaks of the pools of all streams but the computing one. [B]"""
    forward_peak: ArrayK
    forward_kinds: ArrayK
    forward_op: NDArray[np.intp]
    backward_peak: ArrayK
    backward_kinds: ArrayK
    backward_op: NDArray[np.intp]

    def followed_by(self, block: BlockMemory) -> BlockMemory:
        """This block and one behind it as one: the other runs forward and backward while this one's is kept."""
        forward = self.saved + block.forward_peak
        backward = self.saved + block.backward_peak
        later_f, later_b = forward >= self.forward_peak, backward >= self.backward_peak
        return BlockMemory(
            saved=self.saved + block.saved,
            saved_kinds=self.saved_kinds + block.saved_kinds,
            saved_slack=self.saved_slack + block.saved_slack,
            largest=np.maximum(self.largest, block.largest),
            large_tensors_saved=self.large_tensors_saved + block.large_tensors_saved,
            large_tensors_forward=np.maximum(self.large_tensors_forward, block.large_tensors_forward),
            large_tensors_peak=np.maximum(self.large_tensors_peak, block.large_tensors_peak),
            freed_before_last_weight=block.freed_before_last_weight,
            pool_slack=np.maximum(self.pool_slack, block.pool_slack),
            other_pools=np.maximum(self.other_pools, block.other_pools),
            forward_peak=np.maximum(forward, self.forward_peak),
            forward_kinds=np.where(later_f, self.saved_kinds + block.forward_kinds, self.forward_kinds),
            forward_op=np.where(later_f, block.forward_op, self.forward_op),
            backward_peak=np.maximum(backward, self.backward_peak),
            backward_kinds=np.where(later_b, self.saved_kinds + block.backward_kinds, self.backward_kinds),
            backward_op=np.where(later_b, block.backward_op, self.backward_op),
        )


def block_memory(block: BlockTapes, num_k: int, large: ArrayK | None = None) -> BlockMemory:
    """Bytes kept and peaks of one block, tensors above each of the sizes ``large`` (sizes, num_k) also apart."""
    return block_memories([block], num_k, large)[0]


def block_memories(blocks: Iterable[BlockTapes], num_k: int, large: ArrayK | None = None) -> list[BlockMemory]:
    """As :func:`block_memory`, of several: of few combinations all in one go, as NumPy's calls are all it takes."""
    large = np.zeros((0, num_k)) if large is None else large
    lifetimes = [block.lifetimes for block in blocks]
    some = [block for block in lifetimes if block.intervals]
    at_once = max(len(some), 1) if num_k < FEW else 1
    parts = [_together(some[i : i + at_once], num_k, large) for i in range(0, len(some), at_once)]
    memories = iter([memory for part in parts for memory in part])
    return [next(memories) if block.intervals else _nothing(num_k, len(large)) for block in lifetimes]


def peak_bytes_from_accumulation(block: BlockTapes, name: str, num_k: int) -> ArrayK:
    """What is alive at the op at which most is, from one of that ``name`` on to the end of a block's backward; nothing
    where it has none. (len(KINDS), K) [B]

    That op makes fp32 gradients of 16-bit ones, weight by weight in the order of modules, and lets each of these go. It
    counts here with what it has at most, less all that it makes: who asks counts that, twice the bytes, from there on.
    """
    lifetimes, combination = block.lifetimes, np.arange(num_k)
    first = next((n for n, op in enumerate(lifetimes.ops) if op.name == name), None)
    if first is None or not lifetimes.intervals:
        return np.zeros((len(KINDS), num_k))
    joined = _Joined.of([lifetimes], num_k)
    alive = joined.alive()[first:]
    tensors = {**block.forward.tensors, **block.backward.tensors}
    gone_early = bytes_freed_as_gradients_are_made(
        first, lifetimes.intervals, joined.sizes, {name: tensor.weight for name, tensor in tensors.items()},
        block.forward.ops,
    )  # fmt: skip
    alive[0] -= gone_early
    most = first + alive.argmax(axis=0)
    ops, which = np.unique(most, return_inverse=True)
    kinds = ((joined.there(ops)[:, None] & joined.is_kind) @ joined.sizes)[which, :, combination].T
    kinds[NUMBER["scratch"]] += joined.scratch[most, combination]
    kinds[NUMBER["grad"]] -= np.where(most == first, gone_early, 0.0)
    return np.asarray(kinds)


def bytes_freed_as_gradients_are_made(
    op_index: int, intervals: Sequence[AllocationInterval], sizes: ArrayK, weights: Mapping[str, str],
    forward_ops: Sequence[Op],
) -> ArrayK:  # fmt: skip
    """What an op that makes fp32 gradients does not hold, when it holds most, of all that it reads and makes.

    Parameters
    ----------
    op_index
        The op, by its place in the joined tapes. [-]
    intervals, sizes
        Allocations and their bytes. (tensors, K) [B]
    weights
        Of each tensor: the weight whose gradient it is, empty of others.
    forward_ops
        The ops that have these weights, in the order of modules.

    Returns
    -------
    ndarray
        (K,) [B]
    """
    modules = list(dict.fromkeys(op.weight or op.name for op in forward_ops))
    ending = [(weights[interval.owner], n) for n, interval in enumerate(intervals) if interval.end == op_index]
    in_order = sorted((modules.index(weight), n) for weight, n in ending if weight in modules)
    return _gone_beside_larger(sizes[[n for _, n in in_order]])


def _gone_beside_larger(nbytes: ArrayK) -> ArrayK:
    """Of tensors (n, K) that are replaced in order, each by one of twice its bytes before it goes: their bytes that
    are not there when most of both is, less those of the larger ones that are yet to come. (K,) [B]

    Examples
    --------
    Of 2, 4 and 1 bytes most is there with the second of the larger ones: 4 + 8, and 4 + 1 of the others. These 17 are 4
    less than all of both:

    >>> _gone_beside_larger(np.array([[2.0], [4.0], [1.0]]))
    array([4.])
    """
    if not len(nbytes):
        return np.zeros(nbytes.shape[1])
    total, so_far = nbytes.sum(axis=0), np.cumsum(nbytes, axis=0)
    alive = 2.0 * so_far + total - so_far + nbytes
    return np.asarray(3.0 * total - alive.max(axis=0))


def _together(blocks: Sequence[BlockLifetimes], num_k: int, large: ArrayK) -> list[BlockMemory]:
    """Blocks that all allocate something, in one go."""
    joined = _Joined.of(blocks, num_k)
    sizes, crossing = joined.sizes, np.flatnonzero(joined.across)
    peak, peak_kinds, peak_op = _peaks(joined)
    of_block = joined.of_block[:, crossing]
    saved_kinds = (of_block[:, None] & joined.is_kind[:, crossing]) @ sizes[crossing]
    slack = of_block @ (allocator_rounded_bytes(sizes[crossing]) - sizes[crossing])
    above = joined.sums([block.saved for block in blocks]) - joined.sums(
        [block.alive_at_first_weight_product for block in blocks]
    )
    own = sizes.copy()
    for block, first in zip(blocks, joined.first, strict=True):
        for pool in block.pools.values():
            own[first + np.array(pool, dtype=np.intp)] = 0.0
    largest = np.maximum.reduceat(own, joined.first, axis=0)
    kept_large, in_forward, beyond_kept = _larger(joined, own, large)
    pools = [_pool_slack(joined, i, block, peak_op[2 * i + 1]) for i, block in enumerate(blocks)]
    return [
        BlockMemory(
            saved=saved_kinds[i].sum(axis=0), saved_kinds=saved_kinds[i], saved_slack=slack[i], largest=largest[i],
            large_tensors_saved=kept_large[i], large_tensors_forward=in_forward[i], large_tensors_peak=beyond_kept[i],
            freed_before_last_weight=above[i], pool_slack=pools[i][0], other_pools=pools[i][1],
            forward_peak=peak[2 * i], forward_kinds=peak_kinds[2 * i], forward_op=peak_op[2 * i],
            backward_peak=peak[2 * i + 1], backward_kinds=peak_kinds[2 * i + 1], backward_op=peak_op[2 * i + 1],
        )
        for i, block in enumerate(blocks)
    ]  # fmt: skip


@dataclass(frozen=True)
class _Joined:
    """The tensors of several blocks, whose ops are counted on from one block to the next."""

    sizes: ArrayK
    """(tensors, K) [B]"""
    scratch: ArrayK
    """(ops, K) [B]"""
    kind: IntA
    start: IntA
    end: IntA
    since: IntA
    """Of each tensor: its kind, the first and the last op at which it is alive, and from where on its memory is.
    (tensors,)"""
    block: IntA
    """Of each tensor. (tensors,)"""
    first: IntA
    """The first tensor of each block. (blocks,)"""
    bounds: IntA
    """Where the forward and the backward of each block begin, and the last one ends. (2 * blocks + 1,)"""

    @classmethod
    def of(cls, blocks: Sequence[BlockLifetimes], num_k: int) -> _Joined:
        """The blocks one after the other."""
        intervals = [interval for block in blocks for interval in block.intervals]
        _, kind, start, end, nbytes, since, _ = zip(*intervals, strict=True)
        bounds = np.cumsum(
            [0, *(num for b in blocks for num in (b.first_backward_op, len(b.ops) - b.first_backward_op))]
        )
        count = [len(b.intervals) for b in blocks]
        block = np.repeat(np.arange(len(blocks)), count)
        begin = bounds[::2][block]
        scratch = stack_rows(
            [op.scratch if op.present is True else where(op.present, op.scratch, 0.0) for b in blocks for op in b.ops],
            num_k,
        )
        return cls(
            stack_rows(nbytes, num_k), scratch, np.array(kind), begin + start, begin + end, begin + since, block,
            np.cumsum([0, *count[:-1]]), bounds,
        )  # fmt: skip

    @cached_property
    def is_kind(self) -> NDArray[np.bool_]:
        """(len(KINDS), tensors)"""
        return np.asarray(np.arange(len(KINDS))[:, None] == self.kind)

    @cached_property
    def of_block(self) -> NDArray[np.bool_]:
        """(blocks, tensors)"""
        return np.asarray(np.arange(len(self.first))[:, None] == self.block)

    @cached_property
    def across(self) -> NDArray[np.bool_]:
        """Which tensors are kept from the forward for the backward. (tensors,)"""
        boundary = self.bounds[1::2][self.block]
        return np.asarray((self.since < boundary) & (self.start <= boundary) & (boundary <= self.end))

    def sums(self, chosen: Sequence[Sequence[int]]) -> ArrayK:
        """The bytes of some tensors of each block, by their places in it. (blocks, K) [B]"""
        some = np.zeros((len(chosen), len(self.sizes)))
        for row, first, places in zip(some, self.first, chosen, strict=True):
            row[first + np.array(places, dtype=np.intp)] = 1.0
        return np.asarray(some @ self.sizes)

    def tensors_of(self, i: int) -> tuple[IntA, ArrayK]:
        """The tensors of the ``i``-th block and their bytes. (tensors,), (tensors, K) [B]"""
        tensors = np.flatnonzero(self.block == i)
        return tensors, self.sizes[tensors]

    def there(self, ops: IntA, tensors: IntA | slice = slice(None)) -> NDArray[np.bool_]:
        """Which of some tensors are alive at some ops. (ops, tensors)"""
        op_index = ops[:, None]
        return np.asarray((self.start[tensors] <= op_index) & (op_index <= self.end[tensors]))

    def alive(self) -> ArrayK:
        """What is alive at each op. (ops, K) [B]"""
        out = self.alive_of(np.arange(len(self.scratch)), np.arange(len(self.sizes)), self.sizes)
        return np.add(out, self.scratch, out=out)

    def alive_of(self, ops: IntA, tensors: IntA, nbytes: ArrayK) -> ArrayK:
        """What is alive of some tensors, of some bytes each (tensors, n), at some ops in order. (ops, n) [B]"""
        alive = np.zeros((len(ops), nbytes.shape[1]))
        begun, gone = np.searchsorted(ops, self.start[tensors]), np.searchsorted(ops, self.end[tensors], "right")
        for row, begin, end in zip(nbytes, begun.tolist(), gone.tolist(), strict=True):
            alive[begin:end] += row
        return alive


def _peaks(joined: _Joined) -> tuple[ArrayK, ArrayK, IntA]:
    """The most alive at one op of each tape, (tapes, K), its kinds, (tapes, len(KINDS), K), and the op of the block."""
    sizes, scratch, bounds, num_k = joined.sizes, joined.scratch, joined.bounds, joined.sizes.shape[1]
    some = np.flatnonzero(np.diff(bounds))  # a tape without ops holds nothing
    most, peak_ops = largest_in_each_part(joined.alive(), bounds[some])
    ops, which = np.unique(peak_ops, return_inverse=True)  # few ops are at the peak of some combination
    alive_kinds = (joined.there(ops)[:, None] & joined.is_kind) @ sizes
    combination = np.arange(num_k)
    num = len(bounds) - 1
    peak, kinds, op = np.zeros((num, num_k)), np.zeros((num, len(KINDS), num_k)), np.zeros((num, num_k), dtype=np.intp)
    peak[some], op[some] = most, peak_ops - np.repeat(bounds[:-1:2], 2)[some, None]
    kinds[some] = alive_kinds[which.reshape(peak_ops.shape), :, combination].swapaxes(1, 2)
    kinds[some, NUMBER["scratch"]] += scratch[peak_ops, combination]
    return peak, kinds, op


def _larger(joined: _Joined, sizes: ArrayK, large: ArrayK) -> tuple[ArrayK, ArrayK, ArrayK]:
    """Of tensors (tensors, K) and scratch larger than each size: what each block keeps, and the most alive beyond it in
    the forward and at all. (blocks, sizes, K) each"""
    at_once = max(len(large), 1) if large.shape[1] < FEW else 1
    saved, ahead, behind = (np.zeros((len(joined.first), *large.shape)) for _ in range(3))
    for first in range(0, len(large), at_once):
        of = slice(first, first + at_once)
        saved[:, of], ahead[:, of], behind[:, of] = _larger_at_once(joined, sizes, large[of])
    return saved, np.maximum(ahead - saved, 0.0), np.maximum(np.maximum(ahead, behind) - saved, 0.0)


def _larger_at_once(joined: _Joined, sizes: ArrayK, large: ArrayK) -> tuple[ArrayK, ArrayK, ArrayK]:
    """Of what is larger than each size: what is kept, the most alive in the forward and in the backward."""

    def larger(some: ArrayK) -> tuple[IntA, ArrayK]:
        """Where any is, and its bytes or 0. (some, sizes * K)"""
        is_larger = some[:, None] > large
        places = np.flatnonzero(is_larger.any(axis=(1, 2)))
        return places, (is_larger[places] * some[places, None]).reshape(-1, large.size)

    tensors, nbytes = larger(sizes)
    ops, scratch = larger(joined.scratch)
    peak_ops = _peak_ops_of(joined, tensors, ops)
    alive = joined.alive_of(peak_ops, tensors, nbytes)
    alive[np.searchsorted(peak_ops, ops)] += scratch
    saved = (joined.of_block & joined.across)[:, tensors].astype(float) @ nbytes
    bounds = np.searchsorted(peak_ops, joined.bounds)
    tapes = np.flatnonzero(np.diff(bounds))
    most = np.zeros((len(bounds) - 1, large.size))
    most[tapes] = np.maximum.reduceat(alive, bounds[tapes])
    shape = -1, *large.shape
    return saved.reshape(shape), most[::2].reshape(shape), most[1::2].reshape(shape)


def _peak_ops_of(joined: _Joined, tensors: IntA, ops: IntA) -> IntA:
    """These ops and those at which most of some tensors is alive: before one goes, if any came since one went."""
    born, dies = np.zeros((2, len(joined.scratch)), dtype=bool)
    tapes = np.flatnonzero(np.diff(joined.bounds))
    born[joined.start[tensors]] = born[joined.bounds[tapes]] = True
    dies[joined.end[tensors]] = dies[joined.bounds[tapes + 1] - 1] = True
    ends = np.flatnonzero(dies)
    come = np.cumsum(born)[ends]
    more = np.zeros(len(born), dtype=bool)
    more[ends[np.diff(come, prepend=0) > 0]] = more[ops] = True
    return np.flatnonzero(more)


def _pool_slack(joined: _Joined, i: int, block: BlockLifetimes, peak_op: IntA) -> tuple[ArrayK, ArrayK]:
    """Memory is pooled per stream: what each stream held at its own peak stays reserved for it. (K,) [B]

    Of the ``i``-th block, beyond what is alive at ``peak_op``, (K,): of streams of communication at their peaks, of the
    computing stream at that of its backward. And the peaks of all but the computing stream. (K,) [B]
    """
    pools = [np.array(pool, dtype=np.intp) for pool in block.pools.values() if pool]
    total, others = np.zeros((2, joined.sizes.shape[1]))
    if not pools:
        return total, others
    at_peak, begin, end = np.arange(len(total)), int(joined.bounds[2 * i]), int(joined.bounds[2 * i + 2])
    ops = np.arange(begin, end)
    computing = joined.alive_of(ops, *joined.tensors_of(i)) + joined.scratch[begin:end]
    for pool in pools:
        tensors = joined.first[i] + pool
        alive = joined.alive_of(ops, tensors, joined.sizes[tensors])
        others += alive.max(axis=0)
        total -= alive[peak_op, at_peak]
        computing -= alive
    own = computing[block.first_backward_op :].max(axis=0) - computing[peak_op, at_peak]
    return total + others + own, others


def _nothing(num_k: int, num_sizes: int) -> BlockMemory:
    """Of a block that allocates nothing."""
    zero, kinds, op = np.zeros(num_k), np.zeros((len(KINDS), num_k)), np.zeros(num_k, dtype=np.intp)
    large = np.zeros((num_sizes, num_k))
    return BlockMemory(
        saved=zero, saved_kinds=kinds, saved_slack=zero, largest=zero, large_tensors_saved=large,
        large_tensors_forward=large, large_tensors_peak=large, freed_before_last_weight=zero, pool_slack=zero,
        other_pools=zero, forward_peak=zero, forward_kinds=kinds, forward_op=op, backward_peak=zero,
        backward_kinds=kinds, backward_op=op,
    )  # fmt: skip


def nccl_freed_bytes_and_launches(block: BlockTapes, num_k: int) -> ArrayK:
    """Bytes that NCCL's stream uses and that a forward and a backward let go, then launches of both. (4, K) [B], [-]"""
    launches = [
        stack_rows([where(op.present, op.launches, 0.0) for op in tape.ops] or [0.0], num_k).sum(axis=0)
        for tape in (block.forward, block.backward)
    ]
    return np.array([*_given_up(block, num_k, lambda tensor: tensor.recorded_on_nccl_stream), *launches])


def watchdog_held_bytes(block: BlockTapes, num_k: int) -> ArrayK:
    """Bytes that a forward and a backward leave to the watchdog (:mod:`mofa.cost.allocations.watchdog`). (2, K) [B]"""
    return np.array(_given_up(block, num_k, lambda tensor: tensor.held_by_watchdog))


def _given_up(block: BlockTapes, num_k: int, which: Callable[[Tensor], BoolK]) -> list[ArrayK]:
    """Bytes of some tensors whose lives end in a forward, and in a backward. (K,), (K,) [B]

    Pieces of one tensor's life follow on each other: it is given up once, where the last of a candidate's ends.
    """
    lifetimes, tensors = block.lifetimes, {**block.forward.tensors, **block.backward.tensors}
    by_owner: dict[str, list[FloatK]] = {}
    for interval in lifetimes.intervals:
        asked = which(tensors[interval.owner])
        if any_true(asked):
            by_pass = by_owner.setdefault(interval.owner, [0.0, 0.0])
            is_backward = int(interval.end >= lifetimes.first_backward_op)
            by_pass[is_backward] = maximum(by_pass[is_backward], where(asked, interval.bytes, 0.0))
    forward: list[FloatK] = [0.0, *(where(back > 0, 0.0, ahead) for ahead, back in by_owner.values())]
    backward: list[FloatK] = [0.0, *(back for _, back in by_owner.values())]
    return [stack_rows(some, num_k).sum(axis=0) for some in (forward, backward)]


def allocator_rounded_bytes(nbytes: ArrayK) -> ArrayK:
    """Size of the block that PyTorch's CUDA caching allocator gives for a request. [B]

    Requests are rounded to 512 B; those of 10 MiB and more are cut from segments rounded to 2 MiB.

    Examples
    --------
    >>> [int(b) for b in allocator_rounded_bytes(np.array([0.0, 1.0, 11 * 2.0**20 + 1]))]
    [0, 512, 12582912]
    """
    unit = np.where(nbytes >= 10 * 2.0**20, 2.0**21, 512.0)
    return np.ceil(nbytes / unit) * unit
