"""The host under Transformer Engine and Megatron-Core: ``python -m mofa.calibrate.bench.te_host OUT [--gpus 2]``.

Host seconds of each module's forward and backward, of chains that the queue takes, at widths at which the device keeps
up; of whole models by their parts; beside each what a small op takes. A second pass, under a profiler, lists the
kernels that each case launches. Transformer Engine and Megatron-Core must be importable. A case that fails is reported
and skipped.

``te_host.csv`` has rows as :mod:`mofa.calibrate.measurements` reads them: ``op`` is the case, ``variant`` the way
(``fwd``, ``bwd``, a part of a step, the pace). Work is issued on cores whose neighbours are quiet, and what they were
not all the while does not count (:class:`mofa.host_pace.QuietCorePinner`). Beside that every time is divided by what
a layer of Transformer Engine takes right before it, each way by its own, and told for the pace that the host had at the
beginning: every case's ``layer_fwd`` and ``layer_bwd``, with the ``small_op`` of the same moments. ``kernels.json`` has
each case's kernels by name, ``nodes.json`` the nodes of its graph.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from mofa import host_pace
from mofa.calibrate.bench.te_timing import FAMILY, DeviceWaitTimer, HostPaceSample, RowRecorder
from mofa.calibrate.bench.torch_bench import machine_environment
from mofa.calibrate.run_cases import anonymous_machine_id


def write_kernels_of_all_cases(recorder: RowRecorder) -> None:
    """Every case once more under a profiler: ``kernels.json``, kernels of each case by name, count and time [us]."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for i, (label, call) in enumerate(recorder.later):
            if recorder.seconds_to_deadline() < -25:
                break
            try:
                with torch.profiler.record_function(f"{FAMILY}:{i}"):
                    call()
                    torch.cuda.synchronize()
            except Exception as error:
                recorder.failed.append(f"kernels of {label}: {error}")
    if not recorder.writes:
        return
    on_device, ranges = [], []
    cuda = torch.autograd.DeviceType.CUDA
    for event in profile.profiler.kineto_results.events():
        name, start, took = event.name(), event.start_ns(), event.duration_ns()
        if name.startswith(f"{FAMILY}:"):
            if event.device_type() != cuda:
                ranges.append((start, start + took, int(name.split(":")[1])))
        elif event.device_type() == cuda:
            on_device.append((start, name, took))
    ranges.sort()
    on_device.sort()
    kernels_by_case: dict[str, list[tuple[str, int, float]]] = {}
    position = 0
    for start, end, i in ranges:
        durations_by_name: dict[str, list[int]] = collections.defaultdict(list)
        while position < len(on_device) and on_device[position][0] < end:
            if on_device[position][0] >= start:
                durations_by_name[on_device[position][1][:120]].append(on_device[position][2])
            position += 1
        kernels_by_case[recorder.later[i][0]] = [
            (name, len(times), round(sum(times) / len(times) / 1e3, 3)) for name, times in durations_by_name.items()
        ]
    (recorder.out / "kernels.json").write_text(json.dumps(kernels_by_case, indent=0) + "\n", encoding="utf-8")


def run_all_cases(recorder: RowRecorder, todo: Sequence[tuple[str, Callable[[], None]]]) -> None:
    """Run all cases that the time allows; a failure is a line of ``failed.txt``."""
    for name, call in todo:
        if recorder.seconds_to_deadline() < 0:
            recorder.failed.append(f"{name}: no time left")
            continue
        try:
            call()
        except Exception as error:
            torch.cuda.synchronize()
            text = str(error).splitlines()[0][:300] if str(error) else ""
            recorder.failed.append(f"{name}: {type(error).__name__}: {text}\n{traceback.format_exc()[-1500:]}")
            print(f"{name}: {type(error).__name__}: {text}", flush=True)


def _fast_pace(cores: host_pace.QuietCorePinner, readings: int = 25) -> HostPaceSample:
    """Low quartiles of the beginning on quiet cores."""
    layer = host_pace.TransformerEngineLayer()
    read = []
    for _ in range(readings):
        cores.stay_or_move_to_quiet()
        read.append((host_pace.small_op_s(), *layer.forward_and_backward_s()))
    cores.release()
    return HostPaceSample(*(sorted(column)[readings // 4] for column in zip(*read, strict=True)))


def run_cases_of_rank(rank: int, gpus: int, port: int, out: str, limit_s: float, wanted: list[str]) -> None:
    """Run all cases of one process, a rank."""
    started = time.monotonic()
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(gpus), LOCAL_RANK=str(rank)
    )
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    torch.cuda.set_device(rank)
    from mofa.calibrate.bench import te_megatron, te_models, te_modules

    waits, cores = DeviceWaitTimer(), host_pace.QuietCorePinner(rank, torch.cuda.device_count())
    described = machine_environment("cuda")
    recorder = RowRecorder(
        Path(out), torch.cuda.get_device_name(), anonymous_machine_id(str(described.get("gpu_ids", ""))), rank == 0,
        waits,
        started + limit_s, _fast_pace(cores), cores,
    )  # fmt: skip
    if rank == 0:
        recorder.out.mkdir(parents=True, exist_ok=True)
        described |= {"host": recorder.host, "gpus_used": gpus, **te_megatron.timed_library_versions()}
        (recorder.out / "environment.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    te_megatron.init_process_groups(gpus, {})
    todo = te_modules.one_gpu_module_cases(recorder) + te_models.one_gpu_model_cases(recorder) if gpus == 1 else []
    if gpus == 2:
        todo = te_modules.two_gpu_module_cases(recorder) + te_models.two_gpu_model_cases(recorder)
    todo = [(name, call) for name, call in todo if not wanted or any(name.startswith(word) for word in wanted)]
    run_all_cases(recorder, todo)
    if gpus == 1:
        write_kernels_of_all_cases(recorder)
    if rank == 0:
        (recorder.out / "nodes.json").write_text(json.dumps(recorder.nodes, indent=1) + "\n", encoding="utf-8")
        (recorder.out / "failed.txt").write_text("\n".join(recorder.failed) + "\n", encoding="utf-8")
        print(f"{len(recorder.failed)} failed, {time.monotonic() - started:.0f} s", flush=True)
    sys.stdout.flush()
    os._exit(0)


def time_transformer_engine_host() -> None:
    """Run the command line: time what the host needs to issue Transformer Engine."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("only", nargs="*", help="beginnings of names of cases")
    parser.add_argument("--gpus", type=int, default=1, choices=(1, 2))
    parser.add_argument("--limit", type=float, default=130.0, help="seconds after which no case begins")
    given = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = given.gpus, port, str(given.out), given.limit, given.only
    ranks = torch.multiprocessing.spawn(run_cases_of_rank, arguments, nprocs=given.gpus, join=False)
    ended = time.monotonic() + given.limit + 90
    try:
        while not ranks.join(timeout=0.5) and time.monotonic() < ended:
            pass
    finally:
        for process in ranks.processes:
            if process.is_alive():
                process.terminate()


if __name__ == "__main__":
    time_transformer_engine_host()
