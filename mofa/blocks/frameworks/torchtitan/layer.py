"""torchtitan 0.2.2 on PyTorch 2.11: what each step of a dense block launches, keeps and sends.

Plain PyTorch modules: separate q, k and v, eager SwiGLU that keeps four tensors, rotary embedding in complex fp32
(Llama, DeepSeek) or by cosines in the compute dtype (Qwen3, told by its head norms). Where the framework is compiled,
a dense block is one graph of fused kernels; embedding, final norm and output layer stay eager, the loss is compiled.
"""

from __future__ import annotations

from mofa.blocks import parts
from mofa.blocks.context import ArrayK, Context, Primitives
from mofa.blocks.elementwise import any_true, where
from mofa.blocks.frameworks.torchtitan import fsdp, registration
from mofa.blocks.frameworks.torchtitan.ffn import feed_forward
from mofa.blocks.frameworks.torchtitan.heads import (
    context_with_repeated_keys,
    gather_heads,
    num_ranks_whose_heads_each_rank_norms,
    repeat_kv,
)
from mofa.blocks.frameworks.torchtitan.linear import (
    CAST,
    cast_shared_input,
    casts_linear_inputs,
    compiles_modules_separately,
    gather_sequence,
    hold_until_tp_scatter,
    is_compiled_block_split_by_ddp,
    is_in_compiled_block,
    linear,
    scatter_sequence,
    sum_gradients_over_tp,
    weight_gradient_bytes_per_param,
)
from mofa.blocks.frameworks.torchtitan.loss import cross_entropy
from mofa.blocks.frameworks.torchtitan.moe import moe
from mofa.blocks.frameworks.torchtitan.ring import ring_attention
from mofa.blocks.frameworks.torchtitan.rotary import complex_rotation_work_and_backward, rope
from mofa.blocks.op import WRITES, FloatK, Op, OpBackward, ScratchSequence, Tape, TapeBuilder
from mofa.blocks.work import Attention, Collective, Gemm, HostSync, MemoryBound
from mofa.specs.attention.mla import MlaSpec
from mofa.specs.attention.record import Heads
from mofa.specs.model import ModelSpec


def norm(b: TapeBuilder, ctx: Context, x: str, name: str, width: float) -> str:
    """Norm of the residual stream in its own dtype: one kernel, backward two; keeps its input and a scale a row."""
    at_ends = name == "final_norm"
    out = norm_over_rows(
        b,
        ctx,
        x,
        name,
        ctx.shard_tokens,
        width,
        ctx.residual_element_bytes,
        0 if at_ends else registration.registration_position_of_norms(ctx),
    )
    frame = {"attn_norm": "attention", "mlp_norm": "mlp", "final_norm": "output"}.get(name)
    if frame is not None:  # an argument of the module behind it
        parts.hold_in_module(b, frame, out)
    return out


def norm_over_rows(
    b: TapeBuilder, ctx: Context, x: str, name: str, rows: FloatK, width: float, element: int, registered_at: int = 0
) -> str:
    """A norm of each row: fused where input and weight have one dtype, else a chain of ops.

    Under autocast a bf16 input meets an fp32 weight. The chain (``rms_norm_composite``,
    aten/src/ATen/native/layer_norm.cpp of PyTorch 2.11) moves so many bytes for an element, kernel by kernel: cast 6,
    square 8, mean 4, times the row's scale 8, times the weight 8, cast 6; two more kernels have a number a row.
    Backward: cast 6; the weight's product 12 and its sum over rows 4, with a memset; times the weight 8; the scale's
    product 12 and its sum over columns 4; times the scale 8; the mean's gradient spread 4, the square's 28 in three
    kernels; their sum 12; cast 6; three have a number a row (tt1-qwen06b-host-bound-traced). Fused backward: the input
    gradient reads dy and x and writes dx, the weight's reads dy and x again. Rows as short as a head are bound by the
    blocks of threads, one a row (:func:`mofa.blocks.parts.head_norm_backward`); compiled they turn in the same kernel,
    and back in one more.
    """
    count = rows * width
    block_compiled = is_in_compiled_block(b, ctx)
    compiled = block_compiled or (compiles_modules_separately(b, ctx) and name not in ("attn_norm", "mlp_norm"))
    out_element = 2 if casts_linear_inputs(ctx) and (compiled or element == 2) else element
    out = b.tensor(f"{name}.out", count * out_element)
    scale = b.tensor(f"{name}.rstd", rows * 4.0 * (2 if ctx.model.norm == "layernorm" else 1), grad=False)
    if casts_linear_inputs(ctx) and element == 2 and not compiled:
        wide = b.tensor(f"{name}.upcast", 4.0 * count, grad=False)
        normed = b.tensor(f"{name}.normed", 4.0 * count, grad=False)
        b.add(Op(name, "memory_bound", MemoryBound(40.0 * count, "norm_chain_fwd"), (x,), (out, scale, wide, normed),
                 (scale, wide, normed), scratch=4.0 * count, launches=8, order=eager_norm_scratch(4.0 * count),
                 purpose="norm", step="norm", registered_at=registered_at,
                 back=OpBackward(104.0 * count, 17, 8.0 * count, like="norm_chain_bwd")))  # fmt: skip
        return out
    read = 0.0 if block_compiled and name == "mlp_norm" else element  # fused behind the residual's sum
    moved = (read + out_element) * count
    like: str = ctx.model.norm
    # the measured kernels read and write 2 bytes an element; wider elements count as more of them
    behind = block_compiled and not read
    short = width <= parts.HEAD and like == "rmsnorm"
    like = "rmsnorm_heads" if short else like
    work = MemoryBound(moved, "add_rmsnorm_fwd") if behind else MemoryBound(moved, f"{like}_fwd", moved / 4.0, width)
    back = OpBackward((3.0 * element + 2.0 * out_element) * count, 2, like=f"{like}_bwd",
                elements=count * (2.0 * element + out_element) / 6.0, width=width)  # fmt: skip
    if short:
        back = OpBackward(10.0 * count, 3, like=f"{like}_bwd", elements=count, width=width)
        back = back if compiled else parts.head_norm_backward(ctx, rows, width)
    b.add(Op(name, "memory_bound", work, (x,), (out, scale), (x, scale), back=back, purpose="norm", step="norm",
             registered_at=registered_at))  # fmt: skip
    return out


def eager_norm_scratch(x: FloatK) -> ScratchSequence:
    """Scratch of an eager norm: the input in fp32, its squares and what their mean gives, both multiplied, times the
    weight, and cast."""
    return ScratchSequence((x, x), (WRITES + 2, 0, ~0, WRITES + 1, WRITES + 3, 1, WRITES, ~1))


def qkv(b: TapeBuilder, ctx: Context, h: str) -> Heads:
    """Three linears on one gathered input; under autocast each keeps a copy of its own, unless compiled."""
    a, hidden = ctx.model.attention, float(ctx.model.hidden)
    full, wide = cast_shared_input(b, ctx, gather_sequence(b, ctx, h, "attn", hidden), "attn", ctx.tokens * hidden)
    widths = (("wq", ctx.heads * a.d_qk), ("wk", ctx.kv_heads * a.d_qk), ("wv", ctx.kv_heads * a.d_v))
    q, k, v = (
        linear(b, ctx, full, name, m=ctx.tokens, n=width, k=hidden, wide_input=wide, step="folded_product")
        for name, width in widths
    )
    return q, k, v


def head_norm(b: TapeBuilder, ctx: Context, x: str, name: str, heads: ArrayK, head_dim: float) -> str:
    """Norm over each head; keeps its input, the raw linear output; compiled, one kernel with the rotation behind it."""
    x = gather_heads(b, ctx, x, name, heads, head_dim)
    return norm_over_rows(
        b,
        ctx,
        x,
        name,
        ctx.tokens * heads * num_ranks_whose_heads_each_rank_norms(ctx),
        head_dim,
        ctx.activation_element_bytes,
    )


def mla(b: TapeBuilder, ctx: Context, attention: MlaSpec, h: str) -> Heads:
    """Latent attention (deepseek_v3/model.py): low-rank projections replicated over tp on the gathered sequence.

    Keys are concatenated with the one rotated key; values stay a view of the up-projection, which is kept whole.
    """
    t, e, hidden = ctx.tokens, ctx.activation_element_bytes, float(ctx.model.hidden)
    heads, rank, turn, nope = (
        ctx.heads,
        float(attention.kv_lora_rank),
        float(attention.qk_rope_head_dim),
        float(attention.qk_nope_head_dim),
    )
    d_qk, d_v = float(attention.d_qk), float(attention.v_head_dim)
    full, wide = cast_shared_input(b, ctx, gather_sequence(b, ctx, h, "attn", hidden), "attn", t * hidden)
    if attention.q_lora_rank is None:
        q_raw = linear(b, ctx, full, "wq", m=t, n=heads * d_qk, k=hidden, wide_input=wide, step="folded_product")
    else:
        low = float(attention.q_lora_rank)
        down = linear(b, ctx, full, "wq_a", m=t, n=low, k=hidden, wide_input=wide)
        down = norm_over_rows(b, ctx, down, "q_norm", t, low, e)
        down = sum_gradients_over_tp(b, down, "wq_b", t * low * e, ctx.has_tp)
        q_raw = linear(b, ctx, down, "wq_b", m=t, n=heads * d_qk, k=low)
    query = b.tensor("q", t * heads * d_qk * e)
    spun, back, scratch, launches = complex_rotation_work_and_backward(ctx, t * heads * turn, t * heads * turn)
    joined = 2.0 * t * heads * d_qk * e
    turned = b.tensor("q.turned", t * heads * turn * e, grad=False)
    order = ScratchSequence((0.5 * scratch, 0.5 * scratch), (0, 1, WRITES + 1, ~0, ~1, WRITES))
    b.add(Op("rope.q", "memory_bound", MemoryBound(spun.bytes + joined, "rope_complex"), (q_raw,), (query, turned),
             scratch=scratch, launches=launches // 2 + 1, order=order if e == 2 else None, step="rope",
             back=OpBackward(back.bytes + 2 * joined, launches // 2 + 4, back.scratch, like="rope_complex",
                       order=ScratchSequence((0.5 * back.scratch, 0.5 * back.scratch, 0.25 * back.scratch),
                                             (0, 1, ~0, 2, ~1, WRITES, ~2)) if e == 2 else None)))  # fmt: skip
    for local in (q_raw, turned):
        parts.hold_in_module(b, "attention", local)
    low_kv = linear(b, ctx, full, "wkv_a", m=t, n=rank + turn, k=hidden, wide_input=wide, step="folded_product")
    latent, single = b.tensor("kv.latent", t * rank * e), b.tensor("kv.single", t * turn * e)
    b.add(Op("wkv_a.split", "memory_bound", None, (low_kv,), (latent, single), view=True, launches=0, step="split",
             back=OpBackward(2 * t * (rank + turn) * e, 3, like="copy")))  # fmt: skip
    spun, back, scratch, launches = complex_rotation_work_and_backward(ctx, t * turn, t * turn)
    rotated = b.tensor("k.rope", t * turn * e)
    b.add(Op("rope.k", "memory_bound", spun, (single,), (rotated,), scratch=scratch, launches=launches // 2,
             step="rope", back=OpBackward(back.bytes, launches // 2 + 1, back.scratch,
             like="rope_complex")))  # fmt: skip
    latent = norm_over_rows(b, ctx, latent, "kv_norm", t, rank, e)
    latent = sum_gradients_over_tp(b, latent, "wkv_b", t * rank * e, ctx.has_tp)
    up = linear(b, ctx, latent, "wkv_b", m=t, n=heads * (nope + d_v), k=rank)
    part, value = b.tensor("k.nope", t * heads * nope * e), b.tensor("v", t * heads * d_v * e)
    b.add(Op("wkv_b.split", "memory_bound", None, (up,), (part, value), view=True, launches=0, step="split",
             back=OpBackward(2 * t * heads * (nope + d_v) * e, 1, like="copy")))  # fmt: skip
    key = b.tensor("k", t * heads * d_qk * e)
    b.add(Op("attn.k_join", "memory_bound", MemoryBound(joined, "copy"), (part, rotated), (key,), step="join",
             back=OpBackward(work=MemoryBound(joined, "copy"), family="memory_bound", launches=3,
             view=True)))  # fmt: skip
    return query, key, value


def attend(b: TapeBuilder, ctx: Context, q: str, k: str, v: str, windowed: bool) -> str:
    """cuDNN's fused attention; fp32 inputs are left to the composite one, which keeps the probabilities."""
    v = repeat_kv(b, ctx, v, "v", 1.0, ctx.model.attention.d_v)
    ctx = context_with_repeated_keys(ctx)
    for local in (q, k, v):
        parts.hold_in_module(b, "attention", local)
    if ctx.activation_element_bytes == 4:
        return _composite_attention(b, ctx, q, k, v)
    if any_true(ctx.cp > 1):
        return ring_attention(b, ctx, q, k, v, windowed)
    return parts.fused_attention(b, ctx, q, k, v, windowed)


def _composite_attention(b: TapeBuilder, ctx: Context, q: str, k: str, v: str) -> str:
    """The math backend: keys and values repeated to all heads, scaled copies, S x S fp32 scores with a mask."""
    a, t, s = ctx.model.attention, ctx.tokens, float(ctx.seq_len)
    wide_q, wide_v = t * ctx.heads * a.d_qk * 4.0, t * ctx.heads * a.d_v * 4.0
    scores = 4.0 * t * ctx.heads * s
    scaled_q, scaled_k = b.tensor("attn.q_scaled", wide_q), b.tensor("attn.k_scaled", wide_q)
    repeated = b.tensor("attn.v_repeated", wide_v)
    spread = ctx.kv_heads < ctx.heads
    parts.memory_bound_op(b, "attn.scale_q", (q,), scaled_q, bytes_=2 * wide_q, back_bytes=2 * wide_q)
    parts.memory_bound_op(b, "attn.scale_k", (k,), scaled_k, bytes_=4 * wide_q, back_bytes=4 * wide_q, launches=2,
                          back_launches=2)  # fmt: skip
    b.add(Op("attn.repeat_v", "memory_bound", MemoryBound(2 * wide_v), (v,), (repeated,), present=spread,
             back=OpBackward(2 * wide_v, 1)))  # fmt: skip
    soft = b.tensor("attn.soft", scores, grad=False)
    raw = b.tensor("attn.raw", wide_v)
    out = b.tensor("attn.out", wide_v)
    work = Attention(ctx.micro_batch, ctx.heads, ctx.seq_len, 2 * ctx.attention_pairs(False), a.d_qk, a.d_v,
                     kv_heads=ctx.kv_heads)  # fmt: skip
    saved = (scaled_q, scaled_k, repeated, soft)
    b.add(Op("attn.core", "attention", work, (scaled_q, scaled_k, repeated), (raw, soft), saved, scratch=2 * scores,
             launches=2, step="core", back=OpBackward(0.0, 4, 2 * scores)))  # fmt: skip
    b.add(Op("attn.softmax", "memory_bound", MemoryBound(7 * scores), (raw,), (out,), view=True, launches=4,
             back=OpBackward(work=MemoryBound(8 * scores), family="memory_bound", view=True, launches=3)))  # fmt: skip
    return out


def row_linear(b: TapeBuilder, ctx: Context, x: str, name: str, n: float, k: ArrayK) -> str:
    """A linear over the split width, and the reduce-scatter of its partial sums."""
    name = "wo" if name == "proj" else name
    hold_until_tp_scatter(b, ctx, x, name)
    out = scatter_sequence(b, ctx, linear(b, ctx, x, name, m=ctx.tokens, n=n, k=k), name, n)
    parts.release_module_locals(b, "attention")
    return out


def residual(b: TapeBuilder, ctx: Context, x: str, y: str, name: str) -> str:
    """An addition that keeps nothing; an fp32 stream takes a bf16 branch, whose gradient is cast back.

    Compiled, the sum inside a block runs in the kernel of the norm behind it and is not kept: the partitioner keeps
    the branch that was added to the block's input, which is kept anyway, and adds again. The block's last sum ends its
    use of the gathered weights.
    """
    count = ctx.shard_tokens * ctx.model.hidden
    wide, narrow = ctx.residual_element_bytes, ctx.activation_element_bytes
    compiled = is_in_compiled_block(b, ctx)
    if ctx.model.dropout > 0:
        dropped = b.tensor(f"{name}.dropped", count * narrow)
        mask = b.tensor(f"{name}.mask", count, grad=False)
        b.add(Op(f"{name}.dropout", "memory_bound", MemoryBound((2 * narrow + 1) * count), (y,), (dropped, mask),
        (mask,),
                 back=OpBackward((2 * narrow + 1) * count, 1)))  # fmt: skip
        y = dropped
    if wide != narrow:
        promoted = b.tensor(f"{name}.promoted", count * wide)
        b.add(Op(f"{name}.promote", "memory_bound", None, (y,), (promoted,), view=True, launches=0,
                 back=OpBackward(work=MemoryBound(CAST * count, "cast_down"), family="memory_bound")))  # fmt: skip
        y = promoted
    total = b.tensor(name, count * wide, use="residual")
    weights = fsdp.release_block_weights(b) if name == "out" else ()
    inside = compiled and name == "mid" and ctx.model.norm_placement != "after"
    b.add(Op(f"{name}.add", "memory_bound", MemoryBound((2.0 * wide + narrow) * count, "residual_add"),
             (y, x) if inside else (x, y, *weights), (total,), launches=0 if inside else 1, view=inside,
             autograd_functions=fsdp.num_python_functions_of_block_call(ctx) if name == "out" else 0.0, step="residual",
             back=OpBackward(0.0, 0)))  # fmt: skip
    return total


def mlp(b: TapeBuilder, ctx: Context, h: str, name: str, width: float) -> str:
    """Dense feed-forward on one gathered input."""
    full = gather_sequence(b, ctx, h, name, float(ctx.model.hidden))
    fused = is_in_compiled_block(b, ctx) and not is_compiled_block_split_by_ddp(b, ctx)
    y = feed_forward(b, ctx, full, name, width / ctx.tp, registered_at=registration.FEED_FORWARD, fused=fused,
                     step="folded_product", returns=False)  # fmt: skip
    out = scatter_sequence(b, ctx, y, f"{name}.w2", float(ctx.model.hidden))
    parts.release_module_locals(b, name)
    return out


# -- ends of the model


def embedding(b: TapeBuilder, ctx: Context) -> str:
    """Lookup; under tp of masked rows, reduce-scattered along the sequence. Its gradient is as large as the table, of
    which distributed tensors make all rows on every rank (tensor/_ops/_embedding_ops.py splits none of them).

    Each micro-batch's tokens come from pageable memory, for which the host waits until the device has done all before
    (train.py, ``train_step``: ``.to(self.device)``; torch's copy synchronizes the stream). Of a pipeline all come at
    once, as the step begins.
    """
    hidden, r = float(ctx.model.hidden), ctx.residual_element_bytes
    params = ctx.model.vocab * hidden / ctx.tp
    positions = (ctx.model.max_positions or 0) * hidden if ctx.model.positions == "learned" else 0.0
    wrap = params + positions / ctx.tp
    own_block = not b.block  # else part of a multi-token-prediction layer, which owns no embedding
    if own_block:
        if not ctx.pipelined:
            b.add(Op("tokens.sync", "host", HostSync()))
        fsdp.begin_block(b, ctx, "embedding", wrap, 0.0 * ctx.tp)
    grad = {"mixed": 2.0, "autocast": 4.0 * ctx.accumulating, "uniform": weight_gradient_bytes_per_param(ctx)}[
        ctx.precision_mode
    ]
    rows = ctx.tokens * hidden
    made = where(ctx.has_tp, ctx.model.vocab * hidden, params)
    looked = b.tensor("embedding.rows", rows * r)
    weights = tuple(n for n in ("fsdp.weights",) if n in b.tensors)
    each = {"mixed": 2.0, "autocast": 4.0, "uniform": float(ctx.activation_element_bytes)}[ctx.precision_mode]
    many = where(ctx.has_tp, 4.0, 1.0)
    scratch = parts.embedding_backward_scratch_bytes(ctx, made / hidden)
    b.add(Op("embedding", "memory_bound", MemoryBound(2 * rows * r, "embedding"), weights, (looked,), launches=many,
             back=parts.embedding_backward(ctx, made, each, scratch, 5),
             weight_params=params, weight_bytes=grad * made, purpose="embedding"))  # fmt: skip
    if positions:
        moved = b.tensor("embedding.sum", rows * r)
        looked = parts.memory_bound_op(b, "embedding.positions", (looked,), moved, bytes_=3 * rows * r, launches=2,
                                       back_launches=0)  # fmt: skip
    if own_block:
        fsdp.release_block_weights(b)
        fsdp.gather_and_await_first_block(b, ctx)
    return scatter_sequence(b, ctx, looked, "embedding", hidden)


def head(b: TapeBuilder, ctx: Context, x: str) -> str:
    """Final norm and output layer, one group that stays gathered until its backward; loss over logits split by tp."""
    hidden = float(ctx.model.hidden)
    vocab = ctx.model.vocab / ctx.tp
    fsdp.begin_block(b, ctx, "head", vocab * hidden + hidden, 0.0 * ctx.tp)
    normed = norm(b, ctx, x, "final_norm", hidden)
    full = gather_sequence(b, ctx, normed, "output", hidden)
    fsdp.release_block_weights(b)
    logits = linear(b, ctx, full, "output", m=ctx.tokens, n=vocab, k=hidden, wide_input=True, purpose="output")
    parts.release_module_locals(b, "output")
    if not ctx.framework.loss_parallel and any_true(ctx.has_tp):
        all_logits = b.tensor("logits.whole", ctx.tokens * ctx.model.vocab * float(ctx.activation_element_bytes))
        work = Collective("all_gather", "tp", ctx.tokens * ctx.model.vocab * float(ctx.activation_element_bytes))
        logits = b.add(
            Op("logits.all_gather", "tp", work, (logits,), (all_logits,), present=ctx.has_tp, stream="tp")
        )  # fmt: skip
        vocab = 1.0 * ctx.model.vocab
    logits = parts.finish_logits(b, ctx, logits, float(ctx.model.vocab))
    b.part = "loss"
    loss = cross_entropy(b, ctx, logits, ctx.tokens * vocab)
    b.part = ""
    return loss


# -- selective activation checkpointing by op


def ops_with_saved_outputs(
    forward: Tape, model: ModelSpec, *, attention: bool = True, products: bool = True
) -> frozenset[str]:
    """Ops whose outputs ``selective: op`` keeps (activation_checkpoint.py).

    Every other matrix product from the first, ``attention`` (``saves_attention``), reduce-scatters, and all-to-alls.
    Qwen3's list lacks the latter (models/qwen3/infra/parallelize.py); it runs experts behind grouped-query attention
    without sinks.

    Products of the router's gate are neither kept nor counted; grouped products are not in the list. ``products`` is
    False where parts of a block are compiled inside of the checkpoint: they multiply into memory of their own choice
    (``aten.mm.out``), which is another op than the list has, while attention is called as ever.
    """
    saved_outputs: set[str] = set()
    exchanges = model.attention_kind.torchtitan.keeps_exchanges or model.attention.sinks
    collectives = ("reduce_scatter", "all_to_all") if exchanges else ("reduce_scatter",)
    count = 0
    for op in forward.ops:
        work = op.work
        if isinstance(work, Gemm) and op.step != "gate":
            count += 1
            if products and count % 2:
                saved_outputs.add(op.name)
        elif (attention and isinstance(work, Attention)) or (isinstance(work, Collective) and work.kind in collectives):
            saved_outputs.add(op.name)
    return frozenset(saved_outputs)


PRIMITIVES = Primitives(
    norm=norm, qkv=qkv, head_norm=head_norm, rope=rope, mla=mla, attend=attend, row_linear=row_linear,
    residual=residual, mlp=mlp, moe=moe, embedding=embedding, head=head, begin_block=fsdp.begin_block,
    wrap_backward=fsdp.with_fsdp_in_backward,
)  # fmt: skip
