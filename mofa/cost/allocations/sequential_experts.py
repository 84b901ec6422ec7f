"""Allocations of experts that run one after the other: a block for each expert's rows in place of one for all.

What an expert's product, activation and output take is let go or kept before the next expert's come, in the sizes of
its own tokens: holes are filled by many small blocks, and torn by them, as one block for all would never show.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from mofa.blocks.op import KINDS
from mofa.cost.allocations.block_trace import BlockTrace, NewTensor, OpTrace

COPY = KINDS.index("weight_copy")


def unroll_sequential_experts(trace: BlockTrace, shares: Sequence[float] = ()) -> BlockTrace:
    """A trace with its experts one after the other; the same where none run in turn.

    Parameters
    ----------
    shares
        What each of the rank's experts gets of its rows; equal where absent. Sums to 1. [-]

    Notes
    -----
    Forward, and where that is done again, every expert's product, activation and second product come one after the
    other (megatron_core/transformer/moe/experts.py, ``SequentialMLP.forward``). Backward autograd runs what came last
    first: all of the last expert, then the one before it. What all experts share goes with the last of them.

    Examples
    --------
    >>> from mofa.cost.allocations.block_trace import BlockTrace, NewTensor, OpTrace
    >>> up = OpTrace("fc1", (NewTensor("h", 12, 0, 0),), expert_loops=2)
    >>> down = OpTrace("fc2", (NewTensor("y", 4, 0, 0),), free=("h", "x"), expert_loops=2)
    >>> cat = OpTrace("cat", (NewTensor("out", 4, 0, 0),), free=("y",))
    >>> one = BlockTrace("moe", (up, down, cat), (), "out", "", "", frozenset(), ())
    >>> for op_trace in unroll_sequential_experts(one, [0.75, 0.25]).forward:
    ...     print(op_trace.op, *(f"{item.name} {item.bytes}" for item in op_trace.new), "free", *op_trace.free)
    fc1 h#0 9 free
    fc2 y#0 3 free h#0
    fc1 h#1 3 free
    fc2 y#1 1 free h#1 x
    cat out 4 free y#0 y#1
    """
    op_traces = (*trace.forward, *trace.backward)
    num = max((op_trace.expert_loops for op_trace in op_traces), default=0)
    if num < 2:
        return trace
    each = list(shares) or [1.0 / num] * num
    cut = {
        item.name
        for op_trace in op_traces
        if op_trace.expert_loops > 1 and not op_trace.weight
        for item in op_trace.new
    }
    return replace(
        trace, forward=tuple(_all(trace.forward, each, cut)), backward=tuple(_all(trace.backward, each, cut))
    )


def _all(op_traces: Sequence[OpTrace], shares: Sequence[float], cut: set[str]) -> Iterator[OpTrace]:
    for (loop, again), group in groupby(op_traces, lambda op_trace: (op_trace.expert_loops > 1, op_trace.repeated)):
        loop_body = list(group)
        if not loop:
            yield from (_all_experts(op_trace, len(shares), cut) for op_trace in loop_body)
            continue
        back = not again and any(op_trace.weight for op_trace in loop_body)
        order = range(len(shares))[:: -1 if back else 1]
        freed = {name for op_trace in loop_body for name in op_trace.free}
        each = cut | {
            item.name for op_trace in loop_body if op_trace.weight for item in op_trace.new if item.name in freed
        }
        for expert in order:
            shared, first = expert == order[-1], expert == order[0]
            for op_trace in loop_body:
                of_expert = _of_one(op_trace, expert, shares, cut, each, shared=shared)
                of_expert = of_expert if first else of_expert._replace(persistent=())
                yield _of_sum(of_expert, op_trace, first=first) if op_trace.role == "whole" else of_expert


def _all_experts(op_trace: OpTrace, num: int, cut: set[str]) -> OpTrace:
    """An op outside the loop, which lets go or reads all experts' blocks."""

    def names(group: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(n for name in group for n in ([f"{name}#{j}" for j in range(num)] if name in cut else [name]))

    if cut.isdisjoint((*op_trace.free, *op_trace.hold, *op_trace.reads)):
        return op_trace
    order = tuple(
        step for step in op_trace.order if not (isinstance(step, str) and step[:1] == "-" and step[1:] in cut)
    )
    return op_trace._replace(
        free=names(op_trace.free), hold=names(op_trace.hold), reads=names(op_trace.reads), order=order
    )


def _of_sum(of_expert: OpTrace, total: OpTrace, *, first: bool) -> OpTrace:
    """A gradient of all experts' weight, of which the ``first`` one's is the sum, and later ones' are added to it."""
    return of_expert._replace(new=total.new if first else (), scratch=() if first else total.scratch)


def _of_one(
    op_trace: OpTrace, expert: int, shares: Sequence[float], cut: set[str], each: set[str], *, shared: bool
) -> OpTrace:  # fmt: skip
    """An op of the loop for one expert, in which ``each`` comes or goes, and what is ``shared``. A weight's gradient is
    one expert's already; copies of weights are as large for each."""

    def name_of(name: str) -> str:
        return f"{name}#{expert}" if name.removeprefix("-") in cut else name

    def sized(items: tuple[NewTensor, ...]) -> tuple[NewTensor, ...]:
        if op_trace.weight:
            return tuple(item for item in items if shared or item.name in each)
        return tuple(
            NewTensor(name_of(item.name), int(item.bytes / len(shares)), item.stream, item.kind, item.expert)
            if item.kind == COPY
            else NewTensor(name_of(item.name), int(item.bytes * shares[expert]), item.stream, item.kind, expert)
            for item in items
        )

    return op_trace._replace(
        new=sized(op_trace.new), scratch=sized(op_trace.scratch),
        free=tuple(name_of(name) for name in op_trace.free if shared or name in each),
        order=tuple(name_of(step) if isinstance(step, str) else step for step in op_trace.order),
        reads=tuple(name_of(name) for name in op_trace.reads), grads=tuple(name_of(name) for name in op_trace.grads),
    )  # fmt: skip
