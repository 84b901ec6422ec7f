"""A row of a table costs what the strategy costs by itself, over samples of the default space of every framework."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import mofa
from mofa.cost.estimate import TableEstimator
from mofa.replay.rank.from_estimator import gathered_row_of_strategy
from mofa.search.job_setup import routing_loads_by_ep, with_numerics
from mofa.search.legality.masks import JobAndMachines, check_strategies
from mofa.search.one_strategy import checked_strategy_row
from mofa.search.space import SOLVED, combinations_table, default_space, with_first_option_set
from mofa.search.strategy_estimator import strategy_estimator
from mofa.specs.strategy import BALANCING, StrategyTable

SAMPLE = 2
"""Rows of each kind that are costed alone too. [-]"""
BESIDE = 100
"""Random rows that the same table has besides. [-]"""
OPTIONS: dict[str, dict[str, object]] = {
    "compile": {"compile": True}, "hsdp": {"data_parallel": "hsdp", "dp_replicate": 8},
    "tp_overlap": {"tp_overlap": True},
}  # fmt: skip


def candidates(workload: str, node: str, gpus: int, name: str) -> tuple[JobAndMachines, StrategyTable]:
    """Legal rows of the default space, with scheduled experts where the framework has them; ``name`` may name one of
    :data:`OPTIONS` behind the framework."""
    name, _, option = name.partition(" ")
    job, machines = mofa.load_workload(workload), mofa.load_cluster(node, gpus)
    job, machines, framework = with_numerics(
        job, machines, mofa.load_framework(name, overrides=OPTIONS.get(option)), ()
    )
    space = with_first_option_set(default_space(job, machines, framework))
    if name == "megatron" and job.model.moe is not None:
        space = replace(space, balancing=BALANCING)
    table = combinations_table(space, machines, framework)
    legal = (check_strategies(JobAndMachines(job, machines, framework), table).reason < 0) & (
        table.recompute_layers != SOLVED
    )
    return JobAndMachines(job, machines, framework), table.select_rows(np.flatnonzero(legal))


def sampled(table: StrategyTable, seed: int) -> tuple[StrategyTable, list[int]]:
    """A part of the table, and rows of it: some at random, some pipelined, some scheduled, some with experts over all
    ranks, and of each recomputation some with experts apart."""
    rng = np.random.default_rng(seed)
    apart = (table.ep > 1) & (table.pp == 1)
    everywhere = apart & (table.ep * table.etp == table.tp * table.cp * table.dp)
    some = [np.arange(len(table)), *(np.flatnonzero(x) for x in (table.pp > 1, table.balancing > 0, everywhere))]
    some += [np.flatnonzero(apart & (table.recompute == mode)) for mode in range(len(table.recompute_modes))]
    picked = {int(i) for rows in some for i in rng.permutation(rows)[:SAMPLE]}
    part = sorted(picked | {int(i) for i in rng.permutation(len(table))[:BESIDE]})
    return table.select_rows(np.array(part)), [part.index(i) for i in sorted(picked)]


@pytest.mark.parametrize(
    ("workload", "node", "gpus", "name"),
    [
        ("llama3-8b", "h100-hgx", 8, "megatron"),
        ("gpt-oss-120b", "h100-hgx", 16, "megatron"),
        ("qwen3-30b-a3b", "h100-hgx", 16, "megatron"),
        ("mixtral-8x7b", "h100-hgx", 16, "megatron-local"),
        ("gpt3-175b", "a100-hgx", 64, "megatron-2022"),
        ("deepseek-v2-lite", "h100-hgx", 16, "torchtitan"),
        ("qwen3-30b-a3b", "h100-hgx", 8, "torchtitan"),
        ("llama3-8b", "h200-hgx", 1, "torchtitan"),
        ("llama3-8b", "h100-hgx", 8, "fsdp1"),
        ("llama3-8b", "h100-hgx", 16, "torchtitan compile"),
        ("qwen3-30b-a3b", "h100-hgx", 16, "torchtitan compile"),
        ("gpt-oss-120b", "h100-hgx", 64, "torchtitan hsdp"),
        ("llama3-8b", "h100-hgx", 16, "megatron tp_overlap"),
    ],
)
def test_a_row_costs_what_it_costs_alone(workload: str, node: str, gpus: int, name: str) -> None:
    """Seconds and bytes of every component and stage, although the other rows of the table have other recomputation
    modes, other groups and other absent ops in the same tapes."""
    job, legal = candidates(workload, node, gpus, name)
    table, rows = sampled(legal, seed=gpus)
    loads = routing_loads_by_ep(job.workload, table)
    whole = TableEstimator(job.workload, job.cluster, job.framework, table, loads)
    assert len(rows) >= min(SAMPLE, len(table))
    together = whole.breakdown(np.array(rows))  # some of them late hosts' and others not, in one pass
    for at, i in enumerate(rows):
        one = TableEstimator(
            job.workload, job.cluster, job.framework, table.select_rows(np.array([i])), loads
        ).breakdown(detail=True)
        row = whole.breakdown(np.array([i]), detail=True)
        assert row.detail is not None
        assert one.detail is not None
        said = str(table.row(i, job.framework.name))
        close = {"rtol": 1e-9, "err_msg": said}
        np.testing.assert_allclose(row.exposed_s, one.exposed_s, atol=1e-9 * float(one.step_s[0]), **close)  # type: ignore[call-overload]
        np.testing.assert_allclose(row.hidden_s, one.hidden_s, atol=1e-9 * float(one.step_s[0]), **close)  # type: ignore[call-overload]
        byte = 1e-9 * float(one.device_bytes[0])
        np.testing.assert_allclose(row.memory_bytes, one.memory_bytes, atol=byte, **close)  # type: ignore[call-overload]
        np.testing.assert_allclose(row.detail.components_bytes, one.detail.components_bytes, atol=byte, **close)  # type: ignore[call-overload]
        np.testing.assert_allclose(row.detail.time_s, one.detail.time_s, **close)  # type: ignore[call-overload]
        np.testing.assert_allclose(row.hardware_flops, one.hardware_flops, **close)  # type: ignore[call-overload]
        alike = whole.breakdown(np.array([i]))  # of stages with the same layers the first alone
        np.testing.assert_allclose(alike.exposed_s, row.exposed_s, atol=1e-12 * float(row.step_s[0]), **close)  # type: ignore[call-overload]
        np.testing.assert_allclose(alike.memory_bytes, row.memory_bytes, atol=1e-3, **close)  # type: ignore[call-overload]
        assert (alike.fullest_stage[0], alike.slowest_stage[0]) == (row.fullest_stage[0], row.slowest_stage[0])
        assert alike.instant_names[alike.instant[0]] == row.instant_names[row.instant[0]]
        np.testing.assert_allclose(  # type: ignore[call-overload]
            together.exposed_s[:, at], row.exposed_s[:, 0], atol=1e-9 * float(row.step_s[0]), **close
        )
        np.testing.assert_allclose(together.memory_bytes[:, at], row.memory_bytes[:, 0], atol=byte, **close)  # type: ignore[call-overload]
        memory = whole.device_bytes_of_rows(np.array([i]), table.recompute_layers[i : i + 1])
        np.testing.assert_allclose(memory, row.device_bytes, **close)  # type: ignore[call-overload]


def test_a_chunk_has_its_experts_and_the_last_one_those_of_the_layer_that_predicts_on() -> None:
    """DeepSeek-V3's layers in chunks of 16 and 17 on the first rank, the first three dense, 16 and 12 on the second and
    a layer of multi-token prediction behind the last; an expert is three matrices of 7,168 x 2,048, and a rank holds 16
    of 256 in each layer."""
    job, machines = mofa.load_workload("deepseek-v3"), mofa.load_cluster("h200-hgx", 64)
    estimator = strategy_estimator(job, machines, mofa.load_framework("megatron"), "pp=2 vpp=2 ep=16 micro_batch=1")
    rows = gathered_row_of_strategy(estimator)
    dense, expert = rows.params
    assert (expert[0] / (16 * 3 * 7168 * 2048)).tolist() == [[16 - 3, 17], [16, 12 + 1]]
    np.testing.assert_allclose(rows.shards.dense, dense.sum(axis=2))


def test_a_row_whose_ranks_have_heads_is_the_same_beside_one_whose_ranks_share_them() -> None:
    """Qwen3 30B has four key-value heads: four ranks gather no product of queries, keys and values, eight do.

    The largest tensor of a layer bounds what the embedding's backward finds room in.
    """
    job, machines = mofa.load_workload("qwen3-30b-a3b"), mofa.load_cluster("h100-hgx", 16)
    framework = mofa.load_framework("megatron")
    alone, other = (
        checked_strategy_row(job, machines, framework, f"tp={tp} pp=2 ep=8 etp=1 micro_batch=8 recompute=selective:moe")
        for tp in (4, 8)
    )
    one, row = (
        TableEstimator(job, machines, framework, table, routing_loads_by_ep(job, table)).breakdown(np.array([0]))
        for table in (alone, StrategyTable.concatenated([alone, other]))
    )
    assert row.device_bytes[0] == one.device_bytes[0]
