"""Memory-bound ops of routed tokens in plain PyTorch: on halves of a tensor, on a token's copies, on repeated rows, on
rows put in places, and a token's scores times its experts' outputs, as torchtitan writes it.

Unlike those on whole tensors they run with strides or broadcast, which costs them bandwidth.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mofa.calibrate.bench.torch_timing import Call, RandomInputs, num_input_sets
from mofa.calibrate.cases import Case, UnsupportedCase
from mofa.calibrate.shapes.routed import COPIES, INDEXED, PRODUCTS, REPEATED, top_k_of_op


def routed_calls(case: Case, pool: RandomInputs) -> list[Call]:
    """The calls of a case over routed tokens, with rotating inputs; ``tokens`` are rows, of which a token has so many
    copies."""
    rows, width = case.shape_size("tokens"), case.shape_size("width")
    make = _product if case.op in PRODUCTS else _indexed if case.op in (*INDEXED, REPEATED) else _call
    return [make(case.op, rows, width, pool) for _ in range(min(8, num_input_sets(4 * rows * width)))]


def _indexed(op: str, rows: int, width: int, pool: RandomInputs) -> Call:
    """Rows written to places, or added onto the rows that an index takes once, or once for each copy, or all alike."""
    dtype, device = (torch.float32 if op.endswith("_fp32") else torch.bfloat16), pool.device
    added = not op.startswith("index_put")
    index = torch.randperm(rows, device=device)
    if op == REPEATED:
        index = torch.zeros_like(index)
    elif op.startswith("index_backward"):
        index //= COPIES
    x = pool.random_tensor(rows, width, dtype=dtype)
    out = torch.zeros(int(index.max()) + 1, width, device=device, dtype=dtype)
    return lambda: out.index_put_((index,), x, accumulate=added)


def _product(op: str, rows: int, width: int, pool: RandomInputs) -> Call:
    """A batch of products, a token each: its row of scores with its experts' outputs; back for both operands."""
    dtype, top = (torch.float32 if op.endswith("_fp32") else torch.bfloat16), top_k_of_op(op)
    tokens = rows // top
    outputs, scores = (
        pool.random_tensor(tokens, top, width, dtype=dtype),
        pool.random_tensor(tokens, 1, top, dtype=dtype),
    )
    if "_bwd_" not in op:
        return lambda: torch.bmm(scores, outputs)
    grad = pool.random_tensor(tokens, 1, width, dtype=dtype)

    def backward() -> None:
        torch.bmm(scores.transpose(1, 2), grad)
        torch.bmm(grad, outputs.transpose(1, 2))

    return backward


def _call(op: str, rows: int, width: int, pool: RandomInputs) -> Call:
    device = pool.device
    if op.startswith("swiglu_halves"):
        gate, up = pool.random_tensor(rows, 2 * width).chunk(2, -1)
        if op.endswith("_fwd"):
            return lambda: F.silu(gate).mul_(up)
        grad, d_both = (
            pool.random_tensor(rows, width),
            torch.empty(rows, 2 * width, device=device, dtype=torch.bfloat16),
        )
        d_gate, d_up = d_both.chunk(2, -1)

        def backward() -> None:
            work = F.silu(gate)
            torch.mul(grad, work, out=d_up)
            torch.mul(grad, up, out=work)
            torch.ops.aten.silu_backward.grad_input(work, gate, grad_input=d_gate)

        return backward
    tokens = rows // COPIES
    if op == "gather_copies":
        source = pool.random_tensor(tokens, width)
        index = torch.randperm(rows, device=device) // COPIES
        return lambda: source[index]
    x = pool.random_tensor(rows, width).view(tokens, COPIES, width)
    if op == "sum_copies":
        return lambda: x.sum(1)
    # signs keep the numbers' size however often they are multiplied in place
    if op == "weigh_copies":
        weights = torch.sign(torch.randn(tokens, COPIES, 1, device=device)).to(torch.bfloat16)
        return lambda: x.mul_(weights)
    if op == "dot_copies":
        other = torch.sign(torch.randn(tokens, 1, width, device=device)).to(torch.bfloat16)
        return lambda: x.mul_(other).sum(-1)
    raise UnsupportedCase(f"no such op of routed tokens: {op}")
