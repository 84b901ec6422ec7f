"""Attention under PyTorch's context parallelism (distributed.tensor.experimental._context_parallel._attention).

Each rank's queries meet every rank's keys and values in turn; partial results are merged, and gradients added up, in
fp32 by eager ops around the attention kernels.
"""

from __future__ import annotations

from mofa.blocks import parts
from mofa.blocks.context import ArrayK, Context
from mofa.blocks.elementwise import maximum, where
from mofa.blocks.op import Op, OpBackward, TapeBuilder
from mofa.blocks.work import MemoryBound


def ring_attention(b: TapeBuilder, ctx: Context, q: str, k: str, v: str, windowed: bool) -> str:
    """Attention with the exchange of keys and values, the merge of its parts and what both hold."""
    sums = _running_sums(b, ctx)
    out = parts.fused_attention(b, ctx, q, k, v, windowed, beside=sums)
    present, steps = ctx.cp > 1, maximum(ctx.cp - 1.0, 0.0)
    count = ctx.tokens * ctx.heads * ctx.model.attention.d_v
    kv = ctx.tokens * ctx.kv_heads * ctx.model.attention.d_qk * 2.0
    launches = 8.0 * maximum(ctx.cp - 1.0, 1.0)
    # of the output and of keys and values, once and for every part that is merged: bytes at the general rate that
    # take what the kernels of a profiled layer took (tt2-cp2-llama-6l-32k, fitting half; many are strided)
    moved = (17.0 + 42.0 * steps) * count + 12.0 * kv
    back = 27.0 * count + 60.0 * kv + steps * (13.5 * count + 37.5 * kv)
    # _SDPAMerger._merge_one: the result so far, the part, their difference and its weighted one, or the sum, in fp32
    wide = tuple(
        b.tensor(f"attn.merge.{name}", where(present, 4.0 * count, 0.0), grad=False)
        for name in ("result", "part", "difference", "weighted")
    )
    b.add(Op("attn.parts", "memory_bound", None, (), wide, launches=0))
    begun = b.tensor("attn.sums", 0.0 * count)
    b.add(Op("attn.begin_sums", "memory_bound", None, sums, (begun,), view=True, launches=0,
             back=OpBackward(work=MemoryBound(0.0 * count), family="memory_bound", launches=0,
             present=present)))  # fmt: skip
    rotation_buffer = b.tensor(
        "attn.kv_held", 0.0 * count, grad=False
    )  # the rotation's buffer, as long as the function runs
    b.add(Op("attn.hold", "memory_bound", None, ("attn.kv_received",), (rotation_buffer,), view=True, launches=0))
    # its memory is the output's; its gradient is a tensor, which the output's gradient is where nothing is merged
    merged = b.tensor("attn.merged", 0.0 * count, grad_bytes=b.tensors[out].bytes)
    b.add(
        Op("attn.merge", "memory_bound", MemoryBound(moved), (out, begun, *wide, rotation_buffer), (merged,), view=True,
           launches=launches, present=present,
           back=OpBackward(work=MemoryBound(back), family="memory_bound", present=present, view=True,
           launches=launches))
    )  # fmt: skip
    # all ranks but the last join a half that they update to one that they don't (_partial_update, torch.cat), after
    # which heads lie one behind the other: what the module makes of it (transpose, contiguous) is a copy, and the
    # output projection keeps that beside what attention keeps. Its kernel is among those counted above.
    copied = b.tensor("attn.contiguous", float(ctx.activation_element_bytes) * count)
    return b.add(Op("attn.contiguous", "memory_bound", None, (merged,), (copied,), launches=0, present=present,
                    back=OpBackward(0.0, 0)))  # fmt: skip


def _running_sums(b: TapeBuilder, ctx: Context) -> tuple[str, ...]:
    """What the backward ring holds beside a step's kernel; nothing of it is there forward.

    _templated_ring_attention_backward: the queries' gradient so far in fp32; of keys and values the gradient so far,
    the joined copy that is sent and the buffer that is received, in fp32; all ranks' keys and values, or those on
    their way, and their joined copy; the gradients that the step before made.
    """
    a = ctx.model.attention
    count: ArrayK = ctx.tokens * ctx.heads * a.d_qk
    kv: ArrayK = ctx.tokens * ctx.kv_heads * (a.d_qk + a.d_v)
    e = float(ctx.activation_element_bytes)
    sizes = {
        "dq": 4.0 * count, "dkv": 4.0 * kv, "dkv_sent": 4.0 * kv, "dkv_received": 4.0 * kv,
        "kv": where(ctx.cp_ring, 2.0, ctx.cp) * e * kv, "kv_joined": e * kv, "dq_before": e * count,
        "dkv_before": e * kv,
    }  # fmt: skip
    return tuple(
        b.tensor(f"attn.ring.{name}", 0.0 * count, grad_bytes=where(ctx.cp > 1, size, 0.0 * count))
        for name, size in sizes.items()
    )
