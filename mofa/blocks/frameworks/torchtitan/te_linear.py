"""Transformer Engine's Linear among PyTorch's own modules, as fsdp1 runs it (llm-foundry's ``fc_type: te``).

Read in Transformer Engine 0.10, pytorch/module/linear.py and module/base.py. Nobody says which micro-batch is the
first, so that every forward casts the weight, to both copies. The transposed one and the input's are what is kept. A
bias's gradient is summed inside of the cast of the output's gradient (``fp8_cast_transpose_bgrad_fused``).
"""

from __future__ import annotations

from mofa.blocks import parts
from mofa.blocks.context import Context
from mofa.blocks.fp8 import copies_per_fp8_weight
from mofa.blocks.frameworks.megatron.fp8 import (
    cast_input_to_fp8,
    cast_output_gradient_to_fp8,
    fp8_recipe_of,
    prepare_linear_backward,
)
from mofa.blocks.op import FloatK, Op, TapeBuilder
from mofa.blocks.roles import LayerStep, Purpose
from mofa.blocks.work import MemoryBound


def te_linear(
    b: TapeBuilder, ctx: Context, x: str, name: str, *, m: FloatK, n: FloatK, k: FloatK, grad_bytes_per_param: float,
    purpose: Purpose = "", registered_at: int = 0, step: LayerStep = "",
) -> str:  # fmt: skip
    """A product in fp8 with its casts; a byte an element of the input and of the weight is kept, transposed."""
    recipe = fp8_recipe_of(ctx)
    operand = cast_input_to_fp8(b, ctx, x, name, m * k)
    received = cast_output_gradient_to_fp8(b, ctx, name, m * n)
    copies = copies_per_fp8_weight(recipe.name, ctx.fp8_transposes)
    row = b.tensor(f"{name}.weight8", n * k, "weight_copy", grad=False)
    turned = b.tensor(f"{name}.weight8_t", (copies - 1.0) * n * k, "weight_copy", grad=False)
    moved = MemoryBound(recipe.cast_moved_bytes_per_element(copies) * n * k, recipe.weight_cast)
    b.add(Op(f"{name}.weight8", "memory_bound", moved, (), (row, turned), launches=recipe.kernels_per_cast))
    return parts.linear(
        b, ctx, operand.row, name, m=m, n=n, k=k, saves=(*operand.saves, turned), reads=(row,),
        grad_bytes_per_param=grad_bytes_per_param, format_=recipe.product,
        prepared=prepare_linear_backward(operand, received), purpose=purpose, registered_at=registered_at, step=step,
    )  # fmt: skip
