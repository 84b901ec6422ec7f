"""Which job a command is about: a workload, a cluster and a strategy by options, or a run of a file."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mofa.specs.framework import FrameworkSpec
    from mofa.specs.hardware import ClusterSpec
    from mofa.specs.host import HostIssueTimes
    from mofa.specs.run import RunSpec
    from mofa.specs.strategy import StrategySpec
    from mofa.specs.workload import WorkloadSpec
    from mofa.validate.reference import ReferenceRun

    Overrides = Mapping[str, Mapping[str, object]]
    """Changes of ``--set`` by dotted path, below each of workload, hardware, framework and strategy."""


def read_workload(
    name: str, overrides: Overrides, *, seq_len: int | None, global_batch: str | None, tokens: str | None = None
) -> WorkloadSpec:
    """The workload of a name or a file, with what options and ``--set`` say of it."""
    import mofa
    from mofa.cli.numbers import batch_in_sequences

    changes = overrides["workload"] or None
    sequences = None
    if global_batch is not None:
        length = seq_len
        if length is None and "tokens" in global_batch:
            length = mofa.load_workload(name, tokens=tokens, overrides=changes).batch.seq_len
        sequences = batch_in_sequences(global_batch, length or 1)
    return mofa.load_workload(name, seq_len=seq_len, global_batch=sequences, tokens=tokens, overrides=changes)


HOST_SAID = "as --host-issue says"


def read_cluster(
    name: str,
    gpus: int,
    overrides: Overrides,
    host_issue_s: float | HostIssueTimes | None = None,
    memory_limit: str | None = None,
) -> ClusterSpec:
    """So many GPUs of a node, with what ``--set``, ``--host-issue`` and ``--memory-limit`` say of them."""
    import mofa
    from mofa.specs.memory_limit import with_memory_limit

    machines = mofa.load_cluster(name, gpus, overrides=overrides["hardware"] or None)
    machines = with_memory_limit(machines, memory_limit)
    return machines if host_issue_s is None else machines.with_host_speed(host_issue_s, HOST_SAID)


def read_framework(name: str | None, workload: WorkloadSpec, overrides: Overrides) -> FrameworkSpec:
    """The framework asked for, else the workload's, else Megatron-Core, with what ``--set`` says of it."""
    import mofa

    chosen = (workload.framework or "megatron") if name is None else name
    return mofa.load_framework(chosen, overrides=overrides["framework"] or None)


def _refuse_beside_a_file(file: str, given: list[str]) -> None:
    """Refuse options that a file of runs makes void."""
    from mofa.errors import SpecError

    if given:
        raise SpecError(
            f"{file}: read as a file of runs, because no cluster is named, but {given[0]} is given; "
            "name a cluster after the workload, or leave the option out"
        )


def _refuse_a_workload(name: str) -> None:
    """Refuse a workload where a file of runs is due, because no cluster is named."""
    from mofa.errors import SpecError
    from mofa.specs.files import load_yaml
    from mofa.specs.limited_reads import is_plain_file
    from mofa.specs.load import bundled_names

    known = (
        name in bundled_names("workloads") or Path(name).suffix == ".json" or is_plain_file(Path(name) / "config.json")
    )
    if not known and is_plain_file(Path(name)):
        fields = set(load_yaml(name, name))
        known = "model" in fields and not fields & {"id", "hardware", "gpus", "runs"}
    if known:
        raise SpecError(
            f"{name}: is a workload and no file of runs; name a cluster, --gpus and --strategy besides, such as "
            f'{name} h100-hgx --gpus 64 --strategy "tp=8 micro_batch=1"'
        )


def _read_strategy(text: str | None) -> dict[str, object]:
    """The fields of a strategy written as text; none where absent."""
    from mofa.specs.overrides import parse_strategy

    return {} if text is None else parse_strategy(text)


def _resolve(
    run: RunSpec, folder: Path, overrides: Overrides
) -> tuple[WorkloadSpec, ClusterSpec, FrameworkSpec, StrategySpec]:
    """What a run names, with the changes of ``--set``."""
    from mofa.specs.limited_reads import exists
    from mofa.specs.load import bundled_names, load_cluster, spec_from_mapping
    from mofa.specs.overrides import with_overrides
    from mofa.specs.run_files import resolve_run
    from mofa.specs.workload import WorkloadSpec

    strategy = overrides["strategy"]
    micro_batch = strategy.get("micro_batch", run.batch.micro)
    changed = run.model_copy(
        update={
            "framework": with_overrides(run.framework, overrides["framework"], "--set"),
            "strategy": {**run.strategy, **strategy},
            "batch": run.batch.model_copy(update={"micro": micro_batch}),
        }
    )
    workload, cluster, framework, complete = resolve_run(changed, folder)
    if overrides["workload"]:
        raw = with_overrides(workload.model_dump(exclude_none=True), overrides["workload"], "--set workload")
        workload = spec_from_mapping(WorkloadSpec, raw, "--set workload")
    if overrides["hardware"]:
        beside = folder / run.hardware
        place = beside if run.hardware not in bundled_names("nodes") and exists(beside) else run.hardware
        cluster = load_cluster(place, run.gpus, overrides["hardware"])
    return workload, cluster, framework, complete


class EstimateRequest(NamedTuple):
    """What one estimate, or one trace, is about."""

    id: str | None
    workload: WorkloadSpec
    cluster: ClusterSpec
    strategy: StrategySpec | Mapping[str, object]
    framework: FrameworkSpec
    fields_set_by_user: frozenset[str]
    """Fields of the strategy that the user wrote; the others are the framework's defaults."""
    gpu: str | None = None
    """Name of the device in the record of a measured run."""
    rests_on: tuple[str, ...] = ()
    """Whose host and which routing a measured run is predicted with, in words; nothing of any other."""


@contextlib.contextmanager
def estimate_requests_from_options(
    workload: str, cluster: str | None = None, gpus: int | None = None, strategy: str | None = None,
    seq_len: int | None = None, global_batch: str | None = None, tokens: str | None = None,
    framework: str | None = None, set_: list[str] | None = None, host_issue: str | None = None,
    job_of: str | None = None, host: str | None = None, nodes: int | None = None, memory_limit: str | None = None,
) -> Iterator[list[EstimateRequest]]:  # fmt: skip
    """The runs of a file where no cluster is named, else the one job that the options say.

    With ``job_of``, of ``--from``, the workload is the file of a job on that framework.

    The record of a measured run is one as it ran: on its own host, with the tokens that its routers sent, which are in
    a file for as long as the context lasts.

    Raises
    ------
    SpecError
        If an option is missing, or is void beside a file.
    """
    from mofa.cli.numbers import count_gpus
    from mofa.cli.parse import parse_host_issue, parse_overrides
    from mofa.errors import SpecError

    overrides = parse_overrides(set_)
    host_issue_s = parse_host_issue(host_issue, overrides, host)
    if cluster is None:
        said = {"--nodes": nodes, "--memory-limit": memory_limit}
        _refuse_beside_a_file(workload, [name for name, value in said.items() if value is not None])
    elif nodes is not None:
        gpus = count_gpus(cluster, gpus, nodes)
    if job_of is not None:
        given = {"--strategy": strategy, "--seq-len": seq_len, "--global-batch": global_batch, "--tokens": tokens,
                 "--framework": framework}  # fmt: skip
        _refuse_beside_a_job(job_of, workload, cluster, [name for name, value in given.items() if value is not None])
        yield [_job_of_framework(job_of, workload, str(cluster), gpus, overrides, host_issue_s)]
        return
    if cluster is None:
        given = {"--gpus": gpus, "--strategy": strategy, "--seq-len": seq_len, "--global-batch": global_batch,
                 "--tokens": tokens, "--framework": framework}  # fmt: skip
        _refuse_a_workload(workload)
        _refuse_beside_a_file(workload, [name for name, value in given.items() if value is not None])
        from tempfile import TemporaryDirectory  # imports much

        with TemporaryDirectory(prefix="mofa-") as scratch:
            yield _jobs_of_file(workload, overrides, Path(scratch), host_issue_s)
        return
    gpus = count_gpus(cluster, gpus, nodes if gpus is None else None)
    if strategy is None and not overrides["strategy"]:
        raise SpecError('--strategy: is missing; write one, such as --strategy "tp=4 pp=4 micro_batch=1"')
    job = read_workload(workload, overrides, seq_len=seq_len, global_batch=global_batch, tokens=tokens)
    machines = read_cluster(cluster, gpus, overrides, host_issue_s, memory_limit)
    facts = read_framework(framework, job, overrides)
    fields = _read_strategy(strategy)
    for name, value in overrides["strategy"].items():
        if fields.setdefault(name, value) != value:
            raise SpecError(f"--set strategy.{name}: is {value}, but --strategy says {fields[name]}; keep one")
    yield [EstimateRequest(None, job, machines, fields, facts, frozenset(fields))]


def _refuse_beside_a_job(job_of: str, file: str, cluster: str | None, given: list[str]) -> None:
    """Refuse options that a framework's job says itself, and a job without machines."""
    from mofa.errors import SpecError

    if given:
        raise SpecError(f"{given[0]}: {file} says it, as --from {job_of} reads it; leave it out or use --set")
    if cluster is None:
        raise SpecError(
            f"{file}: does not say on which machines it runs; name a node type after it, such as {file} h100-hgx"
        )


def _job_of_framework(
    job_of: str,
    file: str,
    cluster: str,
    gpus: int | None,
    overrides: Overrides,
    host_issue_s: float | HostIssueTimes | None,
) -> EstimateRequest:
    """The job that a framework's file says, with the changes of ``--set``."""
    from mofa.errors import SpecError
    from mofa.export.read_job import read_job
    from mofa.specs.load import load_framework, spec_from_mapping
    from mofa.specs.overrides import with_overrides
    from mofa.specs.workload import WorkloadSpec

    job = read_job(job_of, file, gpus)
    if job.num_gpus is None:
        raise SpecError(f"{file}: does not say on how many GPUs it runs; give --gpus")
    workload, facts = job.workload, job.framework
    if overrides["workload"]:
        raw = with_overrides(workload.model_dump(exclude_none=True), overrides["workload"], "--set workload")
        workload = spec_from_mapping(WorkloadSpec, raw, "--set workload")
    if overrides["framework"]:
        options = {**facts.model_dump(exclude_none=True), "name": facts.name}
        facts = load_framework(options, overrides["framework"])
    machines = job.cluster_as_job_uses_it(read_cluster(cluster, job.num_gpus, overrides, host_issue_s))
    fields = {**job.strategy, **overrides["strategy"]}
    return EstimateRequest(None, workload, machines, fields, facts, frozenset(fields), rests_on=job.notes)


def _jobs_of_file(
    file: str, overrides: Overrides, scratch: Path, host_issue_s: float | HostIssueTimes | None
) -> list[EstimateRequest]:
    """The runs of a file, or the measured one of a record."""
    from mofa.errors import SpecError
    from mofa.specs.run_files import load_runs
    from mofa.validate.reference import reference_of_file

    runs = load_runs(file)
    record = reference_of_file(Path(file), scratch)
    if record is not None:
        record = _changed(record, runs[0], overrides, host_issue_s)
        runs = (record.run,)
    jobs = []
    for run in runs:
        try:
            job, machines, facts, complete = _resolve(run, Path(file).parent, overrides)
        except SpecError as error:  # says which run, but not of which file
            raise type(error)(f"{file}: {error}") from None
        named = frozenset({*run.strategy, *overrides["strategy"], "micro_batch"})
        if record is None:
            jobs.append(
                EstimateRequest(run.id, job, machines.with_host_speed(host_issue_s, HOST_SAID), complete, facts, named)
            )
        else:
            machines = record.cluster_as_run(machines)
            jobs.append(EstimateRequest(run.id, job, machines, complete, facts, named, record.gpu, record.rests_on))
    return jobs


def _changed(
    record: ReferenceRun, asked: RunSpec, overrides: Overrides, host_issue_s: float | HostIssueTimes | None
) -> ReferenceRun:
    """A measured run without what options change: its machine's speed, counts of another model's layers."""
    hardware, workload = overrides["hardware"], overrides["workload"]
    if host_issue_s is not None:
        op_s = host_issue_s if isinstance(host_issue_s, float) else host_issue_s.eager_op_s.value
        said = f"host: {op_s * 1e6:.3g} us an op, {HOST_SAID if op_s is host_issue_s else 'as --host says'}"
        record = replace(record, host_op_s=op_s, layer=None, rests_on=(said, *record.rests_on[1:]))
    if any(path.startswith("gpu.curves.host.") for path in hardware):
        record = replace(record, host_op_s=None, layer=None, rests_on=("host: as --set says", *record.rests_on[1:]))
    if any(path.startswith("node.nvls_factor") for path in hardware):
        record = replace(record, nvls=True)
    if record.run.routing != asked.routing and any(path.split(".")[0] in ("model", "routing") for path in workload):
        said = "routing: as asked for, since --set changes it or the model"
        record = replace(record, run=asked, rests_on=(record.rests_on[0], said))
    return record
