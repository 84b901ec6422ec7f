"""The hook of a parameter behind a CUDA graph is what small models in graphs say (measurements/h200-graph-hosts): one
slope over parameters, in small ops, for both kinds of graphs. Of each kind alone the slopes lie far from it."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from mofa.measure.runs import load_runs
from mofa.specs.host_profiles import load_host_profile

ROOT = Path(__file__).parents[3]


def measured() -> list[dict[str, str]]:
    with (ROOT / "measurements" / "h200-graph-hosts" / "graph_hosts.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_parameter_takes_the_host_as_long_as_the_slope_over_parameters_says() -> None:
    by_model: dict[tuple[str, float], list[tuple[float, float]]] = {}
    for row in measured():
        key = row["graphs"], float(row["parameters_per_layer"])
        steps = float(row["step_ms"]) * 1e3 / float(row["small_op_us"])  # in small ops
        by_model.setdefault(key, []).append((float(row["micro_batches"]), steps))
    rows, ops = [], []
    for (graphs, params), ((few, short), (many, long)) in by_model.items():
        rows.append([params, graphs == "local", graphs == "te"])
        ops.append((long - short) / (many - few) / 8)  # a layer and micro-batch
    slope = np.linalg.lstsq(np.array(rows, dtype=float), np.array(ops), rcond=None)[0][0]
    assert slope == pytest.approx(2.55, abs=0.005)
    host = load_host_profile("xeon-8480c")
    hook, small_op = host.graph_hook_s.value, host.eager_op_s.value
    assert hook == pytest.approx((slope - 1.0) * small_op, rel=0.01)  # the copy of the gradient is an op of its own


def test_the_plan_of_the_measurement_is_at_hand() -> None:
    runs = load_runs(ROOT / "reference_runs" / "plans" / "graph-hosts.yaml")
    assert len(runs) == len(measured()) == 12
