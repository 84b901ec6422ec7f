"""torchtitan's rotary embeddings: what they multiply, hold while they run, and keep of their tables."""

from __future__ import annotations

from mofa.blocks.context import ArrayK, Context
from mofa.blocks.elementwise import any_true, where
from mofa.blocks.frameworks.torchtitan.heads import (
    num_ranks_whose_heads_each_rank_norms,
    repeat_kv,
    split_heads_over_ranks,
)
from mofa.blocks.frameworks.torchtitan.linear import (
    CAST,
    compiles_modules_separately,
    has_local_qkv,
    is_in_compiled_block,
)
from mofa.blocks.op import READS, WRITES, FloatK, Op, OpBackward, ScratchSequence, TapeBuilder
from mofa.blocks.recomputation import OUTSIDE
from mofa.blocks.work import MemoryBound


def rope(b: TapeBuilder, ctx: Context, q: str, k: str) -> tuple[str, str]:
    """Rotary embedding of q and k together; keeps nothing of their size.

    By cosines (qwen3/model/model.py), in units of a tensor's bytes: times cosine 2, a half negated 1, the halves joined
    2, times sine 2, their sum 3. Backward: two products 4; of the halves' gradients one negated and two copied 3, into
    two zeroed tensors 2; the additions of what came by either half and by the cosine 6.
    """
    a = ctx.model.attention
    ranks = num_ranks_whose_heads_each_rank_norms(ctx) if a.qk_norm else 1.0
    sizes = tuple((ctx.tokens * heads * a.d_qk * ranks) for heads in (ctx.heads, ctx.kv_heads))
    out_q, out_k = (
        b.tensor(f"{n}.rope", s * ctx.activation_element_bytes) for n, s in zip("qk", sizes, strict=True)
    )  # fmt: skip
    total = sizes[0] + sizes[1]
    order = None
    if has_local_qkv(ctx):
        work, back, scratch, launches = complex_rotation_work_and_backward(ctx, total, sizes[0])
        positions = 4.0 * a.d_qk * ctx.seq_len / ctx.cp
        if ctx.activation_element_bytes == 2 and not (
            is_in_compiled_block(b, ctx) or compiles_modules_separately(b, ctx)
        ):
            back = back._replace(scratch=6.0 * sizes[0] + 2.0 * sizes[1] + positions,
                                 order=complex_rotation_back_scratch(sizes[0], sizes[1], positions))  # fmt: skip
        table = _table(b, ctx, ctx.tokens * a.d_qk * 4.0)
        if is_in_compiled_block(b, ctx) or compiles_modules_separately(b, ctx):
            launches = 5
    else:
        table = _table(
            b, ctx, ctx.tokens * a.d_qk * 2.0 * ctx.activation_element_bytes, table_elements=ctx.seq_len * 2.0 * a.d_qk
        )
        e = ctx.activation_element_bytes
        if is_in_compiled_block(b, ctx) or compiles_modules_separately(b, ctx):  # inside the head norms' kernels
            work, back, scratch, launches = MemoryBound(0.0 * total), OpBackward(0.0, 0), 0.0 * total, 0
        else:
            each = (e * sizes[0], e * sizes[1])
            work, back, scratch, launches = (
                MemoryBound(10.0 * e * total, "rope_heads_fwd"),
                OpBackward(15.0 * e * total, 18, 2.0 * each[0], like="rope_heads_bwd",
                order=half_rotation_back_scratch(*each)), 2.0 * each[0], 10,
            )  # fmt: skip
            order = half_rotation_scratch(*each)
    b.add(Op("rope", "memory_bound", work, (q, k, *table), (out_q, out_k), table, scratch=scratch, launches=launches,
             back=back, order=order, step="rope"))  # fmt: skip
    out_k = repeat_kv(b, ctx, out_k, "k", ranks, a.d_qk)
    if any_true(ranks > 1.0):
        key_heads = ctx.heads if ctx.framework.repeats_keys else ctx.kv_heads
        out_q = split_heads_over_ranks(b, ctx, out_q, "q", ctx.heads, a.d_qk)
        out_k = split_heads_over_ranks(b, ctx, out_k, "k", key_heads, a.d_qk)
    return out_q, out_k


def complex_rotation_back_scratch(q: FloatK, k: FloatK, positions: FloatK) -> ScratchSequence:
    """Scratch of the backward: keys and queries in fp32, both times what turns them back, of which a conjugate is made
    each time, and cast."""
    sizes = (4.0 * k, 4.0 * q, positions, 4.0 * k, positions, 4.0 * q)
    return ScratchSequence(sizes, (0, READS + 1, 1, READS, 2, 3, ~2, ~0, 4, 5, ~4, ~1, WRITES + 1, ~3, WRITES, ~5))


def half_rotation_scratch(q: FloatK, k: FloatK) -> ScratchSequence:
    """Scratch of Qwen3's rotation, of queries and then of keys: by cosine, halves turned, joined, by sine, their
    sum."""
    sizes = (q, 0.5 * q, q, q, k, 0.5 * k, k, k)
    return ScratchSequence(sizes, (0, 1, 2, ~1, 3, ~2, WRITES, ~0, ~3, 4, 5, 6, ~5, 7, ~6, WRITES + 1, ~4, ~7))


def half_rotation_back_scratch(q: FloatK, k: FloatK) -> ScratchSequence:
    """Scratch of its backward, keys first: the gradient by sine, its halves turned into their places, added in place;
    by cosine, added too."""
    keys = (0, 1, WRITES + 1, ~1, 2, ~0, ~2, 3, READS + 1, ~3)
    steps = (*keys, 4, 5, WRITES, ~5, 6, ~4, ~6, 7, READS, ~7)
    return ScratchSequence((k, 0.5 * k, k, k, q, 0.5 * q, q, q), steps)


def complex_rotation_work_and_backward(
    ctx: Context, total: ArrayK, largest: ArrayK
) -> tuple[MemoryBound, OpBackward, ArrayK, int]:
    """Casts to fp32, complex products, casts back: work, backward, scratch forward, kernels for q and k."""
    if ctx.activation_element_bytes == 4:
        return MemoryBound(8.0 * total, "mul"), OpBackward(8.0 * total, 4, like="mul"), 0.0 * total, 2
    moved, like, width = (2.0 * CAST + 8.0) * total, "rope_complex", float(ctx.model.hidden)
    back = OpBackward(moved, 8, 8.0 * largest, like=like, elements=total, width=width)
    return MemoryBound(moved, like, total, width), back, 8.0 * total, 6


def _table(b: TapeBuilder, ctx: Context, rows_bytes: ArrayK, table_elements: float = 0.0) -> tuple[str, ...]:
    """What the rotation keeps of its tables: rows picked for cp's positions; Qwen3's cast to the compute dtype.

    FSDP casts the table that every block is called with, outside of the checkpoint; other modes cast it inside.
    """
    names = []
    if table_elements and ctx.activation_element_bytes == 2:
        outside = ctx.precision_mode == "mixed"
        name = b.tensor("rope_table", table_elements * 2.0, grad=False)
        b.add(Op("fsdp.rope_table" if outside else "rope_table", "memory_bound", MemoryBound(CAST * table_elements), (),
                 (name,), launches=1 if outside else 2, region=OUTSIDE if outside else "", step="rope",
                 part="fsdp" if outside else ""))  # fmt: skip
        names.append(name)
    if any_true(ctx.cp > 1):
        splits_rows = ctx.cp > 1
        name = b.tensor("rope_rows", where(splits_rows, rows_bytes, 0.0), grad=False)
        b.add(
            Op(
                "rope_rows",
                "memory_bound",
                MemoryBound(2.0 * rows_bytes),
                (),
                (name,),
                present=splits_rows,
                step="rope",
            )
        )
        names.append(name)
    return tuple(names)
