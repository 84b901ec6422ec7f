"""Megatron-Core with Transformer Engine: what each step of a block launches, keeps and sends.

Read in megatron_core 0.16.1 and transformer_engine 2.20 (file names in the comments). Norm and linear are one module
that keeps the norm's input and its output shard; under sequence parallelism the gathered input is not kept but
gathered again beside the input gradient; weight gradients are added to the fp32 main gradients by the GEMM itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from mofa.blocks.context import ArrayK, Context, Primitives
from mofa.blocks.elementwise import BoolK, any_true, ceil, logical_not, maximum, where
from mofa.blocks.frameworks.megatron import cp as megatron_cp
from mofa.blocks.frameworks.megatron.calls import mark_ops_issued_by_call, timed_module_call
from mofa.blocks.frameworks.megatron.linear import (
    attention_output_linear,
    column_linear,
    gather_into_shared_buffer,
    norm,
    replicated_linear,
    residual,
    weight_gradient_bytes_per_param,
)
from mofa.blocks.frameworks.megatron.loss import cross_entropy
from mofa.blocks.frameworks.megatron.mlp import mlp
from mofa.blocks.frameworks.megatron.moe import moe
from mofa.blocks.frameworks.megatron.persistent import product_weight_shape, product_workspace_bytes
from mofa.blocks.frameworks.megatron.qkv_product import gather_qkv_of_shared_heads, qkv_width, split_qkv_into_heads
from mofa.blocks.frameworks.megatron.rope import unfused_rope
from mofa.blocks.frameworks.megatron.tuned_norms import has_tuned_norm, untuned_norm_slowdown
from mofa.blocks.op import Op, OpBackward, TapeBuilder
from mofa.blocks.parts import (
    HEAD,
    embedding_backward,
    embedding_backward_scratch_bytes,
    finish_logits,
    hold_in_module,
    linear,
    mark_recomputed_output,
    memory_bound_op,
    release_module_locals,
    sp_gather,
    tp_copy,
    tp_reduce,
)
from mofa.blocks.roles import BlockRole
from mofa.blocks.work import MemoryBound
from mofa.specs.attention.mla import MlaSpec
from mofa.specs.attention.record import Heads


def qkv(b: TapeBuilder, ctx: Context, h: str) -> Heads:
    """One product for q, k and v; fused attention copies v, a strided view, so that the whole is let go."""
    fused = column_linear(b, ctx, h, "qkv", qkv_width(ctx), ctx.model.hidden)
    fused = gather_qkv_of_shared_heads(b, ctx, fused)
    since = len(b.ops)
    q, k, v_part = split_qkv_into_heads(b, ctx, fused, "v.part")
    q = copy_strided_queries(b, ctx, q, b.tensors[q].bytes)
    mark_ops_issued_by_call(b, since, timed_module_call(ctx, "self_attention"))
    return q, k, v_part


def copies_grouped_queries(ctx: Context) -> BoolK:
    """Where queries of several groups are copied to adjacent heads."""
    return (ctx.kv_heads > 1) & (ctx.heads > ctx.kv_heads)


def copy_strided_keys_and_values(b: TapeBuilder, ctx: Context, k: str, v: str) -> tuple[str, str]:
    """Keys and values as fused attention takes them: copied where they are strided views of qkv and queries are not
    (te's utils.py, ``get_qkv_layout``). It takes all three as they are where they are parts of one interleaved tensor.

    A rotary embedding and norms of heads make queries and keys of their own.
    """
    if not ctx.model.attention_kind.megatron.fuses_qkv:
        return k, v
    fresh = ctx.model.positions == "rope" or ctx.model.attention.qk_norm
    if not fresh:
        k = _copied(b, ctx, "k", k, copies_grouped_queries(ctx))
    return k, _copied(b, ctx, "v", v, True if fresh else copies_grouped_queries(ctx))


def _copied(b: TapeBuilder, ctx: Context, name: str, x: str, present: BoolK) -> str:
    if not any_true(present):
        return x
    nbytes = b.tensors[x].bytes
    hold_in_module(b, "attention", x)
    out = b.tensor(name if name not in b.tensors else f"{name}.apart", nbytes)
    work = MemoryBound(2 * nbytes, "strided_copy")
    return b.add(Op(f"{name}.copy", "memory_bound", work, (x,), (out,), present=present, back=OpBackward(0.0, 0)))


def copy_strided_queries(b: TapeBuilder, ctx: Context, q: str, nbytes: ArrayK) -> str:
    """The reshape of the queries of several groups to heads copies: they are not adjacent (attention.py)."""
    out = b.tensor("q.heads", nbytes)
    work = MemoryBound(2 * nbytes, "strided_copy")
    return b.add(
        Op(
            "q.reshape",
            "memory_bound",
            work,
            (q,),
            (out,),
            present=copies_grouped_queries(ctx),
            back=OpBackward(0.0, 0),
        )
    )


def is_normed_head_strided(ctx: Context, name: str) -> BoolK:
    """Whether what a norm over heads is given is a view of qkv: keys are, queries where no group's heads had to be
    copied to adjacent ones."""
    return True if name == "k_norm" else logical_not(copies_grouped_queries(ctx))


def head_norm(b: TapeBuilder, ctx: Context, x: str, name: str, heads: ArrayK, head_dim: float) -> str:
    """Norm over each head. A view of qkv is copied together and the copy kept, so that the whole is let go
    (transformer_engine/pytorch/ops/basic/rmsnorm.py, ``input_.contiguous()``)."""
    elements = ctx.tokens * heads * head_dim
    nbytes = elements * ctx.activation_element_bytes
    x = b.add(
        Op(f"{name}.copy", "memory_bound", MemoryBound(2 * nbytes, "strided_copy"), (x,),
           (b.tensor(f"{name}.together", nbytes),), present=is_normed_head_strided(ctx, name), region=b.region,
           back=OpBackward(0.0, 0))
    )  # fmt: skip
    out = b.tensor(f"{name}.out", nbytes)
    scale = b.tensor(f"{name}.rstd", ctx.tokens * heads * 4.0, grad=False)
    forward, backward = 1.0, 1.0
    if head_dim <= HEAD or not has_tuned_norm(ctx, head_dim):
        forward, backward = untuned_norm_slowdown(ctx, of_heads=head_dim <= HEAD)
    b.add(
        Op(name, "memory_bound", MemoryBound(2 * nbytes, "te rmsnorm_fwd", forward * elements, head_dim), (x,),
           (out, scale), (x, scale), region=b.region,
           back=OpBackward(3 * nbytes, 2, like="te rmsnorm_bwd", elements=backward * elements, width=head_dim),
           module_call=timed_module_call(ctx, "norm"), purpose="norm")
    )  # fmt: skip
    return out


def rope(b: TapeBuilder, ctx: Context, q: str, k: str) -> tuple[str, str]:
    """Fused rotary embedding, a kernel each for q and k, nothing kept; eager kernels where it is off, or cosine and
    sine are scaled, which Transformer Engine's kernel does not do (rope_utils.py:279)."""
    if ctx.model.rope_scale != 1.0 or not ctx.framework.fused_rope:
        return unfused_rope(b, ctx, q, k)
    outs = []
    for x in (q, k):  # qkv_output in attention.py's forward has both until it returns
        hold_in_module(b, "attention", x)
    for name, x, heads in (("q", q, ctx.heads), ("k", k, ctx.kv_heads)):
        nbytes = b.tensors[x].bytes
        out = b.tensor(f"{name}.rope", nbytes)
        since, width = len(b.ops), heads * ctx.model.attention.d_qk
        work = MemoryBound(2 * nbytes, "te rope_fwd", ctx.tokens * width, width)
        back = OpBackward(2 * nbytes, 1, like="te rope_bwd", elements=ctx.tokens * width, width=width)
        outs.append(b.add(Op(f"{name}.rope", "memory_bound", work, (x,), (out,), back=back)))
        mark_ops_issued_by_call(b, since, timed_module_call(ctx, "rope"))
    return outs[0], outs[1]


def mla(b: TapeBuilder, ctx: Context, attention: MlaSpec, h: str) -> Heads:
    """Latent attention: replicated down-projections of the shard, up-projections split by heads, fused rotary."""
    t, s, e, hidden = ctx.tokens, ctx.shard_tokens, ctx.activation_element_bytes, float(ctx.model.hidden)
    rank, rope_dim, nope = attention.kv_lora_rank, attention.qk_rope_head_dim, attention.qk_nope_head_dim
    q = h
    if attention.q_lora_rank is not None:
        q = replicated_linear(b, ctx, h, "q_down", float(attention.q_lora_rank), hidden)
    kv = replicated_linear(b, ctx, h, "kv_down", float(rank + rope_dim), hidden)
    latent, k_pe = b.tensor("kv.latent", s * rank * e), b.tensor("k_pe", s * rope_dim * e)
    since = len(b.ops)
    b.add(
        Op("kv.split", "memory_bound", None, (kv,), (latent, k_pe), view=True, launches=0,
           back=OpBackward(2 * s * (rank + rope_dim) * e, 1))
    )  # fmt: skip
    k_pe = sp_gather(b, ctx, k_pe, "k_pe", rope_dim)
    mark_ops_issued_by_call(b, since, timed_module_call(ctx, "latent_attention"))
    b.region = "mla_up"
    if attention.q_lora_rank is None:
        q = column_linear(b, ctx, q, "q_proj", ctx.heads * attention.d_qk, hidden)
    else:
        q = norm(b, ctx, q, "q_norm", attention.q_lora_rank)
        q = column_linear(b, ctx, q, "q_up", ctx.heads * attention.d_qk, attention.q_lora_rank)
    # the norm copies its strided input and keeps the copy (te/module/layernorm_linear.py:1726)
    copy = b.tensor("kv.latent_copy", s * rank * e)
    latent = memory_bound_op(b, "kv.latent_copy", (latent,), copy, bytes_=2 * s * rank * e, back_launches=0)
    latent = norm(b, ctx, latent, "kv_norm", rank)
    up = column_linear(b, ctx, latent, "kv_up", ctx.heads * (nope + attention.v_head_dim), rank)
    heads = ctx.heads
    query = b.tensor("q", t * heads * attention.d_qk * e)
    key = b.tensor("k", t * heads * attention.d_qk * e)
    value = b.tensor("v", t * heads * attention.v_head_dim * e)
    turned = 2 * t * heads * rope_dim * e
    b.add(
        Op("q.rope", "memory_bound", MemoryBound(turned), (q,), (query,), view=True, back=OpBackward(turned, 1),
           module_call=timed_module_call(ctx, "latent_rope"))
    )  # fmt: skip
    b.add(
        Op("kv.rope", "memory_bound", MemoryBound(2 * t * heads * (attention.d_qk + attention.v_head_dim) * e),
           (up, k_pe), (key, value),
           back=OpBackward(2 * t * heads * (attention.d_qk + attention.v_head_dim) * e, 1),
           module_call=timed_module_call(ctx, "latent_rope"))
    )  # fmt: skip
    b.region = ""
    return query, key, value


def attend(b: TapeBuilder, ctx: Context, q: str, k: str, v: str, windowed: bool) -> str:
    """Fused attention (cuDNN or flash), the module that recompute calls core_attn.

    The module around it has what it is given until it returns, and itself the copy of the values.
    """
    since = len(b.ops)
    k, v = copy_strided_keys_and_values(b, ctx, k, v)
    for x in (q, k):
        hold_in_module(b, "attention", x)
    hold_in_module(b, "core attention", v)
    b.region = "core_attn"
    megatron_cp.add_host_calls_of_cp_kind(b, ctx)
    out = megatron_cp.context_parallel_attention(b, ctx, q, k, v, windowed)
    mark_ops_issued_by_call(
        b, since, timed_module_call(ctx, "attention", where((ctx.cp > 1) & ctx.cp_ring, ctx.cp, 0.0))
    )
    b.region = ""
    release_module_locals(b, "core attention")
    return mark_recomputed_output(b, "attn", out, q) if ctx.model.attention_kind.recompute_modules else out


def padded_vocab_per_rank(ctx: Context) -> ArrayK:
    """Rows of the embedding and the head on one rank, padded as Megatron pads them."""
    unit = ctx.framework.vocab_divisor * ctx.tp
    return ceil(ctx.model.vocab / unit) * unit / ctx.tp


def sums_tied_gradients_in_new_memory(ctx: Context) -> BoolK:
    """Whether the embedding's gradient and the head's are added up in new memory: autograd holds the head's, and that
    is a dummy which Transformer Engine keeps for other layers and fills with zeros (tensor_parallel/layers.py,
    ``zero_out_wgrad``; te/module/base.py, ``get_dummy_wgrad``; torch/csrc/autograd/input_buffer.cpp,
    ``can_accumulate_inplace``). (K,)"""
    if not (ctx.model.tied_embeddings and ctx.framework.fuses_wgrad_accumulation):
        return False
    return ctx.has_all_layers


def embedding(b: TapeBuilder, ctx: Context) -> str:
    """Vocabulary-parallel lookup; under sequence parallelism a copy, a reduce-scatter and a clone behind it."""
    h, e, since = float(ctx.model.hidden), ctx.activation_element_bytes, len(b.ops)
    params = padded_vocab_per_rank(ctx) * h
    looked = b.tensor("embedding.rows", ctx.tokens * h * e)
    partial_sums, anew = embedding_backward_scratch_bytes(ctx, params / h), sums_tied_gradients_in_new_memory(ctx)
    scratch = maximum(partial_sums, where(anew, 2.0 * params, 0.0))
    b.add(
        Op("embedding", "memory_bound", MemoryBound(2 * ctx.tokens * h * e), (), (looked,), (), launches=6,
           back=embedding_backward(ctx, params, 2.0, scratch, 3, where(anew, 8.0 * params, 0.0)),
           weight_params=params, weight_bytes=2.0 * params,
           accumulate_bytes_per_param=ctx.framework.accumulation_bytes_per_param, purpose="embedding")
    )  # fmt: skip
    y = tp_reduce(b, ctx, looked, "embedding", h)
    clone = b.tensor("embedding.clone", ctx.shard_tokens * h * e)
    nbytes = ctx.shard_tokens * h * e
    y = b.add(
        Op("embedding.copy", "memory_bound", MemoryBound(2 * nbytes), (y,), (clone,), present=ctx.gathers_sequence,
           back=OpBackward(2 * nbytes, 1))
    )  # fmt: skip
    if ctx.model.positions == "learned":
        placed = b.tensor("embedding.placed", nbytes)
        y = memory_bound_op(b, "embedding.positions", (y,), placed, bytes_=3 * nbytes, back_launches=0)
    if ctx.model.embedding_norm:
        y = norm(b, ctx, y, "embedding_norm", h)
    if ctx.model.dropout > 0:
        dropped = b.tensor("embedding.dropped", nbytes)
        mask = b.tensor("embedding.mask", ctx.shard_tokens * h, grad=False)
        y = b.add(
            Op("embedding.dropout", "memory_bound", MemoryBound(2.5 * nbytes), (y,), (dropped, mask), (mask,),
               back=OpBackward(2.5 * nbytes, 1))
        )  # fmt: skip
    mark_ops_issued_by_call(b, since, timed_module_call(ctx, "embedding"))
    return y


def head(b: TapeBuilder, ctx: Context, x: str) -> str:
    """Final norm, output layer and vocabulary-parallel cross entropy."""
    h = float(ctx.model.hidden)
    normed = norm(b, ctx, x, "final_norm", h)
    v, since = padded_vocab_per_rank(ctx), len(b.ops)
    full = gather_into_shared_buffer(b, ctx, tp_copy(b, ctx, normed, "output", h), "output", h)
    logits = linear(
        b, ctx, full, "output", m=ctx.tokens, n=v, k=h, saves=(normed,), format_="bf16",
        regather=("output.all_gather",) if any_true(ctx.gathers_sequence) else (), purpose="output",
        **weight_gradient_bytes_per_param(ctx),
    )  # fmt: skip
    logits = finish_logits(b, ctx, logits, float(ctx.model.vocab))
    b.part = "loss"
    loss = cross_entropy(b, ctx, logits, ctx.tokens * v)
    b.part = ""
    mark_ops_issued_by_call(b, since, timed_module_call(ctx, "head"))
    return loss


def begin_block(b: TapeBuilder, ctx: Context, block: BlockRole, dense_params: ArrayK, expert_params: ArrayK) -> None:
    """Nothing but the block's name: data parallelism acts on buffers of the whole model, after the last micro-batch."""
    b.block = block


def head_persistent_buffer_bytes(ctx: Context) -> ArrayK:
    """The head's share of the buffers that stay: its dummy gradient and its gathered input. [B]"""
    vocab = 2.0 * padded_vocab_per_rank(ctx) * ctx.model.hidden if ctx.framework.fuses_wgrad_accumulation else 0.0
    return vocab + where(ctx.gathers_sequence, ctx.tokens * ctx.model.hidden * ctx.activation_element_bytes, 0.0)


def persistent_buffer_bytes(ctx: Context, ops: Iterable[Op], *, with_head: bool = True) -> ArrayK:
    """Bytes that stay allocated from the first use on, outside the tapes; ``ops`` are the blocks' forward ops. [B]

    Transformer Engine's workspaces, and a bf16 gradient for each distinct shape of a weight whose GEMM adds to the main
    gradient by itself: it is handed to autograd as a dummy (te/module/base.py, get_dummy_wgrad). With the head also the
    buffer of its gathered input. Tables of rotations are apart (:func:`.persistent.rotary_table_bytes`).
    """
    ops = tuple(ops)
    total: ArrayK = product_workspace_bytes(ops)
    seen: list[tuple[ArrayK, ArrayK]] = []
    for op in ops:
        if op.weight and not any_true(op.weight_bytes):
            shape = product_weight_shape(op)
            new: BoolK = True
            for rows, columns in seen:
                new = new & ((shape[0] != rows) | (shape[1] != columns))
            seen.append(shape)
            total = total + where(new, 2.0 * op.weight_params / op.num_weights, 0.0)
    return total + head_persistent_buffer_bytes(ctx) if with_head else total


PRIMITIVES = Primitives(
    norm=norm, qkv=qkv, head_norm=head_norm, rope=rope, mla=mla, attend=attend, row_linear=attention_output_linear,
    residual=residual, mlp=mlp, moe=moe, embedding=embedding, head=head, begin_block=begin_block,
)  # fmt: skip
