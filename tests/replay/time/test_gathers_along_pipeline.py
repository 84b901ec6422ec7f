"""Megatron's 1F1B of few micro-batches on many GPUs: stages gather parameters one after the other, by both readings."""

from __future__ import annotations

import pytest

import mofa
from mofa.plan.result import Plan

JOB, MACHINES = mofa.load_workload("deepseek-v3"), mofa.load_cluster("h800-hgx", 16384)
STRATEGY = "tp=2 pp=16 ep=8 etp=1 recompute=selective:mla_up_proj+moe_act dispatcher=deepep"
STAGES, MICRO_BATCHES = 16, 30


def _costed(overlaps: bool, *, replay: bool) -> Plan:
    framework = mofa.load_framework("megatron").model_copy(update={"overlap_param_gather": overlaps})
    return mofa.estimate(JOB, MACHINES, STRATEGY, framework=framework, replay=replay, explain=False)


@pytest.mark.parametrize("overlaps", [True, False])
def test_the_bubble_is_that_of_the_replay(overlaps: bool) -> None:
    closed, played = (_costed(overlaps, replay=replay) for replay in (False, True))
    assert closed.step_s == pytest.approx(played.step_s, rel=0.01)
    assert closed.time.exposed["bubble"] == pytest.approx(played.time.exposed["bubble"], rel=0.03)


def test_a_stage_that_gathers_when_its_input_comes_keeps_all_behind_it_waiting() -> None:
    """``finish_param_sync`` launches the gather of a stage's buffer ahead of its first forward, so that the last stage
    waits for those of all stages. Without the overlap all gather at once, behind the optimizer."""
    lazy, at_once = (_costed(overlaps, replay=False) for overlaps in (True, False))
    pipeline_s = at_once.step_s - at_once.time.exposed["dp"]
    busy_s = pipeline_s - at_once.time.exposed["bubble"]
    assert at_once.time.exposed["bubble"] == pytest.approx((STAGES - 1) / MICRO_BATCHES * busy_s, rel=0.15)
    gather_s = at_once.time.exposed["dp"] - lazy.time.exposed["dp"]  # the longest, which ends ahead of the step
    gathers_s = lazy.time.exposed["bubble"] - at_once.time.exposed["bubble"]
    assert 0.8 * STAGES * gather_s < gathers_s < STAGES * gather_s  # the ends hold less than others
