"""Megatron-Core's rotary embedding of eager kernels (models/common/embeddings/rope_utils.py)."""

from __future__ import annotations

from mofa.blocks.context import Context
from mofa.blocks.op import WRITES, FloatK, Op, OpBackward, ScratchSequence, TapeBuilder
from mofa.blocks.parts import hold_in_module
from mofa.blocks.work import MemoryBound


def unfused_rope_of_tensor(
    b: TapeBuilder, ctx: Context, x: str, name: str, nbytes: FloatK, rope_dim: float, *, pairs: bool
) -> str:
    """Unfused rotary embedding: 6 kernels over x and 6 over the table, cosine and sine kept (rope_utils.py:94-133).

    Over x, in units of its bytes: times cosine 2, negate half 1, concatenate 2, times sine 2, add 3, concatenate 2.
    Three tensors of its size are alive at the add. Backward, a node of autograd's each: two products 4, a half negated
    1, the halves back together 2, the sum 3. Zeros for what is not turned, which is nothing, and their addition take 4
    (mc1-qwen06b-host-bound-traced, mc2-tp2-llama-6l-traced: seven kernels each, of 119 and 38 us for queries and keys
    of 17 and 4 MB).

    ``pairs`` first joins the even and the odd elements; backward each half goes back into zeros and the two are added:
    zeros 2, halves 2, the sum 3 (mc1-dsv2lite-8l-16e: 13 and 12 kernels, of 303 and 348 us for queries of 34 MB).
    """
    out = b.tensor(f"{name}.rope", nbytes)
    table = ctx.seq_len / ctx.cp * rope_dim
    cos, sin = (
        b.tensor(f"{name}.{which}", table * ctx.activation_element_bytes, grad=False) for which in ("cos", "sin")
    )
    if pairs:
        halves = b.tensor(f"{name}.halves", nbytes)
        back = OpBackward(7.0 * nbytes, 5, like="rope_half", autograd_nodes=3.0)
        x = b.add(
            Op(f"{name}.pairs", "memory_bound", MemoryBound(2.0 * nbytes, "join_heads"), (x,), (halves,), back=back)
        )
    moved = 12.0 * nbytes + 2 * (8.0 + 8.0 + 6.0) * table
    b.add(
        Op(f"{name}.rope", "memory_bound", MemoryBound(moved, "rope_half"), (x,), (out, cos, sin), (cos, sin),
           scratch=2.0 * nbytes, launches=12, order=None if pairs else _forward(nbytes, 4.0 * table),
           back=OpBackward(14.0 * nbytes, 7, 2.5 * nbytes, like="rope_half", autograd_nodes=7.0,
                     order=None if pairs else _backward(nbytes)))
    )  # fmt: skip
    return out


def _forward(x: FloatK, table: FloatK) -> ScratchSequence:
    """Cosine of the table's angles in fp32, scaled, cast, the same of sine; then x by cosine, its halves turned and
    joined, by sine, their sum, and what is turned joined with what is not."""
    sizes = (table, table, table, table, x, 0.5 * x, x, x, x)
    out, cos, sin = WRITES, WRITES + 1, WRITES + 2
    angles = (0, 1, ~0, cos, ~1, 2, 3, ~2, sin, ~3)
    return ScratchSequence(sizes, (*angles, 4, 5, 6, ~5, 7, ~6, 8, ~4, ~7, out, ~8))


def _backward(x: FloatK) -> ScratchSequence:
    """The gradient by sine, a half turned, both joined; by cosine, added in place; zeros for what is not turned."""
    return ScratchSequence((x, 0.5 * x, x, x), (0, 1, 2, ~0, ~1, 3, ~3, WRITES, ~2))


def unfused_rope(b: TapeBuilder, ctx: Context, q: str, k: str) -> tuple[str, str]:
    """Queries and keys turned by eager kernels; those before stay too until attention returns (attention.py)."""
    d = float(ctx.model.attention.d_qk)
    turned = (
        unfused_rope_of_tensor(b, ctx, q, "q", b.tensors[q].bytes, d, pairs=False),
        unfused_rope_of_tensor(b, ctx, k, "k", b.tensors[k].bytes, d, pairs=False),
    )
    for x in (q, k, *turned):
        hold_in_module(b, "attention", x)
    return turned
