"""A small profile and a memory history of one step, kept compact."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def _kernels(step: Callable[[], None]) -> list[list[Any]]:
    """[stream, name, start, duration] of everything that ran on the device in one step. [us]"""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    rows = [
        [int(e.device_resource_id()), e.name()[:120], e.start_ns() / 1e3, e.duration_ns() / 1e3]
        for e in profile.profiler.kineto_results.events()
        if e.device_type() == torch.autograd.DeviceType.CUDA
    ]
    rows.sort(key=lambda row: row[2])
    origin = rows[0][2] if rows else 0.0
    return [[stream, name, round(start - origin, 2), round(duration, 2)] for stream, name, start, duration in rows]


def _where(frames: list[dict[str, Any]]) -> str:
    """The innermost frames of an allocation outside PyTorch's own machinery."""
    kept = [
        f"{Path(f['filename']).name}:{f['name']}"
        for f in frames
        if "/torch/" not in f["filename"] and f["filename"].endswith(".py")
    ]
    return " < ".join(kept[:3])


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
        rows.append([entry["action"], entry["size"], address, stream, _where(entry.get("frames", []))])
    return rows


def write(step: Callable[[], None], folder: Path, rank: int) -> None:
    """Write ``traceN.json.gz``: the kernels and the allocations of one step each."""
    content = {
        "kernels_us": _kernels(step),
        "allocated_before_bytes": torch.cuda.memory_allocated(),
        "allocations": _allocations(step),
    }
    with gzip.open(folder / f"trace{rank}.json.gz", "wt", compresslevel=9) as file:
        json.dump(content, file, separators=(",", ":"))
