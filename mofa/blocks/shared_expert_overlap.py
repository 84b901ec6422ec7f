"""Shared experts beside the exchanges of routed ones' tokens: a transform of a layer's tapes.

Megatron-Core 0.16.1 with ``moe_shared_expert_overlap`` runs shared experts on a stream of their own: the first product
with its activation beside the dispatch, the second beside the combine (transformer/moe/token_dispatcher.py,
``dispatch_postprocess`` and ``combine_postprocess``). Backward, exchanges go first, as their nodes have the highest
sequence numbers (shared_experts.py, ``set_tensor_grad_fn_sequence_sr``). What that stream computes takes the device
from the other: here its ops are on the computing stream, right behind the exchange that they run beside.
"""

from __future__ import annotations

from dataclasses import replace

from mofa.blocks.op import SHARED_EXPERT_STREAM, Op, Tape
from mofa.blocks.work import Gemm

REGION = "moe.shared"
"""The region of shared experts' ops in a forward."""


def with_shared_expert_overlap(forward: Tape) -> Tape:
    """A layer's forward tape with its shared experts beside its exchanges; without either it stays as it is.

    The first product keeps what was gathered over tensor parallelism, as plain linears do (``parallel_mode`` is None).

    Examples
    --------
    >>> with_shared_expert_overlap(Tape((), {}, (), ())).ops
    ()
    """
    halves = _halves(forward)
    if not _is_exchanged(forward) or not halves[0]:
        return forward
    first, second = ([_on_own_stream(op) for op in half] for half in halves)
    names = {op.name for half in halves for op in half}
    return replace(forward, ops=_behind_exchanges(forward, names, first, second, "dispatch", "combine"))


def with_shared_expert_overlap_backward(forward: Tape, backward: Tape) -> Tape:
    """The backward tape of a transformed forward tape: the second product's part behind the combine's gradient, the
    first one's behind the dispatch's."""
    halves = _halves(forward)
    if not _is_exchanged(forward) or not halves[0]:
        return backward
    made: set[str] = set()
    second, first = (_backward_of(half, backward, made) for half in reversed(halves))
    names = {op.name for half in (first, second) for op in half}
    return replace(backward, ops=_behind_exchanges(backward, names, second, first, "combine", "dispatch"))


def _is_exchanged(forward: Tape) -> bool:
    return any(op.routing == "dispatch" for op in forward.ops)


def _halves(forward: Tape) -> tuple[list[Op], list[Op]]:
    """Shared experts' ops ahead of their second product, and the others."""
    shared = [op for op in forward.ops if op.region == REGION]
    products = [i for i, op in enumerate(shared) if isinstance(op.work, Gemm) and op.weight]
    return (shared[: products[1]], shared[products[1] :]) if len(products) > 1 else ([], [])


def _on_own_stream(op: Op) -> Op:
    if op.stream != "compute" or op.work is None:
        return op
    saves = (op.reads[0], *op.saves[1:]) if op.regather else op.saves
    return op._replace(pool=SHARED_EXPERT_STREAM, saves=saves, regather=())


def _backward_of(half: list[Op], backward: Tape, made: set[str]) -> list[Op]:
    """The ops of a backward that differentiate some of the forward's, and those that pass on or sum what they make.

    Adds to ``made`` what they write, which may be read by those of the next half.
    """
    names = {op.name for op in half}
    out = []
    for op in backward.ops:
        own = op.origin in names or ((op.work is None or op.role == "sum") and op.reads and made.issuperset(op.reads))
        if own and not made.issuperset(op.writes or ("",)):
            out.append(op._replace(pool=SHARED_EXPERT_STREAM) if op.stream == "compute" and op.work is not None else op)
            made.update(op.writes)
    return out


def _behind_exchanges(
    tape: Tape, names: set[str], after_first: list[Op], after_second: list[Op], first: str, second: str
) -> tuple[Op, ...]:
    """A tape's ops with some taken out, and put behind the ``first`` exchange and the ``second``."""
    rest = [op for op in tape.ops if op.name not in names]
    last = {step: max(i for i, op in enumerate(rest) if op.routing == step) for step in (first, second)}
    a, b = last[first] + 1, last[second] + 1
    return (*rest[:a], *after_first, *rest[a:b], *after_second, *rest[b:])
