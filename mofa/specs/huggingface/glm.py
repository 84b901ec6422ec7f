"""GLM-4 and GLM-4.5."""

from __future__ import annotations

from typing import Any

from mofa.specs.huggingface.deepseek import deepseek_moe_fields, deepseek_moe_keys
from mofa.specs.huggingface.record import Config, ConfigFamily, count_key, flag_key, size_key
from mofa.specs.huggingface.shared_keys import (
    HEAD_DIM,
    common_keys,
    gated_mlp_fields,
    gqa_fields,
    head_dim_key,
    kv_heads_key,
    rotary_dim_field,
    rotary_share_key,
)


def _glm(config: Config) -> dict[str, Any]:
    return {
        "attention": gqa_fields(config, qkv_bias=config["attention_bias"], **rotary_dim_field(config)),
        "mlp": gated_mlp_fields(config),
    }


def glm4_fields(config: Config) -> dict[str, Any]:
    """GLM-4-0414: norms on either side of both parts."""
    return {**_glm(config), "norm_placement": "both"}


def _glm4_moe(config: Config) -> dict[str, Any]:
    attention = gqa_fields(
        config, qkv_bias=config["attention_bias"], qk_norm=config.get("use_qk_norm", False), **rotary_dim_field(config)
    )
    return {"attention": attention, **deepseek_moe_fields(config, "sigmoid", grouped=True, correction=True)}


_GLM = {
    **common_keys(4096, 40, 32, 13696, 151552), "num_key_value_heads": kv_heads_key(2), "head_dim": head_dim_key(128),
    "attention_bias": flag_key(True), **rotary_share_key(0.5),
}  # fmt: skip
_GLM_MOE = {
    **common_keys(4096, 46, 96, 10944, 151552), "num_key_value_heads": kv_heads_key(8), "head_dim": HEAD_DIM,
    **rotary_share_key(0.5), **deepseek_moe_keys(128, 1, 8, 1408, 1),
}  # fmt: skip

ARCHITECTURES = (
    ConfigFamily("GlmConfig", ("GlmForCausalLM",), ("glm",), _GLM, _glm),
    ConfigFamily("Glm4Config", ("Glm4ForCausalLM",), ("glm4",), _GLM, glm4_fields),
    ConfigFamily(
        "Glm4MoeConfig", ("Glm4MoeForCausalLM",), ("glm4_moe",),
        {**_GLM_MOE, "attention_bias": flag_key(False), "use_qk_norm": flag_key(False),
         "num_nextn_predict_layers": count_key(1, "num_nextn_predict_layers", "num_mtp_layers")}, _glm4_moe,
    ),
    ConfigFamily(
        "Glm4vMoeTextConfig", ("Glm4vMoeForConditionalGeneration",), ("glm4v_moe", "glm4v_moe_text"),
        {**_GLM_MOE, "vocab_size": size_key(151424), "attention_bias": flag_key(True)}, _glm4_moe,
    ),
)  # fmt: skip
