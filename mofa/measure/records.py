"""A measured run as a file: what ran, what came out, where, and whether it may be learned from."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field

from mofa.specs.base import Spec
from mofa.specs.files import load_yaml
from mofa.specs.from_mapping import spec_from_mapping
from mofa.specs.run import RunSpec
from mofa.specs.strategy import StrategySpec

Split = Literal["fitting", "judging"]
GRAD_NORM_LIMIT = 1.0
"""Norm above which gradients are scaled down to it, as Megatron-LM has it (--clip-grad). [-]"""
HOST_BOUND_IDLE = 0.1
"""Share of a step that the device waits; runs above it vary by as much from one start to the next. [-]"""
LEARNED_ON = "H200"
"""The GPU on whose runs facts are learned, a word of its name: a GH200 is another."""
DRAWN = "drawn"
"""How `facts.routed` says that every token drew its experts by itself, by the shares that were asked for."""
DEALT_BY_MODEL = {"megatron": "te", "fsdp1": "fsdp1"}
"""Frameworks whose runs are halved by their model, so that judging runs are of models that no fitting run has, to the
word in the names of their groups; their facts are learned on every GPU."""
REPEATS = ("", "-again", "-third")
"""What the names of the three runs of one configuration end in."""


class RankMeasurement(Spec):
    """Device memory of one rank [B], how long its device was busy in a step, and its host's pace [s]."""

    rank: int
    peak_allocated_bytes: int = Field(gt=0)
    """Largest of the steps after warm-up, from PyTorch's allocator."""
    peak_reserved_bytes: int = Field(gt=0)
    whole_peak_allocated_bytes: int | None = None
    """Largest from the start of the process: building, the first step and what follows."""
    whole_peak_reserved_bytes: int | None = None
    ready_allocated_bytes: int | None = None
    """Allocated before the first step."""
    between_steps_bytes: int | None = None
    """Allocated after the last step: parameters, states and what the framework keeps."""
    device_bytes: int
    """Total less free after the last step, as CUDA reports it: allocator, context, libraries and communicators."""
    outside_allocator_bytes: int | None = None
    """Of these, what the allocator does not hold: context, libraries and communicators."""
    device_total_bytes: int
    alloc_retries: int = 0
    """Times the allocator gave its cache back to the device to make room; each one stalls the step."""
    device_busy_s: float | None = None
    """Of one more, profiled step: time in which the device did anything."""
    device_computing_s: float | None = None
    """Of the same step: time in which it did anything but communicate."""
    host_issues_s: list[float] = Field(default=[])
    """One small op's issue on this rank's host before, between and behind rounds of steps."""
    host_backs_s: list[float] = Field(default=[])
    """One small op's way back on autograd's own thread, at the same times."""
    layer_issues_s: list[float] = Field(default=[])
    """Forward of a small :class:`mofa.host_pace.TransformerEngineLayer` at the same times."""
    layer_backs_s: list[float] = Field(default=[])
    """Its way back, on autograd's own thread."""
    cpu_ops_at_issues_s: list[float] = Field(default=[])
    """One small addition on the processor, timed at each of these."""
    cpu_ops_s: list[float] = Field(default=[])
    """The same behind each of the steps that count."""
    layer_ops_s: list[float] = Field(default=[])
    """The same in the midst of each of ``layer_issues_s``, on the two quietest cores and on the two loudest."""
    layer_back_ops_s: list[float] = Field(default=[])
    """The same in the midst of each of ``layer_backs_s``, on autograd's own thread."""
    step_ops_s: list[float] = Field(default=[])
    """The same within each step that counts, where its layers begin: the mean of its forward passes."""
    step_back_ops_s: list[float] = Field(default=[])
    """The same on autograd's own thread, within its backward passes."""

    @property
    def peak_device_bytes(self) -> int | None:
        """Most that the rank took of its device: the reserved peak and what is outside the allocator. [B]

        None where the allocator gave memory back and the record does not say what was outside it.
        """
        if self.outside_allocator_bytes is not None:
            return self.peak_reserved_bytes + self.outside_allocator_bytes
        return None if self.alloc_retries else self.device_bytes


class MeasuredResult(Spec):
    """What one run gave. Without room on the device, the memory is that at the failing allocation."""

    outcome: Literal["ok", "oom"]
    step_time_s: float | None = Field(default=None, gt=0)
    """Median of the steps after warm-up, of the slowest rank."""
    step_time_spread_s: float | None = Field(default=None, ge=0)
    """From the first to the third quartile."""
    step_times_s: list[float] = Field(default=[])
    """Every step after warm-up, of the slowest rank."""
    warmup_times_s: list[float] = Field(default=[])
    ranks: list[RankMeasurement]
    tokens_per_expert: list[list[list[Annotated[int, Field(ge=0, le=10**12)]]]] | None = None
    """Tokens that each rank's routers sent to each expert in one step: rank, layer with experts, expert."""
    grad_norms: list[float] = Field(default=[])
    """Norm of the gradients, of each steady step, where the framework says it."""
    facts: dict[str, Any] = Field(default={})
    """What the framework said of itself, first rank: parameters, formats; and every rank's layers."""
    oom_phase: str | None = None
    oom_tried_bytes: int | None = None
    error: str | None = None

    @property
    def clips_in_median_step(self) -> bool | None:
        """Whether the median of the gradients' norms is over the limit; None where norms were not kept."""
        return statistics.median(self.grad_norms) > GRAD_NORM_LIMIT if self.grad_norms else None

    @property
    def idle_share(self) -> float | None:
        """Largest share of a step that a rank's device waits for its host; None where no step was profiled. [-]"""
        busy = [rank.device_busy_s for rank in self.ranks if rank.device_busy_s is not None]
        if self.step_time_s is None or not busy:
            return None
        return max(0.0, 1 - min(busy) / self.step_time_s)

    @property
    def is_host_bound(self) -> bool | None:
        """Whether the host sets the pace: a device idles for more than a tenth of the step. None where unknown."""
        return None if self.idle_share is None else self.idle_share > HOST_BOUND_IDLE


class RunEnvironment(Spec):
    """Where a run was measured."""

    gpu: str
    num_gpus: int
    cpu: str
    cpu_cores: int
    python: str
    torch: str
    cuda: str
    cudnn: int
    nccl: str
    driver: str | None = None
    framework: str
    """Version of the framework."""
    allocator: str
    """PYTORCH_ALLOC_CONF, empty for PyTorch's defaults."""
    settings: dict[str, str] = Field(default={})
    host: str | None = None
    """Tells this machine from others; no name or number can be read off it."""
    host_issue_s: float | None = Field(default=None, gt=0)
    """Time in which the host issued one small eager op (median of an addition, SiLU and a norm, as in a profile), of
    the slowest rank: what hosts of one kind differ by. The mean of ``host_issues_s``; in records without it, timed
    once, right after the timed steps."""
    host_issues_s: list[float] = Field(default=[])
    """The same before, between and behind rounds of the timed steps: a host's pace changes within seconds."""
    host_op_s: float | None = None
    """As measured in a few records after the profiled step, with the profiler's instruments attached: too long."""
    side_by_side: bool = False
    """Other runs were on other GPUs of the machine at the same time."""


class RunRecord(Spec):
    """One file of ``reference_runs/measured``."""

    run: RunSpec
    measured: MeasuredResult
    environment: RunEnvironment
    source: str = Field(min_length=3)
    split: Split
    trainer: str = ""
    """Which program ran it as an exported job; empty of a run by `mofa measure`."""

    @property
    def is_halved_by_model(self) -> bool:
        """Whether the model decides which half the run is in: fitting or judging."""
        return self.run.framework.get("name") in DEALT_BY_MODEL

    @property
    def fitting_or_judging_half(self) -> Split:
        """What the record is for: facts are learned from the fitting half, of frameworks that are not halved by their
        model on H200 alone; all others judge."""
        if self.trainer:
            return "judging"
        learned = self.is_halved_by_model or LEARNED_ON in self.environment.gpu.split()
        return self.split if learned else "judging"


def configuration_hash(run: RunSpec) -> str:
    """A hash of what a run is, whatever it and its model are called; the run must be spelled out.

    What a strategy says by default is left out, so that a record that was written before a field came is the same
    configuration as a run that spells the field out.
    """
    content = run.model_dump(mode="json", by_alias=True, exclude={"id", "hardware"})
    content["model"] = {key: value for key, value in content["model"].items() if key not in ("name", "source")}
    default = {name: field.default for name, field in StrategySpec.model_fields.items()}
    content["strategy"] = {k: v for k, v in content["strategy"].items() if k not in default or v != default[k]}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def half_dealt_by_model(run: RunSpec) -> Split:
    """The half of a run that is dealt by its model: by a hash of the model but its name and number of layers.

    It depends on nothing else, so it is known before anything is measured. The run must be spelled out.
    """
    model = run.model_dump(mode="json", by_alias=True)["model"]
    structure = {key: value for key, value in model.items() if key not in ("name", "source", "num_layers")}
    digest = hashlib.sha256(json.dumps(structure, sort_keys=True).encode()).hexdigest()
    return "fitting" if int(digest, 16) % 2 else "judging"


def assign_fitting_and_judging_halves(
    wanted: Mapping[str, tuple[str, str]], existing: Iterable[tuple[str, str, Split]]
) -> dict[str, Split]:
    """Split new runs into fitting and judging halves of each framework, by the order of their hashes.

    Parameters
    ----------
    wanted
        Run id to (framework, configuration hash), for the runs that have no record yet.
    existing
        (framework, configuration hash, split) of every record there is; these never change.

    Returns
    -------
    dict
        Run id to split. A repeated configuration keeps the split it has, so that no run is judged by its twin.

    Examples
    --------
    >>> assign_fitting_and_judging_halves({"a": ("x", "01"), "b": ("x", "02"), "c": ("x", "01")}, [])
    {'a': 'judging', 'b': 'fitting', 'c': 'judging'}
    """
    known: dict[tuple[str, str], Split] = {(framework, digest): split for framework, digest, split in existing}
    for framework, digest in sorted(set(wanted.values()), key=lambda pair: (pair[0], pair[1])):
        if (framework, digest) in known:
            continue
        of_framework = [split for (name, _), split in known.items() if name == framework]
        fewer_judging = of_framework.count("judging") <= of_framework.count("fitting")
        known[framework, digest] = "judging" if fewer_judging else "fitting"
    return {run_id: known[pair] for run_id, pair in wanted.items()}


def read_record(path: Path) -> RunRecord:
    """Read one record.

    Raises
    ------
    SpecError
        If the file is no record.
    """
    return spec_from_mapping(RunRecord, load_yaml(path), f"{path}: no record of a measured run")


def record_files(folder: Path) -> list[Path]:
    """The files of a folder that hold a record each, in the order of their names."""
    return sorted(folder.glob("*.yaml"))


def read_records(folder: Path) -> list[RunRecord]:
    """All records of a folder, in the order of their names."""
    return [read_record(path) for path in record_files(folder)]


class _Compact(yaml.SafeDumper):
    """Lists of plain numbers and words on one line, everything else as a block."""


def _represent_list(dumper: yaml.SafeDumper, data: list[Any]) -> yaml.Node:
    flow = all(isinstance(item, (int, float, str)) for item in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flow)


_Compact.add_representer(list, _represent_list)


def write_record(record: RunRecord, folder: Path) -> Path:
    """Write one record whole or not at all: to a temporary file that is then renamed."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record.run.id}.yaml"
    content = record.model_dump(mode="json", by_alias=True, exclude_none=True)
    temporary = path.with_suffix(".yaml.part")
    try:
        temporary.write_text(yaml.dump(content, Dumper=_Compact, sort_keys=False, width=120))
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
