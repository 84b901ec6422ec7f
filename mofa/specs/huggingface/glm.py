"""GLM-4 and GLM-4.5."""

from __future__ import annotations

from typing import Any

from mofa.specs.huggingface.deepseek import expert_sizes, many_experts
from mofa.specs.huggingface.record import Architecture, Config, count, flag, size
from mofa.specs.huggingface.shared_keys import HEAD_DIM, gated_mlp, gqa, head_dim, kv_heads, rotary, rotary_dim, sizes


def _glm(config: Config) -> dict[str, Any]:
    return {"attention": gqa(config, qkv_bias=config["attention_bias"], **rotary_dim(config)), "mlp": gated_mlp(config)}


def glm4(config: Config) -> dict[str, Any]:
    """GLM-4-0414: norms on either side of both parts."""
    return {**_glm(config), "norm_placement": "both"}


def _glm4_moe(config: Config) -> dict[str, Any]:
    attention = gqa(
        config, qkv_bias=config["attention_bias"], qk_norm=config.get("use_qk_norm", False), **rotary_dim(config)
    )
    return {"attention": attention, **many_experts(config, "sigmoid", grouped=True, correction=True)}


_GLM = {
    **sizes(4096, 40, 32, 13696, 151552), "num_key_value_heads": kv_heads(2), "head_dim": head_dim(128),
    "attention_bias": flag(True), **rotary(0.5),
}  # fmt: skip
_GLM_MOE = {
    **sizes(4096, 46, 96, 10944, 151552), "num_key_value_heads": kv_heads(8), "head_dim": HEAD_DIM,
    **rotary(0.5), **expert_sizes(128, 1, 8, 1408, 1),
}  # fmt: skip

ARCHITECTURES = (
    Architecture("GlmConfig", ("GlmForCausalLM",), ("glm",), _GLM, _glm),
    Architecture("Glm4Config", ("Glm4ForCausalLM",), ("glm4",), _GLM, glm4),
    Architecture(
        "Glm4MoeConfig", ("Glm4MoeForCausalLM",), ("glm4_moe",),
        {**_GLM_MOE, "attention_bias": flag(False), "use_qk_norm": flag(False),
         "num_nextn_predict_layers": count(1, "num_nextn_predict_layers", "num_mtp_layers")}, _glm4_moe,
    ),
    Architecture(
        "Glm4vMoeTextConfig", ("Glm4vMoeForConditionalGeneration",), ("glm4v_moe", "glm4v_moe_text"),
        {**_GLM_MOE, "vocab_size": size(151424), "attention_bias": flag(True)}, _glm4_moe,
    ),
)  # fmt: skip
