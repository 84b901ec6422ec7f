"""Megatron-LM's arguments about the optimizer's states: their format, and hosts that hold and step a part of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mofa.export.arguments import Argument, FieldRow, GivenArguments, switch_row
from mofa.export.environment import THREADS
from mofa.export.job import ExportJob

MOMENTS = (Argument("exp-avg-dtype", "text", "fp32"), Argument("exp-avg-sq-dtype", "text", "fp32"))
AWARE = Argument("use-precision-aware-optimizer", "flag", False)
OFFLOADED = Argument("optimizer-cpu-offload", "flag", False)
SHARE = Argument("optimizer-offload-fraction", "float", 1.0)
OVERLAPPED = Argument("overlap-cpu-optimizer-d2h-h2d", "flag", False)


def _write_moments(job: ExportJob) -> Mapping[str, Any]:
    if job.workload.precision.moments == "fp32":
        return {}
    return {AWARE.name: True, **{argument.name: "bf16" for argument in MOMENTS}}


def _read_moments(given: GivenArguments) -> Mapping[str, Any]:
    kinds = {str(given[argument.name]).removeprefix("torch.") for argument in MOMENTS}
    kind = {"fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfloat16": "bf16"}.get("+".join(sorted(kinds)))
    aware = bool(given[AWARE.name])
    if kind is None or ((kind == "bf16") != aware and not given[OFFLOADED.name]):
        raise given.refusal(
            f"moments in {' and '.join(sorted(kinds))} with {AWARE.name} {str(aware).lower()} are not modelled",
            "what is: fp32 without it, or both bf16 with it",
        )
    return {"precision.moments": kind}


def _write_offload(job: ExportJob) -> Mapping[str, Any]:
    share = job.framework.optimizer_offload
    if not share:
        return {}
    return {OFFLOADED.name: True, SHARE.name: share, AWARE.name: True}  # arguments.py asks for the last


def _read_offload(given: GivenArguments) -> Mapping[str, Any]:
    if not given[OFFLOADED.name]:
        return {}
    if not given[AWARE.name]:
        raise given.refusal(f"{OFFLOADED.name} is given without {AWARE.name}", "Megatron-LM refuses it; add it")
    return {"framework.optimizer_offload": float(given[SHARE.name])}


def _read_threads(given: GivenArguments) -> Mapping[str, Any]:
    """Threads of a rank count where its host steps an optimizer."""
    if not given[OFFLOADED.name]:
        return {}
    text = str(given[THREADS.name])
    if not text.isdecimal() or int(text) < 1:
        raise given.refusal(f"{THREADS.name} ({text[:20]}) is no number of threads", "give 1 or more")
    return {"framework.host_threads": int(text)}


OPTIMIZER_ROWS: tuple[FieldRow, ...] = (
    FieldRow(("precision.moments",), (AWARE, *MOMENTS), _write_moments, _read_moments),
    FieldRow(("framework.optimizer_offload",), (OFFLOADED, SHARE), _write_offload, _read_offload),
    switch_row("framework.overlap_optimizer_copies", OVERLAPPED),
    FieldRow(
        ("framework.host_threads",), (THREADS,),
        lambda job: {THREADS.name: str(job.framework.host_threads)} if job.framework.optimizer_offload else {},
        _read_threads,
    ),
)  # fmt: skip
"""The states of the optimizer."""
