"""Hunyuan 3, Solar Open, EXAONE-MoE, Mellum, MiniCPM3, Kolibri, and the text parts of Aria and GLM-4V."""

from __future__ import annotations

from typing import Any

from mofa.specs.huggingface.deepseek import latent_attention_keys, num_first_dense_layers
from mofa.specs.huggingface.glm import glm4_fields
from mofa.specs.huggingface.record import (
    Config,
    ConfigFamily,
    count_key,
    count_or_text_key,
    flag_key,
    list_key,
    number_key,
    size_key,
)
from mofa.specs.huggingface.shared_keys import (
    HEAD_DIM,
    KV_HEADS,
    WINDOW,
    activation_field_without_mlp,
    common_keys,
    dense_and_moe_fields,
    gated_mlp_fields,
    gqa_fields,
    hidden_over_heads,
    kv_heads_key,
    latent_attention_fields,
    listed_window_fields,
    moe_fields,
    periodic_window_fields,
    refuse_other_value,
    unrotated_full_attention_field,
)


def _shared(config: Config, number_of: str) -> dict[str, Any]:
    return {"shared_hidden": config[number_of] * config["moe_intermediate_size"]}


_CHOSEN: dict[str, Any] = {"score": "sigmoid", "correction_bias": True}


def _hy_v3(config: Config) -> dict[str, Any]:
    refuse_other_value(config, "mlp_bias", False, "biases of shared experts")
    bias = config["attention_bias"]
    dense = num_first_dense_layers({**config, "first_k_dense_replace": 1})
    fields = moe_fields(config, first_k_dense=dense, **_shared(config, "num_shared_experts"), **_CHOSEN)
    return {
        "attention": gqa_fields(config, qkv_bias=bias, out_bias=bias, qk_norm=True),
        **dense_and_moe_fields(config, fields),
    }


def _solar_open(config: Config) -> dict[str, Any]:
    groups = {"num_groups": config["n_group"], "groups_per_token": config["topk_group"]}
    fields = moe_fields(
        config, num_experts="n_routed_experts", **_shared(config, "n_shared_experts"), **_CHOSEN, **groups
    )
    return {
        "attention": gqa_fields(config, qkv_bias=config["attention_bias"]),
        "mlp": activation_field_without_mlp(config),
        "moe": fields,
    }


def _exaone_moe(config: Config) -> dict[str, Any]:
    """Windowed layers are rotated; the others only where there are no windows."""
    pattern = config["sliding_window_pattern"]
    every = len(pattern) if isinstance(pattern, str) else pattern
    window = periodic_window_fields(config, every or 1) if config["sliding_window"] else {}
    groups = {"num_groups": config["n_group"], "groups_per_token": config["topk_group"]}
    fields = moe_fields(
        config,
        first_k_dense=num_first_dense_layers(config),
        **_shared(config, "num_shared_experts"),
        **_CHOSEN,
        **groups,
    )
    attention = gqa_fields(config, qk_norm=True, nope_every=window.get("window_every", 0), **window)
    return {"attention": attention, **dense_and_moe_fields(config, fields)}


def _mellum(config: Config) -> dict[str, Any]:
    bias = config["attention_bias"]
    window = listed_window_fields(config, config["layer_types"]) if config["layer_types"] else {}
    attention = gqa_fields(config, qkv_bias=bias, out_bias=bias, qk_norm=True, **window)
    fields = moe_fields(config, first_k_dense=num_first_dense_layers({**config, "first_k_dense_replace": 0}))
    return {
        "attention": attention,
        **dense_and_moe_fields(config, fields),
        "num_mtp_layers": config["num_mtp_layers"] or 0,
    }


def _kolibri1(config: Config) -> dict[str, Any]:
    """Every fifth layer is full where none are listed; full layers are rotated only where there is no window."""
    listed, layers = config["layer_types"], config["num_hidden_layers"]
    kinds = listed or [("sliding_attention", "full_attention")[(i + 1) % 5 == 0] for i in range(layers)]
    window = listed_window_fields(config, kinds)
    unrotated = {} if config["sliding_window"] is None else unrotated_full_attention_field(window)
    fields = moe_fields(config, shared_hidden=config["shared_expert_intermediate_size"], **_CHOSEN)
    raw = {
        "attention": gqa_fields(config, qk_norm=True, **window, **unrotated),
        "mlp": activation_field_without_mlp(config),
        "moe": fields,
    }
    return {**raw, "norm_placement": "both"}


def _minicpm3(config: Config) -> dict[str, Any]:
    multipliers = ("embedding", "branches", "logits")
    return {
        "attention": latent_attention_fields(config),
        "mlp": gated_mlp_fields(config, bias=config["mlp_bias"]),
        "multipliers": multipliers,
    }


def _aria(config: Config) -> dict[str, Any]:
    bias = config["attention_bias"]
    refuse_other_value(config, "mlp_bias", False, "biases of shared experts")
    shared = {"shared_hidden": config["moe_num_shared_experts"] * config["intermediate_size"]}
    fields = moe_fields(config, num_experts="moe_num_experts", width="intermediate_size", **shared)
    return {
        "attention": gqa_fields(config, qkv_bias=bias, out_bias=bias),
        "mlp": activation_field_without_mlp(config),
        "moe": fields,
    }


def _glm4v(config: Config) -> dict[str, Any]:
    """GLM-4V's text part always has biases of queries, keys and values."""
    return glm4_fields({**config, "attention_bias": True, "head_dim": hidden_over_heads(config)})


_SPARSE = {"mlp_layer_types": list_key(), "moe_intermediate_size": size_key(1024)}

ARCHITECTURES = (
    ConfigFamily(
        "HYV3Config", ("HYV3ForCausalLM",), ("hy_v3",),
        {**common_keys(4096, 80, 64, 13312, 120832), "num_key_value_heads": kv_heads_key(8), "head_dim": size_key(128),
         "attention_bias": flag_key(False), "mlp_bias": flag_key(False),
         "num_experts": size_key(192, "num_experts", "num_local_experts"),
         "num_experts_per_tok": size_key(8), "num_shared_experts": count_key(1), **_SPARSE,
         "moe_intermediate_size": size_key(1536)}, _hy_v3,
    ),
    ConfigFamily(
        "SolarOpenConfig", ("SolarOpenForCausalLM",), ("solar_open",),
        {**common_keys(4096, 48, 64, None, 196608), "num_key_value_heads": kv_heads_key(8), "head_dim": size_key(128),
         "attention_bias": flag_key(False), "n_routed_experts": size_key(128, "n_routed_experts", "num_local_experts"),
         "n_shared_experts": count_key(1), "num_experts_per_tok": size_key(8), "moe_intermediate_size": size_key(1280),
         "n_group": size_key(1), "topk_group": size_key(1)}, _solar_open,
    ),
    ConfigFamily(
        "ExaoneMoeConfig", ("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"), ("exaone_moe",),
        {**common_keys(4096, 32, 32, 16384, 102400), "num_key_value_heads": kv_heads_key(32), "head_dim": HEAD_DIM,
         "sliding_window": count_key(4096, nullable=True), "layer_types": list_key(),
         "sliding_window_pattern": count_or_text_key(4), **_SPARSE, "first_k_dense_replace": count_key(1),
         "num_experts": size_key(64), "num_experts_per_tok": size_key(8), "num_shared_experts": count_key(1),
         "n_group": size_key(1),
         "topk_group": size_key(1)}, _exaone_moe,
    ),
    ConfigFamily(
        "MellumConfig", ("MellumForCausalLM",), ("mellum",),
        {**common_keys(2304, 28, 32, 7168, 98304), "num_key_value_heads": kv_heads_key(4), "head_dim": size_key(128),
         "attention_bias": flag_key(False), **WINDOW, "sliding_window": count_key(1024, nullable=True), **_SPARSE,
         "moe_intermediate_size": size_key(896), "num_experts": size_key(64, "num_experts", "num_local_experts"),
         "num_experts_per_tok": size_key(8), "num_mtp_layers": count_key(None)}, _mellum,
    ),
    ConfigFamily(
        "Kolibri1Config", ("Kolibri1ForCausalLM",), ("kolibri1",),
        {**common_keys(2560, 50, 48, None, 128000), "num_key_value_heads": size_key(4), "head_dim": size_key(128),
         "sliding_window": count_key(513, nullable=True), "layer_types": list_key(),
         "num_experts": size_key(384, "num_experts", "num_local_experts"), "num_experts_per_tok": size_key(6),
         "moe_intermediate_size": size_key(512), "shared_expert_intermediate_size": size_key(512)}, _kolibri1,
    ),
    ConfigFamily(
        "MiniCPM3Config", ("MiniCPM3ForCausalLM",), ("minicpm3",),
        {**common_keys(2560, 62, 40, 6400, 73448, tied=True), **latent_attention_keys(768, 256, 64, 32, 128),
         "v_head_dim": size_key(None, rule=hidden_over_heads), "mlp_bias": flag_key(False)}, _minicpm3,
    ),
    ConfigFamily(
        "AriaTextConfig", ("AriaTextForCausalLM", "AriaForConditionalGeneration"), ("aria", "aria_text"),
        {**common_keys(4096, 32, 32, 4096, 32000), "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
         "attention_bias": flag_key(False), "mlp_bias": flag_key(False), "moe_num_experts": size_key(8),
         "num_experts_per_tok": size_key(2, "moe_topk"), "moe_num_shared_experts": count_key(2)}, _aria,
    ),
    ConfigFamily(
        "Glm4vTextConfig", ("Glm4vForConditionalGeneration",), ("glm4v", "glm4v_text"),
        {**common_keys(4096, 40, 32, 13696, 151552), "num_key_value_heads": kv_heads_key(2),
         "partial_rotary_factor": number_key(1.0, "partial_rotary_factor", "rope_parameters.partial_rotary_factor",
                                         "rope_scaling.partial_rotary_factor")}, _glm4v,
    ),
)  # fmt: skip
