"""Where the seconds of a profiled step went, beside where the prediction puts them, per family of kernels."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from mofa.errors import SpecError
from mofa.plan.result import Plan
from mofa.specs.base import Spec
from mofa.specs.files import shown_value
from mofa.specs.limited_reads import gunzipped, number_of_json, parse_json, read_bytes
from mofa.units import format_seconds

Family = Literal["gemm", "grouped_gemm", "attention", "memory_bound", "optimizer", "communication", "host_idle"]

FAMILIES: tuple[tuple[Family, str], ...] = (
    ("communication", r"nccl|SendRecv|AllReduce|AllGather|ReduceScatter|deep_ep|nvshmem"),
    ("optimizer", r"multi_tensor_apply|FusedOptimizer|adam"),
    ("attention", r"sdpa|flash|fmha|dot_do_o|convert_dq"),
    ("grouped_gemm", r"grouped|GemmUniversal.*(?:Group|Ptr)|cutlass13device_kernel.*GemmUniversal"),
    ("gemm", r"nvjet|gemm|gemv|cublas|cutlass|xmma|wgmma|splitK"),
)
"""Families by the first pattern that a kernel's name holds; any other kernel is memory-bound."""
MAX_FILE_BYTES = 2**28
"""Of a trace, packed or not: as objects of Python it takes eight times as much. [B]"""
MOST_US = 1e15
"""Of a time or a duration in a trace: thirty years. [us]"""


@dataclass(frozen=True)
class TracedKernel:
    """One kernel on the device. [s]"""

    stream: int
    name: str
    start_s: float
    duration_s: float


@dataclass(frozen=True)
class TracedStep:
    """What a trace says: its kernels by rising start, and of the run what its file tells; None where it is silent."""

    kernels: list[TracedKernel]
    gpu: str | None = None
    """Name of the device."""
    world_size: int | None = None
    """Ranks of the run."""
    steps: int = 1
    """Steps that the profiler marked; 1 where it marked none."""
    run: str | None = None
    """Identity of the run in the name of a trace of ``mofa measure``."""


class FamilySeconds(Spec):
    """One family of kernels in one step."""

    family: str
    kernels: int = Field(ge=0, description="Kernels of it in the trace. [-]")
    measured_s: float = Field(ge=0, description="Seconds of its kernels, overlapped ones included. [s]")
    predicted_s: float = Field(ge=0, description="Exposed and hidden seconds of the prediction. [s]")


class Attribution(Spec):
    """A profiled step beside its prediction."""

    measured_step_s: float = Field(gt=0, description="From the first kernel's start to the last one's end. [s]")
    predicted_step_s: float = Field(gt=0)
    families: tuple[FamilySeconds, ...]
    recompute_s: float = Field(ge=0, description="Predicted recomputation; its kernels are in their families. [s]")
    bubble_s: float = Field(ge=0, description="Predicted wait in the pipeline; idle in the trace. [s]")
    stragglers_s: float = Field(
        default=0.0, ge=0, description="Predicted wait for slower GPUs; in the trace communication, or on the slowest "
        "GPU in products. [s]"
    )  # fmt: skip
    warnings: tuple[str, ...] = Field(default=(), description="What speaks against trace and run being one.")
    notes: tuple[str, ...] = Field(
        default=(), description="Whose host and which routing a measured run is predicted with, in words."
    )


@lru_cache(maxsize=65536)
def kernel_family(kernel: str) -> Family:
    """Family of a kernel by its name.

    Examples
    --------
    >>> names = ("nvjet_sm90_tst_256x128", "ncclDevKernel_AllGather_RING_LL", "Memset (Device)")
    >>> tuple(kernel_family(name) for name in names)
    ('gemm', 'communication', 'memory_bound')
    """
    matching = (family for family, pattern in FAMILIES if re.search(pattern, kernel, re.IGNORECASE))
    return next(matching, "memory_bound")


def read_trace(path: Path) -> list[TracedKernel]:
    """Kernels of one step, in the order of their start; see :func:`read_profile`."""
    return read_profile(path).kernels


def read_profile(path: Path) -> TracedStep:
    """A profiled step and what its file says of the run.

    Parameters
    ----------
    path
        A Chrome trace of torch.profiler, or a trace of ``mofa measure --trace``; ``.json`` or ``.json.gz``.

    Raises
    ------
    SpecError
        If the file is none of them or holds no kernel.
    """
    raw = _load(path)
    try:
        if "kernels_us" in raw:
            kernels = [_kernel(s, n, t, d) for s, n, t, d in raw["kernels_us"]]
        else:
            kernels = [
                _kernel(e.get("tid", 0), e["name"], e["ts"], e["dur"])
                for e in raw["traceEvents"]
                if isinstance(e, dict) and e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
            ]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise SpecError(f"{path}: no trace of torch.profiler ({_words(error)}); export a Chrome trace") from None
    if not kernels:
        raise SpecError(f"{path}: holds no kernel; profile with ProfilerActivity.CUDA")
    kernels = sorted(kernels, key=lambda kernel: kernel.start_s)
    if "kernels_us" in raw:
        return TracedStep(kernels, run=_run_of(path.name))
    devices, ranks = raw.get("deviceProperties"), raw.get("distributedInfo")
    first = devices[0] if isinstance(devices, list) and devices and isinstance(devices[0], dict) else {}
    world = ranks.get("world_size") if isinstance(ranks, dict) else None
    marks = {name for e in raw["traceEvents"] if isinstance(e, dict) and isinstance(name := e.get("name"), str)}
    steps = sum(name.startswith("ProfilerStep#") for name in marks)
    return TracedStep(
        kernels,
        gpu=str(first["name"]) if first.get("name") else None,
        world_size=world if isinstance(world, int) and not isinstance(world, bool) else None,
        steps=max(steps, 1),
    )


def _kernel(stream: Any, name: Any, start_us: Any, duration_us: Any) -> TracedKernel:
    """One kernel; raises ValueError where a time is no time."""
    start, duration = number_of_json(start_us), number_of_json(duration_us)
    if not -MOST_US <= start <= MOST_US or not 0.0 <= duration <= MOST_US:
        raise ValueError(f"a kernel starts at {start:g} us and takes {duration:g} us")
    return TracedKernel(int(number_of_json(stream)), str(name), start * 1e-6, duration * 1e-6)


def _words(error: Exception) -> str:
    return shown_value(str(error), 80) if isinstance(error, ValueError) else type(error).__name__


def _run_of(name: str) -> str | None:
    """Identity of a run in ``ID.RANK.json.gz``, the name of a trace of ``mofa measure``.

    Examples
    --------
    >>> _run_of("tt2-fsdp.1.json.gz"), _run_of("trace.json")
    ('tt2-fsdp', None)
    """
    matched = re.fullmatch(r"(.+)\.\d+\.json(?:\.gz)?", name)
    return matched[1] if matched else None


def _load(path: Path) -> dict[str, Any]:
    where, advice = shown_value(str(path), 200), "profile one step"
    data = gunzipped(read_bytes(path, where, MAX_FILE_BYTES, advice), where, MAX_FILE_BYTES, advice)
    raw = parse_json(data, where, "export a Chrome trace")
    if not isinstance(raw, dict):
        raise SpecError(f"{path}: holds no object; export a Chrome trace")
    return raw


def device_busy_s(kernels: Iterable[TracedKernel]) -> float:
    """Seconds in which at least one kernel runs; by rising start. [s]

    Examples
    --------
    >>> device_busy_s([TracedKernel(0, "a", 0.0, 2.0), TracedKernel(1, "b", 1.0, 2.0), TracedKernel(0, "c", 5.0, 1.0)])
    4.0
    """
    busy, end = 0.0, float("-inf")
    for kernel in kernels:
        busy += max(kernel.start_s + kernel.duration_s - max(kernel.start_s, end), 0.0)
        end = max(end, kernel.start_s + kernel.duration_s)
    return busy


PRODUCTS = ("gemm", "grouped_gemm", "attention")
LEAST, MOST = 0.4, 1.6
"""Seconds of products and attention in a trace over those predicted, below and above which the trace is doubted. Of the
59 kept traces the smallest is 0.51 (the stage of a pipeline that has no head), the largest 1.13 of those that count
recomputation, which is not told apart by kind, as predicted. [-]"""


def refuse_trace_of_another_run(
    trace: Path, profile: TracedStep, gpus: int, run: str | None = None, gpu: str | None = None
) -> None:
    """Refuse a trace that says itself that it is of another run; nothing of one that is silent.

    Parameters
    ----------
    trace, profile
        The file, and what it says.
    gpus
        Of the run. [-]
    run, gpu
        Identity of the run, and the device in its record, where they are known.

    Raises
    ------
    SpecError
        If the trace is named after another run, or of other ranks or another device than the run.
    """
    where = shown_value(str(trace), 200)
    if profile.run is not None and run is not None and profile.run != run:
        raise SpecError(
            f"{where}: is named after run {profile.run}, the run is {run}; name the run's own trace, or give the file "
            "another name if it is"
        )
    if profile.world_size is not None and profile.world_size != gpus:
        raise SpecError(f"{where}: is of {profile.world_size} ranks, the run of {gpus} GPUs; name the run's own trace")
    if profile.gpu is not None and gpu is not None and profile.gpu != gpu:
        raise SpecError(f"{where}: is of {profile.gpu!r}, the run of {gpu!r}; name the run's own trace")


def trace_mismatches(profile: TracedStep, attribution: Attribution) -> list[str]:
    """What speaks against a trace being one step of the run, each with what to do; nothing where they agree.

    Parameters
    ----------
    profile, found
        The trace, and it beside the prediction.
    """
    out = []
    if profile.steps > 1:
        out.append(f"the trace holds {profile.steps} marked steps, the prediction is of one; profile one")
    measured = sum(item.measured_s for item in attribution.families if item.family in PRODUCTS)
    predicted = sum(item.predicted_s for item in attribution.families if item.family in PRODUCTS)
    if not LEAST * predicted <= measured <= MOST * (predicted + attribution.recompute_s):
        out.append(
            f"products and attention take {format_seconds(measured)} in the trace and {format_seconds(predicted)} in "
            "the prediction; is it one whole step of this run (model, layers, batch)?"
        )
    return out


def attribute_step(kernels: list[TracedKernel], plan: Plan, notes: tuple[str, ...] = ()) -> Attribution:
    """Put the kernels of one step beside the prediction of its slowest rank; ``notes`` say what that rests on."""
    names: list[Family] = ["gemm", "grouped_gemm", "attention", "memory_bound", "optimizer", "communication"]
    seconds, counts = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
    for kernel in kernels:
        family = kernel_family(kernel.name)
        seconds[family] += kernel.duration_s
        counts[family] += 1
    exposed, hidden = plan.time.exposed, plan.time.hidden
    predicted: dict[Family, float] = {
        "gemm": exposed["gemm"], "grouped_gemm": exposed["grouped_gemm"], "attention": exposed["attention"],
        "memory_bound": exposed["memory_bound"], "optimizer": exposed["optimizer"],
        "communication": sum(hidden.values()) + sum(exposed[n] for n in ("tp", "cp", "ep", "pp", "dp")),
    }  # fmt: skip
    span = max(k.start_s + k.duration_s for k in kernels) - kernels[0].start_s
    families = [
        FamilySeconds(family=name, kernels=counts[name], measured_s=seconds[name], predicted_s=predicted[name])
        for name in names
        if counts[name] or predicted[name] > 0
    ]
    idle = FamilySeconds(
        family="host_idle",
        kernels=0,
        measured_s=max(span - device_busy_s(kernels), 0.0),
        predicted_s=exposed["host_idle"],
    )
    return Attribution(
        measured_step_s=span,
        predicted_step_s=plan.step_s,
        families=(*families, idle),
        recompute_s=exposed["recompute"],
        bubble_s=exposed["bubble"],
        stragglers_s=exposed["stragglers"],
        notes=notes,
    )
