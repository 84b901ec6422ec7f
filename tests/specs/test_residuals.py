"""The bundled residuals: what the margin and the bands rest on."""

from __future__ import annotations

import mofa
from mofa.search.plan import margin_bytes
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
        assert low / plan.step_s - 1 - band.low.value < 1e-9 and abs(high / plan.step_s - 1 - band.high.value) < 1e-9
