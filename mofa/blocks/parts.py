"""Ops that every framework has, with the shapes and bytes filled in."""

from __future__ import annotations

from mofa.blocks.context import ArrayK, Context
from mofa.blocks.elementwise import BoolK, any_true, maximum, where
from mofa.blocks.op import RENEWAL, BackwardPreparation, Family, FloatK, Op, OpBackward, TapeBuilder
from mofa.blocks.roles import LayerStep, Purpose
from mofa.blocks.work import Attention, Backend, Collective, Gemm, MemoryBound
from mofa.specs.curves import TIMED_EMBEDDING_BYTES, TIMED_EMBEDDING_ROWS


def memory_bound_op(
    b: TapeBuilder, name: str, reads: tuple[str, ...], out: str, *, bytes_: FloatK, saves: tuple[str, ...] = (),
    back_bytes: FloatK = 0.0, back_launches: FloatK = 1, launches: FloatK = 1, scratch: FloatK = 0.0,
    back_scratch: FloatK = 0.0, family: Family = "memory_bound", weight_params: FloatK = 0.0, like: str = "",
    back_like: str = "", casts_for: str = "",
) -> str:  # fmt: skip
    """A memory-bound op with its backward: ``bytes_`` forward and ``back_bytes`` backward, in all. [B]"""
    back = OpBackward(back_bytes, back_launches, back_scratch, like=back_like)
    return b.add(
        Op(name, family, MemoryBound(bytes_, like), reads, (out,), saves, scratch, launches, back=back,
           weight_params=weight_params, casts_for=casts_for)
    )  # fmt: skip


def view(b: TapeBuilder, name: str, source: str, out: str) -> str:
    """A view: no bytes, no kernel, the gradient passes through."""
    return b.add(Op(name, "memory_bound", None, (source,), (out,), view=True, launches=0))


def hold_in_module(b: TapeBuilder, frame: str, x: str) -> None:
    """A local variable of a module's forward, which has it until it returns (:func:`release_module_locals`)."""
    if f"{frame} has {x}" in b.tensors:
        return
    alias = b.tensor(f"{frame} has {x}", 0.0 * b.tensors[x].bytes, grad=False)
    b.add(Op(alias, "memory_bound", None, (x,), (alias,), view=True, launches=0, frame=frame))


def release_module_locals(b: TapeBuilder, frame: str, present: BoolK = True) -> None:
    """The end of a module's forward, up to which its local variables are held where it is ``present``."""
    local_tensors = tuple(name for op in b.ops if op.frame == frame for name in op.writes)
    if local_tensors:
        b.add(Op(f"{frame} returns", "memory_bound", None, local_tensors, (), launches=0, present=present, frame=frame))


def mark_recomputed_output(b: TapeBuilder, name: str, out: str, x: str) -> str:
    """Mark a module's output, at whose gradient ``x`` is made again where Megatron discards it.

    A hook of the output does so before anything of the module goes back, whoever reads ``x`` in it
    (tensor_parallel/random.py, ``discard_output_and_register_recompute``).
    """
    like = b.tensors[out]
    hooked = b.tensor(
        f"{name}.hooked",
        like.bytes,
        grad_bytes=like.grad_bytes,
        grad_recorded_on_nccl_stream=like.grad_recorded_on_nccl_stream,
    )
    return b.add(Op(f"{name}.hook", "memory_bound", None, (out,), (hooked,), (x,), view=True, launches=0))


def mark_dispatcher_renewal(b: TapeBuilder) -> None:
    """Mark where Megatron's dispatcher of tokens has new probabilities in place of the last ones, whose graph goes.

    A recomputed layer's hang by autograd's graph on what its checkpoint was given: that and its gradient stay alive
    until here (:attr:`mofa.blocks.op.Tape.retained_by_dispatcher`).
    """
    b.add(Op(RENEWAL, "memory_bound", None, (), (), launches=0, purpose="renewal"))


def sp_gather(b: TapeBuilder, ctx: Context, x: str, name: str, width: FloatK) -> str:
    """All-gather of the sequence shards over tp, where sequence parallelism is on; its backward scatters."""
    out = b.tensor(f"{name}.full", ctx.tokens * width * ctx.activation_element_bytes)
    work = Collective("all_gather", "tp", ctx.tokens * width * ctx.activation_element_bytes)
    return b.add(Op(f"{name}.all_gather", "tp", work, (x,), (out,), present=ctx.gathers_sequence, stream="tp"))


def tp_copy(b: TapeBuilder, ctx: Context, x: str, name: str, width: FloatK) -> str:
    """The identity in front of a column-parallel linear without sequence parallelism; backward all-reduces.

    Where the framework launches that ahead of the weight gradient it runs on a stream of its own; else computing waits
    for it behind both products (``copy_to_tensor_model_parallel_region`` in front of ``F.linear``).
    """
    if not any_true(ctx.all_reduces_over_tp):
        return x
    out = b.tensor(f"{name}.copied", ctx.shard_tokens * width * ctx.activation_element_bytes)
    back = OpBackward(
        work=Collective("all_reduce", "tp", ctx.tokens * width * ctx.activation_element_bytes), family="tp",
        present=ctx.all_reduces_over_tp,
        view=True, stream="tp" if ctx.framework.overlap_input_grads else "compute",
    )  # fmt: skip
    return b.add(Op(f"{name}.copy", "memory_bound", None, (x,), (out,), view=True, launches=0, back=back))


def tp_reduce(
    b: TapeBuilder, ctx: Context, x: str, name: str, width: FloatK, *, scattered_back: OpBackward | None = None
) -> str:
    """Reduce-scatter (with sequence parallelism) or in-place all-reduce (without) behind a row-parallel linear.

    ``scattered_back`` is the way back of the reduce-scatter where it is not the all-gather of what was reduced.
    """
    payload = ctx.tokens * width * ctx.activation_element_bytes
    out = b.tensor(f"{name}.scattered", ctx.shard_tokens * width * ctx.activation_element_bytes)
    y = b.add(
        Op(f"{name}.reduce_scatter", "tp", Collective("reduce_scatter", "tp", payload), (x,), (out,),
           present=ctx.gathers_sequence, stream="tp", back=scattered_back)
    )  # fmt: skip
    if any_true(ctx.all_reduces_over_tp):
        reduced = b.tensor(f"{name}.reduced", ctx.shard_tokens * width * ctx.activation_element_bytes)
        y = b.add(
            Op(f"{name}.all_reduce", "tp", Collective("all_reduce", "tp", payload), (y,), (reduced,),
               present=ctx.all_reduces_over_tp, view=True, stream="tp")
        )  # fmt: skip
    return y


def linear(
    b: TapeBuilder, ctx: Context, x: str, name: str, *, m: FloatK, n: FloatK, k: FloatK, saves: tuple[str, ...],
    regather: tuple[str, ...] = (), out_element: int | None = None, grad_bytes_per_param: float = 0.0,
    accumulate_bytes_per_param: float = 0.0, format_: str = "", reads: tuple[str, ...] = (), grad: bool = True,
    functions: FloatK = 0.0, prepared: BackwardPreparation | None = None, purpose: Purpose = "", registered_at: int = 0,
    step: LayerStep = "",
) -> str:  # fmt: skip
    """A matrix product with a weight of n x k; ``grad_bytes_per_param`` of a weight gradient made apart. [B/param]"""
    out = b.tensor(f"{name}.out", m * n * (out_element or ctx.activation_element_bytes), grad=grad)
    params = n * k
    return b.add(
        Op(name, "gemm", Gemm(m, n, k, format_ or ctx.gemm_format), (x, *reads), (out,), saves, regather=regather,  # type: ignore[arg-type]
           weight=name, weight_params=params, weight_bytes=params * grad_bytes_per_param,
           accumulate_bytes_per_param=accumulate_bytes_per_param, autograd_functions=functions,
           backward_preparation=prepared,
           purpose=purpose, registered_at=registered_at, step=step)
    )  # fmt: skip


BACKENDS: dict[str, Backend] = {"flash": "flash", "flash1": "flash1"}
"""Library of a framework's fused attention, where it says more than that it is fused: cuDNN's elsewhere."""


def attention_backend(ctx: Context) -> Backend:
    """Library of the framework's fused attention."""
    return BACKENDS.get(ctx.framework.attention, "cudnn")


def fused_attention(
    b: TapeBuilder, ctx: Context, q: str, k: str, v: str, windowed: bool, *, back_launches: int = 3,
    beside: tuple[str, ...] = (),
) -> str:  # fmt: skip
    """Fused attention with the log-sum-exp kept; under cp one step runs beside the exchange of keys and values.

    A ring of cp steps: each step's exchange hides behind the step before, so that all but one step runs beside it.
    All-gather: the keys and values are complete before the first product. ``beside`` names what comes out of it
    beside its result.
    """
    a = ctx.model.attention
    heads, e = ctx.heads, ctx.activation_element_bytes
    pairs = ctx.attention_pairs(windowed)
    q_len = ctx.seq_len / ctx.cp
    out = b.tensor("attn.out", ctx.tokens * heads * a.d_v * e)
    lse = b.tensor("attn.lse", ctx.tokens * heads * 4.0, grad=False)
    workspace = attention_backward_scratch_bytes(ctx)
    kv_bytes = ctx.tokens * ctx.kv_heads * (a.d_qk + a.d_v) * e
    cp = ctx.cp
    backend = attention_backend(ctx)
    back = OpBackward(0.0, back_launches, workspace)
    if not any_true(cp > 1):
        work = Attention(ctx.micro_batch, heads, q_len, pairs, a.d_qk, a.d_v, kv_heads=ctx.kv_heads, backend=backend)
        b.add(Op("attn.core", "attention", work, (q, k, v), (out, lse), (q, k, v, out, lse), back=back,
                 step="core"))  # fmt: skip
        return out
    # the exchange: cp - 1 hops of the keys and values, in and out at once; backward moves their gradients too
    hops = maximum(cp - 1, 0.0)
    ring = ctx.cp_ring & (cp > 1)
    received = b.tensor("attn.kv_received", where(ring, 2.0, where(cp > 1, cp, 0.0)) * kv_bytes, "buffer")
    sent = Collective("all_gather", "cp", kv_bytes * cp)
    b.add(Op("attn.kv_exchange", "cp", sent, (k, v), (received,), present=cp > 1, stream="cp",
             back=OpBackward(work=Collective("reduce_scatter", "cp", 2.0 * kv_bytes * cp), family="cp", present=cp > 1,
                       stream="cp"), step="kv_exchange"))  # fmt: skip
    first = b.tensor("attn.partial", where(ring, ctx.tokens * heads * a.d_v * e, 0.0))
    share = where(ring, hops / cp, 0.0)
    body = Attention(
        ctx.micro_batch, heads, q_len, pairs * share, a.d_qk, a.d_v, kv_heads=ctx.kv_heads, backend=backend
    )
    b.add(Op("attn.core_beside", "attention", body, (q, k, v), (first,), (), present=ring, step="core_beside"))
    last = Attention(
        ctx.micro_batch, heads, q_len, pairs * (1 - share), a.d_qk, a.d_v, kv_heads=ctx.kv_heads, backend=backend
    )
    b.add(Op("attn.core", "attention", last, (q, k, v, received, first), (out, lse, *beside), (q, k, v, out, lse),
             back=back, step="core"))  # fmt: skip
    return out


def add_bias(b: TapeBuilder, x: str, name: str, width: float) -> str:
    """The output of a product whose bias another kernel adds for nothing: backward sums the gradient's rows."""
    nbytes = b.tensors[x].bytes
    out = b.tensor(f"{name}.biased", nbytes)
    back = OpBackward(work=MemoryBound(nbytes, "sum_rows", nbytes / 2.0, width), family="memory_bound", view=True)
    return b.add(
        Op(f"{name}.bias", "memory_bound", None, (x,), (out,), view=True, launches=0, region=b.region, back=back)
    )


def finish_logits(b: TapeBuilder, ctx: Context, logits: str, vocab: float) -> str:
    """Logits with the output layer's bias, multiplied by a constant and soft-capped, where the model does so.

    A soft cap is three eager kernels each way, a quotient, tanh and a product; tanh's output is kept (Gemma 2's
    ``final_logit_softcapping`` in transformers, modeling_gemma2.py).
    """
    model, nbytes = ctx.model, b.tensors[logits].bytes
    if model.head_bias:
        logits = add_bias(b, logits, "output", vocab)
    if "logits" in model.multipliers:
        out = b.tensor("logits.multiplied", nbytes)
        logits = memory_bound_op(
            b, "logits.multiply", (logits,), out, bytes_=2.0 * nbytes, back_bytes=2.0 * nbytes, like="silu",
            back_like="silu",
        )  # fmt: skip
    return soft_cap(b, logits, "logits") if model.logit_softcap else logits


def soft_cap(b: TapeBuilder, x: str, name: str) -> str:
    """A quotient by a constant, tanh and a product with the constant, of which tanh's output is kept."""
    nbytes = b.tensors[x].bytes
    tanh, out = b.tensor(f"{name}.tanh", nbytes, grad=False), b.tensor(f"{name}.capped", nbytes)
    return b.add(
        Op(f"{name}.softcap", "memory_bound", MemoryBound(6.0 * nbytes, "silu"), (x,), (out, tanh), (tanh,),
        scratch=nbytes,
           launches=3, back=OpBackward(7.0 * nbytes, 3, nbytes, like="gelu_bwd"))
    )  # fmt: skip


HEAD = 256.0
"""Longest row of a norm over heads; the measured norms over the model's width begin at 512. [-]"""
SPLIT_ROWS = 65536.0
"""Rows above which the sum of a norm's weight gradient is split over many blocks of threads. That takes a memset and a
kernel more, not issued as ops of their own (``LaunchGammaBetaBackwardCUDAKernel``,
aten/src/ATen/native/cuda/layer_norm_kernel.cu). [-]"""


def head_norm_backward(ctx: Context, rows: FloatK, width: float) -> OpBackward:
    """PyTorch's fused backward of norms over rows as short as a head: a block of threads each, then the weight's."""
    split = rows > SPLIT_ROWS
    counted = rows * where(split, 1.0, 1.0 + ctx.kernels.unsplit_norm_sum.value)
    return OpBackward(10.0 * rows * width, 2, like="rmsnorm_heads_bwd", elements=counted * width, width=width)


def attention_backward_scratch_bytes(ctx: Context) -> ArrayK:
    """What a fused attention kernel's backward works in: fp32 sums of dq and of each row; where queries share keys and
    values, the gradients of these for every query (FlashAttention's mha_bwd: dq_accum, softmax_d, dk_expanded).

    cuDNN's takes as much: 128.5, 64.25, 48.25 and 16.06 MiB recorded of four shapes, with shared keys or not. [B]
    """
    a, rows = ctx.model.attention, ctx.tokens * ctx.heads
    shared = where(ctx.heads > ctx.kv_heads, (a.d_qk + a.d_v) * float(ctx.activation_element_bytes), 0.0)
    return rows * (4.0 * a.d_qk + 4.0 + shared)


def activation_elements(ctx: Context, width: FloatK, *, sharded: bool = True) -> ArrayK:
    """Elements of an activation of this width."""
    return (ctx.shard_tokens if sharded else ctx.tokens) * width


def embedding_backward(
    ctx: Context, table_elements: FloatK, element_bytes: FloatK, scratch: FloatK, launches: FloatK,
    added_bytes: FloatK = 0.0,
) -> OpBackward:  # fmt: skip
    """The gradient of an embedding: its whole table is zeroed, then the tokens' rows are sorted and added to it.

    Timed as PyTorch's kernels were (``embedding_bwd``): by its tokens, and by the table that it zeroes.

    Parameters
    ----------
    table_elements
        Elements of the gradient. (K,)
    element_bytes
        Of one of them. [B]
    scratch
        Of :func:`embedding_backward_scratch_bytes`. (K,) [B]
    launches
        Kernels that the host launches. [-]
    added_bytes
        What is moved to add it to another gradient of the table. (K,) [B]
    """
    elements = ctx.tokens * float(ctx.model.hidden)
    moved = element_bytes * table_elements + 2.0 * elements * ctx.activation_element_bytes + added_bytes
    table_width = table_elements / TIMED_EMBEDDING_ROWS * element_bytes / TIMED_EMBEDDING_BYTES
    return OpBackward(
        moved, launches, scratch, like="embedding_bwd", elements=elements, width=table_width, parts=((added_bytes, ""),)
    )


def embedding_backward_scratch_bytes(ctx: Context, rows: FloatK) -> FloatK:
    """Partial sums of PyTorch's gradient of an embedding of ``rows`` rows. [B]

    Above 3072 tokens it sorts them and adds up in fp32 in pieces of ten, for which it allocates the most there can be:
    one for every ten tokens and one for every row that occurs (aten/src/ATen/native/cuda/Embedding.cu and
    EmbeddingBackwardKernel.cu of PyTorch 2.11: NROWS_PER_THREAD, max_partial_segment). Columns in whole warps.
    """
    pieces = ctx.tokens // 10 + where(ctx.tokens < rows, ctx.tokens, rows)
    return where(ctx.tokens > 3072, 4.0 * pieces * (-(-ctx.model.hidden // 32) * 32), 0.0)
