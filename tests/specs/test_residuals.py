"""The bundled residuals: what the margin and the bands rest on."""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path

import pytest

import mofa
from mofa.measure.records import read_records
from mofa.search.plan import margin_bytes
from mofa.search.result import Plan
from mofa.specs.residuals import load_residuals


def test_residuals_are_measured_and_say_by_what() -> None:
    found = load_residuals()
    facts = [found.device_memory, *(f for band in found.step.values() for f in (band.low, band.high))]
    assert set(found.step) == {"megatron", "torchtitan"}
    for fact in facts:
        assert fact.provenance == "measured"
        assert "fitting half" in fact.source and "scripts/residuals.py" in fact.source
    assert all(band.low.value < band.high.value for band in found.step.values())


def test_the_margin_is_the_residual_of_the_capacity() -> None:
    machines = mofa.load_cluster("h100-hgx", 8)
    capacity = machines.gpu.usable_memory_bytes.value
    assert margin_bytes(machines) == load_residuals().device_memory.value * capacity


def test_a_step_has_the_band_of_its_framework() -> None:
    job, machines = mofa.load_workload("llama3-8b", global_batch=64), mofa.load_cluster("h100-hgx", 8)
    for name in ("megatron-local", "torchtitan"):
        plan = mofa.estimate(job, machines, "micro_batch=1", framework=mofa.load_framework(name), replay=False)
        band = load_residuals().step_band(name)
        assert plan.step_s_band is not None
        low, high = plan.step_s_band
        assert low / plan.step_s - 1 == pytest.approx(band.low.value, abs=1e-9)
        assert high / plan.step_s - 1 == pytest.approx(band.high.value, abs=1e-9)
        assert not any("waits for its host" in note for note in plan.notes)


def test_a_step_that_waits_for_its_host_has_the_band_of_hosts_too() -> None:
    """Wide enough for the same on a fast and on a slow host of those that were timed; on a known host as others."""
    job = mofa.load_workload("qwen3-30b-a3b", overrides={"model": {"num_layers": 4}, "batch": {"global_batch": 4}})
    framework, band = mofa.load_framework("megatron-local"), load_residuals().step_band("megatron-local")
    machines = mofa.load_cluster("h200-hgx", 1)
    curves = machines.gpu.curves
    assert curves.hosts is not None
    own = curves.host.eager_op_s.value

    def plan(op_s: float | None) -> Plan:
        return mofa.estimate(job, machines.at_host(op_s), "micro_batch=1", framework=framework, replay=False)

    typical, fast, slow = plan(None), plan(curves.hosts.fast.value * own), plan(curves.hosts.slow.value * own)
    assert typical.step_s == pytest.approx(plan(own).step_s)
    assert fast.step_s < 0.9 * typical.step_s and 1.1 * typical.step_s < slow.step_s
    assert typical.step_s_band is not None and slow.step_s_band is not None
    low, high = typical.step_s_band
    assert low <= fast.step_s * (1 + band.low.value) * 1.001 and high >= slow.step_s * (1 + band.high.value) * 0.999
    assert high < 1.3 * typical.step_s
    assert slow.step_s_band[1] == pytest.approx(slow.step_s * (1 + band.high.value))
    (note,) = (note for note in typical.notes if "waits for its host" in note)
    us = [f"{share * own * 1e6:.2g} us" for share in (1.0, curves.hosts.fast.value, curves.hosts.slow.value)]
    said = f"at {us[0]} a small op, the median of machines that were timed (8 in 10: {us[1]} to {us[2]})"
    assert said in note and 8e-6 < own < 11e-6
    assert any(f"at {us[2]} a small op" in note and "median" not in note for note in slow.notes)


def test_the_profile_s_host_is_the_middle_one_of_those_that_were_timed() -> None:
    """Half of the machines that runs of the fitting half say something of are faster."""
    curves = mofa.load_cluster("h200-hgx", 1).gpu.curves
    assert curves.hosts is not None
    by_machine: dict[str, list[float]] = defaultdict(list)
    for record in read_records(Path(__file__).parents[2] / "reference_runs" / "measured"):
        seen = record.environment
        if record.split == "fitting" and "H200" in seen.gpu and seen.host and seen.host_issue_s is not None:
            by_machine[seen.host].append(seen.host_issue_s)
    times = [statistics.median(values) for values in by_machine.values()]
    typical = curves.host.eager_op_s.value
    assert len(times) > 10
    assert 0.35 < sum(op_s < typical for op_s in times) / len(times) < 0.65
    inside = [curves.hosts.fast.value <= op_s / typical <= curves.hosts.slow.value for op_s in times]
    assert sum(inside) / len(inside) > 0.75
