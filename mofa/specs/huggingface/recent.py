"""Hunyuan 3, Solar Open, EXAONE-MoE, Mellum, MiniCPM3, Kolibri, and the text parts of Aria and GLM-4V."""

from __future__ import annotations

from typing import Any

from mofa.specs.huggingface.deepseek import dense_layers, latent_sizes
from mofa.specs.huggingface.glm import glm4
from mofa.specs.huggingface.record import Architecture, Config, count, count_or_text, entries, flag, number, size
from mofa.specs.huggingface.shared_keys import (
    HEAD_DIM,
    KV_HEADS,
    WINDOW,
    dense_or_experts,
    experts_only,
    gated_mlp,
    gqa,
    hidden_over_heads,
    kv_heads,
    latent_attention,
    layer_pattern,
    moe,
    period_window,
    refuse,
    sizes,
    unrotated_where_full,
)


def _shared(config: Config, number_of: str) -> dict[str, Any]:
    return {"shared_hidden": config[number_of] * config["moe_intermediate_size"]}


_CHOSEN: dict[str, Any] = {"score": "sigmoid", "correction_bias": True}


def _hy_v3(config: Config) -> dict[str, Any]:
    refuse(config, "mlp_bias", False, "biases of shared experts")
    bias = config["attention_bias"]
    dense = dense_layers({**config, "first_k_dense_replace": 1})
    fields = moe(config, first_k_dense=dense, **_shared(config, "num_shared_experts"), **_CHOSEN)
    return {"attention": gqa(config, qkv_bias=bias, out_bias=bias, qk_norm=True), **dense_or_experts(config, fields)}


def _solar_open(config: Config) -> dict[str, Any]:
    groups = {"num_groups": config["n_group"], "groups_per_token": config["topk_group"]}
    fields = moe(config, num_experts="n_routed_experts", **_shared(config, "n_shared_experts"), **_CHOSEN, **groups)
    return {"attention": gqa(config, qkv_bias=config["attention_bias"]), "mlp": experts_only(config), "moe": fields}


def _exaone_moe(config: Config) -> dict[str, Any]:
    """Windowed layers are rotated; the others only where there are no windows."""
    pattern = config["sliding_window_pattern"]
    every = len(pattern) if isinstance(pattern, str) else pattern
    window = period_window(config, every or 1) if config["sliding_window"] else {}
    groups = {"num_groups": config["n_group"], "groups_per_token": config["topk_group"]}
    fields = moe(
        config, first_k_dense=dense_layers(config), **_shared(config, "num_shared_experts"), **_CHOSEN, **groups
    )
    attention = gqa(config, qk_norm=True, nope_every=window.get("window_every", 0), **window)
    return {"attention": attention, **dense_or_experts(config, fields)}


def _mellum(config: Config) -> dict[str, Any]:
    bias = config["attention_bias"]
    window = layer_pattern(config, config["layer_types"]) if config["layer_types"] else {}
    attention = gqa(config, qkv_bias=bias, out_bias=bias, qk_norm=True, **window)
    fields = moe(config, first_k_dense=dense_layers({**config, "first_k_dense_replace": 0}))
    return {"attention": attention, **dense_or_experts(config, fields), "num_mtp_layers": config["num_mtp_layers"] or 0}


def _kolibri1(config: Config) -> dict[str, Any]:
    """Every fifth layer is full where none are listed; full layers are rotated only where there is no window."""
    listed, layers = config["layer_types"], config["num_hidden_layers"]
    kinds = listed or [("sliding_attention", "full_attention")[(i + 1) % 5 == 0] for i in range(layers)]
    window = layer_pattern(config, kinds)
    unrotated = {} if config["sliding_window"] is None else unrotated_where_full(window)
    fields = moe(config, shared_hidden=config["shared_expert_intermediate_size"], **_CHOSEN)
    raw = {"attention": gqa(config, qk_norm=True, **window, **unrotated), "mlp": experts_only(config), "moe": fields}
    return {**raw, "norm_placement": "both"}


def _minicpm3(config: Config) -> dict[str, Any]:
    multipliers = ("embedding", "branches", "logits")
    return {
        "attention": latent_attention(config),
        "mlp": gated_mlp(config, bias=config["mlp_bias"]),
        "multipliers": multipliers,
    }


def _aria(config: Config) -> dict[str, Any]:
    bias = config["attention_bias"]
    refuse(config, "mlp_bias", False, "biases of shared experts")
    shared = {"shared_hidden": config["moe_num_shared_experts"] * config["intermediate_size"]}
    fields = moe(config, num_experts="moe_num_experts", width="intermediate_size", **shared)
    return {"attention": gqa(config, qkv_bias=bias, out_bias=bias), "mlp": experts_only(config), "moe": fields}


def _glm4v(config: Config) -> dict[str, Any]:
    """GLM-4V's text part always has biases of queries, keys and values."""
    return glm4({**config, "attention_bias": True, "head_dim": hidden_over_heads(config)})


_SPARSE = {"mlp_layer_types": entries(), "moe_intermediate_size": size(1024)}

ARCHITECTURES = (
    Architecture(
        "HYV3Config", ("HYV3ForCausalLM",), ("hy_v3",),
        {**sizes(4096, 80, 64, 13312, 120832), "num_key_value_heads": kv_heads(8), "head_dim": size(128),
         "attention_bias": flag(False), "mlp_bias": flag(False),
         "num_experts": size(192, "num_experts", "num_local_experts"),
         "num_experts_per_tok": size(8), "num_shared_experts": count(1), **_SPARSE,
         "moe_intermediate_size": size(1536)}, _hy_v3,
    ),
    Architecture(
        "SolarOpenConfig", ("SolarOpenForCausalLM",), ("solar_open",),
        {**sizes(4096, 48, 64, None, 196608), "num_key_value_heads": kv_heads(8), "head_dim": size(128),
         "attention_bias": flag(False), "n_routed_experts": size(128, "n_routed_experts", "num_local_experts"),
         "n_shared_experts": count(1), "num_experts_per_tok": size(8), "moe_intermediate_size": size(1280),
         "n_group": size(1), "topk_group": size(1)}, _solar_open,
    ),
    Architecture(
        "ExaoneMoeConfig", ("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"), ("exaone_moe",),
        {**sizes(4096, 32, 32, 16384, 102400), "num_key_value_heads": kv_heads(32), "head_dim": HEAD_DIM,
         "sliding_window": count(4096, nullable=True), "layer_types": entries(),
         "sliding_window_pattern": count_or_text(4), **_SPARSE, "first_k_dense_replace": count(1),
         "num_experts": size(64), "num_experts_per_tok": size(8), "num_shared_experts": count(1), "n_group": size(1),
         "topk_group": size(1)}, _exaone_moe,
    ),
    Architecture(
        "MellumConfig", ("MellumForCausalLM",), ("mellum",),
        {**sizes(2304, 28, 32, 7168, 98304), "num_key_value_heads": kv_heads(4), "head_dim": size(128),
         "attention_bias": flag(False), **WINDOW, "sliding_window": count(1024, nullable=True), **_SPARSE,
         "moe_intermediate_size": size(896), "num_experts": size(64, "num_experts", "num_local_experts"),
         "num_experts_per_tok": size(8), "num_mtp_layers": count(None)}, _mellum,
    ),
    Architecture(
        "Kolibri1Config", ("Kolibri1ForCausalLM",), ("kolibri1",),
        {**sizes(2560, 50, 48, None, 128000), "num_key_value_heads": size(4), "head_dim": size(128),
         "sliding_window": count(513, nullable=True), "layer_types": entries(),
         "num_experts": size(384, "num_experts", "num_local_experts"), "num_experts_per_tok": size(6),
         "moe_intermediate_size": size(512), "shared_expert_intermediate_size": size(512)}, _kolibri1,
    ),
    Architecture(
        "MiniCPM3Config", ("MiniCPM3ForCausalLM",), ("minicpm3",),
        {**sizes(2560, 62, 40, 6400, 73448, tied=True), **latent_sizes(768, 256, 64, 32, 128),
         "v_head_dim": size(None, rule=hidden_over_heads), "mlp_bias": flag(False)}, _minicpm3,
    ),
    Architecture(
        "AriaTextConfig", ("AriaTextForCausalLM", "AriaForConditionalGeneration"), ("aria", "aria_text"),
        {**sizes(4096, 32, 32, 4096, 32000), "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
         "attention_bias": flag(False), "mlp_bias": flag(False), "moe_num_experts": size(8),
         "num_experts_per_tok": size(2, "moe_topk"), "moe_num_shared_experts": count(2)}, _aria,
    ),
    Architecture(
        "Glm4vTextConfig", ("Glm4vForConditionalGeneration",), ("glm4v", "glm4v_text"),
        {**sizes(4096, 40, 32, 13696, 151552), "num_key_value_heads": kv_heads(2),
         "partial_rotary_factor": number(1.0, "partial_rotary_factor", "rope_parameters.partial_rotary_factor",
                                         "rope_scaling.partial_rotary_factor")}, _glm4v,
    ),
)  # fmt: skip
