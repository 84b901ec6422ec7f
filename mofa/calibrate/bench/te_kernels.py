"""Transformer Engine's kernels as Megatron-Core 0.16.1 calls them: grouped products, attention, fused memory-bound ops.

A grouped product is `general_grouped_gemm`, which sends one cuBLAS product for each expert that has rows to four
streams in turn, and waits for all (transformer_engine 2.20.2, common/gemm/cublaslt_gemm.cu,
``multi_stream_cublas_gemm``): the time from the first product's start to the last one's end is what counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from mofa.calibrate.bench.torch_host import throttled_sample
from mofa.calibrate.bench.torch_timing import (
    Call,
    GpuMonitor,
    RandomInputs,
    median_and_percentiles,
    num_input_sets,
    time_calls,
)
from mofa.calibrate.cases import Case, Sample, UnsupportedCase
from mofa.calibrate.shapes.te_bf16 import ATTENTION, GROUPED, HOST, WGRAD
from mofa.calibrate.shapes.te_fp8 import FAMILIES as TE_FAMILIES
from mofa.calibrate.shapes.te_throttled import FAMILY as THROTTLED
from mofa.calibrate.shapes.te_throttled import unthrottled_case_of_same_kernel

MAX_LAUNCHES = 400
"""Products that are issued before the device begins, fewer than its queues take."""
HOST_REPETITIONS = 7
AHEAD_S = 0.02
"""What the device has to do before a call that is issued behind it. [s]"""
SET_BYTES = 3e8
"""Inputs larger than this are not rotated: each call's push the last call's out of the L2. [B]"""


def te_bf16_sample(case: Case, pool: RandomInputs, clock: GpuMonitor) -> Sample:
    """Time one case of Transformer Engine's families; `UnsupportedCase` says what cannot be run."""
    try:
        if case.family == GROUPED:
            calls = grouped_product_calls(case, pool)
            loads = str(case.shape["loads"]).count(",") + 1
            return time_calls(calls, pool.device, clock, most=max(1, MAX_LAUNCHES // loads))
        if case.family == WGRAD:
            return time_calls(gradient_accumulation_calls(case, pool), pool.device, clock)
        if case.family == HOST:
            return _host_sample(case, pool)
        if case.family == ATTENTION:
            return attention_sample(case, pool, clock)
        if case.family == THROTTLED:
            return _throttled_sample(case, pool, clock)
        from mofa.calibrate.bench.te_ops import te_memory_bound_calls

        return time_calls(te_memory_bound_calls(case, pool), pool.device, clock)
    except UnsupportedCase:
        raise
    except Exception as error:  # Triton's and TorchDynamo's errors have no common parent
        torch.cuda.synchronize()
        raise UnsupportedCase(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}") from error


def throttled_calls(case: Case, pool: RandomInputs) -> tuple[list[Call], list[Call]]:
    """The calls of one case of ``te_throttled``, and what its time takes off theirs: an attention's forward.

    Attention's backward is both ways less the forward, each under the same load.
    """
    timed = unthrottled_case_of_same_kernel(case)
    if timed.family == ATTENTION:
        forward, both = _attention(timed, pool)
        return ([forward], []) if timed.op == "fwd" else ([both], [forward])
    if timed.family == GROUPED:
        return grouped_product_calls(timed, pool), []
    if timed.family in TE_FAMILIES:
        from mofa.calibrate.bench.te_fp8 import te_fp8_calls

        with torch.no_grad():
            return te_fp8_calls(timed, pool), []
    from mofa.calibrate.bench.te_ops import te_memory_bound_calls

    return te_memory_bound_calls(timed, pool), []


def _throttled_sample(case: Case, pool: RandomInputs, clock: GpuMonitor) -> Sample:
    calls, less = throttled_calls(case, pool)
    sample = throttled_sample(case.variant, calls, pool, clock)
    if not less:
        return sample
    of_less = throttled_sample(case.variant, less, pool, clock)
    low, high = (max(t - of_less.median_s, 1e-9) for t in (sample.low_s, sample.high_s))
    median = sample.median_s - of_less.median_s
    return Sample(median, low, high, sample.num_samples, sample.sm_mhz, sample.power_w)


def grouped_product_calls(case: Case, pool: RandomInputs) -> list[Call]:
    """Calls of a grouped product over rotating inputs; ``n`` and ``k`` are out and in features of each expert."""
    loads = [int(x) for x in str(case.shape["loads"]).split(",")]
    n, k, rows, experts = case.shape_size("n"), case.shape_size("k"), sum(loads), len(loads)
    weight = experts * n * k * (4 if case.op == "wgrad" else 2)
    moved = 2 * rows * (n + k) + weight
    sets = 1 if moved > SET_BYTES else min(8, num_input_sets(moved))
    return [_grouped(case.op, loads, n, k, pool) for _ in range(sets)]


def _grouped(op: str, loads: list[int], n: int, k: int, pool: RandomInputs) -> Call:
    from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm

    experts, rows = len(loads), sum(loads)
    none: list[Any] = [None] * experts
    if op == "wgrad":
        inputs = list(torch.split(pool.random_tensor(rows, k), loads))
        grads = list(torch.split(pool.random_tensor(rows, n), loads))
        main = list(pool.random_tensor(experts, n, k, dtype=torch.float32).unbind())
        return lambda: general_grouped_gemm(
            inputs, grads, main, none, torch.bfloat16, layout="NT", grad=True, m_splits=loads, accumulate=True
        )
    weights = list(pool.random_tensor(experts, n, k).unbind())
    if op == "fwd":
        inputs = list(torch.split(pool.random_tensor(rows, k), loads))
        return lambda: general_grouped_gemm(
            weights, inputs, [torch.empty(rows, n, device=pool.device, dtype=torch.bfloat16)], none, torch.bfloat16,
            single_output=True, m_splits=loads,
        )  # fmt: skip
    grads = list(torch.split(pool.random_tensor(rows, n), loads))
    return lambda: general_grouped_gemm(
        weights, grads, [torch.empty(rows, k, device=pool.device, dtype=torch.bfloat16)], none, torch.bfloat16,
        single_output=True, layout="NN", m_splits=loads, grad=True,
    )  # fmt: skip


def gradient_accumulation_calls(case: Case, pool: RandomInputs) -> list[Call]:
    """Calls that add a weight's gradient to an fp32 one: (m, k) x (k, n), over rotating inputs."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    m, n, k = (case.shape_size(x) for x in "mnk")

    def build_call() -> Call:
        x, grad = pool.random_tensor(k, n), pool.random_tensor(k, m)
        main = pool.random_tensor(m, n, dtype=torch.float32)
        return lambda: general_gemm(x, grad, out_dtype=torch.float32, layout="NT", grad=True, accumulate=True, out=main)

    return [build_call() for _ in range(min(4, num_input_sets(2 * k * (m + n) + 4 * m * n)))]


def _host_sample(case: Case, pool: RandomInputs) -> Sample:
    """Host time of one issue behind a busy device: the median over rounds. [s]"""
    loads = [case.shape_size("rows")] * case.shape_size("groups")
    call = _grouped(case.op.removeprefix("grouped_"), loads, case.shape_size("n"), case.shape_size("k"), pool)
    call()
    times = []
    for _ in range(HOST_REPETITIONS):
        torch.cuda.synchronize()
        torch.cuda._sleep(int(AHEAD_S * 2.0e9))
        before = time.perf_counter()
        call()
        times.append(time.perf_counter() - before)
    torch.cuda.synchronize()
    return median_and_percentiles(times)


def attention_sample(case: Case, pool: RandomInputs, clock: GpuMonitor) -> Sample:
    """Attention as `DotProductAttention` picks it; backward is both ways less the forward, as a graph serves once."""
    forward, both = _attention(case, pool)
    if case.op == "fwd":
        return time_calls([forward], pool.device, clock)
    alone, joined = (time_calls([call], pool.device, clock) for call in (forward, both))
    if joined.median_s <= alone.median_s:
        raise UnsupportedCase("both ways took no longer than forward alone")
    low, high = (max(t - alone.median_s, 1e-9) for t in (joined.low_s, joined.high_s))
    return Sample(joined.median_s - alone.median_s, low, high, joined.num_samples, joined.sm_mhz, joined.power_w)


def _attention(case: Case, pool: RandomInputs) -> tuple[Callable[[], Any], Callable[[], Any]]:
    from transformer_engine.pytorch import DotProductAttention

    b, heads, kv_heads, length, keys, d_qk, d_v = (
        case.shape_size(x) for x in ("b", "hq", "hkv", "q", "kv", "dqk", "dv")
    )
    mask = "causal" if keys == length else "causal_bottom_right"
    module = DotProductAttention(
        heads, (d_qk, d_v), num_gqa_groups=kv_heads, attention_dropout=0.0, qkv_format="sbhd",
        attn_mask_type=mask, layer_number=1,
    ).to(pool.device)  # fmt: skip
    q, k, v = (
        pool.random_tensor(rows, b, n, d).detach().clone().requires_grad_(True)
        for rows, n, d in ((length, heads, d_qk), (keys, kv_heads, d_qk), (keys, kv_heads, d_v))
    )
    grad = pool.random_tensor(length, b, heads * d_v)

    def forward() -> Any:
        return module(q, k, v, attn_mask_type=mask)

    def both() -> None:
        q.grad = k.grad = v.grad = None
        forward().backward(grad)

    return forward, both
