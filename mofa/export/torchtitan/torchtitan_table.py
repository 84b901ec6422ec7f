"""The table of torchtitan's settings, which the export writes by and ``--from torchtitan`` reads by."""

from __future__ import annotations

from mofa.export.arguments import Argument, ArgumentTable, AssumedArgument, FixedField, UnmodelledArgument
from mofa.export.environment import CONNECTIONS
from mofa.export.fields_without_argument import FREE, NOT_RELEASED, WHAT_IT_DOES
from mofa.export.torchtitan.float8_settings import FLOAT8_ROW
from mofa.export.torchtitan.job_settings import TOML_ROWS
from mofa.export.torchtitan.model_settings import MODEL_ROWS

_MEGATRON = "it is an option of Megatron-Core"
_SIZES = "torchtitan's models have no argument for it"

FIXED: dict[str, FixedField] = {
    **NOT_RELEASED,
    "framework.name": FixedField(("torchtitan",), "this is torchtitan's configuration"),
    "framework.attention": FixedField(("sdpa",), "its models are predicted with scaled_dot_product_attention alone"),
    "framework.permute_fusion": FixedField((True,), _MEGATRON),
    "framework.router_fusion": FixedField((False,), _MEGATRON),
    "framework.router_padding": FixedField((False,), _MEGATRON),
    "framework.overlap_grad_reduce": FixedField((True,), "FSDP always overlaps"),
    "framework.overlap_param_gather": FixedField((True,), "FSDP always overlaps"),
    "framework.cross_entropy_fusion": FixedField(("none",), "its loss is PyTorch's"),
    "framework.loss_copies_logits": FixedField((True,), _MEGATRON),
    "framework.grads": FixedField(("",), _MEGATRON),
    "framework.process_groups": FixedField(("lazy",), "its init_distributed gives no device"),
    "framework.rank_order": FixedField(("tp-cp-ep-dp-pp",), "its device mesh has one order"),
    "framework.cuda_graphs": FixedField(("none",), "torchtitan 0.2.2 captures none; 0.3.0 does, which is not modelled"),
    "framework.expert_overlap": FixedField(("none",), _MEGATRON),
    "framework.delay_wgrad": FixedField((False,), _MEGATRON),
    "framework.shared_expert_overlap": FixedField((False,), _MEGATRON),
    "framework.tp_overlap": FixedField((False,), "asynchronous tensor parallelism is not modelled"),
    "framework.saves_attention": FixedField((True,), "0.2.2 keeps the output of attention, whatever is asked"),
    "framework.ends_apart": FixedField((True,), "0.2.2 groups both ends of the model so, whatever is asked"),
    "framework.shards_head_norms": FixedField((True,), "0.2.2 splits norms over heads, whatever is asked"),
    "framework.repeats_keys": FixedField((False,), "0.2.2 leaves keys to the kernel, whatever is asked"),
    "framework.overlap_input_grads": FixedField((True,), _MEGATRON),
    "framework.optimizer_offload": FixedField((0.0,), _MEGATRON),
    "framework.overlap_optimizer_copies": FixedField((False,), _MEGATRON),
    "framework.host_threads": FixedField((1,), _MEGATRON),
    "framework.activation_offload": FixedField(("none",), _MEGATRON),
    "framework.fp8_params": FixedField((False,), _MEGATRON),
    "framework.vocab_divisor": FixedField((1,), "its vocabularies are not padded"),
    "precision.moments": FixedField(("fp32",), "its moments are as wide as what it steps"),
    "optimizer.clip_grad_norm": FixedField((True,), "its trainer always clips"),
    "model.norm": FixedField(("rmsnorm",), _SIZES),
    "model.positions": FixedField(("rope",), _SIZES),
    "model.max_positions": FixedField((None,), "rotary embeddings have no rows"),
    "model.rope_scale": FixedField((1.0,), _SIZES),
    "model.embedding_norm": FixedField((False,), _SIZES),
    "model.dropout": FixedField((0.0,), _SIZES),
    "model.num_mtp_layers": FixedField((0,), "its models have no multi-token prediction"),
    "model.mlp.activation": FixedField(("swiglu",), _SIZES),
    "model.mlp.bias": FixedField((False,), _SIZES),
    "model.attention.qkv_bias": FixedField((False,), _SIZES),
    "model.attention.out_bias": FixedField((False,), _SIZES),
    "model.norm_bias": FixedField((True,), "its norms are RMSNorms"),
    "model.norm_placement": FixedField(("before",), _SIZES),
    "model.parallel_branches": FixedField((False,), _SIZES),
    "model.shared_branch_norm": FixedField((False,), _SIZES),
    "model.head_bias": FixedField((False,), _SIZES),
    "model.logit_softcap": FixedField((False,), _SIZES),
    "model.multipliers": FixedField(((),), _SIZES),
    "model.attention.softcap": FixedField((False, None), _SIZES),
    "model.attention.chunked": FixedField((False, None), "its llama4 model is not modelled"),
    "model.attention.nope_every": FixedField((0, None), "its llama4 model is not modelled"),
    "model.attention.rotary_dim": FixedField((None,), "its models turn whole heads"),
    "model.attention.qk_norm_kind": FixedField(("head", None), "its norms are over each head, with one weight for all"),
    "model.attention.sinks": FixedField((False,), "its gpt_oss model is not modelled"),
    "model.attention.window": FixedField((None,), "its gpt_oss model is not modelled"),
    "model.attention.window_every": FixedField((1,), "its gpt_oss model is not modelled"),
    "model.moe.shared_gate": FixedField((False, None), _SIZES),
    "model.moe.every": FixedField((1, None), _SIZES),
    "model.moe.expert_bias": FixedField((False, None), _SIZES),
    "routing.capacity_factor": FixedField((None,), "it drops no tokens"),
    "routing.pad_to_capacity": FixedField((False,), "it drops no tokens"),
    "routing.rank_capacity_factor": FixedField((None,), "it pads no ranks"),
}
FACTS: dict[str, str] = {
    **WHAT_IT_DOES,
    **dict.fromkeys(
        ("framework.grads_bytes_per_param", "framework.reduced_bytes_per_param",
         "framework.accumulation_bytes_per_param", "framework.fuses_wgrad_accumulation", "framework.fused_swiglu",
         "framework.fused_rope"),
        "it says what the framework does, and no setting changes that",
    ),
}  # fmt: skip
MANY_CONNECTIONS = AssumedArgument(
    CONNECTIONS, "", "mofa's own runs leave it to CUDA, so that streams run side by side"
)
_ATTENTION = Argument("args.attn_type", "text", "sdpa")
ASSUMED = (
    MANY_CONNECTIONS,
    AssumedArgument(_ATTENTION, "sdpa", "attention is PyTorch's"),
    AssumedArgument(Argument("training.mixed_precision_param", "text", "bfloat16"), "bfloat16", "products are bf16"),
    AssumedArgument(Argument("training.mixed_precision_reduce", "text", "float32"), "float32",
    "gradients are summed in fp32"),
    AssumedArgument(Argument("training.max_norm", "float", 1.0), 1.0, "gradients are clipped"),
    AssumedArgument(Argument("parallelism.context_parallel_load_balancer", "text", "headtail"), "headtail",
            "causal attention is shared out evenly"),
    AssumedArgument(Argument("compile.backend", "text", "inductor"), "inductor", "blocks are compiled by it"),
)  # fmt: skip


def _no(why: str, *neutral: object) -> UnmodelledArgument:
    return UnmodelledArgument((False, None, "", *neutral), why)


UNMODELLED: dict[str, UnmodelledArgument] = {
    "args.attn_type": UnmodelledArgument(("sdpa",), "flex and varlen attention are not modelled; use sdpa"),
    "training.enable_cpu_offload": _no("memory is moved to the host; leave it out"),
    "training.mixed_precision_param": UnmodelledArgument(("bfloat16",), "products are bf16; use bfloat16"),
    "parallelism.enable_async_tensor_parallel": _no("tensor parallelism is overlapped; leave it out"),
    "compile.enable_async_tensor_parallel": _no("tensor parallelism is overlapped; leave it out"),
    "parallelism.enable_fsdp_symm_mem": _no("FSDP runs other collectives; leave it out"),
    "parallelism.pipeline_parallel_schedule_csv": _no("the schedule is another one; name one by its name"),
    "optimizer.early_step_in_backward": _no("steps are made in the backward pass; leave it out"),
    "fault_tolerance.enable": _no("replicas are torchft's; leave it out"),
    "debug.deterministic": _no("kernels are other ones; leave it out"),
    "debug.detect_anomaly": _no("each op is checked; leave it out"),
}
TORCHTITAN = ArgumentTable("torchtitan", (*MODEL_ROWS, *TOML_ROWS, FLOAT8_ROW), FIXED, FACTS, FREE, ASSUMED, UNMODELLED)
"""Settings of torchtitan 0.2.2."""
