"""Which options each framework offers, and which facts its layers read."""

from __future__ import annotations

from mofa.specs.framework_names import Family

LOCAL_LAYERS: tuple[Family, ...] = ("megatron-2022", "megatron-local")
"""Frameworks of Megatron's own layers, without Transformer Engine."""
PYTORCH_MODULES: tuple[Family, ...] = ("fsdp1", "torchtitan")
"""Frameworks of plain PyTorch modules that PyTorch itself shards."""
MEGATRON: tuple[Family, ...] = ("megatron", *LOCAL_LAYERS)
READ_BY: dict[str, tuple[tuple[Family, ...], dict[Family, float | str]]] = {
    "accumulation_bytes_per_param": (MEGATRON, {"fsdp1": 10.0, "torchtitan": 10.0}),
    "chunk_overlap": (("megatron",), {}),
    "clipped_steps": (MEGATRON, dict.fromkeys(PYTORCH_MODULES, 1.0)),
    "compile_loss": (("fsdp1", "torchtitan"), dict.fromkeys(MEGATRON, True)),
    "grouped_alignment": (("fsdp1", "torchtitan"), dict.fromkeys(MEGATRON, 1)),
    "loss_parallel": (("torchtitan",), {"fsdp1": True, **dict.fromkeys(MEGATRON, True)}),
    "reduced_bytes_per_param": (("fsdp1", *MEGATRON), {"torchtitan": 4.0}),  # mixed_precision_reduce: float32 alone
    "early_stop": (PYTORCH_MODULES, {}),
    "fused_qkv": (("fsdp1",), {}),
    "module_calls": (("megatron",), {}),
    "loss_metrics": (("fsdp1",), {}),
    "fused_softmax": (LOCAL_LAYERS, {}),
    "fused_rope": (MEGATRON, {}),
    "fused_swiglu": (MEGATRON, {}),
    "cuda_graphs": (("megatron",), dict.fromkeys((*PYTORCH_MODULES, *LOCAL_LAYERS), "none")),
    "permute_fusion": (("megatron",), dict.fromkeys((*PYTORCH_MODULES, *LOCAL_LAYERS), True)),
    "router_fusion": (("megatron",), {}),
    "router_padding": (("megatron",), {}),
    "fp8_all_gather": (("torchtitan",), {}),
    "fp8_filter": (("torchtitan",), dict.fromkeys(("fsdp1", *MEGATRON), "output")),
    "fp8_scales_ahead": (("torchtitan",), {}),
    "repeats_keys": (("torchtitan",), {}),
    "reshard_after_forward": (PYTORCH_MODULES, dict.fromkeys(MEGATRON, True)),
    "shards_head_norms": (("torchtitan",), dict.fromkeys(("fsdp1", *MEGATRON), True)),
    "scatters_pipeline_sends": (("megatron", *LOCAL_LAYERS), {}),
}
"""Which frameworks' layers read a fact, and what it is for those others where it is not false: set to anything else it
would change nothing."""
OFFERED: dict[Family, dict[str, tuple[str, ...]]] = {
    "fsdp1": {
        "data_parallel": ("fsdp", "hsdp"),
        "attention": ("sdpa", "flash", "flash1"),
        "optimizer": ("fused", "foreach", "for-loop"),
        "experts": ("grouped",),
        "dispatcher": ("alltoall",),
        "cross_entropy_fusion": ("none", "native"),
    },
    "megatron": {
        "data_parallel": ("distributed-optimizer", "ddp"),
        "attention": ("fused", "flash"),
        "optimizer": ("te", "fused", "foreach"),
        "experts": ("grouped", "sequential"),
        "dispatcher": ("alltoall", "allgather", "deepep"),
        "cross_entropy_fusion": ("none", "native", "te"),
    },
    "megatron-2022": {
        "data_parallel": ("distributed-optimizer", "ddp"),
        "attention": ("unfused",),
        "optimizer": ("fused", "foreach"),
        "experts": ("sequential",),
        "dispatcher": ("alltoall",),
        "cross_entropy_fusion": ("none",),
    },
    "megatron-local": {
        "data_parallel": ("distributed-optimizer", "ddp"),
        "attention": ("sdpa", "unfused"),
        "optimizer": ("foreach", "fused", "for-loop"),
        "experts": ("sequential", "grouped"),
        "dispatcher": ("alltoall", "allgather"),
        "cross_entropy_fusion": ("none", "native"),
    },
    "torchtitan": {
        "data_parallel": ("fsdp", "hsdp", "ddp"),
        "attention": ("sdpa",),
        "optimizer": ("fused", "foreach", "for-loop"),
        "experts": ("grouped", "sequential"),
        "dispatcher": ("alltoall", "deepep"),
        "cross_entropy_fusion": ("none", "native"),
    },
}
"""What each framework has of the options that are modelled."""
