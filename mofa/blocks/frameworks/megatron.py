"""Megatron-Core with Transformer Engine: what each step of a block launches, keeps and sends.

Read in megatron_core 0.16.1 and transformer_engine 2.20 (file names in the comments). Norm and linear are one module
that keeps the norm's input and its output shard; under sequence parallelism the gathered input is not kept but
gathered again beside the input gradient; weight gradients are added to the fp32 main gradients by the GEMM itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mofa.blocks.context import ArrayK, Context, Primitives
from mofa.blocks.elementwise import BoolK, anywhere, ceiling, where
from mofa.blocks.frameworks.megatron_linear import (
    buffer_gather,
    column_linear,
    fp8_cast,
    norm,
    residual,
    row_linear,
    weight_grad,
)
from mofa.blocks.frameworks.megatron_rope import unfused_rope
from mofa.blocks.frameworks.micro_moe import schedule
from mofa.blocks.op import Back, Collective, FloatK, Grouped, HostSync, Op, Stream, TapeBuilder
from mofa.blocks.parts import (
    embedding_backward_scratch,
    fused_attention,
    linear,
    renew,
    sp_gather,
    stream,
    tp_copy,
    tp_reduce,
)
from mofa.blocks.tp_overlap import buffer_bytes

Activation = Callable[[TapeBuilder, Context, str, str, ArrayK, ArrayK, str, FloatK], str]


def qkv(b: TapeBuilder, ctx: Context, h: str) -> tuple[str, str, str]:
    """One product for q, k and v; fused attention copies v, a strided view, so that the whole is let go."""
    a = ctx.model.attention
    q_width, kv_width = ctx.heads * a.d_qk, ctx.kv_heads * a.d_qk
    whole = column_linear(b, ctx, h, "qkv", q_width + 2 * kv_width, ctx.model.hidden)
    t, e = ctx.tokens, ctx.element
    q = b.tensor("q", t * q_width * e)
    k = b.tensor("k", t * kv_width * e)
    v_part = b.tensor("v.part", t * kv_width * e)
    # views forward; backward concatenates dq, dk and dv
    b.add(
        Op("qkv.split", "memory_bound", None, (whole,), (q, k, v_part), view=True, launches=0,
           back=Back(2 * t * (q_width + 2 * kv_width) * e, 1, like="copy"))
    )  # fmt: skip
    q = query_copy(b, ctx, q, t * q_width * e)
    if ctx.model.positions != "rope":  # q, k and v are one interleaved tensor, which fused attention takes as it is
        return q, k, v_part
    v = b.tensor("v", t * kv_width * e)
    stream(b, "v.copy", (v_part,), v, bytes_=2 * t * kv_width * e, back_bytes=0.0, back_launches=0, like="copy")
    return q, k, v


def query_copy(b: TapeBuilder, ctx: Context, q: str, nbytes: ArrayK) -> str:
    """The reshape of the queries of several groups to heads copies: they are not adjacent (attention.py)."""
    out = b.tensor("q.heads", nbytes)
    copies = (ctx.kv_heads > 1) & (ctx.heads > ctx.kv_heads)
    work = Stream(2 * nbytes, "strided_copy")
    return b.add(Op("q.reshape", "memory_bound", work, (q,), (out,), present=copies, back=Back(0.0, 0)))


def head_norm(b: TapeBuilder, ctx: Context, x: str, name: str, heads: ArrayK, head_dim: float) -> str:
    """Norm over each head; keeps its input, a view of qkv."""
    nbytes = ctx.tokens * heads * head_dim * ctx.element
    out = b.tensor(f"{name}.out", nbytes)
    scale = b.tensor(f"{name}.rstd", ctx.tokens * heads * 4.0, grad=False)
    b.add(
        Op(name, "memory_bound", Stream(2 * nbytes), (x,), (out, scale), (x, scale), region=b.region,
           back=Back(3 * nbytes, 2))
    )  # fmt: skip
    return out


def rope(b: TapeBuilder, ctx: Context, q: str, k: str) -> tuple[str, str]:
    """Fused rotary embedding, a kernel each for q and k, nothing kept; eager kernels where cosine and sine are scaled,
    which Transformer Engine's kernel does not do (rope_utils.py:279)."""
    if ctx.model.rope_scale != 1.0:
        return unfused_rope(b, ctx, q, k)
    outs = []
    for name, x in (("q", q), ("k", k)):
        nbytes = b.tensors[x].bytes
        out = b.tensor(f"{name}.rope", nbytes)
        outs.append(stream(b, f"{name}.rope", (x,), out, bytes_=2 * nbytes, back_bytes=2 * nbytes))
    return outs[0], outs[1]


def mla(b: TapeBuilder, ctx: Context, h: str) -> tuple[str, str, str]:
    """Latent attention: replicated down-projections of the shard, up-projections split by heads, fused rotary."""
    a = ctx.model.attention
    assert a.kind == "mla"
    t, s, e, hidden = ctx.tokens, ctx.shard, ctx.element, float(ctx.model.hidden)
    rank, rope_dim, nope = a.kv_lora_rank, a.qk_rope_head_dim, a.qk_nope_head_dim
    x8 = kept = h
    if ctx.gemm_format == "fp8":
        x8, kept = fp8_cast(b, ctx, h, "down", s * hidden, s * hidden)
    extra = weight_grad(ctx)
    q = h
    if a.q_lora_rank is not None:
        q = linear(b, ctx, x8, "q_down", m=s, n=float(a.q_lora_rank), k=hidden, saves=(kept,), **extra)
    kv = linear(b, ctx, x8, "kv_down", m=s, n=float(rank + rope_dim), k=hidden, saves=(kept,), **extra)
    latent, k_pe = b.tensor("kv.latent", s * rank * e), b.tensor("k_pe", s * rope_dim * e)
    b.add(
        Op("kv.split", "memory_bound", None, (kv,), (latent, k_pe), view=True, launches=0,
           back=Back(2 * s * (rank + rope_dim) * e, 1))
    )  # fmt: skip
    k_pe = sp_gather(b, ctx, k_pe, "k_pe", rope_dim)
    b.region = "mla_up"
    if a.q_lora_rank is None:
        q = column_linear(b, ctx, q, "q_proj", ctx.heads * a.d_qk, hidden)
    else:
        q = norm(b, ctx, q, "q_norm", a.q_lora_rank)
        q = column_linear(b, ctx, q, "q_up", ctx.heads * a.d_qk, a.q_lora_rank)
    # the norm copies its strided input and keeps the copy (te/module/layernorm_linear.py:1726)
    copy = b.tensor("kv.latent_copy", s * rank * e)
    latent = stream(b, "kv.latent_copy", (latent,), copy, bytes_=2 * s * rank * e, back_launches=0)
    latent = norm(b, ctx, latent, "kv_norm", rank)
    up = column_linear(b, ctx, latent, "kv_up", ctx.heads * (nope + a.v_head_dim), rank)
    heads = ctx.heads
    query = b.tensor("q", t * heads * a.d_qk * e)
    key = b.tensor("k", t * heads * a.d_qk * e)
    value = b.tensor("v", t * heads * a.v_head_dim * e)
    turned = 2 * t * heads * rope_dim * e
    b.add(Op("q.rope", "memory_bound", Stream(turned), (q,), (query,), view=True, back=Back(turned, 1)))
    b.add(
        Op("kv.rope", "memory_bound", Stream(2 * t * heads * (a.d_qk + a.v_head_dim) * e), (up, k_pe), (key, value),
           back=Back(2 * t * heads * (a.d_qk + a.v_head_dim) * e, 1))
    )  # fmt: skip
    b.region = ""
    return query, key, value


def attend(b: TapeBuilder, ctx: Context, q: str, k: str, v: str, windowed: bool) -> str:
    """Fused attention (cuDNN or flash), the module that recompute calls core_attn."""
    b.region = "core_attn"
    out = fused_attention(b, ctx, q, k, v, windowed)
    b.region = ""
    return out


def activation(
    b: TapeBuilder, ctx: Context, h: str, name: str, elements: ArrayK, moved: ArrayK, region: str, launches: FloatK = 1
) -> str:
    """Fused SwiGLU or bias-GELU: one kernel each way, the first linear's output kept. ``elements`` of the output.

    SwiGLU's backward makes both halves of one gradient in one kernel, which reads gradient and input for each half
    (fused_bias_swiglu.py, ``swiglu_back``): as long as 8 passes over the output, 7.7 in mc2-tp2-llama-6l-traced and 8.1
    in mc1-qwen06b-host-bound-traced, where 5 would do. Experts' gradient of the probabilities takes another kernel and
    3 passes (``weighted_swiglu_back``).

    Dense layers' and shared experts' is the same function, compiled when it is first called. Where a rank calls it with
    two widths, it is compiled for any width the second time (TorchDynamo's automatic dynamic shapes): its kernels then
    divide each element's index by a width that they read, forward and back once each, and take :data:`ANY_WIDTH`.
    """
    gated = ctx.model.mlp.activation == "swiglu"
    out = b.tensor(f"{name}.act", elements * ctx.element)
    wide = 2.0 if gated else 1.0
    like, again = ("compiled swiglu_fwd", "compiled swiglu_bwd") if gated else ("gelu_fwd", "gelu_bwd")
    weighted = 1.0 if gated and name == "experts" else 0.0
    any_width = _any_width(ctx, name)
    passes = where(any_width, ANY_WIDTH[0], wide + 1.0)
    back_passes = where(any_width, ANY_WIDTH[1], 8.0 + 3.0 * weighted if gated else 3.0)
    back = Back(back_passes * moved * ctx.element, launches * (1.0 + weighted), like=again)
    b.add(
        Op(f"{name}.activation", "memory_bound", Stream(passes * moved * ctx.element, like), (h,), (out,), (h,),
           region=region, launches=launches, back=back)
    )  # fmt: skip
    return out


ANY_WIDTH = (7.5, 38.0)
"""Passes over the output, forward and back, that SwiGLU takes as long as where it is compiled for any width, on the
curves of the compiled one: 3.28 and 17.4 ps an element on an H200 (medians of mc1-dsv2lite-8l-16e,
mc1-ernie-4l-selective-moe-again and mc2-ep2-dsmoe16b-4l-full-skewed-traced in reference_runs/traces, fitting half; 3.2
to 3.4 and 17.3 to 18.7, of widths from 2816 to 12288). [-]"""


def _any_width(ctx: Context, name: str) -> BoolK:
    """Where an activation's function is called with two widths on its rank: under pipelines the shared experts' only
    where dense layers are between theirs, not where they are the first ones."""
    if name not in ("mlp", "shared") or not ctx.model.two_gated_widths:
        return False
    moe = ctx.model.moe
    assert moe is not None
    return True if name == "mlp" or moe.every > 1 else ctx.whole


def mlp(b: TapeBuilder, ctx: Context, h: str, name: str, width: float) -> str:
    """Dense feed-forward: gate and up in one product."""
    f = width / ctx.tp
    n = 2 * f if ctx.model.mlp.activation == "swiglu" else f
    b.region = "mlp" if name == "mlp" else b.region
    fc1 = column_linear(b, ctx, h, f"{name}.fc1", n, ctx.model.hidden)
    act = activation(b, ctx, fc1, name, ctx.tokens * f, ctx.tokens * f, b.region)
    y = row_linear(b, ctx, act, f"{name}.fc2", ctx.model.hidden, f)
    b.region = ""
    return y


def router(b: TapeBuilder, ctx: Context, h: str) -> str:
    """Gating product, scores in fp32, top-k, and the map of tokens to experts."""
    moe = ctx.model.moe
    assert moe is not None
    s, experts = ctx.shard, float(moe.num_experts)
    logits = linear(
        b, ctx, h, "router.gate", m=s, n=experts, k=ctx.model.hidden, saves=(h,), format_="bf16",
        grad_bytes_per_param=2.0, accumulate_bytes_per_param=ctx.framework.accumulation_bytes_per_param,
    )  # fmt: skip
    scores = b.tensor("router.scores", s * experts * 4.0)
    chosen = b.tensor("router.chosen", s * (experts * 1.0 + moe.top_k * 8.0), grad=False)
    launches = 10 if moe.score == "sigmoid" else 8
    if moe.num_groups > 1:
        launches += 7
    b.add(
        Op("router.topk", "memory_bound", Stream(launches * s * experts * 4.0, "router_topk", s * experts, experts),
           (logits,), (scores, chosen),
           (scores, chosen), launches=launches, back=Back(4 * s * experts * 4.0, 6))
    )  # fmt: skip
    return scores


def moe(b: TapeBuilder, ctx: Context, h: str) -> str:
    """Router, dispatch, experts, combine and shared experts (moe_layer.py, token_dispatcher.py, experts.py)."""
    spec = ctx.model.moe
    assert spec is not None
    fw, e, hidden = ctx.framework, ctx.element, float(ctx.model.hidden)
    b.region = "moe"
    shared = ""
    if spec.shared_hidden:
        b.region = "moe.shared"
        shared = mlp(b, ctx, h, "shared", float(spec.shared_hidden))
        b.region = "moe"
    scores = router(b, ctx, h)
    copies = ctx.shard * spec.top_k
    row = hidden * e
    sent = b.tensor("moe.sent", copies * row)
    row_ids = b.tensor("moe.row_ids", ctx.shard * (2 * spec.num_experts + 1) * 4.0, grad=False)
    if fw.dispatcher == "alltoall":  # its own probabilities are the router's, the others' those that were exchanged
        renew(b)
    b.add(
        Op("moe.permute", "memory_bound", Stream(2 * copies * row, "permute"), (h, scores), (sent, row_ids), (row_ids,),
           launches=3, back=Back((copies + ctx.shard) * row, 3))
    )  # fmt: skip
    schedule(b, ctx, scores)
    for i in range(fw.dispatch_syncs):  # the counts reach the host before the all-to-all needs its splits
        b.add(Op(f"moe.sync{i}", "host", HostSync()))
    received = exchange(b, ctx, sent, "moe.dispatch", ctx.rows_memory * row)
    if fw.dispatcher != "alltoall":
        renew(b)
    rows, kept = ctx.rows_time * ctx.etp, ctx.rows_memory * ctx.etp
    if anywhere(ctx.etp > 1):
        gathered = b.tensor("moe.gathered", kept * row)
        received = b.add(
            Op("moe.etp_gather", "ep", Collective("all_gather", "etp", rows * row), (received,), (gathered,),
               present=ctx.etp > 1, stream="ep")
        )  # fmt: skip
    several = ctx.local_experts * ctx.ep > ctx.local_experts
    sorted_ = b.tensor("moe.sorted", kept * row)
    received = b.add(
        Op("moe.sort", "memory_bound", Stream(2 * rows * row, "copy"), (received,), (sorted_,), launches=2,
           present=several & (ctx.local_experts > 1), back=Back(2 * rows * row, 2, like="copy"))
    )  # fmt: skip
    y = experts(b, ctx, received, rows, kept)
    unsorted = b.tensor("moe.unsorted", kept * row)
    y = b.add(
        Op("moe.unsort", "memory_bound", Stream(2 * rows * row, "copy"), (y,), (unsorted,), launches=2,
           present=several & (ctx.local_experts > 1), back=Back(2 * rows * row, 2, like="copy"))
    )  # fmt: skip
    if anywhere(ctx.etp > 1):
        scattered = b.tensor("moe.scattered", ctx.rows_memory * row)
        y = b.add(
            Op("moe.etp_scatter", "ep", Collective("reduce_scatter", "etp", rows * row), (y,), (scattered,),
               present=ctx.etp > 1, stream="ep")
        )  # fmt: skip
    y = exchange(b, ctx, y, "moe.combine", copies * row)
    out = b.tensor("moe.out", ctx.shard * row)
    b.add(
        Op("moe.unpermute", "memory_bound", Stream((copies + ctx.shard) * row), (y,), (out,), (row_ids,), launches=2,
           back=Back(2 * copies * row, 1, like="permute"))
    )  # fmt: skip
    if shared:
        total = b.tensor("moe.total", ctx.shard * row)
        out = stream(
            b, "moe.add_shared", (out, shared), total, bytes_=3 * ctx.shard * row, back_launches=0, like="residual_add"
        )
    b.region = ""
    assert fw.dispatcher in ("alltoall", "allgather", "deepep")
    return out


def exchange(b: TapeBuilder, ctx: Context, x: str, name: str, out_bytes: ArrayK) -> str:
    """Send token rows to the ranks that hold their experts, or back."""
    spec = ctx.model.moe
    assert spec is not None
    row = float(ctx.model.hidden) * ctx.element
    out = b.tensor(f"{name}.out", out_bytes)
    dispatcher = ctx.framework.dispatcher
    if dispatcher == "allgather":
        forward = name.endswith("dispatch")
        work = Collective("all_gather" if forward else "reduce_scatter", "ep", ctx.shard * row * ctx.ep, ctx.imbalance)
    elif dispatcher == "deepep":
        work = Collective("deepep", "ep", ctx.shard * row, ctx.imbalance)
    else:
        work = Collective("all_to_all", "ep", ctx.shard * spec.top_k * row, ctx.imbalance)
    return b.add(Op(name, "ep", work, (x,), (out,), present=ctx.ep > 1, stream="ep", launches=2))


def experts(b: TapeBuilder, ctx: Context, x: str, rows: ArrayK, kept: ArrayK, activate: Activation = activation) -> str:
    """The routed experts: a grouped product each for gate-and-up and for down, the probability in the activation."""
    spec = ctx.model.moe
    assert spec is not None
    e, hidden, local = ctx.element, float(ctx.model.hidden), ctx.local_experts
    f = spec.expert_hidden / ctx.etp
    gated = ctx.model.mlp.activation == "swiglu"
    n = 2 * f if gated else f
    sequential = ctx.framework.experts == "sequential"
    launches = local if sequential else 1
    saved = x
    if ctx.gemm_format == "fp8":
        x, saved = fp8_cast(b, ctx, x, "experts.fc1", kept * hidden, rows * hidden)
    grads = weight_grad(ctx)
    per_param, moved = grads.get("grad_bytes_per_param", 0.0), grads.get("accumulate_bytes_per_param", 0.0)
    fc1 = b.tensor("experts.fc1", kept * n * e)
    b.add(
        Op("experts.fc1", "grouped_gemm", Grouped(rows, local, n, hidden, ctx.gemm_format, sequential=sequential),
           (x,), (fc1,), (saved,), launches=launches, weight="experts.fc1", weight_params=local * n * hidden,
           weight_bytes=local * n * hidden * per_param / (local if sequential else 1.0),
           accumulate_bytes_per_param=moved, num_weights=local)
    )  # fmt: skip
    act = activate(b, ctx, fc1, "experts", kept * f, rows * f, "moe.moe_act", launches)
    if not gated or not ctx.framework.fused_swiglu:
        act = _by_probability(b, act, kept * f * e, rows * f * e, launches)
    saved = act
    if ctx.gemm_format == "fp8":
        act, saved = fp8_cast(b, ctx, act, "experts.fc2", kept * f, rows * f)
    out = b.tensor("experts.out", kept * hidden * e)
    b.add(
        Op("experts.fc2", "grouped_gemm", Grouped(rows, local, hidden, f, ctx.gemm_format,
           sequential=sequential), (act,), (out,), (saved,), launches=launches, weight="experts.fc2",
           weight_params=local * f * hidden,
           weight_bytes=local * f * hidden * per_param / (local if sequential else 1.0),
           accumulate_bytes_per_param=moved, num_weights=local)
    )  # fmt: skip
    return expert_bias(b, ctx, out, rows, kept) if spec.expert_bias and not sequential else out


def _by_probability(b: TapeBuilder, act: str, kept: ArrayK, moved: ArrayK, launches: FloatK) -> str:
    """The activation times its tokens' 16-bit probabilities, where no fused function does that as SwiGLU's does.

    mlp.py:174-229 (``per_token_scale``), moe/experts.py. The activation is kept for the probabilities' gradient;
    backward multiplies twice, and sums the rows of the one product beside the other.
    """
    out = b.tensor("experts.weighted", kept)
    back = Back(6.0 * moved, 3 * launches, kept, like="mul")
    work = Stream(2.0 * moved, "mul")
    return b.add(
        Op("experts.weight", "memory_bound", work, (act,), (out,), (act,), region="moe.moe_act", launches=launches,
           back=back)
    )  # fmt: skip


def expert_bias(b: TapeBuilder, ctx: Context, x: str, rows: ArrayK, kept: ArrayK) -> str:
    """The second products' biases times the probabilities, expert by expert in eager ops, and their concatenation.

    moe/experts.py, ``TEGroupedMLP._apply_bias``; the first products add theirs themselves. An expert's rows are
    multiplied (2 bytes an element) and added (6), then all are copied (4); backward multiplies and sums twice (12) and
    concatenates (4).
    """
    local, element = ctx.local_experts, ctx.element
    elements = rows * float(ctx.model.hidden)
    out = b.tensor("experts.biased", kept * float(ctx.model.hidden) * element)
    back = Back(8 * elements * element, 5 * local + 1, like="mul")
    return b.add(
        Op("experts.bias", "memory_bound", Stream(6 * elements * element, "residual_add"), (x,), (out,),
           scratch=2 * kept * float(ctx.model.hidden) * element, launches=3 * local + 1, back=back)
    )  # fmt: skip


def vocab_per_rank(ctx: Context) -> ArrayK:
    """Rows of the embedding and the head on one rank, padded as Megatron pads them."""
    unit = ctx.framework.vocab_divisor * ctx.tp
    return ceiling(ctx.model.vocab / unit) * unit / ctx.tp


def embedding(b: TapeBuilder, ctx: Context) -> str:
    """Vocabulary-parallel lookup; under sequence parallelism a copy, a reduce-scatter and a clone behind it."""
    h, e = float(ctx.model.hidden), ctx.element
    params = vocab_per_rank(ctx) * h
    looked = b.tensor("embedding.rows", ctx.tokens * h * e)
    b.add(
        Op("embedding", "memory_bound", Stream(2 * ctx.tokens * h * e), (), (looked,), (), launches=6,
           back=Back(2 * params + 2 * ctx.tokens * h * e, 3, embedding_backward_scratch(ctx, params / h)),
           weight_params=params, weight_bytes=2.0 * params,
           accumulate_bytes_per_param=ctx.framework.accumulation_bytes_per_param)
    )  # fmt: skip
    y = tp_reduce(b, ctx, looked, "embedding", h)
    clone = b.tensor("embedding.clone", ctx.shard * h * e)
    nbytes = ctx.shard * h * e
    y = b.add(
        Op("embedding.copy", "memory_bound", Stream(2 * nbytes), (y,), (clone,), present=ctx.gathers,
           back=Back(2 * nbytes, 1))
    )  # fmt: skip
    if ctx.model.positions == "learned":
        placed = b.tensor("embedding.placed", nbytes)
        y = stream(b, "embedding.positions", (y,), placed, bytes_=3 * nbytes, back_launches=0)
    if ctx.model.embedding_norm:
        y = norm(b, ctx, y, "embedding_norm", h)
    if ctx.model.dropout > 0:
        dropped = b.tensor("embedding.dropped", nbytes)
        mask = b.tensor("embedding.mask", ctx.shard * h, grad=False)
        y = b.add(
            Op("embedding.dropout", "memory_bound", Stream(2.5 * nbytes), (y,), (dropped, mask), (mask,),
               back=Back(2.5 * nbytes, 1))
        )  # fmt: skip
    return y


def head(b: TapeBuilder, ctx: Context, x: str) -> str:
    """Final norm, output layer and vocabulary-parallel cross entropy, in place on one fp32 copy (cross_entropy.py)."""
    h = float(ctx.model.hidden)
    normed = norm(b, ctx, x, "final_norm", h)
    v = vocab_per_rank(ctx)
    full = buffer_gather(b, ctx, tp_copy(b, ctx, normed, "output", h), "output", h)
    logits = linear(
        b, ctx, full, "output", m=ctx.tokens, n=v, k=h, saves=(normed,), format_="bf16",
        regather=("output.all_gather",) if anywhere(ctx.gathers) else (), **weight_grad(ctx),
    )  # fmt: skip
    return cross_entropy(b, ctx, logits, ctx.tokens * v)


def cross_entropy(b: TapeBuilder, ctx: Context, logits: str, elements: ArrayK) -> str:
    """fp32 softmax kept; forward reads 2 and writes 4 bytes an element for the cast, then max, subtract, exp, sum and
    divide in place (38 bytes in all); backward scales in place and casts (14 bytes)."""
    soft = b.tensor("loss.softmax", 4.0 * elements, grad=False)
    loss = b.tensor("loss", 4.0 * ctx.tokens)
    statistics = b.tensor("loss.statistics", 12.0 * ctx.tokens, grad=False)
    fused = ctx.framework.cross_entropy_fusion != "none"
    b.add(
        Op("loss.cross_entropy", "memory_bound", Stream((24.0 if fused else 38.0) * elements), (logits,),
           (loss, soft, statistics), (soft,), launches=6 if fused else 12,
           back=Back(14.0 * elements, 4))
    )  # fmt: skip
    reduced = b.tensor("loss.reduced", 4.0 * ctx.tokens)
    return b.add(
        Op("loss.all_reduce", "tp", Collective("all_reduce", "tp", 12.0 * ctx.tokens), (loss,), (reduced,),
           present=ctx.tp > 1, view=True, stream="tp", launches=3)
    )  # fmt: skip


def wrap_block(b: TapeBuilder, ctx: Context, block: str, dense_params: ArrayK, expert_params: ArrayK) -> None:
    """Nothing but the block's name: data parallelism acts on buffers of the whole model, after the last micro-batch."""
    b.block = block


def head_buffers(ctx: Context) -> ArrayK:
    """The head's share of the buffers that stay: its dummy gradient and its gathered input. [B]"""
    vocab = 2.0 * vocab_per_rank(ctx) * ctx.model.hidden if ctx.framework.fuses_wgrad_accumulation else 0.0
    return vocab + where(ctx.gathers, ctx.tokens * ctx.model.hidden * ctx.element, 0.0)


def persistent_buffers(ctx: Context, ops: Iterable[Op], *, with_head: bool = True) -> ArrayK:
    """Bytes that stay allocated from the first use on, outside the tapes; ``ops`` are the blocks' forward ops. [B]

    A bf16 gradient for each distinct shape of a weight whose GEMM adds to the main gradient by itself, handed to
    autograd as a dummy (te/module/base.py, get_dummy_wgrad), and, with the head, the buffer of its gathered input.
    """
    total: ArrayK = 0.0
    seen: list[ArrayK] = []
    for op in ops:
        if op.weight and not anywhere(op.weight_bytes):
            one = op.weight_params / op.num_weights
            new: BoolK = True
            for other in seen:
                new = new & (one != other)
            seen.append(one)
            total = total + where(new, 2.0 * one, 0.0)
    total = total + buffer_bytes(ctx)
    return total + head_buffers(ctx) if with_head else total


PRIMITIVES = Primitives(
    norm=norm, qkv=qkv, head_norm=head_norm, rope=rope, mla=mla, attend=attend, row_linear=row_linear,
    residual=residual, mlp=mlp, moe=moe, embedding=embedding, head=head, wrap_block=wrap_block,
)  # fmt: skip
