"""Closed form and replay name the parts of a step alike, not its length alone."""

from __future__ import annotations

from unittest.mock import patch

import pytest

import mofa
from mofa.plan.step_parts import TIME_COMPONENTS
from mofa.specs.overrides import parse_strategy

CASES = {
    "last stage": ("llama3-8b", 64, 64, "tp=2 pp=2 micro_batch=1"),
    "experts": ("mixtral-8x7b", 32, 32, "tp=2 pp=2 ep=2 micro_batch=2 recompute=full"),
    "four stages": ("llama3-8b", 64, 128, "tp=2 pp=4 micro_batch=2 recompute=full"),
}
"""Under Megatron's 1F1B: workload, GPUs, global batch and strategy."""
MOST_APART = 0.01
"""Of the step, each part. [-]"""


def parts(case: str) -> tuple[dict[str, float], dict[str, float]]:
    """The closed form's parts and the replay's, over the step of the latter. [-]"""
    model, gpus, batch, strategy = CASES[case]
    job, machines = mofa.load_workload(model, global_batch=batch), mofa.load_cluster("h100-hgx", gpus)
    closed, played = (
        mofa.estimate(job, machines, parse_strategy(strategy), replay=replay).time.exposed for replay in (False, True)
    )
    step_s = sum(played.values())
    return {name: closed[name] / step_s for name in closed}, {name: played[name] / step_s for name in played}


@pytest.mark.parametrize("case", CASES)
def test_each_part_has_the_same_share(case: str) -> None:
    closed, played = parts(case)
    apart = {name: closed[name] - played[name] for name in TIME_COMPONENTS}
    assert {name: share for name, share in apart.items() if abs(share) > MOST_APART} == {}
    assert played["dp"] > 0.005


def test_without_its_own_name_a_stage_reduces_in_the_bubble() -> None:
    """What the slowest stage reduces while the first one still computes; the step is the same."""
    named, played = parts("experts")
    with patch("mofa.cost.estimate.name_waits_of_slowest_stage"):
        unnamed, _ = parts("experts")
    assert sum(unnamed.values()) == pytest.approx(sum(named.values()), rel=1e-12)
    assert played["dp"] - unnamed["dp"] > 0.01 > abs(played["dp"] - named["dp"])


def test_the_first_layers_experts_are_reduced_behind_their_backward() -> None:
    """One micro-batch of large experts: what the first weights of the first layer's make is reduced beside that layer's
    attention, and beyond it. Without that the closed form is 1.4 % short."""
    job = mofa.load_workload("mixtral-8x7b", global_batch=32, overrides={"model.num_layers": 8})
    framework = mofa.load_framework({"name": "megatron", "overlap_param_gather": False})
    strategy, machines = "tp=2 ep=2 micro_batch=2 recompute=full", mofa.load_cluster("h100-hgx", 32)
    closed, played = (
        mofa.estimate(job, machines, strategy, framework=framework, replay=replay).step_s for replay in (False, True)
    )
    assert closed == pytest.approx(played, rel=0.002)
