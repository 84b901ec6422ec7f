"""A run in the words of PyTorch's first FSDP around plain GPT modules, or one line why it cannot say it."""

from __future__ import annotations

from typing import Any

from mofa.measure.expand import ExpandedRun


def _refuse_unbuilt_model(run: ExpandedRun) -> None:
    model, a = run.model, run.model.attention
    if model.moe is not None or run.model.attention_kind.megatron.has_latents:
        raise run.refusal(f"model {model.name}", "use a dense model with grouped-query attention")
    if model.positions != "learned" or model.mlp.activation != "gelu" or not model.mlp.bias:
        raise run.refusal(f"model {model.name}", "it has learned positions and a GELU with biases only")
    if not (a.qkv_bias and a.out_bias) or a.qk_norm or a.sinks or a.window is not None:
        raise run.refusal("attention without biases, or with norms, sinks or a window", "set qkv_bias and out_bias")
    if model.embedding_norm:
        raise run.refusal("a norm behind the embedding", "leave embedding_norm out")
    if (model.max_positions or run.run.batch.seq_len) < run.run.batch.seq_len:
        raise run.refusal(f"seq_len {run.run.batch.seq_len}", f"max_positions is {model.max_positions}; use no more")
    if model.num_mtp_layers or model.dropout:
        raise run.refusal("multi-token prediction or dropout", "set num_mtp_layers and dropout to 0")
    if model.uncommon_facts:
        raise run.refusal(model.uncommon_facts[0], "its model has no such layers; leave it out")


def _refuse_unrunnable_options(run: ExpandedRun) -> None:
    s, framework, precision = run.strategy, run.framework, run.run.precision
    if precision.gemm != "bf16" or framework.compile:
        raise run.refusal(
            f"precision.gemm: {precision.gemm} with compile: {str(framework.compile).lower()}",
            "use precision.gemm: bf16 and compile: false",
        )
    if precision.params not in (None, "", "fp32") or precision.moments != "fp32":
        raise run.refusal("parameters or moments in 16 bits", "leave precision.params and precision.moments out")
    if s.zero not in (None, 3):
        raise run.refusal(f"zero: {s.zero}", "use zero: 3, or framework.reshard_after_forward: false to keep weights")
    if s.tp * s.pp * s.cp * s.ep > 1 or s.dp < 2:
        raise run.refusal(f"dp {s.dp} of {run.run.gpus} GPUs", "use dp alone, on 2 GPUs or more")
    if framework.data_parallel != "fsdp" or framework.dp_replicate != 1:
        raise run.refusal(f"data_parallel: {framework.data_parallel}", "use fsdp")
    if framework.attention != "sdpa" or not framework.fused_qkv:
        products = f"attention: {framework.attention} with fused_qkv: {str(framework.fused_qkv).lower()}"
        raise run.refusal(products, "use attention: sdpa and fused_qkv: true")
    if framework.cross_entropy_fusion != "none" or framework.loss_metrics:
        raise run.refusal("fused losses or metrics", "leave cross_entropy_fusion and loss_metrics out")
    if run.recompute.kind not in ("none", "full") or run.recompute.layers is not None:
        raise run.refusal(f"recompute: {run.recompute}", "use none or full")
    if (run.run.optimizer.implementation or framework.optimizer) == "te":
        raise run.refusal("optimizer: te", "use fused, foreach or for-loop")


def fsdp1_job(run: ExpandedRun) -> dict[str, Any]:
    """Sizes of the modules, how FSDP wraps them, and what a step does.

    Raises
    ------
    SpecError
        If the runner builds no such model or has no such option.
    """
    _refuse_unbuilt_model(run)
    _refuse_unrunnable_options(run)
    model, a, framework = run.model, run.model.attention, run.framework
    return {
        "num_layers": model.num_layers,
        "hidden": model.hidden,
        "ffn_hidden": model.mlp.ffn_hidden or 4 * model.hidden,
        "num_heads": a.num_heads,
        "num_kv_heads": a.num_kv_heads,
        "head_dim": a.d_qk,
        "norm": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "vocab": model.vocab,
        "tied": model.tied_embeddings,
        "max_positions": model.max_positions or run.run.batch.seq_len,
        "recompute": run.recompute.kind,
        "early_stop": framework.early_stop,
        "reshard_after_forward": framework.reshard_after_forward,
        "reduces_in_fp32": framework.reduced_bytes_per_param == 4.0,
        "optimizer": run.run.optimizer.implementation or framework.optimizer,
        "clips": run.run.optimizer.clip_grad_norm,
        "seq_len": run.run.batch.seq_len,
        "micro_batch": run.run.batch.micro,
        "num_micro_batches": run.num_micro_batches,
    }
