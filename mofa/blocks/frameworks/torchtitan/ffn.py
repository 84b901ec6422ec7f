"""torchtitan's feed-forward layer: eager activation, one op a kernel, or fused by the compiler."""

from __future__ import annotations

from collections.abc import Callable

from mofa.blocks.context import ArrayK, Context
from mofa.blocks.frameworks.torchtitan.linear import (
    cast_shared_input,
    hold_until_tp_scatter,
    linear,
    sum_gradients_over_tp,
)
from mofa.blocks.frameworks.torchtitan.registration import MATRIX
from mofa.blocks.op import BoolK, Op, OpBackward, TapeBuilder
from mofa.blocks.parts import release_module_locals
from mofa.blocks.roles import LayerStep
from mofa.blocks.work import MemoryBound


def feed_forward(
    b: TapeBuilder, ctx: Context, x: str, name: str, f: ArrayK, *, registered_at: int, fused: bool,
    partial: BoolK = False, returns: bool = True, step: LayerStep = "", activation: LayerStep = "activation",
) -> str:  # fmt: skip
    """w2(silu(w1 x) * w3 x), in this order: w1, silu, w3, product, w2; or w2(gelu(w1 x)).

    ``step`` is that of the first products, ``activation`` that of what is between them. ``returns``: whether nothing is
    scattered behind w2. ``partial`` where each product's gradient of x is summed over tp by itself.
    """
    t, e, hidden = ctx.tokens, ctx.activation_element_bytes, float(ctx.model.hidden)
    count = t * f
    x, wide = cast_shared_input(b, ctx, x, name, t * hidden)

    def up(which: str) -> str:
        source = sum_gradients_over_tp(b, x, f"{name}.{which}", t * hidden * e, partial)
        return linear(b, ctx, source, f"{name}.{which}", m=t, n=f, k=hidden, wide_input=wide, step=step,
                      behind_cut=which == "w3", registered_at=registered_at + MATRIX[which])  # fmt: skip

    act = gated_activation(b, ctx, name, up, count, count, e, fused=fused, step=activation)
    if not returns:
        hold_until_tp_scatter(b, ctx, act, f"{name}.w2")
    out = linear(b, ctx, act, f"{name}.w2", m=t, n=hidden, k=f, registered_at=registered_at + MATRIX["w2"])
    if returns:
        release_module_locals(b, name)
    return out


def gated_activation(
    b: TapeBuilder, ctx: Context, name: str, up: Callable[[str], str], memory_elements: ArrayK, moved: ArrayK, e: int,
    *, fused: bool, step: LayerStep = "",
) -> str:  # fmt: skip
    """The activation between the products: eager keeps w1 out, silu out, w3 out, the product; fused not silu out."""
    first = up("w1")
    if not ctx.model.mlp.gated:
        out = b.tensor(f"{name}.gelu", memory_elements * e)
        saved = out if ctx.model.mlp.activation == "relu" else first  # PyTorch's ReLU keeps its result
        b.add(Op(f"{name}.act", "memory_bound", MemoryBound(2 * moved * e, "gelu_fwd"), (first,), (out,), (saved,),
                 step=step, back=OpBackward(3 * moved * e, 1, like="gelu_bwd")))  # fmt: skip
        return out
    product = b.tensor(f"{name}.product", memory_elements * e)
    if fused:
        third = up("w3")
        back = OpBackward(5 * moved * e, 1, like="compiled swiglu_bwd")
        b.add(Op(f"{name}.act", "memory_bound", MemoryBound(3 * moved * e, "compiled swiglu_fwd"), (first, third),
                 (product,), (first, third), step=step, back=back))  # fmt: skip
        return product
    silu = b.tensor(f"{name}.silu", memory_elements * e)
    b.add(Op(f"{name}.act", "memory_bound", MemoryBound(2 * moved * e, "silu"), (first,), (silu,), (first,), step=step,
             back=OpBackward(3 * moved * e, 1, like="gelu_bwd")))  # fmt: skip
    third = up("w3")
    # autograd makes the gradient of a product's second factor first (MulBackward0: "other" comes before "self")
    b.add(Op(f"{name}.act_product", "memory_bound", MemoryBound(3 * moved * e, "mul"), (third, silu), (product,),
             (silu, third), step=step, back=OpBackward(6 * moved * e, 2, like="mul")))  # fmt: skip
    return product
