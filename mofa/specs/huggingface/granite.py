"""Granite 3, Cohere's Command R, R+, A and A+, StableLM: scaled branches, parallel branches, norms over heads."""

from __future__ import annotations

from typing import Any

from mofa.specs.files import short
from mofa.specs.huggingface.deepseek import dense_layers
from mofa.specs.huggingface.record import (
    REQUIRED,
    Architecture,
    Config,
    count,
    entries,
    flag,
    number,
    size,
    table,
    text,
)
from mofa.specs.huggingface.shared_keys import (
    HEAD_DIM,
    KV_HEADS,
    dense_or_experts,
    gated_mlp,
    gqa,
    kv_heads,
    layer_pattern,
    moe,
    period_window,
    rotary,
    rotary_dim,
    sizes,
    unrotated_where_full,
)

_MULTIPLIERS = {"multipliers": ("embedding", "branches", "logits")}


def _attention(c: Config) -> dict[str, Any]:
    bias = c["attention_bias"]
    return gqa(c, qkv_bias=bias, out_bias=bias)


def granite(c: Config) -> dict[str, Any]:
    """Granite 3: multipliers of embedding, branches and logits."""
    return {"attention": _attention(c), "mlp": gated_mlp(c, bias=c["mlp_bias"]), **_MULTIPLIERS}


def granite_moe(c: Config) -> dict[str, Any]:
    """Granite 3's experts, with or without a shared one."""
    shared = {"shared_hidden": c.get("shared_intermediate_size", 0)}
    fields = moe(c, num_experts="num_local_experts", width="intermediate_size", **shared)
    return {"attention": _attention(c), **dense_or_experts(c, fields), **_MULTIPLIERS}


_PARALLEL = {"parallel_branches": True, "shared_branch_norm": True, "multipliers": ("logits",)}
_COHERE = {"norm": "layernorm", "norm_bias": False, **_PARALLEL}


def _cohere(c: Config) -> dict[str, Any]:
    bias = c["attention_bias"]
    norm: dict[str, Any] = {"qk_norm": True, "qk_norm_kind": "heads"} if c["use_qk_norm"] else {}
    return {"attention": gqa(c, qkv_bias=bias, out_bias=bias, **norm), "mlp": gated_mlp(c), **_COHERE}


def _cohere2(c: Config) -> dict[str, Any]:
    """Layers without a window have no rotary embedding."""
    bias = c["attention_bias"]
    window = period_window(c, c["sliding_window_pattern"])
    if "window" not in window:
        raise ValueError("sliding_window is null, or no layer has it; a Cohere2 model without windows is not read")
    attention = gqa(c, qkv_bias=bias, out_bias=bias, nope_every=window.get("window_every", 0), **window)
    return {"attention": attention, "mlp": gated_mlp(c), **_COHERE}


def _cohere2_moe(c: Config) -> dict[str, Any]:
    """Layers without a window have no rotary embedding; dense ones ahead have their own period of windows."""
    score, dense = c["expert_selection_fn"], dense_layers(c)
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"expert_selection_fn ({short(score)}) must be softmax or sigmoid; correct it")
    kinds = c["layer_types"]
    if kinds is None:
        first = min(c["first_k_dense_replace"], c["num_hidden_layers"])
        ahead = _windowed(first, c["prefix_dense_sliding_window_pattern"])
        kinds = ahead + _windowed(c["num_hidden_layers"] - first, c["sliding_window_pattern"])
    window = layer_pattern(c, kinds)
    if c["prefix_dense_sliding_window_pattern"] == 1 and "full_attention" in kinds[:dense]:
        raise ValueError(
            "prefix_dense_sliding_window_pattern (1) rotates dense layers without a window; mofa has none beside "
            "others without rotation"
        )
    bias, width = c["attention_bias"], c["intermediate_size"]
    fields = moe(
        c, width="intermediate_size", score=score, shared_hidden=c["num_shared_experts"] * width, first_k_dense=dense
    )
    wide = {**c, "intermediate_size": c["prefix_dense_intermediate_size"] or width}
    attention = gqa(c, qkv_bias=bias, out_bias=bias, **window, **unrotated_where_full(window))
    norm = {"norm": "layernorm", "norm_bias": False} if c["rms_norm_eps"] is None else {"norm": "rmsnorm"}
    return {"attention": attention, **dense_or_experts(wide, fields), **_PARALLEL, **norm}


def _cohere_compass(c: Config) -> dict[str, Any]:
    """Rotations are given for each kind of attention, null for none."""
    kinds = c["layer_types"] or ["full_attention"] * c["num_hidden_layers"]
    window = layer_pattern(c, kinds)
    bases = c["rope_parameters"] or {}
    missing = next((name for name in kinds if name not in bases), None)
    if missing is not None:
        raise ValueError(f"rope_parameters has no {missing}; give each kind in layer_types its own, null for none")
    if "window" in window and bases["sliding_attention"] is None and window.get("window_every", 1) > 1:
        raise ValueError("rope_parameters.sliding_attention is null; mofa has no windowed layers alone unrotated")
    unrotated: dict[str, Any] = {}
    if all(bases[name] is None for name in kinds):
        unrotated = {"nope_every": 1}
    elif "full_attention" in kinds and bases["full_attention"] is None:
        unrotated = unrotated_where_full(window)
    bias = c["attention_bias"]
    return {"attention": gqa(c, qkv_bias=bias, out_bias=bias, **window, **unrotated), "mlp": gated_mlp(c), **_COHERE}


def _windowed(layers: int, every: int) -> list[str]:
    """Layers with a window, but every n-th."""
    return ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)]


def _stablelm(c: Config) -> dict[str, Any]:
    parallel = c["use_parallel_residual"]
    norm: dict[str, Any] = {"qk_norm": True, "qk_norm_kind": "heads"} if c["qk_layernorm"] else {}
    c = {**c, "head_dim": c["hidden_size"] // c["num_attention_heads"]}
    attention = gqa(c, qkv_bias=c["use_qkv_bias"], **norm, **rotary_dim(c))
    raw = {"attention": attention, "mlp": gated_mlp(c), "norm": "layernorm"}
    return {**raw, "parallel_branches": parallel, "shared_branch_norm": parallel}


def _hyperclovax(c: Config) -> dict[str, Any]:
    placement = {"norm_placement": "both"} if c["use_post_norm"] else {}
    return {**granite(c), **placement}


GRANITE = {
    **sizes(4096, 32, 32, 11008, 32000), "num_key_value_heads": KV_HEADS, "attention_bias": flag(False),
}  # fmt: skip
GRANITE_MOE = {
    **GRANITE, "num_local_experts": size(8), "num_experts_per_tok": size(2),
}  # fmt: skip
_COMMAND = {
    **sizes(8192, 40, 64, 22528, 256000, tied=True), "num_key_value_heads": KV_HEADS, "attention_bias": flag(False),
}  # fmt: skip

ARCHITECTURES = (
    Architecture(
        "GraniteConfig", ("GraniteForCausalLM",), ("granite",), {**GRANITE, "mlp_bias": flag(False)}, granite
    ),
    Architecture("GraniteMoeConfig", ("GraniteMoeForCausalLM",), ("granitemoe",), GRANITE_MOE, granite_moe),
    Architecture(
        "GraniteMoeSharedConfig", ("GraniteMoeSharedForCausalLM",), ("granitemoeshared",),
        {**GRANITE_MOE, "shared_intermediate_size": count(0)}, granite_moe,
    ),
    Architecture(
        "HyperCLOVAXConfig", ("HyperCLOVAXForCausalLM",), ("hyperclovax",),
        {**GRANITE, "mlp_bias": flag(False), "head_dim": HEAD_DIM, "use_post_norm": flag(True)},
        _hyperclovax,
    ),
    Architecture(
        "CohereConfig", ("CohereForCausalLM",), ("cohere",), {**_COMMAND, "use_qk_norm": flag(False)}, _cohere
    ),
    Architecture(
        "Cohere2Config", ("Cohere2ForCausalLM",), ("cohere2",),
        {**_COMMAND, "sliding_window": count(4096, nullable=True), "layer_types": entries(),
         "sliding_window_pattern": size(4)}, _cohere2,
    ),
    Architecture(
        "CohereCompassTextConfig", ("CohereCompassForCausalLM", "CohereCompassForConditionalGeneration"),
        ("cohere_compass_text", "cohere_compass"),
        {**_COMMAND, "sliding_window": count(4096, nullable=True), "layer_types": entries(),
         "rope_parameters": table(default=REQUIRED)}, _cohere_compass,
    ),
    Architecture(
        "Cohere2MoeConfig", ("Cohere2MoeForCausalLM",), ("cohere2_moe",),
        {**_COMMAND, "head_dim": size(128), "sliding_window": count(4096, nullable=True), "layer_types": entries(),
         "sliding_window_pattern": size(4), "prefix_dense_sliding_window_pattern": size(1),
         "mlp_layer_types": entries(), "first_k_dense_replace": count(0), "prefix_dense_intermediate_size": size(None),
         "num_experts": size(8), "num_experts_per_tok": size(2), "num_shared_experts": count(0),
         "expert_selection_fn": text("softmax"), "rms_norm_eps": number(None)}, _cohere2_moe,
    ),
    Architecture(
        "StableLmConfig", ("StableLmForCausalLM",), ("stablelm",),
        {**sizes(2560, 32, 32, 6912, 50304), "num_key_value_heads": kv_heads(32), **rotary(0.25),
         "use_qkv_bias": flag(False), "qk_layernorm": flag(False), "use_parallel_residual": flag(False)}, _stablelm,
    ),
)  # fmt: skip
