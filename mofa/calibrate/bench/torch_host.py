"""What is not a kernel's own time: the host's issue of ops, synchronisation, copies, the disk, the sustained state."""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from mofa.calibrate.bench.loaded_timing import loaded_call_sample
from mofa.calibrate.bench.torch_matrix import attention_calls, gemm_calls
from mofa.calibrate.bench.torch_timing import Call, GpuMonitor, RandomInputs, median_and_percentiles, time_calls
from mofa.calibrate.cases import Case, Sample, UnsupportedCase


def host_issue_sample(case: Case, pool: RandomInputs, clock: GpuMonitor) -> Sample:
    """Host time to issue one op, unless the op's name says otherwise. [s]"""
    device, num = pool.device, case.shape_size("ops")
    x, y = pool.random_tensor(256, 256), pool.random_tensor(256, 256)
    weight = pool.random_tensor(256, 256).clone().requires_grad_(True)
    op = case.op
    if op == "launch_empty":
        return time_calls([lambda: x[:1].add_(0)], device, clock, budget_s=0.001)
    if op == "launch_gap":
        return _graph_launch(x, num)
    if op == "sync":
        return _sync(device)
    if op in ("mm_new_rows", "mm_seen_rows"):
        return median_and_percentiles(_product_issue(pool, num, again=op == "mm_seen_rows"))
    if op == "eager_backward_per_op":
        return _backward_issue(weight, x, num)
    if op == "compiled_kernel":
        single, many = _issue(_compiled(x, y, 1), 50, device), _issue(_compiled(x, y, 21), 50, device)
        return median_and_percentiles([max(b - a, 1e-9) / 20 for a, b in zip(single, many, strict=True)])
    if op.startswith("dtensor"):
        return median_and_percentiles(_issue(_dtensor(op, x, y, device), num, device))
    norm_weight = torch.ones(256, device=device, dtype=torch.bfloat16)
    calls: dict[str, Call] = {
        "eager_add": lambda: x + y, "eager_view": lambda: x.view(128, 512), "eager_mm": lambda: torch.mm(x, y),
        "eager_linear_grad": lambda: F.linear(x, weight), "eager_rmsnorm": lambda: F.rms_norm(x, (256,), norm_weight),
        "eager_silu": lambda: F.silu(x), "item": lambda: x[0, 0].item(), "nonzero": lambda: torch.nonzero(x[0] > 3),
    }  # fmt: skip
    if op == "compiled_call":
        return median_and_percentiles(_issue(_compiled(x, y, 1), num, device))
    return median_and_percentiles(_issue(calls[op], num, device))


def small_op_issue_s(device: str) -> float:
    """In what time the host issues one small eager op: the median of an addition, SiLU and a norm. [s]"""
    x = torch.ones(256, 256, device=device, dtype=torch.bfloat16)
    weight = torch.ones(256, device=device, dtype=torch.bfloat16)
    calls: tuple[Call, ...] = (lambda: x + x, lambda: F.silu(x), lambda: F.rms_norm(x, (256,), weight))
    return statistics.median(statistics.median(_issue(call, 200, device)) for call in calls)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _issue(call: Callable[[], Any], num: int, device: str) -> list[float]:
    """Wall time per call, of bursts that the queue takes without blocking."""
    times = []
    for i in range(13):
        _synchronize(device)
        before = time.perf_counter()
        for _ in range(num):
            call()
        if i >= 2:
            times.append((time.perf_counter() - before) / num)
    _synchronize(device)
    return times


def _product_issue(pool: RandomInputs, num: int, *, again: bool) -> list[float]:
    """Host time of products with as many rows as none had before, or as the one right before had. [s]

    A new number makes the library choose a kernel; one that was never used is then loaded as well, which takes
    milliseconds and which a median leaves out.
    """
    width = 2048
    start = width if again else width // 4  # the other op's numbers are not new any more
    times = []
    for rows in random.Random(num).sample(range(start, start + 6 * num), num):
        x, weight = pool.random_tensor(rows, width), pool.random_tensor(width, width)
        for _ in range(1 + again):
            _synchronize(pool.device)
            before = time.perf_counter()
            torch.mm(x, weight)
            taken = time.perf_counter() - before
        times.append(taken)
    _synchronize(pool.device)
    return times


def _backward_issue(weight: torch.Tensor, x: torch.Tensor, num: int) -> Sample:
    """Host time of one backward kernel: a chain of products, two kernels each."""
    times = []
    for i in range(12):
        out = x
        for _ in range(num // 4):
            out = torch.mm(out, weight)
        total = out.sum()
        _synchronize(x.device.type)
        before = time.perf_counter()
        total.backward()
        if i >= 2:
            times.append((time.perf_counter() - before) / (num // 4 * 2))
        weight.grad = None
    return median_and_percentiles(times)


def _compiled(x: torch.Tensor, y: torch.Tensor, kernels: int) -> Call:
    def chain(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        for i in range(kernels):
            a = torch.mm(a, b) if i % 2 else torch.relu(a + 1)
        return a

    compiled = torch.compile(chain)
    compiled(x, y)
    return lambda: compiled(x, y)


def _dtensor(op: str, x: torch.Tensor, y: torch.Tensor, device: str) -> Call:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not dist.is_initialized():
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device, (1,))
    a = DTensor.from_local(x, mesh, [Replicate()])
    b = DTensor.from_local(y, mesh, [Shard(1) if op == "dtensor_mm" else Replicate()])
    return (lambda: torch.mm(a, b)) if op == "dtensor_mm" else (lambda: a + b)


def _sync(device: str) -> Sample:
    """From the device's end to the host's return from a synchronisation. [s]"""
    if device != "cuda":
        raise UnsupportedCase("nothing to synchronise with")
    times = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        before = time.perf_counter()
        start.record()
        torch.cuda._sleep(2_000_000)
        end.record()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - before - start.elapsed_time(end) / 1e3)
    return median_and_percentiles(times)


def _graph_launch(x: torch.Tensor, num: int) -> Sample:
    """Device time of one tiny kernel inside a CUDA graph. [s]"""
    if x.device.type != "cuda":
        raise UnsupportedCase("no CUDA graphs")
    small = x[:1].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num):
            small.add_(0)
    sample = time_calls([graph.replay], "cuda", GpuMonitor("cpu"))
    return Sample(sample.median_s / num, sample.low_s / num, sample.high_s / num, sample.num_samples)


def copy_sample(case: Case, pool: RandomInputs, clock: GpuMonitor) -> Sample:
    """Copies within the device, to and from pinned host memory, and a file written and synced."""
    size, device = case.shape_size("bytes"), pool.device
    if case.op == "disk_write":
        return _disk_write(size)
    if device != "cuda":
        raise UnsupportedCase("no device to copy to")
    on_device = pool.random_tensor(size // 2)
    if case.op == "device_copy":
        target = torch.empty_like(on_device)
        return time_calls([lambda: target.copy_(on_device)], device, clock)
    pinned = [torch.empty(size // 2, dtype=torch.bfloat16, pin_memory=True) for _ in range(2)]
    target = torch.empty_like(on_device)
    if case.op == "h2d":
        return time_calls([lambda: target.copy_(pinned[0], non_blocking=True)], device, clock, samples=3)
    if case.op == "d2h":
        return time_calls([lambda: pinned[0].copy_(on_device, non_blocking=True)], device, clock, samples=3)
    other = torch.cuda.Stream()

    def both() -> None:
        main = torch.cuda.current_stream()
        other.wait_stream(main)
        target.copy_(pinned[0], non_blocking=True)
        with torch.cuda.stream(other):
            pinned[1].copy_(on_device, non_blocking=True)
        main.wait_stream(other)

    return time_calls([both], device, clock, samples=3)


def _disk_write(size: int) -> Sample:
    data = os.urandom(2**24)
    times = []
    for _ in range(2):
        with tempfile.NamedTemporaryFile(dir=Path.cwd()) as file:
            before = time.perf_counter()
            for _ in range(max(1, size // len(data))):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - before)
    return median_and_percentiles(times)


def sustained_sample(case: Case, pool: RandomInputs, clock: GpuMonitor, *, seconds: float = 2.0) -> Sample:
    """Time of one call after seconds of load, alone or between memory-bound ops; clock and power of the last half."""
    shape = dict(case.shape)
    m, n = case.shape_size("m"), case.shape_size("n")
    if case.op.startswith("attention"):
        _, backend, *direction = case.op.split("_")
        heads = n // 128
        shape = {"b": 1, "hq": heads, "hkv": heads, "q": m, "kv": m, "dqk": 128, "dv": 128, "causal": 1}
        calls = attention_calls(Case("attention", "bwd" if direction else "fwd", backend, "bf16", "grid", shape), pool)
    else:
        calls = gemm_calls(Case("gemm", "fwd", "cublas", case.dtype, "grid", shape), pool)
    between = case.variant == "between_memory"
    x, weight = pool.random_tensor(m, 8192), torch.ones(8192, device=pool.device, dtype=torch.bfloat16)
    if pool.device != "cuda" or case.variant == "burst":
        time.sleep(0.5 if pool.device == "cuda" else 0.0)
        return time_calls(calls, pool.device, clock)
    if between:
        return loaded_call_sample(
            calls, clock, seconds=seconds, after=lambda: F.rms_norm(F.silu(x) * x, (8192,), weight)
        )  # fmt: skip
    return loaded_call_sample(calls, clock, seconds=seconds, each=4)


LOADS = {"heavy": (8192, 8192, 8192), "medium": (4096, 4096, 4096)}
"""Products that run before each memory-bound op to hold the clock low: m, n, k of each. [-]"""


def throttled_sample(
    load: str, calls: Sequence[Call], pool: RandomInputs, clock: GpuMonitor, *, seconds: float = 1.2
) -> Sample:
    """Time of one call between products that hold the clock down, or at full clock (``burst``)."""
    if pool.device != "cuda" or load == "burst":
        return time_calls(calls, pool.device, clock)
    m, n, k = LOADS[load]
    products = gemm_calls(Case("gemm", "fwd", "cublas", "bf16", "grid", {"m": m, "n": n, "k": k}), pool)
    return loaded_call_sample(calls, clock, seconds=seconds, before=products)
