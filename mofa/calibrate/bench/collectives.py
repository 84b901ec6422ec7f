"""Collectives and what they cost the computing beside them: one process per GPU, NCCL through torch."""

from __future__ import annotations

import os
import signal
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mofa.calibrate.bench.dense_layer import dense_layer_call
from mofa.calibrate.bench.torch_timing import GpuMonitor, median_and_percentiles
from mofa.calibrate.cases import Case, Sample
from mofa.calibrate.measurements import append_row
from mofa.calibrate.shapes.families import COLLECTIVE_FAMILIES

Call = Callable[[], Any]


def measure_collectives(
    cases: Sequence[Case],
    folder: Path,
    host: str,
    gpus: int,
    *,
    device: str = "cuda",
    progress: Callable[[int], None] | None = None,
) -> None:
    """Time the cases of collectives on ``gpus`` GPUs; the first rank appends the rows to ``folder``.

    ``progress`` is called about once a second with how many rows have come.
    """
    before = _num_lines(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = torch.multiprocessing.spawn(_rank, (gpus, port, list(cases), folder, host, device), nprocs=gpus, join=False)
    try:
        while not ranks.join(timeout=1.0):
            if progress is not None:
                progress(_num_lines(folder) - before)
    finally:  # an interruption ends them too
        for process in ranks.processes:
            if process.is_alive():
                process.terminate()


def _num_lines(folder: Path) -> int:
    """Lines of the files that the ranks write."""
    paths = [folder / f"{family}.csv" for family in COLLECTIVE_FAMILIES]
    return sum(path.read_bytes().count(b"\n") for path in paths if path.exists())


def _rank(rank: int, gpus: int, port: int, cases: list[Case], folder: Path, host: str, device: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started the ranks ends them, and says so once
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=gpus)
    where = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    groups = {
        size: dist.new_group(list(range(size))) for size in sorted({c.shape_size("group") for c in cases} | {gpus})
    }
    largest = max(c.shape_size("bytes") for c in cases) // 2
    source = torch.randn(largest + 2**20, device=where, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    clock = GpuMonitor(device)
    gpu = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    for case in cases:
        group = groups[case.shape_size("group")]
        if rank >= case.shape_size("group"):
            continue
        if case.family == "overlap":
            for timed_case, sample in _overlap(case, source, target, group, where):
                if rank == 0:
                    append_row(folder, timed_case, sample, gpu, host)
            continue
        call = collective_call(case, source, target, group, rank)
        if case.family == "dependent_collective":
            sample = _dependent(case, call, source, target, group, where, clock)
        else:
            sample = _time(call, group, where, clock)
        if rank == 0:
            append_row(folder, case, sample, gpu, host)
    dist.barrier(group=groups[gpus]) if gpus in groups else None
    dist.destroy_process_group()


def collective_call(case: Case, source: torch.Tensor, target: torch.Tensor, group: Any, rank: int) -> Call:
    """The call of a collective on one rank. ``bytes`` is the whole tensor; of all-to-all and send/recv, what one rank
    sends."""
    size, p = case.shape_size("bytes") // 2, case.shape_size("group")
    full, shard = source[: size // p * p], target[: size // p]
    if case.op == "all_reduce":
        return lambda: dist.all_reduce(full, group=group, op=dist.ReduceOp.AVG if full.is_cuda else dist.ReduceOp.SUM)
    if case.op == "all_gather":
        gathered = target[: size // p * p]
        return lambda: dist.all_gather_into_tensor(gathered, source[: size // p], group=group)
    if case.op == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(shard, full, group=group)
    if case.op == "all_to_all":
        received = target[: size // p * p]
        return lambda: dist.all_to_all_single(received, full, group=group)
    if case.op == "all_to_all_uneven":
        return _uneven(case, source, target, group, p, size)
    if case.op == "send_recv":

        def ring() -> None:
            peer = 1 - rank
            ops = [
                dist.P2POp(dist.isend, source[:size], peer, group),
                dist.P2POp(dist.irecv, target[:size], peer, group),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

        return ring
    raise ValueError(f"no such collective: {case.op}")


def _uneven(case: Case, source: torch.Tensor, target: torch.Tensor, group: Any, p: int, size: int) -> Call:
    """Rank 0 receives ``skew`` times the mean, the others share the rest evenly."""
    first = int(size * float(case.shape["skew"]) / p) // 64 * 64
    rest = (size - first) // max(1, p - 1) // 64 * 64
    sends = [first, *[rest] * (p - 1)]
    own_elements = sends[dist.get_rank(group)]
    received = target.new_empty(own_elements * p) if own_elements * p > target.numel() else target[: own_elements * p]
    data = source[: sum(sends)]
    return lambda: dist.all_to_all_single(received, data, [own_elements] * p, sends, group=group)


def _time(call: Call, group: Any, where: torch.device, clock: GpuMonitor, *, budget_s: float = 0.012) -> Sample:
    """Slowest rank's median time of a call, in bursts that all ranks start together."""
    if where.type != "cuda":
        call()
        return median_and_percentiles([1e-3])
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    before = time.perf_counter()
    for _ in range(3):
        call()
    issue_s = (time.perf_counter() - before) / 3
    times: list[float] = []
    estimate = _burst(call, 3, group, where, issue_s)
    shared = torch.tensor([estimate], device=where)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
    per_sample = int(min(30, max(1, budget_s / 7 / shared.item())))
    times = [_burst(call, per_sample, group, where, issue_s) for _ in range(7)]
    slowest = torch.tensor(times, device=where)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return median_and_percentiles(slowest.tolist(), *clock.sm_clock_and_power())


def _burst(call: Call, num: int, group: Any, where: torch.device, issue_s: float) -> float:
    """Time per call of several, behind a device that is kept busy until the slowest host has issued them all."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    dist.barrier(group=group)
    torch.cuda.synchronize()
    torch.cuda._sleep(int((100e-6 + num * max(60e-6, 1.5 * issue_s)) * 2e9))
    dist.all_reduce(torch.zeros(1, device=where), group=group)
    start.record()
    for _ in range(num):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / num


def _dependent(
    case: Case, call: Call, source: torch.Tensor, target: torch.Tensor, group: Any, where: torch.device,
    clock: GpuMonitor, *, bursts: int = 4, repeats: int = 10,
) -> Sample:  # fmt: skip
    """Median time of a collective between two computations: one writes what it sends, one reads what it received.

    From the end of the first to the start of the second, on the rank that comes last: others wait for it as well.
    """
    if where.type != "cuda":
        call()
        return median_and_percentiles([1e-3])
    before, after = _computations(case, source, target)
    waited: list[float] = []
    for burst in range(bursts + 1):
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(repeats)]
        dist.barrier(group=group)
        torch.cuda.synchronize()
        torch.cuda._sleep(int((200e-6 + repeats * 250e-6) * 2e9))
        for first, second, third in marks:
            before()
            first.record()
            second.record()  # what a mark takes itself
            call()
            third.record()
            after()
        torch.cuda.synchronize()
        last = torch.tensor([b.elapsed_time(c) - a.elapsed_time(b) for a, b, c in marks], device=where)
        dist.all_reduce(last, op=dist.ReduceOp.MIN, group=group)
        if burst:  # the first warms up
            waited.append(statistics.median(last.tolist()[2:]) / 1e3)
    return median_and_percentiles(waited, *clock.sm_clock_and_power())


def _computations(case: Case, source: torch.Tensor, target: torch.Tensor) -> tuple[Call, Call]:
    """What writes the elements that a collective sends, and what reads those that it receives."""
    full, p = case.shape_size("bytes") // 2, case.shape_size("group")
    sent = source[: full // p if case.op == "all_gather" else full]
    received = (
        source[:full] if case.op == "all_reduce" else target[: full // p if case.op == "reduce_scatter" else full]
    )
    if case.variant == "stream":
        other, result = torch.ones_like(sent), torch.empty_like(received)
        return lambda: torch.mul(other, 0.5, out=sent), lambda: torch.mul(received, 0.5, out=result)
    width = 4096
    weight = torch.randn(width, width, device=source.device, dtype=source.dtype) / width**0.5
    rows, read = (max(1, x.numel() // width) for x in (sent, received))
    values = torch.randn(rows, width, device=source.device, dtype=source.dtype)
    written, taken = sent[: rows * width].view(rows, width), received[: read * width].view(read, width)
    result = torch.empty_like(taken)
    return lambda: torch.mm(values, weight, out=written), lambda: torch.mm(taken, weight, out=result)


def _overlap(
    case: Case, source: torch.Tensor, target: torch.Tensor, group: Any, where: torch.device
) -> list[tuple[Case, Sample]]:
    """Four rows: computing alone and beside the collective, the collective alone and beside the computing.

    Both run in a loop for about the same time; a row holds the time of one call.
    """
    if where.type != "cuda":
        return []
    communicate = collective_call(case, source, target, group, dist.get_rank(group))
    if case.variant == "layer":
        return _layers_beside(case, communicate, group, where)
    m, n, k = case.shape_size("m"), case.shape_size("n"), case.shape_size("k")
    if k:
        a = [torch.randn(m, k, device=where, dtype=torch.bfloat16) for _ in range(4)]
        b = torch.randn(k, n, device=where, dtype=torch.bfloat16)
        compute: Call = lambda: torch.mm(a[0], b)  # noqa: E731
    else:
        a = [torch.randn(m, n, device=where, dtype=torch.bfloat16) for _ in range(4)]
        compute = lambda: torch.mul(a[0], a[1])  # noqa: E731
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    alone = [_loops(main, compute, 20, None, None, 0, group)[0] for _ in range(3)]
    other = [_loops(side, communicate, 8, None, None, 0, group)[0] for _ in range(3)]
    span = 0.03
    agreed = torch.tensor([statistics.median(alone), statistics.median(other)], device=where)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    compute_s, communicate_s = agreed.tolist()
    num = max(4, int(span / compute_s)), max(4, int(span / communicate_s))
    both = [_loops(main, compute, num[0], side, communicate, num[1], group) for _ in range(3)]
    alone = [_loops(main, compute, num[0], None, None, 0, group)[0] for _ in range(3)]
    rows = []
    for variant, times in (
        (f"{case.variant}_alone", alone), (f"{case.variant}_overlapped", [x[0] for x in both]),
        (f"collective_alone_{case.variant}", other), (f"collective_overlapped_{case.variant}", [x[1] for x in both]),
    ):  # fmt: skip
        rows.append((Case("overlap", case.op, variant, case.dtype, "grid", case.shape), median_and_percentiles(times)))
    return rows


def _layers_beside(case: Case, communicate: Call, group: Any, where: torch.device) -> list[tuple[Case, Sample]]:
    """Three rows: a layer alone, beside one collective, and the collective alone.

    As FSDP does, a collective begins with each layer, on a stream of its own, and the next layer waits for it. A row
    holds the time of one layer or collective. Layers' are the slowest rank's, which all wait for at each collective.
    """
    compute = dense_layer_call(case.shape_size("m"), case.shape_size("n"), case.shape_size("k"), where)
    main, side, num, repeats = torch.cuda.current_stream(), torch.cuda.Stream(), 4, 5

    def layers(with_collective: bool) -> float:
        dist.barrier(group=group)
        torch.cuda.synchronize()
        time.sleep(0.03)  # what came before has left the clock high
        torch.cuda._sleep(16_000_000)  # the host issues ahead
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(main)
        for _ in range(num):
            if with_collective:
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    communicate()
            compute()
            if with_collective:
                main.wait_stream(side)
        end.record(main)
        torch.cuda.synchronize()
        slowest = torch.tensor([begin.elapsed_time(end) / 1e3 / num], device=where)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        return float(slowest)

    layers(True)
    alone, both = [layers(False) for _ in range(repeats)], [layers(True) for _ in range(repeats)]
    other = [_loops(side, communicate, 8, None, None, 0, group)[0] for _ in range(3)]
    variants = {"layer_alone": alone, "layer_overlapped": both, "collective_alone_layer": other}
    return [
        (Case("overlap", case.op, variant, case.dtype, "grid", case.shape), median_and_percentiles(times))
        for variant, times in variants.items()
    ]


def _loops(
    first: Any, call: Call, num: int, second: Any, other: Call | None, num_other: int, group: Any
) -> tuple[float, float]:
    """Time per call of one loop, or of two at once on two streams (of each until its own end)."""
    dist.barrier(group=group)
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    torch.cuda._sleep(4_000_000)
    first.wait_stream(torch.cuda.current_stream())
    if second is not None:
        second.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(first):
        marks[0].record()
    if second is not None:
        with torch.cuda.stream(second):
            marks[2].record()
    for i in range(max(num, num_other)):
        if i < num:
            with torch.cuda.stream(first):
                call()
        if i < num_other and other is not None:
            with torch.cuda.stream(second):
                other()
    with torch.cuda.stream(first):
        marks[1].record()
    if second is not None:
        with torch.cuda.stream(second):
            marks[3].record()
    torch.cuda.synchronize()
    first_s = marks[0].elapsed_time(marks[1]) / 1e3 / num
    return first_s, (marks[2].elapsed_time(marks[3]) / 1e3 / num_other if num_other else 0.0)
