"""Memory of a block: which tensors are alive at each op of its forward and backward tape, and the peaks.

A tensor lives from the op that writes it to the last op that reads it; what a backward op reads has therefore been
kept. A view has no bytes of its own and keeps its source alive. The two tapes are joined, so that a tensor kept by two
ops counts once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.build import BlockTapes
from mofa.blocks.op import KINDS, Op, Tensor

ArrayK = NDArray[np.float64]


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
    """The largest tensor that the block allocates. [B]"""
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
            pool_slack=np.maximum(self.pool_slack, block.pool_slack),
            forward_peak=np.maximum(forward, self.forward_peak),
            forward_kinds=np.where(later_f, self.saved_kinds + block.forward_kinds, self.forward_kinds),
            forward_op=np.where(later_f, block.forward_op, self.forward_op),
            backward_peak=np.maximum(backward, self.backward_peak),
            backward_kinds=np.where(later_b, self.saved_kinds + block.backward_kinds, self.backward_kinds),
            backward_op=np.where(later_b, block.backward_op, self.backward_op),
        )


@dataclass(frozen=True)
class _Interval:
    tensor: str
    kind: int
    start: int
    end: int
    bytes: ArrayK


class _Lifetimes:
    """Intervals of allocation over the joined op list."""

    def __init__(self, ops: tuple[Op, ...], tensors: dict[str, Tensor], num_k: int, boundary: int) -> None:
        self.ops, self.tensors, self.num_k = ops, tensors, num_k
        self.boundary = boundary
        self.birth: dict[str, int] = {}
        self.death: dict[str, int] = {}
        for i, op in enumerate(ops):
            for name in op.reads:
                self.death[name] = i
            for name in op.writes:
                self.birth.setdefault(name, i)
                self.death[name] = max(i, self.death.get(name, i))

    def array(self, value: object) -> ArrayK:
        found = np.asarray(value, dtype=float)
        return found if found.shape == (self.num_k,) else np.broadcast_to(found, (self.num_k,))

    def intervals(self, starts: dict[str, int], end_of: dict[str, int]) -> list[_Interval]:
        """Every allocation; ``starts`` says from where tensors are alive that no op writes, ``end_of`` sets deaths."""
        shares: dict[str, tuple[str, NDArray[np.bool_]]] = {}
        for op in self.ops:
            flag = op.shares()
            if flag is False or not np.any(flag) or not op.reads:
                continue
            mask = np.broadcast_to(np.asarray(flag), (self.num_k,))
            outs = op.writes if np.all(np.asarray(op.view)) else op.writes[:1]
            for w in outs:
                if self.birth.get(w) is not None and w not in shares:
                    shares[w] = (op.reads[0], mask)
        death = {**self.death, **end_of}
        extension: dict[str, list[tuple[int, NDArray[np.bool_], str]]] = {}
        # a name that is always a view pushes its death to its source; one that sometimes is, extends it there
        for name in sorted(shares, key=lambda n: -self.birth[n]):
            source, mask = shares[name]
            end = death.get(name, self.birth[name])
            if np.all(mask):
                death[source] = max(death.get(source, 0), end)
                for item in extension.pop(name, []):
                    extension.setdefault(source, []).append(item)
            else:
                extension.setdefault(source, []).append((end, mask, name))
                for later, other, leaf in extension.get(name, []):
                    extension[source].append((later, other & mask, leaf))
        result = []
        for name in {**starts, **self.birth}:
            always_view = name in shares and bool(np.all(shares[name][1]))
            if always_view or (name not in death and name not in starts):
                continue
            start = self.birth[name] if name in self.birth else starts[name]
            own = self.array(self.tensors[name].bytes)
            if name in shares:
                own = np.where(shares[name][1], 0.0, own)
            kind = KINDS.index(self.tensors[name].kind)
            end = death.get(name, start)
            result.append(_Interval(name, kind, start, end, own))
            leaves = sorted((item for item in extension.get(name, []) if item[0] > end), key=lambda item: item[0])
            for i, (later, _, leaf) in enumerate(leaves):
                if later > end:  # up to here the memory lives on where any leaf does that ends here or later
                    needed = np.any([mask for _, mask, _ in leaves[i:]], axis=0)
                    result.append(_Interval(leaf, kind, end + 1, later, np.where(needed, own, 0.0)))
                    end = later
        return result


def block_memory(block: BlockTapes, num_k: int) -> BlockMemory:
    """Bytes kept and peaks of one block. Arrays of shape (num_k,)."""
    forward, backward = block.forward, block.backward
    ops = forward.ops + backward.ops
    boundary = len(forward.ops)
    tensors = {**forward.tensors, **backward.tensors}
    lives = _Lifetimes(ops, tensors, num_k, boundary)
    end_of: dict[str, int] = {}
    for name in forward.outputs:  # the next block owns the output from here on
        end_of[name] = boundary - 1
    last = len(ops) - 1
    for name in backward.outputs:
        end_of[name] = last
    starts = {**dict.fromkeys(forward.inputs, 0), **dict.fromkeys(backward.inputs, boundary)}
    found = lives.intervals({name: at for name, at in starts.items() if name in lives.death}, end_of)
    num_ops = len(ops)
    matrix = np.zeros((num_ops + 1, len(found)))
    kinds = np.array([f.kind for f in found])
    for j, f in enumerate(found):
        matrix[f.start : f.end + 1, j] = 1.0
    sizes = np.stack([f.bytes for f in found]) if found else np.zeros((0, num_k))
    scratch = np.stack(
        [np.where(op.present, np.asarray(op.scratch, dtype=float), 0.0) * np.ones(num_k) for op in ops]
        or [np.zeros(num_k)]
    )
    alive = matrix[:num_ops] @ sizes + scratch[:num_ops]
    by_kind = np.zeros((len(KINDS), num_ops, num_k))
    for index in range(len(KINDS)):
        columns = kinds == index
        if np.any(columns):
            by_kind[index] = matrix[:num_ops, columns] @ sizes[columns]
    by_kind[KINDS.index("scratch")] += scratch[:num_ops]
    across = np.array([f.start < boundary <= f.end for f in found], dtype=bool)
    saved_kinds = np.zeros((len(KINDS), num_k))
    for index in range(len(KINDS)):
        columns = across & (kinds == index)
        if np.any(columns):
            saved_kinds[index] = sizes[columns].sum(axis=0)
    slack = np.zeros(num_k)
    for f, keeps in zip(found, across, strict=True):
        if keeps:
            slack = slack + rounded_bytes(f.bytes) - f.bytes
    columns_k = np.arange(num_k)
    f_op = np.argmax(alive[:boundary], axis=0) if boundary else np.zeros(num_k, dtype=np.intp)
    b_op = np.argmax(alive[boundary:], axis=0) + boundary if num_ops > boundary else np.full(num_k, max(num_ops - 1, 0))
    zero = np.zeros(num_k)
    return BlockMemory(
        saved=saved_kinds.sum(axis=0),
        saved_kinds=saved_kinds,
        saved_slack=slack,
        largest=np.max(sizes, axis=0) if len(sizes) else zero,
        pool_slack=_pool_slack(found, ops, matrix[:num_ops], sizes, b_op),
        forward_peak=alive[f_op, columns_k] if num_ops else zero,
        forward_kinds=by_kind[:, f_op, columns_k] if num_ops else saved_kinds * 0,
        forward_op=f_op,
        backward_peak=alive[b_op, columns_k] if num_ops > boundary else zero,
        backward_kinds=by_kind[:, b_op, columns_k] if num_ops > boundary else saved_kinds * 0,
        backward_op=b_op,
    )


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


def _pool_slack(
    found: list[_Interval], ops: tuple[Op, ...], matrix: ArrayK, sizes: ArrayK, at: NDArray[np.intp]
) -> ArrayK:
    """Memory is pooled per stream: what a communication stream held at its own peak stays reserved for it."""
    stream_of = {w: op.stream for op in ops for w in op.writes}
    num_k = sizes.shape[1]
    total = np.zeros(num_k)
    for name in {s for s in stream_of.values() if s.startswith("fsdp")}:
        columns = [j for j, f in enumerate(found) if stream_of.get(f.tensor) == name]
        if columns:
            alive = matrix[:, columns] @ sizes[columns]
            total += alive.max(axis=0) - alive[np.minimum(at, len(alive) - 1), np.arange(num_k)]
    return total
