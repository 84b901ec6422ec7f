"""Memory of a block with deferred weight gradients: what waits for them, and what is alive while they are made.

Beside :mod:`mofa.cost.block.liveness`, which has the passes of other schedules. What autograd had saved in the forward
stays until the backward by weights, whatever read it last, as the nodes that saved it do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.build import BlockTapes
from mofa.blocks.elementwise import stack_rows, where
from mofa.blocks.lifetimes import BlockLifetimes
from mofa.blocks.op import KINDS, Tape

ArrayK = NDArray[np.float64]


@dataclass(frozen=True)
class Deferred:
    """Bytes of one block and one micro-batch, (K,); by kind (len(KINDS), K). [B]

    A backward by inputs leaves ``between_halves`` for that by weights, beside what the forward saved. ``before`` is the
    most alive in the former, saved tensors included. ``peak`` and ``kinds`` are the most alive in the latter, both
    included; ``peak_of_last`` is the same of a chunk's last block, with no weight behind it. ``left`` stays until the
    whole chunk's backward by weights is through.
    """

    between_halves: ArrayK
    before: ArrayK
    left: ArrayK
    peak: ArrayK
    kinds: ArrayK
    peak_of_last: ArrayK


def deferred(block: BlockTapes, num_k: int) -> Deferred:
    """What deferred weight gradients of a block keep alive."""
    halves = block.split_backward
    memory = _alive(block.forward, halves.inputs, halves.weights, num_k)
    if halves.weights_of_last is halves.weights:
        return memory
    return replace(memory, peak_of_last=_alive(block.forward, halves.inputs, halves.weights_of_last, num_k).peak)


def _alive(forward: Tape, inputs: Tape, weights: Tape, num_k: int) -> Deferred:
    """Of a backward's two halves, one after the other."""
    # what the backward by inputs hands on is the next block's; nothing is added to a gradient that is held
    halves = [op._replace(view=False) if op.role == "sum" else op for op in inputs.ops]
    lifetimes = BlockLifetimes.from_tapes(forward, Tape((*halves, *weights.ops), weights.tensors, inputs.inputs, ()))
    weights_begin = lifetimes.boundary + len(inputs.ops)
    ops = lifetimes.ops[lifetimes.boundary :]
    if weights_begin == len(lifetimes.ops):
        nothing = np.zeros(num_k)
        return Deferred(nothing, nothing, nothing, nothing, np.zeros((len(KINDS), num_k)), nothing)
    intervals = [interval for interval in lifetimes.intervals if interval.end >= lifetimes.boundary]
    sizes = stack_rows([interval.bytes for interval in intervals], num_k) if intervals else np.zeros((0, num_k))
    fields = ("start", "end", "since", "kind")
    start, end, since, kind = (np.array([getattr(each, name) for each in intervals], dtype=int) for name in fields)
    saved = (since < lifetimes.boundary) & (start <= lifetimes.boundary)
    staying = [n for n, interval in enumerate(intervals) if saved[n] and interval.end < weights_begin]
    rest = np.zeros((len(staying), num_k))
    for more, n in zip(rest, staying, strict=True):
        # a life may be cut into pieces that some candidates lack: it stays where none reaches the backward by weights
        owner, end_of_n = intervals[n].owner, intervals[n].end
        later = [m for m, interval in enumerate(intervals) if interval.owner == owner and interval.start > end_of_n]
        stays = np.all(sizes[[m for m in later if intervals[m].end >= weights_begin]] == 0.0, axis=0)
        more[:] = np.where(stays, sizes[n], 0.0)
        sizes[later] = np.where(stays, 0.0, sizes[later])
    sizes = np.concatenate([sizes, rest])
    start, end = np.append(start, end[staying] + 1), np.append(end, np.full(len(staying), len(lifetimes.ops) - 1))
    since, kind = np.append(since, since[staying]), np.append(kind, kind[staying])
    op_index = np.arange(lifetimes.boundary, len(lifetimes.ops))[:, None]
    there = (start <= op_index) & (op_index <= end)
    scratch = stack_rows(
        [op.scratch if op.present is True else where(op.present, op.scratch, 0.0) for op in ops], num_k
    )
    alive = there.astype(float) @ sizes + scratch
    behind = weights_begin - lifetimes.boundary
    most = behind + alive[behind:].argmax(axis=0)
    kinds = np.array([
        [(there[op] * (kind == of)) @ sizes[:, k] for k, op in enumerate(most)] for of in range(len(KINDS))
    ])  # fmt: skip
    kinds[KINDS.index("scratch")] += scratch[most, np.arange(num_k)]
    waits = (since >= lifetimes.boundary) & (since < weights_begin) & (start <= weights_begin) & (end >= weights_begin)
    peak = alive[behind:].max(axis=0)
    before = alive[:behind].max(axis=0) if behind else np.zeros(num_k)
    return Deferred(waits @ sizes, before, there[-1] @ sizes, peak, kinds, peak)
