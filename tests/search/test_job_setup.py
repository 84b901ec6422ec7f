"""Switches of a framework that would change nothing of a job are refused in one line."""

from __future__ import annotations

from typing import Any

import pytest

import mofa
from mofa.search.job_setup import with_numerics

FP8 = {"precision": {"gemm": "fp8-blockwise"}}
CAPACITY = {"routing": {"capacity_factor": 1.0, "pad_to_capacity": True}}
PADDED = {"routing": {"kind": "zipf", "s": 0.5, "capacity_factor": 1.0, "pad_to_capacity": True}}


@pytest.mark.parametrize(
    ("workload", "framework", "switch", "job", "word"),
    [
        ("llama3-8b", "megatron", {"permute_fusion": False}, {}, "needs experts"),
        ("llama3-8b", "megatron", {"router_fusion": True}, {}, "needs experts"),
        ("llama3-8b", "megatron", {"router_padding": True}, FP8, "needs experts"),
        ("qwen3-30b-a3b", "megatron", {"router_padding": True}, {**FP8, **PADDED}, "pad_to_capacity"),
        ("llama3-8b", "torchtitan", {"shards_head_norms": False}, {}, "qk_norm"),
        ("deepseek-v2-lite", "torchtitan", {"repeats_keys": True}, {}, "share"),
        ("gpt3-175b", "megatron", {"fused_rope": False}, {}, "rotary"),
        ("gpt3-175b", "megatron", {"fused_swiglu": False}, {}, "SwiGLU"),
    ],
)
def test_switches_without_anything_to_act_on(
    workload: str, framework: str, switch: dict[str, Any], job: dict[str, Any], word: str
) -> None:
    given = mofa.load_workload(workload, overrides=job), mofa.load_cluster("h100-hgx", 8)
    with_numerics(*given, mofa.load_framework({"name": framework}), ())
    with pytest.raises(mofa.SpecError, match=word) as refused:
        with_numerics(*given, mofa.load_framework({"name": framework, **switch}), ())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("workload", "framework", "switch"),
    [
        ("qwen3-30b-a3b", "megatron", {"permute_fusion": False, "fused_rope": False, "fused_swiglu": False}),
        ("qwen3-30b-a3b", "megatron", {"router_fusion": True}),
        ("qwen3-30b-a3b", "torchtitan", {"shards_head_norms": False, "repeats_keys": True}),
        ("gpt3-175b", "megatron-local", {}),
    ],
)
def test_switches_with_something_to_act_on(workload: str, framework: str, switch: dict[str, Any]) -> None:
    job, machines = mofa.load_workload(workload), mofa.load_cluster("h100-hgx", 8)
    named = mofa.load_framework({"name": framework, **switch})
    assert with_numerics(job, machines, named, ())[2] == named


@pytest.mark.parametrize(
    ("workload", "routing", "graphs"),
    [
        ("llama3-8b", {}, "te"),
        ("qwen3-30b-a3b", {}, "te:attn+moe_router+moe_preprocess"),
        ("deepseek-v2-lite", {}, "te:attn+mlp+moe_router+moe_preprocess"),
        ("qwen3-30b-a3b", {"capacity_factor": 1.0, "pad_to_capacity": True}, "te"),
    ],
)
def test_graphs_hold_all_that_they_can(workload: str, routing: dict[str, Any], graphs: str) -> None:
    job = mofa.load_workload(workload, overrides={"routing": routing} if routing else {})
    found = with_numerics(job, mofa.load_cluster("h100-hgx", 8), mofa.load_framework("megatron"), ("cuda_graphs",))[2]
    assert str(found.graphs) == graphs


def test_what_a_key_offers_is_told_without_the_empty_word() -> None:
    with pytest.raises(mofa.SpecError, match=r"must be fp32 or bf16; choose one"):
        mofa.load_framework({"name": "megatron", "grads": "fp16"})


@pytest.mark.parametrize(
    ("workload", "framework", "switches", "strategy", "word"),
    [
        ("llama3-8b", {"name": "megatron"}, {}, "dispatcher=allgather", "needs experts"),
        ("llama3-8b", {"name": "torchtitan"}, {}, "tp=2 tp_overlap=true", "Transformer Engine"),
        ("llama3-8b", {"name": "megatron"}, {}, "dp_replicate=2", "needs data_parallel: hsdp"),
        ("qwen3-30b-a3b", {"name": "torchtitan"}, {}, "ep=2 dispatcher=allgather", "is not offered"),
        (
            "qwen3-30b-a3b",
            {"name": "megatron", "router_padding": True},
            FP8,
            "ep=2 dispatcher=allgather",
            "router_padding",
        ),
        (
            "qwen3-30b-a3b",
            {"name": "megatron"},
            CAPACITY,
            "ep=2 dispatcher=allgather",
            r"allgather with routing.pad_to_capacity: it is not modelled; use alltoall",
        ),
        (
            "qwen3-30b-a3b",
            {"name": "megatron", "dispatcher": "deepep"},
            CAPACITY,
            "ep=2",
            r"deepep with routing.pad_to_capacity: Megatron-Core refuses it; use alltoall",
        ),
    ],
)
def test_options_that_a_strategy_cannot_choose(
    workload: str, framework: dict[str, Any], switches: dict[str, Any], strategy: str, word: str
) -> None:
    job, machines = mofa.load_workload(workload, overrides=switches), mofa.load_cluster("h100-hgx", 8)
    with pytest.raises(mofa.StrategyError, match=word) as refused:
        mofa.estimate(job, machines, strategy, framework=mofa.load_framework(framework), replay=False)
    assert "\n" not in str(refused.value)


def test_experts_are_not_padded_beyond_the_tokens_at_hand() -> None:
    machines, framework = mofa.load_cluster("h100-hgx", 8), mofa.load_framework("megatron")
    for factor, pads in ((16.0, True), (16.1, False)):  # 8 of 128 experts
        routing = {"capacity_factor": factor, "pad_to_capacity": pads}
        with_numerics(mofa.load_workload("qwen3-30b-a3b", overrides={"routing": routing}), machines, framework, ())
    job = mofa.load_workload("qwen3-30b-a3b", overrides={"routing": {"capacity_factor": 16.1, "pad_to_capacity": True}})
    with pytest.raises(
        mofa.SpecError, match=r"capacity_factor \(16.1\) .* use at most 16 \(128 experts over 8 chosen\)"
    ):
        with_numerics(job, machines, framework, ())


def test_sequences_are_no_longer_than_what_is_learned() -> None:
    """A model that learns 2,048 positions has none for more tokens; with more of them, or rotary ones, it has."""
    machines, framework = mofa.load_cluster("h100-hgx", 8), mofa.load_framework("megatron")
    job = mofa.load_workload("gpt3-175b", seq_len=4096)
    with pytest.raises(mofa.SpecError, match=r"learns 2,048 positions .* 4,096 tokens"):
        with_numerics(job, machines, framework, ())
    with_numerics(mofa.load_workload("gpt3-175b", seq_len=2048), machines, framework, ())
    longer = mofa.load_workload("gpt3-175b", seq_len=4096, overrides={"model.max_positions": 4096})
    with_numerics(longer, machines, framework, ())
