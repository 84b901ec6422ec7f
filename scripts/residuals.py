"""Residuals of the fitting half of the measured runs, written to hardware_profiles/residuals.yaml.

python scripts/residuals.py

Repeats of one configuration count as one, by their mean; traced runs, whose profiler takes memory and time, not at
all. The judging half is not predicted.
"""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import yaml

from mofa.report.save import write_atomic
from mofa.search.find import estimate
from mofa.specs.framework import PYTORCH_MODULES
from mofa.validate.reference import measured_references

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "hardware_profiles" / "residuals.yaml"
HEAD = "# Made by python scripts/residuals.py; the memory margin and the band of step times rest on it.\n"
REPEAT = re.compile(r"-(again|third)$")


def residuals() -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Measured over predicted - 1 per configuration: device memory, and the step by kind of framework."""
    device: dict[str, list[float]] = defaultdict(list)
    step: dict[str, dict[str, list[float]]] = {"megatron": defaultdict(list), "torchtitan": defaultdict(list)}
    with tempfile.TemporaryDirectory(prefix="mofa-") as scratch:
        found, _ = measured_references(ROOT / "reference_runs" / "measured", Path(scratch))
        for reference in found:
            if reference.group != "measured-fitting" or reference.outcome.oom or reference.id.endswith("-traced"):
                continue
            workload, cluster, framework, strategy = reference.resolve()
            plan = estimate(workload, cluster, strategy, framework=framework)
            name, outcome = REPEAT.sub("", reference.id), reference.outcome
            if outcome.device_bytes is not None:
                device[name].append(outcome.device_bytes / plan.memory.device_bytes - 1)
            if outcome.step_s is not None:
                kind = "torchtitan" if framework.name in PYTORCH_MODULES else "megatron"
                step[kind][name].append(outcome.step_s / plan.step_s - 1)
    return (
        {name: float(np.mean(values)) for name, values in device.items()},
        {kind: {name: float(np.mean(v)) for name, v in runs.items()} for kind, runs in step.items()},
    )


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
