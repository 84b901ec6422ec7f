"""Granite 3, Cohere's Command R, R+, A and A+, StableLM: scaled branches, parallel branches, norms over heads."""

from __future__ import annotations

from typing import Any

from mofa.specs.files import shown_value
from mofa.specs.huggingface.deepseek import num_first_dense_layers
from mofa.specs.huggingface.record import (
    REQUIRED,
    Config,
    ConfigFamily,
    count_key,
    flag_key,
    list_key,
    number_key,
    object_key,
    size_key,
    text_key,
)
from mofa.specs.huggingface.shared_keys import (
    HEAD_DIM,
    KV_HEADS,
    common_keys,
    dense_and_moe_fields,
    gated_mlp_fields,
    gqa_fields,
    kv_heads_key,
    listed_window_fields,
    moe_fields,
    periodic_window_fields,
    rotary_dim_field,
    rotary_share_key,
    unrotated_full_attention_field,
)

_MULTIPLIERS = {"multipliers": ("embedding", "branches", "logits")}


def _attention(config: Config) -> dict[str, Any]:
    bias = config["attention_bias"]
    return gqa_fields(config, qkv_bias=bias, out_bias=bias)


def granite_fields(config: Config) -> dict[str, Any]:
    """Granite 3: multipliers of embedding, branches and logits."""
    return {"attention": _attention(config), "mlp": gated_mlp_fields(config, bias=config["mlp_bias"]), **_MULTIPLIERS}


def granite_moe_fields(config: Config) -> dict[str, Any]:
    """Granite 3's experts, with or without a shared one."""
    shared = {"shared_hidden": config.get("shared_intermediate_size", 0)}
    fields = moe_fields(config, num_experts="num_local_experts", width="intermediate_size", **shared)
    return {"attention": _attention(config), **dense_and_moe_fields(config, fields), **_MULTIPLIERS}


_PARALLEL = {"parallel_branches": True, "shared_branch_norm": True, "multipliers": ("logits",)}
_COHERE = {"norm": "layernorm", "norm_bias": False, **_PARALLEL}


def _cohere(config: Config) -> dict[str, Any]:
    bias = config["attention_bias"]
    norm: dict[str, Any] = {"qk_norm": True, "qk_norm_kind": "heads"} if config["use_qk_norm"] else {}
    return {
        "attention": gqa_fields(config, qkv_bias=bias, out_bias=bias, **norm),
        "mlp": gated_mlp_fields(config),
        **_COHERE,
    }


def _cohere2(config: Config) -> dict[str, Any]:
    """Layers without a window have no rotary embedding."""
    bias = config["attention_bias"]
    window = periodic_window_fields(config, config["sliding_window_pattern"])
    if "window" not in window:
        raise ValueError("sliding_window is null, or no layer has it; a Cohere2 model without windows is not read")
    attention = gqa_fields(config, qkv_bias=bias, out_bias=bias, nope_every=window.get("window_every", 0), **window)
    return {"attention": attention, "mlp": gated_mlp_fields(config), **_COHERE}


def _cohere2_moe(config: Config) -> dict[str, Any]:
    """Layers without a window have no rotary embedding; dense ones ahead have their own period of windows."""
    score, dense = config["expert_selection_fn"], num_first_dense_layers(config)
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"expert_selection_fn ({shown_value(score)}) must be softmax or sigmoid; correct it")
    kinds = config["layer_types"]
    if kinds is None:
        first = min(config["first_k_dense_replace"], config["num_hidden_layers"])
        ahead = _windowed(first, config["prefix_dense_sliding_window_pattern"])
        kinds = ahead + _windowed(config["num_hidden_layers"] - first, config["sliding_window_pattern"])
    window = listed_window_fields(config, kinds)
    if config["prefix_dense_sliding_window_pattern"] == 1 and "full_attention" in kinds[:dense]:
        raise ValueError(
            "prefix_dense_sliding_window_pattern (1) rotates dense layers without a window; mofa has none beside "
            "others without rotation"
        )
    bias, width = config["attention_bias"], config["intermediate_size"]
    fields = moe_fields(
        config,
        width="intermediate_size",
        score=score,
        shared_hidden=config["num_shared_experts"] * width,
        first_k_dense=dense,
    )
    wide = {**config, "intermediate_size": config["prefix_dense_intermediate_size"] or width}
    attention = gqa_fields(config, qkv_bias=bias, out_bias=bias, **window, **unrotated_full_attention_field(window))
    norm = {"norm": "layernorm", "norm_bias": False} if config["rms_norm_eps"] is None else {"norm": "rmsnorm"}
    return {"attention": attention, **dense_and_moe_fields(wide, fields), **_PARALLEL, **norm}


def _cohere_compass(config: Config) -> dict[str, Any]:
    """Rotations are given for each kind of attention, null for none."""
    kinds = config["layer_types"] or ["full_attention"] * config["num_hidden_layers"]
    window = listed_window_fields(config, kinds)
    bases = config["rope_parameters"] or {}
    missing = next((name for name in kinds if name not in bases), None)
    if missing is not None:
        raise ValueError(f"rope_parameters has no {missing}; give each kind in layer_types its own, null for none")
    if "window" in window and bases["sliding_attention"] is None and window.get("window_every", 1) > 1:
        raise ValueError("rope_parameters.sliding_attention is null; mofa has no windowed layers alone unrotated")
    unrotated: dict[str, Any] = {}
    if all(bases[name] is None for name in kinds):
        unrotated = {"nope_every": 1}
    elif "full_attention" in kinds and bases["full_attention"] is None:
        unrotated = unrotated_full_attention_field(window)
    bias = config["attention_bias"]
    return {
        "attention": gqa_fields(config, qkv_bias=bias, out_bias=bias, **window, **unrotated),
        "mlp": gated_mlp_fields(config),
        **_COHERE,
    }


def _windowed(layers: int, every: int) -> list[str]:
    """Layers with a window, but every n-th."""
    return ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)]


def _stablelm(config: Config) -> dict[str, Any]:
    parallel = config["use_parallel_residual"]
    norm: dict[str, Any] = {"qk_norm": True, "qk_norm_kind": "heads"} if config["qk_layernorm"] else {}
    config = {**config, "head_dim": config["hidden_size"] // config["num_attention_heads"]}
    attention = gqa_fields(config, qkv_bias=config["use_qkv_bias"], **norm, **rotary_dim_field(config))
    raw = {"attention": attention, "mlp": gated_mlp_fields(config), "norm": "layernorm"}
    return {**raw, "parallel_branches": parallel, "shared_branch_norm": parallel}


def _hyperclovax(config: Config) -> dict[str, Any]:
    placement = {"norm_placement": "both"} if config["use_post_norm"] else {}
    return {**granite_fields(config), **placement}


GRANITE = {
    **common_keys(4096, 32, 32, 11008, 32000), "num_key_value_heads": KV_HEADS, "attention_bias": flag_key(False),
}  # fmt: skip
GRANITE_MOE = {
    **GRANITE, "num_local_experts": size_key(8), "num_experts_per_tok": size_key(2),
}  # fmt: skip
_COMMAND = {
    **common_keys(8192, 40, 64, 22528, 256000, tied=True), "num_key_value_heads": KV_HEADS,
    "attention_bias": flag_key(False),
}  # fmt: skip

ARCHITECTURES = (
    ConfigFamily(
        "GraniteConfig", ("GraniteForCausalLM",), ("granite",), {**GRANITE, "mlp_bias": flag_key(False)}, granite_fields
    ),
    ConfigFamily("GraniteMoeConfig", ("GraniteMoeForCausalLM",), ("granitemoe",), GRANITE_MOE, granite_moe_fields),
    ConfigFamily(
        "GraniteMoeSharedConfig", ("GraniteMoeSharedForCausalLM",), ("granitemoeshared",),
        {**GRANITE_MOE, "shared_intermediate_size": count_key(0)}, granite_moe_fields,
    ),
    ConfigFamily(
        "HyperCLOVAXConfig", ("HyperCLOVAXForCausalLM",), ("hyperclovax",),
        {**GRANITE, "mlp_bias": flag_key(False), "head_dim": HEAD_DIM, "use_post_norm": flag_key(True)},
        _hyperclovax,
    ),
    ConfigFamily(
        "CohereConfig", ("CohereForCausalLM",), ("cohere",), {**_COMMAND, "use_qk_norm": flag_key(False)}, _cohere
    ),
    ConfigFamily(
        "Cohere2Config", ("Cohere2ForCausalLM",), ("cohere2",),
        {**_COMMAND, "sliding_window": count_key(4096, nullable=True), "layer_types": list_key(),
         "sliding_window_pattern": size_key(4)}, _cohere2,
    ),
    ConfigFamily(
        "CohereCompassTextConfig", ("CohereCompassForCausalLM", "CohereCompassForConditionalGeneration"),
        ("cohere_compass_text", "cohere_compass"),
        {**_COMMAND, "sliding_window": count_key(4096, nullable=True), "layer_types": list_key(),
         "rope_parameters": object_key(default=REQUIRED)}, _cohere_compass,
    ),
    ConfigFamily(
        "Cohere2MoeConfig", ("Cohere2MoeForCausalLM",), ("cohere2_moe",),
        {**_COMMAND, "head_dim": size_key(128), "sliding_window": count_key(4096, nullable=True),
         "layer_types": list_key(),
         "sliding_window_pattern": size_key(4), "prefix_dense_sliding_window_pattern": size_key(1),
         "mlp_layer_types": list_key(), "first_k_dense_replace": count_key(0),
         "prefix_dense_intermediate_size": size_key(None),
         "num_experts": size_key(8), "num_experts_per_tok": size_key(2), "num_shared_experts": count_key(0),
         "expert_selection_fn": text_key("softmax"), "rms_norm_eps": number_key(None)}, _cohere2_moe,
    ),
    ConfigFamily(
        "StableLmConfig", ("StableLmForCausalLM",), ("stablelm",),
        {**common_keys(2560, 32, 32, 6912, 50304), "num_key_value_heads": kv_heads_key(32), **rotary_share_key(0.25),
         "use_qkv_bias": flag_key(False), "qk_layernorm": flag_key(False), "use_parallel_residual": flag_key(False)},
         _stablelm,
    ),
)  # fmt: skip
