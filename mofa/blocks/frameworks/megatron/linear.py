"""Megatron-Core with Transformer Engine: norms, linears and the residual stream (see :mod:`.transformer_engine`)."""

from __future__ import annotations

from typing import TypedDict

from mofa.blocks.context import ArrayK, Context
from mofa.blocks.elementwise import any_true
from mofa.blocks.frameworks.megatron import fp8
from mofa.blocks.frameworks.megatron.calls import (
    add_op_of_module_python,
    linear_as_one_module_call,
    mark_ops_issued_by_call,
    timed_module_call,
)
from mofa.blocks.frameworks.megatron.tuned_norms import has_tuned_norm, untuned_norm_slowdown
from mofa.blocks.op import FloatK, Op, OpBackward, TapeBuilder
from mofa.blocks.parts import (
    HEAD,
    add_bias,
    head_norm_backward,
    linear,
    release_module_locals,
    sp_gather,
    tp_copy,
    tp_reduce,
)
from mofa.blocks.work import Collective, MemoryBound


class WeightGradientBytesPerParam(TypedDict, total=False):
    """Bytes a parameter of a linear's weight gradient, and of its accumulation: arguments of linears. [B/param]"""

    grad_bytes_per_param: float
    accumulate_bytes_per_param: float


def weight_gradient_bytes_per_param(ctx: Context) -> WeightGradientBytesPerParam:
    """Bytes of a weight gradient that is made apart and the bytes moved to add it. [B/param]"""
    if ctx.framework.fuses_wgrad_accumulation:  # reads and writes the main gradient where one alone writes 2 bytes
        return {"accumulate_bytes_per_param": 2.0 * ctx.framework.grads_bytes_per_param - 2.0}
    return {"grad_bytes_per_param": 2.0, "accumulate_bytes_per_param": ctx.framework.accumulation_bytes_per_param}


def norm(b: TapeBuilder, ctx: Context, x: str, name: str, width: float) -> str:
    """A norm: one kernel each way; keeps its input and its output, which the linear that it is fused with reads.

    Both are one function of autograd's, which has the gradient of the linear's output until it returns
    (te/module/layernorm_linear.py; te1-llama8b-4l-first-traced).
    """
    since = len(b.ops)
    out = norm_op(b, ctx, x, name, width, b.region or norm_region_name(b, ctx, name))
    op = b.ops[-1]
    if name in BEHIND and not _is_module(b, ctx, name) and op.back is not None:
        b.ops[-1] = op._replace(back=op.back._replace(held_outputs=(f"{BEHIND[name]}.out",)))
    mark_ops_issued_by_call(b, since, timed_module_call(ctx, "norm" if _is_module(b, ctx, name) else "norm_linear"))
    return out


BEHIND = {"attn_norm": "qkv", "mlp_norm": "mlp.fc1", "q_norm": "q_up", "kv_norm": "kv_up"}
"""The linear that each norm is fused with, where it is (gpt_layer_specs.py)."""


def _is_module(b: TapeBuilder, ctx: Context, name: str) -> bool:
    """Whether a norm is a module of its own, and no part of the linear behind it (gpt_layer_specs.py)."""
    if name == "attn_norm":
        return ctx.model.attention_kind.megatron.norm_is_module
    if name == "mlp_norm":
        return b.block == "experts"
    return name not in ("q_norm", "kv_norm")


@linear_as_one_module_call
def column_linear(
    b: TapeBuilder, ctx: Context, h: str, name: str, n: ArrayK, k: float, *, kept_anyway: bool = False
) -> str:  # fmt: skip
    """Column-parallel linear: the shard of its input is kept, gathered for the product and again for the gradient.

    ``kept_anyway``: another op keeps its input.
    """
    if ctx.fp8 is None:
        full = sp_gather(b, ctx, tp_copy(b, ctx, h, name, k), name, k)
        return linear(
            b, ctx, full, name, m=ctx.tokens, n=n, k=k, saves=(h,),
            regather=(f"{name}.all_gather",) if any_true(ctx.gathers_sequence) else (),
            **weight_gradient_bytes_per_param(ctx),
        )  # fmt: skip
    operand = fp8.cast_input_to_fp8(
        b, ctx, h, name, ctx.shard_tokens * k, gathered=ctx.tokens * k, kept_anyway=kept_anyway
    )
    full = fp8.gather_fp8_input(b, ctx, tp_copy(b, ctx, operand.row, name, k), name, ctx.tokens * k)
    received = fp8.cast_output_gradient_to_fp8(b, ctx, name, ctx.tokens * n)
    fp8.hold_gradient_copies_until_norm_backward(b, ctx, h, received)
    return linear(b, ctx, full, name, m=ctx.tokens, n=n, k=k, saves=operand.saves,
                  prepared=fp8.prepare_linear_backward(operand, received),
                  **weight_gradient_bytes_per_param(ctx))  # fmt: skip


@linear_as_one_module_call
def row_linear(
    b: TapeBuilder, ctx: Context, x: str, name: str, n: float, k: ArrayK, *, kept_anyway: bool = False
) -> str:  # fmt: skip
    """Row-parallel linear and the reduction of its partial results.

    In fp8 the shard of its gradient is cast before it is gathered (module/base.py, ``grad_output_preprocess``).
    """
    if ctx.fp8 is None:
        partial = linear(b, ctx, x, name, m=ctx.tokens, n=n, k=k, saves=(x,), **weight_gradient_bytes_per_param(ctx))
        return tp_reduce(b, ctx, partial, name, n)
    operand = fp8.cast_input_to_fp8(b, ctx, x, name, ctx.tokens * k, kept_anyway=kept_anyway)
    received = fp8.cast_output_gradient_to_fp8(b, ctx, name, ctx.shard_tokens * n, gathered=ctx.tokens * n)
    partial = linear(b, ctx, operand.row, name, m=ctx.tokens, n=n, k=k, saves=operand.saves,
                     prepared=fp8.prepare_linear_backward(operand, received),
                     **weight_gradient_bytes_per_param(ctx))  # fmt: skip
    out = tp_reduce(b, ctx, partial, name, n, scattered_back=fp8.VIEW)
    # the module's function has the input until it returns (module/linear.py; h200-te2-tp2-nemo12b-8l-delayed-beginning)
    b.add(Op(f"{name} returns", "memory_bound", None, (operand.row,), (), launches=0, present=ctx.tp > 1))
    return out


def attention_output_linear(b: TapeBuilder, ctx: Context, x: str, name: str, n: float, k: ArrayK) -> str:
    """The row-parallel linear behind attention, which keeps its output itself; then the module returns.

    What adds its bias sums its gradient's rows (fused_bias_dropout.py).
    """
    out = row_linear(b, ctx, x, name, n, k, kept_anyway=True)
    out = add_bias(b, out, name, n) if ctx.model.attention.out_bias else out
    release_module_locals(b, "attention")
    return out


@linear_as_one_module_call
def replicated_linear(b: TapeBuilder, ctx: Context, x: str, name: str, n: float, k: float) -> str:
    """A linear that each rank has whole, over its shard of the tokens."""
    if ctx.fp8 is None:
        return linear(b, ctx, x, name, m=ctx.shard_tokens, n=n, k=k, saves=(x,), **weight_gradient_bytes_per_param(ctx))
    operand = fp8.cast_input_to_fp8(b, ctx, x, name, ctx.shard_tokens * k)
    received = fp8.cast_output_gradient_to_fp8(b, ctx, name, ctx.shard_tokens * n)
    return linear(b, ctx, operand.row, name, m=ctx.shard_tokens, n=n, k=k, saves=operand.saves,
                  prepared=fp8.prepare_linear_backward(operand, received),
                  **weight_gradient_bytes_per_param(ctx))  # fmt: skip


def residual(b: TapeBuilder, ctx: Context, x: str, y: str, name: str) -> str:
    """Bias, dropout and add in one kernel; the mask is kept where there is dropout."""
    nbytes = ctx.shard_tokens * ctx.model.hidden * ctx.residual_element_bytes
    out = b.tensor(name, nbytes)
    saves: tuple[str, ...] = ()
    back = OpBackward(0.0, 0)
    writes: tuple[str, ...] = (out,)
    if ctx.model.dropout > 0:
        mask = b.tensor(f"{name}.mask", ctx.shard_tokens * ctx.model.hidden * 1.0, grad=False)
        writes, saves, back = (out, mask), (mask,), OpBackward(2.5 * nbytes, 1)
    b.add(
        Op(f"{name}.add", "memory_bound", MemoryBound(3 * nbytes, "residual_add"), (x, y), writes, saves, back=back,
           module_call=timed_module_call(ctx, "bias_dropout_add"))
    )  # fmt: skip
    if name == "mid":  # once a layer
        add_op_of_module_python(b, "layer", timed_module_call(ctx, "layer"))
        if ctx.fp8 is not None and ctx.fp8.enters_context_each_layer:
            add_op_of_module_python(b, "layer.fp8_context", timed_module_call(ctx, "fp8_context"))
    return out


def mark_python_autograd_function_counts(
    b: TapeBuilder, since: int, name: str, functions: FloatK, guarded: FloatK = 0.0
) -> None:
    """Say of the ops of this name, among those added since, how many functions of Python autograd calls around them."""
    for i, op in enumerate(b.ops[since:], since):
        if op.name == name:
            b.ops[i] = op._replace(autograd_functions=functions, guarded_calls=guarded)


def compiled_residual(b: TapeBuilder, ctx: Context, x: str, y: str, name: str) -> str:
    """Bias, dropout and add: one function that is compiled by itself (fused_bias_dropout.py, jit_fuser)."""
    since = len(b.ops)
    out = residual(b, ctx, x, y, name)
    mark_python_autograd_function_counts(b, since, f"{name}.add", 0.0, 1.0)
    return out


def norm_region_name(b: TapeBuilder, ctx: Context, name: str) -> str:
    """The region of a block's norm: a module of its own before latent attention and experts, else in the linear.

    The norm that is fused with a dense layer's first linear is part of the ``mlp`` checkpoint; ``layernorm``
    recomputation finds only norms that are modules (transformer_layer.py, gpt_layer_specs.py).
    """
    if name == "attn_norm":
        return "layernorm.attn_norm" if _is_module(b, ctx, name) else ""
    if name == "mlp_norm":
        return "layernorm.mlp_norm" if _is_module(b, ctx, name) else "mlp"
    return ""


def norm_op(
    b: TapeBuilder, ctx: Context, x: str, name: str, width: float, region: str, *, torch_kernels: bool = False,
    saved_input: str = "",
) -> str:  # fmt: skip
    """A norm over the last dimension: backward is two kernels, the input's and the weight's partial sums.

    ``torch_kernels`` are PyTorch's, else Transformer Engine's, which are slower at widths that have none of their own.
    ``saved_input`` is kept for the backward instead of ``x``, where named."""
    rows = b.tensors[x].bytes / (width * ctx.activation_element_bytes)
    out = b.tensor(f"{name}.out", rows * width * ctx.activation_element_bytes)
    scale = b.tensor(f"{name}.rstd", rows * 4.0 * (2 if ctx.model.norm == "layernorm" else 1), grad=False)
    moved = 2.0 * rows * width * ctx.activation_element_bytes
    like, forward, backward = str(ctx.model.norm), 1.0, 1.0
    if not torch_kernels:
        like = f"te {like}"
        if not has_tuned_norm(ctx, width):
            forward, backward = untuned_norm_slowdown(ctx, of_heads=width <= HEAD)
    elements = rows * width
    back = OpBackward(1.5 * moved, 2, like=f"{like}_bwd", elements=backward * elements, width=width)
    if torch_kernels and width <= HEAD and like == "rmsnorm":
        like, back = "rmsnorm_heads", head_norm_backward(ctx, rows, width)
    b.add(
        Op(name, "memory_bound", MemoryBound(moved, f"{like}_fwd", forward * elements, width), (x,), (out, scale),
           (saved_input or x, scale), region=region, back=back,
           weight_params=width * ctx.model.tensors_per_norm,
           accumulate_bytes_per_param=ctx.framework.accumulation_bytes_per_param, purpose="norm")
    )  # fmt: skip
    return out


def gather_into_shared_buffer(b: TapeBuilder, ctx: Context, x: str, name: str, width: float) -> str:
    """All-gather of the sequence shards into the global "mpu" buffer, which outlives the tape (tensor_parallel)."""
    nbytes = ctx.tokens * width * ctx.activation_element_bytes
    out = b.tensor(f"{name}.full", 0.0, "buffer", grad_bytes=nbytes)
    work = Collective("all_gather", "tp", nbytes)
    return b.add(Op(f"{name}.all_gather", "tp", work, (x,), (out,), present=ctx.gathers_sequence, stream="tp"))
