"""Mistral, Mixtral, Ministral, MiniMax-M2 and StarCoder2."""

from __future__ import annotations

from typing import Any

from mofa.specs.huggingface.record import Config, ConfigFamily, count_key, flag_key, size_key
from mofa.specs.huggingface.shared_keys import (
    HEAD_DIM,
    WINDOW,
    activation_field_without_mlp,
    common_keys,
    every_layer_window_field,
    gated_mlp_fields,
    gqa_fields,
    head_dim_key,
    kv_heads_key,
    listed_window_fields,
    moe_fields,
    refuse_other_value,
    ungated_mlp_fields,
)


def _mistral(config: Config) -> dict[str, Any]:
    return {
        "attention": gqa_fields(config, **listed_window_fields(config, config["layer_types"])),
        "mlp": gated_mlp_fields(config),
    }


def _mixtral(config: Config) -> dict[str, Any]:
    fields = moe_fields(config, num_experts="num_local_experts", width="intermediate_size")
    return {
        "attention": gqa_fields(config, **listed_window_fields(config, config["layer_types"])),
        "mlp": activation_field_without_mlp(config),
        "moe": fields,
    }


def _minimax_m2(config: Config) -> dict[str, Any]:
    turned = config["rotary_dim"] or config["head_dim"]
    rotation: dict[str, Any] = {} if turned == config["head_dim"] else {"rotary_dim": turned}
    norm: dict[str, Any] = {"qk_norm": True, "qk_norm_kind": "full"} if config["use_qk_norm"] else {}
    fields = moe_fields(
        config, num_experts="num_local_experts", width="intermediate_size", score="sigmoid", correction_bias=True
    )
    mtp = config["num_mtp_modules"] if config["use_mtp"] else 0
    if mtp:
        refuse_other_value(config, "mtp_transformer_layers", 1, "prediction module of several layers")
    raw = {
        "attention": gqa_fields(config, **norm, **rotation),
        "mlp": activation_field_without_mlp(config),
        "moe": fields,
    }
    return {**raw, "num_mtp_layers": mtp}


def _starcoder2(config: Config) -> dict[str, Any]:
    bias = config["use_bias"]
    attention = gqa_fields(config, qkv_bias=bias, out_bias=bias, **every_layer_window_field(config))
    return {"attention": attention, "mlp": ungated_mlp_fields(config, bias=bias), "norm": "layernorm"}


_EXPERTS = {"num_local_experts": size_key(8, "num_local_experts", "num_experts"), "num_experts_per_tok": size_key(2)}

ARCHITECTURES = (
    ConfigFamily(
        "MistralConfig", ("MistralForCausalLM",), ("mistral",),
        {**common_keys(4096, 32, 32, 14336, 32000), "num_key_value_heads": kv_heads_key(8), "head_dim": HEAD_DIM,
         **WINDOW,
         "sliding_window": count_key(4096, nullable=True)}, _mistral,
    ),
    ConfigFamily(
        "MinistralConfig", ("MinistralForCausalLM",), ("ministral",),
        {**common_keys(4096, 32, 32, 14336, 32000), "num_key_value_heads": kv_heads_key(8), "head_dim": HEAD_DIM,
         **WINDOW,
         "sliding_window": count_key(4096, nullable=True)}, _mistral,
    ),
    ConfigFamily(
        "Ministral3Config", ("Ministral3ForCausalLM",), ("ministral3",),
        {**common_keys(4096, 34, 32, 14336, 131072), "num_key_value_heads": kv_heads_key(8),
         "head_dim": head_dim_key(128), **WINDOW}, _mistral,
    ),
    ConfigFamily(
        "MixtralConfig", ("MixtralForCausalLM",), ("mixtral",),
        {**common_keys(4096, 32, 32, 14336, 32000), "num_key_value_heads": kv_heads_key(8), "head_dim": HEAD_DIM,
         **WINDOW,
         **_EXPERTS}, _mixtral,
    ),
    ConfigFamily(
        "MiniMaxM2Config", ("MiniMaxM2ForCausalLM",), ("minimax_m2",),
        {**common_keys(3072, 62, 48, 1536, 200064), "num_key_value_heads": kv_heads_key(8),
         "head_dim": head_dim_key(128), "num_local_experts": size_key(256, "num_local_experts", "num_experts"),
         "num_experts_per_tok": size_key(8), "rotary_dim": size_key(None), "use_qk_norm": flag_key(True),
         "use_mtp": flag_key(False),
         "num_mtp_modules": count_key(0), "mtp_transformer_layers": count_key(1)}, _minimax_m2,
    ),
    ConfigFamily(
        "Starcoder2Config", ("Starcoder2ForCausalLM",), ("starcoder2",),
        {**common_keys(3072, 30, 24, 12288, 49152, "gelu_pytorch_tanh", tied=True),
         "num_key_value_heads": kv_heads_key(2),
         "sliding_window": count_key(None), "use_bias": flag_key(True)}, _starcoder2,
    ),
)  # fmt: skip
