"""Reference runs: what ran and what came out of it, ready to be predicted; which of it may be scored is decided here.

Every rule reads the columns of a record and nothing that was predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

from mofa.errors import SpecError
from mofa.measure.expand import current_configuration_hash
from mofa.measure.records import DEALT_BY_MODEL, LEARNED_ON, RunRecord, Split, read_record, record_files
from mofa.measure.results import interquartile_range_s
from mofa.specs.base import Fact
from mofa.specs.files import load_yaml
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec, HostSharing
from mofa.specs.host import SmallLayerTime
from mofa.specs.run import RunSpec
from mofa.specs.run_files import resolve_run
from mofa.specs.strategy import StrategySpec
from mofa.specs.workload import WorkloadSpec
from mofa.units import format_seconds
from mofa.validate.hosts import (
    MachineHost,
    has_small_layer_time,
    machine_identity,
    read_machine_hosts,
    small_layer_time_of_run,
    small_op_s_of_run,
    unexplained_step_spread,
)
from mofa.validate.routing_counts import _steps_before, with_routing_counts
from mofa.validate.run_processes import RunProcesses
from mofa.validate.step_pace import has_pace_samples

Switch = Literal["tp_overlap", "expert_overlap", "layout"]
"""Tensor-parallel communication beside products (Transformer Engine's user buffers); experts' exchanges beside other
micro-batches' computing; layers that are laid out over
pipeline stages by hand."""
MAX_SPREAD = 0.10
"""Steps whose quartiles lie further apart, as a fraction of a step, say something of memory and little of time. [-]"""


@dataclass(frozen=True)
class MeasuredOutcome:
    """What a run gave; None where it says nothing. Peaks are those of the fullest rank. [s], [B]"""

    step_s: float | None = None
    allocated_bytes: float | None = None
    reserved_bytes: float | None = None
    device_bytes: float | None = None
    ranks_allocated_bytes: tuple[float, ...] = ()
    """Every rank's, by rank."""
    oom: bool = False
    oom_denied_by: str | None = None
    """The run whose reading says that this one cannot have gone out of memory by itself; neither is used then."""

    @property
    def known_peaks_bytes(self) -> tuple[float, ...]:
        """The peaks that are known. [B]"""
        return tuple(x for x in (self.allocated_bytes, self.reserved_bytes, self.device_bytes) if x is not None)


@dataclass(frozen=True)
class RepeatedMeasurement:
    """One measurement of a configuration that was measured several times."""

    id: str
    step_s: float | None
    host_op_s: float | None
    """Issue of one small op on its host; None where only the GPU's profile knows. [s]"""
    run: RunSpec
    """As this measurement ran it: the routing that its routers chose, and how long they had learned."""
    notes: tuple[str, ...] = ()
    layer: SmallLayerTime | None = None
    """A small layer of Transformer Engine on its host; None where it was not timed."""
    hosts: HostSharing = "shared"
    """As of :class:`ReferenceRun`."""


@dataclass(frozen=True)
class ReferenceRun:
    """One run to predict, with what it gave."""

    id: str
    group: str
    model: str
    """Runs of one group and model are one cell where a source's rows hang together."""
    source: str
    run: RunSpec
    base_dir: Path | None
    outcome: MeasuredOutcome
    notes: tuple[str, ...] = ()
    nvls: bool = True
    """Whether NCCL may let the switch reduce."""
    host_op_s: float | None = None
    """Issue of one small op on the run's host; None where only the GPU's profile knows. [s]"""
    layer: SmallLayerTime | None = None
    """A small layer of Transformer Engine on the run's host; None where it was not timed."""
    hosts: HostSharing = "own"
    """As of :class:`mofa.specs.hardware.NodeSpec`: on a virtual machine, whose processor others use as well, ranks may
    have slower hosts than its unless the slowest is known."""
    skewed: bool = False
    """Whether its tokens were made to fall unevenly on experts; counts of untouched routers are not."""
    repeats: tuple[RepeatedMeasurement, ...] = ()
    """Every measurement of the configuration, this one's own first; none where there is only one."""
    gpu: str | None = None
    """Name of the device in its record, if it has one."""
    rests_on: tuple[str, ...] = ()
    """Whose host and which routing it is predicted with, in words."""
    switches: tuple[Switch, ...] = ()
    """Switches of Transformer Engine's runs that nothing was learned from."""
    split: Split = "judging"
    """Whether it may be learned from. Of GPUs other than the H200 the bands of steps alone are."""

    @property
    def configuration_hash(self) -> str:
        """Equal for runs that are predicted alike, whatever they and their models are called."""
        run = self.run.model_dump(exclude={"id"})
        if isinstance(run["model"], dict):
            run["model"] = {key: value for key, value in run["model"].items() if key not in ("name", "source")}
        return repr((run, self.base_dir, self.nvls, self.host_op_s, self.layer, self.hosts))

    def resolved_specs(self) -> tuple[WorkloadSpec, ClusterSpec, FrameworkSpec, StrategySpec]:
        """Everything that the run names, on its own host."""
        workload, cluster, framework, strategy = resolve_run(self.run, self.base_dir)
        return workload, self.cluster_as_run(cluster), framework, strategy

    def cluster_as_run(self, cluster: ClusterSpec) -> ClusterSpec:
        """The cluster that the run names as this run had it: its host, and whether switches reduced."""
        cluster = cluster if self.nvls else _without_nvls(cluster)
        return cluster.on_hosts(self.hosts).with_host_speed(self.host_op_s, layer=self.layer)

    def run_of_repeat(self, repeat: RepeatedMeasurement) -> ReferenceRun:
        """One of its repeats as a run of its own: on its host, with its tokens."""
        return replace(
            self, run=repeat.run, host_op_s=repeat.host_op_s, layer=repeat.layer, hosts=repeat.hosts,
            repeats=(),
        )  # fmt: skip


@dataclass(frozen=True)
class UnpredictedReferenceRun:
    """A run that is not predicted, and the rule that says so."""

    id: str
    group: str
    reason: str
    gpu: str | None = None
    """As the source names it; None where it has a record."""


def _without_nvls(cluster: ClusterSpec) -> ClusterSpec:
    factor = Fact(value=1.0, provenance="read", source="NCCL_NVLS_ENABLE=0 in the run's environment")
    return cluster.model_copy(update={"node": cluster.node.model_copy(update={"nvls_factor": factor})})


def why_step_time_not_scored(record: RunRecord, repeats: Sequence[RunRecord] = ()) -> str | None:
    """Why the step time of a record is not scored, or None.

    How steady a configuration is, all of its steps on one machine say: one start of several may be so by chance. Where
    the host sets the pace, or may, a run that timed it among its steps says more than its repeats that did not. One
    that timed a layer of modules as well says more than those with small ops alone, and one whose pace was timed within
    its steps more than both.

    Parameters
    ----------
    record
        Of a run.
    repeats
        All records of its configuration, this one among them; none where it is looked at alone.
    """
    measured = record.measured
    if measured.outcome == "oom":
        return "out of memory"
    if measured.step_time_s is None:
        return "no step time"
    if _emptied_its_cache(record):
        return "memory only: the allocator emptied its cache in the middle of steps"
    beside = [
        other
        for other in repeats
        if machine_identity(other) == machine_identity(record) and not _emptied_its_cache(other)
    ]
    spread, together = unexplained_step_spread(record), ""
    if len(beside) > 1 and not has_small_layer_time(record):  # with it, what machines do between starts is known
        steps = [step_s for other in beside for step_s in other.measured.step_times_s]
        spread, together = interquartile_range_s(steps) / median(steps), f" over {len(beside)} runs"
    if spread > MAX_SPREAD:
        return f"memory only: quartiles {spread:.0%} apart{together}"
    if measured.is_host_bound is not False:
        fuller = [other for other in repeats if _host_readings(other) > _host_readings(record)]
        timed = [other.run.id for other in fuller if why_step_time_not_scored(other, repeats) is None]
        if timed:
            kinds = (
                "its host was not timed among",
                "no layer was timed on its host among",
                "its pace was not timed within",
            )
            return f"memory only: {kinds[_host_readings(record)]} its steps, as that of {timed[0]} was"
    return None


def _host_readings(record: RunRecord) -> int:
    """How much says how fast its host was: small ops among its steps, a layer's modules, ops within its steps."""
    within = all(rank.step_ops_s for rank in record.measured.ranks)
    return bool(record.environment.host_issues_s) + has_small_layer_time(record) * (1 + within)


def _emptied_its_cache(record: RunRecord) -> bool:
    return any(rank.alloc_retries for rank in record.measured.ranks)


def measured_reference_runs(
    folder: Path, scratch: Path, *, hosts: bool = True, spread: RunProcesses | None = None
) -> tuple[list[ReferenceRun], list[UnpredictedReferenceRun]]:
    """The records of a folder as references, in groups ``measured-fitting`` and ``measured-judging``.

    Runs on another GPU than the H200 only judge, in a group of their own, and so do runs that were drawn at random.

    Parameters
    ----------
    folder
        Of records.
    scratch
        An empty folder for the routing counts of runs with experts: a record's counts are the run's routing.
    hosts
        Whether records that do not say how fast their host was take their machine's.
    spread
        Processes to read them with.

    Returns
    -------
    list[ReferenceRun], list[UnpredictedReferenceRun]
        A configuration that was measured several times is one run, with the median of its step times and all of them
        as its repeats; the others are left out as runs of their own. Every run has its own host's speed, and its own
        routing.
    """
    files = record_files(folder)
    read = list((spread or RunProcesses(1)).map(_read, files, chunk=16))
    records = [record for record, _ in read]
    _differ(records, files)
    machines = read_machine_hosts(folder) if hosts else ()
    if not records:
        raise SpecError(f"{folder}: holds no records of measured runs; name a folder of *.yaml records")
    references, left_out = [], []
    for same in _repeats(read):
        first = same[0]
        reference = reference_of_record(first, folder, machines, scratch)
        repeats = tuple(_repeat(record, same, machines, scratch) for record in same) if len(same) > 1 else ()
        if repeats:
            times = [repeat.step_s for repeat in repeats if repeat.step_s is not None]
            over = (f"median of {len(times)} runs, {min(times):.4f} to {max(times):.4f} s",) if times else ()
            outcome = _outcome(first, median(times) if times else None)
            reference = replace(reference, outcome=outcome, notes=reference.notes + over, repeats=repeats)
            group = reference.group
            left_out += [
                UnpredictedReferenceRun(r.run.id, group, f"a repeat of {first.run.id}, in its median") for r in same[1:]
            ]
        references.append(reference)
    return references, left_out


def reference_of_record(
    record: RunRecord, folder: Path, machines: Sequence[MachineHost], scratch: Path
) -> ReferenceRun:
    """One record as a run to predict: on its own host, with the tokens that its routers sent.

    Every command that predicts a record asks for it here.

    Parameters
    ----------
    record
        Of the run.
    folder
        That holds it, from which relative paths in it start.
    machines
        Whose hosts are known.
    scratch
        A folder for its routing counts; needed for as long as the run is predicted.
    """
    why = why_step_time_not_scored(record)
    host = _host_note(record, machines)
    return ReferenceRun(
        id=record.run.id,
        group=_group(record, folder),
        model=_model_name(record.run),
        source=record.source,
        run=_as_measured(record, scratch),
        base_dir=folder,
        outcome=_outcome(record, record.measured.step_time_s if why is None else None),
        notes=(*((why,) if why else ()), host),
        nvls=record.environment.settings.get("NCCL_NVLS_ENABLE") != "0",
        host_op_s=_host(record, machines),
        layer=small_layer_time_of_run(record),
        hosts=_host_sharing(record),
        skewed=record.run.routing.kind != "balanced",
        gpu=record.environment.gpu,
        rests_on=(host, *_routing_note(record)),
        split="judging" if is_folder_of_drawn_runs(folder) or is_folder_of_switch_runs(folder) else record.split,
    )


def _as_measured(record: RunRecord, scratch: Path) -> RunSpec:
    """The run with the tokens that its own routers sent, and its gradients scaled if they are in its median step."""
    run, clips = with_routing_counts(record, scratch), record.measured.clips_in_median_step
    if clips is None:
        return run
    return run.model_copy(update={"framework": {**run.framework, "clipped_steps": float(clips)}})


def _differ(records: Sequence[RunRecord], files: Sequence[Path]) -> None:
    """Two records of one name would share what is written down of their routing."""
    named: dict[str, Path] = {}
    for record, path in zip(records, files, strict=True):
        if (other := named.setdefault(record.run.id, path)) is not path:
            raise SpecError(f"{path}: run.id {record.run.id!r} is that of {other.name} too; give each record its own")


def is_folder_of_drawn_runs(folder: Path) -> bool:
    """Whether the records of a folder are of runs that were drawn at random: they are in one of their own."""
    return folder.resolve().parent.name == "drawn"


def is_folder_of_switch_runs(folder: Path) -> bool:
    """Whether the records of a folder are of runs with switches that recipes turn on at run time, and of those beside
    them without: they are in one of their own."""
    return folder.resolve().parent.name == "switches"


def has_cuda_graphs(record: RunRecord) -> bool:
    """Whether a run captured CUDA graphs."""
    return str(record.run.framework.get("cuda_graphs", "none")) != "none"


def _group(record: RunRecord, folder: Path) -> str:
    """``measured-h100`` of an ``NVIDIA H100 80GB HBM3``: facts are learned on H200s, so both halves only judge.

    ``measured-te-judging``, ``measured-fsdp1-judging`` and so on of frameworks halved by model, on whichever GPU, and
    ``measured-exported`` of exported jobs, which their own trainers ran. ``measured-drawn`` of runs that were drawn at
    random, on whichever GPU and framework. ``measured-switches`` of runs with CUDA graphs, or an optimizer or
    activations on hosts, and ``measured-beside-switches`` of those beside them.
    """
    words = [word for word in record.environment.gpu.split() if word.upper() != "NVIDIA"]
    if not words:
        raise SpecError(f"record {record.run.id}: environment.gpu ({record.environment.gpu!r}) names no GPU; name it")
    if is_folder_of_drawn_runs(folder):
        return "measured-drawn"
    if is_folder_of_switch_runs(folder):
        switched = has_cuda_graphs(record) or record.run.framework.get("optimizer_offload")
        switched = switched or record.run.framework.get("activation_offload", "none") != "none"
        return "measured-switches" if switched else "measured-beside-switches"
    if record.trainer:
        return "measured-exported"
    if record.is_halved_by_model:
        return f"measured-{DEALT_BY_MODEL[record.run.framework['name']]}-{record.split}"
    return f"measured-{record.split}" if LEARNED_ON in words else f"measured-{words[0].lower()}"


def _host(record: RunRecord, machines: Sequence[MachineHost]) -> float | None:
    pace = small_op_s_of_run(record, machines)
    return None if pace is None else pace[0]


def _host_note(record: RunRecord, machines: Sequence[MachineHost]) -> str:
    pace, layer = small_op_s_of_run(record, machines), small_layer_time_of_run(record)
    if pace is None:
        return "host: the profile's"
    modules = "" if layer is None else f", a layer {format_seconds(layer.issue_s)} and {format_seconds(layer.back_s)}"
    return f"host: {pace[0] * 1e6:.3g} us an op{modules}, {pace[1]}"


def _routing_note(record: RunRecord) -> tuple[str, ...]:
    """Where the routing is from that a record is predicted with; nothing of a run without counts."""
    if record.measured.tokens_per_expert is None:
        return ()
    return (f"routing: the tokens that its own routers sent, {_steps_before(record)} steps into the run",)


def _repeat(
    record: RunRecord, same: Sequence[RunRecord], machines: Sequence[MachineHost], scratch: Path
) -> RepeatedMeasurement:
    why = why_step_time_not_scored(record, same)
    step_s = record.measured.step_time_s if why is None else None
    notes = (*((why,) if why else ()), _host_note(record, machines))
    return RepeatedMeasurement(
        record.run.id, step_s, _host(record, machines), _as_measured(record, scratch), notes,
        small_layer_time_of_run(record),
        _host_sharing(record),
    )  # fmt: skip


def _host_sharing(record: RunRecord) -> HostSharing:
    return "slowest-shared" if has_pace_samples(record) else "shared"


def _read(path: Path) -> tuple[RunRecord, str]:
    """A record and its configuration."""
    record = read_record(path)
    return record, current_configuration_hash(record.run)


def _repeats(read: Sequence[tuple[RunRecord, str]]) -> list[list[RunRecord]]:
    """Records of one configuration on one GPU together, the shortest name first; in the order of the names."""
    groups: dict[tuple[str, str, str], list[RunRecord]] = {}
    for record, configuration in read:
        key = (configuration, record.environment.gpu, record.measured.outcome)
        groups.setdefault(key, []).append(record)
    return [sorted(same, key=lambda r: (len(r.run.id), r.run.id)) for same in groups.values()]


def _model_name(run: RunSpec) -> str:
    name = run.model.get("name", "") if isinstance(run.model, dict) else getattr(run.model, "name", run.model)
    return str(name).removesuffix(" (changed)")


def _outcome(record: RunRecord, step_s: float | None) -> MeasuredOutcome:
    if record.measured.outcome == "oom":
        return MeasuredOutcome(oom=True)
    ranks = sorted(record.measured.ranks, key=lambda rank: rank.rank)
    if not ranks:
        raise SpecError(f"record {record.run.id}: outcome ok, but measured.ranks is empty; measure the run again")
    device = [rank.peak_device_bytes for rank in ranks]
    # what a graph wrote PyTorch counts as reserved, not as allocated
    allocated = () if has_cuda_graphs(record) else tuple(float(rank.peak_allocated_bytes) for rank in ranks)
    return MeasuredOutcome(
        step_s=step_s,
        allocated_bytes=max(allocated, default=None),
        reserved_bytes=max(float(rank.peak_reserved_bytes) for rank in ranks),
        device_bytes=max((float(d) for d in device if d is not None), default=None) if None not in device else None,
        ranks_allocated_bytes=allocated,
    )


def reference_of_file(path: Path, scratch: Path) -> ReferenceRun | None:
    """The record of a measured run that a file holds, as ``mofa validate`` predicts it; None of any other file.

    Its machine's host is looked up beside the file's folder, as of ``reference_runs/measured``. The scratch folder is
    needed for as long as the run is predicted.

    Raises
    ------
    SpecError
        If it is a broken record.
    """
    raw = load_yaml(path)
    if not {"measured", "environment"} <= set(raw):
        return None
    return reference_of_record(read_record(path), path.parent, read_machine_hosts(path.parent), scratch)
