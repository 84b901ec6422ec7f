"""Record how PyTorch's allocator answers a random sequence: needs torch and a CUDA GPU.

The files in ``tests/replay/recorded`` came from PyTorch 2.11 on an H200 with a capacity of 0 (the device's) or 3e9 B:
``PYTORCH_ALLOC_CONF=expandable_segments:True python scripts/record_allocator.py expandable 3 0 1500 DIRECTORY``.
An event is [action, slot, bytes, stream, fits, address, allocated, reserved, retries]; the last three are after it.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch

ODD = (33554432, 117440512, 58720256, 1048576, 1048577, 10485760, 10485248, 21000000)


def record(kind: str, seed: int, capacity: float, num_requests: int) -> dict[str, Any]:
    """Play a random sequence of requests and note what the allocator holds after each."""
    rng = random.Random(seed)
    total = torch.cuda.get_device_properties(0).total_memory
    if capacity:
        torch.cuda.set_per_process_memory_fraction(capacity / total)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    live: dict[int, tuple[torch.Tensor, int, int]] = {}
    events: list[list[Any]] = []
    held, limit = 0, capacity * 0.85 if capacity else 40e9
    top = 28 if capacity else 30

    def note(action: str, slot: int, size: int, stream: int, fits: int, address: int) -> None:
        m = torch.cuda.memory_stats()
        events.append([action, slot, size, stream, fits, address, m["allocated_bytes.all.current"],
                       m["reserved_bytes.all.current"], m["num_alloc_retries"]])  # fmt: skip

    for i in range(num_requests):
        while live and (held > limit or rng.random() < (0.3, 0.5, 0.65)[i // 150 % 3]):
            slot = rng.choice(list(live))
            tensor, size, stream = live.pop(slot)
            held -= size
            del tensor
            note("f", slot, size, stream, 1, 0)
        size = rng.choice((int(2 ** rng.uniform(3, top)), 2 ** rng.randint(9, top), rng.choice(ODD)))
        stream = rng.choice((0, 0, 0, 1, 2))
        try:
            with torch.cuda.stream(streams[stream]):
                tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
            live[i] = (tensor, size, stream)
            held += size
            note("a", i, size, stream, 1, tensor.data_ptr())
            del tensor
        except torch.OutOfMemoryError:
            note("a", i, size, stream, 0, 0)
        if i == num_requests // 2:
            torch.cuda.empty_cache()
            note("e", 0, 0, 0, 1, 0)
    segments = [
        [s["address"], s["total_size"], s["segment_type"], [[b["address"], b["size"], b["state"]] for b in s["blocks"]]]
        for s in torch.cuda.memory_snapshot()
    ]
    return {
        "kind": kind, "torch": torch.__version__, "gpu": torch.cuda.get_device_name(),
        "conf": os.environ.get("PYTORCH_ALLOC_CONF", ""), "capacity": int(capacity), "total": total, "events": events,
        "segments": segments,
    }  # fmt: skip


if __name__ == "__main__":
    kind, seed, capacity, num_requests, out = sys.argv[1:6]
    with gzip.open(Path(out) / f"{kind}.json.gz", "wt", compresslevel=9) as file:
        json.dump(record(kind, int(seed), float(capacity), int(num_requests)), file, separators=(",", ":"))
