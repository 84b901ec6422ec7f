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
    plain_mlp,
    refuse,
    sizes,
)


def _mistral(c: Config) -> dict[str, Any]:
    return {"attention": gqa(c, **layer_pattern(c, c["layer_types"])), "mlp": gated_mlp(c)}


def _mixtral(c: Config) -> dict[str, Any]:
    fields = moe(c, num_experts="num_local_experts", width="intermediate_size")
    return {"attention": gqa(c, **layer_pattern(c, c["layer_types"])), "mlp": experts_only(c), "moe": fields}


def _minimax_m2(c: Config) -> dict[str, Any]:
    turned = c["rotary_dim"] or c["head_dim"]
    rotation: dict[str, Any] = {} if turned == c["head_dim"] else {"rotary_dim": turned}
    norm: dict[str, Any] = {"qk_norm": True, "qk_norm_kind": "full"} if c["use_qk_norm"] else {}
    fields = moe(c, num_experts="num_local_experts", width="intermediate_size", score="sigmoid", correction_bias=True)
    mtp = c["num_mtp_modules"] if c["use_mtp"] else 0
    if mtp:
        refuse(c, "mtp_transformer_layers", 1, "prediction module of several layers")
    raw = {"attention": gqa(c, **norm, **rotation), "mlp": experts_only(c), "moe": fields}
    return {**raw, "num_mtp_layers": mtp}


def _starcoder2(c: Config) -> dict[str, Any]:
    bias = c["use_bias"]
    attention = gqa(c, qkv_bias=bias, out_bias=bias, **every_layer_window(c))
    return {"attention": attention, "mlp": plain_mlp(c, bias=bias), "norm": "layernorm"}


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
