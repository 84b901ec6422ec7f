"""How fast the hosts of older runs were, learned from the fitting half, written to reference_runs/hosts.yaml.

python scripts/hosts.py

Where runs measured it after their steps, their machine's is the median, of both halves: it is no error of a prediction;
of runs of one, two or four GPUs apart, for each says what its slowest rank measured.
The rest is for records that do not say how fast their host was. Machines are told apart by the mark that records have
of late, by the processor's name and its cores. A calibration on the same machine says how fast it is. Else a run of the
fitting half counts that would take a tenth longer on a host half as fast as the fastest, also one whose steps vary
too much to be scored: the issue of an op at which its prediction is what was measured is its own; repeats of a
configuration count as one, by their median, and a machine's is the median over configurations, where there are three.
The judging half is not predicted.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import yaml

from mofa.calibrate.fits.profile import SMALL_OPS
from mofa.calibrate.measurements import read_rows
from mofa.measure.records import HOST_BOUND_IDLE, RunRecord, read_records
from mofa.report.save import write_file_atomically
from mofa.search.one_plan import estimate
from mofa.validate.hosts import HOSTS, Machine, machine_identity
from mofa.validate.reference import ReferenceRun, measured_reference_runs

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "reference_runs" / "measured"
HEAD = "# Made by python scripts/hosts.py; what records of before the host's speed was measured are predicted with.\n"
FASTEST_S = 5.4e-6
"""What an op takes on the fastest machine that was timed (hardware_profiles/hosts). [s]"""
SPEEDS = (0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
"""Times that, between which the step is interpolated. [-]"""
SAME_CALL = {("", "Intel(R) Xeon(R) Processor", 16): "h200-1gpu-third"}
"""Machines without a mark whose runs were measured in one call with a calibration, which has one."""
FEWEST = 3
"""Configurations, or runs that measured it, that a machine's speed rests on."""


def _step_s(reference: ReferenceRun, factor: float) -> float:
    workload, cluster, framework, strategy = reference.resolved_specs()
    return estimate(workload, cluster.with_host_speed(factor * FASTEST_S), strategy, framework=framework).step_s


def issue_s(reference: ReferenceRun, measured_s: float) -> float | None:
    """Issue of an op at which a run's prediction is what was measured; None where the host matters little. [s]"""
    steps = {factor: _step_s(reference, factor) for factor in (1.0, 2.0)}
    if steps[2.0] < (1 + HOST_BOUND_IDLE) * steps[1.0]:
        return None
    steps |= {factor: _step_s(reference, factor) for factor in SPEEDS if factor not in steps}
    return float(np.interp(measured_s, [steps[f] for f in SPEEDS], SPEEDS)) * FASTEST_S


def by_machine(records: list[RunRecord]) -> dict[Machine, dict[str, float]]:
    """Issue of an op by configuration, of every machine. [s]"""
    known = {record.run.id: record for record in records}
    found: dict[Machine, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory(prefix="mofa-") as scratch:
        references, _ = measured_reference_runs(RECORDS, Path(scratch), hosts=False)
        for reference in references:
            own_runs = {repeat.id: reference.run_of_repeat(repeat) for repeat in reference.repeats}
            for id, run in (own_runs or {reference.id: reference}).items():
                record = known[id]
                step_s = record.measured.step_time_s
                of_old = record.environment.host_issue_s is None and record.split == "fitting"
                if not of_old or step_s is None or any(rank.alloc_retries for rank in record.measured.ranks):
                    continue
                own = issue_s(replace(run, host_op_s=None), step_s)
                if own is not None:
                    found[machine_identity(record)][reference.id].append(own)
    return {machine: {id: statistics.median(values) for id, values in runs.items()} for machine, runs in found.items()}


def calibrated(machines: set[Machine]) -> dict[Machine, tuple[str, float]]:
    """Folder and issue of an op of the machines that calibrations ran on. [s]"""
    found: dict[Machine, tuple[str, float]] = {}
    for folder in sorted((ROOT / "measurements").iterdir()):
        rows = read_rows(folder, families=["host"]) if (folder / "host.csv").is_file() else []
        times = [row.sample.median_s for row in rows if row.case.op in SMALL_OPS]
        for machine in machines if times else ():
            if machine[0] == rows[0].host or SAME_CALL.get(machine) == folder.name:
                found[machine] = (folder.name, statistics.median(times))
    return found


def by_runs(records: list[RunRecord]) -> dict[tuple[Machine, int], list[float]]:
    """Issue of an op as the runs of each machine measured it after their steps, by their GPUs. [s]

    Runs that timed it among their steps are predicted by that.
    """
    found: dict[tuple[Machine, int], list[float]] = defaultdict(list)
    for record in records:
        environment = record.environment
        if environment.host and environment.host_issue_s is not None and not environment.host_issues_s:
            found[machine_identity(record), record.run.gpus].append(environment.host_issue_s)
    return {where: values for where, values in found.items() if len(values) >= FEWEST}


def facts() -> dict[str, object]:
    """The file's content."""
    machines: list[dict[str, object]] = []
    records = read_records(RECORDS)
    timed = calibrated({machine_identity(record) for record in records})
    for machine, (folder, op_s) in sorted(timed.items()):
        source = f"median of an addition, SiLU and a norm, timed on this machine: measurements/{folder}"
        fact = {"value": f"{op_s * 1e6:.3g} us", "provenance": "measured", "source": source}
        mark = {"host": machine[0]} if machine[0] else {}
        machines.append({**mark, "cpu": machine[1], "cpu_cores": machine[2], "host_op_s": fact})
    for ((host, cpu, cores), gpus), values in sorted(by_runs(records).items()):
        source = f"median of what {len(values)} runs of {gpus} GPUs there measured after their steps"
        fact = {"value": f"{statistics.median(values) * 1e6:.3g} us", "provenance": "measured", "source": source}
        counts = {"runs": len(values), "gpus": gpus}
        machines.append({"host": host, "cpu": cpu, "cpu_cores": cores, "host_op_s": fact, **counts})
    for (host, cpu, cores), runs in sorted(by_machine(records).items()):
        if len(runs) < FEWEST or (host, cpu, cores) in timed:
            continue
        source = (
            f"median over {len(runs)} configurations of the fitting half of reference_runs/measured on this machine, "
            "each at the issue at which its prediction is what was measured; python scripts/hosts.py"
        )
        value = f"{statistics.median(runs.values()) * 1e6:.3g} us"
        machines.append({
            **({"host": host} if host else {}),
            "cpu": cpu,
            "cpu_cores": cores,
            "host_op_s": {"value": value, "provenance": "measured", "source": source},
            "configurations": {id: float(f"{op_s:.3g}") for id, op_s in sorted(runs.items())},
        })  # fmt: skip
    return {"machines": machines}


if __name__ == "__main__":
    text = HEAD + yaml.safe_dump(facts(), sort_keys=False, allow_unicode=True, width=116)
    write_file_atomically(RECORDS.parent / HOSTS, text.encode())
    print(text, end="")
