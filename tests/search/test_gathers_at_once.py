"""Where Megatron may gather parameters behind the optimizer: searched where a step may be shorter, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import mofa
from mofa.cost.estimate import estimate_table
from mofa.search.job_setup import routing_loads_by_ep
from mofa.search.legality.masks import JobAndMachines, check_strategies
from mofa.search.space import (
    SOLVED,
    combinations_table,
    default_space,
    gathers_at_once_without_gain,
    with_first_option_set,
)
from mofa.specs.strategy import FrameworkOptions

MEGATRON = mofa.load_framework("megatron")
AT_ONCE = FrameworkOptions(overlap_param_gather=False)
ROWS = 1_500


@pytest.mark.parametrize(
    ("name", "cluster", "gpus"),
    [("llama3-405b", "h100-hgx", 1024), ("deepseek-v3", "h800-hgx", 16384), ("mixtral-8x22b", "h100-hgx", 256)],
)
def test_only_1f1b_may_gain(name: str, cluster: str, gpus: int) -> None:
    job, machines = mofa.load_workload(name), mofa.load_cluster(cluster, gpus)
    space = with_first_option_set(default_space(job, machines, MEGATRON))
    table = combinations_table(space, machines, MEGATRON)
    legal = check_strategies(JobAndMachines(job, machines, MEGATRON), table).reason < 0
    rows = np.flatnonzero(legal & (table.recompute_layers != SOLVED))
    table = table.select_rows(np.sort(np.random.default_rng(0).choice(rows, ROWS, replace=False)))
    loads = routing_loads_by_ep(job, table)
    beside, at_once = (
        estimate_table(job, machines, MEGATRON.with_options(options), table, loads)
        for options in (FrameworkOptions(), AT_ONCE)
    )
    assert np.array_equal(beside.device_bytes, at_once.device_bytes)
    both = replace(space, options=(FrameworkOptions(), AT_ONCE))
    chosen = np.ones(len(table), dtype=np.int64)
    needless = gathers_at_once_without_gain(both, chosen, table.tp, table.pp, table.vpp, gpus)
    assert needless.any() and np.all(at_once.step_s[needless] >= beside.step_s[needless] * (1.0 - 1e-12))
    assert np.any(at_once.step_s[~needless] < 0.98 * beside.step_s[~needless])


def test_it_is_searched_for_one_chunk_a_stage_alone() -> None:
    job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 16)
    table = combinations_table(default_space(job, machines, MEGATRON), machines, MEGATRON)
    at_once = np.array([options.overlap_param_gather is False for options in table.option_sets])[table.options]
    assert at_once.any() and np.all((table.pp > 1) & (table.vpp == 1) & (table.tp * table.pp < 16) | ~at_once)
    for given in ({"overlap_param_gather": False}, {"data_parallel": "ddp"}):
        space = default_space(job, machines, mofa.load_framework("megatron", overrides=given))
        assert {options.overlap_param_gather for options in space.options} == {None}
    fixed = mofa.find_plans(job, machines, fix={"overlap_param_gather": False}, top=1, replay=False, banded=False)
    assert fixed.report.plans[0].strategy.overlap_param_gather is False


def test_a_search_takes_it_where_stages_would_gather_one_after_the_other() -> None:
    job, machines = mofa.load_workload("llama3-70b"), mofa.load_cluster("h100-hgx", 512)
    asked = {"fix": {"vpp": 1}, "top": 1, "replay": False, "banded": False, "closed_form_margin": False}
    (searched,), (as_given,) = (
        mofa.find_plans(job, machines, without=without, **asked).report.plans
        for without in (["fewer_gpus"], ["fewer_gpus", "overlap_param_gather"])
    )
    assert searched.strategy.overlap_param_gather is False and as_given.strategy.overlap_param_gather is None
    assert 0.98 < searched.step_s / as_given.step_s < 0.995
