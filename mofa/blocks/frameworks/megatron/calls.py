"""Which module of Transformer Engine or Megatron-Core issues an op: what the host pays for it as a whole.

Read in megatron_core 0.16.1 (transformer/transformer_layer.py, attention.py, mlp.py, moe/; extensions/
transformer_engine.py, models/gpt/gpt_layer_specs.py) and transformer_engine 2.20.2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec

from mofa.blocks.context import Context
from mofa.blocks.elementwise import BoolK
from mofa.blocks.op import FloatK, Op, TapeBuilder, TimedModuleCall
from mofa.specs.host import Module

P = ParamSpec("P")
Linear = Callable[Concatenate[TapeBuilder, Context, str, P], str]
"""(builder, context, input, ...) -> output"""


def timed_module_call(
    ctx: Context, module: Module, members: FloatK = 0.0, times: FloatK = 1.0
) -> TimedModuleCall | None:
    """A call of a module; None in frameworks whose ops are issued one by one."""
    if not ctx.framework.module_calls:
        return None
    return TimedModuleCall(module, "bf16" if ctx.fp8 is None else f"fp8-{ctx.fp8.name}", members, times)


def mark_ops_issued_by_call(b: TapeBuilder, since: int, call: TimedModuleCall | None) -> None:
    """Say of the ops added since that a module's call issues them, but of those that another one does."""
    if call is None:
        return
    for i, op in enumerate(b.ops[since:], since):
        if op.module_call is None:
            b.ops[i] = op._replace(module_call=call)


def add_op_of_module_python(b: TapeBuilder, name: str, call: TimedModuleCall | None, present: BoolK = True) -> None:
    """A module's own Python, where none of its kernels is its alone."""
    if call is not None:
        b.add(Op(name, "host", None, (), (), launches=0, present=present, module_call=call))


def linear_call_with_norm(b: TapeBuilder, ctx: Context, h: str) -> TimedModuleCall | None:
    """The call of a linear that reads ``h``: that of the norm right before it where both are one module."""
    before = b.ops[-1] if b.ops else None
    if (
        before is not None
        and h in before.writes
        and before.module_call is not None
        and before.module_call.module == "norm_linear"
    ):
        return before.module_call
    return timed_module_call(ctx, "linear")


def linear_as_one_module_call(linear: Linear[P]) -> Linear[P]:
    """A linear as one module's call, or as part of that of the norm right before it."""

    @wraps(linear)
    def called(b: TapeBuilder, ctx: Context, x: str, /, *args: P.args, **named: P.kwargs) -> str:
        since, by = len(b.ops), linear_call_with_norm(b, ctx, x)
        out = linear(b, ctx, x, *args, **named)
        mark_ops_issued_by_call(b, since, by)
        return out

    return called
