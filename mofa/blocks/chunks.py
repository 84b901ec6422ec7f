"""Dispatch, experts and combine in token chunks, one after the other and each recomputed in the backward pass: a
transform of a layer's forward tape (MemFine's FCDA, arXiv 2511.21431, section 4.1)."""

from __future__ import annotations

from dataclasses import replace

from mofa.blocks.elementwise import FloatK
from mofa.blocks.op import BackwardPreparation, Op, OpBackward, Tape, Tensor
from mofa.blocks.roles import RoutingStep
from mofa.blocks.work import Attention, Collective, Gemm, GroupedGemm, HostSync, MemoryBound, Work

CHUNK = "token_chunk"
"""Regions of chunks begin with this: each is a checkpoint of its own, whatever else is recomputed."""


FIRST: tuple[RoutingStep, ...] = ("count", "permute")
"""What a chunk begins with, the first of these that a layer has. It ends where rows are added to their tokens."""


FRAMES = ("moe", "routed experts", "experts")
"""Functions of a layer of experts whose local variables are marked."""


def without_module_locals(forward: Tape) -> Tape:
    """A layer's forward tape without the marks of the local variables of the expert layer's functions.

    Such marks (:func:`mofa.blocks.parts.hold_in_module`) keep tensors alive until a function returns. In token chunks
    other functions move the tokens through the experts, as they were measured, and nothing is held so long.
    """
    ops = tuple(op for op in forward.ops if op.frame not in FRAMES)
    return replace(forward, ops=ops)


def split_into_token_chunks(forward: Tape, chunks: int, *, overlap: bool = False) -> Tape:
    """The forward tape with the way of the tokens through the experts in so many chunks.

    Parameters
    ----------
    forward
        A layer's forward tape; one without experts stays as it is.
    chunks
        Chunks of equal tokens. [-]
    overlap
        Whether the next chunk is dispatched while the experts compute on this one.

    Notes
    -----
    The input is split by views. Every chunk runs the same ops on ``1 / chunks`` of the rows and bytes; the outputs are
    concatenated, which copies them. The gradients of the chunks' inputs are concatenated likewise.

    A chunk's ops are a region of their own, which the derived backward recomputes right before it needs it: dispatch
    and combine again, one chunk's tensors at a time. So a layer needs ``A + B / chunks`` of memory, as one chunk of the
    experts' is left. It takes the time of ``chunks`` smaller products and exchanges, of the forward again and of its
    two exchanges.

    Chunks are taken as equally uneven: the tokens of each fall on experts as those of all do. They need a choice of a
    kernel for as many of their numbers of rows as undivided micro-batches do
    (:mod:`mofa.cost.kernels.kernel_selection`), though theirs lie closer.

    With ``overlap`` the next chunk is permuted and dispatched before this one's experts: its exchange runs beside them,
    and two chunks are alive. In the backward the host waits for each repeated dispatch's counts, which leaves less to
    overlap.

    Examples
    --------
    >>> split_into_token_chunks(Tape((), {}, (), ()), 4).ops
    ()
    """
    if chunks < 2 or all(op.routing not in FIRST for op in forward.ops):
        return forward
    forward = without_module_locals(forward)
    steps = [op.routing for op in forward.ops]
    start, end = min(steps.index(step) for step in FIRST if step in steps), steps.index("unpermute")
    body = forward.ops[start : end + 1]
    prepared = [
        preparation
        for op in body
        if op.backward_preparation is not None
        for preparation in op.backward_preparation.ops()
    ]
    made = {name for op in (*body, *prepared) for name in op.writes}
    outside = tuple(dict.fromkeys(r for op in body for r in (*op.reads, *op.saves) if r not in made))
    (result,) = body[-1].writes
    assert not any(r in made for op in forward.ops[end + 1 :] for r in (*op.reads, *op.saves) if r != result)
    tensors = dict(forward.tensors)
    ops: list[Op] = list(forward.ops[:start])
    for name in outside:
        ops.append(_split(tensors, name, chunks))
    pieces = []
    for i in range(chunks):
        for name in made:
            tensors[_part(name, i)] = _portion(tensors[name], _part(name, i), chunks)
        pieces.append(_called_anew([_of_chunk(op, i, chunks, made | set(outside)) for op in body]))
    # with overlap, a chunk's ops up to the last that dispatches are issued before the experts of the chunk before
    ahead = max((n + 1 for n, op in enumerate(body) if op.routing == "dispatch"), default=0) if overlap else 0
    ops += pieces[0][:ahead]
    for i, piece in enumerate(pieces):
        ops += [*(pieces[i + 1][:ahead] if i + 1 < chunks else []), *piece[ahead:]]
    parts = tuple(_part(result, i) for i in range(chunks))
    moved = 2.0 * tensors[result].bytes
    ops.append(Op("moe.concat", "memory_bound", MemoryBound(moved, "copy"), parts, (result,), region=body[0].region))
    ops += forward.ops[end + 1 :]
    return replace(forward, ops=tuple(ops), tensors=tensors)


def _part(name: str, i: int) -> str:
    return f"{name}#{i}"


def _portion(tensor: Tensor, name: str, chunks: int) -> Tensor:
    grad = None if tensor.grad_bytes is None else tensor.grad_bytes / chunks
    return tensor._replace(name=name, bytes=tensor.bytes / chunks, grad_bytes=grad)


def _split(tensors: dict[str, Tensor], name: str, chunks: int) -> Op:
    """Views of a tensor, whose gradients are concatenated."""
    full = tensors[name]
    parts = tuple(_part(name, i) for i in range(chunks))
    for part in parts:
        tensors[part] = _portion(full, part, chunks)
    back = OpBackward(2.0 * full.bytes, 1, like="copy")
    return Op(f"moe.split {name}", "memory_bound", None, (name,), parts, view=True, launches=0, back=back, region="moe")


def _called_anew(piece: list[Op]) -> list[Op]:
    """The ops of a chunk, whose modules are called for it alone."""
    calls = {id(op.module_call): op.module_call for op in piece}
    anew = {name: None if call is None else replace(call) for name, call in calls.items()}
    return [op._replace(module_call=anew[id(op.module_call)]) for op in piece]


def _of_chunk(op: Op, i: int, chunks: int, split: set[str]) -> Op:
    """An op of the body on one chunk."""

    def names(group: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_part(n, i) if n in split else n for n in group)

    return op._replace(
        name=_part(op.name, i), work=_smaller(op.work, chunks), reads=names(op.reads), writes=names(op.writes),
        saves=names(op.saves), scratch=op.scratch / chunks, region=f"{CHUNK}{i}", back=_smaller_back(op.back, chunks),
        backward_preparation=_of_chunk_prepared(op.backward_preparation, i, chunks, split),
    )  # fmt: skip


def _of_chunk_prepared(
    prepared: BackwardPreparation | None, i: int, chunks: int, split: set[str]
) -> BackwardPreparation | None:
    if prepared is None:
        return None
    gradient, before_dgrad, after_dgrad = (
        tuple(_of_chunk(op, i, chunks, split)._replace(region=op.region) for op in ops)
        for ops in (prepared.gradient, prepared.before_dgrad, prepared.after_dgrad)
    )
    names = (_part(n, i) if n in split else n for n in (prepared.dgrad, prepared.wgrad, prepared.input))
    dgrad, wgrad, source = names
    return BackwardPreparation(gradient, dgrad, wgrad, before_dgrad, after_dgrad, source)


def _smaller_back(back: OpBackward | None, chunks: int) -> OpBackward | None:
    if back is None:
        return None
    return back._replace(
        bytes=back.bytes / chunks, scratch=back.scratch / chunks, work=_smaller(back.work, chunks),
        elements=back.elements / chunks, source=back.source / chunks,
    )  # fmt: skip


def _smaller(work: Work | None, chunks: int) -> Work | None:
    """The same work on a part of the rows."""
    part: FloatK = 1.0 / chunks
    if isinstance(work, GroupedGemm):
        return replace(work, rows=work.rows * part)
    if isinstance(work, MemoryBound):
        return work._replace(bytes=work.bytes * part, elements=work.elements * part, source=work.source * part)
    if isinstance(work, Collective):
        return work._replace(payload=work.payload * part)
    if isinstance(work, Gemm):
        return replace(work, m=work.m * part)
    assert work is None or (isinstance(work, HostSync) and not isinstance(work, Attention))
    return work
