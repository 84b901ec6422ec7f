"""Which algorithm and protocol NCCL chose for each payload: said by its own log, in a pass of its own.

A line of the log is written for every call, so that nothing is timed while it is on.
"""

from __future__ import annotations

import json
import os
import re
import socket
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mofa.calibrate.bench.collectives import collective_call
from mofa.calibrate.cases import Case

CHOICES = "nccl_algorithms.json"
TUNED = {"all_reduce": "AllReduce", "all_gather": "AllGather", "reduce_scatter": "ReduceScatter"}
"""Collectives whose algorithm NCCL chooses; the others are sends and receives."""
_LINE = re.compile(r"(AllReduce|AllGather|ReduceScatter): \d+ Bytes -> Algo (\w+) proto (\w+)")


def read_choices(cases: Sequence[Case], lines: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """Per collective and group the payloads from which each choice holds; empty where the log says something else.

    Examples
    --------
    >>> case = Case("collective", "all_reduce", "nccl", "bf16", "grid", {"bytes": 4096, "group": 4})
    >>> read_choices([case], ["NCCL INFO AllReduce: 4096 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..1}"])
    {'all_reduce 4': [{'from_bytes': 4096, 'algorithm': 'TREE', 'protocol': 'LL'}]}
    """
    said = [found.groups() for line in lines if (found := _LINE.search(line))]
    if [name for name, _, _ in said] != [TUNED[case.op] for case in cases]:
        return {}
    chosen: dict[str, list[dict[str, Any]]] = {}
    for case, (_, algorithm, protocol) in zip(cases, said, strict=True):
        steps = chosen.setdefault(f"{case.op} {case.size('group')}", [])
        if not steps or (steps[-1]["algorithm"], steps[-1]["protocol"]) != (algorithm, protocol):
            steps.append({"from_bytes": case.size("bytes"), "algorithm": algorithm, "protocol": protocol})
    return chosen


def write_choices(cases: Sequence[Case], folder: Path, gpus: int) -> None:
    """Run each payload of the grid once with NCCL's log on, and keep what it chose in ``nccl_algorithms.json``."""
    grid = [c for c in cases if c.op in TUNED and c.split == "grid"]
    asked = sorted(grid, key=lambda c: (c.size("group"), c.op, c.size("bytes")))
    with tempfile.TemporaryDirectory() as scratch, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        log = Path(scratch) / "log"
        torch.multiprocessing.spawn(_rank, (gpus, port, asked, str(log)), nprocs=gpus)
        chosen = read_choices(asked, log.read_text(errors="replace").splitlines() if log.exists() else ())
    if chosen:
        temporary = folder / f".{CHOICES}.part"
        temporary.write_text(json.dumps(chosen, indent=1) + "\n", encoding="utf-8")
        temporary.replace(folder / CHOICES)


def _rank(rank: int, gpus: int, port: int, cases: list[Case], log: str) -> None:
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="TUNING", NCCL_DEBUG_FILE=log if rank == 0 else os.devnull)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=gpus)
    groups = {size: dist.new_group(list(range(size))) for size in sorted({c.size("group") for c in cases})}
    source = torch.randn(max(c.size("bytes") for c in cases) // 2, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    for case in cases:
        if rank < case.size("group"):
            collective_call(case, source, target, groups[case.size("group")], rank)()
    torch.cuda.synchronize()
    dist.destroy_process_group()
