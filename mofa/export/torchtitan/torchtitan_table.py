"""The table of torchtitan's settings, which the export writes by and ``--from torchtitan`` reads by."""

from __future__ import annotations

from mofa.export.arguments import Argument, Assumed, Fixed, Table, Unmodelled
from mofa.export.environment import CONNECTIONS
from mofa.export.no_argument import FREE, NOT_RELEASED, WHAT_IT_DOES
from mofa.export.torchtitan.job_settings import TOML_ROWS
from mofa.export.torchtitan.model_settings import MODEL_ROWS

_MEGATRON = "it is an option of Megatron-Core"
_SIZES = "torchtitan's models have no argument for it"

FIXED: dict[str, Fixed] = {
    **NOT_RELEASED,
    "framework.name": Fixed(("torchtitan",), "this is torchtitan's configuration"),
    "framework.attention": Fixed(("sdpa",), "its models are predicted with scaled_dot_product_attention alone"),
    "framework.permute_fusion": Fixed((True,), _MEGATRON),
    "framework.router_padding": Fixed((False,), _MEGATRON),
    "framework.overlap_grad_reduce": Fixed((True,), "FSDP always overlaps"),
    "framework.overlap_param_gather": Fixed((True,), "FSDP always overlaps"),
    "framework.cross_entropy_fusion": Fixed(("none",), "its loss is PyTorch's"),
    "framework.loss_copies_logits": Fixed((True,), _MEGATRON),
    "framework.grads": Fixed(("",), _MEGATRON),
    "framework.process_groups": Fixed(("lazy",), "its init_distributed gives no device"),
    "framework.tp_overlap": Fixed((False,), "asynchronous tensor parallelism is not modelled"),
    "framework.saves_attention": Fixed((True,), "0.2.2 keeps the output of attention, whatever is asked"),
    "framework.ends_apart": Fixed((True,), "0.2.2 groups both ends of the model so, whatever is asked"),
    "framework.shards_head_norms": Fixed((True,), "0.2.2 splits norms over heads, whatever is asked"),
    "framework.repeats_keys": Fixed((False,), "0.2.2 leaves keys to the kernel, whatever is asked"),
    "framework.overlap_input_grads": Fixed((True,), _MEGATRON),
    "framework.fp8_params": Fixed((False,), _MEGATRON),
    "framework.vocab_divisor": Fixed((1,), "its vocabularies are not padded"),
    "precision.gemm": Fixed(("bf16",), "its float8 products are not modelled"),
    "precision.moments": Fixed(("fp32",), "its moments are as wide as what it steps"),
    "optimizer.clip_grad_norm": Fixed((True,), "its trainer always clips"),
    "model.norm": Fixed(("rmsnorm",), _SIZES),
    "model.positions": Fixed(("rope",), _SIZES),
    "model.max_positions": Fixed((None,), "rotary embeddings have no rows"),
    "model.rope_scale": Fixed((1.0,), _SIZES),
    "model.embedding_norm": Fixed((False,), _SIZES),
    "model.dropout": Fixed((0.0,), _SIZES),
    "model.num_mtp_layers": Fixed((0,), "its models have no multi-token prediction"),
    "model.mlp.activation": Fixed(("swiglu",), _SIZES),
    "model.mlp.bias": Fixed((False,), _SIZES),
    "model.attention.qkv_bias": Fixed((False,), _SIZES),
    "model.attention.out_bias": Fixed((False,), _SIZES),
    "model.norm_bias": Fixed((True,), "its norms are RMSNorms"),
    "model.norm_placement": Fixed(("before",), _SIZES),
    "model.parallel_branches": Fixed((False,), _SIZES),
    "model.shared_branch_norm": Fixed((False,), _SIZES),
    "model.head_bias": Fixed((False,), _SIZES),
    "model.logit_softcap": Fixed((False,), _SIZES),
    "model.multipliers": Fixed(((),), _SIZES),
    "model.attention.softcap": Fixed((False, None), _SIZES),
    "model.attention.chunked": Fixed((False, None), "its llama4 model is not modelled"),
    "model.attention.nope_every": Fixed((0, None), "its llama4 model is not modelled"),
    "model.attention.rotary_dim": Fixed((None,), "its models turn whole heads"),
    "model.attention.qk_norm_kind": Fixed(("head", None), "its norms are over each head, with one weight for all"),
    "model.attention.sinks": Fixed((False,), "its gpt_oss model is not modelled"),
    "model.attention.window": Fixed((None,), "its gpt_oss model is not modelled"),
    "model.attention.window_every": Fixed((1,), "its gpt_oss model is not modelled"),
    "model.moe.shared_gate": Fixed((False, None), _SIZES),
    "model.moe.every": Fixed((1, None), _SIZES),
    "model.moe.expert_bias": Fixed((False, None), _SIZES),
    "routing.capacity_factor": Fixed((None,), "it drops no tokens"),
    "routing.pad_to_capacity": Fixed((False,), "it drops no tokens"),
    "routing.rank_capacity_factor": Fixed((None,), "it pads no ranks"),
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
MANY_CONNECTIONS = Assumed(CONNECTIONS, "", "mofa's own runs leave it to CUDA, so that streams run side by side")
_ATTENTION = Argument("args.attn_type", "text", "sdpa")
ASSUMED = (
    MANY_CONNECTIONS,
    Assumed(_ATTENTION, "sdpa", "attention is PyTorch's"),
    Assumed(Argument("training.mixed_precision_param", "text", "bfloat16"), "bfloat16", "products are bf16"),
    Assumed(Argument("training.mixed_precision_reduce", "text", "float32"), "float32", "gradients are summed in fp32"),
    Assumed(Argument("training.max_norm", "float", 1.0), 1.0, "gradients are clipped"),
    Assumed(Argument("parallelism.context_parallel_load_balancer", "text", "headtail"), "headtail",
            "causal attention is shared out evenly"),
    Assumed(Argument("compile.backend", "text", "inductor"), "inductor", "blocks are compiled by it"),
)  # fmt: skip


def _no(why: str, *neutral: object) -> Unmodelled:
    return Unmodelled((False, None, "", *neutral), why)


UNMODELLED: dict[str, Unmodelled] = {
    "args.attn_type": Unmodelled(("sdpa",), "flex and varlen attention are not modelled; use sdpa"),
    "training.enable_cpu_offload": _no("memory is moved to the host; leave it out"),
    "training.mixed_precision_param": Unmodelled(("bfloat16",), "products are bf16; use bfloat16"),
    "parallelism.enable_async_tensor_parallel": _no("tensor parallelism is overlapped; leave it out"),
    "compile.enable_async_tensor_parallel": _no("tensor parallelism is overlapped; leave it out"),
    "parallelism.enable_fsdp_symm_mem": _no("FSDP runs other collectives; leave it out"),
    "parallelism.pipeline_parallel_schedule_csv": _no("the schedule is another one; name one by its name"),
    "optimizer.early_step_in_backward": _no("steps are made in the backward pass; leave it out"),
    "model.converters": Unmodelled(([],), "float8 and MX products are not modelled; leave converters out"),
    "fault_tolerance.enable": _no("replicas are torchft's; leave it out"),
    "debug.deterministic": _no("kernels are other ones; leave it out"),
    "debug.detect_anomaly": _no("each op is checked; leave it out"),
}
TORCHTITAN = Table("torchtitan", (*MODEL_ROWS, *TOML_ROWS), FIXED, FACTS, FREE, ASSUMED, UNMODELLED)
"""Settings of torchtitan 0.2.2."""
