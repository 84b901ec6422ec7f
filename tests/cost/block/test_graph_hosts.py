"""The hook of a parameter behind a CUDA graph is what small models in graphs say (measurements/h200-graph-hosts): one
slope over parameters for both kinds of graphs, in the mean small op of the runs. Of each kind alone the slopes lie
apart."""

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
        by_model.setdefault(key, []).append((float(row["micro_batches"]), float(row["step_ms"]) * 1e3))
    rows, layers_us = [], []
    for (graphs, params), ((few, short), (many, long)) in by_model.items():
        rows.append([params, graphs == "local", graphs == "te"])
        layers_us.append((long - short) / (many - few) / 8)  # a layer and micro-batch
    slope_us = np.linalg.lstsq(np.array(rows, dtype=float), np.array(layers_us), rcond=None)[0][0]
    small_ops = slope_us / np.mean([float(row["small_op_us"]) for row in measured()])
    assert small_ops == pytest.approx(2.99, abs=0.005)
    host = load_host_profile("xeon-8480c")
    hook, small_op = host.graph_hook_s.value, host.eager_op_s.value
    assert hook == pytest.approx((small_ops - 1.0) * small_op, rel=0.01)  # the copy of the gradient is an op of its own


def test_the_plan_of_the_measurement_is_at_hand() -> None:
    runs = load_runs(ROOT / "reference_runs" / "plans" / "graph-hosts.yaml")
    assert len(runs) == len(measured()) == 12
