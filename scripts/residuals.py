"""Residuals of the fitting half of the measured runs, written to hardware_profiles/residuals.yaml.

python scripts/residuals.py

As `mofa validate` scores them: each on its own host, repeats of one configuration as one by their median error; traced
runs, whose profiler takes memory and time, not at all. The judging half is not predicted.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import yaml

from mofa.report.save import write_atomic
from mofa.specs.framework import PYTORCH_MODULES
from mofa.validate.reference import measured_references
from mofa.validate.score import score_run

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "hardware_profiles" / "residuals.yaml"
HEAD = "# Made by python scripts/residuals.py; the memory margin and the band of step times rest on it.\n"


def residuals() -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Measured over predicted - 1 per configuration: device memory, and the step by kind of framework."""
    device: dict[str, float] = {}
    step: dict[str, dict[str, float]] = {"megatron": {}, "torchtitan": {}}
    with tempfile.TemporaryDirectory(prefix="mofa-") as scratch:
        found, _ = measured_references(ROOT / "reference_runs" / "measured", Path(scratch))
        for reference in found:
            if reference.group != "measured-fitting" or reference.outcome.oom or reference.id.endswith("-traced"):
                continue
            run = score_run(reference)
            if run.peak_device is not None:
                device[run.id] = 1 / (1 + run.peak_device.error) - 1
            if run.step_time is not None:
                kind = "torchtitan" if run.framework.split()[0] in PYTORCH_MODULES else "megatron"
                step[kind][run.id] = 1 / (1 + run.step_time.error) - 1
    return device, step


def facts() -> dict[str, object]:
    """The file's content."""
    device, step = residuals()

    def fact(values: dict[str, float], quantile: float, what: str) -> dict[str, object]:
        source = (
            f"{quantile:.0%} quantile of measured over replayed {what} - 1, {len(values)} configurations of the "
            "fitting half of reference_runs/measured on H200; python scripts/residuals.py"
        )
        return {
            "value": round(float(np.quantile(list(values.values()), quantile)), 4),
            "provenance": "measured",
            "source": source,
        }

    return {
        "device_memory": fact(device, 0.99, "device memory"),
        "step": {
            kind: {"low": fact(values, 0.1, "step time"), "high": fact(values, 0.9, "step time")}
            for kind, values in step.items()
        },
    }


if __name__ == "__main__":
    text = HEAD + yaml.safe_dump(facts(), sort_keys=False, allow_unicode=True, width=116)
    write_atomic(PATH, text.encode())
    print(text, end="")
