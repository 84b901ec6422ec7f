"""The band of a step: which runs say it, how far hosts widen it, where nothing was measured."""

from __future__ import annotations

from math import exp, expm1
from typing import Any

import pytest

import mofa
from mofa.plan.result import Plan
from mofa.plan.step_band import Band
from mofa.search.to_plan.step_band import step_circumstances
from mofa.specs.residuals import load_residuals
from mofa.specs.workload import WorkloadSpec

STEP = load_residuals().step


def dense(**overrides: Any) -> WorkloadSpec:
    return mofa.load_workload("llama3-8b", global_batch=64, overrides=overrides or None)


def estimated(
    job: WorkloadSpec, node: str, gpus: int, framework: str, strategy: str = "micro_batch=1", op_s: float | None = None
) -> Plan:
    machines = mofa.load_cluster(node, gpus).with_host_speed(op_s)
    return mofa.estimate(job, machines, strategy, framework=mofa.load_framework(framework), replay=False)


def band(plan: Plan) -> Band:
    assert plan.band is not None
    assert plan.step_s_band == (plan.band.low_s, plan.band.high_s)
    return plan.band


def width(plan: Plan) -> float:
    return (band(plan).high_s - band(plan).low_s) / plan.step_s


@pytest.mark.parametrize(("node", "gpus", "framework"), [
    ("h100-hgx", 8, "torchtitan"), ("h100-hgx", 8, "megatron-local"), ("h200-hgx", 8, "megatron"),
    ("h100-hgx", 32, "megatron"),
])  # fmt: skip
def test_the_band_holds_the_estimate_unless_a_bias_says_otherwise(node: str, gpus: int, framework: str) -> None:
    strategy = "micro_batch=1 recompute=full" if framework != "megatron" else "tp=2 micro_batch=1"
    plan = estimated(dense(), node, gpus, framework, strategy)
    found = band(plan)
    group = STEP.narrowest_group_of_circumstances(found.circumstances)
    assert (found.group, found.runs, found.families) == (group.path, group.runs, group.families)
    assert found.unmeasured == () and found.hosts_s is not None
    assert found.tie_margin == pytest.approx(expm1(STEP.pair_difference[found.circumstances.pace].value))
    fast_s, slow_s = found.hosts_s
    assert fast_s <= plan.step_s <= slow_s
    assert found.low_s == pytest.approx(fast_s * exp(group.low.value))
    assert found.high_s == pytest.approx(slow_s * exp(group.high.value))
    if group.low.value <= 0 <= group.high.value:
        assert found.low_s <= plan.step_s <= found.high_s


def test_circumstances_are_those_of_the_job() -> None:
    machines, framework = mofa.load_cluster("h100-hgx", 16), mofa.load_framework("megatron")
    few = step_circumstances(dense(), machines, framework, 0.0)
    assert few.levels_in_order == ("several nodes", "transformer-engine", "dense", "device-bound", "bf16")
    experts = mofa.load_workload("mixtral-8x7b", overrides={"precision": {"gemm": "fp8"}})
    many = step_circumstances(experts, mofa.load_cluster("h100-hgx", 8), framework, 0.5)
    assert many.levels_in_order == ("one node", "transformer-engine", "experts half or more", "host-bound", "fp8")


def test_it_is_wide_and_says_so_where_nothing_was_measured() -> None:
    known, other = (estimated(dense(), node, 8, "megatron", "tp=2 micro_batch=1") for node in ("h100-hgx", "h800-hgx"))
    assert band(known).unmeasured == ()
    assert band(other).unmeasured == ("GPU h800",)
    assert band(other).low_s / band(other).hosts_s[0] == pytest.approx(exp(STEP.unmeasured_low.value))  # type: ignore[index]
    assert width(other) > 1.3 * width(known)
    assert band(other).group == ()


def test_it_is_wide_on_more_nodes_than_were_ever_measured() -> None:
    stand_in = STEP.stand_in_rows(("several nodes", "transformer-engine"))
    assert stand_in is not None
    most = int(stand_in.seen.most_nodes.value)
    job = mofa.load_workload("llama3-8b", global_batch=32 * most)
    near, far = (estimated(job, "h100-hgx", 8 * n, "megatron", "tp=2 micro_batch=1") for n in (most, 2 * most))
    assert band(near).unmeasured == ()
    (told,) = band(far).unmeasured
    assert told == f"{2 * most} nodes with transformer-engine layers, where {most} are the most"
    assert width(far) > 1.3 * width(near)


def host_bound() -> tuple[WorkloadSpec, float, float, float]:
    """A job whose host sets the pace, and the small op of a typical, a fast and a slow host. [s]"""
    job = mofa.load_workload("qwen3-30b-a3b", overrides={"model": {"num_layers": 4}, "batch": {"global_batch": 4}})
    curves = mofa.load_cluster("h200-hgx", 1).gpu.curves
    assert curves.hosts is not None
    own = curves.host.eager_op_s.value
    return job, own, curves.hosts.fast.value * own, curves.hosts.slow.value * own


def test_a_step_that_waits_for_its_host_has_the_band_of_hosts_too() -> None:
    """From the residuals on a fast host to those on a slow one; on a known host the residuals alone."""
    job, own, fast_op_s, slow_op_s = host_bound()
    typical, at_own, fast, slow = (
        estimated(job, "h200-hgx", 1, "megatron-local", op_s=op_s) for op_s in (None, own, fast_op_s, slow_op_s)
    )
    assert typical.step_s == pytest.approx(fast.step_s)  # a job's own host is an undisturbed one
    assert fast.step_s < 0.9 * at_own.step_s and 1.1 * at_own.step_s < slow.step_s
    found = band(typical)
    assert found.circumstances.pace == "host-bound"
    assert found.hosts_s == (pytest.approx(fast.step_s), pytest.approx(slow.step_s))
    assert band(at_own).hosts_s is None
    assert band(at_own).low_s > found.low_s and band(fast).high_s < found.high_s
    group = STEP.narrowest_group_of_circumstances(found.circumstances)
    assert found.low_s == pytest.approx(fast.step_s * exp(group.low.value))
    assert band(at_own).high_s == pytest.approx(at_own.step_s * exp(group.high.value))


def test_a_played_step_s_band_is_its_own() -> None:
    """Hosts change the played step in proportion to the closed form's."""
    job, *_ = host_bound()
    machines, framework = mofa.load_cluster("h200-hgx", 1), mofa.load_framework("megatron-local")
    played = mofa.estimate(job, machines, "micro_batch=1", framework=framework)
    closed = mofa.estimate(job, machines, "micro_batch=1", framework=framework, replay=False)
    assert played.costed_by == "replay"
    hosts_s, closed_s = band(played).hosts_s, band(closed).hosts_s
    assert hosts_s is not None and closed_s is not None
    for ours, theirs in zip(hosts_s, closed_s, strict=True):
        assert ours / played.step_s == pytest.approx(theirs / closed.step_s)


def test_notes_name_the_host_that_a_step_waits_for() -> None:
    job, own, fast_op_s, slow_op_s = host_bound()
    typical, slow = (estimated(job, "h200-hgx", 1, "megatron-local", op_s=op_s) for op_s in (None, slow_op_s))
    (note,) = (note for note in typical.notes if "waits for its host" in note)
    us = [f"{op_s * 1e6:.2g} us" for op_s in (own, fast_op_s, slow_op_s)]
    assert f"at {us[1]} a small op, an undisturbed machine's (8 in 10 timed: {us[1]} to {us[2]})" in note
    assert "--host-issue" in note
    assert any(f"at {us[2]} a small op" in note and "median" not in note for note in slow.notes)
