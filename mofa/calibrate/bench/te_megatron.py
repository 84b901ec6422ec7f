"""Megatron-Core's process groups, configurations and contexts of fp8, for chains of Transformer Engine's modules."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

TOKENS, WIDTH, HEADS = 128, 256, 4
NUM = 16
"""Modules in a chain."""
Todo = list[tuple[str, Callable[[], None]]]
Timing = tuple[str, Callable[..., None], tuple[Any, ...], dict[str, Any]]
RECIPES = {"fp8-delayed": ("delayed", "hybrid"), "fp8-tensorwise": ("tensorwise", "hybrid"),
           "fp8-blockwise": ("blockwise", "e4m3")}  # fmt: skip


def timed_library_versions() -> dict[str, str]:
    """Versions of the libraries that are timed."""
    releases = {}
    for name in ("transformer-engine", "transformer_engine", "megatron-core", "triton"):
        try:
            releases[name.replace("_", "-")] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return releases


def _gradient_addition() -> None:
    """Stands in for Apex's kernel of the output layer's weight gradient: Transformer Engine's product adds it."""
    module = types.ModuleType("fused_weight_gradient_mlp_cuda")

    def add(inputs: Any, grad: Any, main_grad: Any) -> None:
        from transformer_engine.pytorch.cpp_extensions import general_gemm

        general_gemm(inputs, grad, out_dtype=main_grad.dtype, layout="NT", out=main_grad, accumulate=True, grad=True)

    module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = add  # type: ignore[attr-defined]
    sys.modules["fused_weight_gradient_mlp_cuda"] = module


def init_process_groups(gpus: int, parallel: dict[str, int]) -> None:
    """Megatron's process groups of these degrees, anew where there were others."""
    if "fused_weight_gradient_mlp_cuda" not in sys.modules:
        _gradient_addition()
    from megatron.core import parallel_state, tensor_parallel

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl")
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**parallel, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)


def small_layer_config(**changes: Any) -> Any:
    """Megatron's configuration of a small layer, with every fusion that its training script has on."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    values = {
        "num_layers": 2, "hidden_size": WIDTH, "ffn_hidden_size": 2 * WIDTH, "num_attention_heads": HEADS,
        "num_query_groups": 2, "kv_channels": WIDTH // HEADS, "gated_linear_unit": True, "activation_func": F.silu,
        "add_bias_linear": False, "normalization": "RMSNorm", "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "bias_activation_fusion": True, "bias_dropout_fusion": True, "apply_rope_fusion": True,
        "gradient_accumulation_fusion": True, "bf16": True, "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16, "deallocate_pipeline_outputs": True,
    } | changes  # fmt: skip
    latent = values.get("multi_latent_attention")
    return (MLATransformerConfig if latent else TransformerConfig)(**values)


def random_leaf_tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor of small random numbers on the GPU that gets a gradient."""
    return torch.randn(*shape, device="cuda", dtype=dtype).mul_(0.1).requires_grad_(True)


def params_with_main_grads(modules: Sequence[Any], *, fused: bool = True) -> list[torch.Tensor]:
    """Parameters of modules, each with the fp32 gradient that Megatron's buffers hold."""
    parameters = [p for module in modules for p in module.parameters()]
    for p in parameters:
        if fused:
            p.main_grad = torch.zeros(p.shape, device="cuda", dtype=torch.float32)
            p.grad_added_to_main_grad = False
    return parameters


def config_and_fp8_context(recipe: str) -> tuple[Any, Callable[[], Any]]:
    """A configuration with a recipe of fp8, and its context."""
    from megatron.core.fp8_utils import get_fp8_context

    if recipe == "bf16":
        config = small_layer_config()
        return config, lambda: get_fp8_context(config)
    name, form = RECIPES[recipe]
    config = small_layer_config(fp8=form, fp8_recipe=name)
    return config, lambda: get_fp8_context(config)


def first_micro_batch_setter(layers: Sequence[Any], first: bool) -> Callable[[], None]:
    """A call that tells layers whether the next micro-batch is a step's first, which casts weights to fp8."""

    def say() -> None:
        for layer in layers:
            layer.is_first_microbatch = first

    return say


def case_with_timing_call(name: str, call: Callable[..., None], *args: Any, **named: Any) -> Timing:
    """A case by name, with what times it and that function's arguments but the recorder."""
    return name, call, args, named
