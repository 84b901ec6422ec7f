"""Mistral, Mixtral, Ministral, MiniMax-M2 and StarCoder2."""

from __future__ import annotations

from typing import Any

from mofa.specs.huggingface.record import Architecture, Config, count, flag, size
from mofa.specs.huggingface.shared_keys import (
    HEAD_DIM,
    WINDOW,
    every_layer_window,
    experts_only,
    gated_mlp,
    gqa,
    head_dim,
    kv_heads,
    layer_pattern,
    moe,
    refuse,
    sizes,
    ungated_mlp,
)


def _mistral(config: Config) -> dict[str, Any]:
    return {"attention": gqa(config, **layer_pattern(config, config["layer_types"])), "mlp": gated_mlp(config)}


def _mixtral(config: Config) -> dict[str, Any]:
    fields = moe(config, num_experts="num_local_experts", width="intermediate_size")
    return {
        "attention": gqa(config, **layer_pattern(config, config["layer_types"])),
        "mlp": experts_only(config),
        "moe": fields,
    }


def _minimax_m2(config: Config) -> dict[str, Any]:
    turned = config["rotary_dim"] or config["head_dim"]
    rotation: dict[str, Any] = {} if turned == config["head_dim"] else {"rotary_dim": turned}
    norm: dict[str, Any] = {"qk_norm": True, "qk_norm_kind": "full"} if config["use_qk_norm"] else {}
    fields = moe(
        config, num_experts="num_local_experts", width="intermediate_size", score="sigmoid", correction_bias=True
    )
    mtp = config["num_mtp_modules"] if config["use_mtp"] else 0
    if mtp:
        refuse(config, "mtp_transformer_layers", 1, "prediction module of several layers")
    raw = {"attention": gqa(config, **norm, **rotation), "mlp": experts_only(config), "moe": fields}
    return {**raw, "num_mtp_layers": mtp}


def _starcoder2(config: Config) -> dict[str, Any]:
    bias = config["use_bias"]
    attention = gqa(config, qkv_bias=bias, out_bias=bias, **every_layer_window(config))
    return {"attention": attention, "mlp": ungated_mlp(config, bias=bias), "norm": "layernorm"}


_EXPERTS = {"num_local_experts": size(8, "num_local_experts", "num_experts"), "num_experts_per_tok": size(2)}

ARCHITECTURES = (
    Architecture(
        "MistralConfig", ("MistralForCausalLM",), ("mistral",),
        {**sizes(4096, 32, 32, 14336, 32000), "num_key_value_heads": kv_heads(8), "head_dim": HEAD_DIM, **WINDOW,
         "sliding_window": count(4096, nullable=True)}, _mistral,
    ),
    Architecture(
        "MinistralConfig", ("MinistralForCausalLM",), ("ministral",),
        {**sizes(4096, 32, 32, 14336, 32000), "num_key_value_heads": kv_heads(8), "head_dim": HEAD_DIM, **WINDOW,
         "sliding_window": count(4096, nullable=True)}, _mistral,
    ),
    Architecture(
        "Ministral3Config", ("Ministral3ForCausalLM",), ("ministral3",),
        {**sizes(4096, 34, 32, 14336, 131072), "num_key_value_heads": kv_heads(8),
         "head_dim": head_dim(128), **WINDOW}, _mistral,
    ),
    Architecture(
        "MixtralConfig", ("MixtralForCausalLM",), ("mixtral",),
        {**sizes(4096, 32, 32, 14336, 32000), "num_key_value_heads": kv_heads(8), "head_dim": HEAD_DIM, **WINDOW,
         **_EXPERTS}, _mixtral,
    ),
    Architecture(
        "MiniMaxM2Config", ("MiniMaxM2ForCausalLM",), ("minimax_m2",),
        {**sizes(3072, 62, 48, 1536, 200064), "num_key_value_heads": kv_heads(8),
         "head_dim": head_dim(128), "num_local_experts": size(256, "num_local_experts", "num_experts"),
         "num_experts_per_tok": size(8), "rotary_dim": size(None), "use_qk_norm": flag(True), "use_mtp": flag(False),
         "num_mtp_modules": count(0), "mtp_transformer_layers": count(1)}, _minimax_m2,
    ),
    Architecture(
        "Starcoder2Config", ("Starcoder2ForCausalLM",), ("starcoder2",),
        {**sizes(3072, 30, 24, 12288, 49152, "gelu_pytorch_tanh", tied=True), "num_key_value_heads": kv_heads(2),
         "sliding_window": count(None), "use_bias": flag(True)}, _starcoder2,
    ),
)  # fmt: skip
