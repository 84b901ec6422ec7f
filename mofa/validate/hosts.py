"""How fast the hosts of measured runs were: by the run's own record, by its machine, or by the GPU's profile.

Hosts of one kind differ by a factor of two and a profile knows one of them. What a run's host needs for one small op
is a fact of where it was measured, as its GPU is, and nothing of the step that is predicted.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from mofa.measure.records import RankMeasurement, RunRecord
from mofa.measure.results import interquartile_range_s
from mofa.specs.base import Count, PositiveSecondsFact, Spec
from mofa.specs.files import load_yaml
from mofa.specs.from_mapping import spec_from_mapping
from mofa.specs.host import SmallLayerTime
from mofa.specs.ranges import MeasuredSeconds
from mofa.validate.step_pace import (
    has_pace_samples,
    small_layer_time_of_slowest_host,
    small_op_s_of_slowest_host,
    theil_sen_line,
)

HOSTS = "hosts.yaml"
"""File of machines beside the folder of records."""


class MachineHost(Spec):
    """The host of a machine that several runs were measured on, before records said how fast theirs was."""

    host: str = ""
    """What tells the machine from others, empty where its records do not say."""
    cpu: str
    cpu_cores: Count
    host_op_s: PositiveSecondsFact
    """Issue of one small eager op: timed there by a calibration, or from runs of the fitting half alone. [s]"""
    runs: Count = 0
    """Runs there that timed it after their steps, where it is their median. [-]"""
    gpus: Count = 0
    """GPUs that each of them had: what a run of several timed is its slowest rank's. [-]"""
    configurations: dict[str, MeasuredSeconds] = Field(default={})
    """What it is the median of, unless it was timed: the issue at which each of these runs takes as long as it did.
    [s]"""


class MachineHosts(Spec):
    """The hosts of all machines whose records do not say how fast theirs was."""

    machines: tuple[MachineHost, ...] = ()


def read_machine_hosts(records: Path) -> tuple[MachineHost, ...]:
    """The hosts of the machines of a folder of records; none without a file of them.

    Raises
    ------
    SpecError
        If the file is broken.
    """
    path = records.parent / HOSTS
    return (
        spec_from_mapping(MachineHosts, load_yaml(path), f"{path}: no file of hosts").machines if path.is_file() else ()
    )


def small_op_s_by_machine(references: Path | None = None) -> dict[str, float]:
    """Issue of one small eager op by the mark of a machine, where it has one; none away from a clone of mofa. [s]"""
    folder = references or Path(__file__).resolve().parents[2] / "reference_runs"
    return {
        machine.host: machine.host_op_s.value for machine in read_machine_hosts(folder / "measured") if machine.host
    }


def small_layer_time_of_run(record: RunRecord) -> SmallLayerTime | None:
    """A small layer of Transformer Engine on a run's slowest host; None of a run that did not time one.

    Where small additions were timed within the steps, what
    :func:`mofa.validate.step_pace.small_layer_time_of_slowest_host` says. Else the median of what
    was read between steps, of the slowest rank.
    """
    if has_pace_samples(record):
        return small_layer_time_of_slowest_host(record)
    return max(map(_read_between_steps, _ranks_that_timed_a_layer(record)), key=sum, default=None)


def has_small_layer_time(record: RunRecord) -> bool:
    """Whether :func:`small_layer_time_of_run` is known of a run."""
    return has_pace_samples(record) or bool(_ranks_that_timed_a_layer(record))


def _ranks_that_timed_a_layer(record: RunRecord) -> list[RankMeasurement]:
    return [rank for rank in record.measured.ranks if rank.layer_issues_s and rank.layer_backs_s]


def _read_between_steps(rank: RankMeasurement) -> SmallLayerTime:
    return SmallLayerTime(statistics.median(rank.layer_issues_s), statistics.median(rank.layer_backs_s))


def unexplained_step_spread(record: RunRecord) -> float:
    """How far the quartiles of a run's steps lie apart beside what its pace within them explains, over a step. [-]

    Of a run whose pace was not timed within its steps, the quartiles of the steps themselves.
    """
    measured = record.measured
    if measured.step_time_s is None:
        raise ValueError(f"{record.run.id} has no step time")
    paced = [rank for rank in measured.ranks if len(rank.step_ops_s) == len(measured.step_times_s) > 2]
    if not paced:
        return (measured.step_time_spread_s or 0.0) / measured.step_time_s
    ops_s = [
        max(both)
        for both in zip(*(map(sum, zip(r.step_ops_s, r.step_back_ops_s, strict=True)) for r in paced), strict=True)
    ]
    slope = theil_sen_line(ops_s, measured.step_times_s)[0] if max(ops_s) > min(ops_s) else 0.0
    rest = [step_s - slope * op_s for step_s, op_s in zip(measured.step_times_s, ops_s, strict=True)]
    return interquartile_range_s(rest) / measured.step_time_s


Machine = tuple[str, str, int]


def machine_identity(record: RunRecord) -> Machine:
    """What tells machines apart in records of all ages: its own mark, if any, the processor's name and its cores."""
    return record.environment.host or "", record.environment.cpu, record.environment.cpu_cores


def small_op_s_of_run(record: RunRecord, machines: Sequence[MachineHost]) -> tuple[float, str] | None:
    """Issue of one small op on the host of a run, and where it is from; None where only the GPU's profile knows. [s]

    What was timed within its steps, where it was, else among them. Else what the runs of its machine on as many GPUs
    measured, by their median: of one machine single runs measure from 6.4 to 11 us right after their steps, as hosts
    change within seconds. A run of several GPUs says what its slowest rank measured, for which the others wait in its
    steps as well. Else the record's own, else what else its machine is known by.
    """
    if has_pace_samples(record):
        return small_op_s_of_slowest_host(record), "timed within its steps"
    if record.environment.host_issues_s:
        return statistics.fmean(record.environment.host_issues_s), "timed among its steps"
    mark = record.environment.host
    for machine in machines if mark else ():
        if machine.runs and machine.host == mark and machine.gpus == record.run.gpus:
            return machine.host_op_s.value, f"of its machine, by {machine.runs} runs there"
    if record.environment.host_issue_s is not None:
        return record.environment.host_issue_s, "measured after the run"
    for machine in machines:
        if (machine.host, machine.cpu, machine.cpu_cores) == machine_identity(record):
            runs = len(machine.configurations)
            return machine.host_op_s.value, f"of its machine, by {runs} fitting runs there" if runs else "timed there"
    return None
