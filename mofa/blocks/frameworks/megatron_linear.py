"""Megatron-Core with Transformer Engine: norms, linears and the residual stream, read as :mod:`.megatron` says."""

from __future__ import annotations

from typing import TypedDict

from mofa.blocks.context import ArrayK, Context
from mofa.blocks.elementwise import anywhere
from mofa.blocks.op import Back, Collective, FloatK, Op, Stream, TapeBuilder
from mofa.blocks.parts import HEAD, heads_norm_back, linear, sp_gather, tp_copy, tp_reduce


class WeightGrad(TypedDict, total=False):
    """Arguments of a linear about its weight gradient."""

    grad_bytes_per_param: float
    accumulate_bytes_per_param: float


def weight_grad(ctx: Context) -> WeightGrad:
    """Bytes of a weight gradient that is made apart and the bytes moved to add it. [B/param]"""
    if ctx.framework.fuses_wgrad_accumulation:  # reads and writes the main gradient where one alone writes 2 bytes
        return {"accumulate_bytes_per_param": 2.0 * ctx.framework.grads_bytes_per_param - 2.0}
    return {"grad_bytes_per_param": 2.0, "accumulate_bytes_per_param": ctx.framework.accumulation_bytes_per_param}


def norm(b: TapeBuilder, ctx: Context, x: str, name: str, width: float) -> str:
    """One kernel each way; keeps its input and its output, which the linear that it is fused with reads."""
    return norm_op(b, ctx, x, name, width, b.region or norm_region(b, ctx, name))


def column_linear(b: TapeBuilder, ctx: Context, h: str, name: str, n: ArrayK, k: float) -> str:
    """Column-parallel linear: the shard of its input is kept, gathered for the product and again for the gradient."""
    kept = h
    if ctx.gemm_format == "fp8":
        elements = b.tensors[h].bytes / ctx.element
        h, kept = fp8_cast(b, ctx, h, name, elements, elements)
    h = tp_copy(b, ctx, h, name, k)
    full = fp8_gather(b, ctx, h, name, k) if ctx.gemm_format == "fp8" else sp_gather(b, ctx, h, name, k)
    return linear(
        b, ctx, full, name, m=ctx.tokens, n=n, k=k, saves=(kept,),
        regather=(f"{name}.all_gather",) if anywhere(ctx.gathers) else (), **weight_grad(ctx),
    )  # fmt: skip


def fp8_gather(b: TapeBuilder, ctx: Context, x: str, name: str, width: float) -> str:
    """All-gather of what was cast already, a byte an element; the gradient is reduced as it is.

    Transformer Engine's module/linear.py: ``cast_to_fp8`` before ``gather_along_first_dim``, forward and backward.
    """
    elements = ctx.tokens * width
    out = b.tensor(f"{name}.full", 1.0 * elements, grad_bytes=elements * ctx.element)
    reduced = Collective("reduce_scatter", "tp", elements * ctx.element)
    back = Back(work=reduced, family="tp", present=ctx.gathers, stream="tp")
    work = Collective("all_gather", "tp", 1.0 * elements)
    op = Op(f"{name}.all_gather", "tp", work, (x,), (out,), present=ctx.gathers, stream="tp", back=back)
    return b.add(op)


def fp8_scatter(b: TapeBuilder, ctx: Context, x: str, name: str, width: float) -> str:
    """Reduction behind an fp8 row-parallel linear; the shard of its gradient is cast before it is gathered.

    Transformer Engine's module/base.py: ``grad_output_preprocess``, "FP8 case with gather".
    """
    gathered = Collective("all_gather", "tp", ctx.tokens * width * 1.0)
    back = Back(work=gathered, family="tp", present=ctx.gathers, stream="tp")
    return tp_reduce(b, ctx, x, name, width, scattered_back=back)


def fp8_cast(b: TapeBuilder, ctx: Context, x: str, name: str, elements: FloatK, rows: FloatK) -> tuple[str, str]:
    """Cast and transpose for an fp8 product: the row-wise copy that it reads, the column-wise one that is kept.

    Where products take any layout one copy is both. ``elements`` that are held, ``rows`` that are moved (elements as
    well): they differ where routing is uneven.
    """
    row = b.tensor(f"{name}.fp8", 1.0 * elements, grad_bytes=elements * ctx.element)
    if not ctx.fp8_transposes:
        b.add(
            Op(f"{name}.cast", "memory_bound", Stream(3.0 * rows, like="cast_down"), (x,), (row,), launches=2,
               back=Back(3.0 * rows, 2, like="cast_down"))
        )  # fmt: skip
        return row, row
    column = b.tensor(f"{name}.fp8_t", 1.0 * elements, grad=False)
    b.add(
        Op(f"{name}.cast", "memory_bound", Stream(4.0 * rows, like="cast_down"), (x,), (row, column), launches=2,
           back=Back(4.0 * rows, 2, like="cast_down"))
    )  # fmt: skip
    return row, column


def row_linear(b: TapeBuilder, ctx: Context, x: str, name: str, n: float, k: ArrayK) -> str:
    """Row-parallel linear and the reduction of its partial results."""
    kept = x
    if ctx.gemm_format == "fp8":
        elements = b.tensors[x].bytes / ctx.element
        x, kept = fp8_cast(b, ctx, x, name, elements, elements)
    partial = linear(b, ctx, x, name, m=ctx.tokens, n=n, k=k, saves=(kept,), **weight_grad(ctx))
    reduce = fp8_scatter if ctx.gemm_format == "fp8" else tp_reduce
    return reduce(b, ctx, partial, name, n)


def residual(b: TapeBuilder, ctx: Context, x: str, y: str, name: str) -> str:
    """Bias, dropout and add in one kernel; the mask is kept where there is dropout."""
    nbytes = ctx.shard * ctx.model.hidden * ctx.residual
    out = b.tensor(name, nbytes)
    saves: tuple[str, ...] = ()
    back = Back(0.0, 0)
    writes: tuple[str, ...] = (out,)
    if ctx.model.dropout > 0:
        mask = b.tensor(f"{name}.mask", ctx.shard * ctx.model.hidden * 1.0, grad=False)
        writes, saves, back = (out, mask), (mask,), Back(2.5 * nbytes, 1)
    b.add(Op(f"{name}.add", "memory_bound", Stream(3 * nbytes, "residual_add"), (x, y), writes, saves, back=back))
    return out


def by_python(b: TapeBuilder, since: int, name: str, functions: FloatK, guarded: FloatK = 0.0) -> None:
    """Say of the ops of this name, among those added since, how many functions of Python autograd calls around them."""
    for i, op in enumerate(b.ops[since:], since):
        if op.name == name:
            b.ops[i] = op._replace(functions=functions, guarded=guarded)


def compiled_residual(b: TapeBuilder, ctx: Context, x: str, y: str, name: str) -> str:
    """Bias, dropout and add: one function that is compiled by itself (fused_bias_dropout.py, jit_fuser)."""
    since = len(b.ops)
    out = residual(b, ctx, x, y, name)
    by_python(b, since, f"{name}.add", 0.0, 1.0)
    return out


def norm_region(b: TapeBuilder, ctx: Context, name: str) -> str:
    """The region of a block's norm: a module of its own before latent attention and experts, else in the linear.

    The norm that is fused with a dense layer's first linear is part of the ``mlp`` checkpoint; ``layernorm``
    recomputation finds only norms that are modules (transformer_layer.py, gpt_layer_specs.py).
    """
    if name == "attn_norm":
        return "layernorm.attn_norm" if ctx.model.attention.kind == "mla" else ""
    if name == "mlp_norm":
        return "layernorm.mlp_norm" if b.block.startswith("moe") else "mlp"
    return ""


def norm_op(
    b: TapeBuilder, ctx: Context, x: str, name: str, width: float, region: str, *, torch_kernels: bool = False,
    kept: str = "",
) -> str:  # fmt: skip
    """A norm over the last dimension: backward is two kernels, the input's and the weight's partial sums.

    PyTorch's kernels were measured; Transformer Engine's are taken at the general rate. ``kept`` is what is kept where
    it is not what is read."""
    rows = b.tensors[x].bytes / (width * ctx.element)
    out = b.tensor(f"{name}.out", rows * width * ctx.element)
    scale = b.tensor(f"{name}.rstd", rows * 4.0 * (2 if ctx.model.norm == "layernorm" else 1), grad=False)
    moved = 2.0 * rows * width * ctx.element
    like, wide = (str(ctx.model.norm), width) if torch_kernels else ("general", 0.0)
    back = Back(1.5 * moved, 2, like=f"{like}_bwd", elements=rows * width, width=wide)
    if torch_kernels and width <= HEAD and like == "rmsnorm":
        like, back = "rmsnorm_heads", heads_norm_back(rows, width)
    b.add(
        Op(name, "memory_bound", Stream(moved, f"{like}_fwd", rows * width, wide), (x,), (out, scale),
           (kept or x, scale), region=region, back=back,
           weight_params=width * (2 if ctx.model.norm == "layernorm" else 1),
           accumulate_bytes_per_param=ctx.framework.accumulation_bytes_per_param)
    )  # fmt: skip
    return out


def buffer_gather(b: TapeBuilder, ctx: Context, x: str, name: str, width: float) -> str:
    """All-gather of the sequence shards into the global "mpu" buffer, which outlives the tape (tensor_parallel)."""
    nbytes = ctx.tokens * width * ctx.element
    out = b.tensor(f"{name}.full", 0.0, "buffer", grad_bytes=nbytes)
    work = Collective("all_gather", "tp", nbytes)
    return b.add(Op(f"{name}.all_gather", "tp", work, (x,), (out,), present=ctx.gathers, stream="tp"))
