"""Steps of GPUs that are drawn one by one, against the step at the expected pace of the slowest."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import mofa
from mofa.cli.main import main
from mofa.cost.estimate import TableEstimator
from mofa.cost.kernels.slowest_gpu import PaceSpread, expected_slowest
from mofa.replay.time.drawn_stragglers import draw_paces, estimators_at_drawn_paces, expected_step_of_draws_s
from mofa.replay.time.step import replay_step_time
from mofa.replay.time.time_replayed import ReplayedTime
from mofa.search.strategy_estimator import strategy_estimator
from mofa.specs.overrides import parse_strategy

DRAWS = 60


class Case(NamedTuple):
    """A job on H100s, with what is changed of them."""

    model: str
    gpus: int
    batch: int
    strategy: str
    framework: str = "megatron"
    changes: tuple[tuple[str, float], ...] = ()


SLOW = (("node.slow_nodes.share", 0.02), ("node.slow_nodes.slowdown", 0.1))
CASES = {
    "data parallel": Case("llama3-8b", 64, 64, "micro_batch=1 recompute=full"),
    "tensor parallel": Case("llama3-8b", 64, 64, "tp=4 micro_batch=1"),
    "FSDP": Case("llama3-8b", 64, 64, "micro_batch=1 recompute=full", "torchtitan"),
    "experts": Case("mixtral-8x7b", 64, 64, "tp=2 ep=8 micro_batch=1 recompute=full"),
    "slow nodes": Case("llama3-8b", 256, 256, "tp=2 micro_batch=1", changes=SLOW),
    "two stages": Case("llama3-8b", 64, 128, "tp=2 pp=2 micro_batch=1"),
    "four stages": Case("llama3-8b", 256, 512, "tp=2 pp=4 micro_batch=1"),
    "interleaved": Case("llama3-8b", 64, 256, "tp=2 pp=4 vpp=4 micro_batch=1"),
}
OF_STEPS = 0.0005
"""How far pipelines may be off besides the draws' own error: their closed form takes the bubble for computing. [-]"""


@lru_cache(maxsize=len(CASES))
def played(name: str) -> tuple[TableEstimator, ReplayedTime]:
    """A case's estimator, and its step as it is played by default."""
    case = CASES[name]
    job = mofa.load_workload(case.model, global_batch=case.batch)
    machines = mofa.load_cluster("h100-hgx", case.gpus, dict(case.changes) or None)
    framework = mofa.load_framework(case.framework)
    plan = mofa.estimate(job, machines, parse_strategy(case.strategy), framework=framework, replay=False)
    estimator = strategy_estimator(job, machines, framework, plan.strategy)
    return estimator, replay_step_time(estimator, detail=False)


def drawn(estimator: TableEstimator, seed: int) -> ReplayedTime:
    """The step of a draw."""
    return replay_step_time(estimator, detail=False, paced=estimators_at_drawn_paces(estimator, seed))


@pytest.mark.parametrize("name", [name for name in CASES if name != "interleaved"])
def test_draws_are_on_average_what_is_expected(name: str) -> None:
    """Within four standard errors of the mean of the draws."""
    estimator, at_slowest = played(name)
    steps = np.array([drawn(estimator, seed).step_s for seed in range(DRAWS)])
    expected_s = expected_step_of_draws_s(estimator, at_slowest)
    assert expected_s is not None
    several = int(estimator.table.pp[0]) > 1
    error_s = 4.0 * steps.std(ddof=1) / DRAWS**0.5 + OF_STEPS * several * expected_s
    assert abs(steps.mean() - expected_s) < error_s, (steps.mean(), expected_s, error_s)
    assert error_s < 0.25 * at_slowest.exposed["stragglers"] or CASES[name].changes
    if several:  # at the slowest GPU's pace all stages are as slow as one of them
        assert steps.mean() < at_slowest.step_s
    else:
        assert expected_s == at_slowest.step_s


def test_interleaved_stages_gain_more_than_is_expected_of_others() -> None:
    """Of walked schedules no mean is said; their draws are shorter than the step at the slowest's pace."""
    estimator, at_slowest = played("interleaved")
    assert expected_step_of_draws_s(estimator, at_slowest) is None
    assert np.mean([drawn(estimator, seed).step_s for seed in range(10)]) < at_slowest.step_s


def test_a_seed_is_a_job() -> None:
    estimator, _ = played("two stages")
    first, again, other = (drawn(estimator, seed) for seed in (3, 3, 4))
    assert first.step_s == again.step_s != other.step_s
    assert first.step_s == pytest.approx(sum(first.exposed.values()), rel=1e-9)


def test_equal_gpus_are_drawn_as_they_are() -> None:
    estimator, at_slowest = played("two stages")
    pace = expected_slowest(PaceSpread.from_cluster(estimator.cluster), 64)
    paced = (estimator.at_power_limited_clock.at_pace(pace),) * 2
    assert replay_step_time(estimator, detail=False, paced=paced).step_s == pytest.approx(at_slowest.step_s, rel=1e-9)


def test_gpus_of_a_slow_node_are_slow_together() -> None:
    paces = draw_paces(PaceSpread(0.0, 0.3, 0.1, 8), 40, 1)
    assert paces.shape == (2, 40)
    by_node = paces.reshape(2, 5, 8)
    assert np.ptp(by_node, axis=2).max() == 0.0
    assert set(np.unique(paces)) == {1.0, 1.1}


def test_a_trace_of_drawn_stragglers_says_its_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = ["llama3-8b", "h100-hgx", "--gpus", "16", "--global-batch", "32", "--strategy", "tp=2 pp=2 micro_batch=1"]
    steps = []
    for more in ([], ["--draw-stragglers", "--seed", "5"]):
        assert main(["trace", *job, *more, "--out", str(tmp_path / "x.json")]) == 0
        steps.append(json.loads((tmp_path / "x.json").read_text())["otherData"]["step_s"])
    assert "stragglers drawn by seed 5: " in capsys.readouterr().err
    assert steps[0] != steps[1]
    assert main(["trace", *job, "--draw-stragglers", "--seed", "-1", "--out", str(tmp_path / "x.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
