"""Sarvam 30B and 105B: sigmoid experts behind a dense layer, with grouped-query or latent attention."""

from __future__ import annotations

from typing import Any

from mofa.specs.huggingface.deepseek import deepseek_moe_fields, deepseek_moe_keys, latent_attention_keys
from mofa.specs.huggingface.record import Config, ConfigFamily, count_key, flag_key, size_key
from mofa.specs.huggingface.shared_keys import (
    common_keys,
    gqa_fields,
    latent_attention_fields,
    rotary_dim_field,
    rotary_share_key,
)


def _sarvam_mla(config: Config) -> dict[str, Any]:
    return {
        "attention": latent_attention_fields(config),
        **deepseek_moe_fields(config, "sigmoid", grouped=True, correction=True),
    }


def _sarvam_moe(config: Config) -> dict[str, Any]:
    attention = gqa_fields(
        config, qkv_bias=config["attention_bias"], qk_norm=config["use_qk_norm"], **rotary_dim_field(config)
    )
    return {"attention": attention, **deepseek_moe_fields(config, "sigmoid", grouped=True, correction=True)}


_NAMES = {
    "n_routed_experts": size_key(128, "n_routed_experts", "num_local_experts", "num_experts"),
    "n_shared_experts": count_key(1, "n_shared_experts", "num_shared_experts"),
    "num_nextn_predict_layers": count_key(0, "num_nextn_predict_layers", "num_mtp_layers"),
}

ARCHITECTURES = (
    ConfigFamily(
        "SarvamMLAConfig", ("SarvamMLAForCausalLM",), ("sarvam_mla",),
        {**common_keys(4096, 32, 64, 16384, 262144), **latent_attention_keys(None, 512, 128, 64, 128),
         **deepseek_moe_keys(128, 1, 8, 2048, 1), **_NAMES}, _sarvam_mla, built_as="DeepseekV3ForCausalLM",
    ),
    ConfigFamily(
        "SarvamMoEConfig", ("SarvamMoEForCausalLM",), ("sarvam_moe",),
        {**common_keys(4096, 19, 64, 8192, 262144), "num_key_value_heads": size_key(4), "head_dim": size_key(64),
         **rotary_share_key(1.0),
         "attention_bias": flag_key(False, "use_qkv_bias", "attention_bias"), "use_qk_norm": flag_key(True),
         **deepseek_moe_keys(128, 1, 6, 1024, 1), **_NAMES}, _sarvam_moe, built_as="Glm4MoeForCausalLM",
    ),
)  # fmt: skip
