"""Sarvam 30B and 105B: sigmoid experts behind a dense layer, with grouped-query or latent attention."""

from __future__ import annotations

from typing import Any

from mofa.specs.huggingface.deepseek import expert_sizes, latent_sizes, many_experts
from mofa.specs.huggingface.record import Architecture, Config, count, flag, size
from mofa.specs.huggingface.shared_keys import gqa, latent_attention, rotary, rotary_dim, sizes


def _sarvam_mla(config: Config) -> dict[str, Any]:
    return {"attention": latent_attention(config), **many_experts(config, "sigmoid", grouped=True, correction=True)}


def _sarvam_moe(config: Config) -> dict[str, Any]:
    attention = gqa(config, qkv_bias=config["attention_bias"], qk_norm=config["use_qk_norm"], **rotary_dim(config))
    return {"attention": attention, **many_experts(config, "sigmoid", grouped=True, correction=True)}


_NAMES = {
    "n_routed_experts": size(128, "n_routed_experts", "num_local_experts", "num_experts"),
    "n_shared_experts": count(1, "n_shared_experts", "num_shared_experts"),
    "num_nextn_predict_layers": count(0, "num_nextn_predict_layers", "num_mtp_layers"),
}

ARCHITECTURES = (
    Architecture(
        "SarvamMLAConfig", ("SarvamMLAForCausalLM",), ("sarvam_mla",),
        {**sizes(4096, 32, 64, 16384, 262144), **latent_sizes(None, 512, 128, 64, 128),
         **expert_sizes(128, 1, 8, 2048, 1), **_NAMES}, _sarvam_mla, built_as="DeepseekV3ForCausalLM",
    ),
    Architecture(
        "SarvamMoEConfig", ("SarvamMoEForCausalLM",), ("sarvam_moe",),
        {**sizes(4096, 19, 64, 8192, 262144), "num_key_value_heads": size(4), "head_dim": size(64), **rotary(1.0),
         "attention_bias": flag(False, "use_qkv_bias", "attention_bias"), "use_qk_norm": flag(True),
         **expert_sizes(128, 1, 6, 1024, 1), **_NAMES}, _sarvam_moe, built_as="Glm4MoeForCausalLM",
    ),
)  # fmt: skip
