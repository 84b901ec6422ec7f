"""Buckets of gradients: as many as the replay fills, weight by weight."""

from __future__ import annotations

import numpy as np
import pytest

import mofa
from mofa.cost.rank_rules import first_reduced_bucket_params
from mofa.cost.step_time.gradient_buckets import first_chunk_buckets
from mofa.replay.rank.from_estimator import gathered_row_of_strategy
from mofa.replay.time.computation_tapes import PlanTapes
from mofa.replay.time.data_parallel import DataParallelSharedByRanks, _Rank
from mofa.schedules import computation_order_of
from mofa.search.strategy_estimator import strategy_estimator


@pytest.mark.parametrize(
    ("workload", "strategy"),
    [("llama3-8b", "tp=2"), ("llama3-70b", "tp=4 pp=4"), ("mixtral-8x7b", "tp=2 ep=4"), ("deepseek-v2-lite", "ep=8")],
)
def test_as_many_as_the_replay_fills(workload: str, strategy: str) -> None:
    job = mofa.load_workload(workload, global_batch=64, seq_len=1024)
    estimator = strategy_estimator(job, mofa.load_cluster("h100-hgx", 64), mofa.load_framework("megatron"), strategy)
    rows, spec = gathered_row_of_strategy(estimator), estimator.rank_specs[0]
    num = int(rows.num_micro_batches[0])
    order = computation_order_of(rows.schedule, rows.framework.traits.runtime, rows.stage_layers.stages.pp, 1, num)
    rank = _Rank(rows, PlanTapes.from_rows(rows), spec, order, DataParallelSharedByRanks())
    size = float(first_reduced_bucket_params(rows)[0])
    played = rank.buckets(0, size)
    filled = first_chunk_buckets(rows, np.array([size]), experts_separate=True)
    assert abs(filled.dense[0] - sum(bucket.dense > 0 for bucket in played)) <= 1
    assert abs(filled.expert[0] - max(sum(bucket.expert > 0 for bucket in played), 1)) <= 1


def test_without_overlap_there_is_one_buffer() -> None:
    """Megatron-Core 0.16.1, distributed_data_parallel.py: ``bucket_size = None``."""
    job = mofa.load_workload("llama3-8b", global_batch=64, seq_len=1024)
    framework = mofa.load_framework("megatron", overrides={"overlap_grad_reduce": False, "overlap_param_gather": False})
    rows = gathered_row_of_strategy(strategy_estimator(job, mofa.load_cluster("h100-hgx", 8), framework, "tp=2"))
    assert first_chunk_buckets(rows, first_reduced_bucket_params(rows), experts_separate=True).dense.tolist() == [1.0]


def test_a_layout_fills_buckets_of_its_own() -> None:
    """Layouts of one strategy share their weights, and clocks of one layout share all."""
    job, machines = mofa.load_workload("llama3-8b", global_batch=64, seq_len=1024), mofa.load_cluster("h100-hgx", 64)
    estimator = strategy_estimator(job, machines, mofa.load_framework("megatron"), "tp=2 pp=4")
    size, numbers = np.array([40e6]), []
    for layout in ("Et*8|t*8|t*8|t*8L", "Et*2|t*10|t*10|t*10L"):
        rows = gathered_row_of_strategy(estimator.with_layout(layout, -1))
        filled, again = (first_chunk_buckets(rows, size, experts_separate=True) for _ in range(2))
        assert again is filled
        numbers.append(float(filled.dense[0]))
    assert numbers[0] > numbers[1]
