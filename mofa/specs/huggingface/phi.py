"""Phi-1 to Phi-4 and Phi-MoE."""

from __future__ import annotations

from typing import Any

from mofa.specs.huggingface.record import Architecture, Config, count, flag, size
from mofa.specs.huggingface.shared_keys import (
    KV_HEADS,
    every_layer_window,
    experts_only,
    gated_mlp,
    gqa,
    hidden_over_heads,
    kv_heads,
    moe,
    refuse,
    rotary,
    rotary_dim,
    sizes,
    ungated_mlp,
)


def _phi(config: Config) -> dict[str, Any]:
    """Parallel branches behind one norm, with biases everywhere, of the output layer too."""
    refuse(config, "qk_layernorm", False, "such norm of queries and keys")
    attention = gqa(
        config, qkv_bias=True, out_bias=True, **rotary_dim({**config, "head_dim": hidden_over_heads(config)})
    )
    return {
        "attention": attention, "mlp": ungated_mlp(config, bias=True), "norm": "layernorm", "parallel_branches": True,
        "shared_branch_norm": True, "head_bias": True,
    }  # fmt: skip


def _phi3(config: Config) -> dict[str, Any]:
    rotation = rotary_dim({**config, "head_dim": hidden_over_heads(config)})
    return {"attention": gqa(config, **rotation, **every_layer_window(config)), "mlp": gated_mlp(config)}


def _phimoe(config: Config) -> dict[str, Any]:
    bias = config["attention_bias"]
    attention = gqa(config, qkv_bias=bias, out_bias=bias, **every_layer_window(config))
    fields = moe(config, num_experts="num_local_experts", width="intermediate_size")
    raw = {"attention": attention, "mlp": experts_only(config), "moe": fields, "norm": "layernorm"}
    return {**raw, "head_bias": config["lm_head_bias"]}


ARCHITECTURES = (
    Architecture(
        "PhiConfig", ("PhiForCausalLM",), ("phi",),
        {**sizes(2048, 24, 32, 8192, 51200, "gelu_new"), "num_key_value_heads": KV_HEADS, **rotary(0.5),
         "qk_layernorm": flag(False)}, _phi,
    ),
    Architecture(
        "Phi3Config", ("Phi3ForCausalLM",), ("phi3",),
        {**sizes(3072, 32, 32, 8192, 32064), "num_key_value_heads": KV_HEADS, **rotary(1.0),
         "sliding_window": count(None)}, _phi3,
    ),
    Architecture(
        "Phi4MultimodalConfig", ("Phi4MultimodalForCausalLM",), ("phi4_multimodal",),
        {**sizes(3072, 32, 32, 8192, 200064), "num_key_value_heads": kv_heads(8), **rotary(1.0),
         "sliding_window": count(None)}, _phi3,
    ),
    Architecture(
        "PhimoeConfig", ("PhimoeForCausalLM", "PhiMoEForCausalLM"), ("phimoe",),
        {**sizes(4096, 32, 32, 6400, 32064), "num_key_value_heads": kv_heads(8), "sliding_window": count(None),
         "attention_bias": flag(False), "lm_head_bias": flag(False),
         "num_local_experts": size(16, "num_local_experts", "num_experts"), "num_experts_per_tok": size(2)}, _phimoe,
    ),
)  # fmt: skip
