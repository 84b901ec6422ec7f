"""Matrix products and attention, as frameworks call them through torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mofa.calibrate.bench.torch_timing import Call, RandomInputs, num_input_sets
from mofa.calibrate.cases import Case, UnsupportedCase

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}


def gemm_calls(case: Case, pool: RandomInputs) -> list[Call]:
    """Calls of a dense product in one of the three layouts of a linear layer, over rotating inputs."""
    m, n, k = (case.shape_size(x) for x in "mnk")
    width = {"bf16": 2, "fp8": 1, "fp32": 4}[case.dtype]
    return [_gemm(case, pool, m, n, k) for _ in range(num_input_sets((m * k + n * k) * width))]


def _gemm(case: Case, pool: RandomInputs, m: int, n: int, k: int) -> Call:
    dtype = DTYPES[case.dtype]
    if case.dtype == "fp8":
        a, b = pool.random_tensor(m, k, dtype=dtype), pool.random_tensor(n, k, dtype=dtype).t()
        scale = torch.ones((), device=pool.device)
        return lambda: torch._scaled_mm(a, b, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
    if case.op == "fwd":
        a, b = pool.random_tensor(m, k, dtype=dtype), pool.random_tensor(n, k, dtype=dtype).t()
    elif case.op == "dgrad":
        a, b = pool.random_tensor(m, k, dtype=dtype), pool.random_tensor(k, n, dtype=dtype)
    else:
        a, b = pool.random_tensor(k, m, dtype=dtype).t(), pool.random_tensor(k, n, dtype=dtype)
    return lambda: torch.mm(a, b)


def grouped_product_calls(case: Case, pool: RandomInputs) -> list[Call]:
    """Calls of a grouped product; ``n`` and ``k`` are the out and in features of each expert in all three layouts."""
    if not hasattr(torch, "_grouped_mm"):
        raise UnsupportedCase("this torch has no _grouped_mm")
    loads = [int(x) for x in str(case.shape["loads"]).split(",")]
    n, k, tokens, experts = case.shape_size("n"), case.shape_size("k"), sum(loads), len(loads)
    ends = torch.tensor(loads, device=pool.device).cumsum(0).to(torch.int32)
    calls: list[Call] = []
    for _ in range(min(16, num_input_sets(2 * (tokens * (n + k) + experts * n * k)))):
        if case.op == "fwd":
            a, b = pool.random_tensor(tokens, k), pool.random_tensor(experts, n, k).transpose(-2, -1)
        elif case.op == "dgrad":
            a, b = pool.random_tensor(tokens, n), pool.random_tensor(experts, n, k)
        else:
            a, b = pool.random_tensor(tokens, n).t(), pool.random_tensor(tokens, k)
        calls.append(_grouped(a, b, ends))
    return calls


def _grouped(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> Call:
    return lambda: torch._grouped_mm(a, b, offs=ends)


BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}


def attention_calls(case: Case, pool: RandomInputs) -> list[Call]:
    """Calls of fused attention, or of its backward pass over one kept forward, over rotating inputs."""
    b, hq, hkv, q_len, kv_len, d_qk, d_v, causal = (
        case.shape_size(x) for x in ("b", "hq", "hkv", "q", "kv", "dqk", "dv", "causal")
    )
    if case.variant == "flash" and d_v < d_qk:
        d_v = d_qk  # flash wants one head size; frameworks pad the values
    grad = case.op == "bwd"
    calls: list[Call] = []
    for _ in range(min(4, num_input_sets(2 * b * (q_len * hq + kv_len * hkv) * (d_qk + d_v)))):
        q = pool.random_tensor(b, q_len, hq, d_qk).transpose(1, 2).detach().requires_grad_(grad)
        k = pool.random_tensor(b, kv_len, hkv, d_qk).transpose(1, 2).detach().requires_grad_(grad)
        v = pool.random_tensor(b, kv_len, hkv, d_v).transpose(1, 2).detach().requires_grad_(grad)
        calls.append(_attention(case.variant, q, k, v, causal=bool(causal), grad=grad, pool=pool))
    return calls


def _attention(
    variant: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, grad: bool, pool: RandomInputs
) -> Call:
    gqa = q.shape[1] != k.shape[1]

    def forward() -> torch.Tensor:
        with sdpa_kernel(BACKENDS[variant]):
            out: torch.Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)
            return out

    if not grad:
        return forward
    out = forward()
    d_out = pool.random_tensor(out.shape[0], out.shape[2], out.shape[1], out.shape[3]).transpose(1, 2)

    def backward() -> Any:
        return torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)

    return backward
