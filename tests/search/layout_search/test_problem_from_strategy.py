"""A strategy's split problem says what the estimate says, of its own layout and of others."""

from __future__ import annotations

import numpy as np
import pytest

import mofa
from mofa.cost.estimate import TableEstimator
from mofa.schedules import SCHEDULES
from mofa.search.layout_search.problem_from_strategy import split_of_strategy, split_problem_of_strategy
from mofa.search.layout_search.shortest_split import shortest_split
from mofa.search.layout_search.split_problem import ChunkLayers
from mofa.search.strategy_estimator import strategy_estimator
from mofa.units import GIB

CASES = {
    "deepseek": ("deepseek-v3", 1024, "megatron", "tp=2 pp=8 vpp=4 ep=64 etp=1 recompute=full", 16384),
    "70b first layers": ("llama3-70b", 64, "megatron", "tp=4 pp=4 vpp=5 recompute=full:2", 128),
    "70b 1f1b": ("llama3-70b", 64, "megatron", "tp=4 pp=8 recompute=selective:mlp", 128),
    "8b zbv": ("llama3-8b", 64, "torchtitan", "pp=4 vpp=2 schedule=zbv recompute=full", 256),
    "8b gpipe": ("llama3-8b", 64, "torchtitan", "pp=4 schedule=gpipe recompute=full", 256),
}


def _estimator(name: str) -> TableEstimator:
    workload, gpus, framework, strategy, batch = CASES[name]
    job = mofa.load_workload(workload, global_batch=batch)
    return strategy_estimator(job, mofa.load_cluster("h100-hgx", gpus), mofa.load_framework(framework), strategy)


@pytest.mark.parametrize("name", CASES)
def test_other_layouts_take_and_keep_what_the_estimate_says(name: str) -> None:
    """Steps differ by what is outside of the pipeline and by hosts; bytes of its own layout are the estimate's."""
    estimator = _estimator(name)
    problem, own = split_problem_of_strategy(estimator, 1000 * GIB), split_of_strategy(estimator)
    assert problem is not None
    np.testing.assert_allclose(problem.bytes_by_rank([own])[0], estimator.stage_device_bytes())
    own_s = float(estimator.exposed_and_hidden_seconds(every_stage=True)[0].sum())
    tolerance = (
        0.012 if SCHEDULES[estimator.row_with_every_stage.schedule].defers_weight_gradients else 0.004
    )  # the host's part
    assert problem.pipeline_step_s(own) == pytest.approx(own_s, rel=0.03)
    layers = list(own.layers)
    layers[1] -= 1
    layers[-2] += 1
    other = ChunkLayers(tuple(layers), own.prediction_chunk, own.recomputed)
    changed = estimator.with_layout(other.layout(problem.num_predictions).text, other.recomputed)
    other_s = float(changed.exposed_and_hidden_seconds(every_stage=True)[0].sum())
    assert problem.pipeline_step_s(other) - problem.pipeline_step_s(own) == pytest.approx(
        other_s - own_s, abs=tolerance * own_s
    )
    np.testing.assert_allclose(problem.bytes_by_rank([other])[0], changed.stage_device_bytes(), rtol=0.08)


def test_a_strategy_with_another_layout_is_that_strategy() -> None:
    """As if the strategy had been written so, whatever was worked out of its own layout before."""
    estimator = _estimator("70b first layers")
    assert (
        estimator.exposed_and_hidden_seconds(every_stage=True)[0].any()
        and estimator.at_power_limited_clock is not estimator
    )
    changed = estimator.with_layout("Et*3|(t*4|)*18t*5L", 3)
    workload, gpus, framework, strategy, batch = CASES["70b first layers"]
    job, machines = mofa.load_workload(workload, global_batch=batch), mofa.load_cluster("h100-hgx", gpus)
    strategy = strategy.replace("full:2", "full:3") + " layout=Et*3|(t*4|)*18t*5L"
    written = strategy_estimator(job, machines, mofa.load_framework(framework), strategy)
    for every_stage in (False, True):
        np.testing.assert_array_equal(
            changed.exposed_and_hidden_seconds(every_stage=every_stage)[0],
            written.exposed_and_hidden_seconds(every_stage=every_stage)[0],
        )
    assert changed.stage_device_bytes() == written.stage_device_bytes()


def test_search_of_a_small_model_equals_trying_every_layout() -> None:
    """By the estimate, of every layout of a model of 8 layers over 2 x 2 chunks."""
    job = mofa.load_workload("llama3-8b", global_batch=64, overrides={"model.num_layers": 8})
    machines, framework = mofa.load_cluster("h100-hgx", 8), mofa.load_framework("megatron")
    estimator = strategy_estimator(job, machines, framework, "tp=4 pp=2 vpp=2 recompute=none")
    problem = split_problem_of_strategy(estimator, 70 * GIB)
    assert problem is not None

    def step_s(split: ChunkLayers) -> float:
        return float(
            estimator.with_layout(split.layout(0).text, 0).exposed_and_hidden_seconds(every_stage=True)[0].sum()
        )

    found = shortest_split(problem, split_of_strategy(estimator))
    shortest_s = min(map(step_s, problem.all_splits()))
    assert min(map(step_s, found.splits[:3])) == pytest.approx(shortest_s, rel=1e-3)
    assert found.gap_fraction < 1e-3


def test_torchtitan_leaves_no_chunk_between_empty() -> None:
    estimator = _estimator("8b zbv")
    problem = split_problem_of_strategy(estimator, 1000 * GIB)
    assert problem is not None
    assert problem.least_layers == (0, 1, 1, 1, 1, 1, 1, 0)


@pytest.mark.parametrize("strategy", ["tp=8 dp=8", "pp=4 vpp=2 schedule=interleaved recompute=every:2"])
def test_nothing_is_searched_where_nothing_can_be_said(strategy: str) -> None:
    job, machines = mofa.load_workload("llama3-8b", global_batch=256), mofa.load_cluster("h100-hgx", 64)
    assert (
        split_problem_of_strategy(
            strategy_estimator(job, machines, mofa.load_framework("torchtitan"), strategy), 80 * GIB
        )
        is None
    )
