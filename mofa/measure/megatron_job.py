"""A run in Megatron-Core's words, or one line why it cannot say it: what its layer specs share, and the local one."""

from __future__ import annotations

from typing import Any

from mofa.blocks.frameworks.recompute import why_recomputation_unsupported
from mofa.measure.expand import ExpandedRun
from mofa.measure.records import GRAD_NORM_LIMIT
from mofa.schedules import default_schedule
from mofa.specs.model import MoeSpec

ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu", "gelu": "gelu", "relu": "relu", "relu2": "squared_relu"}
"""A model's activation to the function of Megatron's ``activation_func``, by its name."""
POSITIONS = {"rope": "rope", "learned": "learned_absolute", "none": "none"}
"""A model's positions to Megatron's ``position_embedding_type``; it has no ALiBi."""


def _fuses_activation(run: ExpandedRun) -> bool:
    """Whether Megatron's ``bias_activation_fusion`` is on: for gates unless they are asked to be unfused, and for GELU
    with its bias alone, as the option is refused without (transformer_config.py); ReLU has no fused function."""
    mlp = run.model.mlp
    if mlp.gated:
        experts_fuse = mlp.activation == "swiglu" or run.model.moe is None
        return run.framework.fused_swiglu and experts_fuse
    return mlp.activation == "gelu" and mlp.bias


def _rotated_share(run: ExpandedRun) -> float:
    """Share of a head that is rotated; latents have their own width for it. [-]"""
    a = run.model.attention
    return 1.0 if run.model.attention_kind.megatron.has_latents else a.d_rope / a.d_qk


def refuse_unbuilt_layers(run: ExpandedRun) -> None:
    """Refuse facts of layers that Megatron-Core's GPT model does not build.

    Raises
    ------
    SpecError
        With the first of them.
    """
    model, a = run.model, run.model.attention
    said = {"attention.nope_every", "attention.rotary_dim"}
    if a.qk_norm_kind == "unweighted":
        said.add("attention.qk_norm_kind")
    lacking = [name for name in model.uncommon_facts if name not in said]
    if lacking:
        raise run.refusal(lacking[0], "its GPT model has no such layers; leave it out")
    if a.nope_every and model.num_layers % a.nope_every:
        raise run.refusal(f"attention.nope_every: {a.nope_every}", f"use a divisor of {model.num_layers} layers")


def megatron_attention_config(run: ExpandedRun) -> dict[str, Any]:
    """Fields of Megatron's configuration about attention.

    Raises
    ------
    SpecError
        If Megatron-Core's GPT model has no such attention.
    """
    a = run.model.attention
    if run.model.positions == "alibi" or run.model.embedding_norm:
        raise run.refusal("ALiBi or a norm behind the embedding", "use rope or learned positions, and no norm")
    kind = run.model.attention_kind
    if kind.megatron.needs_rotation and run.model.positions != "rope":
        raise run.refusal(f"{kind.name.upper()} with positions: {run.model.positions}", "use rope")
    if not kind.megatron.has_unfused and run.framework.attention == "unfused":
        attention = f"attention: {run.framework.attention}"
        raise run.refusal(f"{kind.name.upper()} with {attention}", "use one that takes two head sizes")
    some_biases = a.out_bias != run.model.mlp.bias or (a.out_bias and not a.qkv_bias)
    if kind.megatron.has_biases and some_biases:
        raise run.refusal(
            "biases in some linear layers only", "set qkv_bias, out_bias and mlp.bias alike, or qkv_bias alone"
        )
    return kind.megatron_config(a)


def megatron_moe_config(run: ExpandedRun, moe: MoeSpec) -> dict[str, Any]:
    """Fields of Megatron's configuration about experts.

    Raises
    ------
    SpecError
        If the run names a dispatcher that is not measured.
    """
    dispatcher = run.framework.dispatcher
    if dispatcher not in ("alltoall", "allgather"):
        raise run.refusal(f"dispatcher: {dispatcher}", "use alltoall or allgather")
    layers = [int(run.model.is_moe_layer(i)) for i in range(run.model.num_layers)]
    grouped = moe.num_groups > 1
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.top_k,
        "moe_ffn_hidden_size": moe.expert_hidden,
        "moe_shared_expert_intermediate_size": moe.shared_hidden or None,
        "moe_layer_freq": layers,
        "moe_router_score_function": moe.score,
        "moe_router_enable_expert_bias": moe.correction_bias,
        "moe_router_num_groups": moe.num_groups if grouped else None,
        "moe_router_group_topk": moe.groups_per_token if grouped else None,
        "moe_router_load_balancing_type": "none",
        "moe_router_force_load_balancing": run.run.routing.kind == "balanced",
        "moe_token_dispatcher_type": dispatcher,
    }


def _recompute(run: ExpandedRun) -> dict[str, Any]:
    r = run.recompute
    if r.kind == "none":
        return {}
    if (why := why_recomputation_unsupported(run.framework, r, run.model, run.run.precision.fp8_recipe)) is not None:
        raise run.refusal("this recomputation", why)
    if r.kind == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(r.modules)}
    if r.kind == "full":
        method = {"recompute_method": "uniform", "recompute_num_layers": 1}
        if r.layers is not None:
            method = {"recompute_method": "block", "recompute_num_layers": r.layers}
        return {"recompute_granularity": "full", **method}
    raise run.refusal(f"recompute: {r}", "use none, selective[:module] or full[:n]")


def refuse_unrunnable_run(run: ExpandedRun) -> None:
    """Refuse what neither of Megatron-Core's layer specs can run as this room builds it.

    Raises
    ------
    SpecError
        With the first thing that cannot be.
    """
    s, model, framework = run.strategy, run.model, run.framework
    if run.run.precision.params == "fp32":
        raise run.refusal("params: fp32", "use bf16, its mixed precision keeps the main copy in fp32")
    if model.num_mtp_layers:
        raise run.refusal("multi-token prediction here", "set num_mtp_layers to 0")
    if framework.compile:
        raise run.refusal("compile: true", "its fusions are compiled by themselves")
    if s.schedule != default_schedule(s.vpp):
        raise run.refusal(f"schedule: {s.schedule} with vpp {s.vpp}", "use 1f1b with vpp 1 or interleaved with more")
    if s.layout:
        raise run.refusal("layout here", "leave it out")
    if model.num_layers % (s.pp * s.vpp):
        raise run.refusal(f"{model.num_layers} layers in {s.pp * s.vpp} chunks", "use a multiple")
    if s.vpp > 1 and run.num_micro_batches % s.pp:
        raise run.refusal(f"{run.num_micro_batches} micro-batches with vpp", f"use a multiple of pp ({s.pp})")
    if s.etp not in (1, s.tp) or (s.dp * s.tp * s.cp) % (s.ep * s.etp):
        raise run.refusal(f"ep {s.ep}, etp {s.etp}", "use etp: 1 or tp, and ep * etp that divides dp * tp * cp")
    if s.tp > 1 and model.moe is not None and not s.sp:
        raise run.refusal("experts with tp and no sp", "use sp: true")
    if framework.data_parallel not in ("distributed-optimizer", "ddp"):
        raise run.refusal(f"data_parallel: {framework.data_parallel}", "use distributed-optimizer or ddp")


def _refuse_what_the_local_spec_lacks(run: ExpandedRun) -> None:
    a, moe = run.model.attention, run.model.moe
    if run.run.precision.gemm != "bf16":
        raise run.refusal("fp8 without Transformer Engine", "use precision.gemm: bf16")
    if run.strategy.cp > 1:
        raise run.refusal("cp without Transformer Engine", "use cp: 1")
    if a.sinks or a.window is not None:
        raise run.refusal("sinks or a window without Transformer Engine", "use plain grouped-query attention")
    if moe is not None and (moe.expert_bias or moe.router_bias or moe.shared_gate):
        raise run.refusal("expert_bias, router_bias or shared_gate", "leave them out")
    if moe is not None and run.framework.experts != "sequential":
        raise run.refusal("grouped experts on the local layer spec", "use experts: sequential")
    if run.framework.attention not in ("sdpa", "unfused"):
        raise run.refusal(f"attention: {run.framework.attention}", "use sdpa or unfused")
    if (run.run.optimizer.implementation or run.framework.optimizer) != "foreach":
        raise run.refusal("another optimizer than PyTorch's without Transformer Engine or Apex", "use foreach")


def common_megatron_job(run: ExpandedRun) -> dict[str, Any]:
    """What a runner of Megatron-Core is told, on either layer spec; fusions are those of the local one.

    Raises
    ------
    SpecError
        If Megatron-Core cannot run it.
    """
    refuse_unrunnable_run(run)
    refuse_unbuilt_layers(run)
    s, model, batch, framework = run.strategy, run.model, run.run.batch, run.framework
    sharded = framework.data_parallel == "distributed-optimizer"
    several = s.dp * s.cp > 1  # ranks that hold the same parameters
    overlap_grads = framework.overlap_grad_reduce and several
    overlap_params = framework.overlap_param_gather and several and sharded
    divisor = framework.vocab_divisor * s.tp
    config: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.mlp.ffn_hidden or 4 * model.hidden,
        "gated_linear_unit": model.mlp.gated,
        "activation_func": ACTIVATIONS[model.mlp.activation],
        "add_bias_linear": model.mlp.bias,
        "normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "hidden_dropout": model.dropout,
        "attention_dropout": model.dropout,
        "bias_activation_fusion": _fuses_activation(run),
        "bias_dropout_fusion": True,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "tensor_model_parallel_size": s.tp,
        "pipeline_model_parallel_size": s.pp,
        "virtual_pipeline_model_parallel_size": s.vpp if s.vpp > 1 else None,
        "expert_model_parallel_size": s.ep,
        "expert_tensor_parallel_size": s.etp,
        "context_parallel_size": s.cp,
        "sequence_parallel": s.sp and s.tp > 1,
        "overlap_p2p_comm": s.vpp > 1,
        "batch_p2p_comm": s.vpp == 1,
        "deallocate_pipeline_outputs": True,
        **megatron_attention_config(run),
        "no_rope_freq": model.attention.nope_every or None,
        **(megatron_moe_config(run, model.moe) if model.moe is not None else {}),
        **_recompute(run),
    }
    return {
        "config": config,
        "parallel": {
            "tensor_model_parallel_size": s.tp,
            "pipeline_model_parallel_size": s.pp,
            "virtual_pipeline_model_parallel_size": s.vpp if s.vpp > 1 else None,
            "context_parallel_size": s.cp,
            "expert_model_parallel_size": s.ep,
            "expert_tensor_parallel_size": s.etp,
            "create_gloo_process_groups": False,
        },
        "ddp": {
            "grad_reduce_in_fp32": framework.grads_bytes_per_param == 4.0,
            "use_distributed_optimizer": sharded,
            "overlap_grad_reduce": overlap_grads,
            "overlap_param_gather": overlap_params,
            "align_param_gather": overlap_params and s.vpp > 1,
        },
        "optimizer": {
            "use_distributed_optimizer": sharded,
            "overlap_param_gather": overlap_params,
            "clip_grad": GRAD_NORM_LIMIT if run.run.optimizer.clip_grad_norm else 0.0,
        },
        "transformer_engine": False,
        "eager_groups": False,
        "attention": framework.attention,
        "vocab": model.vocab,
        "padded_vocab": -(-model.vocab // divisor) * divisor,
        "tied": model.tied_embeddings,
        "positions": POSITIONS[model.positions],
        "rotary_percent": _rotated_share(run),
        "seq_len": batch.seq_len,
        "max_positions": run.model.max_positions or batch.seq_len,
        "cp": s.cp,
        "micro_batch": batch.micro,
        "num_micro_batches": run.num_micro_batches,
    }


def megatron_local_job(run: ExpandedRun) -> dict[str, Any]:
    """The configuration of Megatron-Core's local layer spec for this run.

    Raises
    ------
    SpecError
        If Megatron-Core cannot run it without Transformer Engine.
    """
    _refuse_what_the_local_spec_lacks(run)
    return common_megatron_job(run)
