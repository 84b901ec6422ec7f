"""Transformer Engine's Linear among PyTorch's own modules, as fsdp1 runs it (llm-foundry's ``fc_type: te``).

Read in Transformer Engine 0.10, pytorch/module/linear.py and module/base.py. Nobody says which micro-batch is the
first, so that every forward casts the weight, to both copies. The transposed one and the input's are what is kept. A
bias's gradient is summed inside of the cast of the output's gradient (``fp8_cast_transpose_bgrad_fused``).
"""

from __future__ import annotations

from mofa.blocks import parts
from mofa.blocks.context import Context
from mofa.blocks.fp8 import copies_per_fp8_weight
from mofa.blocks.op import GRADIENT, BackwardPreparation, FloatK, Op, OpBackward, TapeBuilder
from mofa.blocks.roles import LayerStep, Purpose
from mofa.blocks.work import MemoryBound


def te_linear(
    b: TapeBuilder, ctx: Context, x: str, name: str, *, m: FloatK, n: FloatK, k: FloatK, grad_bytes_per_param: float,
    purpose: Purpose = "", registered_at: int = 0, step: LayerStep = "",
) -> str:  # fmt: skip
    """A product in fp8 with its casts; a byte an element of the input and of the weight is kept, transposed where
    products want the summed dimension innermost."""
    assert ctx.fp8 is not None
    recipe = ctx.fp8
    copies = copies_per_fp8_weight(recipe.name, ctx.fp8_transposes)
    like, second = (recipe.row_and_column_cast, 1.0) if copies > 1 else (recipe.row_cast, 0.0)

    def pair(of: str, elements: FloatK, grad_bytes: FloatK | None = None) -> tuple[str, str]:
        """A row-wise copy and a transposed one, which is the first where one does for both. [B]"""
        row = b.tensor(f"{name}.{of}8", elements, grad=grad_bytes is not None, grad_bytes=grad_bytes)
        return row, b.tensor(f"{name}.{of}8_t", second * elements, grad=False) if second else row

    def cast(of: str, elements: FloatK, reads: tuple[str, ...], writes: tuple[str, str], kernel: str) -> Op:
        moved = MemoryBound(recipe.cast_moved_bytes_per_element(copies) * elements, kernel)
        return Op(f"{name}.{of}8", "memory_bound", moved, reads, tuple(dict.fromkeys(writes)),
                  launches=recipe.kernels_per_cast, back=OpBackward(0.0, 0))  # fmt: skip

    operand = pair("input", m * k, m * k * ctx.activation_element_bytes)
    b.add(cast("input", m * k, (x,), operand, like))
    weight = pair("weight", n * k)
    b.add(cast("weight", n * k, (), weight, recipe.weight_cast))
    received = pair("dy", m * n)
    prepared = BackwardPreparation((cast("dy", m * n, (GRADIENT,), received, like),), *received)
    return parts.linear(
        b, ctx, operand[0], name, m=m, n=n, k=k, saves=(operand[1], weight[1]), reads=weight[:1],
        grad_bytes_per_param=grad_bytes_per_param, format_=recipe.product, prepared=prepared, purpose=purpose,
        registered_at=registered_at, step=step,
    )  # fmt: skip
