"""Memory of a block: which tensors are alive at each op of its forward and backward tape, and the peaks.

A tensor lives from the op that writes it to the last op that reads it; what a backward op reads has therefore been
kept. A view has no bytes of its own and keeps its source alive. The two tapes are joined, so that a tensor kept by two
ops counts once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.backward import WEIGHT_ENDS
from mofa.blocks.build import BlockTapes
from mofa.blocks.elementwise import BoolK, FloatK, anywhere, everywhere, first_largest, stacked, where
from mofa.blocks.op import KINDS, Op, Tensor

ArrayK = NDArray[np.float64]
FEW = 64
"""Combinations up to which tensors of several sizes are looked at in one go. [-]"""
NUMBER = {kind: i for i, kind in enumerate(KINDS)}
"""The place of each kind among :data:`mofa.blocks.op.KINDS`."""


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
    large_saved: ArrayK
    large_forward: ArrayK
    large_peak: ArrayK
    """Of the computing stream's tensors larger than each of the sizes given: what is kept, and the most alive in the
    forward and at all beyond what is kept. (sizes, K) [B]"""
    held: ArrayK
    """What a backward by inputs alone leaves for the weights' gradients beside what was kept. [B]"""
    above: ArrayK
    """Of what was kept, what the backward reads only before it comes to the last weight. [B]"""
    pool_slack: ArrayK
    """Peaks of other streams' memory pools beyond what is alive of them at the block's peak. [B]"""
    forward_peak: ArrayK
    forward_kinds: ArrayK
    forward_op: NDArray[np.intp]
    backward_peak: ArrayK
    backward_kinds: ArrayK
    backward_op: NDArray[np.intp]

    def then(self, block: BlockMemory) -> BlockMemory:
        """This block and one behind it as one: the other runs forward and backward while this one's is kept."""
        forward = self.saved + block.forward_peak
        backward = self.saved + block.backward_peak
        later_f, later_b = forward >= self.forward_peak, backward >= self.backward_peak
        return BlockMemory(
            saved=self.saved + block.saved,
            saved_kinds=self.saved_kinds + block.saved_kinds,
            saved_slack=self.saved_slack + block.saved_slack,
            largest=np.maximum(self.largest, block.largest),
            large_saved=self.large_saved + block.large_saved,
            large_forward=np.maximum(self.large_forward, block.large_forward),
            large_peak=np.maximum(self.large_peak, block.large_peak),
            held=self.held + block.held,
            above=block.above,
            pool_slack=np.maximum(self.pool_slack, block.pool_slack),
            forward_peak=np.maximum(forward, self.forward_peak),
            forward_kinds=np.where(later_f, self.saved_kinds + block.forward_kinds, self.forward_kinds),
            forward_op=np.where(later_f, block.forward_op, self.forward_op),
            backward_peak=np.maximum(backward, self.backward_peak),
            backward_kinds=np.where(later_b, self.saved_kinds + block.backward_kinds, self.backward_kinds),
            backward_op=np.where(later_b, block.backward_op, self.backward_op),
        )


class _Interval(NamedTuple):
    tensor: str
    kind: int
    start: int
    end: int
    bytes: FloatK


_Extension = tuple[int, BoolK, str]
"""Up to where a view keeps its source alive, for which candidates, and the view."""


class _Lifetimes:
    """Intervals of allocation over the joined op list."""

    def __init__(self, ops: tuple[Op, ...], tensors: dict[str, Tensor]) -> None:
        self.ops, self.tensors = ops, tensors
        self.birth: dict[str, int] = {}
        self.death: dict[str, int] = {}
        for i, op in enumerate(ops):
            for name in op.reads:
                self.death[name] = i
            for name in op.writes:
                self.birth.setdefault(name, i)
                self.death[name] = i

    def intervals(self, starts: dict[str, int], end_of: dict[str, int]) -> list[_Interval]:
        """Every allocation; ``starts`` says from where tensors are alive that no op writes, ``end_of`` sets deaths."""
        shares = self.shares
        death = {**self.death, **end_of}
        extension: dict[str, list[_Extension]] = {}
        # a name that is always a view pushes its death to its source; one that sometimes is, extends it there
        for name in sorted(shares, key=lambda n: -self.birth[n]):
            source, mask = shares[name]
            end = death.get(name, self.birth[name])
            if mask is True:
                death[source] = max(death.get(source, 0), end)
                extension.setdefault(source, []).extend(extension.pop(name, []))
            else:
                extension.setdefault(source, []).append((end, mask, name))
                for later, other, leaf in extension.get(name, []):
                    extension[source].append((later, other & mask, leaf))
        result = []
        for name in {**starts, **self.birth}:
            _, mask = shares.get(name, ("", False))
            if mask is True or (name not in death and name not in starts):
                continue
            start = self.birth[name] if name in self.birth else starts[name]
            tensor, end = self.tensors[name], death.get(name, start)
            own, kind = where(mask, 0.0, tensor.bytes), NUMBER[tensor.kind]
            result.append(_Interval(name, kind, start, end, own))
            if name not in extension:
                continue
            leaves = sorted((item for item in extension[name] if item[0] > end), key=lambda item: item[0])
            for i, (later, _, leaf) in enumerate(leaves):
                if later > end:  # up to here the memory lives on where any leaf does that ends here or later
                    needed: BoolK = False
                    for _, other, _ in leaves[i:]:
                        needed = needed | other
                    result.append(_Interval(leaf, kind, end + 1, later, where(needed, own, 0.0)))
                    end = later
        return result

    @cached_property
    def shares(self) -> dict[str, tuple[str, BoolK]]:
        """Names whose memory is another's, whose, and for which candidates; True where for all."""
        shares: dict[str, tuple[str, BoolK]] = {}
        for op in self.ops:
            mask = op.shares() if op.reads else False
            if mask is False or not anywhere(mask):
                continue
            if everywhere(mask):
                mask = True
            for name in op.writes if everywhere(op.view) else op.writes[:1]:
                if name not in shares:
                    shares[name] = op.reads[0], mask
        return shares


def block_memory(block: BlockTapes, num_k: int, large: ArrayK | None = None) -> BlockMemory:
    """Bytes kept and peaks of one block, tensors above each of the sizes ``large`` (sizes, num_k) also apart."""
    forward, backward = block.forward, block.backward
    ops = forward.ops + backward.ops
    boundary, last = len(forward.ops), len(ops) - 1
    lives = _Lifetimes(ops, {**forward.tensors, **backward.tensors})
    end_of = dict.fromkeys(forward.outputs, boundary - 1)  # the next block owns the output from here on
    end_of.update(dict.fromkeys(backward.outputs, last))
    # gathered buffers go when the next block's weights are copied out, the last block's at the end
    end_of.update((name, boundary - 1) for op in forward.ops if op.name == "fsdp.hold" for name in op.reads)
    starts = {**dict.fromkeys(forward.inputs, 0), **dict.fromkeys(backward.inputs, boundary)}
    found = lives.intervals({name: at for name, at in starts.items() if name in lives.death}, end_of)
    large = np.zeros((0, num_k)) if large is None else large
    if not found:
        return _nothing(num_k, len(large))
    sizes = stacked([f.bytes for f in found], num_k)
    kinds, start, end = (np.array(column) for column in list(zip(*found, strict=True))[1:4])
    at = np.arange(len(ops))[:, None]
    there = ((start <= at) & (at <= end)).astype(float)
    is_kind = (np.arange(len(KINDS))[:, None] == kinds).astype(float)
    scratch = stacked([where(op.present, op.scratch, 0.0) for op in ops], num_k)
    alive = there @ sizes + scratch

    def peak(begin: int, stop: int) -> tuple[ArrayK, ArrayK, NDArray[np.intp]]:
        """The most alive at one op of a tape, its kinds, and the op."""
        if stop == begin:
            return np.zeros(num_k), np.zeros((len(KINDS), num_k)), np.full(num_k, last)
        which = begin + first_largest(alive[begin:stop])
        by_kind = np.zeros((len(KINDS), num_k))
        for op in np.unique(which).tolist():  # few ops are at the peak of some combination
            lives = there[op] > 0
            np.copyto(by_kind, is_kind[:, lives] @ sizes[lives], where=which == op)
        here = which, np.arange(num_k)
        by_kind[NUMBER["scratch"]] += scratch[here]
        return alive[here], by_kind, which

    forward_peak, forward_kinds, forward_op = peak(0, boundary)
    backward_peak, backward_kinds, backward_op = peak(boundary, len(ops))
    across = (start < boundary) & (boundary <= end)
    apart = {w for op in ops if op.stream.startswith("fsdp") for w in op.writes}
    own = np.array([f.tensor not in apart for f in found])
    own_sizes = np.where(own[:, None], sizes, 0.0)
    large_saved, large_forward, large_peak = _larger(own_sizes, scratch, there, across, boundary, large)
    saved_kinds = is_kind[:, across] @ sizes[across]
    return BlockMemory(
        saved=saved_kinds.sum(axis=0),
        saved_kinds=saved_kinds,
        saved_slack=(rounded_bytes(sizes[across]) - sizes[across]).sum(axis=0),
        largest=own_sizes.max(axis=0),
        large_saved=large_saved,
        large_forward=large_forward,
        large_peak=large_peak,
        held=_held(lives, found, sizes, boundary),
        above=_above(lives, found, sizes, boundary),
        pool_slack=_pool_slack(found, ops, there, sizes, backward_op),
        forward_peak=forward_peak, forward_kinds=forward_kinds, forward_op=forward_op,
        backward_peak=backward_peak, backward_kinds=backward_kinds, backward_op=backward_op,
    )  # fmt: skip


def _larger(
    sizes: ArrayK, scratch: ArrayK, there: ArrayK, across: NDArray[np.bool_], boundary: int, large: ArrayK
) -> tuple[ArrayK, ArrayK, ArrayK]:
    """Of tensors (tensors, K) and scratch (ops, K) larger than each size: what is kept, and the most alive beyond it in
    the forward and at all. (sizes, K) each"""
    saved, forward, most = (np.zeros(large.shape) for _ in range(3))
    if not len(large):
        return saved, forward, most
    least = large.min()
    some = np.flatnonzero((sizes > least).any(axis=1))
    sizes, there, across = sizes[some], there[:, some], across[some]
    grows = (scratch > least).any(axis=1)  # else no more is alive than before but where something is born
    grows[0] = True
    grows[1:] |= (there[1:] > there[:-1]).any(axis=1)
    at = np.flatnonzero(grows)
    there, scratch, ahead = there[at], scratch[at], int(np.count_nonzero(at < boundary))
    at_once = len(large) if large.shape[1] < FEW else 1  # of one combination NumPy's calls are all it takes
    for first in range(0, len(large), at_once):
        of = slice(first, first + at_once)
        shape = large[of].shape
        num = shape[0] * shape[1]
        big = np.where(sizes[:, None] > large[of], sizes[:, None], 0.0).reshape(len(some), num)
        alive = there @ big + np.where(scratch[:, None] > large[of], scratch[:, None], 0.0).reshape(len(at), num)
        saved[of] = big[across].sum(axis=0).reshape(shape)
        forward[of] = alive[:ahead].max(axis=0, initial=0.0).reshape(shape) - saved[of]
        most[of] = alive.max(axis=0, initial=0.0).reshape(shape) - saved[of]
    return saved, np.maximum(forward, 0.0), np.maximum(most, 0.0)


def _nothing(num_k: int, num_sizes: int) -> BlockMemory:
    """Of a block that allocates nothing."""
    zero, kinds, op = np.zeros(num_k), np.zeros((len(KINDS), num_k)), np.zeros(num_k, dtype=np.intp)
    large = np.zeros((num_sizes, num_k))
    return BlockMemory(
        saved=zero, saved_kinds=kinds, saved_slack=zero, largest=zero, large_saved=large, large_forward=large,
        large_peak=large, held=zero, above=zero, pool_slack=zero, forward_peak=zero, forward_kinds=kinds,
        forward_op=op, backward_peak=zero, backward_kinds=kinds, backward_op=op,
    )  # fmt: skip


def rounded_bytes(nbytes: ArrayK) -> ArrayK:
    """Size of the block that PyTorch's CUDA caching allocator gives for a request. [B]

    Requests are rounded to 512 B; those of 10 MiB and more are cut from segments rounded to 2 MiB.

    Examples
    --------
    >>> [int(b) for b in rounded_bytes(np.array([0.0, 1.0, 11 * 2.0**20 + 1]))]
    [0, 512, 12582912]
    """
    unit = np.where(nbytes >= 10 * 2.0**20, 2.0**21, 512.0)
    return np.ceil(nbytes / unit) * unit


def _held(lives: _Lifetimes, found: list[_Interval], sizes: ArrayK, boundary: int) -> ArrayK:
    """What the weights' gradients read that the backward by inputs made, or was given. (K,) [B]"""
    sources = {name: source for name, (source, _) in lives.shares.items()}
    late = [op for op in lives.ops[boundary:] if op.name.endswith(WEIGHT_ENDS)]
    own = {name for op in late for name in op.writes}
    needed: set[str] = set()
    for name in (name for op in late for name in op.reads):
        seen: str | None = name
        while seen is not None:  # a view keeps what it is a view of
            needed.add(seen)
            seen = sources.get(seen)
    born = [i for i, f in enumerate(found) if f.start >= boundary and f.tensor in needed and f.tensor not in own]
    return np.asarray(sizes[born].sum(axis=0))


def _above(lives: _Lifetimes, found: list[_Interval], sizes: ArrayK, boundary: int) -> ArrayK:
    """What was kept for ops behind the last weight, the loss most of all. (K,) [B]"""
    products = (i for i, op in enumerate(lives.ops) if i >= boundary and op.name.endswith((".dgrad", *WEIGHT_ENDS)))
    first = next(products, boundary)
    gone = [i for i, f in enumerate(found) if f.start < boundary <= f.end < first]
    return np.asarray(sizes[gone].sum(axis=0))


def _pool_slack(
    found: list[_Interval], ops: tuple[Op, ...], matrix: ArrayK, sizes: ArrayK, at: NDArray[np.intp]
) -> ArrayK:
    """Memory is pooled per stream: what a communication stream held at its own peak stays reserved for it."""
    num_k = sizes.shape[1]
    total = np.zeros(num_k)
    pools = {op.stream for op in ops if op.stream.startswith("fsdp")}
    stream_of = {w: op.stream for op in ops for w in op.writes} if pools else {}
    for name in pools:
        columns = [j for j, f in enumerate(found) if stream_of.get(f.tensor) == name]
        if columns:
            alive = matrix[:, columns] @ sizes[columns]
            total += alive.max(axis=0) - alive[np.minimum(at, len(alive) - 1), np.arange(num_k)]
    return total
