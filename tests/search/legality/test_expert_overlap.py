"""Forwards beside backwards run where Megatron-Core 0.16.1 asserts nothing against them (transformer_config.py)."""

from __future__ import annotations

import re
from typing import Any

import pytest

import mofa
from mofa.errors import SpecError, StrategyError
from mofa.search.legality.expert_overlap import CONDITIONS
from mofa.search.legality.masks import CHECKS, JobAndMachines, check_strategies
from mofa.search.one_strategy import checked_strategy_row
from mofa.search.space import combinations_table, constrain_space, default_space
from mofa.specs.strategy import FrameworkOptions

ASSERTED = {
    (1857, 1861): "virtual_pipeline_model_parallel_size must be specified when pipeline_model_parallel_size > 1",
    (1863, 1865): "only supported with expert model parallelism",
    (1866, 1869): "supported with alltoall/flex token dispatcher",
    (1871, 1879): "disable full recomputation; recomputation method and recompute_num_layers must be None",
    (1882, 1884): "only supported with bf16 or fp16 model",
    (1889, 1891): "MTP layernum only supports 1",
    (1892, 1896): "Pipeline model parallel size must be larger than 1 with MTP layer",
}
"""The assertions by their lines, in short. That of shared experts' overlap (1886 to 1888) refuses options, whatever the
strategy; PyTorch's version (1854 to 1856) is that of every run here; CUDA graphs (1898 to 1906) are not modelled."""
QWEN = "qwen3-30b-a3b"


def row(strategy: str, model: str = QWEN, options: dict[str, Any] | None = None, **changes: Any) -> None:
    workload = mofa.load_workload(model, global_batch=256, overrides=changes or None)
    facts = mofa.load_framework("megatron", {"expert_overlap": "combined", **(options or {})})
    checked_strategy_row(workload, mofa.load_cluster("h100-hgx", 64), facts, strategy)


def test_each_assertion_has_its_condition() -> None:
    assert {condition.lines for condition in CONDITIONS if condition.lines} == set(ASSERTED)


@pytest.mark.parametrize(
    "strategy", ["ep=8", "ep=8 dispatcher=deepep", "pp=2 vpp=2 ep=8", "ep=8 recompute=selective:moe_act+layernorm"]
)
def test_what_is_asserted_nothing_against_is_legal(strategy: str) -> None:
    row(f"micro_batch=1 {strategy}")
    row(f"micro_batch=1 {strategy}", options={"delay_wgrad": True})


@pytest.mark.parametrize(
    ("strategy", "changes", "said"),
    [
        ("pp=2 ep=8", {}, "needs vpp above 1"),
        ("ep=1", {}, "ep (1) must be above 1"),
        ("ep=8 dispatcher=allgather", {}, "dispatcher (allgather) must be alltoall or deepep"),
        ("ep=8 recompute=full", {}, "recompute (full) recomputes layers whole"),
        ("ep=8 recompute=full:1", {}, "recomputes layers whole"),
        ("ep=8 recompute=selective:moe", {}, "recompute of the module moe never runs"),
        ("ep=8 token_chunks=2", {}, "token_chunks and balancing are not modelled"),
        ("ep=8 balancing=micro_moe", {}, "token_chunks and balancing are not modelled"),
        ("ep=8", {"model.num_mtp_layers": 1}, "multi-token-prediction layer needs pp above 1"),
        ("pp=2 vpp=2 ep=8", {"model.num_mtp_layers": 2}, "2 multi-token-prediction layers, one at most"),
    ],
)
def test_each_is_one_line(strategy: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(StrategyError, match=re.escape(said)) as error:
        row(f"micro_batch=1 {strategy}", **changes)
    assert "expert_overlap" in str(error.value) and "\n" not in str(error.value)


def test_dense_models_have_nothing_to_hide() -> None:
    with pytest.raises(StrategyError, match="of a model with experts"):
        row("tp=2 micro_batch=1", model="llama3-8b")


@pytest.mark.parametrize(
    ("framework", "options", "said"),
    [
        ("megatron", {"delay_wgrad": True}, "delay_wgrad (true) needs expert_overlap: combined"),
        ("torchtitan", {"expert_overlap": "combined"}, "modelled for megatron, not for torchtitan"),
        ("megatron", {"expert_overlap": "combined", "experts": "sequential"}, "modelled for grouped experts"),
        ("megatron", {"expert_overlap": "dualpipe"}, "expert_overlap"),
        ("megatron", {"expert_overlap": "combined", "shared_expert_overlap": True}, "leave one of them out"),
        ("torchtitan", {"shared_expert_overlap": True}, "modelled for megatron, not for torchtitan"),
    ],
)
def test_options_that_cannot_be_together_are_refused(framework: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=re.escape(said)):
        mofa.load_framework(framework, options)


@pytest.mark.parametrize(
    ("model", "strategy", "said"),
    [
        (QWEN, "ep=8", "has no shared experts"),
        ("deepseek-v2-lite", "ep=8 dispatcher=deepep", "dispatcher (deepep) must be alltoall"),
        ("deepseek-v2-lite", "ep=8 recompute=selective:shared_experts", "module shared_experts cannot work"),
        ("deepseek-v2-lite", "ep=8 recompute=full", "recomputing layers of experts whole"),
    ],
)
def test_shared_experts_have_conditions_of_their_own(model: str, strategy: str, said: str) -> None:
    """transformer_config.py, lines 1090 to 1095 and 1232 to 1239."""
    options = {"expert_overlap": "none", "shared_expert_overlap": True}
    row("ep=8 micro_batch=1", model="deepseek-v2-lite", options=options)
    with pytest.raises(StrategyError, match=re.escape(said)):
        row(f"micro_batch=1 {strategy}", model=model, options=options)


def test_a_search_masks_rows_by_name() -> None:
    """Rows that are illegal are counted under ``expert_overlap``; a dispatcher that a row chooses is no exception."""
    workload, cluster = mofa.load_workload(QWEN, global_batch=128), mofa.load_cluster("h100-hgx", 16)
    facts = mofa.load_framework("megatron", {"expert_overlap": "combined"})
    space = constrain_space(
        default_space(workload, cluster, facts), fix={"tp": 1, "cp": 1}, maximum={}, with_=(), without=()
    )
    table = combinations_table(space, cluster, facts)
    verdict = check_strategies(JobAndMachines(workload, cluster, facts), table)
    mine = next(i for i, check in enumerate(CHECKS) if check.reason == "expert_overlap")
    assert (verdict.reason == mine).any() and (verdict.reason < 0).any()
    legal = table.select_rows(verdict.reason < 0)
    assert (legal.ep > 1).all() and ((legal.pp == 1) | (legal.vpp > 1)).all()
    allgather = table.option_sets.index(FrameworkOptions(dispatcher="allgather"))
    assert not (legal.options == allgather).any()
