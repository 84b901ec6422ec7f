"""Which algorithm and protocol NCCL chose for each payload: said by its own log, in a pass of its own.

A line of the log is written for every call, so that nothing is timed while it is on.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from mofa.calibrate.bench.collectives import collective_call
from mofa.calibrate.cases import Case
from mofa.calibrate.nccl_choices import CHOICES, TUNED, read_nccl_choices


def write_nccl_choices(cases: Sequence[Case], folder: Path, gpus: int) -> None:
    """Run each payload of the grid once with NCCL's log on, and keep what it chose in ``nccl_algorithms.json``."""
    grid = [c for c in cases if c.op in TUNED and c.split == "grid"]
    asked = sorted(grid, key=lambda c: (c.shape_size("group"), c.op, c.shape_size("bytes")))
    with tempfile.TemporaryDirectory() as scratch, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        log = Path(scratch) / "log"
        torch.multiprocessing.spawn(_rank, (gpus, port, asked, str(log)), nprocs=gpus)
        chosen = read_nccl_choices(asked, log.read_text(errors="replace").splitlines() if log.exists() else ())
    if chosen:
        temporary = folder / f".{CHOICES}.part"
        temporary.write_text(json.dumps(chosen, indent=1) + "\n", encoding="utf-8")
        temporary.replace(folder / CHOICES)


def _rank(rank: int, gpus: int, port: int, cases: list[Case], log: str) -> None:
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="TUNING", NCCL_DEBUG_FILE=log if rank == 0 else os.devnull)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=gpus)
    groups = {size: dist.new_group(list(range(size))) for size in sorted({c.shape_size("group") for c in cases})}
    source = torch.randn(max(c.shape_size("bytes") for c in cases) // 2, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    for case in cases:
        if rank < case.shape_size("group"):
            collective_call(case, source, target, groups[case.shape_size("group")], rank)()
    torch.cuda.synchronize()
    dist.destroy_process_group()
