"""Phi-1 to Phi-4 and Phi-MoE."""

from __future__ import annotations

from typing import Any

from mofa.specs.huggingface.record import Config, ConfigFamily, count_key, flag_key, size_key
from mofa.specs.huggingface.shared_keys import (
    KV_HEADS,
    activation_field_without_mlp,
    common_keys,
    every_layer_window_field,
    gated_mlp_fields,
    gqa_fields,
    hidden_over_heads,
    kv_heads_key,
    moe_fields,
    refuse_other_value,
    rotary_dim_field,
    rotary_share_key,
    ungated_mlp_fields,
)


def _phi(config: Config) -> dict[str, Any]:
    """Parallel branches behind one norm, with biases everywhere, of the output layer too."""
    refuse_other_value(config, "qk_layernorm", False, "such norm of queries and keys")
    attention = gqa_fields(
        config, qkv_bias=True, out_bias=True, **rotary_dim_field({**config, "head_dim": hidden_over_heads(config)})
    )
    return {
        "attention": attention, "mlp": ungated_mlp_fields(config, bias=True), "norm": "layernorm",
        "parallel_branches": True,
        "shared_branch_norm": True, "head_bias": True,
    }  # fmt: skip


def _phi3(config: Config) -> dict[str, Any]:
    rotation = rotary_dim_field({**config, "head_dim": hidden_over_heads(config)})
    return {
        "attention": gqa_fields(config, **rotation, **every_layer_window_field(config)),
        "mlp": gated_mlp_fields(config),
    }


def _phimoe(config: Config) -> dict[str, Any]:
    bias = config["attention_bias"]
    attention = gqa_fields(config, qkv_bias=bias, out_bias=bias, **every_layer_window_field(config))
    fields = moe_fields(config, num_experts="num_local_experts", width="intermediate_size")
    raw = {"attention": attention, "mlp": activation_field_without_mlp(config), "moe": fields, "norm": "layernorm"}
    return {**raw, "head_bias": config["lm_head_bias"]}


ARCHITECTURES = (
    ConfigFamily(
        "PhiConfig", ("PhiForCausalLM",), ("phi",),
        {**common_keys(2048, 24, 32, 8192, 51200, "gelu_new"), "num_key_value_heads": KV_HEADS, **rotary_share_key(0.5),
         "qk_layernorm": flag_key(False)}, _phi,
    ),
    ConfigFamily(
        "Phi3Config", ("Phi3ForCausalLM",), ("phi3",),
        {**common_keys(3072, 32, 32, 8192, 32064), "num_key_value_heads": KV_HEADS, **rotary_share_key(1.0),
         "sliding_window": count_key(None)}, _phi3,
    ),
    ConfigFamily(
        "Phi4MultimodalConfig", ("Phi4MultimodalForCausalLM",), ("phi4_multimodal",),
        {**common_keys(3072, 32, 32, 8192, 200064), "num_key_value_heads": kv_heads_key(8), **rotary_share_key(1.0),
         "sliding_window": count_key(None)}, _phi3,
    ),
    ConfigFamily(
        "PhimoeConfig", ("PhimoeForCausalLM", "PhiMoEForCausalLM"), ("phimoe",),
        {**common_keys(4096, 32, 32, 6400, 32064), "num_key_value_heads": kv_heads_key(8),
         "sliding_window": count_key(None),
         "attention_bias": flag_key(False), "lm_head_bias": flag_key(False),
         "num_local_experts": size_key(16, "num_local_experts", "num_experts"), "num_experts_per_tok": size_key(2)},
         _phimoe,
    ),
)  # fmt: skip
