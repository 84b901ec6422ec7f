"""The one table of Megatron-LM's arguments, which the export writes by and ``--from megatron`` reads by."""

from __future__ import annotations

from mofa.export.arguments import Argument, ArgumentTable, AssumedArgument, FixedField, UnmodelledArgument
from mofa.export.environment import ONE_CONNECTION
from mofa.export.fields_without_argument import FREE, NOT_RELEASED, WHAT_IT_DOES
from mofa.export.megatron import layer_arguments
from mofa.export.megatron.expert_overlap_arguments import EXPERT_OVERLAP_ROWS
from mofa.export.megatron.job_arguments import JOB_ROWS
from mofa.export.megatron.model_arguments import MODEL_ROWS

_TORCHTITAN = "it is an option of torchtitan"
_OFF = (False, None, "")

FIXED: dict[str, FixedField] = {
    **NOT_RELEASED,
    "framework.name": FixedField(
        ("megatron",),
        "mofa's runs of megatron-local put PyTorch's attention into Megatron's layers, which no argument does, and "
        "the others are other programs",
    ),
    "framework.compile": FixedField((False,), _TORCHTITAN),
    "framework.compile_loss": FixedField((True,), _TORCHTITAN),
    "framework.dp_replicate": FixedField((1,), "optimizer states are sharded over all of dp here"),
    "framework.loss_parallel": FixedField((True,), _TORCHTITAN),
    "framework.early_stop": FixedField((False,), _TORCHTITAN),
    "framework.saves_attention": FixedField((True,), _TORCHTITAN),
    "framework.ends_apart": FixedField((True,), _TORCHTITAN),
    "framework.reshard_after_forward": FixedField((True,), _TORCHTITAN),
    "framework.fp8_all_gather": FixedField((False,), _TORCHTITAN),
    "framework.fp8_scales_ahead": FixedField((False,), _TORCHTITAN),
    "framework.fp8_filter": FixedField(("output",), _TORCHTITAN),
    "framework.shards_head_norms": FixedField((True,), _TORCHTITAN),
    "framework.repeats_keys": FixedField((False,), _TORCHTITAN),
    "framework.process_groups": FixedField(("lazy",), "Megatron-LM gives init_process_group no device"),
    "framework.overlap_input_grads": FixedField((True,), "Transformer Engine's linears have no switch for it"),
    "framework.loss_copies_logits": FixedField((True,), "Transformer Engine does so since 2.20.2, whatever is asked"),
    **layer_arguments.FIXED,
    "model.embedding_norm": FixedField((False,), "pretrain_gpt.py puts no norm behind the embedding"),
    "routing.rank_capacity_factor": FixedField((None,), "Megatron-Core 0.16.1 has no moe-expert-rank-capacity-factor"),
}
ASSUMED = (
    ONE_CONNECTION,
    AssumedArgument(Argument("transformer-impl", "text", "transformer_engine"), "transformer_engine",
    "whose layers run"),
    AssumedArgument(
        Argument("no-create-attention-mask-in-dataloader", "off", True, "create_attention_mask_in_dataloader"), False,
        "a mask of seq-length squared bytes is made and sent",
    ),
    AssumedArgument(
        Argument("no-check-for-nan-in-loss-and-grad", "off", True, "check_for_nan_in_loss_and_grad"), False,
        "the host waits for each micro-batch's loss",
    ),
    AssumedArgument(Argument("rerun-mode", "text", "validate_results"), "disabled",
    "results are checked after each step"),
    AssumedArgument(Argument("moe-router-dtype", "text"), "fp32", "routers compute in this format", of_experts=True),
    AssumedArgument(
        Argument("moe-router-load-balancing-type", "texts", ["aux_loss"]), ["none"],
        "an auxiliary loss takes kernels of its own; choose it for training, mofa predicts none", of_experts=True,
    ),
)  # fmt: skip
"""What mofa's own runs of Megatron-Core have, beside what fields say."""


def _no(why: str, *neutral: object) -> UnmodelledArgument:
    return UnmodelledArgument((*_OFF, *neutral), why)


UNMODELLED: dict[str, UnmodelledArgument] = {
    **dict.fromkeys(
        ("use-megatron-fsdp", "use-custom-fsdp", "use-torch-fsdp2"), _no("parameters are sharded; leave it out")
    ),
    "num-distributed-optimizer-instances": _no("states are shared out in groups; use 1", 1),
    "use-torch-optimizer-for-cpu-offload": _no("the device's part is stepped by other kernels; leave it out"),
    "cpu-offloading-num-layers": _no("memory is moved to the host; leave it out", 0),
    **dict.fromkeys(
        ("enable-cuda-graph", "external-cuda-graph"), _no("Megatron has another word for it; write cuda-graph-impl")
    ),
    **dict.fromkeys(
        ("overlap-param-gather-with-optimizer-step", "defer-embedding-wgrad-compute"),
        _no("it hides communication in a way of its own; leave it out"),
    ),
    **dict.fromkeys(
        ("moe-use-legacy-grouped-gemm", "moe-apply-probs-on-input", "use-te-activation-func",
         "moe-enable-deepep", "moe-layer-recompute"),
        _no("experts run other kernels; leave it out"),
    ),
    "moe-latent-size": _no("experts of a latent width are another model; leave it out"),
    "moe-router-force-load-balancing": UnmodelledArgument((False, True), "balanced routing is what is predicted"),
    **dict.fromkeys(("quick-geglu", "openai-gelu"), _no("the activation is none that is modelled")),
    "activation-func-clamp-value": _no("the activation is clamped, which is not modelled"),
    **dict.fromkeys(
        ("attention-output-gate", "qk-clip", "fp32-residual-connection",
         "apply-residual-connection-post-layernorm", "apply-query-key-layer-scaling"),
        _no("layers are other ones than modelled; leave it out"),
    ),
    "experimental-attention-variant": _no("linear and sparse attention are not modelled"),
    "linear-attention-freq": _no("linear attention is not modelled"),
    **dict.fromkeys(
        ("is-hybrid-model", "hybrid-override-pattern", "heterogeneous-layers-config-path", "spec", "yaml-cfg",
         "use-legacy-models"), _no("it makes another model than these arguments say"),
    ),
    "hybrid-context-parallel": _no("sequences are shared out by length; leave it out"),
    "hierarchical-context-parallel-sizes": _no("context parallelism has levels; leave it out"),
    "distribute-saved-activations": _no("what is kept is shared out over tp; leave it out"),
    "first-last-layers-bf16": _no("some layers would stay in bf16; leave it out"),
    **dict.fromkeys(("fp16", "fp4-format", "fp4-param-gather"), _no("bf16 and fp8 are modelled; use bf16")),
    "main-grads-dtype": _no("main gradients are fp32 here; use fp32, or grad-reduce-in-bf16", "fp32", "torch.float32"),
    "main-params-dtype": _no("main parameters are fp32 here; use fp32", "fp32", "torch.float32"),
    "rampup-batch-size": _no("the batch grows; estimate each size by itself"),
    "microbatch-group-size-per-virtual-pipeline-stage": _no("the interleaved order is another one; leave it out"),
    "use-ring-exchange-p2p": _no("stages exchange by other kernels; leave it out"),
    "mtp-standalone": _no("multi-token prediction has a stage of its own; write pipeline-model-parallel-layout"),
    **dict.fromkeys(
        ("perform-rl-step", "sft", "fim-data", "reset-attention-mask", "reset-position-ids"),
        _no("its batches are not those of plain pretraining"),
    ),
}  # fmt: skip
"""Arguments that change a step or its memory in ways that mofa does not know."""
DUMPED_AS: dict[str, str] = {
    "fp4": "fp4-format",
    "fp4_param": "fp4-param-gather",
    "microbatch_group_size_per_vp_stage": "microbatch-group-size-per-virtual-pipeline-stage",
}
"""Arguments of these by their names in a dump, where these are other ones."""
MEGATRON = ArgumentTable(
    "megatron", (*MODEL_ROWS, *JOB_ROWS, *EXPERT_OVERLAP_ROWS), FIXED, WHAT_IT_DOES, FREE, ASSUMED, UNMODELLED,
)  # fmt: skip
"""Megatron-LM's arguments."""
