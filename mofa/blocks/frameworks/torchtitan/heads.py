"""What torchtitan's attention did to heads before 0.2.2: norms over all of them on every rank, keys copied for queries.

Read in pytorch/torchtitan (models/qwen3). Until pull request 1870 (14 October 2025) ``q_norm`` and ``k_norm`` were
``NoParallel``: their input is gathered, and all that follows runs whole on every rank up to attention, whose values are
split. Until pull request 2259 (27 January 2026) ``repeat_kv`` copied keys and values.
"""

from __future__ import annotations

from dataclasses import replace

from mofa.blocks.context import ArrayK, Context
from mofa.blocks.elementwise import FloatK, any_true
from mofa.blocks.op import Op, OpBackward, TapeBuilder
from mofa.blocks.work import Collective, MemoryBound


def num_ranks_whose_heads_each_rank_norms(ctx: Context) -> FloatK:
    """Tensor-parallel ranks whose queries and keys a rank norms and turns: its own alone, or all. [-]"""
    return 1.0 if ctx.framework.shards_head_norms else ctx.tp


def gather_heads(b: TapeBuilder, ctx: Context, x: str, name: str, heads: ArrayK, width: float) -> str:
    """All ranks' heads, in order; each keeps its own of the gradient."""
    present = ctx.has_tp
    if ctx.framework.shards_head_norms or not any_true(present):
        return x
    moved = ctx.tokens * heads * ctx.tp * width * ctx.activation_element_bytes
    parts, all_heads = b.tensor(f"{name}.gathered", moved), b.tensor(f"{name}.whole", moved)
    own = OpBackward(work=MemoryBound(2.0 * moved / ctx.tp, "copy"), family="memory_bound", present=present)
    work = Collective("all_gather", "tp", moved)
    b.add(Op(f"{name}.all_gather", "tp", work, (x,), (parts,), present=present, stream="tp", back=own))
    order = OpBackward(work=MemoryBound(0.0 * moved), family="memory_bound", launches=0, view=True)
    ordered = Op(
        f"{name}.order", "memory_bound", MemoryBound(2.0 * moved, "copy"), (parts,), (all_heads,), present=present
    )
    return b.add(ordered._replace(back=order))


def split_heads_over_ranks(b: TapeBuilder, ctx: Context, x: str, name: str, heads: ArrayK, width: float) -> str:
    """A rank's part of all heads, as attention's values are split; their gradients are gathered and put in order."""
    present = ctx.has_tp
    if ctx.framework.shards_head_norms or not any_true(present):
        return x
    moved = ctx.tokens * heads * ctx.tp * width * ctx.activation_element_bytes
    all_heads, own = b.tensor(f"{name}.all_heads", moved), b.tensor(f"{name}.own_heads", moved / ctx.tp)
    order = OpBackward(work=MemoryBound(2.0 * moved, "copy"), family="memory_bound", present=present)
    b.add(Op(f"{name}.all_heads", "memory_bound", None, (x,), (all_heads,), view=True, launches=0, back=order))
    back = OpBackward(work=Collective("all_gather", "tp", moved), family="tp", present=present, stream="tp")
    work = MemoryBound(2.0 * moved / ctx.tp, "copy")
    return b.add(Op(f"{name}.own_heads", "memory_bound", work, (all_heads,), (own,), present=present, back=back))


def repeat_kv(b: TapeBuilder, ctx: Context, x: str, name: str, ranks: FloatK, width: float) -> str:
    """Keys or values copied for every query head, of so many ranks; back their gradients are summed (``repeat_kv``)."""
    a = ctx.model.attention
    if not ctx.framework.repeats_keys or a.num_kv_heads == a.num_heads:
        return x
    few, many = (
        ctx.tokens * heads * ranks * width * ctx.activation_element_bytes for heads in (ctx.kv_heads, ctx.heads)
    )
    out = b.tensor(f"{name}.repeated", many)
    back = OpBackward(few + many, 1, like="copy")
    return b.add(Op(f"{name}.repeat", "memory_bound", MemoryBound(few + many, "copy"), (x,), (out,), back=back))


def context_with_repeated_keys(ctx: Context) -> Context:
    """The context of attention itself, which then has as many keys as queries."""
    a = ctx.model.attention
    if not ctx.framework.repeats_keys or a.num_kv_heads == a.num_heads:
        return ctx
    attention = a.model_copy(update={"num_kv_heads": a.num_heads})
    return replace(ctx, model=ctx.model.model_copy(update={"attention": attention}))
