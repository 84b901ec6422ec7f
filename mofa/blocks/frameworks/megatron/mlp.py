"""Megatron's dense feed-forward and its fused activation, which experts share.

Read in megatron_core 0.16.1 (transformer/mlp.py, fusions/fused_bias_swiglu.py) and transformer_engine 2.20.
"""

from __future__ import annotations

from mofa.blocks.context import ArrayK, Context
from mofa.blocks.elementwise import BoolK, where
from mofa.blocks.frameworks.megatron.calls import timed_module_call
from mofa.blocks.frameworks.megatron.linear import column_linear, row_linear
from mofa.blocks.op import FloatK, Op, OpBackward, TapeBuilder
from mofa.blocks.parts import add_bias, hold_in_module, linear, memory_bound_op, release_module_locals
from mofa.blocks.work import MemoryBound


def activation(
    b: TapeBuilder, ctx: Context, h: str, name: str, elements: ArrayK, moved: ArrayK, region: str, launches: FloatK = 1
) -> str:
    """A fused gate, or an activation without one: one kernel each way, the first linear's output kept.

    ``elements`` are those of the output.

    SwiGLU's backward makes both halves of one gradient in one kernel, which reads gradient and input for each half
    (fused_bias_swiglu.py, ``swiglu_back``); the kernels of a dense layer were measured. Experts take 8 passes over the
    output, and 3 in another kernel for the gradient of the probabilities (``weighted_swiglu_back``).

    Dense layers and shared experts call the same function, compiled when it is first called. Where a rank calls it with
    two widths, it is compiled for any width the second time (TorchDynamo's automatic dynamic shapes). Its kernels then
    divide each element's index by a width that they read, once forward and once back. They take
    ``any_width_swiglu_*_passes`` of the GPU's ``layer_kernels``, on the curves of the compiled one.
    """
    gated = ctx.model.mlp.gated
    if gated and not fuses_activation(ctx, name):
        return unfused_swiglu(b, ctx, h, name, elements, moved, region, launches)
    out = b.tensor(f"{name}.act", elements * ctx.activation_element_bytes)
    wide = 2.0 if gated else 1.0
    like, again = ("compiled swiglu_fwd", "compiled swiglu_bwd") if gated else ("gelu_fwd", "gelu_bwd")
    any_width = _any_width(ctx, name)
    counted: FloatK = 0.0
    width: FloatK = 0.0
    compiled = compiled_activation_name(ctx)
    if compiled and name != "experts" and not (gated and ctx.model.gates_in_two_widths):
        like, again = f"te {compiled}_fwd", f"te {compiled}_bwd"
        counted, width = moved, moved / ctx.tokens  # by elements and width, as it was measured
    weighted = 1.0 if gated and name == "experts" else 0.0
    passes = where(any_width, ctx.kernels.any_width_swiglu_forward_passes.value, wide + 1.0)
    back_passes = where(
        any_width, ctx.kernels.any_width_swiglu_backward_passes.value, 8.0 + 3.0 * weighted if gated else 3.0
    )
    back = OpBackward(
        back_passes * moved * ctx.activation_element_bytes,
        launches * (1.0 + weighted),
        like=again,
        elements=counted,
        width=width,
    )
    by = timed_module_call(ctx, "weighted_swiglu" if name == "experts" else "swiglu")
    if name == "experts" and ctx.framework.experts == "sequential":  # issued one expert after the other
        by = None
    work = MemoryBound(passes * moved * ctx.activation_element_bytes, like, counted, width)
    saved = out if ctx.model.mlp.activation == "relu" else h  # PyTorch's ReLU keeps its result
    b.add(
        Op(f"{name}.activation", "memory_bound", work, (h,), (out,), (saved,),
           region=region, launches=launches, back=back, module_call=by)
    )  # fmt: skip
    return out


def compiled_activation_name(ctx: Context) -> str:
    """Which activation of a dense layer TorchInductor compiles for its one shape, by its curve's name; empty where
    PyTorch's own kernels run: the plain ReLU, GELU without a bias (mlp.py, ``bias_activation_fusion``)."""
    mlp = ctx.model.mlp
    if mlp.activation == "gelu":
        return "bias_gelu" if mlp.bias and ctx.framework.fused_swiglu else ""
    return {"swiglu": "swiglu", "geglu": "geglu", "relu2": "squared_relu"}.get(mlp.activation, "")


def fuses_activation(ctx: Context, name: str) -> bool:
    """Whether a gate is one function with what it gates: GeGLU's is in a dense layer alone (moe/experts.py, which
    fuses SwiGLU and the quick GELU)."""
    if not ctx.model.mlp.gated or not ctx.framework.fused_swiglu:
        return False
    return name != "experts" or ctx.model.mlp.activation == "swiglu"


def unfused_swiglu(
    b: TapeBuilder, ctx: Context, h: str, name: str, elements: ArrayK, moved: ArrayK, region: str, launches: FloatK = 1
) -> str:
    """SwiGLU as silu, an added offset and a product, each output kept (mlp.py:218-226)."""
    allocated_bytes, moved_bytes = elements * ctx.activation_element_bytes, moved * ctx.activation_element_bytes
    gate, up = b.tensor(f"{name}.gate", allocated_bytes), b.tensor(f"{name}.up", allocated_bytes)
    b.add(
        Op(f"{name}.chunk", "memory_bound", None, (h,), (gate, up), view=True, launches=0, region=region,
           back=OpBackward(4 * moved_bytes, launches, like="copy"))
    )  # fmt: skip
    silu, shifted = b.tensor(f"{name}.silu", allocated_bytes), b.tensor(f"{name}.shifted", allocated_bytes)
    out = b.tensor(f"{name}.act", allocated_bytes)
    back = OpBackward(3 * moved_bytes, launches, like="gelu_bwd")
    b.add(
        Op(f"{name}.silu", "memory_bound", MemoryBound(2 * moved_bytes, "silu"), (gate,), (silu,), (gate,),
           launches=launches, region=region, back=back)
    )  # fmt: skip
    b.add(
        Op(f"{name}.offset", "memory_bound", MemoryBound(2 * moved_bytes, "silu"), (up,), (shifted,), launches=launches,
           region=region, back=OpBackward(0.0, 0))
    )  # fmt: skip
    b.add(
        Op(f"{name}.product", "memory_bound", MemoryBound(3 * moved_bytes, "mul"), (silu, shifted), (out,),
        (silu, shifted),
           launches=launches, region=region, back=OpBackward(6 * moved_bytes, 2 * launches, like="mul"))
    )  # fmt: skip
    return out


def _any_width(ctx: Context, name: str) -> BoolK:
    """Where an activation's function is called with two widths on its rank: under pipelines the shared experts' only
    where dense layers are between theirs, not where they are the first ones."""
    if name not in ("mlp", "shared") or not ctx.model.gates_in_two_widths:
        return False
    moe = ctx.model.moe
    assert moe is not None
    return True if name == "mlp" or moe.every > 1 else ctx.has_all_layers


def mlp(b: TapeBuilder, ctx: Context, h: str, name: str, width: float) -> str:
    """Dense feed-forward: gate and up in one product.

    Biases are added by what follows (``skip_bias_add``): by the activation, whose function returns a gradient of every
    row that autograd sums (fused_bias_gelu.py), and with the residual.
    """
    f, bias = width / ctx.tp, ctx.model.mlp.bias
    n = 2 * f if ctx.model.mlp.gated else f
    b.region = "mlp" if name == "mlp" else b.region
    # the router keeps the shared experts' input as well (moe/shared_experts.py)
    fc1 = column_linear(b, ctx, h, f"{name}.fc1", n, ctx.model.hidden, kept_anyway=name == "shared")
    fc1 = add_bias(b, fc1, f"{name}.fc1", width) if bias else fc1
    act = activation(b, ctx, fc1, name, ctx.tokens * f, ctx.tokens * f, b.region)
    hold_in_module(b, name, act)  # intermediate_parallel in mlp.py's forward
    y = row_linear(b, ctx, act, f"{name}.fc2", ctx.model.hidden, f)
    y = add_bias(b, y, f"{name}.fc2", float(ctx.model.hidden)) if bias else y
    release_module_locals(b, name)
    b.region = ""
    return y


def multiply_by_shared_gate(b: TapeBuilder, ctx: Context, h: str, y: str) -> str:
    """What the experts said that all tokens pass, times a gate of one number a token, where there is one.

    transformer/moe/shared_experts.py, ``SharedExpertMLP.forward``: a product with one row and a sigmoid, in eager ops.
    The gate's gradient is that of the output times ``y``, which is kept, summed over each token.
    """
    moe = ctx.model.moe
    assert moe is not None
    if not moe.shared_gate:
        return y
    b.region = "moe.shared"
    s, hidden = ctx.shard_tokens, float(ctx.model.hidden)
    logits = linear(
        b, ctx, h, "shared.gate", m=s, n=1.0, k=hidden, saves=(h,), format_="bf16", grad_bytes_per_param=2.0,
        accumulate_bytes_per_param=ctx.framework.accumulation_bytes_per_param,
    )  # fmt: skip
    gate, column = b.tensor("shared.gate_score", s * ctx.activation_element_bytes), s * ctx.activation_element_bytes
    memory_bound_op(b, "shared.sigmoid", (logits,), gate, bytes_=2.0 * column, saves=(gate,), back_bytes=3.0 * column)
    out, nbytes = (
        b.tensor("shared.gated", s * hidden * ctx.activation_element_bytes),
        s * hidden * ctx.activation_element_bytes,
    )
    memory_bound_op(b, "shared.times_gate", (y, gate), out, bytes_=2.0 * nbytes, saves=(y, gate),
                    back_bytes=6.0 * nbytes, back_launches=3, back_scratch=nbytes, like="mul")  # fmt: skip
    b.region = ""
    return out
