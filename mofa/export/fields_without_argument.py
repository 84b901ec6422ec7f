"""Fields that no framework has an argument for, and why: said once for all of them."""

from __future__ import annotations

from collections.abc import Mapping

from mofa.export.arguments import FixedField

FREE: Mapping[str, str] = {
    "name": "a name of mofa's, in the head of the files",
    "source": "where the workload's facts come from",
    "notes": "what a config.json left out or left to defaults, said beside the plan",
    **dict.fromkeys(
        (
            "model.layers.kinds",
            "model.layers.pattern",
            "model.layers.prediction",
            "model.layers.residual_streams",
            "model.layers.zero_experts",
            "model.layers.expert_latent",
        ),
        "a model with layers of several kinds has no plan yet: each command refuses its step",
    ),
    "tokens": "how long a job trains is no part of a step; the script says it in steps",
    "framework": "the workload's usual framework; the plan's is framework.name",
    "model.name": "a name of mofa's, in the head of the files",
    "model.source": "where the model's facts come from",
    "routing.kind": "which experts tokens choose comes of training; the head of the files says what was predicted with",
    "routing.s": "as routing.kind",
    "routing.alpha": "as routing.kind",
    "routing.sigma": "as routing.kind",
    "routing.file": "as routing.kind",
    "routing.preset": "as routing.kind",
    "routing.memory_quantile": "which quantile of routing memory must hold is mofa's",
    "routing.seed": "of mofa's own draws",
    "routing.steps_before": "from which step on the prediction holds",
    "routing.drifts": "as routing.kind",
    "routing.samples": "of mofa's own draws",
    "strategy.dp": "follows from the GPUs of the launch and the other degrees",
    "strategy.framework": "is framework.name",
    "strategy.tp_overlap": "is framework.tp_overlap where it is chosen",
    "strategy.dispatcher": "is framework.dispatcher where it is chosen",
    "strategy.dp_replicate": "is framework.dp_replicate where it is chosen",
    "strategy.overlap_param_gather": "is framework.overlap_param_gather where it is chosen",
    "framework.version": "the version whose facts the prediction rests on, in the head of the files",
    "framework.provenance": "where the framework's facts come from, in the head of the files",
    "framework.source": "where the framework's facts come from",
    "framework.pytorch": "a release is installed, not asked for; the head of the files says it",
}
"""Fields of any value."""
NOT_RELEASED: Mapping[str, FixedField] = {
    "strategy.balancing": FixedField(("none",), "no released framework schedules tokens over replicas (MicroMoE)"),
    "strategy.token_chunks": FixedField((1,), "no released framework passes experts in token chunks (MemFine)"),
    "framework.chunk_overlap": FixedField((False,), "no released framework passes experts in token chunks (MemFine)"),
    "framework.routed_copies": FixedField(("materialised",), "no released framework gathers rows by index (MoEBlaze)"),
    "framework.deepspeed": FixedField(("",), "it is an engine of megatron-2022"),
    "framework.splits_layers": FixedField(("even",), "it is an option of DeepSpeed"),
    "framework.norms_gradients": FixedField((True,), "it is an option of DeepSpeed"),
    "framework.optimizer_rank": FixedField((0,), "it is an option of DeepSpeed"),
    "framework.casts_to_reduce": FixedField((False,), "it is an option of DeepSpeed"),
    "framework.fused_qkv": FixedField((False,), "it is an option of fsdp1"),
    "framework.loss_metrics": FixedField((0,), "it is an option of fsdp1"),
}
"""Fields that must be as in any released framework of today."""
WHAT_IT_DOES: Mapping[str, str] = dict.fromkeys(
    (
        "framework.params_bytes_per_param", "framework.states_bytes_per_param", "framework.shards_params",
        "framework.flat_params", "framework.fused_softmax", "framework.scatters_pipeline_sends",
        "framework.clipped_steps", "framework.default_recompute", "framework.grouped_alignment",
        "framework.grouped_kernel", "framework.python_functions", "framework.balances_by", "framework.module_calls",
        "framework.dispatch_syncs",
    ),
    "it says what the framework does, and no argument changes that",
)  # fmt: skip
"""Facts of a framework that every one has as its profile says."""
