"""Transformer Engine's fp8 kernels as its linear layers launch them: products, casts, norms, experts' products.

Products go through ``general_gemm`` and ``general_grouped_gemm`` (pytorch/cpp_extensions/gemm.py), casts through the
quantizers of each recipe, with the accumulation and the layouts of module/linear.py and module/grouped_linear.py
(Transformer Engine 2.20).
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F

from mofa.calibrate.bench.loaded_timing import loaded_call_sample
from mofa.calibrate.bench.torch_timing import Call, GpuMonitor, RandomInputs, num_input_sets, time_calls
from mofa.calibrate.cases import Case, Sample, UnsupportedCase
from mofa.calibrate.shapes.te_fp8 import (
    BLOCK,
    BLOCK_ROWS,
    COLUMN_CAST,
    FAST,
    MAIN_CAST,
    NORMS,
    TO_FP32,
    TRANSPOSE,
    WEIGHT_CAST,
)

MOST_SETS = 16
SUSTAINED_S = 1.5


def te_fp8_sample(case: Case, pool: RandomInputs, clock: GpuMonitor) -> Sample:
    """Time one call of a case of Transformer Engine in fp8; `UnsupportedCase` without Transformer Engine, or where it
    refuses the case."""
    if pool.device != "cuda":
        raise UnsupportedCase("Transformer Engine's kernels need a CUDA device")
    try:
        with torch.no_grad():
            if case.family == "te_sustained":
                return _sustained(case, pool, clock)
            return time_calls(te_fp8_calls(case, pool), pool.device, clock)
    except (ImportError, AssertionError, NotImplementedError) as error:
        raise UnsupportedCase(f"{type(error).__name__}: {str(error)[:160]}") from error


def te_fp8_calls(case: Case, pool: RandomInputs) -> list[Call]:
    """The calls of a case of Transformer Engine in fp8, over rotating inputs."""
    if case.family == "te_cast":
        rows, width = case.shape_size("tokens"), case.shape_size("width")
        return [_cast(case.op, rows, width, pool) for _ in range(min(MOST_SETS, num_input_sets(3 * rows * width)))]
    if case.family == "te_grouped":
        loads = [int(x) for x in str(case.shape["loads"]).split(",")]
        n, k = case.shape_size("n"), case.shape_size("k")
        moved = sum(loads) * (n + k) + len(loads) * n * k
        return [_grouped(case, loads, n, k, pool) for _ in range(min(4, num_input_sets(moved)))]
    m, n, k = (case.shape_size(x) for x in "mnk")
    return [_product(case, m, n, k, pool) for _ in range(min(MOST_SETS, num_input_sets((m + n) * k)))]


def _quantizer(kind: str, *, row: bool, column: bool, gradient: bool = False, weight: bool = False) -> Any:
    """The quantizer of a recipe: ``delayed``, ``tensorwise`` or ``block``; gradients in e5m2 but for blocks, whose
    recipe is e4m3 throughout by default."""
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

    tex = _extension()
    e4m3, e5m2 = tex.DType.kFloat8E4M3, tex.DType.kFloat8E5M2
    if kind == "block":
        return Float8BlockQuantizer(
            fp8_dtype=e4m3, rowwise=row, columnwise=column, force_pow_2_scales=True,
            block_scaling_dim=2 if weight else 1,
        )  # fmt: skip
    dtype = e5m2 if gradient else e4m3
    if kind == "tensorwise":
        return Float8CurrentScalingQuantizer(dtype, torch.device("cuda"), rowwise=row, columnwise=column)
    scale = torch.ones(1, device="cuda")
    return Float8Quantizer(scale, torch.zeros(1, device="cuda"), dtype, rowwise=row, columnwise=column)


def _extension() -> Any:
    """The compiled functions; they are found once the core library is loaded, which the package does."""
    import transformer_engine.pytorch  # noqa: F401
    import transformer_engine_torch as tex

    return tex


def _recipe(kind: str) -> str:
    return "block" if kind in (BLOCK, BLOCK_ROWS) else "delayed"


def _quantized(x: torch.Tensor, kind: str, *, row: bool, gradient: bool = False, weight: bool = False) -> Any:
    """One fp8 copy of a tensor: row-wise, or transposed, which with one scale a tensor comes with the row-wise one."""
    recipe = _recipe(kind)
    both = not row and recipe != "block"
    made = _quantizer(recipe, row=row or both, column=not row, gradient=gradient, weight=weight)(x)
    if both:
        made.update_usage(rowwise_usage=False, columnwise_usage=True)
    return made


def _product(case: Case, m: int, n: int, k: int, pool: RandomInputs) -> Call:
    from transformer_engine.pytorch.cpp_extensions.gemm import general_gemm

    kind, split = case.dtype, case.dtype != FAST
    if case.op == "fwd":
        weight, x = (
            _quantized(pool.random_tensor(n, k), kind, row=True, weight=True),
            _quantized(pool.random_tensor(m, k), kind, row=True),
        )
        return lambda: general_gemm(weight, x, out_dtype=torch.bfloat16, use_split_accumulator=split)
    if case.op == "dgrad":
        weight = _quantized(pool.random_tensor(k, n), kind, row=False, weight=True)
        grad = _quantized(pool.random_tensor(m, k), kind, row=True, gradient=True)
        return lambda: general_gemm(
            weight, grad, out_dtype=torch.bfloat16, layout="NN", grad=True, use_split_accumulator=split
        )
    x = _quantized(pool.random_tensor(k, n), kind, row=False)
    grad = _quantized(pool.random_tensor(k, m), kind, row=False, gradient=True)
    fp32 = case.variant == TO_FP32
    dtype = torch.float32 if fp32 else torch.bfloat16
    out = torch.zeros(m, n, device=pool.device, dtype=dtype)
    return lambda: general_gemm(
        x, grad, out_dtype=dtype, layout="NT", out=out, accumulate=fp32, grad=True, use_split_accumulator=split
    )


def _grouped(case: Case, loads: list[int], n: int, k: int, pool: RandomInputs) -> Call:
    """``n`` and ``k`` are the out and in features of each expert in all three products."""
    from transformer_engine.pytorch.cpp_extensions.gemm import general_grouped_gemm

    kind, split, experts = case.dtype, case.dtype != FAST, len(loads)
    none = [None] * experts
    if case.op == "wgrad":
        xs = [_quantized(pool.random_tensor(rows, k), kind, row=False) for rows in loads]
        grads = [_quantized(pool.random_tensor(rows, n), kind, row=False, gradient=True) for rows in loads]
        outs = [torch.zeros(n, k, device=pool.device, dtype=torch.float32) for _ in loads]
        return lambda: general_grouped_gemm(
            xs, grads, outs, none, torch.bfloat16, layout="NT", m_splits=loads, grad=True, accumulate=True,
            use_split_accumulator=split,
        )  # fmt: skip
    forward = case.op == "fwd"
    weights = [_quantized(pool.random_tensor(n, k), kind, row=forward, weight=True) for _ in loads]
    width, other = (k, n) if forward else (n, k)
    inputs = [_quantized(pool.random_tensor(rows, width), kind, row=True, gradient=not forward) for rows in loads]
    out = torch.empty(sum(loads), other, device=pool.device, dtype=torch.bfloat16)
    return lambda: general_grouped_gemm(
        weights, inputs, [out], none, torch.bfloat16, layout="TN" if forward else "NN", m_splits=loads,
        grad=not forward, single_output=True, use_split_accumulator=split,
    )  # fmt: skip


def _cast(op: str, rows: int, width: int, pool: RandomInputs) -> Call:
    tex = _extension()
    bf16, margin = tex.DType.kBFloat16, 0
    if op == MAIN_CAST:
        main = pool.random_tensor(rows, width)
        to_shard = _quantizer("delayed", row=True, column=True)
        data = torch.empty(rows, width, device=pool.device, dtype=torch.uint8)
        shard = to_shard.create_tensor_from_data(data, torch.bfloat16)
        return lambda: to_shard.update_quantized(main, shard)
    x = pool.random_tensor(rows, width)
    if op in NORMS or op.startswith("fp8_norm"):
        weight = torch.ones(width, device=pool.device, dtype=torch.bfloat16)
        if op == "te_rmsnorm_bwd":
            scale = torch.ones(rows, device=pool.device)
            grad = pool.random_tensor(rows, width)
            return lambda: tex.rmsnorm_bwd(grad, x, scale, weight, margin, False)
        to = None if op in NORMS else _quantizer(op.rpartition("_")[2], row=True, column=True)
        return lambda: tex.rmsnorm_fwd(x, weight, 1e-5, None, to, bf16, margin, False)
    if op == TRANSPOSE:
        data = _quantizer("delayed", row=True, column=False)(x)._data
        e4m3 = tex.DType.kFloat8E4M3
        return lambda: tex.fp8_transpose(data, e4m3, out=None)
    quantizer = _quantizer(
        op.rpartition("_")[2], row=op != COLUMN_CAST, column=op in (COLUMN_CAST, WEIGHT_CAST) or "_both_" in op,
        weight=op == WEIGHT_CAST,
    )  # fmt: skip
    return lambda: tex.quantize(x, quantizer)


def _sustained(case: Case, pool: RandomInputs, clock: GpuMonitor) -> Sample:
    """One kind of product, as `mofa.calibrate.bench.torch_host.sustained_sample` times others."""
    m, n, k = (case.shape_size(x) for x in "mnk")
    product = "wgrad" if case.dtype == BLOCK_ROWS else "fwd" if case.dtype in (FAST, BLOCK) else "dgrad"
    of = Case("te_gemm", product, "te", case.dtype, "grid", case.shape)
    calls = [_product(of, m, n, k, pool) for _ in range(3)]
    if case.variant == "burst":
        time.sleep(0.5)
        return time_calls(calls, pool.device, clock)
    between = case.variant == "between_memory"
    x, weight = pool.random_tensor(m, 8192), torch.ones(8192, device=pool.device, dtype=torch.bfloat16)
    if between:
        return loaded_call_sample(
            calls, clock, seconds=SUSTAINED_S, after=lambda: F.rms_norm(F.silu(x) * x, (8192,), weight)
        )  # fmt: skip
    return loaded_call_sample(calls, clock, seconds=SUSTAINED_S, each=4)
