"""Qwen2 to Qwen3, with experts and as language models of vision models, and MiMo, whose layers are Qwen2's."""

from __future__ import annotations

from typing import Any

from mofa.specs.files import short
from mofa.specs.huggingface.record import Architecture, Config, count, entries, flag, size
from mofa.specs.huggingface.shared_keys import (
    HEAD_DIM,
    WINDOW,
    dense_or_experts,
    gated_mlp,
    gqa,
    kv_heads,
    moe,
    sizes,
    switched_window,
)


def _qwen2(config: Config) -> dict[str, Any]:
    return {"attention": gqa(config, qkv_bias=True, **switched_window(config)), "mlp": gated_mlp(config)}


def _mimo(config: Config) -> dict[str, Any]:
    attention = gqa(config, qkv_bias=config["attention_bias"], **switched_window(config))
    return {"attention": attention, "mlp": gated_mlp(config), "num_mtp_layers": config["num_nextn_predict_layers"]}


def _qwen3_attention(config: Config) -> dict[str, Any]:
    bias = config["attention_bias"]
    return gqa(config, qkv_bias=bias, out_bias=bias, qk_norm=True, **switched_window(config))


def _qwen3(config: Config) -> dict[str, Any]:
    return {"attention": _qwen3_attention(config), "mlp": gated_mlp(config)}


def _sparse_layers(config: Config) -> dict[str, Any]:
    """Qwen: layer i is sparse where ``(i + 1) % decoder_sparse_step == 0`` and i is not in ``mlp_only_layers``."""
    dense, step = config["mlp_only_layers"], config["decoder_sparse_step"]
    if not dense:
        return {"every": step}
    if dense != list(range(len(dense))) or step != 1:
        raise ValueError(
            f"mlp_only_layers ({short(dense)}) must be the first layers, with decoder_sparse_step 1; mofa has no other"
        )
    return {"first_k_dense": len(dense)}


def _qwen2_moe(config: Config) -> dict[str, Any]:
    shared = {"shared_hidden": config["shared_expert_intermediate_size"], "shared_gate": True}
    attention = gqa(config, qkv_bias=config["qkv_bias"], **switched_window(config))
    return {"attention": attention, **dense_or_experts(config, moe(config, **_sparse_layers(config), **shared))}


def _qwen3_moe(config: Config) -> dict[str, Any]:
    return {"attention": _qwen3_attention(config), **dense_or_experts(config, moe(config, **_sparse_layers(config)))}


_SWITCH = {**WINDOW, "use_sliding_window": flag(False), "max_window_layers": count(28)}
_EXPERTS = {"decoder_sparse_step": size(1), "mlp_only_layers": entries(default=[])}
_QWEN3 = {"head_dim": size(128), "attention_bias": flag(False)}
_NO_SWITCH = {"use_sliding_window": flag(False), "sliding_window": count(None)}

_QWEN2 = {**sizes(4096, 32, 32, 22016, 151936), "num_key_value_heads": kv_heads(32), "head_dim": HEAD_DIM, **_SWITCH}
# Qwen2-VL's class reads no head_dim.
_QWEN2_VL = {
    **sizes(8192, 80, 64, 29568, 152064), "num_key_value_heads": kv_heads(8), **_SWITCH,
    "max_window_layers": count(80),
}  # fmt: skip

ARCHITECTURES = (
    Architecture("Qwen2Config", ("Qwen2ForCausalLM",), ("qwen2",), _QWEN2, _qwen2),
    Architecture(
        "Qwen2VLTextConfig", ("Qwen2VLForConditionalGeneration",), ("qwen2_vl", "qwen2_vl_text"), _QWEN2_VL, _qwen2
    ),
    Architecture(
        "Qwen2_5_VLTextConfig", ("Qwen2_5_VLForConditionalGeneration",), ("qwen2_5_vl", "qwen2_5_vl_text"),
        _QWEN2_VL, _qwen2,
    ),
    Architecture(
        "Qwen3Config", ("Qwen3ForCausalLM",), ("qwen3",),
        {**sizes(4096, 32, 32, 22016, 151936), "num_key_value_heads": kv_heads(32), **_QWEN3, **_SWITCH}, _qwen3,
    ),
    Architecture(
        "Qwen3VLTextConfig", ("Qwen3VLForConditionalGeneration",), ("qwen3_vl", "qwen3_vl_text"),
        {**sizes(4096, 32, 32, 22016, 151936), "num_key_value_heads": kv_heads(32), **_QWEN3, **_NO_SWITCH}, _qwen3,
    ),
    Architecture(
        "Qwen2MoeConfig", ("Qwen2MoeForCausalLM",), ("qwen2_moe",),
        {**sizes(2048, 24, 16, 5632, 151936), "num_key_value_heads": kv_heads(16), "head_dim": HEAD_DIM, **_SWITCH,
         **_EXPERTS, "num_experts": size(60), "num_experts_per_tok": size(4), "moe_intermediate_size": size(1408),
         "shared_expert_intermediate_size": size(5632), "qkv_bias": flag(True)}, _qwen2_moe,
    ),
    Architecture(
        "Qwen3MoeConfig", ("Qwen3MoeForCausalLM",), ("qwen3_moe",),
        {**sizes(2048, 24, 32, 6144, 151936), "num_key_value_heads": kv_heads(4), "head_dim": HEAD_DIM,
         "attention_bias": flag(False), **_SWITCH, **_EXPERTS,
         "num_experts": size(128, "num_experts", "num_local_experts"), "num_experts_per_tok": size(8),
         "moe_intermediate_size": size(768)}, _qwen3_moe,
    ),
    Architecture(
        "Qwen3VLMoeTextConfig", ("Qwen3VLMoeForConditionalGeneration",), ("qwen3_vl_moe", "qwen3_vl_moe_text"),
        {**sizes(2048, 24, 16, 5632, 151936), "num_key_value_heads": kv_heads(16), **_QWEN3, **_NO_SWITCH, **_EXPERTS,
         "num_experts": size(60, "num_experts", "num_local_experts"), "num_experts_per_tok": size(4),
         "moe_intermediate_size": size(1408)}, _qwen3_moe,
    ),
    Architecture(
        "MiMoConfig", ("MiMoForCausalLM",), ("mimo",),
        {**_QWEN2, "attention_bias": flag(True), "num_nextn_predict_layers": count(0)}, _mimo,
        remote="XiaomiMiMo/MiMo-7B-Base",
    ),
)  # fmt: skip
