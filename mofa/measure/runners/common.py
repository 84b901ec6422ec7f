"""What every runner shares: the gate, timed steps, memory, failures, the result of one rank.

A runner is started once per rank as ``python -m mofa.measure.runners.FRAMEWORK JOB.json RESULTS`` with ``RANK``,
``WORLD_SIZE`` and ``MASTER_ADDR`` in its environment. It imports the framework, then waits for one line on standard
input, ``go LOCAL_RANK MASTER_PORT``, before it touches a GPU, so that the next run can get ready while one is
being measured. It writes ``RESULTS/rankN.json``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import math
import os
import platform
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mofa import host_pace
from mofa.measure.runners import host_trace, traces
from mofa.measure.runners.beginning import MemoryHistoryOfBeginning

Job = dict[str, Any]


@dataclass(frozen=True)
class BuiltTraining:
    """A training run that is ready to step."""

    step: Callable[[], None]
    """One optimizer step, as the framework's own loop does it."""
    count_tokens: Callable[[], list[list[int]]] | None
    """One more step that returns, per layer with experts, the tokens this rank routed to each expert."""
    loss: Callable[[], float | None]
    facts: dict[str, Any]
    """What the framework says about itself: parameters on this rank, layers per stage."""
    on_engine: bool = False
    """Whether its layers are Transformer Engine's, one of which is then timed beside its steps."""
    layers: tuple[torch.nn.Module, ...] = ()
    """Where the pace of the host is sampled within steps."""
    chunks: tuple[torch.nn.Module, ...] = ()
    """The model chunks of this rank, whose layers' parts can be timed."""
    parts: str = ""
    """The module that says which parts those are."""
    grad_norms: list[float] = dataclasses.field(default_factory=list)
    """Of each step so far, where the framework says it."""


def memory_and_peaks_now() -> dict[str, int]:
    """What the allocator and the device hold now, and the peaks since they were reset. [B]"""
    free, total = torch.cuda.mem_get_info()
    stats = torch.cuda.memory_stats()
    return {
        "allocated_bytes": torch.cuda.memory_allocated(),
        "reserved_bytes": torch.cuda.memory_reserved(),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "device_bytes": total - free,
        "device_total_bytes": total,
        "alloc_retries": int(stats.get("num_alloc_retries", 0)),
    }


def _agree(value: float) -> float:
    """The largest of a number over all ranks."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return value
    tensor = torch.tensor([value], device="cuda", dtype=torch.float64)
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX)
    return float(tensor.item())


def _timed(step: Callable[[], None], num_steps: int, paces: _Paces | None = None) -> list[float]:
    """Seconds of each step, read from events on the device; the host never waits between steps.

    With ``paces`` the host moves to quiet cores before each step, and its pace within the step is kept.
    """
    begins, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(num_steps)] for _ in range(2))
    for begin, end in zip(begins, ends, strict=True):
        if paces is not None:
            paces.before_step()
        begin.record()
        step()
        end.record()
        if paces is not None:
            paces.behind_step()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in zip(begins, ends, strict=True)]


class _Paces:
    """What this host takes for the same small works, read before, between and behind rounds of steps."""

    def __init__(self, training: BuiltTraining) -> None:
        free, _ = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        self._layer = host_pace.TransformerEngineLayer() if training.on_engine else None
        if self._layer is not None:
            self._layer.forward_and_backward_s()
        left, _ = torch.cuda.mem_get_info()
        self.outside_bytes = free - left - (torch.cuda.memory_reserved() - reserved)
        """Of the device, outside the allocator, by kernels and plans that the layer's first call loads. [B]"""
        names = ["host_issues_s", "host_backs_s", "cpu_ops_at_issues_s"]
        names += ["layer_issues_s", "layer_backs_s", "layer_ops_s", "layer_back_ops_s"] if training.on_engine else []
        names += ["cpu_ops_s", "step_ops_s", "step_back_ops_s"]
        self.read: dict[str, list[float]] = {name: [] for name in names}
        self._cores = host_pace.QuietCorePinner(torch.cuda.current_device(), torch.cuda.device_count())
        self._sampled = bool(training.layers)
        self._sampler = host_pace.StepPaceSampler(training.layers)

    def look(self) -> None:
        """Read all of them on the two quietest cores; where steps are sampled also on the two loudest, to see how each
        work goes with an addition."""
        for move in (
            (self._cores.move_to_quietest, self._cores.move_to_loudest)
            if self._sampled
            else (self._cores.move_to_quietest,)
        ):
            move()
            self.read["host_issues_s"].append(host_pace.small_op_s())
            self.read["host_backs_s"].append(host_pace.small_op_backward_s())
            self.read["cpu_ops_at_issues_s"].append(host_pace.processor_op_s())
            if self._layer is not None:
                names = "layer_issues_s", "layer_backs_s", "layer_ops_s", "layer_back_ops_s"
                for name, seconds in zip(names, self._layer.layer_and_small_op_seconds(), strict=True):
                    self.read[name].append(seconds)

    def before_step(self) -> None:
        """Move to quiet cores."""
        self._cores.stay_or_move_to_quiet()
        self._sampler.mean_small_op_s_since_last()

    def behind_step(self) -> None:
        """Keep what a small op took within the step and behind it."""
        self.read["cpu_ops_s"].append(host_pace.processor_op_s())
        ahead, back = self._sampler.mean_small_op_s_since_last()
        if ahead == ahead and back == back:
            self.read["step_ops_s"].append(ahead)
            self.read["step_back_ops_s"].append(back)

    def forget_step(self) -> None:
        """Leave out the last step."""
        for name in ("cpu_ops_s", "step_ops_s", "step_back_ops_s"):
            del self.read[name][-1:]

    def end(self) -> None:
        """Let the host be where it likes, and sample no more."""
        self._cores.release()
        self._sampler.stop()


def _timed_repetitions(
    step: Callable[[], None], num_steps: int, num_repetitions: int, paces: _Paces
) -> dict[str, list[float]]:
    """Seconds of each step, and the host's paces before, between, behind and within them.

    A host's pace changes within seconds, so it is timed where the steps are; within every step an op on the processor
    is, which tells how the pace was between the readings, since it is timed at these as well. A round begins on an
    idle device, so its first step is none of those that count; all ranks begin it together.
    """
    times: list[float] = []
    paces.look()
    for _ in range(num_repetitions):
        _agree(0.0)
        _timed(step, 1, paces)
        paces.forget_step()
        times += _timed(step, math.ceil(num_steps / num_repetitions), paces)
        paces.look()
    paces.end()
    return {"step_times_s": times, **paces.read}


def _warm_up(training: BuiltTraining, job: Job, result: dict[str, Any]) -> list[float]:
    """Seconds of the steps before the measured ones: as many as the job says, and on until two are alike.

    Fusions that are compiled anew for a new number of tokens would otherwise fall into the measured steps.
    """
    result["phase"] = "first step"
    times = _timed(training.step, 1)
    result["memory_first_step"] = memory_and_peaks_now()
    result["phase"] = "warm-up"
    times += _timed(training.step, job["warmup_steps"] - 1)
    while len(times) < job["max_warmup_steps"] and _agree(max(times[-2:]) / min(times[1:])) > job["settled"]:
        times += _timed(training.step, 2)
    return times


def _measured(training: BuiltTraining, job: Job, result: dict[str, Any], folder: Path, rank: int) -> None:
    result["memory_ready"] = memory_and_peaks_now()
    warmup = _warm_up(training, job, result)
    whole_run = memory_and_peaks_now()
    per_step = _agree(min(warmup[1:]))
    num_steps = int(min(max(job["seconds"] / per_step, job["min_steps"]), job["max_steps"]))
    paces = _Paces(training)
    torch.cuda.reset_peak_memory_stats()
    training.grad_norms.clear()
    result["phase"] = "steady steps"
    num_repetitions = job["rounds"] if per_step < job["slow_step_s"] else 2
    timed = _timed_repetitions(training.step, num_steps, num_repetitions, paces)
    result["warmup_times_s"] = warmup
    result["grad_norms"] = list(training.grad_norms)
    steady = memory_and_peaks_now()
    steady["device_bytes"] -= paces.outside_bytes
    result["memory"] = steady
    result["memory_whole"] = {
        k: max(whole_run[k], steady[k]) for k in ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes")
    }
    result["loss"] = training.loss()
    result["outcome"] = "ok"
    result |= timed
    if training.count_tokens is not None:
        result["tokens_per_expert"] = training.count_tokens()
    if job.get("layer_segments"):
        from mofa.measure.runners.layer_segments import write_layer_segments

        parts = importlib.import_module(training.parts).PARTS
        write_layer_segments(training.step, training.chunks, parts, folder / f"segments{rank}.csv")
    host = host_trace.traced_steps_with_and_without_gc(training.step) if job.get("trace") else {}
    # near the capacity the profiler's own buffers could end a run that went well
    if _agree(steady["device_bytes"] / steady["device_total_bytes"]) < job["profile_below"]:
        result["phase"] = "profile"
        result |= traces.device_busy_and_compute_seconds(training.step)
        if job.get("trace"):
            traces.write_traces(training.step, folder, rank, host)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a failure is the device's memory, in whichever words."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


def _tried_bytes(text: str) -> int | None:
    match = re.search(r"Tried to allocate ([\d.]+) ([KMGT])iB", text)
    return int(float(match[1]) * 2 ** (10 * (1 + "KMGT".index(match[2])))) if match else None


def _driver() -> str | None:
    """Version of the GPU's driver, as its kernel module says it."""
    path = Path("/proc/driver/nvidia/version")
    match = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", path.read_text()) if path.is_file() else None
    return match[1] if match else None


def _host() -> str:
    """Tells machines apart by what their system and GPUs say of themselves, hashed; as calibration names them."""
    uuids = " ".join(str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count()))
    gpus = hashlib.sha256(uuids.encode()).hexdigest()[:12]
    return "host-" + hashlib.sha256(f"{platform.node()} {platform.version()} {gpus}".encode()).hexdigest()[:6]


def _cudnn_version() -> int:
    """Of the cuDNN that is loaded, as 91400 for 9.14.0: Transformer Engine may have found another than PyTorch's."""
    major, minor, patch = torch._C._cudnn.getRuntimeVersion()  # type: ignore[attr-defined]
    return 10_000 * int(major) + 100 * int(minor) + int(patch)


def process_environment(framework_version: str) -> dict[str, Any]:
    """Where this process runs: device, processor, versions and settings, as a record has them."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "unknown",
    )
    version = torch.cuda.nccl.version()
    return {
        "gpu": torch.cuda.get_device_name(),
        "cpu": cpu,
        "cpu_cores": len(os.sched_getaffinity(0)),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": _cudnn_version(),
        "nccl": ".".join(map(str, version)),
        "driver": _driver(),
        "host": _host(),
        "framework": framework_version,
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF", ""),
        "settings": {
            k: v
            for k, v in sorted(os.environ.items())
            if k.startswith(("NCCL_", "TORCH_NCCL_", "CUDA_DEVICE_MAX", "TORCH_SYMM_MEM_DISABLE", "OMP_NUM"))
            and "/" not in v
        },
    }


def measure_one_rank(build: Callable[[Job], BuiltTraining], framework_version: str) -> None:
    """Run one rank: wait at the gate, build, measure, write the result, leave without a tear-down."""
    job: Job = json.loads(Path(sys.argv[1]).read_text())
    folder, rank = Path(sys.argv[2]), int(os.environ["RANK"])
    _, os.environ["LOCAL_RANK"], os.environ["MASTER_PORT"] = sys.stdin.readline().split()
    device = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(device)
    result: dict[str, Any] = {"rank": rank, "outcome": "error", "phase": "building"}
    try:
        beginning = None
        if num_steps := job.get("beginning_steps"):
            path = folder / f"beginning{rank}.json.gz"
            beginning = MemoryHistoryOfBeginning(torch.cuda.memory, device, path, num_steps)
        training = build(job)
        if beginning is not None:
            training = dataclasses.replace(training, step=beginning.with_recorded_history(training.step))
        result["facts"] = training.facts
        _measured(training, job, result, folder, rank)
    except Exception as error:
        measured = result["outcome"] == "ok"  # what comes after the timed steps takes nothing from them
        memory = is_out_of_memory(error) and not measured
        result["outcome"] = "ok" if measured else "oom" if memory else "error"
        result["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:500]
        if memory:
            result["tried_bytes"] = _tried_bytes(str(error))
            result["memory"] = memory_and_peaks_now()
        else:
            traceback.print_exc()
    result["environment"] = process_environment(framework_version)
    result["phase_of_end"] = result.pop("phase")
    temporary = folder / f"rank{rank}.json.tmp"
    temporary.write_text(json.dumps(result))
    temporary.rename(folder / f"rank{rank}.json")
    sys.stdout.flush()
    sys.stderr.flush()
    if result["outcome"] == "ok" and torch.distributed.is_initialized():
        torch.distributed.barrier(device_ids=[device])
    os._exit(0)
