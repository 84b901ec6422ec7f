"""Chunked MoE layers on all GPUs: one process per GPU, rows of the slowest and the fullest rank."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from mofa.calibrate.bench.chunked_layer import BenchMoeLayer, measure_layer_steps
from mofa.calibrate.bench.torch_timing import GpuMonitor, median_and_percentiles
from mofa.calibrate.cases import Case, Sample
from mofa.calibrate.measurements import append_row
from mofa.calibrate.shapes.chunked import FAMILY, OPS


def measure_chunked_layers_on_ranks(
    cases: Sequence[Case],
    folder: Path,
    host: str,
    ranks: int,
    *,
    device: str = "cuda",
    progress: Callable[[int], None] | None = None,
) -> None:
    """Run the layers on ``ranks`` ranks; the first appends a row for each of a layer's ops to ``folder``.

    ``progress`` is called about once a second with how many layers are done.
    """
    path = folder / f"{FAMILY}.csv"
    before = _num_layers(path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = (ranks, port, list(cases), folder, host, device)
    started = torch.multiprocessing.spawn(_rank, arguments, nprocs=ranks, join=False)
    try:
        while not started.join(timeout=1.0):
            if progress is not None:
                progress(_num_layers(path) - before)
    finally:  # an interruption ends them too
        for process in started.processes:
            if process.is_alive():
                process.terminate()


def _num_layers(path: Path) -> int:
    return path.read_bytes().count(f"\n{FAMILY},step,".encode()) if path.exists() else 0


def _rank(rank: int, ranks: int, port: int, cases: list[Case], folder: Path, host: str, device: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started the ranks ends them, and says so once
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    where = f"{device}:{rank}" if device == "cuda" else device
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=ranks)
    groups = {size: dist.new_group(list(range(size))) for size in sorted({c.shape_size("ep") for c in cases} | {ranks})}
    gpu, clock = torch.cuda.get_device_name() if device == "cuda" else "cpu", GpuMonitor(device)
    torch.manual_seed(rank)
    layer: BenchMoeLayer | None = None
    made: tuple[int, ...] = ()
    for case in cases:
        group = groups[case.shape_size("ep")]
        if rank >= case.shape_size("ep"):
            continue
        sizes = tuple(case.shape_size(name) for name in ("tokens", "hidden", "ffn", "experts", "top_k", "ep"))
        if sizes != made:
            layer = None  # frees the weights of the one before
            layer, made = BenchMoeLayer(case, where, group, rank), sizes
        assert layer is not None
        layer.prepare_case(case)
        samples = _worst(measure_layer_steps(layer, device), layer, where)
        if rank == 0:
            _append(folder, case, samples, clock, gpu, host)
    dist.barrier(group=groups[ranks])
    dist.destroy_process_group()


def _worst(samples: dict[str, list[float]], layer: BenchMoeLayer, where: str) -> dict[str, list[float]]:
    """Of every step the slowest rank's time, of the peaks the fullest rank's."""
    if layer.ep == 1:
        return samples
    values = torch.tensor(list(samples.values()), device=where, dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=layer.group)
    return dict(zip(samples, values.tolist(), strict=True))


def _append(folder: Path, case: Case, samples: dict[str, list[float]], clock: GpuMonitor, gpu: str, host: str) -> None:
    for op in OPS:
        if op in samples:
            sample: Sample = median_and_percentiles(samples[op], *clock.sm_clock_and_power())
            append_row(folder, replace(case, op=op), sample, gpu, host)
