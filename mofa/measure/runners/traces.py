"""A small profile and a memory history of one step, kept compact."""

from __future__ import annotations

import gzip
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mofa.measure.runners import host_trace
from mofa.measure.runners.beginning import innermost_frames_text

WARM_S, MOST_STEPS = 1.5, 12
"""Steps ahead of a profiled one last so long, and are so many at most. [s], [-]"""
MARK = "spin_kernel"
"""In the name of the kernel that `torch.cuda._sleep` launches: it stands between two profiled steps."""


def _profiled(step: Callable[[], None], before: int = 0) -> list[Any]:
    """Events of one step: what ran on the device, and the host's calls of CUDA.

    The device rests while the profiler starts. Steps ``before``, profiled as well and left out, bring its clock down to
    where the power limit holds it.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(before):
            step()
        torch.cuda._sleep(1)
        step()
        torch.cuda.synchronize()
    events: list[Any] = profile.profiler.kineto_results.events()
    mark = next(e for e in events if MARK in e.name())
    launch = min(e.start_ns() for e in events if e.correlation_id() == mark.correlation_id())
    on_device = torch.autograd.DeviceType.CUDA
    return [e for e in events if e.start_ns() > (mark.start_ns() if e.device_type() == on_device else launch)]


def _on_device(events: list[Any]) -> list[Any]:
    device = torch.autograd.DeviceType.CUDA
    return sorted((e for e in events if e.device_type() == device), key=lambda e: e.start_ns())


def _covered_s(events: list[Any]) -> float:
    """Seconds in which at least one of the events, in the order of their starts, was under way."""
    covered, until = 0, 0
    for event in events:
        start, end = event.start_ns(), event.start_ns() + event.duration_ns()
        covered += max(0, end - max(start, until))
        until = max(until, end)
    return covered / 1e9


def device_busy_and_compute_seconds(step: Callable[[], None]) -> dict[str, float]:
    """Seconds of one step in which the device did anything, and in which it did anything but communicate."""
    events = _on_device(_profiled(step))
    return {
        "device_busy_s": _covered_s(events),
        "device_computing_s": _covered_s([e for e in events if "nccl" not in e.name().lower()]),
    }


def _steps_before(step: Callable[[], None]) -> int:
    """How many steps take as long as the power limit needs to act; the same number on every rank."""
    started = time.perf_counter()
    step()
    torch.cuda.synchronize()
    number = min(math.ceil(WARM_S / (time.perf_counter() - started)), MOST_STEPS)
    return int(number if not dist.is_initialized() else _largest(number))


def _largest(number: int) -> float:
    value = torch.tensor(float(number), device="cuda")
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value.item())


def _timeline(step: Callable[[], None]) -> dict[str, Any]:
    """Kernels of one step as [stream, name, start, duration], and the host's calls of CUDA that made them. [us]

    The step is one of many, at the clock that the power limit leaves it.

    A call is [thread, index of its name, start, duration, index of the kernel that it started or -1]; both count
    from the first kernel's start.
    """
    before = _steps_before(step)
    events = _profiled(step, before)
    kernels = _on_device(events)
    origin = kernels[0].start_ns() if kernels else 0
    started_by = {e.correlation_id(): i for i, e in enumerate(kernels)}
    names: dict[str, int] = {}
    threads: dict[int, int] = {}
    calls = []
    for e in sorted((e for e in events if e.name().startswith("cu")), key=lambda e: e.start_ns()):
        if e.device_type() == torch.autograd.DeviceType.CUDA:
            continue
        thread = threads.setdefault(int(e.device_resource_id()), len(threads))
        name = names.setdefault(e.name(), len(names))
        calls.append([thread, name, *_micro(e, origin), started_by.get(e.correlation_id(), -1)])
    return {
        "steps_before": before,
        "kernels_us": [[int(e.device_resource_id()), e.name()[:120], *_micro(e, origin)] for e in kernels],
        "call_names": list(names),
        "calls_us": calls,
    }


def _micro(event: Any, origin_ns: int) -> tuple[float, float]:
    return round((event.start_ns() - origin_ns) / 1e3, 2), round(event.duration_ns() / 1e3, 2)


def _allocations(step: Callable[[], None]) -> list[list[Any]]:
    """[action, bytes, address, stream, where] of one step, in order; the addresses are numbered as they appear."""
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=200_000, clear_history=True)
    step()
    torch.cuda.synchronize()
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    streams: dict[int, int] = {}
    addresses: dict[int, int] = {}
    rows: list[list[Any]] = []
    for entry in snapshot["device_traces"][torch.cuda.current_device()]:
        address = addresses.setdefault(entry.get("addr", 0), len(addresses))
        stream = streams.setdefault(entry.get("stream", 0), len(streams))
        rows.append([entry["action"], entry["size"], address, stream, innermost_frames_text(entry.get("frames", []))])
    return rows


def write_traces(step: Callable[[], None], folder: Path, rank: int, host: dict[str, Any]) -> None:
    """Write ``traceN.json.gz``: the kernels with the calls that started them, and the allocations, of one step each.

    Beside them ``host``, its clocks in steps before the profiler, and in ``opsN.json.gz`` PyTorch's ops of one more.
    """
    content = {
        **_timeline(step),
        "allocated_before_bytes": torch.cuda.memory_allocated(),
        "allocations": _allocations(step),
        "host": host,
    }
    with gzip.open(folder / f"trace{rank}.json.gz", "wt", compresslevel=9) as file:
        json.dump(content, file, separators=(",", ":"))
    with gzip.open(folder / f"ops{rank}.json.gz", "wt", compresslevel=9) as file:
        json.dump(host_trace.traced_ops_of_step(step), file, separators=(",", ":"))
