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
    plain_mlp,
    refuse,
    rotary,
    rotary_dim,
    sizes,
)


def _phi(c: Config) -> dict[str, Any]:
    """Parallel branches behind one norm, with biases everywhere, of the output layer too."""
    refuse(c, "qk_layernorm", False, "such norm of queries and keys")
    attention = gqa(c, qkv_bias=True, out_bias=True, **rotary_dim({**c, "head_dim": hidden_over_heads(c)}))
    return {
        "attention": attention, "mlp": plain_mlp(c, bias=True), "norm": "layernorm", "parallel_branches": True,
        "shared_branch_norm": True, "head_bias": True,
    }  # fmt: skip


def _phi3(c: Config) -> dict[str, Any]:
    rotation = rotary_dim({**c, "head_dim": hidden_over_heads(c)})
    return {"attention": gqa(c, **rotation, **every_layer_window(c)), "mlp": gated_mlp(c)}


def _phimoe(c: Config) -> dict[str, Any]:
    bias = c["attention_bias"]
    attention = gqa(c, qkv_bias=bias, out_bias=bias, **every_layer_window(c))
    fields = moe(c, num_experts="num_local_experts", width="intermediate_size")
    raw = {"attention": attention, "mlp": experts_only(c), "moe": fields, "norm": "layernorm"}
    return {**raw, "head_bias": c["lm_head_bias"]}


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
