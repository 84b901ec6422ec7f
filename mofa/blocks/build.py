"""The blocks of a model as tapes: each described once, over one framework's primitives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mofa.blocks.backward import NO_RECOMPUTE, Recompute, backward
from mofa.blocks.context import ArrayK, Context, Primitives
from mofa.blocks.op import Tape, TapeBuilder
from mofa.specs.model import ModelSpec
from mofa.specs.params import layer_params


@dataclass(frozen=True)
class BlockKind:
    """One kind of layer: dense or with experts, full or windowed attention."""

    moe: bool
    windowed: bool = False

    @property
    def name(self) -> str:
        return ("moe" if self.moe else "dense") + ("_windowed" if self.windowed else "")


def block_kinds(model: ModelSpec) -> tuple[BlockKind, ...]:
    """The kinds of layer of a model, in order of first appearance."""
    return tuple(dict.fromkeys(layer_kind(model, i) for i in range(model.num_layers)))


def layer_kind(model: ModelSpec, layer: int) -> BlockKind:
    """The kind of the layer with this index, from 0."""
    return BlockKind(model.is_moe_layer(layer), model.is_windowed_layer(layer))


@dataclass(frozen=True)
class BlockTapes:
    """Forward and backward of one block under one recomputation."""

    name: str
    forward: Tape
    backward: Tape


def rank_params(ctx: Context, moe: bool) -> tuple[ArrayK, ArrayK]:
    """Parameters of one layer on one rank before data parallelism shards them: dense, routed experts. [params]"""
    layer = layer_params(ctx.model, moe)
    dense = (layer.matrices_tp + layer.shared) / ctx.tp + layer.replicated
    return dense, layer.routed / (ctx.ep * ctx.etp)


def attention_half(b: TapeBuilder, ctx: Context, p: Primitives, x: str, windowed: bool) -> str:
    """Norm, attention, residual."""
    a, hidden = ctx.model.attention, float(ctx.model.hidden)
    h = p.norm(b, ctx, x, "attn_norm", hidden)
    if a.kind == "mla":
        q, k, v = p.mla(b, ctx, h)
    else:
        q, k, v = p.qkv(b, ctx, h)
        if a.qk_norm:
            q = p.head_norm(b, ctx, q, "q_norm", ctx.heads, a.d_qk)
            k = p.head_norm(b, ctx, k, "k_norm", ctx.kv_heads, a.d_qk)
        if ctx.model.positions == "rope":
            q, k = p.rope(b, ctx, q, k)
    out = p.attend(b, ctx, q, k, v, windowed)
    y = p.row_linear(b, ctx, out, "proj", hidden, ctx.heads * a.d_v)
    return p.residual(b, ctx, x, y, "mid")


def block(ctx: Context, p: Primitives, kind: BlockKind, recompute: Recompute = NO_RECOMPUTE) -> BlockTapes:
    """One transformer layer, forward and backward."""
    b = TapeBuilder()
    hidden = float(ctx.model.hidden)
    x = b.tensor("x", ctx.shard * hidden * ctx.residual)
    p.wrap_block(b, ctx, kind.name, *rank_params(ctx, kind.moe))
    mid = attention_half(b, ctx, p, x, kind.windowed)
    h = p.norm(b, ctx, mid, "mlp_norm", hidden)
    y = p.moe(b, ctx, h) if kind.moe else p.mlp(b, ctx, h, "mlp", float(ctx.model.mlp.ffn_hidden or 0))
    out = p.residual(b, ctx, mid, y, "out")
    forward = b.tape((x,), (out,))
    return BlockTapes(kind.name, forward, backward(forward, recompute))


def embedding(ctx: Context, p: Primitives) -> BlockTapes:
    """Token embedding, with the position embedding where it is learned."""
    b = TapeBuilder()
    out = p.embedding(b, ctx)
    forward = b.tape((), (out,))
    return BlockTapes("embedding", forward, backward(forward))


def head(ctx: Context, p: Primitives) -> BlockTapes:
    """Final norm, output layer, loss."""
    b = TapeBuilder()
    x = b.tensor("x", ctx.shard * float(ctx.model.hidden) * ctx.residual)
    loss = p.head(b, ctx, x)
    forward = b.tape((x,), (loss,))
    return BlockTapes("head", forward, backward(forward))


