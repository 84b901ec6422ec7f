"""Hybrids of attention and state spaces: Jamba, Falcon-H1, Bamba, Granite 4.0 H, Nemotron-H and 3, RecurrentGemma."""

from __future__ import annotations

import math
from typing import Any

from mofa.specs.huggingface.hybrids.layer_fields import (
    ATTENTION,
    MAMBA_OR_FULL,
    MLP,
    MOE,
    layer_kind_fields,
    layers_field,
    listed_layer_kinds,
    listed_layer_numbers,
    sigmoid_grouped_moe_fields,
)
from mofa.specs.huggingface.record import (
    Config,
    ConfigFamily,
    count_key,
    flag_key,
    list_key,
    size_key,
    size_or_auto_key,
    text_key,
)
from mofa.specs.huggingface.shared_keys import (
    HEAD_DIM,
    KV_HEADS,
    activation_field_without_mlp,
    common_keys,
    gated_mlp_fields,
    gqa_fields,
    hidden_over_heads,
    kv_heads_key,
    moe_fields,
    refuse_other_value,
    rotary_dim_field,
    rotary_share_key,
    ungated_mlp_fields,
)

NO_ROTATION: dict[str, Any] = {"nope_every": 1}
"""No layer's queries and keys are turned by their positions."""


def _jamba(config: Config) -> dict[str, Any]:
    inner = config["mamba_expand"] * config["hidden_size"]
    rank = (
        math.ceil(config["hidden_size"] / 16) if config["mamba_dt_rank"] in (None, "auto") else config["mamba_dt_rank"]
    )
    mamba = {
        "kind": "mamba1", "inner": inner, "state_dim": config["mamba_d_state"], "dt_rank": rank, "norms": True,
        "conv_kernel": config["mamba_d_conv"], "conv_bias": config["mamba_conv_bias"],
        "proj_bias": config["mamba_proj_bias"],
    }  # fmt: skip
    each = []
    for i in range(config["num_hidden_layers"]):
        full = i % config["attn_layer_period"] == config["attn_layer_offset"]
        sparse = config["num_experts"] > 1 and i % config["expert_layer_period"] == config["expert_layer_offset"]
        name = f"{'attention' if full else 'mamba'}-{'moe' if sparse else 'mlp'}"
        each.append(layer_kind_fields(name, [ATTENTION if full else mamba], [MOE if sparse else MLP]))
    has_experts = any(MOE in layer["ffns"] for layer in each)
    experts = {"moe": moe_fields(config, width="intermediate_size")} if has_experts else {}
    return {
        "attention": gqa_fields(config, **NO_ROTATION),
        "mlp": gated_mlp_fields(config),
        **experts,
        **layers_field(each),
    }


def _mamba2(config: Config, inner: int, **more: Any) -> dict[str, Any]:
    """A Mamba-2 mixer by the keys that Bamba, Falcon-H1 and Granite share."""
    heads, head_dim = config["mamba_n_heads"], config["mamba_d_head"]
    if head_dim in (None, "auto"):
        head_dim = inner // heads
    if head_dim * heads != inner:
        raise ValueError(f"mamba_n_heads ({heads}) x mamba_d_head ({head_dim}) must be the inner width ({inner})")
    return {
        "kind": "mamba2", "num_heads": heads, "head_dim": head_dim, "state_dim": config["mamba_d_state"],
        "num_groups": config["mamba_n_groups"], "conv_kernel": config["mamba_d_conv"],
        "conv_bias": config["mamba_conv_bias"],
        "proj_bias": config["mamba_proj_bias"], "out_bias": config["mamba_proj_bias"], **more,
    }  # fmt: skip


def _falcon_h1(config: Config) -> dict[str, Any]:
    """Attention and state space read one norm's output side by side in every layer."""
    bias, expand = config["attention_bias"], config["mamba_expand"] * config["hidden_size"]
    inner = expand if config["mamba_d_ssm"] is None else config["mamba_d_ssm"]
    mamba = _mamba2(config, inner, gated_norm=config["mamba_rms_norm"], out_bias=config["projectors_bias"])
    both = layer_kind_fields("hybrid", [mamba, ATTENTION], [MLP])
    attention = gqa_fields(config, qkv_bias=bias, out_bias=bias)
    return {
        "attention": attention,
        "mlp": gated_mlp_fields(config, bias=config["mlp_bias"]),
        **layers_field([both] * config["num_hidden_layers"]),
    }


def _bamba(config: Config) -> dict[str, Any]:
    bias = config["attention_bias"]
    mamba = layer_kind_fields("mamba", [_mamba2(config, config["mamba_expand"] * config["hidden_size"])], [MLP])
    full, places = (
        layer_kind_fields("attention", [ATTENTION], [MLP]),
        listed_layer_numbers(config, "attn_layer_indices"),
    )
    each = [full if i in places else mamba for i in range(config["num_hidden_layers"])]
    attention = gqa_fields(config, qkv_bias=bias, out_bias=bias)
    if attention["head_dim"] % 2 == 0:
        attention["rotary_dim"] = attention["head_dim"] // 2
    return {"attention": attention, "mlp": gated_mlp_fields(config, bias=config["mlp_bias"]), **layers_field(each)}


def _granite_hybrid(config: Config) -> dict[str, Any]:
    """A shared feed-forward runs beside the experts, or alone where there are none."""
    bias = config["attention_bias"]
    rotation = {} if config["position_embedding_type"] == "rope" else NO_ROTATION
    attention = gqa_fields(config, qkv_bias=bias, out_bias=bias, **rotation)
    sparse = config["num_local_experts"] > 0
    ffn, mixer = (MOE if sparse else MLP), _mamba2(config, config["mamba_expand"] * config["hidden_size"])
    named = {
        "linear": layer_kind_fields("mamba", [mixer], [ffn]),
        "full": layer_kind_fields("attention", [ATTENTION], [ffn]),
    }
    if config["layer_types"] is None:
        each = [named["linear"]] * config["num_hidden_layers"]
    else:
        each = [named[name] for name in listed_layer_kinds(config, "layer_types", MAMBA_OR_FULL)]
    shared = config["shared_intermediate_size"]
    raw = {"attention": attention, "multipliers": ("embedding", "branches", "logits"), **layers_field(each)}
    if not sparse:
        return {**raw, "mlp": gated_mlp_fields(config, width="shared_intermediate_size")}
    fields = moe_fields(config, num_experts="num_local_experts", width="intermediate_size", shared_hidden=shared)
    return {**raw, "mlp": activation_field_without_mlp(config), "moe": fields}


_OF_NEMOTRON = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_NAMED_OF_NEMOTRON = {"linear_attention": "mamba", "full_attention": "attention",
                      **{name: name for name in _OF_NEMOTRON.values()}}  # fmt: skip


def _names_of_pattern(config: Config, pattern: str, by_name: str) -> list[str] | None:
    """Each layer's kind by a list of names, or by a letter of the pattern each."""
    if config[by_name] is not None:
        return listed_layer_kinds(config, by_name, _NAMED_OF_NEMOTRON, len(config[by_name]))
    if config[pattern] is None:
        return None
    unknown = next((letter for letter in config[pattern] if letter not in _OF_NEMOTRON), None)
    if unknown is not None:
        raise ValueError(f"{pattern} holds {unknown!r}; mofa has {', '.join(_OF_NEMOTRON)}")
    return [_OF_NEMOTRON[letter] for letter in config[pattern]]


def _nemotron_h(config: Config) -> dict[str, Any]:
    """A layer is a norm and one mixer: a state space, attention, a feed-forward or experts. The class ties nothing."""
    names = _names_of_pattern(config, "hybrid_override_pattern", "layers_block_type")
    names = ["mamba", "moe", "attention", "mlp"] if names is None else names
    given = config["num_hidden_layers"]
    if given is not None and given != len(names):
        raise ValueError(f"num_hidden_layers ({given}) is not the {len(names)} layers of the pattern; correct one")
    mamba = {
        "kind": "mamba2", "num_heads": config["mamba_num_heads"], "head_dim": config["mamba_head_dim"],
        "state_dim": config["ssm_state_size"], "num_groups": config["n_groups"], "conv_kernel": config["conv_kernel"],
        "conv_bias": config["use_conv_bias"], "proj_bias": config["use_bias"], "out_bias": config["use_bias"],
    }  # fmt: skip
    named = {
        "mamba": layer_kind_fields("mamba", [mamba]), "attention": layer_kind_fields("attention", [ATTENTION]),
        "mlp": layer_kind_fields("mlp", ffns=[MLP]), "moe": layer_kind_fields("moe", ffns=[MOE]),
    }  # fmt: skip
    more: dict[str, Any] = {}
    entry = _names_of_pattern(config, "mtp_hybrid_override_pattern", "mtp_layers_block_type") or ["attention", "moe"]
    if config["num_nextn_predict_layers"]:
        more["prediction"] = [named[name] for name in entry]
    bias = config["attention_bias"]
    raw = {
        "attention": gqa_fields(config, qkv_bias=bias, out_bias=bias, **NO_ROTATION), "num_layers": len(names),
        "mlp": ungated_mlp_fields(config, bias=config["mlp_bias"]), "tied_embeddings": False,
        "num_mtp_layers": config["num_nextn_predict_layers"],
    }  # fmt: skip
    if "moe" not in (*names, *(entry if more else ())):
        return {**raw, **layers_field([named[name] for name in names], **more)}
    refuse_other_value(config, "mlp_bias", False, "biases of Nemotron's experts")
    fields = sigmoid_grouped_moe_fields(config, config["moe_shared_expert_intermediate_size"])
    if config["moe_latent_size"] is not None:
        more["expert_latent"] = config["moe_latent_size"]
    return {**raw, "moe": fields, **layers_field([named[name] for name in names], **more)}


def _recurrent_gemma(config: Config) -> dict[str, Any]:
    """Gated linear recurrences and windowed attention, by a period of names that is cut off at the last layer."""
    total = config["num_hidden_layers"]
    config = {**config, "block_types": config["block_types"] or ["recurrent", "recurrent", "attention"]}
    names = listed_layer_kinds(
        config, "block_types", {name: name for name in ("recurrent", "attention")}, len(config["block_types"])
    )
    unit = {
        "kind": "rg_lru", "inner": config["lru_width"] or config["hidden_size"],
        "num_blocks": config["num_attention_heads"],
        "conv_kernel": config["conv1d_width"],
    }  # fmt: skip
    named = {
        "recurrent": layer_kind_fields("recurrent", [unit], [MLP]),
        "attention": layer_kind_fields("attention", [ATTENTION], [MLP]),
    }
    each = [named[names[i % len(names)]] for i in range(total)]
    share = rotary_dim_field({**config, "head_dim": hidden_over_heads(config)})
    attention = gqa_fields(
        config, qkv_bias=config["attention_bias"], out_bias=True, window=config["attention_window_size"], **share
    )
    half = {**config, "intermediate_size": config["intermediate_size"] // 2}
    return {"attention": attention, "mlp": gated_mlp_fields(half, bias=True), "logit_softcap": True,
            "multipliers": ("embedding",), **layers_field(each)}  # fmt: skip


_MAMBA2 = {
    "mamba_n_heads": size_key(128), "mamba_d_head": size_or_auto_key(), "mamba_n_groups": size_key(1),
    "mamba_d_state": size_key(256),
    "mamba_d_conv": size_key(4), "mamba_expand": size_key(2), "mamba_conv_bias": flag_key(True),
    "mamba_proj_bias": flag_key(False),
    "attention_bias": flag_key(False),
}  # fmt: skip

ARCHITECTURES = (
    ConfigFamily(
        "JambaConfig", ("JambaForCausalLM",), ("jamba",),
        {**common_keys(4096, 32, 32, 14336, 65536), "num_key_value_heads": kv_heads_key(8), "num_experts": size_key(16),
         "num_experts_per_tok": size_key(2), "expert_layer_period": size_key(2), "expert_layer_offset": count_key(1),
         "attn_layer_period": size_key(8), "attn_layer_offset": count_key(4), "mamba_d_state": size_key(16),
         "mamba_d_conv": size_key(4), "mamba_expand": size_key(2), "mamba_dt_rank": size_or_auto_key(),
         "mamba_conv_bias": flag_key(True), "mamba_proj_bias": flag_key(False)}, _jamba,
    ),
    ConfigFamily(
        "FalconH1Config", ("FalconH1ForCausalLM",), ("falcon_h1",),
        {**common_keys(4096, 32, 32, 14336, 128000), "num_key_value_heads": kv_heads_key(8), "head_dim": HEAD_DIM,
         **_MAMBA2,
         "mamba_d_ssm": size_key(1024, nullable=True), "mamba_rms_norm": flag_key(False),
         "projectors_bias": flag_key(False),
         "mlp_bias": flag_key(False)}, _falcon_h1,
    ),
    ConfigFamily(
        "BambaConfig", ("BambaForCausalLM",), ("bamba",),
        {**common_keys(4096, 32, 32, 14336, 128000), "num_key_value_heads": kv_heads_key(8), "head_dim": HEAD_DIM,
         **_MAMBA2,
         "attn_layer_indices": list_key(), "mlp_bias": flag_key(False)}, _bamba,
    ),
    ConfigFamily(
        "GraniteMoeHybridConfig", ("GraniteMoeHybridForCausalLM",), ("granitemoehybrid",),
        {**common_keys(4096, 32, 32, 11008, 32000), "num_key_value_heads": KV_HEADS, **_MAMBA2,
         "num_local_experts": count_key(8), "num_experts_per_tok": count_key(2),
         "shared_intermediate_size": size_key(1024),
         "position_embedding_type": text_key(None), "layer_types": list_key("layer_types", "layers_block_type")},
        _granite_hybrid,
    ),
    ConfigFamily(
        "NemotronHConfig", ("NemotronHForCausalLM",), ("nemotron_h",),
        {**common_keys(4096, None, 32, 21504, 131072), "hidden_act": text_key("relu2", "mlp_hidden_act"),
         "num_key_value_heads": kv_heads_key(8), "head_dim": size_key(128, "head_dim", "attention_head_dim"),
         "hybrid_override_pattern": text_key(None), "layers_block_type": list_key("layers_block_type", "layer_types"),
         "ssm_state_size": size_key(128), "mamba_num_heads": size_key(128), "mamba_head_dim": size_key(64),
         "n_groups": size_key(8),
         "conv_kernel": size_key(4), "use_conv_bias": flag_key(True), "use_bias": flag_key(False),
         "mlp_bias": flag_key(False),
         "attention_bias": flag_key(False), "n_routed_experts": size_key(8), "moe_intermediate_size": size_key(7688),
         "moe_shared_expert_intermediate_size": size_key(7688), "moe_latent_size": size_key(None),
         "num_experts_per_tok": size_key(2), "n_group": size_key(1), "topk_group": size_key(1),
         "num_nextn_predict_layers": count_key(0), "mtp_hybrid_override_pattern": text_key(None),
         "mtp_layers_block_type": list_key()}, _nemotron_h,
    ),
    ConfigFamily(
        "RecurrentGemmaConfig", ("RecurrentGemmaForCausalLM",), ("recurrent_gemma",),
        {**common_keys(2560, 26, 10, 7680, 256000, tied=True),
         "hidden_act": text_key("gelu_pytorch_tanh", "hidden_activation"),
         "num_key_value_heads": KV_HEADS, "attention_bias": flag_key(False), **rotary_share_key(0.5),
         "lru_width": size_key(None),
         "attention_window_size": size_key(2048), "conv1d_width": size_key(4), "block_types": list_key()},
         _recurrent_gemma,
    ),
)  # fmt: skip
