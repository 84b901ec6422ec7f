"""Attention of Megatron's own layers: PyTorch's scaled dot product, or products with a softmax between."""

from __future__ import annotations

from mofa.blocks.context import ArrayK, Context
from mofa.blocks.op import READS, WRITES, Op, OpBackward, ScratchSequence, TapeBuilder
from mofa.blocks.parts import (
    attention_backward_scratch_bytes,
    hold_in_module,
    memory_bound_op,
    release_module_locals,
    soft_cap,
)
from mofa.blocks.work import Attention, Gemm, MemoryBound


def attend(b: TapeBuilder, ctx: Context, q: str, k: str, v: str, windowed: bool) -> str:
    """The core attention module: PyTorch's SDPA in its place, or the unfused one."""
    b.region = "core_attn"
    out = (
        unfused_attention(b, ctx, q, k, v) if ctx.framework.attention == "unfused" else sdpa(b, ctx, q, k, v, windowed)
    )
    b.region = ""
    return out


def sdpa(b: TapeBuilder, ctx: Context, q: str, k: str, v: str, windowed: bool) -> str:
    """Flash attention over permuted views: v keeps the whole of qkv alive; the output has the layout of q, no copy.

    Under GQA, backward makes the gradients of k and v for every query head and sums them over a group. That takes the
    time of a kernel; its temporaries are the kernel's own (:func:`mofa.blocks.parts.attention_backward_scratch_bytes`).
    """
    a, e, t = ctx.model.attention, ctx.activation_element_bytes, ctx.tokens
    expanded, grouped = [], ctx.heads > ctx.kv_heads
    for name, x, d in (("k", k, a.d_qk), ("v", v, a.d_v)):
        expanded_bytes, own = t * ctx.heads * d * e, t * ctx.kv_heads * d * e
        y = b.tensor(f"attn.{name}_heads", own, grad_bytes=own)
        expanded.append(
            b.add(
                Op(f"attn.{name}_heads", "memory_bound", None, (x,), (y,), view=True, launches=0,
                   present=grouped,
                   back=OpBackward(work=MemoryBound(expanded_bytes + own), family="memory_bound", view=True,
                   present=grouped))
            )
        )  # fmt: skip
    kh, vh = expanded
    out = b.tensor("attn.out", t * ctx.heads * a.d_v * e)
    lse = b.tensor("attn.lse", t * ctx.heads * 4.0, grad=False)
    work = Attention(ctx.micro_batch, ctx.heads, ctx.seq_len / ctx.cp, ctx.attention_pairs(windowed), a.d_qk, a.d_v,
                     kv_heads=ctx.kv_heads)  # fmt: skip
    back = OpBackward(0.0, 3, attention_backward_scratch_bytes(ctx))
    b.add(Op("attn.core", "attention", work, (q, kh, vh), (out, lse), (q, kh, vh, out, lse), back=back))
    return out


def unfused_attention(b: TapeBuilder, ctx: Context, q: str, k: str, v: str) -> str:
    """Scores, softmax and context as separate steps over P = b * heads * s^2 scores (dot_product_attention.py).

    The causal mask is a full one: every score is computed. A fused softmax keeps its 16-bit output (2P). The PyTorch
    one runs in fp32 (fused_softmax.py, forward_torch_softmax): the scores, their fp32 copy, the softmax and its
    16-bit copy are alive at once (12P); the fp32 softmax and the 16-bit copy are kept (6P); backward holds the fp32
    gradient, the product that PyTorch's softmax backward makes beside it and its result with the softmax (16P).
    """
    a, e, t = ctx.model.attention, ctx.activation_element_bytes, ctx.tokens
    s = ctx.seq_len / ctx.cp
    count = ctx.micro_batch * ctx.heads
    scores_num = count * s * s
    k, v = _expand(b, ctx, k, "k", a.d_qk), _expand(b, ctx, v, "v", a.d_v)
    # the scale is the product's alpha: backward multiplies dq and dk by it, a kernel each
    scaled = []
    for name, x in (("q", q), ("k", k)):
        nbytes = t * ctx.heads * a.d_qk * e
        y = b.tensor(f"attn.{name}_scaled", nbytes)
        op = Op(
            f"attn.{name}_scale",
            "memory_bound",
            None,
            (x,),
            (y,),
            view=True,
            launches=0,
            back=OpBackward(2 * nbytes, 1),
        )
        scaled.append(b.add(op))
    scores = b.tensor("attn.scores", 2.0 * scores_num)
    operands = (scaled[0], scaled[1])
    b.add(Op("attn.qk", "attention", Gemm(s, s, a.d_qk, count=count), operands, (scores,), operands))
    if ctx.model.positions == "alibi":  # copied into the product's result, which the product then reads and adds to
        sloped = b.tensor("attn.sloped", 2.0 * scores_num)
        slopes = MemoryBound(4.0 * scores_num, "copy")
        scores = b.add(
            Op(
                "attn.slopes",
                "memory_bound",
                slopes,
                (scores,),
                (sloped,),
                view=True,
                back=OpBackward(0.0, 0, view=True),
            )
        )
    if a.softcap:
        scores = soft_cap(b, scores, "attn")
    for local in (k, v, scores):
        hold_in_module(b, "core attention", local)
    probs = _softmax(b, ctx, scores, scores_num, s)
    if ctx.model.dropout > 0:  # its output takes its input's place in the frame; its mask comes first (Dropout.cu)
        dropped = b.tensor("attn.dropped", 2.0 * scores_num)
        mask = b.tensor("attn.dropout_mask", scores_num, grad=False)
        b.add(
            Op("attn.dropout", "memory_bound", MemoryBound(5.0 * scores_num), (probs,), (dropped, mask), (mask,),
               back=OpBackward(5.0 * scores_num, 1), order=ScratchSequence((), (WRITES + 1, WRITES)))
        )  # fmt: skip
        probs = dropped
    hold_in_module(b, "core attention", probs)
    context = b.tensor("attn.context", t * ctx.heads * a.d_v * e)
    b.add(Op("attn.pv", "attention", Gemm(s, a.d_v, s, count=count), (probs, v), (context,), (probs, v)))
    out = b.tensor("attn.out", t * ctx.heads * a.d_v * e)
    moved = 2 * t * ctx.heads * a.d_v * e
    memory_bound_op(b, "attn.to_rows", (context,), out, bytes_=moved, back_launches=0, like="strided_copy")
    release_module_locals(b, "core attention")
    return out


def _expand(b: TapeBuilder, ctx: Context, x: str, name: str, d: float) -> str:
    """A copy of a key or value head for every query head of its group; backward sums over the group."""
    expanded_bytes, own = (
        ctx.tokens * ctx.heads * d * ctx.activation_element_bytes,
        ctx.tokens * ctx.kv_heads * d * ctx.activation_element_bytes,
    )
    out = b.tensor(f"attn.{name}_expanded", expanded_bytes)
    return b.add(
        Op(f"attn.{name}_expand", "memory_bound", MemoryBound(expanded_bytes + own, "strided_copy"), (x,), (out,),
           present=ctx.heads > ctx.kv_heads, back=OpBackward(expanded_bytes + own, 1))
    )  # fmt: skip


def _softmax(b: TapeBuilder, ctx: Context, scores: str, num: ArrayK, s: ArrayK) -> str:
    probs = b.tensor("attn.probs", 2.0 * num)
    if ctx.framework.fused_softmax:  # backward works in place on the gradient
        back = OpBackward(work=MemoryBound(6.0 * num), family="memory_bound", view=True)
        return b.add(
            Op("attn.softmax", "memory_bound", MemoryBound(4.0 * num), (scores,), (probs,), (probs,), back=back)
        )
    soft = b.tensor("attn.softmax", 4.0 * num, grad=False)
    mask = b.tensor("attn.mask", s * s, grad=False)
    # the gradient widened, a product beside the softmax's, that masked, and narrowed again
    backward = ScratchSequence((4.0 * num,) * 4, (0, READS, 1, 2, ~0, ~1, READS + 1, 3, ~2, WRITES, ~3))
    # cast 6, mask 8, softmax 8, cast 6 bytes a score; the mask is built each call: ones, triu, bool
    casts = (6.0 * num, "cast_up"), (6.0 * num, "cast_down")
    moved = MemoryBound(28.0 * num + 17.0 * s * s, parts=(*casts, (8.0 * num, "softmax_fp32")))
    b.add(
        Op("attn.softmax", "memory_bound", moved, (scores,), (probs, soft, mask), (soft, mask), scratch=4.0 * num,
           launches=7, back=OpBackward(44.0 * num, 5, 8.0 * num, parts=casts, order=backward),
           order=ScratchSequence((4.0 * num,), (0, WRITES + 2, WRITES + 1, WRITES, ~0)))
    )  # fmt: skip
    return probs
