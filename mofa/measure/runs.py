"""``mofa measure``: run the runs of a file for real and record what came out."""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mofa.errors import SpecError
from mofa.measure.expand import ExpandedRun, expand, routed_per_step, router_bias
from mofa.measure.launch import Outcome, Task, run_tasks
from mofa.measure.megatron_job import megatron_job
from mofa.measure.records import (
    Environment,
    Measured,
    RankMemory,
    Record,
    Split,
    assign_splits,
    configuration_hash,
    read_records,
    write_record,
)
from mofa.measure.torchtitan_job import torchtitan_job
from mofa.specs.load import load_runs
from mofa.specs.run import RunSpec
from mofa.units import format_bytes, format_seconds

_RUNNERS: dict[str, tuple[str, str, Callable[[ExpandedRun], dict[str, Any]]]] = {
    "torchtitan": ("torchtitan", "torchtitan==0.2.2", torchtitan_job),
    "megatron-local": ("megatron", "megatron-core==0.16.1", megatron_job),
}
"""Framework to (module of its runner, what to install, translation)."""
_ALLOCATORS = {"native": "", "expandable": "expandable_segments:True"}


@dataclass(frozen=True)
class MeasureSummary:
    """What a call of :func:`measure` did."""

    written: tuple[Path, ...] = ()
    skipped: tuple[str, ...] = ()
    """Runs that had a record already."""
    failed: dict[str, str] = field(default_factory=dict)
    """Runs that gave no result, and why."""


def plan_task(run: ExpandedRun, *, timeout_s: float, trace: bool = False) -> Task:
    """What a run's processes are told.

    Raises
    ------
    SpecError
        If the framework is none that is measured, or cannot run this run.
    """
    name = run.framework.name
    if name not in _RUNNERS:
        raise SpecError(f"{run.run.id}: framework {name} cannot be measured; use one of {', '.join(sorted(_RUNNERS))}")
    module, _, translate = _RUNNERS[name]
    moe = run.model.moe
    job = {
        "seed": 20,
        "warmup_steps": 5 if run.framework.compile else 4,
        "min_steps": 8,
        "max_steps": 30,
        "seconds": 3.0,
        "trace": trace,
        "routing_bias": router_bias(run.run.routing, moe.num_experts) if moe is not None else None,
        "routed_per_step": routed_per_step(run),
        module: translate(run),
    }
    environment = {"PYTORCH_ALLOC_CONF": _ALLOCATORS[run.framework.allocator], "OMP_NUM_THREADS": "1"}
    if module == "megatron":
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return Task(run.run.id, f"mofa.measure.runners.{module}", run.run.gpus, job, environment, timeout_s)


def self_test() -> dict[str, Any]:
    """What this machine has, told by a process of its own, so that this one never loads PyTorch."""
    command = [sys.executable, "-W", "ignore", "-m", "mofa.measure.runners.selftest"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines()
        raise SpecError(f"mofa measure: the self-test failed: {said[-1] if said else 'no output'}")
    state: dict[str, Any] = json.loads(lines[-1])
    return state


def check_machine(state: dict[str, Any], runs: list[RunSpec]) -> None:
    """Refuse, in one line, to measure where it cannot be done.

    Raises
    ------
    SpecError
        Without PyTorch, without a GPU, with too few of them, with a GPU that computes wrongly or is in use, or
        without a framework that a run needs.
    """
    if state["torch"] is None:
        raise SpecError("mofa measure: PyTorch is not installed; pip install 'mofa[gpu]'")
    gpus = state["gpus"]
    if not gpus:
        raise SpecError("mofa measure: no GPU is visible to PyTorch; run it on a machine with NVIDIA GPUs")
    for i, gpu in enumerate(gpus):
        if not gpu["ok"]:
            raise SpecError(f"mofa measure: GPU {i} multiplies wrongly (error {gpu['error']:.1e}); use another machine")
        if gpu["free_bytes"] < 0.97 * gpu["total_bytes"]:
            used = format_bytes(gpu["total_bytes"] - gpu["free_bytes"])
            raise SpecError(f"mofa measure: GPU {i} has {used} in use; end what runs on it first")
    for run in runs:
        name = str(run.framework.get("name"))
        module, install, _ = _RUNNERS[name]
        if state[module] is None:
            raise SpecError(f"{run.id}: {name} is not installed; pip install {install}")
        if run.gpus > len(gpus):
            raise SpecError(f"{run.id}: gpus ({run.gpus}) is more than this machine has ({len(gpus)})")


def _quartiles(times: list[float]) -> float:
    if len(times) < 2:
        return 0.0
    first, _, third = statistics.quantiles(times, n=4, method="inclusive")
    return third - first


def _rank_memory(rank: dict[str, Any]) -> RankMemory:
    memory, whole, ready = rank["memory"], rank.get("memory_whole", {}), rank.get("memory_ready", {})
    return RankMemory(
        rank=rank["rank"],
        peak_allocated_bytes=memory["peak_allocated_bytes"],
        peak_reserved_bytes=memory["peak_reserved_bytes"],
        whole_peak_allocated_bytes=whole.get("peak_allocated_bytes"),
        whole_peak_reserved_bytes=whole.get("peak_reserved_bytes"),
        ready_allocated_bytes=ready.get("allocated_bytes"),
        between_steps_bytes=memory["allocated_bytes"] if rank["outcome"] == "ok" else None,
        device_bytes=memory["device_bytes"],
        outside_allocator_bytes=memory["device_bytes"] - memory["reserved_bytes"],
        device_total_bytes=memory["device_total_bytes"],
        alloc_retries=memory["alloc_retries"],
    )


def measured_of(ranks: list[dict[str, Any]]) -> Measured:
    """What the ranks of a run found, as one result; the slowest rank's times are the run's."""
    with_memory = [r for r in ranks if "memory" in r]
    facts = dict(ranks[0].get("facts", {}))
    facts["layers"] = [r.get("facts", {}).get("layers") for r in ranks]
    short = [r for r in ranks if r["outcome"] == "oom"]
    if short:
        return Measured(
            outcome="oom",
            ranks=[_rank_memory(r) for r in with_memory],
            facts=facts,
            oom_phase=short[0]["phase_of_end"],
            oom_tried_bytes=short[0].get("tried_bytes"),
            error=short[0]["error"],
        )
    slowest = max(ranks, key=lambda r: statistics.median(r["step_times_s"]))
    times = [round(t, 7) for t in slowest["step_times_s"]]
    counts = [r["tokens_per_expert"] for r in ranks if "tokens_per_expert" in r]
    return Measured(
        outcome="ok",
        step_time_s=statistics.median(times),
        step_time_spread_s=round(_quartiles(times), 7),
        step_times_s=times,
        warmup_times_s=[round(t, 6) for t in slowest["warmup_times_s"]],
        ranks=[_rank_memory(r) for r in ranks],
        tokens_per_expert=counts or None,
        facts=facts,
    )


def _record(run: ExpandedRun, outcome: Outcome, split: Split) -> Record:
    told = outcome.ranks[0]["environment"]
    environment = Environment(num_gpus=len(outcome.gpus), side_by_side=outcome.side_by_side, **told)
    gpus = f"{environment.num_gpus} {environment.gpu}"
    source = (
        f"measured on {gpus}, PyTorch {environment.torch}, {run.framework.name} {environment.framework}, "
        f"{datetime.now(tz=UTC):%Y-%m-%d}"
    )
    return Record(
        run=run.spelled_out(), measured=measured_of(outcome.ranks), environment=environment, source=source, split=split
    )


def _keep_traces(outcome: Outcome, folder: Path) -> None:
    for path in outcome.folder.glob("trace*.json.gz"):
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"{outcome.task.id}.{path.name.removeprefix('trace')}"
        temporary = target.with_name(f".{target.name}.part")
        try:
            shutil.copy(path, temporary)
            temporary.rename(target)
        finally:
            temporary.unlink(missing_ok=True)


def _keep_logs(outcome: Outcome, folder: Path | None) -> None:
    for path in outcome.folder.glob("rank*.log") if folder is not None else ():
        assert folder is not None
        folder.mkdir(parents=True, exist_ok=True)
        lines = path.read_text(errors="replace").splitlines()[-200:]
        (folder / f"{outcome.task.id}.{path.name}").write_text("\n".join(lines))


def _line(record: Record) -> str:
    m = record.measured
    peak = max((r.peak_allocated_bytes for r in m.ranks), default=0)
    time = "out of memory" if m.step_time_s is None else format_seconds(m.step_time_s)
    return f"{record.run.id}: {time}, peak {format_bytes(peak)}, {record.split}"


def _splits(runs: dict[str, ExpandedRun], records: list[Record]) -> dict[str, Split]:
    existing = [(str(r.run.framework["name"]), configuration_hash(r.run), r.split) for r in records]
    there = {r.run.id for r in records}
    wanted = {
        id: (run.framework.name, configuration_hash(run.spelled_out())) for id, run in runs.items() if id not in there
    }
    return assign_splits(wanted, existing)


def measure(
    runs_file: Path,
    out: Path,
    *,
    parallel: bool = False,
    trace: bool = False,
    timeout_s: float = 300.0,
    logs: Path | None = None,
    progress: Callable[[str], None] = print,
) -> MeasureSummary:
    """Run every run of a file that has no record yet, and write one record each.

    Parameters
    ----------
    runs_file
        RUNS.yaml: a list of runs.
    out
        Folder of records; ``ID.yaml`` each. A run whose record exists is skipped, so that a call can be repeated.
    parallel
        Runs that together fit the machine's GPUs go side by side.
    trace
        Also keep a profile and the allocations of one step per rank, in ``out/../traces``.
    timeout_s
        After which a run is given up. [s]
    logs
        Folder that takes what the ranks of a run without a result printed.
    progress
        Called with one line per event.

    Raises
    ------
    SpecError
        If the file is wrong, a run cannot be expressed in its framework, or this machine cannot measure it.
    """
    runs = {run.id: expand(run, runs_file.parent) for run in load_runs(runs_file)}
    tasks = {id: plan_task(run, timeout_s=timeout_s, trace=trace) for id, run in runs.items()}
    records = read_records(out)
    there = {r.run.id for r in records}
    todo = [task for id, task in tasks.items() if id not in there]
    skipped = tuple(id for id in tasks if id in there)
    if not todo:
        return MeasureSummary(skipped=skipped)
    state = self_test()
    check_machine(state, [runs[task.id].run for task in todo])
    progress(f"self-test: {len(state['gpus'])} x {state['gpus'][0]['name']}, PyTorch {state['torch']}")
    progress(f"{len(todo)} runs to measure, {len(skipped)} there before")
    splits = _splits(runs, records)
    written: list[Path] = []
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        gpus = list(range(len(state["gpus"])))
        found = run_tasks(todo, gpus, Path(scratch), parallel=parallel, progress=progress)
        with contextlib.closing(found):  # an interruption here ends the processes at once
            for left, outcome in enumerate(found, start=1 - len(todo)):
                id = outcome.task.id
                if outcome.error is not None:
                    failed[id] = outcome.error
                    _keep_logs(outcome, logs)
                    progress(f"{id}: no result: {outcome.error}; {-left} left")
                    continue
                record = _record(runs[id], outcome, splits[id])
                _keep_traces(outcome, out.parent / "traces")  # first: a run with a record is not measured again
                written.append(write_record(record, out))
                progress(f"{_line(record)}; {-left} left")
    return MeasureSummary(tuple(written), skipped, failed)
