"""Tensor-parallel communication beside the products that need it: Transformer Engine's user buffers.

Transformer Engine gathers a linear's input piece by piece in a ring of the tensor-parallel ranks: the product of one
piece runs while the next arrives. It reduces and scatters the pieces of a result as they are made
(common/comm_gemm_overlap/comm_gemm_overlap.cpp: ``split_overlap_ag``, ``split_overlap_rs``). Backward, the gather and
the reduction around a column-parallel linear run beside its other product, with and without user buffers.
"""

from __future__ import annotations

from dataclasses import replace

from mofa.blocks.context import ArrayK, Context
from mofa.blocks.elementwise import where
from mofa.blocks.op import Op, Tape, Tensor
from mofa.blocks.work import Collective, Gemm

SPLITS = 4
"""Pieces of a product whose result is reduced as it is made: ``num_splits`` of every ``PipelineOverlapCfg`` in NeMo's
recipes/tp_overlap_configs/userbuffers.py. [-]"""
BUFFERS = 10
"""User buffers of a model, one of (tokens, hidden) per product of a layer that communicates, shared by all layers: the
fields of ``TransformerLayerTPOverlapCfg``, ibid. [-]"""


def user_buffer_bytes(ctx: Context) -> ArrayK:
    """Bytes of the user buffers, which stay, beside PyTorch's allocator. [B]

    Transformer Engine asks CUDA for them itself (2.20.2, common/comm_gemm_overlap/userbuffers/userbuffers-host.cpp,
    ``register_user_buffer_collective`` with ``alloc``).
    """
    if not ctx.framework.tp_overlap:
        return 0.0
    return where(
        ctx.gathers_sequence, BUFFERS * ctx.tokens * float(ctx.model.hidden) * ctx.activation_element_bytes, 0.0
    )


def with_tp_overlap(tape: Tape, ctx: Context) -> Tape:
    """The tape with its tensor-parallel gathers and reductions beside their products, where the framework does so.

    What is gathered, and what is to be reduced, lives in the user buffers: it allocates nothing of its own.
    """
    if not ctx.framework.tp_overlap:
        return tape
    tensors = dict(tape.tensors)
    ops = _reduced_in_pieces(_gathered_in_pieces(list(tape.ops), ctx, tensors), tensors)
    for op in tape.ops:
        if _communicates(op, "all_gather"):
            _in_buffer(tensors, op.writes[0], op)
        elif _communicates(op, "reduce_scatter"):
            _in_buffer(tensors, op.reads[0], op)
    return replace(tape, ops=tuple(ops), tensors=tensors)


def _communicates(op: Op, kind: str) -> bool:
    work = op.work
    return isinstance(work, Collective) and work.group == "tp" and work.kind == kind


def _in_buffer(tensors: dict[str, Tensor], name: str, op: Op) -> None:
    tensors[name] = tensors[name]._replace(bytes=where(op.present, 0.0, tensors[name].bytes))


def _gathered_in_pieces(ops: list[Op], ctx: Context, tensors: dict[str, Tensor]) -> list[Op]:
    """A product right behind the gather of its input begins with the piece that is there; the next op awaits both.

    It awaits a tensor of no bytes beside the gathered one, which would keep the piece where nothing is gathered.
    """
    out = list(ops)
    for i, gather in enumerate(ops[:-2]):
        product = ops[i + 1]
        if not _communicates(gather, "all_gather") or not isinstance(product.work, Gemm):
            continue
        (full,), (shard,) = gather.writes, gather.reads
        if full not in product.reads:
            continue
        reads = tuple(shard if name == full else name for name in product.reads)
        out[i + 1] = _in_pieces(product, gather, ctx.tp)._replace(reads=reads)
        there = f"{full}.there"
        tensors[there] = Tensor(there, 0.0, "buffer", grad=False)
        out[i] = gather._replace(writes=(full, there))
        then = ops[i + 2]
        out[i + 2] = then._replace(reads=(*then.reads, there))
    return out


def _reduced_in_pieces(ops: list[Op], tensors: dict[str, Tensor]) -> list[Op]:
    """A reduction right behind a product: all pieces but the last are under way while the product runs."""
    out: list[Op] = []
    for op in ops:
        product = out[-1] if out else None
        if (
            product is None
            or not _communicates(op, "reduce_scatter")
            or not isinstance(product.work, Gemm)
            or op.reads[0] not in product.writes
        ):
            out.append(op)
            continue
        assert isinstance(op.work, Collective)
        early = f"{op.name}.early"
        tensors[early] = Tensor(early, 0.0, "buffer", grad=False)
        last = op.work.payload / SPLITS
        sent = op.work._replace(payload=op.work.payload - last)
        out[-1:] = [
            op._replace(name=early, work=sent, reads=product.reads[:1], writes=(early,), saves=(), back=None),
            _in_pieces(product, op, SPLITS),
            op._replace(work=op.work._replace(payload=last), reads=(*op.reads, early)),
        ]
    return out


def _in_pieces(product: Op, beside: Op, pieces: ArrayK) -> Op:
    """The product in pieces of its rows, on several streams at once, where the collective runs at all."""
    work = product.work
    assert isinstance(work, Gemm)
    count = where(beside.present, pieces, 1.0)
    return product._replace(
        work=replace(work, m=work.m / count, count=work.count * count), launches=product.launches * count
    )
