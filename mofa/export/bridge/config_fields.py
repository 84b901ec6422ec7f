"""Where Megatron-Bridge's ConfigContainer has what an argument of Megatron-LM says, and as which value.

The arguments themselves are those of :mod:`mofa.export.megatron`: one table says what a job is in Megatron's words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mofa.export.job import ExportJob
from mofa.export.megatron.megatron_table import MEGATRON
from mofa.export.megatron.patterns import evaluate_list_expression


@dataclass(frozen=True)
class PythonCode:
    """A value as Python code."""

    text: str

    def __repr__(self) -> str:
        return self.text


ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    "seq-length": ("model.seq_length", "dataset.seq_length"),
    "micro-batch-size": ("train.micro_batch_size",),
    "global-batch-size": ("train.global_batch_size",),
    "tokenizer-type": ("tokenizer.tokenizer_type",),
    "vocab-size": ("tokenizer.vocab_size",),
    "bf16": ("mixed_precision.bf16",),
    "fp8-format": ("mixed_precision.fp8",),
    "fp8-recipe": ("mixed_precision.fp8_recipe", "optimizer.fp8_recipe"),
    "fp8-amax-history-len": ("mixed_precision.fp8_amax_history_len",),
    "fp8-amax-compute-algo": ("mixed_precision.fp8_amax_compute_algo",),
    "fp8-param-gather": ("mixed_precision.fp8_param", "mixed_precision.fp8_param_gather"),
    "reuse-grad-buf-for-mxfp8-param-ag": ("mixed_precision.reuse_grad_buf_for_mxfp8_param_ag",),
    "use-distributed-optimizer": ("ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer"),
    "overlap-grad-reduce": ("ddp.overlap_grad_reduce",),
    "overlap-param-gather": ("ddp.overlap_param_gather", "optimizer.overlap_param_gather"),
    "optimizer": ("optimizer.optimizer",),
    "clip-grad": ("optimizer.clip_grad",),
    "use-precision-aware-optimizer": ("optimizer.use_precision_aware_optimizer",),
    "optimizer-cpu-offload": ("optimizer.optimizer_cpu_offload",),
    "optimizer-offload-fraction": ("optimizer.optimizer_offload_fraction",),
    "overlap-cpu-optimizer-d2h-h2d": ("optimizer.overlap_cpu_optimizer_d2h_h2d",),
    "exp-avg-dtype": ("optimizer.exp_avg_dtype",),
    "exp-avg-sq-dtype": ("optimizer.exp_avg_sq_dtype",),
    "num-experts": ("model.num_moe_experts",),
    "num-virtual-stages-per-pipeline-rank": ("model.virtual_pipeline_model_parallel_size",),
    "no-check-for-nan-in-loss-and-grad": ("rerun_state_machine.check_for_nan_in_loss", "ddp.check_for_nan_in_grad"),
    "use-tp-pp-dp-mapping": ("dist.use_tp_pp_dp_mapping",),
    "te-rng-tracker": ("model.use_te_rng_tracker", "rng.te_rng_tracker"),
    "delay-wgrad-compute": ("model.delay_wgrad_compute", "ddp.delay_wgrad_compute"),
    "rerun-mode": ("rerun_state_machine.rerun_mode",),
}
"""Fields of an argument that is no field of the model's provider under its own name."""
ACTIVATIONS = {"swiglu": "functional.silu", "gelu": "functional.gelu", "relu2": "squared_relu"}
"""Activations by their name in the recipe."""
SAID_OTHERWISE = ("swiglu", "squared-relu", "no-bias-swiglu-fusion", "untie-embeddings-and-output-weights",
                  "group-query-attention", "multi-latent-attention", "max-position-embeddings", "grad-reduce-in-bf16",
                  "no-create-attention-mask-in-dataloader")  # fmt: skip
"""Arguments that :func:`bridge_config_fields` says by fields of other meanings."""
SWITCHES = ("sequence-parallel", "no-rope-fusion", "no-bias-dropout-fusion", "no-gradient-accumulation-fusion",
            "cross-entropy-loss-fusion", "use-distributed-optimizer", "overlap-grad-reduce", "overlap-param-gather",
            "disable-bias-linear", "qk-layernorm", "moe-grouped-gemm", "moe-permute-fusion",
            "moe-router-fusion")  # fmt: skip
"""Switches that are written where they are off too: classes of Bridge and Megatron-Core have other defaults."""


def bridge_config_fields(job: ExportJob, values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the container by path, of the arguments of a job.

    Raises
    ------
    SpecError
        If Bridge cannot say one of them.
    """
    model, s = job.model, job.strategy
    given = {name: MEGATRON.argument_named(name).default for name in SWITCHES
             if model.moe is not None or not name.startswith("moe-")}  # fmt: skip
    out: dict[str, Any] = {}
    for name, value in (given | dict(values)).items():
        if name.startswith("$") or name in SAID_OTHERWISE:
            continue
        argument = MEGATRON.argument_named(name)
        for path in ELSEWHERE.get(name, (f"model.{argument.dump_name}",)):
            out[path] = _value(name, value)
    if model.positions == "learned" and model.max_positions != job.workload.batch.seq_len:
        raise job.refusal(
            f"model.max_positions ({model.max_positions})", "Bridge learns as many positions as a sequence has tokens"
        )
    gated = model.mlp.gated
    out |= {
        "model.gated_linear_unit": gated,
        "model.activation_func": PythonCode(ACTIVATIONS[model.mlp.activation]),
        "model.bias_activation_fusion": job.framework.fused_swiglu if gated else model.mlp.bias,
        "model.share_embeddings_and_output_weights": model.tied_embeddings,
        "model.masked_softmax_fusion": True,
        "model.persist_layer_norm": True,
        "model.overlap_p2p_comm": s.vpp > 1,
        "model.batch_p2p_comm": s.vpp == 1,
        "ddp.align_param_gather": s.vpp > 1 and "overlap-param-gather" in values,
        "ddp.grad_reduce_in_fp32": "grad-reduce-in-bf16" not in values,
        "mixed_precision.grad_reduce_in_fp32": "grad-reduce-in-bf16" not in values,
        "mixed_precision.params_dtype": PythonCode("torch.bfloat16"),
        "mixed_precision.pipeline_dtype": PythonCode("torch.bfloat16"),
        "mixed_precision.autocast_enabled": False,
        "dataset.skip_getting_attention_mask_from_dataset": True,
    }
    if "pipeline-model-parallel-layout" in values and s.vpp > 1:
        out["model.virtual_pipeline_model_parallel_size"] = s.vpp
    if job.has_latent_attention:
        out.setdefault("model.rotary_scaling_factor", 1.0)  # Megatron-LM's default, 40 in the class
        out.setdefault("model.q_lora_rank", None)
    return out


def _value(name: str, value: Any) -> Any:
    """An argument's value as a field has it."""
    if name == "attention-backend":
        return PythonCode(f"AttnBackend.{value}")
    if name in ("exp-avg-dtype", "exp-avg-sq-dtype"):
        return PythonCode("torch.bfloat16" if value == "bf16" else "torch.float32")
    if name == "moe-layer-freq":
        return evaluate_list_expression(str(value))
    if name == "window-size":
        return tuple(int(size) for size in str(value).split(","))
    if name in ("cp-comm-type", "moe-router-load-balancing-type"):
        return value[0]
    return value
