"""Megatron-Core's rotary embedding of eager kernels (models/common/embeddings/rope_utils.py)."""

from __future__ import annotations

from mofa.blocks.context import Context
from mofa.blocks.op import Back, FloatK, Op, Stream, TapeBuilder


def turn(b: TapeBuilder, ctx: Context, x: str, name: str, nbytes: FloatK, rope_dim: float, *, pairs: bool) -> str:
    """Unfused rotary embedding: 6 kernels over x and 6 over the table, cosine and sine kept (rope_utils.py:94-133).

    Over x, in units of its bytes: times cosine 2, negate half 1, concatenate 2, times sine 2, add 3, concatenate 2;
    ``pairs`` first gathers even and odd elements, 2 more. Three tensors of its size are alive at the add. Backward, a
    node of autograd's each: two products 4, a half negated 1, the halves back together 2, the sum 3, and zeros for
    what is not turned, which is nothing, with their addition 4 (mc1-qwen06b-host-bound-traced, mc2-tp2-llama-6l-traced:
    seven kernels each, of 119 and 38 us for queries and keys of 17 and 4 MB).
    """
    out = b.tensor(f"{name}.rope", nbytes)
    table = ctx.seq_len / ctx.cp * rope_dim
    trig = b.tensor(f"{name}.trig", 2.0 * table * ctx.element, grad=False)
    extra = 2.0 if pairs else 0.0
    moved = (12.0 + extra) * nbytes + 2 * (8.0 + 8.0 + 6.0) * table
    b.add(
        Op(f"{name}.rope", "memory_bound", Stream(moved, "rope_half"), (x,), (out, trig), (trig,),
           scratch=(2.0 + extra / 2) * nbytes, launches=13 if pairs else 12,
           back=Back((14.0 + extra) * nbytes, 8 if pairs else 7, 2.5 * nbytes, like="rope_half",
                     nodes=8.0 if pairs else 7.0))
    )  # fmt: skip
    return out


def unfused_rope(b: TapeBuilder, ctx: Context, q: str, k: str) -> tuple[str, str]:
    """Queries and keys turned by eager kernels."""
    d = float(ctx.model.attention.d_qk)
    return (
        turn(b, ctx, q, "q", b.tensors[q].bytes, d, pairs=False),
        turn(b, ctx, k, "k", b.tensors[k].bytes, d, pairs=False),
    )
