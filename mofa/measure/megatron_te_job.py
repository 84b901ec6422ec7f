"""A run in Megatron-Core's words, on its layer spec of Transformer Engine, or one line why it cannot say it."""

from __future__ import annotations

from typing import Any

from mofa.blocks.frameworks.megatron.graph_legality import why_not_captured
from mofa.measure.expand import ExpandedRun
from mofa.measure.megatron_job import common_megatron_job

FP8_FORMATS = {"delayed": "hybrid", "tensorwise": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3"}
"""Recipe (Megatron's ``fp8_recipe``) to Megatron's ``fp8``: e4m3 both ways under blocks, as Transformer Engine's recipe
has it by default (common/recipe/__init__.py, ``Float8BlockScaling``), else e5m2 for gradients."""
AMAX_HISTORY = {"fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
"""Delayed scaling as Megatron-Bridge's recipe has it (training/mixed_precision.py,
``bf16_with_fp8_delayed_scaling_mixed``). [-]"""
CP_COMM = {"ring": "p2p", "allgather": "all_gather", "a2a": "a2a"}
"""Kind of context parallelism to Megatron's ``cp_comm_type``."""


def _refuse_what_this_spec_lacks(run: ExpandedRun) -> None:
    framework, moe = run.framework, run.model.moe
    if framework.attention != "fused":
        raise run.refusal(f"attention: {framework.attention}", "use fused")
    if framework.tp_overlap:
        raise run.refusal("tp_overlap, whose user buffers need a launcher of their own", "use tp_overlap: false")
    if framework.routed_copies != "materialised":
        raise run.refusal(f"routed_copies: {framework.routed_copies}", "use materialised")
    if run.strategy.token_chunks > 1:
        raise run.refusal(f"token_chunks: {run.strategy.token_chunks}", "use 1")
    if (run.run.optimizer.implementation or framework.optimizer) != "te":
        raise run.refusal("another optimizer than Transformer Engine's", "use te")
    if run.run.precision.moments != "fp32":
        raise run.refusal(f"moments: {run.run.precision.moments}", "use fp32")
    if moe is not None and (moe.router_bias or moe.expert_bias != run.model.mlp.bias):
        raise run.refusal("biases of the router, or of experts alone", "set moe.expert_bias and mlp.bias alike")
    if run.model.rope_scale != 1.0 and not run.model.attention_kind.megatron.rotates_by_yarn:
        raise run.refusal("scaled rotary embeddings", "use rope_scale: 1")


def _attention(run: ExpandedRun) -> dict[str, Any]:
    a = run.model.attention
    arguments: dict[str, Any] = {
        "attention_backend": "fused",  # left to itself Megatron asks for PyTorch's kernels as well, which runs lock out
        "apply_rope_fusion": run.model.positions == "rope" and run.framework.fused_rope,
    }
    if run.strategy.cp > 1:
        arguments["cp_comm_type"] = CP_COMM[run.strategy.cp_kind]
    if a.window is not None:
        arguments["window_size"] = [a.window - 1, 0]
        arguments["window_attn_skip_freq"] = a.window_every if a.window_every > 1 else None
    if a.sinks:
        arguments["softmax_type"] = "learnable"
    return arguments


def _moe(run: ExpandedRun) -> dict[str, Any]:
    moe = run.model.moe
    if moe is None:
        return {}
    grouped = run.framework.experts == "grouped"
    return {
        "moe_grouped_gemm": grouped,
        "moe_permute_fusion": run.framework.permute_fusion,
        "moe_router_fusion": run.framework.router_fusion,
        "moe_router_padding_for_quantization": run.framework.router_padding,
        "moe_router_dtype": "fp32",
        "moe_expert_capacity_factor": run.run.routing.capacity_factor,
        "moe_pad_expert_input_to_capacity": run.run.routing.pad_to_capacity,
        "moe_router_pre_softmax": moe.score == "softmax" and moe.top_k == 1,
        "moe_shared_expert_gate": moe.shared_gate,
        # a bias that is added to rows in an expert takes the fused addition of dropout away (experts.py)
        "bias_dropout_fusion": not (grouped and run.model.mlp.bias),
    }


def _fp8(run: ExpandedRun) -> dict[str, Any]:
    recipe = run.run.precision.fp8_recipe
    if not recipe:
        return {}
    return {
        "fp8": FP8_FORMATS[recipe],
        "fp8_recipe": recipe,
        "fp8_param": run.framework.fp8_params,
        **(AMAX_HISTORY if recipe == "delayed" else {}),
    }


def _optimizer(run: ExpandedRun) -> dict[str, Any]:
    share = run.framework.optimizer_offload
    if not share:
        return {}
    return {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": share,
        "overlap_cpu_optimizer_d2h_h2d": run.framework.overlap_optimizer_copies,
        "use_precision_aware_optimizer": True,  # Megatron-LM's arguments.py asks for it
    }


def _offload(run: ExpandedRun) -> dict[str, Any]:
    """Activations that go to the host; why recomputation and they cannot be together is asked with the former."""
    offload = run.framework.offloaded_activations
    if not offload.offloads_any:
        return {}
    if run.run.precision.fp8_recipe:
        raise run.refusal(f"activation_offload: {offload} with fp8 products", "use gemm: bf16")
    return {"fine_grained_activation_offloading": True, "offload_modules": list(offload.modules)}


EAGER_STEPS = 3
"""Steps before Transformer Engine's graphs, or a full iteration's, are captured, and each layer's passes before its
``local`` one is: Megatron-Core's own (transformer_config.py, ``cuda_graph_warmup_steps``)."""


def _graphs(run: ExpandedRun) -> dict[str, Any]:
    graphs = run.framework.graphs
    if not graphs.captures_any:
        return {}
    why = why_not_captured(run.framework, run.model, run.run.routing, run.recompute, pp=run.strategy.pp)
    if why is not None:
        raise run.refusal("these graphs", why)
    if graphs.captures_part("moe_router") and run.model.moe is not None and run.run.routing.kind != "balanced":
        raise run.refusal(f"routing: {run.run.routing.kind} in a captured router", "use routing: balanced")
    return {
        "cuda_graph_impl": {"te": "transformer_engine"}.get(graphs.implementation, graphs.implementation),
        "cuda_graph_scope": list(graphs.scope),
        "cuda_graph_warmup_steps": EAGER_STEPS,
    }


def _expert_overlap(run: ExpandedRun) -> dict[str, Any]:
    """Forwards beside backwards, which exchange experts' tokens meanwhile.

    Raises
    ------
    SpecError
        If Megatron-Core asserts something else of the strategy.
    """
    if run.framework.shared_expert_overlap:
        if run.framework.dispatcher != "alltoall" or "shared_experts" in run.recompute.modules:
            raise run.refusal("shared_expert_overlap with this run", "use alltoall, and recompute no shared experts")
        return {"moe_shared_expert_overlap": True}
    if run.framework.expert_overlap == "none":
        return {}
    if run.strategy.ep == 1 or (run.strategy.pp > 1 and run.strategy.vpp == 1):
        raise run.refusal("expert_overlap with this strategy", "use ep above 1, and vpp above 1 with a pipeline")
    if run.framework.dispatcher == "allgather":
        raise run.refusal("expert_overlap with dispatcher: allgather", "use alltoall")
    if run.recompute.kind == "full" or "moe" in run.recompute.modules:
        raise run.refusal(f"expert_overlap with recompute: {run.recompute}", "use none or selective without moe")
    return {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": run.framework.delay_wgrad}


def megatron_te_job(run: ExpandedRun) -> dict[str, Any]:
    """The configuration of Megatron-Core's Transformer Engine layer spec for this run.

    Fusions are those that Megatron-LM's arguments switch on by default, and permutation's where it is asked for. The
    router computes in fp32 and has no auxiliary loss.

    Raises
    ------
    SpecError
        If Megatron-Core cannot run it.
    """
    _refuse_what_this_spec_lacks(run)
    job = common_megatron_job(run)
    fusion = run.framework.cross_entropy_fusion
    job["config"] |= {
        "masked_softmax_fusion": True,
        "persist_layer_norm": True,
        "gradient_accumulation_fusion": run.framework.fuses_wgrad_accumulation,
        "cross_entropy_loss_fusion": fusion != "none",
        "cross_entropy_fusion_impl": "te" if fusion == "te" else "native",
        **_attention(run),
        **_moe(run),
        **_fp8(run),
        **_graphs(run),
        **_expert_overlap(run),
        **_offload(run),
    }
    job["ddp"]["delay_wgrad_compute"] = run.framework.delay_wgrad
    fp8_params = job["config"].get("fp8_param", False)
    job["ddp"]["fp8_param_gather"] = fp8_params
    shares_buffer = fp8_params and job["config"].get("fp8_recipe") == "mxfp8"  # or each rank holds them once more
    job["ddp"]["reuse_grad_buf_for_mxfp8_param_ag"] = shares_buffer
    job["optimizer"]["reuse_grad_buf_for_mxfp8_param_ag"] = shares_buffer
    job["optimizer"] |= _optimizer(run)
    job["optimizer"]["fp8_recipe"] = job["config"].get("fp8_recipe")
    return job | {"transformer_engine": True, "eager_groups": run.framework.process_groups == "eager"}
