"""torchtitan's linears in fp8, as torchao's Float8Linear runs them inside a compiled block.

Read in torchtitan 0.2.2 (components/quantization/float8.py) and torchao 0.17.0 (float8/float8_linear.py, config.py,
float8_ops.py); kernels, their bytes and what is kept in the code that PyTorch 2.11's compiler writes for a block of
Llama's (docs/evidence/torchao_float8.md). Inputs, weights and gradients are scaled anew each time. A norm or an
activation in front of a linear writes nothing: what casts its output computes it once more, and so does the backward.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from mofa.blocks import parts
from mofa.blocks.context import Context
from mofa.blocks.elementwise import where
from mofa.blocks.float8 import Float8Recipe
from mofa.blocks.op import GRADIENT, BackwardPreparation, FloatK, Op, OpBackward, TapeBuilder
from mofa.blocks.roles import LayerStep, Purpose
from mofa.blocks.work import MemoryBound

SourceKind = Literal["norm", "norm_of_sum", "attention", "activation"]
"""What makes a linear's input: a norm, a norm behind a sum that is not kept, attention, an activation's product."""
TURNED_CAST = "compiled transposed_cast"
"""Measured op of kernels that write a transposed copy."""
STREAM = "compiled residual_add"
"""Measured op of those that only stream."""
SPLIT_REDUCTION_WIDTH = 8192.0
"""Columns up to which a search for the largest of each is split over several kernels, with a pass of its own (w2 of
14336 columns is not, others of 4096 are). [elements]"""


class CastBytesPerElement(NamedTuple):
    """Bytes that the casts of a linear's input to fp8 move, per element of it. [B]"""

    forward: float
    """To cast it, beside what makes it."""
    amax: float
    """To find its largest, where that is a kernel of its own."""
    copies: float
    """Of fp8, that its products read: one for each unless what makes it is too long to be repeated."""
    backward: float
    """To make the copies for weights' gradients, beside what its gradient takes."""


TENSORWISE: dict[SourceKind, CastBytesPerElement] = {
    "norm": CastBytesPerElement(5.0, 0.0, 3.0, 5.0), "norm_of_sum": CastBytesPerElement(5.0, 0.0, 1.0, 5.0),
    "attention": CastBytesPerElement(3.0, 2.0, 1.0, 5.0), "activation": CastBytesPerElement(5.0, 0.0, 1.0, 1.0),
}  # fmt: skip
"""One scale a tensor: a pass finds the largest, inside of the norm or the activation; a second one casts."""
ROWWISE: dict[SourceKind, CastBytesPerElement] = {
    "norm": CastBytesPerElement(3.0, 0.0, 3.0, 11.0), "norm_of_sum": CastBytesPerElement(2.0, 0.0, 2.0, 22.0),
    "attention": CastBytesPerElement(3.0, 0.0, 1.0, 5.0), "activation": CastBytesPerElement(1.0, 0.0, 1.0, 5.0),
}  # fmt: skip
"""A scale for each row: one kernel finds and casts. Weights' gradients want a scale for each column, another pass."""
WIDE_GRADIENTS = {"tensorwise": {"w2": 2.0, "wo": 1.0}, "rowwise": {"w2": 2.0, "wo": 2.0},
                  "rowwise-gw-hp": {"w2": 1.0, "wo": 1.0}}  # fmt: skip
"""Times that kernels read a gradient of the residual stream, which may be wider than bf16. [-]"""
GRADIENT_BYTES: dict[str, dict[str, float]] = {
    "tensorwise": {"w2": 6.0, "wo": 4.0, "w1": 3.0, "w3": 3.0, "wv": 6.0, "wq": 4.0, "wk": 4.0},
    "rowwise": {"w2": 8.0, "wo": 14.0, "w1": 12.0, "w3": 12.0, "wv": 6.0, "wq": 4.0, "wk": 4.0},
    "rowwise-gw-hp": {"w2": 3.0, "wo": 9.0, "w1": 3.0, "w3": 3.0, "wv": 3.0, "wq": 9.0, "wk": 1.0},
}
"""To find the largest of an output's gradient and to cast it, beside what makes it in bf16, per element. [B]"""
RESCALE = "compiled fp8_rescale"
"""Measured op that multiplies scales behind a product (float8_ops.py, ``addmm_float8_unwrapped``: rowwise without fast
accumulation is the product with one scale). Its time goes with elements: each rounds both scales to powers of two."""
RESCALED_ELEMENT_BYTES = 4.0
"""Of an output in bf16 that :data:`RESCALE` reads and writes. Inputs' gradients are told the same, although larger
kernels rescale most of them. [B]"""


def casts_weight_gradient(ctx: Context, name: str) -> bool:
    """Whether a kernel of its own casts a weight's gradient to fp32. Where scales are multiplied, that kernel does."""
    return not (ctx.float8 is not None and ctx.float8.recipe.rescales_weight_gradients and is_converted(ctx, name))


def is_converted(ctx: Context, name: str) -> bool:
    """Whether a linear is a Float8Linear; ``name`` is that of its op."""
    return ctx.float8 is not None and name.rpartition(".")[2] in ctx.float8.linears


def linear(
    b: TapeBuilder, ctx: Context, x: str, name: str, *, m: FloatK, n: FloatK, k: FloatK, grad_bytes_per_param: float,
    purpose: Purpose = "", registered_at: int = 0, step: LayerStep = "",
) -> str:  # fmt: skip
    """A product in fp8: casts of its input and its weight, and of its gradient on the way back."""
    assert ctx.float8 is not None
    recipe = ctx.float8.recipe
    operand, kind, sources = _cast_input(b, ctx, recipe, x, m * k)
    weight = _cast_weight(b, ctx, recipe, name, n, k)
    short = name.rpartition(".")[2]
    elements = m * n
    row = b.tensor(f"{name}.dy8", elements, "buffer", grad=False)
    keeps_bf16 = recipe.weight_gradient_in_bf16
    column = b.tensor(f"{name}.dy8_t", 0.0 * elements if keeps_bf16 else elements, "buffer", grad=False)
    wider = WIDE_GRADIENTS[recipe.name].get(short, 0.0) * (ctx.residual_element_bytes - 2.0)
    received = Op(f"{name}.dy_cast", "memory_bound",
                  MemoryBound((GRADIENT_BYTES[recipe.name][short] + wider) * elements,
                              STREAM if keeps_bf16 else TURNED_CAST),
                  (GRADIENT,), (row, column), launches=recipe.kernels_per_cast)  # fmt: skip
    turned = b.tensor(f"{name}.weight8_t", n * k, "buffer", grad=False)
    each = _weight_bytes_backward(ctx, recipe, k)
    again = Op(f"{name}.weight_again", "memory_bound", MemoryBound(each * n * k, TURNED_CAST), (), (turned,))
    returned = Op(f"{name}.weight_returns", "memory_bound", None, (turned,), (), launches=0)
    behind: tuple[Op, ...] = (returned,)
    if recipe.by_rows:
        outputs = m * k + (n * k if recipe.rescales_weight_gradients else 0.0)
        rescaled = MemoryBound(RESCALED_ELEMENT_BYTES * outputs, RESCALE)
        behind = (Op(f"{name}.rescale", "memory_bound", rescaled, (), ()), returned)
    inputs = ""
    if not keeps_bf16:
        inputs = b.tensor(f"{name}.again8_t", m * k, "buffer", grad=False)
        first = _is_first_reader(b, operand)
        moved = (ROWWISE if recipe.by_rows else TENSORWISE)[kind].backward * m * k if first else 0.0 * m * k
        behind = (*behind, Op(f"{name}.input_again", "memory_bound", MemoryBound(moved, TURNED_CAST), sources,
                               (inputs,), launches=_kernels(kind, recipe) if first else 0))  # fmt: skip
    out = parts.linear(
        b, ctx, operand, name, m=m, n=n, k=k, saves=sources, reads=(weight,), grad_bytes_per_param=grad_bytes_per_param,
        format_=recipe.product, purpose=purpose, registered_at=registered_at, step=step,
        prepared=BackwardPreparation((received,), row, GRADIENT if keeps_bf16 else column, (again,),
                                     behind, inputs),
    )  # fmt: skip
    if short in ("w1", "w3") and not keeps_bf16:  # the activation's gradients are cast as they are made
        b.tensors[out] = b.tensors[out]._replace(grad_bytes=0.0 * elements)
    return out


def _is_first_reader(b: TapeBuilder, operand: str) -> bool:
    """Whether no linear before reads this input: its copies for all weights' gradients come out of one kernel."""
    return not any(op.weight and operand in op.reads for op in b.ops)


def _kernels(kind: SourceKind, recipe: Float8Recipe) -> float:
    """Kernels that make an input's copies for weights' gradients: a search for the largest too, unless made so."""
    return 1.0 if kind == "activation" else float(recipe.kernels_per_cast)


def _cast_input(
    b: TapeBuilder, ctx: Context, recipe: Float8Recipe, x: str, count: FloatK
) -> tuple[str, SourceKind, tuple[str, ...]]:
    """A linear's input in fp8, one for all linears that read it; what made it; and what a backward makes it of."""
    maker = next((op for op in b.ops if x in op.writes), None)
    kind, sources = _source(x, maker)
    if recipe.weight_gradient_in_bf16:
        sources = (x,)
    operand = f"{x}.fp8"
    if operand in b.tensors:
        return operand, kind, sources
    table = (ROWWISE if recipe.by_rows else TENSORWISE)[kind]
    b.tensor(operand, table.copies * count, grad_bytes=2.0 * count)
    if kind != "attention" and not recipe.weight_gradient_in_bf16:
        _write_nothing(b, x, maker)
    read_wider = (ctx.residual_element_bytes - 2.0) if kind in ("norm", "norm_of_sum") and not recipe.by_rows else 0.0
    moved = (table.forward + table.amax + read_wider) * count
    b.add(Op(f"{x}.cast8", "memory_bound", MemoryBound(moved, STREAM), (x, *(s for s in sources if s != x)), (operand,),
             launches=recipe.kernels_per_cast, back=OpBackward(0.0, 0)))  # fmt: skip
    return operand, kind, sources


def _source(x: str, maker: Op | None) -> tuple[SourceKind, tuple[str, ...]]:
    """What made an input, and the tensors that its maker keeps anyway."""
    if maker is not None and maker.purpose == "norm":
        return ("norm_of_sum" if maker.name == "mlp_norm" else "norm"), maker.saves
    if maker is not None and maker.step == "activation":
        return "activation", maker.saves
    return "attention", (x,)


def _write_nothing(b: TapeBuilder, x: str, maker: Op | None) -> None:
    """What makes an input leaves its bf16 output out, whose gradient is there all the same."""
    tensor = b.tensors[x]
    b.tensors[x] = tensor._replace(bytes=0.0 * tensor.bytes, grad_bytes=tensor.bytes)
    if maker is None or not isinstance(maker.work, MemoryBound):
        return
    work = maker.work
    left = work.bytes - tensor.bytes
    share = left / work.bytes
    index = next(i for i, op in enumerate(b.ops) if op.name == maker.name)
    b.ops[index] = maker._replace(work=work._replace(bytes=left, elements=work.elements * share))


def _cast_weight(b: TapeBuilder, ctx: Context, recipe: Float8Recipe, name: str, n: FloatK, k: FloatK) -> str:
    """A weight's fp8 copy for one product; FSDP brings it where it gathers in fp8."""
    out = b.tensor(f"{name}.weight8", n * k, "buffer", grad=False)
    each = _weight_element_bytes(ctx)
    moved = (each + 1.0 if recipe.by_rows else 2.0 * each + 1.0) * n * k
    if ctx.framework.fp8_all_gather and ctx.precision_mode == "mixed":
        b.tensors[out] = b.tensors[out]._replace(bytes=0.0 * n * k)
        return b.add(Op(f"{name}.weight8", "memory_bound", None, (), (out,), launches=0))
    return b.add(Op(f"{name}.weight8", "memory_bound", MemoryBound(moved, STREAM), (), (out,),
                    launches=recipe.kernels_per_cast))  # fmt: skip


def _weight_element_bytes(ctx: Context) -> float:
    """Of an element of a weight as the block finds it. [B]"""
    return 4.0 if ctx.precision_mode == "autocast" else 2.0


def _weight_bytes_backward(ctx: Context, recipe: Float8Recipe, k: FloatK) -> FloatK:
    """To make a weight's copy for the input's gradient, per element. [B]

    With one scale the largest is known from the forward pass; gathered in fp8, the copy is only transposed.
    """
    each = _weight_element_bytes(ctx)
    if recipe.name == "tensorwise":
        return 2.0 if ctx.framework.fp8_all_gather and ctx.precision_mode == "mixed" else each + 1.0
    searched = each if recipe.weight_gradient_in_bf16 else where(k <= SPLIT_REDUCTION_WIDTH, each, 0.0)
    return searched + each + 1.0
