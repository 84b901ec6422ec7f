"""How fast the hosts of older runs were, learned from the fitting half, written to reference_runs/hosts.yaml.

python scripts/hosts.py

For records that do not say how fast their host was. Machines are told apart by the processor's name and its cores. A
run of the fitting half counts whose step is scored and would take a tenth longer on a host half as fast as the
profile's; the issue of an op at which its prediction is what was measured is its own; repeats of a configuration count
as one, by their median, and a machine's is the median over configurations, where there are three. The judging half is
not predicted.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import yaml

from mofa.measure.records import HOST_BOUND_IDLE, Record, read_records
from mofa.report.save import write_atomic
from mofa.search.find import estimate
from mofa.validate.hosts import HOSTS, machine_of
from mofa.validate.reference import Reference, measured_references, why_no_time

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "reference_runs" / "measured"
HEAD = "# Made by python scripts/hosts.py; what records of before the host's speed was measured are predicted with.\n"
SPEEDS = (0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
"""Times the profile's issue of an op, between which the step is interpolated."""
FEWEST = 3
"""Configurations that a machine's speed rests on."""


def _step_s(reference: Reference, factor: float) -> float:
    workload, cluster, framework, strategy = reference.resolve()
    curves = cluster.gpu.curves
    host = curves.host.at_speed(factor * curves.host.eager_op_s.value, "a trial")
    gpu = cluster.gpu.model_copy(update={"curves": curves.model_copy(update={"host": host})})
    return estimate(workload, cluster.model_copy(update={"gpu": gpu}), strategy, framework=framework).step_s


def issue_s(reference: Reference, measured_s: float) -> float | None:
    """Issue of an op at which a run's prediction is what was measured; None where the host matters little. [s]"""
    steps = {factor: _step_s(reference, factor) for factor in (1.0, 2.0)}
    if steps[2.0] < (1 + HOST_BOUND_IDLE) * steps[1.0]:
        return None
    steps |= {factor: _step_s(reference, factor) for factor in SPEEDS if factor not in steps}
    profile_s = reference.resolve()[1].gpu.curves.host.eager_op_s.value
    return float(np.interp(measured_s, [steps[f] for f in SPEEDS], SPEEDS)) * profile_s


def by_machine(records: list[Record]) -> dict[tuple[str, int], dict[str, float]]:
    """Issue of an op by configuration, of every machine. [s]"""
    known = {record.run.id: record for record in records}
    found: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory(prefix="mofa-") as scratch:
        references, _ = measured_references(RECORDS, Path(scratch), hosts=False)
        for reference in (replace(one, host_op_s=None) for one in references):
            for id in [repeat.id for repeat in reference.repeats] or [reference.id]:
                record = known[id]
                step_s = record.measured.step_time_s
                of_old = record.environment.host_issue_s is None and record.split == "fitting"
                if not of_old or why_no_time(record) is not None or step_s is None:
                    continue
                own = issue_s(reference, step_s)
                if own is not None:
                    found[machine_of(record)][reference.id].append(own)
    return {machine: {id: statistics.median(values) for id, values in runs.items()} for machine, runs in found.items()}


def facts() -> dict[str, object]:
    """The file's content."""
    machines = []
    for (cpu, cores), runs in sorted(by_machine(read_records(RECORDS)).items()):
        if len(runs) < FEWEST:
            continue
        source = (
            f"median over {len(runs)} configurations of the fitting half of reference_runs/measured on this machine, "
            "each at the issue at which its prediction is what was measured; python scripts/hosts.py"
        )
        value = f"{statistics.median(runs.values()) * 1e6:.3g} us"
        machines.append({
            "cpu": cpu,
            "cpu_cores": cores,
            "host_op_s": {"value": value, "provenance": "measured", "source": source},
            "configurations": {id: float(f"{op_s:.3g}") for id, op_s in sorted(runs.items())},
        })  # fmt: skip
    return {"machines": machines}


if __name__ == "__main__":
    text = HEAD + yaml.safe_dump(facts(), sort_keys=False, allow_unicode=True, width=116)
    write_atomic(RECORDS.parent / HOSTS, text.encode())
    print(text, end="")
