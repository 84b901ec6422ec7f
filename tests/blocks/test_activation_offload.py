"""Activations on the host: what each module copies, where the copies stand, and what leaves the device."""

from __future__ import annotations

from typing import Any

import pytest

import mofa
from mofa.blocks.build import BlockTapes
from mofa.blocks.op import OFFLOAD_STREAM, RELOAD_STREAM, Op
from mofa.blocks.tapes import kept_layer_label
from mofa.blocks.work import HostCopy
from mofa.cost.estimate import TableEstimator
from mofa.search.job_setup import routing_loads_by_ep
from mofa.search.one_strategy import checked_strategy_row
from mofa.specs.workload import WorkloadSpec

MIB = 2**20
TOKENS = 8192


def tapes_of(workload: WorkloadSpec, offload: str, strategy: str = "micro_batch=1") -> dict[str, BlockTapes]:
    cluster = mofa.load_cluster("h200-hgx", 1)
    framework = mofa.load_framework("megatron", {"activation_offload": offload})
    row = checked_strategy_row(workload, cluster, framework, strategy)
    estimator = TableEstimator(workload, cluster, framework, row, routing_loads_by_ep(workload, row))
    return dict(estimator.row_with_every_stage.costs.tapes)


def llama(**overrides: Any) -> WorkloadSpec:
    changes = {"model.num_layers": 2, **overrides}
    return mofa.load_workload("llama3-8b", seq_len=TOKENS, global_batch=1, overrides=changes)


def qwen() -> WorkloadSpec:
    return mofa.load_workload("qwen3-30b-a3b", seq_len=TOKENS, global_batch=1, overrides={"model.num_layers": 2})


def deepseek() -> WorkloadSpec:
    return mofa.load_workload("deepseek-v2-lite", seq_len=TOKENS, global_batch=1, overrides={"model.num_layers": 2})


def copied(block: BlockTapes, module: str) -> dict[str, float]:
    """What a forward copies of a module, by tensor. [MiB]"""
    ops = [op for op in block.forward.ops if op.stream == OFFLOAD_STREAM and f" of {module} " in op.name]
    return {op.reads[0]: op.work.bytes / MIB for op in ops if isinstance(op.work, HostCopy)}


# 8,192 tokens in 2 bytes: 4,096 columns are 64 MiB, 1,024 of keys or values 16 MiB
@pytest.mark.parametrize(
    ("module", "mib"),
    [
        ("qkv_linear", {"x": 64.0, "attn_norm.out": 64.0}),
        ("core_attn", {"q.rope": 64.0, "k.rope": 16.0, "v": 16.0, "attn.out": 64.0}),
        ("attn_proj", {"attn.out": 64.0}),
    ],
)
def test_a_dense_layer_copies_what_each_module_saves(module: str, mib: dict[str, float]) -> None:
    block = tapes_of(llama(), "qkv_linear+core_attn+attn_proj")["dense recompute=none"]
    assert copied(block, module) == mib


# 8 of 128 experts: 65,536 rows of 2,048 columns; gate and up of 768 each; 32 query and 4 key heads of 128
@pytest.mark.parametrize(
    ("module", "mib"),
    [
        ("mlp_norm", {"mid": 32.0}),
        ("expert_fc1", {"moe.sorted": 256.0}),
        ("moe_act", {"experts.fc1": 192.0}),
        ("qkv_linear", {"x": 32.0, "attn_norm.out": 32.0, "q.heads": 64.0, "k_norm.together": 8.0}),
    ],
)
def test_a_layer_of_experts_copies_their_rows(module: str, mib: dict[str, float]) -> None:
    block = tapes_of(qwen(), "qkv_linear+mlp_norm+expert_fc1+moe_act")["moe recompute=none"]
    assert copied(block, module) == mib


def test_latent_attention_has_a_norm_apart() -> None:
    block = tapes_of(deepseek(), "attn_norm+qkv_linear")["moe recompute=none"]
    assert copied(block, "attn_norm") == {"x": 32.0}
    # 512 latent columns; q of 16 heads of 192 is attention's, and what is rotated of keys is too small
    assert copied(block, "qkv_linear") == {"attn_norm.out": 32.0, "kv.latent_copy": 8.0, "kv_norm.out": 8.0}


def test_small_tensors_stay_on_the_device() -> None:
    short = mofa.load_workload("llama3-8b", seq_len=512, global_batch=1, overrides={"model.num_layers": 2})
    block = tapes_of(short, "core_attn")["dense recompute=none"]
    assert copied(block, "core_attn") == {"q.rope": 4.0, "attn.out": 4.0}  # 2^19 elements of keys are below 2^20


def index(ops: tuple[Op, ...], name: str) -> int:
    return next(i for i, op in enumerate(ops) if op.name == name)


def test_norms_go_behind_their_residual_addition_and_come_back_for_the_layer_below() -> None:
    block = tapes_of(qwen(), "mlp_norm+moe_act")["moe recompute=none"]
    forward, backward = block.forward.ops, block.backward.ops
    assert index(forward, "mid of mlp_norm to host") == index(forward, "out.add") + 1
    assert index(forward, "experts.fc1 of moe_act to host") == index(forward, "experts.fc2") + 1
    coming = index(backward, "experts.fc1 of moe_act to device")
    assert backward[coming].stream == RELOAD_STREAM
    reads = [i for i, op in enumerate(backward) if "experts.fc1 of moe_act" in op.reads]
    assert reads and max(reads) < coming  # this layer's are there before the next ones are asked for


def test_no_backward_reads_on_the_device_what_its_module_offloads() -> None:
    block = tapes_of(llama(), "qkv_linear+core_attn+attn_proj")["dense recompute=none"]
    gone = {"x", "attn_norm.out", "q.rope", "k.rope", "v", "attn.out"}
    assert not gone & {name for op in block.backward.ops for name in op.reads}
    alone = tapes_of(llama(), "core_attn")["dense recompute=none"]
    kept = gone & {name for op in alone.backward.ops for name in op.reads}
    assert kept == {"x", "attn_norm.out", "attn.out"}  # the projection has attention's output still


def test_the_last_layer_keeps_its_own_and_asks_for_the_one_below() -> None:
    tapes = tapes_of(llama(), "core_attn")
    kept, plain = tapes[kept_layer_label("dense recompute=none")], tapes_of(llama(), "none")["dense recompute=none"]
    assert not any(op.stream == OFFLOAD_STREAM for op in kept.forward.ops)
    assert [op.name for op in kept.forward.ops] == [op.name for op in plain.forward.ops]
    assert sum(op.stream == RELOAD_STREAM for op in kept.backward.ops) == 4


def test_recomputed_ops_read_what_came_back() -> None:
    tapes = tapes_of(qwen(), "mlp_norm+moe_act", "micro_batch=1 recompute=selective:moe_act+layernorm")
    backward = tapes["moe recompute=selective:layernorm+moe_act"].backward.ops
    again = {op.origin: op.reads for op in backward if op.repeated}
    assert again["mlp_norm"][0] == "mid of mlp_norm" and again["experts.activation"][0] == "experts.fc1 of moe_act"


def test_without_it_tapes_are_as_they_were() -> None:
    tapes = tapes_of(llama(), "none")
    ops = [op for block in tapes.values() for tape in (block.forward, block.backward) for op in tape.ops]
    assert not any(isinstance(op.work, HostCopy) for op in ops)
    assert not any(label.endswith("kept") for label in tapes)
