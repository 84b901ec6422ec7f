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
from mofa.cost.block.liveness import BLOCK_GRADIENTS, bytes_freed_as_gradients_are_made

ArrayK = NDArray[np.float64]


@dataclass(frozen=True)
class SplitBackwardMemory:
    """Bytes of one block and one micro-batch, (K,); by kind (len(KINDS), K). [B]

    A backward by inputs leaves ``between_halves`` for that by weights, beside what the forward saved.
    ``peak_by_inputs`` is the most alive in the former, saved tensors included. ``peak_by_weights`` and
    ``peak_by_weights_kinds`` are the most alive in the latter, both included; ``peak_by_weights_of_last`` is the same
    of a chunk's last block, with no weight behind it. ``end_by_weights_kinds`` are alive as a step's first has made its
    gradients, without these, ``end_by_weights_of_last`` the same of a chunk's last block. ``left_until_chunk_end``
    stays until the whole chunk's backward by weights is through.
    """

    between_halves: ArrayK
    peak_by_inputs: ArrayK
    left_until_chunk_end: ArrayK
    peak_by_weights: ArrayK
    peak_by_weights_kinds: ArrayK
    peak_by_weights_of_last: ArrayK
    end_by_weights_kinds: ArrayK
    end_by_weights_of_last: ArrayK


def split_backward_memory(block: BlockTapes, num_k: int) -> SplitBackwardMemory:
    """What deferred weight gradients of a block keep alive."""
    halves = block.split_backward
    memory = _alive(block.forward, halves.by_inputs, halves.by_weights, num_k)
    if halves.by_weights_of_last_block is halves.by_weights:
        return memory
    of_last = _alive(block.forward, halves.by_inputs, halves.by_weights_of_last_block, num_k)
    return replace(
        memory, peak_by_weights_of_last=of_last.peak_by_weights, end_by_weights_of_last=of_last.end_by_weights_of_last
    )


def _alive(forward: Tape, inputs: Tape, weights: Tape, num_k: int) -> SplitBackwardMemory:
    """Of a backward's two halves, one after the other."""
    # what the backward by inputs hands on is the next block's; nothing is added to a gradient that is held
    halves = [op._replace(view=False) if op.role == "sum" else op for op in inputs.ops]
    lifetimes = BlockLifetimes.from_tapes(forward, Tape((*halves, *weights.ops), weights.tensors, inputs.inputs, ()))
    weights_begin = lifetimes.first_backward_op + len(inputs.ops)
    ops = lifetimes.ops[lifetimes.first_backward_op :]
    if weights_begin == len(lifetimes.ops):
        nothing = np.zeros(num_k)
        no_kinds = np.zeros((len(KINDS), num_k))
        return SplitBackwardMemory(nothing, nothing, nothing, nothing, no_kinds, nothing, no_kinds, nothing)
    intervals = [interval for interval in lifetimes.intervals if interval.end >= lifetimes.first_backward_op]
    sizes = stack_rows([interval.bytes for interval in intervals], num_k) if intervals else np.zeros((0, num_k))
    fields = ("start", "end", "since", "kind")
    start, end, since, kind = (np.array([getattr(each, name) for each in intervals], dtype=int) for name in fields)
    saved = (since < lifetimes.first_backward_op) & (start <= lifetimes.first_backward_op)
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
    op_index = np.arange(lifetimes.first_backward_op, len(lifetimes.ops))[:, None]
    there = (start <= op_index) & (op_index <= end)
    scratch = stack_rows(
        [op.scratch if op.present is True else where(op.present, op.scratch, 0.0) for op in ops], num_k
    )
    alive = there.astype(float) @ sizes + scratch
    behind = weights_begin - lifetimes.first_backward_op
    most = behind + alive[behind:].argmax(axis=0)
    kinds = np.array([
        [(there[op] * (kind == of)) @ sizes[:, k] for k, op in enumerate(most)] for of in range(len(KINDS))
    ])  # fmt: skip
    kinds[KINDS.index("scratch")] += scratch[most, np.arange(num_k)]
    made = next((n for n, op in enumerate(ops) if n >= behind and op.name == BLOCK_GRADIENTS), len(ops) - 1)
    end_kinds = np.array([(there[made] * (kind == of)) @ sizes for of in range(len(KINDS))])
    end_kinds[KINDS.index("scratch")] += scratch[made]
    end_kinds[KINDS.index("grad")] -= bytes_freed_as_gradients_are_made(
        lifetimes.first_backward_op + made, intervals, sizes,
        {name: tensor.weight for name, tensor in weights.tensors.items()}, forward.ops,
    )  # fmt: skip
    waits = (
        (since >= lifetimes.first_backward_op)
        & (since < weights_begin)
        & (start <= weights_begin)
        & (end >= weights_begin)
    )
    peak = alive[behind:].max(axis=0)
    before = alive[:behind].max(axis=0) if behind else np.zeros(num_k)
    left, end = there[-1] @ sizes, end_kinds.sum(axis=0)
    return SplitBackwardMemory(waits @ sizes, before, left, peak, kinds, peak, end_kinds, end)
