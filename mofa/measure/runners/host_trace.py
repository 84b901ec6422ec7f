"""What the host does in a step: its clocks beside each other, Python's cycle collector, and PyTorch's own ops."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

STEPS = 6
"""As many steps of each kind. [-]"""


@contextmanager
def _collections(runs: list[list[float]]) -> Iterator[None]:
    """Add every run of the cycle collector: its generation and its seconds."""
    began = 0.0

    def tell(phase: str, info: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.perf_counter()
        else:
            runs.append([info["generation"], round(time.perf_counter() - began, 7)])

    gc.callbacks.append(tell)
    try:
        yield
    finally:
        gc.callbacks.remove(tell)


def _clocks() -> list[float]:
    """Wall, this thread, the process in user and in system mode [s]; page faults, waits, times it was put off [-]."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return [
        time.perf_counter(), time.thread_time(), used.ru_utime, used.ru_stime, used.ru_minflt, used.ru_nvcsw,
        used.ru_nivcsw,
    ]  # fmt: skip


def _steps(step: Callable[[], None]) -> dict[str, Any]:
    """Steps one after the other, of each what its issue took by all clocks; then the wait for the device. [s]"""
    torch.cuda.synchronize()
    runs: list[list[float]] = []
    rows, allocated = [], []
    with _collections(runs):
        before = _clocks()
        for _ in range(STEPS):
            step()
            after = _clocks()
            rows.append([round(b - a, 6) for a, b in zip(before, after, strict=True)])
            stats = torch.cuda.memory_stats()
            allocated.append([stats.get("num_device_alloc", 0), stats.get("num_device_free", 0)])
            before = after
        torch.cuda.synchronize()
    wait_s = time.perf_counter() - before[0]
    return {"steps": rows, "wait_s": wait_s, "collections": runs, "device_allocs": allocated}


def traced_ops_of_step(step: Callable[[], None]) -> dict[str, Any]:
    """One step: PyTorch's ops and the host's calls of CUDA, in the order of their starts.

    Each is [thread, index of its name, since the start of the one before, duration]. [0.1 us]
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    events = [
        e
        for e in profile.profiler.kineto_results.events()
        if e.device_type() == torch.autograd.DeviceType.CPU and not e.name().startswith(("[memory]", "Iteration"))
    ]
    events.sort(key=lambda e: e.start_ns())
    names: dict[str, int] = {}
    threads: dict[int, int] = {}
    rows, last = [], events[0].start_ns() if events else 0
    for e in events:
        thread = threads.setdefault(int(e.device_resource_id()), len(threads))
        name = names.setdefault(e.name()[:80], len(names))
        # starts as differences, in tenths of microseconds: a file of half the size
        since = (e.start_ns() - last) // 100
        rows.append([thread, name, since, e.duration_ns() // 100])
        last += since * 100
    return {"op_names": list(names), "ops_tenths_us": rows}


def traced_steps_with_and_without_gc(step: Callable[[], None]) -> dict[str, Any]:
    """Steps as they are, the same without Python's cycle collector, and as they are once more."""
    result: dict[str, Any] = {"as_is": _steps(step), "objects": len(gc.get_objects()), "thresholds": gc.get_threshold()}
    enabled = gc.isenabled()
    gc.disable()
    try:
        result["without_collector"] = _steps(step)
    finally:
        if enabled:
            gc.enable()
    gc.collect()
    return {**result, "enabled": enabled, "again": _steps(step)}
