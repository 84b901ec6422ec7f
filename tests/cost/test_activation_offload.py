"""Activations on the host: the seconds that they cost, the bytes that they save, and what cannot be."""

from __future__ import annotations

from typing import Any

import pytest

import mofa
from mofa.errors import MofaError, SpecError, StrategyError
from mofa.plan.result import Plan
from mofa.specs.activation_offload import ActivationOffload
from mofa.specs.framework import FrameworkSpec
from mofa.specs.workload import WorkloadSpec

MIB = 2**20
ALL = "qkv_linear+core_attn+attn_proj"
EXPERTS = "expert_fc1+moe_act"
LATENT = "attn_norm+qkv_linear+core_attn+attn_proj+mlp_norm+expert_fc1+moe_act"


def dense(layers: int = 4, seq_len: int = 8192, **overrides: Any) -> WorkloadSpec:
    changes = {"model.num_layers": layers, **overrides}
    return mofa.load_workload("llama3-8b", seq_len=seq_len, global_batch=4, overrides=changes)


def experts(layers: int = 4) -> WorkloadSpec:
    return mofa.load_workload("qwen3-30b-a3b", seq_len=8192, global_batch=4, overrides={"model.num_layers": layers})


def offloading(modules: str, **options: Any) -> FrameworkSpec:
    return mofa.load_framework("megatron", {"activation_offload": modules, **options})


def planned(
    modules: str, workload: WorkloadSpec | None = None, strategy: str = "micro_batch=1", gpus: int = 1, **how: Any
) -> Plan:
    cluster = mofa.load_cluster("h200-hgx", gpus)
    return mofa.estimate(workload or dense(), cluster, strategy, framework=offloading(modules), **how)


@pytest.mark.parametrize("replay", [False, True])
def test_all_layers_but_the_last_give_up_what_they_saved(replay: bool) -> None:
    layers = 4
    saved = [planned(modules, dense(layers), replay=replay).memory.allocated_bytes for modules in ("none", ALL)]
    each = 64 + 64 + 64 + 16 + 16 + 64  # x, normed x, q, k, v, and attention's output once
    assert (saved[0] - saved[1]) / MIB == pytest.approx((layers - 1) * each, abs=8.0)


def test_attention_alone_keeps_its_output_for_the_projection() -> None:
    saved = [planned(modules, replay=False).memory.allocated_bytes for modules in ("none", "core_attn", ALL)]
    assert (saved[0] - saved[1]) / MIB == pytest.approx(3 * (64 + 16 + 16), abs=8.0)
    assert saved[2] < saved[1]


@pytest.mark.parametrize("replay", [False, True])
def test_copies_that_compute_covers_cost_no_time(replay: bool) -> None:
    steps = [planned(modules, replay=replay).step_s for modules in ("none", ALL)]
    assert steps[1] == pytest.approx(steps[0], rel=2e-3)


@pytest.mark.parametrize("replay", [False, True])
def test_what_the_link_takes_longer_than_computing_is_waited_for(replay: bool) -> None:
    """Of 8,192 tokens 6 experts' rows: 192 MiB of inputs and 264 of activations in each of three layers, beside what is
    saved of attention and of norms. Out they go beside a forward, back one way: a step takes no less than that."""
    job = mofa.load_workload("deepseek-v2-lite", seq_len=8192, global_batch=4, overrides={"model.num_layers": 5})
    plain, slow = (planned(modules, job, replay=replay) for modules in ("none", LATENT))
    link = mofa.load_cluster("h200-hgx", 1).gpu.host_link_bytes_per_s.value
    of_experts, of_all = 192 + 264, 272 + 32
    back_s = 4 * (3 * (of_experts + of_all) + of_all - 32) * MIB / link
    waited_s = slow.time.exposed["memory_bound"] - plain.time.exposed["memory_bound"]
    assert 0.0 < waited_s < 2.0 * back_s
    assert slow.step_s > max(back_s, plain.step_s + 0.9 * waited_s)


@pytest.mark.parametrize(
    ("workload", "modules", "strategy", "gpus"),
    [
        (dense(), ALL, "micro_batch=1", 1),
        (dense(8), ALL, "pp=2 micro_batch=1", 2),
        (dense(8), "core_attn", "pp=2 vpp=2 micro_batch=1", 2),
        (dense(4), ALL, "tp=2 micro_batch=1", 2),
        (experts(), EXPERTS, "micro_batch=1", 1),
        (experts(), "mlp_norm+moe_act", "micro_batch=1 recompute=selective:moe_act+layernorm", 1),
        (experts(), EXPERTS, "ep=2 micro_batch=1", 2),
    ],
)
def test_closed_forms_are_near_the_replay(workload: WorkloadSpec, modules: str, strategy: str, gpus: int) -> None:
    closed, played = (planned(modules, workload, strategy, gpus, replay=replay) for replay in (False, True))
    assert closed.step_s == pytest.approx(played.step_s, rel=0.04)  # it has the last layer wait as well
    assert closed.memory.allocated_bytes == pytest.approx(played.memory.allocated_bytes, rel=0.01)
    assert closed.memory.reserved_bytes == pytest.approx(played.memory.reserved_bytes, rel=0.09)


def test_kernels_rest_on_what_they_do_without() -> None:
    """Copies are no kernels of a library, and the layer that keeps its own is one of the model's layers."""
    cluster = mofa.load_cluster("h100-hgx", 8)  # whose kernels were measured under Transformer Engine
    curves = cluster.gpu.curves.model_copy(update={"power_limit": None})  # shorter steps gain more by their optimizer
    gpu = cluster.gpu.model_copy(update={"curves": curves})
    cluster = cluster.model_copy(update={"gpu": gpu})
    without, offloaded = (
        mofa.estimate(dense(), cluster, "tp=8", framework=offloading(modules), replay=False).library_fraction or {}
        for modules in ("none", ALL)
    )
    assert without["gemm"] > 0.0
    assert offloaded["memory_bound"] / offloaded["gemm"] == pytest.approx(without["memory_bound"] / without["gemm"])


def test_early_stages_give_up_what_several_micro_batches_keep() -> None:
    """Of two stages the first has two micro-batches in flight, none of whose layers keeps its own."""
    saved = [planned(modules, dense(8), "pp=2 micro_batch=1", 2).memory.by_stage for modules in ("none", ALL)]
    first, last = (before.allocated_bytes - after.allocated_bytes for before, after in zip(*saved, strict=True))
    assert first > 2.0 * last
    assert first / MIB == pytest.approx((2 * 4 - 1) * 288, rel=0.06)  # but what is back for the backward at the peak


def test_a_node_holds_only_what_fits_its_memory() -> None:
    cluster = mofa.load_cluster("h200-hgx", 8)
    small = cluster.node.host_memory_bytes.model_copy(update={"value": 10e9})
    cluster = cluster.model_copy(update={"node": cluster.node.model_copy(update={"host_memory_bytes": small})})
    job = mofa.load_workload("llama3-8b", seq_len=8192, global_batch=8, overrides={"model.num_layers": 8})
    with pytest.raises(SpecError, match=r"a node would pin .* for activations and has 9.31 GiB"):
        mofa.estimate(job, cluster, "micro_batch=1", framework=offloading(ALL), replay=False)


def test_what_a_node_has_of_the_optimizer_is_no_room_for_activations() -> None:
    """41.7 GiB of the optimizer and 22.0 GiB of activations, each of which 50 GB would hold alone."""
    cluster = mofa.load_cluster("h200-hgx", 8)
    small = cluster.node.host_memory_bytes.model_copy(update={"value": 50e9})
    cluster = cluster.model_copy(update={"node": cluster.node.model_copy(update={"host_memory_bytes": small})})
    job = mofa.load_workload("llama3-8b", seq_len=8192, global_batch=8, overrides={"model.num_layers": 8})
    both = offloading(ALL).model_copy(update={"optimizer_offload": 1.0})
    for framework in (offloading(ALL), offloading("none").model_copy(update={"optimizer_offload": 1.0})):
        assert mofa.estimate(job, cluster, "micro_batch=1", framework=framework, replay=False).memory.fits
    with pytest.raises(SpecError, match=r"would pin .* has 46.57 GiB, of which the optimizer takes .*; offload fewer"):
        mofa.estimate(job, cluster, "micro_batch=1", framework=both, replay=False)


@pytest.mark.parametrize(
    ("modules", "named"),
    [
        ("attn_proj", "add core_attn"),  # transformer_config.py:1287
        ("mlp", "mlp is no module"),  # 1282
        ("", "nothing is no module"),
        ("core_attn+core_attn", "twice"),
    ],
)
def test_what_megatron_asserts_is_refused(modules: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ActivationOffload.parse(modules)


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("torchtitan", {"activation_offload": "core_attn"}, "option of megatron, not of torchtitan"),
        ("megatron-local", {"activation_offload": "core_attn"}, "option of megatron, not of megatron-local"),
        ("megatron", {"activation_offload": "moe_act", "experts": "sequential"}, "of grouped experts"),
        ("megatron", {"activation_offload": "core_attn", "cuda_graphs": "te"}, "not modelled with cuda_graphs"),
        ("megatron", {"activation_offload": "core_attn", "shared_expert_overlap": True}, "shared_expert_overlap"),
    ],
)
def test_options_that_cannot_be_together_are_refused(name: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(MofaError, match=named):
        mofa.load_framework(name, options)


@pytest.mark.parametrize(
    ("recompute", "modules", "named"),
    [
        ("full", "core_attn", "recompute: full"),
        ("selective:core_attn", "core_attn", "recompute of the module core_attn"),
        ("selective:moe", EXPERTS, "expert_fc1 cannot be with recompute of the module moe"),
    ],
)
def test_recomputation_that_passes_groups_otherwise_is_refused(recompute: str, modules: str, named: str) -> None:
    with pytest.raises(StrategyError, match=named):
        planned(modules, experts(), f"micro_batch=1 recompute={recompute}", replay=False)


@pytest.mark.parametrize(
    ("modules", "named"), [("mlp_norm", "mlp_norm needs experts"), ("attn_norm", "attn_norm needs latent attention")]
)
def test_modules_that_a_model_lacks_are_refused(modules: str, named: str) -> None:
    with pytest.raises(SpecError, match=named):
        planned(modules, replay=False)


def test_fp8_products_are_refused() -> None:
    with pytest.raises(SpecError, match="not modelled with fp8 products"):
        planned("core_attn", dense(**{"precision.gemm": "fp8-delayed"}), replay=False)


def test_the_word_takes_all_modules_of_a_model() -> None:
    job, cluster = dense(2, 4096), mofa.load_cluster("h200-hgx", 8)
    job = job.model_copy(update={"batch": job.batch.model_copy(update={"global_batch": 8})})
    found = mofa.find_plans(job, cluster, with_=["activation_offload"], replay=False, top=1)
    assert any(f"activation_offload {ALL}" in note for note in found.report.plans[0].notes)
