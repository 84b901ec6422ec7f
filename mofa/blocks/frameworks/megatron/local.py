"""Megatron-Core with its local layer spec, without Transformer Engine and Apex: what each step launches and keeps.

Read in megatron_core 0.16.1 (file names in the comments). Norms and linears are modules of their own; gathered inputs
and the unfused attention's score buffer share one persistent buffer; weight gradients are made in bf16 and added to
the fp32 main gradients apart; the rotary embedding, the permutation and (as an option) attention and SwiGLU are
unfused; experts run one after the other.
"""

from __future__ import annotations

from dataclasses import replace

from mofa.blocks.context import ArrayK, Context, Primitives
from mofa.blocks.elementwise import any_true, logical_not, maximum, where
from mofa.blocks.frameworks.megatron import linear as base
from mofa.blocks.frameworks.megatron import mlp as megatron_mlp
from mofa.blocks.frameworks.megatron import moe as megatron_moe
from mofa.blocks.frameworks.megatron import transformer_engine as te
from mofa.blocks.frameworks.megatron.local_attention import attend
from mofa.blocks.frameworks.megatron.local_dispatch import (
    gather_expert_counts,
    permute,
    reorder_expert_chunks,
    router,
    unpermute,
)
from mofa.blocks.frameworks.megatron.qkv_product import gather_qkv_of_shared_heads, qkv_width, split_qkv_into_heads
from mofa.blocks.frameworks.megatron.rope import unfused_rope, unfused_rope_of_tensor
from mofa.blocks.op import FloatK, Op, OpBackward, TapeBuilder
from mofa.blocks.parts import hold_in_module, linear, memory_bound_op, release_module_locals, tp_copy, tp_reduce
from mofa.blocks.work import Collective, GroupedGemm, MemoryBound
from mofa.specs.attention.mla import MlaSpec
from mofa.specs.attention.record import Heads


def norm(b: TapeBuilder, ctx: Context, x: str, name: str, width: float) -> str:
    """PyTorch's fused norm, a module of its own."""
    own = name in ("attn_norm", "mlp_norm")
    return base.norm_op(b, ctx, x, name, width, f"layernorm.{name}" if own else b.region, torch_kernels=True)


def column_linear(b: TapeBuilder, ctx: Context, h: str, name: str, n: ArrayK, k: float) -> str:
    """Column-parallel linear: keeps its shard, gathers it into the global buffer now and for the weight gradient."""
    full = base.gather_into_shared_buffer(b, ctx, tp_copy(b, ctx, h, name, k), name, k)
    return linear(
        b, ctx, full, name, m=ctx.tokens, n=n, k=k, saves=(h,),
        regather=(f"{name}.all_gather",) if any_true(ctx.gathers_sequence) else (),
        **base.weight_gradient_bytes_per_param(ctx),
        functions=where(ctx.all_reduces_over_tp, 2.0, 1.0),  # the product, which gathers itself, or the copy before it
    )  # fmt: skip


def row_linear(b: TapeBuilder, ctx: Context, x: str, name: str, n: float, k: ArrayK) -> str:
    """Row-parallel linear and the reduction of its partial results."""
    partial = linear(b, ctx, x, name, m=ctx.tokens, n=n, k=k, saves=(x,), **base.weight_gradient_bytes_per_param(ctx),
                     functions=where(ctx.has_tp, 2.0, 1.0))  # fmt: skip
    out = tp_reduce(b, ctx, partial, name, n)
    if name == "proj":
        release_module_locals(b, "attention")
    return out


def add_bias(b: TapeBuilder, x: str, name: str) -> str:
    """A bias that is added by a kernel of its own; backward sums the rows and passes the gradient on."""
    nbytes = b.tensors[x].bytes
    out = b.tensor(f"{name}.biased", nbytes)
    back = OpBackward(work=MemoryBound(nbytes), family="memory_bound", view=True)
    return b.add(Op(f"{name}.bias", "memory_bound", MemoryBound(2.0 * nbytes, "mul"), (x,), (out,), back=back))


def qkv(b: TapeBuilder, ctx: Context, h: str) -> Heads:
    """One product for q, k and v and views of it; queries of several groups are copied to adjacent heads."""
    fused = column_linear(b, ctx, h, "qkv", qkv_width(ctx), ctx.model.hidden)
    if ctx.model.attention.qkv_bias:
        fused = add_bias(b, fused, "qkv")
    q, k, v = split_qkv_into_heads(b, ctx, gather_qkv_of_shared_heads(b, ctx, fused), "v")
    return te.copy_strided_queries(b, ctx, q, b.tensors[q].bytes), k, v


def head_norm(b: TapeBuilder, ctx: Context, x: str, name: str, heads: ArrayK, head_dim: float) -> str:
    """PyTorch's fused norm over each head: copies a strided view together, forward and back, and keeps the view."""
    nbytes = ctx.tokens * heads * head_dim * ctx.activation_element_bytes
    together = b.tensor(f"{name}.together", nbytes)
    moved = 2.0 * nbytes
    y = b.add(
        Op(f"{name}.copy", "memory_bound", MemoryBound(moved, "strided_copy"), (x,), (together,),
           present=te.is_normed_head_strided(ctx, name), region=b.region,
           back=OpBackward(moved, 1, like="strided_copy", autograd_nodes=0.0))
    )  # fmt: skip
    return base.norm_op(b, ctx, y, name, head_dim, b.region, torch_kernels=True, saved_input=x)


def rope(b: TapeBuilder, ctx: Context, q: str, k: str) -> tuple[str, str]:
    """Unfused rotary embedding of q and k, or the fused one where it is on."""
    return te.rope(b, ctx, q, k) if ctx.framework.fused_rope else unfused_rope(b, ctx, q, k)


def _down(b: TapeBuilder, ctx: Context, h: str, name: str, width: float) -> str:
    """A latent projection split over tp and gathered along its width into a fresh tensor, then copied together."""
    e = ctx.activation_element_bytes
    part = column_linear(b, ctx, h, name, width / ctx.tp, float(ctx.model.hidden))
    full_bytes = ctx.tokens * width * e
    gathered, joined = b.tensor(f"{name}.gathered", full_bytes), b.tensor(f"{name}.joined", full_bytes)
    y = b.add(
        Op(f"{name}.gather_width", "tp", Collective("all_gather", "tp", full_bytes), (part,), (gathered,),
           present=ctx.has_tp, stream="tp",
           back=OpBackward(work=MemoryBound(2 * full_bytes / ctx.tp), family="memory_bound", present=ctx.has_tp))
    )  # fmt: skip
    return b.add(
        Op(
            f"{name}.join",
            "memory_bound",
            MemoryBound(2 * full_bytes),
            (y,),
            (joined,),
            present=ctx.has_tp,
            back=OpBackward(0.0, 0),
        )
    )


def _scatter(b: TapeBuilder, ctx: Context, x: str, name: str, width: float, *, strided: bool) -> str:
    """A rank's slice of the sequence: a view of whole rows, a copy of strided ones; backward gathers the gradient."""
    shard = ctx.shard_tokens * width * ctx.activation_element_bytes
    out = b.tensor(f"{name}.slice", shard)
    back = OpBackward(
        work=Collective("all_gather", "tp", ctx.tokens * width * ctx.activation_element_bytes), family="tp",
        present=ctx.gathers_sequence,
        stream="tp",
    )  # fmt: skip
    work = MemoryBound(2 * shard) if strided else None
    return b.add(
        Op(f"{name}.scatter", "memory_bound", work, (x,), (out,), view=not strided, launches=int(strided),
           present=ctx.gathers_sequence, back=back)
    )  # fmt: skip


def _latent_norm(b: TapeBuilder, ctx: Context, x: str, width: float) -> str:
    """The norm of keys' and values' latent, a view beside the rotary key unless a rank's own rows were copied out: it
    copies the view together, forward and back, and keeps the view."""
    nbytes = b.tensors[x].bytes
    together = b.tensor("kv_norm.together", nbytes)
    y = b.add(
        Op("kv_norm.copy", "memory_bound", MemoryBound(2.0 * nbytes, "strided_copy"), (x,), (together,),
           present=logical_not(ctx.gathers_sequence), region=b.region,
           back=OpBackward(2.0 * nbytes, 1, like="strided_copy",
           autograd_nodes=0.0))
    )  # fmt: skip
    return base.norm_op(b, ctx, y, "kv_norm", width, b.region, torch_kernels=True, saved_input=x)


def mla(b: TapeBuilder, ctx: Context, attention: MlaSpec, h: str) -> Heads:
    """Latent attention with split down-projections, gathered along their width, and an unfused rotary embedding.

    multi_latent_attention.py:590-840; it needs a core attention that takes two head sizes, such as SDPA.
    """
    t, e, heads = ctx.tokens, ctx.activation_element_bytes, ctx.heads
    rank, rope_dim, nope = attention.kv_lora_rank, attention.qk_rope_head_dim, attention.qk_nope_head_dim
    q = h
    if attention.q_lora_rank is not None:
        q = _down(b, ctx, h, "q_down", float(attention.q_lora_rank))
        q = _scatter(b, ctx, q, "q_down", float(attention.q_lora_rank), strided=False)
        q = norm(b, ctx, q, "q_norm", attention.q_lora_rank)
    kv = _down(b, ctx, h, "kv_down", float(rank + rope_dim))
    latent, k_pe = b.tensor("kv.latent", t * rank * e), b.tensor("k_pe", t * rope_dim * e)
    b.add(
        Op("kv.split", "memory_bound", None, (kv,), (latent, k_pe), view=True, launches=0,
           back=OpBackward(2 * t * (rank + rope_dim) * e, 1))
    )  # fmt: skip
    latent = _scatter(b, ctx, latent, "kv_latent", float(rank), strided=True)
    latent = _latent_norm(b, ctx, latent, float(rank))
    b.region = "mla_up"
    if attention.q_lora_rank is None:
        q = column_linear(b, ctx, q, "q_proj", heads * attention.d_qk, float(ctx.model.hidden))
    else:
        q = column_linear(b, ctx, q, "q_up", heads * attention.d_qk, float(attention.q_lora_rank))
    up = column_linear(b, ctx, latent, "kv_up", heads * (nope + attention.v_head_dim), float(rank))
    q_bytes, v_bytes = t * heads * attention.d_qk * e, t * heads * attention.v_head_dim * e
    q_nope, q_pe = b.tensor("q.nope", t * heads * nope * e), b.tensor("q.pe", t * heads * rope_dim * e)
    b.add(
        Op("q.split", "memory_bound", None, (q,), (q_nope, q_pe), view=True, launches=0,
           back=OpBackward(2 * q_bytes, 1, like="join_heads"))
    )  # fmt: skip
    k_nope, v_part = b.tensor("k.nope", t * heads * nope * e), b.tensor("v.part", v_bytes)
    b.add(
        Op("kv_up.split", "memory_bound", None, (up,), (k_nope, v_part), view=True, launches=0,
           back=OpBackward(2 * t * heads * (nope + attention.v_head_dim) * e, 1, like="join_heads"))
    )  # fmt: skip
    q_pe = unfused_rope_of_tensor(b, ctx, q_pe, "q_pe", b.tensors[q_pe].bytes, rope_dim, pairs=True)
    k_pe = unfused_rope_of_tensor(b, ctx, k_pe, "k_pe", b.tensors[k_pe].bytes, rope_dim, pairs=True)
    query, key, value = b.tensor("q", q_bytes), b.tensor("k", q_bytes), b.tensor("v", v_bytes)
    joined = MemoryBound(2 * q_bytes, "join_heads")
    b.add(Op("q.cat", "memory_bound", joined, (q_nope, q_pe), (query,), back=OpBackward(0.0, 0)))
    # backward sums the gradient of the shared rotary key over the heads
    b.add(
        Op("k.cat", "memory_bound", joined, (k_nope, k_pe), (key,),
           back=OpBackward(work=MemoryBound(t * heads * rope_dim * e), family="memory_bound", view=True))
    )  # fmt: skip
    moved = MemoryBound(2 * v_bytes, "strided_copy")
    b.add(Op("v.copy", "memory_bound", moved, (v_part,), (value,), back=OpBackward(0.0, 0)))
    b.region = ""
    return query, key, value


def activation(
    b: TapeBuilder, ctx: Context, h: str, name: str, elements: ArrayK, moved: ArrayK, region: str, launches: FloatK = 1
) -> str:
    """SwiGLU or GELU, fused unless SwiGLU is a kernel for each step."""
    if not ctx.model.mlp.gated or megatron_mlp.fuses_activation(ctx, name):
        since = len(b.ops)
        out = megatron_mlp.activation(b, ctx, h, name, elements, moved, region, launches)
        # an autograd.Function around a function that is compiled by itself (fused_bias_swiglu.py)
        base.mark_python_autograd_function_counts(b, since, f"{name}.activation", launches, launches)
        return out
    return megatron_mlp.unfused_swiglu(b, ctx, h, name, elements, moved, region, launches)


def mlp(b: TapeBuilder, ctx: Context, h: str, name: str, width: float) -> str:
    """Dense feed-forward: gate and up in one product."""
    f = width / ctx.tp
    n = 2 * f if ctx.model.mlp.gated else f
    b.region = "mlp" if name == "mlp" else b.region
    fc1 = column_linear(b, ctx, h, f"{name}.fc1", n, ctx.model.hidden)
    if ctx.model.mlp.bias and not ctx.framework.fused_swiglu:
        fc1 = add_bias(b, fc1, f"{name}.fc1")
    act = activation(b, ctx, fc1, name, ctx.tokens * f, ctx.tokens * f, b.region)
    y = row_linear(b, ctx, act, f"{name}.fc2", ctx.model.hidden, f)
    b.region = ""
    return y


def moe(b: TapeBuilder, ctx: Context, h: str) -> str:
    """Shared experts, router, unfused permutation, exchange and experts one after the other (token_dispatcher.py)."""
    spec = ctx.model.moe
    assert spec is not None
    row, shared = float(ctx.model.hidden) * ctx.activation_element_bytes, ""
    if spec.shared_hidden:
        b.region = "moe.shared"
        shared = megatron_mlp.multiply_by_shared_gate(b, ctx, h, mlp(b, ctx, h, "shared", float(spec.shared_hidden)))
    b.region = "moe"
    scores = router(b, ctx, h)
    if ctx.framework.dispatcher == "allgather":
        out = _moe_allgather(b, ctx, h, scores)
    else:
        out = _moe_alltoall(b, ctx, h, scores)
    if shared:
        total = b.tensor("moe.total", ctx.shard_tokens * row)
        out = memory_bound_op(b, "moe.add_shared", (out, shared), total, bytes_=3 * ctx.shard_tokens * row,
        back_launches=0,
                     like="residual_add")  # fmt: skip
    b.region = ""
    return out


def _moe_alltoall(b: TapeBuilder, ctx: Context, h: str, scores: str) -> str:
    spec = ctx.model.moe
    assert spec is not None
    row, copies = float(ctx.model.hidden) * ctx.activation_element_bytes, ctx.shard_tokens * spec.top_k
    sent = permute(b, ctx, h, scores, ctx.shard_tokens, copies, copies, counted=gather_expert_counts(b, ctx))
    received = megatron_moe.exchange_tokens(b, ctx, sent, "dispatch", ctx.rows_memory * row)
    hold_in_module(b, "moe", sent)  # local variables of moe_layer.py's custom_forward: hidden_states, dispatched_input
    hold_in_module(b, "moe", received)
    rows, memory_rows = ctx.rows_time * ctx.etp, ctx.rows_memory * ctx.etp
    if any_true(ctx.etp > 1):
        received = megatron_moe.gather_rows_over_expert_tp(
            b, ctx, received, "moe.etp_gather", rows * row, memory_rows * row
        )
    received = reorder_expert_chunks(b, ctx, received, "sort", rows, memory_rows)
    y = reorder_expert_chunks(b, ctx, experts(b, ctx, received, rows, memory_rows), "unsort", rows, memory_rows)
    if any_true(ctx.etp > 1):
        y = megatron_moe.reduce_scatter_over_expert_tp(b, ctx, y, rows * row, ctx.rows_memory * row)
    y = megatron_moe.exchange_tokens(b, ctx, y, "combine", copies * row)
    out = unpermute(b, ctx, y, ctx.shard_tokens, copies)
    release_module_locals(b, "moe")
    return out


def _moe_allgather(b: TapeBuilder, ctx: Context, h: str, scores: str) -> str:
    """Every rank gathers all tokens into the global buffer, picks its experts' rows, and scatters the sums."""
    row, ranks = float(ctx.model.hidden) * ctx.activation_element_bytes, ctx.ep * ctx.etp
    tokens = ctx.shard_tokens * ranks
    nbytes = tokens * row
    full = b.tensor("moe.full", 0.0, "buffer", grad_bytes=nbytes)
    x = b.add(
        Op("moe.dispatch", "ep", Collective("all_gather", "ep", nbytes, ctx.imbalance), (h,), (full,),
           present=ranks > 1, stream="ep", routing="dispatch")
    )  # fmt: skip
    rows, memory_rows = ctx.rows_time * ctx.etp, ctx.rows_memory * ctx.etp
    sent = permute(b, ctx, x, scores, tokens, rows, memory_rows)
    y = unpermute(b, ctx, experts(b, ctx, sent, rows, memory_rows), tokens, rows)
    out = b.tensor("moe.out", ctx.shard_tokens * row)
    return b.add(
        Op("moe.combine", "ep", Collective("reduce_scatter", "ep", nbytes, ctx.imbalance), (y,), (out,),
           present=ranks > 1, stream="ep", routing="combine")
    )  # fmt: skip


def experts(b: TapeBuilder, ctx: Context, x: str, rows: FloatK, memory_rows: FloatK) -> str:
    """The routed experts. One after the other their outputs are concatenated, and backward their input gradients."""
    if ctx.framework.experts != "sequential":
        return megatron_moe.experts(b, ctx, x, rows, memory_rows, activation)
    row, several = float(ctx.model.hidden) * ctx.activation_element_bytes, ctx.local_experts > 1
    parts = b.tensor("experts.parts", memory_rows * row)
    x = b.add(
        Op("experts.split", "memory_bound", None, (x,), (parts,), view=True, launches=0, present=several,
           back=OpBackward(2 * rows * row, 1, like="copy"), split_views=2.0 * ctx.local_experts, part="experts")
    )  # fmt: skip
    since = len(b.ops)
    y = megatron_moe.experts(b, ctx, x, rows, memory_rows, activation)
    for product in ("experts.fc1", "experts.fc2"):
        base.mark_python_autograd_function_counts(b, since, product, ctx.local_experts)
    for i, op in enumerate(b.ops[since:], since):
        work = replace(op.work, uneven=ctx.expert_rows_deviation) if isinstance(op.work, GroupedGemm) else op.work
        b.ops[i] = op._replace(work=work, mean_loops_before=ctx.mean_loops_before, expert_loops=ctx.local_experts)
    joined = b.tensor("experts.joined", memory_rows * row)
    return b.add(
        Op("experts.cat", "memory_bound", MemoryBound(2 * rows * row, "copy"), (y,), (joined,), present=several,
           back=OpBackward(0.0, 0), split_views=2.0 * ctx.local_experts, part="experts")
    )  # fmt: skip


def head(b: TapeBuilder, ctx: Context, x: str) -> str:
    """Final norm, output layer and loss, as in the Transformer Engine variant: its output layer is Megatron's own."""
    return te.head(b, ctx, x)


def persistent_buffer_bytes(ctx: Context) -> ArrayK:
    """Bytes of the global "mpu" buffer: its largest use, never freed (utils.py, GlobalMemoryBuffer). [B]

    Uses are the gathered input of a column-parallel linear, the scores' input of unfused attention (the slopes take
    its place), and the tokens of the all-gather dispatcher.
    """
    model, e = ctx.model, ctx.activation_element_bytes
    width = float(max(model.hidden, model.attention_kind.gathered_width(model.attention)))
    total = where(ctx.gathers_sequence, ctx.tokens * width * e, 0.0)
    if ctx.framework.attention == "unfused" and model.positions != "alibi":
        total = maximum(total, ctx.micro_batch * ctx.heads * (ctx.seq_len / ctx.cp) ** 2 * e)
    if model.moe is not None and ctx.framework.dispatcher == "allgather":
        ranks = ctx.ep * ctx.etp
        total = maximum(total, where(ranks > 1, ctx.shard_tokens * ranks * model.hidden * e, 0.0))
    return total


PRIMITIVES = Primitives(
    norm=norm, qkv=qkv, head_norm=head_norm, rope=rope, mla=mla, attend=attend, row_linear=row_linear,
    residual=base.compiled_residual, mlp=mlp, moe=moe, embedding=te.embedding, head=head, begin_block=te.begin_block,
)  # fmt: skip
