"""Qwen2 to Qwen3, with experts and as language models of vision models, and MiMo, whose layers are Qwen2's."""

from __future__ import annotations

from typing import Any

from mofa.specs.files import shown_value
from mofa.specs.huggingface.record import Config, ConfigFamily, count_key, flag_key, list_key, size_key
from mofa.specs.huggingface.shared_keys import (
    HEAD_DIM,
    WINDOW,
    common_keys,
    dense_and_moe_fields,
    gated_mlp_fields,
    gqa_fields,
    kv_heads_key,
    moe_fields,
    switched_window_fields,
)


def _qwen2(config: Config) -> dict[str, Any]:
    return {
        "attention": gqa_fields(config, qkv_bias=True, **switched_window_fields(config)),
        "mlp": gated_mlp_fields(config),
    }


def _mimo(config: Config) -> dict[str, Any]:
    attention = gqa_fields(config, qkv_bias=config["attention_bias"], **switched_window_fields(config))
    return {
        "attention": attention,
        "mlp": gated_mlp_fields(config),
        "num_mtp_layers": config["num_nextn_predict_layers"],
    }


def _qwen3_attention(config: Config) -> dict[str, Any]:
    bias = config["attention_bias"]
    return gqa_fields(config, qkv_bias=bias, out_bias=bias, qk_norm=True, **switched_window_fields(config))


def _qwen3(config: Config) -> dict[str, Any]:
    return {"attention": _qwen3_attention(config), "mlp": gated_mlp_fields(config)}


def _sparse_layers(config: Config) -> dict[str, Any]:
    """Qwen: layer i is sparse where ``(i + 1) % decoder_sparse_step == 0`` and i is not in ``mlp_only_layers``."""
    dense, step = config["mlp_only_layers"], config["decoder_sparse_step"]
    if not dense:
        return {"every": step}
    if dense != list(range(len(dense))) or step != 1:
        raise ValueError(
            f"mlp_only_layers ({shown_value(dense)}) must be the first layers, with decoder_sparse_step 1; mofa "
            "has no other"
        )
    return {"first_k_dense": len(dense)}


def _qwen2_moe(config: Config) -> dict[str, Any]:
    shared = {"shared_hidden": config["shared_expert_intermediate_size"], "shared_gate": True}
    attention = gqa_fields(config, qkv_bias=config["qkv_bias"], **switched_window_fields(config))
    return {
        "attention": attention,
        **dense_and_moe_fields(config, moe_fields(config, **_sparse_layers(config), **shared)),
    }


def _qwen3_moe(config: Config) -> dict[str, Any]:
    return {
        "attention": _qwen3_attention(config),
        **dense_and_moe_fields(config, moe_fields(config, **_sparse_layers(config))),
    }


_SWITCH = {**WINDOW, "use_sliding_window": flag_key(False), "max_window_layers": count_key(28)}
_EXPERTS = {"decoder_sparse_step": size_key(1), "mlp_only_layers": list_key(default=[])}
_QWEN3 = {"head_dim": size_key(128), "attention_bias": flag_key(False)}
_NO_SWITCH = {"use_sliding_window": flag_key(False), "sliding_window": count_key(None)}

_QWEN2 = {
    **common_keys(4096, 32, 32, 22016, 151936),
    "num_key_value_heads": kv_heads_key(32),
    "head_dim": HEAD_DIM,
    **_SWITCH,
}
# Qwen2-VL's class reads no head_dim.
_QWEN2_VL = {
    **common_keys(8192, 80, 64, 29568, 152064), "num_key_value_heads": kv_heads_key(8), **_SWITCH,
    "max_window_layers": count_key(80),
}  # fmt: skip

ARCHITECTURES = (
    ConfigFamily("Qwen2Config", ("Qwen2ForCausalLM",), ("qwen2",), _QWEN2, _qwen2),
    ConfigFamily(
        "Qwen2VLTextConfig", ("Qwen2VLForConditionalGeneration",), ("qwen2_vl", "qwen2_vl_text"), _QWEN2_VL, _qwen2
    ),
    ConfigFamily(
        "Qwen2_5_VLTextConfig", ("Qwen2_5_VLForConditionalGeneration",), ("qwen2_5_vl", "qwen2_5_vl_text"),
        _QWEN2_VL, _qwen2,
    ),
    ConfigFamily(
        "Qwen3Config", ("Qwen3ForCausalLM",), ("qwen3",),
        {**common_keys(4096, 32, 32, 22016, 151936), "num_key_value_heads": kv_heads_key(32), **_QWEN3, **_SWITCH},
         _qwen3,
    ),
    ConfigFamily(
        "Qwen3VLTextConfig", ("Qwen3VLForConditionalGeneration",), ("qwen3_vl", "qwen3_vl_text"),
        {**common_keys(4096, 32, 32, 22016, 151936), "num_key_value_heads": kv_heads_key(32), **_QWEN3, **_NO_SWITCH},
         _qwen3,
    ),
    ConfigFamily(
        "Qwen2MoeConfig", ("Qwen2MoeForCausalLM",), ("qwen2_moe",),
        {**common_keys(2048, 24, 16, 5632, 151936), "num_key_value_heads": kv_heads_key(16), "head_dim": HEAD_DIM,
         **_SWITCH,
         **_EXPERTS, "num_experts": size_key(60), "num_experts_per_tok": size_key(4),
         "moe_intermediate_size": size_key(1408),
         "shared_expert_intermediate_size": size_key(5632), "qkv_bias": flag_key(True)}, _qwen2_moe,
    ),
    ConfigFamily(
        "Qwen3MoeConfig", ("Qwen3MoeForCausalLM",), ("qwen3_moe",),
        {**common_keys(2048, 24, 32, 6144, 151936), "num_key_value_heads": kv_heads_key(4), "head_dim": HEAD_DIM,
         "attention_bias": flag_key(False), **_SWITCH, **_EXPERTS,
         "num_experts": size_key(128, "num_experts", "num_local_experts"), "num_experts_per_tok": size_key(8),
         "moe_intermediate_size": size_key(768)}, _qwen3_moe,
    ),
    ConfigFamily(
        "Qwen3VLMoeTextConfig", ("Qwen3VLMoeForConditionalGeneration",), ("qwen3_vl_moe", "qwen3_vl_moe_text"),
        {**common_keys(2048, 24, 16, 5632, 151936), "num_key_value_heads": kv_heads_key(16), **_QWEN3, **_NO_SWITCH,
         **_EXPERTS,
         "num_experts": size_key(60, "num_experts", "num_local_experts"), "num_experts_per_tok": size_key(4),
         "moe_intermediate_size": size_key(1408)}, _qwen3_moe,
    ),
    ConfigFamily(
        "MiMoConfig", ("MiMoForCausalLM",), ("mimo",),
        {**_QWEN2, "attention_bias": flag_key(True), "num_nextn_predict_layers": count_key(0)}, _mimo,
        remote="XiaomiMiMo/MiMo-7B-Base",
    ),
)  # fmt: skip
