"""``mofa measure``: run the runs of a file for real and record what came out."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mofa.errors import SpecError
from mofa.measure.expand import (
    ExpandedRun,
    current_configuration_hash,
    expand_run,
    router_logit_bias,
    token_copies_routed_per_step,
)
from mofa.measure.fsdp1_job import fsdp1_job
from mofa.measure.launch import RunTask, TaskOutcome, run_tasks
from mofa.measure.megatron_job import megatron_local_job
from mofa.measure.megatron_te_job import megatron_te_job
from mofa.measure.records import (
    DEALT_BY_MODEL,
    REPEATS,
    RunRecord,
    Split,
    assign_fitting_and_judging_halves,
    half_dealt_by_model,
    read_records,
    write_record,
)
from mofa.measure.results import record_of_result
from mofa.measure.torchtitan_job import torchtitan_job
from mofa.specs.activation_offload import refuse_absent_modules
from mofa.specs.run_files import load_runs
from mofa.units import format_bytes, format_seconds


@dataclass(frozen=True)
class FrameworkRunner:
    """How one framework is run."""

    module: str
    """Of :mod:`mofa.measure.runners`, a process of which is one rank."""
    job_key: str
    """Key of the job under which the runner finds its configuration."""
    needs: dict[str, str]
    """What the self-test says of an installed package to what to install where it is not there."""
    translate: Callable[[ExpandedRun], dict[str, Any]]
    environment: dict[str, str] = field(default_factory=dict)


_MEGATRON = {"megatron": "megatron-core==0.16.1"}
_ONE_CONNECTION = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
_FUSED_OR_NONE = {"NVTE_UNFUSED_ATTN": "0"}
"""Where cuDNN fails to load, Transformer Engine runs PyTorch's attention without a word: with this it ends instead."""
RUNNERS: dict[str, FrameworkRunner] = {
    "fsdp1": FrameworkRunner("fsdp1", "fsdp1", {}, fsdp1_job),
    "torchtitan": FrameworkRunner("torchtitan", "torchtitan", {"torchtitan": "torchtitan==0.2.2"}, torchtitan_job),
    "megatron-local": FrameworkRunner("megatron", "megatron", _MEGATRON, megatron_local_job, _ONE_CONNECTION),
    "megatron": FrameworkRunner(
        "megatron_te",
        "megatron",
        {**_MEGATRON, "transformer_engine": "transformer-engine-torch==2.20.2"},
        megatron_te_job,
        _ONE_CONNECTION | _FUSED_OR_NONE,
    ),
}
"""The frameworks that are measured."""
_ALLOCATORS = {"native": "", "expandable": "expandable_segments:True"}


@dataclass(frozen=True)
class MeasureSummary:
    """What a call of :func:`measure_runs` did."""

    written: tuple[Path, ...] = ()
    skipped: tuple[str, ...] = ()
    """Runs that had a record already."""
    failed: dict[str, str] = field(default_factory=dict)
    """Runs that gave no result, and why."""


def _settings_for_graphs(run: ExpandedRun) -> dict[str, str]:
    """What Megatron-Core 0.16.1 asks for with graphs and expandable segments (core/transformer/cuda_graphs.py)."""
    both = run.framework.graphs.captures_any and run.framework.allocator == "expandable"
    return {"NCCL_GRAPH_REGISTER": "0"} if both else {}


def _settings_for_offload(run: ExpandedRun) -> dict[str, str]:
    """What Megatron-LM core_v0.16.1 asks for with offloaded activations (training/arguments.py): Transformer Engine
    of 2.10 and above would offload weights."""
    return {"NVTE_CPU_OFFLOAD_V1": "1"} if run.framework.offloaded_activations.offloads_any else {}


def _settings_for_overlap(run: ExpandedRun) -> dict[str, str]:
    """What Megatron-Bridge 0.3.1 sets where exchanges run beside computing on Hopper (recipes/run_plugins.py,
    ``_set_num_cuda_device_max_connections``): with one connection streams would wait for each other."""
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "8"} if run.framework.expert_overlap != "none" else {}


@dataclass(frozen=True)
class KeptBesideRecords:
    """What is measured and kept of runs beside their records, each in a folder of its own beside theirs."""

    trace: bool = False
    """A profile and the allocations of one step per rank, in ``traces``; the host's ops, in ``ops``."""
    beginning_steps: int = 0
    """Steps up to whose end every allocation is kept, from the model's building on, in ``beginnings``; 0 is none."""
    layer_segments: bool = False
    """What parts of layers take the host, in ``segments``."""

    def refuse_unavailable_for_run(self, run: ExpandedRun) -> None:
        """Raises :class:`SpecError` where it cannot be had of this run."""
        if not self.layer_segments:
            return
        if run.framework.name not in ("megatron", "torchtitan"):
            raise SpecError(
                f"{run.run.id}: parts of layers are timed of megatron and torchtitan, not of {run.framework.name}"
            )
        if run.strategy.vpp > 1 or run.framework.cuda_graphs != "none" or run.framework.compile:
            raise SpecError(
                f"{run.run.id}: parts of layers are timed with one chunk a rank, without compilation or CUDA graphs; "
                f"this run has vpp {run.strategy.vpp}, compile {str(run.framework.compile).lower()} and cuda_graphs "
                f"{run.framework.cuda_graphs}"
            )


def task_of_run(
    run: ExpandedRun, *, timeout_s: float, beside_records: KeptBesideRecords = KeptBesideRecords()
) -> RunTask:
    """The task of a run: what its processes are told.

    Raises
    ------
    SpecError
        If the framework is none that is measured, or cannot run this run.
    """
    name = run.framework.name
    if name not in RUNNERS:
        raise SpecError(f"{run.run.id}: framework {name} cannot be measured; use one of {', '.join(sorted(RUNNERS))}")
    try:
        refuse_absent_modules(run.model, run.framework.activation_offload)
    except SpecError as error:
        raise SpecError(f"{run.run.id}: {error}") from None
    beside_records.refuse_unavailable_for_run(run)
    if run.run.routing.capacity_factor is not None and run.framework.library is None:
        raise run.refusal(f"routing.capacity_factor on {name}", "use framework: megatron, or leave it out")
    runner = RUNNERS[name]
    moe = run.model.moe
    job = {
        "seed": 20,
        "warmup_steps": 5 if run.framework.compile else 4,
        "max_warmup_steps": 16,
        "settled": 1.15,
        "profile_below": 0.92,
        "min_steps": 8,
        "max_steps": 30,
        "seconds": 3.0,
        "rounds": 4,
        "slow_step_s": 1.0,
        **dataclasses.asdict(beside_records),
        "routing_bias": router_logit_bias(run.run.routing, moe.num_experts) if moe is not None else None,
        "routed_per_step": token_copies_routed_per_step(run),
        runner.job_key: runner.translate(run),
    }
    environment = {
        "PYTORCH_ALLOC_CONF": _ALLOCATORS[run.framework.allocator],
        "OMP_NUM_THREADS": str(run.framework.host_threads),
        **runner.environment,
        **_settings_for_graphs(run),
        **_settings_for_offload(run),
        **_settings_for_overlap(run),
    }
    return RunTask(run.run.id, f"mofa.measure.runners.{runner.module}", run.run.gpus, job, environment, timeout_s)


def machine_self_test() -> dict[str, Any]:
    """What this machine has, told by a process of its own, so that this one never loads PyTorch."""
    command = [sys.executable, "-W", "ignore", "-m", "mofa.measure.runners.selftest"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines()
        raise SpecError(f"mofa measure: the self-test failed: {said[-1] if said else 'no output'}")
    state: dict[str, Any] = json.loads(lines[-1])
    return state


_SAME_CAPACITY = 0.03
"""Share by which a GPU's memory may differ from its profile's: boards of one kind differ by 0.2 %, kinds by 20 %."""


def _needed_packages(run: ExpandedRun) -> dict[str, str]:
    """What the self-test says of packages that a run needs, to what to install where one is not there."""
    needs, runner = {}, RUNNERS[run.framework.name]
    if run.framework.traits.has_torchao and run.run.precision.fp8_recipe:
        needs = {"torchao": "torchao==0.17.0"}  # built for PyTorch 2.11 (torchao/__init__.py)
    return {**runner.needs, **needs}


def refuse_unfit_machine(state: dict[str, Any], runs: list[ExpandedRun]) -> None:
    """Refuse, in one line, to measure where it cannot be done.

    Raises
    ------
    SpecError
        Without PyTorch, without a GPU, with too few of them, with a GPU that computes wrongly or is in use,
        with the memory of another kind than the run's hardware, or without a framework that a run needs.
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
    for expanded in runs:
        run = expanded.run
        for package, install in _needed_packages(expanded).items():
            if state[package] is None:
                raise SpecError(f"{run.id}: {package} is not installed; pip install {install}")
        if run.gpus > len(gpus):
            raise SpecError(f"{run.id}: gpus ({run.gpus}) is more than this machine has ({len(gpus)})")
        capacity = expanded.gpu.capacity_bytes.value
        for i, gpu in enumerate(gpus):
            if abs(gpu["total_bytes"] / capacity - 1) > _SAME_CAPACITY:
                raise SpecError(
                    f"{run.id}: hardware ({run.hardware}) has {format_bytes(capacity)} a GPU, GPU {i} here "
                    f"({gpu['name']}) has {format_bytes(gpu['total_bytes'])}; name this machine's hardware in the run"
                )


_FOLDERS = {"trace": "traces", "ops": "ops", "beginning": "beginnings", "segments": "segments"}
"""Kind of file that a rank leaves to the folder beside the records that keeps it."""


def _keep_files(outcome: TaskOutcome, beside: Path) -> None:
    for path in sorted([*outcome.folder.glob("*.json.gz"), *outcome.folder.glob("*.csv")]):
        kind = path.name.split(".")[0].rstrip("0123456789")
        folder = beside / _FOLDERS[kind]
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"{outcome.task.id}.{path.name.removeprefix(kind)}"
        temporary = target.with_name(f".{target.name}.part")
        try:
            shutil.copy(path, temporary)
            temporary.rename(target)
        finally:
            temporary.unlink(missing_ok=True)


def _keep_logs(outcome: TaskOutcome, folder: Path | None) -> None:
    for path in outcome.folder.glob("rank*.log") if folder is not None else ():
        assert folder is not None
        folder.mkdir(parents=True, exist_ok=True)
        lines = path.read_text(errors="replace").splitlines()[-200:]
        (folder / f"{outcome.task.id}.{path.name}").write_text("\n".join(lines))


def _line(record: RunRecord) -> str:
    m = record.measured
    peak = max((r.peak_allocated_bytes for r in m.ranks), default=0)
    time = "out of memory" if m.step_time_s is None else format_seconds(m.step_time_s)
    return f"{record.run.id}: {time}, peak {format_bytes(peak)}, {record.split}"


def _splits(runs: dict[str, ExpandedRun], records: list[RunRecord]) -> dict[str, Split]:
    existing = [(str(r.run.framework["name"]), current_configuration_hash(r.run), r.split) for r in records]
    there = {r.run.id for r in records}
    todo = {id: run for id, run in runs.items() if id not in there}
    by_model = {id: run for id, run in todo.items() if run.framework.name in DEALT_BY_MODEL}
    wanted = {id: (run.framework.name, run.configuration_hash) for id, run in todo.items() if id not in by_model}
    dealt = {id: half_dealt_by_model(run.run_with_full_specs()) for id, run in by_model.items()}
    return {**assign_fitting_and_judging_halves(wanted, existing), **dealt}


def runs_still_due(runs: dict[str, ExpandedRun], records: list[RunRecord]) -> dict[str, ExpandedRun]:
    """The runs still to be made so that every host-bound one of ``runs`` is there three times.

    A run counts as bound by the host if one of its records is; see
    :attr:`mofa.measure.records.MeasuredResult.is_host_bound`.
    Repeats are called as the first run, with ``-again`` and ``-third`` at the end.
    """
    same: dict[tuple[str, object], list[RunRecord]] = {}
    for record in records:
        same.setdefault((current_configuration_hash(record.run), record.run.hardware), []).append(record)
    taken = {record.run.id for record in records} | set(runs)
    due: dict[str, ExpandedRun] = {}
    for run in runs.values():
        of_it = same.get((run.configuration_hash, run.run.hardware), [])
        if any(record.measured.is_host_bound for record in of_it):
            base = min((record.run.id for record in of_it), key=len)
            free = [name for suffix in REPEATS if (name := base + suffix) not in taken]
            for name in free[: len(REPEATS) - len(of_it)]:
                due[name] = dataclasses.replace(run, run=run.run.model_copy(update={"id": name}))
                taken.add(name)
    return due


@dataclass
class _Call:
    """One call of :func:`measure_runs` on a machine that passed its self-test."""

    out: Path
    gpus: list[int]
    parallel: bool
    timeout_s: float
    logs: Path | None
    progress: Callable[[str], None]
    written: list[Path] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def run(self, runs: dict[str, ExpandedRun], beside_records: KeptBesideRecords) -> None:
        """Measure runs that have no record, and write one each."""
        splits = _splits(runs, read_records(self.out))
        tasks = [task_of_run(run, timeout_s=self.timeout_s, beside_records=beside_records) for run in runs.values()]
        with tempfile.TemporaryDirectory() as scratch:
            outcomes = run_tasks(tasks, self.gpus, Path(scratch), parallel=self.parallel, progress=self.progress)
            with contextlib.closing(outcomes):  # an interruption here ends the processes at once
                for left, outcome in enumerate(outcomes, start=1 - len(tasks)):
                    id = outcome.task.id
                    if outcome.error is not None:
                        self.failed[id] = outcome.error
                        _keep_logs(outcome, self.logs)
                        self.progress(f"{id}: no result: {outcome.error}; {-left} left")
                        continue
                    record = record_of_result(runs[id], outcome, splits[id])
                    # first what lies beside it: a run with a record is not measured again
                    _keep_files(outcome, self.out.parent)
                    self.written.append(write_record(record, self.out))
                    self.progress(f"{_line(record)}; {-left} left")


def measure_runs(
    runs_file: Path,
    out: Path,
    *,
    parallel: bool = False,
    beside_records: KeptBesideRecords = KeptBesideRecords(),
    once: bool = False,
    timeout_s: float = 300.0,
    logs: Path | None = None,
    progress: Callable[[str], None] = print,
) -> MeasureSummary:
    """Run every run of a file that has no record yet, and write one record each.

    Runs that turn out to be bound by the host are made three times in all, since they vary from start to start, but
    for ``once``.

    Parameters
    ----------
    runs_file
        RUNS.yaml: a list of runs.
    out
        Folder of records; ``ID.yaml`` each. A run whose record exists is skipped, so that a call can be repeated.
    parallel
        Runs that together fit the machine's GPUs go side by side.
    beside_records
        What is kept beside the records, in folders beside ``out``.
    once
        Runs that are bound by the host are not repeated: for microbenchmarks, whose every run is.
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
    runs = {run.id: expand_run(run, runs_file.parent) for run in load_runs(runs_file)}
    for run in runs.values():
        task_of_run(
            run, timeout_s=timeout_s, beside_records=beside_records
        )  # what cannot be run is said before anything is
    records = read_records(out)
    there = {r.run.id for r in records}
    skipped = tuple(id for id in runs if id in there)
    todo = {id: run for id, run in runs.items() if id not in there}
    if not todo and (once or not runs_still_due(runs, records)):
        return MeasureSummary(skipped=skipped)
    state = machine_self_test()
    refuse_unfit_machine(state, list(runs.values()))
    progress(f"self-test: {len(state['gpus'])} x {state['gpus'][0]['name']}, PyTorch {state['torch']}")
    progress(f"{len(todo)} runs to measure, {len(skipped)} there before")
    call = _Call(out, list(range(len(state["gpus"]))), parallel, timeout_s, logs, progress)
    if todo:
        call.run(todo, beside_records)
    if not once and (due := runs_still_due(runs, read_records(out))):
        progress(f"{len(due)} repeats of runs that are bound by the host")
        call.run(due, KeptBesideRecords())
    return MeasureSummary(tuple(call.written), skipped, call.failed)
