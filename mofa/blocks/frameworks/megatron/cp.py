"""Attention under context parallelism as Transformer Engine 2.20.2 runs it: by ring, all-gather or all-to-all.

Read in te/pytorch/attention/dot_product_attention/context_parallel.py, for the layout ``sbhd`` and a causal mask:
halves of the sequence are contiguous, so that nothing copies them. Of a ring's and an all-gather's steps every second
runs on a stream of its own, whose tensors come from a memory pool of its own. No step waits for the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mofa.blocks.context import ArrayK, Context
from mofa.blocks.elementwise import BoolK, FloatK, any_true, logical_not, maximum, where
from mofa.blocks.frameworks.megatron.calls import add_op_of_module_python, timed_module_call
from mofa.blocks.op import CP_POOL, Op, OpBackward, TapeBuilder
from mofa.blocks.parts import (
    attention_backend,
    attention_backward_scratch_bytes,
    fused_attention,
    hold_in_module,
    release_module_locals,
)
from mofa.blocks.work import Attention, Collective, MemoryBound

ORDER = "te chunk_order"
"""The measured op that puts gathered chunks in order: ``torch.index_select``, at a third of a copy's rate."""


def context_parallel_attention(b: TapeBuilder, ctx: Context, q: str, k: str, v: str, windowed: bool) -> str:
    """Fused attention over all ranks' keys and values: of ``AttnFuncWithCPAndKVP2P``, ``...KVAllGather`` and
    ``...QKVOA2A`` the one that ``cp_kind`` names."""
    if not any_true(ctx.cp > 1):
        return fused_attention(b, ctx, q, k, v, windowed)
    s = _Sizes.of(ctx)
    if not any_true(s.a2a):
        return _steps(b, ctx, s, q, k, v, windowed)
    return _tokens_for_heads(b, s, _steps(b, ctx, s, *_heads_for_tokens(b, s, q, k, v), windowed))


@dataclass(frozen=True)
class _Sizes:
    """Bytes of one rank's queries, keys, values and output, and where each way of exchange runs. (K,) [B]"""

    query: ArrayK
    key: ArrayK
    value: ArrayK
    out: ArrayK
    lse: ArrayK
    """Of the log-sum-exp, in fp32."""
    ring: BoolK
    gathers: BoolK
    a2a: BoolK

    @classmethod
    def of(cls, ctx: Context) -> _Sizes:
        a, t, e = ctx.model.attention, ctx.tokens, float(ctx.activation_element_bytes)
        several = ctx.cp > 1
        a2a, ring = several & ctx.cp_a2a, several & ctx.cp_ring
        return cls(
            t * ctx.heads * a.d_qk * e, t * ctx.kv_heads * a.d_qk * e, t * ctx.kv_heads * a.d_v * e,
            t * ctx.heads * a.d_v * e, t * ctx.heads * 4.0, ring, several & logical_not(a2a) & logical_not(ring), a2a,
        )  # fmt: skip

    @property
    def kv(self) -> ArrayK:
        """Keys and values. [B]"""
        return self.key + self.value


def add_host_calls_of_cp_kind(b: TapeBuilder, ctx: Context) -> None:
    """Add the host's extra calls of attention whose keys and values are gathered, or whose heads are exchanged."""
    if any_true(ctx.cp > 1):
        s = _Sizes.of(ctx)
        add_op_of_module_python(b, "attn.gathered", timed_module_call(ctx, "gathered_attention"), s.gathers)
        add_op_of_module_python(b, "attn.exchanged", timed_module_call(ctx, "exchanged_attention"), s.a2a)


def _heads_for_tokens(b: TapeBuilder, sizes: _Sizes, q: str, k: str, v: str) -> tuple[str, str, str]:
    """All tokens of a part of the heads: each tensor is copied into parts, exchanged, and its chunks put in order.

    ``flash_attn_a2a_communicate`` with ``before_attn``: the exchange of one runs beside the copy of the next, and what
    is put in order, which backward keeps, lies in the pool of the stream beside.
    """
    parts, nbytes = {"q": q, "k": k, "v": v}, {"q": sizes.query, "k": sizes.key, "v": sizes.value}

    def copied(name: str) -> None:
        out = b.tensor(f"attn.{name}.parts", nbytes[name])
        back = OpBackward(2 * nbytes[name], 1, like="strided_copy", pool=CP_POOL)
        work = MemoryBound(2 * nbytes[name], "strided_copy")
        parts[name] = b.add(
            Op(f"attn.{name}.split", "memory_bound", work, (parts[name],), (out,), present=sizes.a2a, back=back)
        )

    def sent(name: str) -> None:
        hold_in_module(b, "exchange", parts[name])
        parts[name] = _exchanged(b, sizes, parts[name], f"attn.{name}", nbytes[name])
        hold_in_module(b, "exchange", parts[name])

    copied("q")
    copied("k")
    sent("q")
    copied("v")
    sent("k")
    sent("v")
    for name in parts:
        out = b.tensor(f"attn.{name}.heads", nbytes[name])
        parts[name] = _reordered(b, sizes, parts[name], out, nbytes[name], pool=CP_POOL)
    release_module_locals(b, "exchange", sizes.a2a)
    return parts["q"], parts["k"], parts["v"]


def _exchanged(b: TapeBuilder, sizes: _Sizes, x: str, name: str, nbytes: ArrayK) -> str:
    """One all-to-all of a tensor among the context-parallel ranks."""
    out = b.tensor(f"{name}.exchanged", nbytes)
    work = Collective("all_to_all", "cp", nbytes)
    return b.add(Op(f"{name}.all_to_all", "cp", work, (x,), (out,), present=sizes.a2a, stream="cp"))


def _reordered(b: TapeBuilder, sizes: _Sizes, x: str, out: str, nbytes: ArrayK, pool: str = "") -> str:
    """Chunks of the sequence in the order that causal attention needs, or that ranks hold: a compiled copy."""
    work, back = MemoryBound(2 * nbytes, "copy"), OpBackward(2 * nbytes, 1, like="copy", pool="" if pool else CP_POOL)
    return b.add(
        Op(
            f"{out}.order",
            "memory_bound",
            work,
            (x,),
            (out,),
            present=sizes.a2a,
            guarded_calls=1.0,
            pool=pool,
            back=back,
        )
    )


def _tokens_for_heads(b: TapeBuilder, sizes: _Sizes, out: str) -> str:
    """The way back of the output: attention keeps it as it came from the kernel, beside what it returns."""
    ordered = _reordered(b, sizes, out, b.tensor("attn.out.ordered", sizes.out), sizes.out)
    hold_in_module(b, "exchange of the output", ordered)
    sent = _exchanged(b, sizes, ordered, "attn.out", sizes.out)
    out = b.add(
        Op("attn.out.join", "memory_bound", MemoryBound(2 * sizes.out, "strided_copy"), (sent,),
           (b.tensor("attn.out.joined", sizes.out),), present=sizes.a2a, pool=CP_POOL,
           back=OpBackward(2 * sizes.out, 1, like="strided_copy"))
    )  # fmt: skip
    release_module_locals(b, "exchange of the output", sizes.a2a)
    return out


def _steps(b: TapeBuilder, ctx: Context, sizes: _Sizes, q: str, k: str, v: str, windowed: bool) -> str:
    """Attention in steps with what is exchanged beside them; one kernel where heads were exchanged."""
    a, cp = ctx.model.attention, ctx.cp
    steps = maximum(cp - 1.0, 0.0)
    share = where(sizes.ring, steps / cp, 0.0)
    pairs = ctx.attention_pairs(windowed) * where(sizes.a2a, cp, 1.0)
    heads, kv_heads = (n / where(sizes.a2a, cp, 1.0) for n in (ctx.heads, ctx.kv_heads))
    length = ctx.seq_len / where(sizes.a2a, 1.0, cp)
    backend = attention_backend(ctx)
    received = _received(b, ctx, sizes, k, v)
    first: tuple[str, ...] = ()
    if any_true(sizes.ring):
        # the first step's output, and from the third step on one more; back a buffer of the exchange is there as long
        partial = where(sizes.ring, where(cp > 2, 2.0, 1.0) * sizes.out, 0.0)
        sent = where(sizes.ring, 2.0 * sizes.kv, 0.0)
        first = (b.tensor("attn.partial", partial, grad_bytes=sent, grad_recorded_on_nccl_stream=sizes.ring),)
        body = Attention(
            ctx.micro_batch, heads, length, pairs * share, a.d_qk, a.d_v, kv_heads=kv_heads, backend=backend
        )
        seen = tuple(_seen(b, sizes, x, name) for name, x in (("q", q), ("k", k), ("v", v)))
        b.add(Op("attn.core_beside", "attention", body, seen, first, present=sizes.ring, launches=steps,
                 back=OpBackward(0.0, 3.0 * steps, attention_backward_scratch_bytes(ctx))))  # fmt: skip
        k, v = _turned(b, ctx, sizes, k, v)
    k = _scattered(b, ctx, sizes, k)
    side = b.tensor("attn.side", _side(ctx, sizes), grad=False)
    b.add(Op("attn.side", "memory_bound", None, (), (side,), launches=0, pool=CP_POOL))
    out, lse = b.tensor("attn.out", sizes.out), b.tensor("attn.lse", sizes.lse, grad=False)
    last = Attention(
        ctx.micro_batch, heads, length, pairs * (1.0 - share), a.d_qk, a.d_v, kv_heads=kv_heads, backend=backend,
        masked_pairs=0.0 if windowed else where(sizes.gathers, _masked_pairs(ctx), 0.0),
    )  # fmt: skip
    scratch = where(
        sizes.gathers,
        2.0 * cp * sizes.kv + 0.5 * sizes.out + 0.5 * sizes.kv,
        where(sizes.ring, sizes.kv + sizes.query, 0.0),
    )
    at_once = where(sizes.gathers, 2.0, 1.0)
    saved = (q, k, v, *(x for x in received if x == "attn.kv_received"), out, lse)
    b.add(Op("attn.core", "attention", last, (q, k, v, *received, *first), (out, lse), saved,
             launches=at_once,
             back=OpBackward(0.0, 3.0 * at_once, attention_backward_scratch_bytes(ctx) + scratch)))  # fmt: skip
    return _merged(b, ctx, sizes, out, (side, *received))


def _masked_pairs(ctx: Context) -> FloatK:
    """Pairs of a rank's two chunks that lie behind their queries, half a square each. (K,)

    Over more keys than queries cuDNN's backward skips no masked block: of 2K to 8K queries it takes as long as without
    a mask, within the wave (measurements/h100-1gpu-te-chunks). The first chunk of the first rank, which has as many
    keys as queries, is alone in skipping them; the others are waited for. Of windows it was not measured.
    """
    chunk = ctx.seq_len / (2.0 * ctx.cp)
    return chunk * chunk


def _seen(b: TapeBuilder, sizes: _Sizes, x: str, name: str) -> str:
    """A tensor as the steps of a ring see it that run beside its exchanges: its gradient of them is one of its own."""
    nbytes = b.tensors[x].bytes
    out = b.tensor(f"attn.{name}.seen", nbytes, grad_bytes=where(sizes.ring, nbytes, 0.0))
    return b.add(Op(out, "memory_bound", None, (x,), (out,), view=True, launches=0, present=sizes.ring))


def _received(b: TapeBuilder, ctx: Context, sizes: _Sizes, k: str, v: str) -> tuple[str, ...]:
    """What is there of other ranks' keys and values while attention runs forward.

    A ring joins its own in a buffer, and receives in a second one while a step works; a third is there from the third
    step on. The last one is kept for the backward in place of keys and values; all others come back late. All-gather
    makes a second copy of all, in order.
    """
    cp, steps = ctx.cp, maximum(ctx.cp - 1.0, 0.0)
    arrived: list[str] = []
    if any_true(sizes.ring):
        joined = b.tensor(
            "attn.kv_joined",
            where(sizes.ring, where(cp > 2, 2.0, 1.0) * sizes.kv, 0.0),
            "buffer",
            grad=False,
            recorded_on_nccl_stream=sizes.ring,
        )
        b.add(Op("attn.kv_join", "memory_bound", MemoryBound(where(sizes.ring, 2.0, 0.0) * sizes.kv, "copy"), (k, v),
                 (joined,), launches=where(sizes.ring, 1.0, 0.0)))  # fmt: skip
        # later steps receive in new buffers, in the turn of two variables
        for step in range(3, int(np.max(where(sizes.ring, cp, 0.0)))):
            passed = b.tensor(f"attn.kv_step{step}", where(sizes.ring & (cp > step), sizes.kv, 0.0), "buffer",
                              grad=False, recorded_on_nccl_stream=sizes.ring & (cp > step))  # fmt: skip
            b.add(Op(passed, "memory_bound", None, (), (passed,), launches=0, present=sizes.ring & (cp > step)))
        received = b.tensor(
            "attn.kv_received",
            where(sizes.ring, sizes.kv, 0.0),
            "buffer",
            grad=False,
            recorded_on_nccl_stream=sizes.ring,
        )
        b.add(Op("attn.kv_ring", "cp", Collective("send_recv", "cp", steps * sizes.kv), (joined,), (received,),
                 present=sizes.ring, stream="cp", launches=2.0 * steps))  # fmt: skip
        arrived += [joined, received]
    if any_true(sizes.gathers):
        none = b.tensor("attn.none", 0.0 * sizes.kv, grad=False)
        b.add(Op("attn.none", "memory_bound", None, (), (none,), launches=0))
        gathered = b.tensor("attn.kv_gathered", where(sizes.gathers, cp * sizes.kv, 0.0), "buffer", grad=False)
        b.add(Op("attn.kv_gather", "cp", Collective("all_gather", "cp", cp * sizes.kv), (none, k, v), (gathered,),
                 present=sizes.gathers, stream="cp", launches=2.0))  # fmt: skip
        ordered = b.tensor("attn.kv_ordered", where(sizes.gathers, cp * sizes.kv, 0.0), "buffer", grad=False)
        b.add(Op("attn.kv_order", "memory_bound", MemoryBound(2.0 * cp * sizes.kv, ORDER), (gathered,), (ordered,),
                 present=sizes.gathers, launches=2.0))  # fmt: skip
        arrived.append(ordered)
    return tuple(arrived)


def _side(ctx: Context, sizes: _Sizes) -> ArrayK:
    """What the stream beside allocates forward: the output and log-sum-exp of its step, of a ring the last rank's; from
    the third step on also the step's before and a buffer of keys and values. [B]"""
    more = where(ctx.cp > 2, 1.0, 0.0)
    return where(
        sizes.ring,
        (1.0 + more) * (sizes.out + sizes.lse) + more * sizes.kv,
        where(sizes.gathers, 0.5 * (sizes.out + sizes.lse), 0.0),
    )


def _turned(b: TapeBuilder, ctx: Context, sizes: _Sizes, k: str, v: str) -> tuple[str, str]:
    """Where a ring's backward exchanges keys and values with their gradients, beside all steps but one.

    Two buffers hold both of each. One is what is returned, by views of it that are both gradients: it is there for
    values, whose gradient is read last. The other one goes with the first output's gradient. Of keys and values
    nothing is kept for the backward but what was received last.
    """
    other, turned = logical_not(sizes.ring), []
    work = Collective("send_recv", "cp", 2.0 * maximum(ctx.cp - 1.0, 0.0) * sizes.kv)
    back = OpBackward(work=work, family="cp", present=sizes.ring, view=True, stream="cp",
                launches=4.0 * maximum(ctx.cp - 1.0, 1.0))  # fmt: skip
    for name, x, nbytes, grad_bytes, exchange in (
        ("k", k, sizes.key, where(sizes.ring, 0.0, sizes.key), None),
        ("v", v, sizes.value, where(sizes.ring, 2.0 * sizes.kv, sizes.value), back),
    ):  # fmt: skip
        out = b.tensor(
            f"attn.{name}.turned", where(sizes.ring, 0.0, nbytes), grad_bytes=grad_bytes,
            grad_recorded_on_nccl_stream=sizes.ring if exchange else False,
        )  # fmt: skip
        turned.append(
            b.add(Op(f"attn.{name}.turn", "memory_bound", None, (x,), (out,), view=other, launches=0, back=exchange))
        )
    return turned[0], turned[1]


def _scattered(b: TapeBuilder, ctx: Context, sizes: _Sizes, k: str) -> str:
    """Where the backward of all-gather scatters the gradients that it made of all ranks' keys and values."""
    if not any_true(sizes.gathers):
        return k
    # a ring's gradient: :func:`_turned`
    out = b.tensor("attn.k.scattered", sizes.key, grad_bytes=where(sizes.ring, 0.0, sizes.key))
    back = OpBackward(work=Collective("reduce_scatter", "cp", ctx.cp * sizes.kv), family="cp", present=sizes.gathers,
                view=True, stream="cp", launches=2.0)  # fmt: skip
    return b.add(Op("attn.k.scatter", "memory_bound", None, (k,), (out,), view=True, launches=0, back=back))


def _merged(b: TapeBuilder, ctx: Context, sizes: _Sizes, out: str, received: tuple[str, ...]) -> str:
    """What joins the steps' outputs, and back their gradients; queries' own are added up as those of two readers.

    A ring copies the first output (2 times its bytes) and merges each other into it (3) by compiled functions, two a
    step; back it copies keys and values, and the first gradients, and adds each from the third step on (3).
    All-gather fills an output of zeros that it doesn't use, and copies both halves. Back it fills the gradients of all
    keys and values with zeros, adds the steps' to them and puts them in order; keys and values are gathered again.
    """
    cp, steps = ctx.cp, maximum(ctx.cp - 1.0, 0.0)
    later = maximum(cp - 2.0, 0.0)
    if any_true(sizes.gathers):
        gathered = b.tensor("attn.gathered_again", 0.0 * sizes.out, grad_bytes=sizes.out)
        again = OpBackward(work=Collective("all_gather", "cp", cp * sizes.kv), family="cp", present=sizes.gathers,
                     view=True, stream="cp", launches=2.0)  # fmt: skip
        out = b.add(
            Op("attn.gather_again", "memory_bound", None, (out,), (gathered,), view=True, launches=0, back=again)
        )
    moved = where(sizes.ring, (2.0 + 3.0 * steps) * sizes.out, 3.0 * sizes.out)
    ring_back = 2.0 * sizes.query + 4.0 * sizes.kv + 3.0 * later * (sizes.query + sizes.kv)
    gather_back = 2.0 * sizes.query + 5.0 * cp * sizes.kv + 3.0 * (cp + 0.5) * sizes.kv
    present = sizes.ring | sizes.gathers
    ordered = where(sizes.ring, 0.0, 4.0 * cp * sizes.kv)  # keys and values once more, and their gradients
    work = MemoryBound(where(sizes.ring, ring_back, gather_back), "copy", parts=((ordered, ORDER),))
    back = OpBackward(work=work, family="memory_bound", present=present, view=True,
                launches=where(sizes.ring, 5.0 + 3.0 * later, 10.0))  # fmt: skip
    merged = b.tensor("attn.merged", 0.0 * sizes.out, grad_bytes=sizes.out)
    return b.add(
        Op("attn.merge", "memory_bound", MemoryBound(moved, "copy"), (out, *received), (merged,), view=True,
        present=present,
           launches=where(sizes.ring, 2.0 + 3.0 * steps, 3.0), guarded_calls=where(sizes.ring, 2.0 * steps, 0.0),
           back=back)
    )  # fmt: skip
