"""Residuals of the fitting halves, written to hardware_profiles/residuals.yaml and step_residuals.csv.

python scripts/residuals.py [PROCESSES]

As `mofa validate` scores them: measured runs each on its own host, repeats of one configuration as one by their median
error; traced runs, whose profiler takes memory and time, not at all. The judging halves are not predicted. The memory
margin rests on our runs on H200, the bands of steps on those of all GPUs and on published runs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import yaml

from mofa.measure.records import read_records
from mofa.report.save import write_file_atomically
from mofa.specs.cuda_graphs import CudaGraphs
from mofa.specs.residuals import FILE, STEPS_FILE
from mofa.validate.all_runs import reference_runs
from mofa.validate.bands import fit_step_residuals, residuals_csv, step_residual_of
from mofa.validate.reference import has_cuda_graphs, measured_reference_runs
from mofa.validate.row_groups import runs_to_learn_from
from mofa.validate.run_processes import RunProcesses
from mofa.validate.score import score_reference_runs
from mofa.validate.validation_report import RunScore

ROOT = Path(__file__).resolve().parent.parent
PROFILES = ROOT / "hardware_profiles"
HEAD = "# Made by python scripts/residuals.py; the memory margin and the band of step times rest on it.\n"


def fitting_runs(processes: int | None = None) -> list[RunScore]:
    """Every run that may be learned from, predicted."""
    with tempfile.TemporaryDirectory(prefix="mofa-") as scratch, RunProcesses(processes) as spread:
        found, _ = reference_runs(ROOT / "reference_runs", Path(scratch), spread=spread)
        runs, _ = score_reference_runs(runs_to_learn_from(found), spread=spread)
    return [run for run in runs if not run.ran_under_profiler]


def device_memory(runs: list[RunScore]) -> dict[str, object]:
    """The 99 % quantile of measured over predicted device memory - 1, of our runs on H200."""
    ours = [run.peak_device for run in runs if run.group == "measured-fitting" and run.peak_device is not None]
    source = (
        f"99% quantile of measured over replayed device memory - 1, {len(ours)} configurations of the "
        "fitting half of reference_runs/measured on H200; python scripts/residuals.py"
    )
    value = float(np.quantile([1 / (1 + device.error) - 1 for device in ours], 0.99))
    return {"value": round(value, 4), "provenance": "measured", "source": source}


def graphs_memory() -> dict[str, dict[str, object]]:
    """The most of measured over predicted device memory - 1 of runs with CUDA graphs, by their implementation; full
    iterations apart, whose eager steps reserve nothing beside them.

    Of both halves: their memory was modelled after all had run, so that none of them judges it.
    """
    folder = ROOT / "reference_runs" / "switches" / "measured"
    records = {record.run.id: record for record in read_records(folder)}
    with tempfile.TemporaryDirectory(prefix="mofa-") as scratch:
        found, _ = measured_reference_runs(folder, Path(scratch))
        runs, _ = score_reference_runs([one for one in found if has_cuda_graphs(records[one.id])])
    by_kind: dict[str, list[float]] = {}
    for run in runs:
        graphs = CudaGraphs.parse(str(records[run.id].run.framework["cuda_graphs"]))
        if run.peak_device is not None and not graphs.full_iteration:
            by_kind.setdefault(graphs.implementation, []).append(1 / (1 + run.peak_device.error) - 1)
    return {
        kind: {
            "value": round(max(0.0, *errors), 4), "provenance": "measured",
            "source": f"the most of measured over replayed device memory - 1 of all {len(errors)} runs "
            "of reference_runs/switches on H200; python scripts/residuals.py",
        }
        for kind, errors in sorted(by_kind.items())
    }  # fmt: skip


if __name__ == "__main__":
    runs = fitting_runs(int(sys.argv[1]) if len(sys.argv) > 1 else None)
    residuals = sorted(filter(None, map(step_residual_of, runs)), key=lambda item: (item.source, item.id))
    facts = {
        "device_memory": device_memory(runs),
        "graphs_memory": graphs_memory(),
        "step": fit_step_residuals(residuals).model_dump(mode="json"),
    }
    text = HEAD + yaml.safe_dump(facts, sort_keys=False, allow_unicode=True, width=116)
    write_file_atomically(PROFILES / STEPS_FILE, residuals_csv(residuals).encode())
    write_file_atomically(PROFILES / FILE, text.encode())
    print(text, end="")
