"""The host's microbenchmarks: the frameworks' layers so narrow that only the host takes time, each on its own host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from mofa.measure.records import RunRecord, read_records
from mofa.search.one_plan import step_s_of_strategy
from mofa.validate.hosts import read_machine_hosts, small_op_s_of_run
from mofa.validate.reference import ReferenceRun, measured_reference_runs

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "measurements" / "host-runs"
MACHINES = read_machine_hosts(ROOT / "reference_runs" / "measured")


def off(reference: ReferenceRun, record: RunRecord) -> float:
    """Predicted over measured - 1, on its host: measured beside it, or its machine of reference_runs/hosts.yaml."""
    found = small_op_s_of_run(record, MACHINES)
    assert found is not None
    workload, cluster, framework, strategy = replace(reference, host_op_s=found[0]).resolved_specs()
    measured_s = record.measured.step_time_s
    assert measured_s is not None
    return step_s_of_strategy(workload, cluster, strategy, framework=framework) / measured_s - 1


def test_only_the_host_takes_time() -> None:
    records = read_records(FOLDER)
    assert len(records) == 31
    one_gpu = [r for r in records if r.run.gpus == 1 and r.measured.idle_share is not None]
    assert min(r.measured.idle_share or 0.0 for r in one_gpu) > 0.8


def test_the_host_s_constants_say_what_they_took(tmp_path: Path) -> None:
    """Quartiles of such runs lie 15 % apart; half of them are more than 9 % too fast."""
    records = {record.run.id: record for record in read_records(FOLDER)}
    references, _ = measured_reference_runs(FOLDER, tmp_path)
    errors = {one.id: off(one, records[one.id]) for one in references}
    assert len(errors) == 30
    found = np.array(list(errors.values()))
    assert np.abs(found).mean() < 0.16, errors
    assert np.abs(found).max() < 0.5, errors
    assert abs(np.median(found)) < 0.1
