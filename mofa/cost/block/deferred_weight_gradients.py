"""Memory of a block with deferred weight gradients: what waits for them, and what is alive while they are made.

Beside :mod:`mofa.cost.block.liveness`, which has the passes of other schedules. What autograd had saved in the forward
stays until the backward by weights, whatever read it last, as the nodes that saved it do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.build import BlockTapes
from mofa.blocks.elementwise import stacked, where
from mofa.blocks.lifetimes import BlockLifetimes
from mofa.blocks.op import KINDS, Tape

ArrayK = NDArray[np.float64]


@dataclass(frozen=True)
class Deferred:
    """Bytes of one block and one micro-batch, (K,); by kind (len(KINDS), K). [B]

    ``between_halves`` is what a backward by inputs leaves for that by weights beside what was saved, ``before`` the
    most alive in it, what was saved counted. ``peak`` and ``kinds`` are the most alive in the latter, both counted,
    ``peak_of_last`` the same of a chunk's last block, with no weight behind it; ``left`` is what stays of all that
    until the whole chunk's is through.
    """

    between_halves: ArrayK
    before: ArrayK
    left: ArrayK
    peak: ArrayK
    kinds: ArrayK
    peak_of_last: ArrayK


def deferred(block: BlockTapes, num_k: int) -> Deferred:
    """Of a block."""
    halves = block.split_backward
    found = _alive(block.forward, halves.inputs, halves.weights, num_k)
    if halves.weights_of_last is halves.weights:
        return found
    return replace(found, peak_of_last=_alive(block.forward, halves.inputs, halves.weights_of_last, num_k).peak)


def _alive(forward: Tape, inputs: Tape, weights: Tape, num_k: int) -> Deferred:
    """Of a backward's two halves, one after the other."""
    # what the backward by inputs hands on is the next block's; nothing is added to a gradient that is held
    halves = [op._replace(view=False) if op.role == "sum" else op for op in inputs.ops]
    lives = BlockLifetimes.of(forward, Tape((*halves, *weights.ops), weights.tensors, inputs.inputs, ()))
    late = lives.boundary + len(inputs.ops)
    ops = lives.ops[lives.boundary :]
    if late == len(lives.ops):
        nothing = np.zeros(num_k)
        return Deferred(nothing, nothing, nothing, nothing, np.zeros((len(KINDS), num_k)), nothing)
    found = [f for f in lives.intervals if f.end >= lives.boundary]
    sizes = stacked([f.bytes for f in found], num_k) if found else np.zeros((0, num_k))
    start, end, since = (np.array([getattr(f, name) for f in found], dtype=int) for name in ("start", "end", "since"))
    saved = (since < lives.boundary) & (start <= lives.boundary)
    kind = np.array([f.kind for f in found], dtype=int)
    staying = [n for n, f in enumerate(found) if saved[n] and f.end < late]
    rest = np.zeros((len(staying), num_k))
    for more, n in zip(rest, staying, strict=True):
        # a life may be cut into pieces that some candidates lack: it stays where none reaches the backward by weights
        later = [m for m, f in enumerate(found) if f.owner == found[n].owner and f.start > found[n].end]
        stays = np.all(sizes[[m for m in later if found[m].end >= late]] == 0.0, axis=0)
        more[:] = np.where(stays, sizes[n], 0.0)
        sizes[later] = np.where(stays, 0.0, sizes[later])
    sizes = np.concatenate([sizes, rest])
    start, end = np.append(start, end[staying] + 1), np.append(end, np.full(len(staying), len(lives.ops) - 1))
    since, kind = np.append(since, since[staying]), np.append(kind, kind[staying])
    at = np.arange(lives.boundary, len(lives.ops))[:, None]
    there = (start <= at) & (at <= end)
    scratch = stacked([op.scratch if op.present is True else where(op.present, op.scratch, 0.0) for op in ops], num_k)
    alive = there.astype(float) @ sizes + scratch
    behind = late - lives.boundary
    most = behind + alive[behind:].argmax(axis=0)
    kinds = np.array([
        [(there[op] * (kind == of)) @ sizes[:, k] for k, op in enumerate(most)] for of in range(len(KINDS))
    ])  # fmt: skip
    kinds[KINDS.index("scratch")] += scratch[most, np.arange(num_k)]
    waits = (since >= lives.boundary) & (since < late) & (start <= late) & (end >= late)
    peak = alive[behind:].max(axis=0)
    before = alive[:behind].max(axis=0) if behind else np.zeros(num_k)
    return Deferred(waits @ sizes, before, there[-1] @ sizes, peak, kinds, peak)
