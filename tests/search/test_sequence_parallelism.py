"""Tensor parallelism with and without sequence parallelism: neither is always faster, so that both are searched."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import mofa
from mofa.cost.estimate import estimate_table
from mofa.search.job_setup import routing_loads_by_ep
from mofa.search.legality.masks import JobAndMachines, check_strategies
from mofa.search.space import SOLVED, combinations_table, constrain_space, default_space, with_first_option_set
from mofa.specs.strategy import StrategyTable

MEGATRON = mofa.load_framework("megatron")
ROWS = 400


def random_rows(name: str, gpus: int) -> tuple[mofa.WorkloadSpec, mofa.ClusterSpec, StrategyTable]:
    job, machines = mofa.load_workload(name), mofa.load_cluster("h100-hgx", gpus)
    space = constrain_space(default_space(job, machines, MEGATRON), fix={"sp": True}, maximum={}, with_=(), without=())
    table = combinations_table(with_first_option_set(space), machines, MEGATRON)
    legal = check_strategies(JobAndMachines(job, machines, MEGATRON), table).reason < 0
    rows = np.flatnonzero(legal & (table.recompute_layers != SOLVED) & (table.tp > 1))
    return job, machines, table.select_rows(np.sort(np.random.default_rng(0).choice(rows, ROWS, replace=False)))


@pytest.mark.parametrize(("name", "gpus"), [("llama3-8b", 64), ("llama3-70b", 4096)])
def test_either_may_be_faster(name: str, gpus: int) -> None:
    job, machines, table = random_rows(name, gpus)
    loads = routing_loads_by_ep(job, table)
    split, whole = (
        estimate_table(job, machines, MEGATRON, replace(table, sp=np.full(ROWS, sp)), loads) for sp in (True, False)
    )
    assert np.any(split.step_s < 0.98 * whole.step_s) and np.any(whole.step_s < 0.98 * split.step_s)
    assert np.all(split.allocated_bytes < whole.allocated_bytes)


def test_rows_cost_alike_beside_either() -> None:
    """To the last bits: their tapes have different collectives, and are read apart."""
    job, machines, table = random_rows("llama3-8b", 64)
    table = table.select_rows(np.arange(0, ROWS, 10))
    loads = routing_loads_by_ep(job, table)
    split, whole = (replace(table, sp=np.full(len(table), sp)) for sp in (True, False))
    both = estimate_table(job, machines, MEGATRON, StrategyTable.concatenated([split, whole]), loads)
    apart = [estimate_table(job, machines, MEGATRON, some, loads) for some in (split, whole)]
    np.testing.assert_allclose(both.step_s, np.concatenate([some.step_s for some in apart]), rtol=1e-12)
    np.testing.assert_array_equal(both.device_bytes, np.concatenate([some.device_bytes for some in apart]))
    i = int(np.argmax(whole.tp))
    alone = mofa.estimate(job, machines, whole.row(i, "megatron"), replay=False)
    assert both.step_s[len(table) + i] == pytest.approx(alone.step_s, rel=1e-9)


def test_a_search_finds_the_faster() -> None:
    """Of this model on 8 ranks without their overlap that is without sequence parallelism."""
    job, machines = mofa.load_workload("llama3-8b", global_batch=256), mofa.load_cluster("h100-hgx", 256)
    found, split, whole = (
        mofa.find_plans(
            job, machines, fix={"tp": 8, "pp": 1, "cp": 1, **more}, without=("tp_overlap",), top=1, replay=False,
            banded=False,
        ).report.plans[0]
        for more in ({}, {"sp": True}, {"sp": False})
    )  # fmt: skip
    assert found.strategy == whole.strategy and not found.strategy.sp
    assert found.step_s == whole.step_s < split.step_s
