"""Sparse attention: DeepSeek-V3.2 and GLM-5 with an indexer, DeepSeek-V4 over compressed tokens."""

from __future__ import annotations

from typing import Any

from mofa.specs.huggingface.deepseek import deepseek_moe_fields, deepseek_moe_keys, latent_attention_keys
from mofa.specs.huggingface.hybrids.layer_fields import (
    ATTENTION,
    MLP,
    MOE,
    layer_kind_fields,
    layers_field,
    listed_layer_kinds,
)
from mofa.specs.huggingface.record import Config, ConfigFamily, count_key, flag_key, list_key, size_key, text_key
from mofa.specs.huggingface.shared_keys import (
    activation_field_without_mlp,
    common_keys,
    gqa_fields,
    latent_attention_fields,
    moe_fields,
    refuse_other_value,
)


def _indexed(config: Config, has_indexer: list[bool]) -> dict[str, Any]:
    """Latent attention with an indexer, in layers without one by the keys that an earlier one chose."""
    sparse = {
        "kind": "sparse", "num_heads": config["index_n_heads"], "head_dim": config["index_head_dim"],
        "top_k": config["index_topk"],
    }  # fmt: skip
    raw = deepseek_moe_fields(config, "sigmoid", grouped=True, correction=True)
    fields = {**raw["moe"]}
    dense = fields.pop("first_k_dense")
    each = []
    for i, own in enumerate(has_indexer):
        name, ffn = ("indexed" if own else "shared-index"), (MLP if i < dense else MOE)
        each.append(layer_kind_fields(f"{name}-{ffn['kind']}", [sparse if own else ATTENTION], [ffn]))
    return {**raw, "attention": latent_attention_fields(config), "moe": fields, **layers_field(each)}


def _deepseek_v32(config: Config) -> dict[str, Any]:
    refuse_other_value(config, "moe_layer_freq", 1, "such pattern of layers")
    return _indexed(config, [True] * config["num_hidden_layers"])


def _glm_moe_dsa(config: Config) -> dict[str, Any]:
    """Which layers have an indexer: a list, a pattern of letters, or every so many behind the first ones."""
    every, first, given = (
        max(config["index_topk_freq"], 1),
        config["index_skip_topk_offset"],
        config["num_hidden_layers"],
    )
    if config["indexer_types"] is not None:
        own = [name == "F" for name in listed_layer_kinds(config, "indexer_types", {"full": "F", "shared": "S"})]
    elif config["index_topk_pattern"] is not None:
        if len(config["index_topk_pattern"]) != given or set(config["index_topk_pattern"]) - set("FS"):
            raise ValueError(f"index_topk_pattern must be a letter F or S for each of {given} layers; correct it")
        own = [letter == "F" for letter in config["index_topk_pattern"]]
    else:
        own = [max(i - first + 1, 0) % every == 0 for i in range(given)]
    return _indexed(config, own)


_KINDS_OF_V4 = {"sliding_attention": "window", "compressed_sparse_attention": "sparse",
                "heavily_compressed_attention": "compressed"}  # fmt: skip
_RATIOS_OF_V4 = {0: "window", 4: "sparse", 128: "compressed"}


def _names_of_v4(config: Config) -> tuple[list[str], list[str]]:
    """Attention of each layer, and of the predictions behind them, which only ``compress_ratios`` lists."""
    given, predictions = config["num_hidden_layers"], config["num_nextn_predict_layers"]
    if config["layer_types"] is not None:
        return listed_layer_kinds(config, "layer_types", _KINDS_OF_V4), ["window"] * predictions
    if config["compress_ratios"] is None:
        alternating = ["sparse" if i % 2 else "compressed" for i in range(max(given - 2, 0))]
        return ["compressed"] * min(given, 2) + alternating, ["window"] * predictions
    length = len(config["compress_ratios"])
    if length not in (given, given + predictions):
        raise ValueError(f"compress_ratios lists {length} layers, there are {given} and {predictions} predictions")
    names = listed_layer_kinds(config, "compress_ratios", _RATIOS_OF_V4, length)
    return names[:given], names[given:] or ["window"] * predictions


def _deepseek_v4(config: Config) -> dict[str, Any]:
    """A window in all layers, in most also compressed tokens: those an indexer chooses, or all where they are few."""
    refuse_other_value(config, "attention_bias", False, "biases in this attention")
    ranks = {"kind": "compressed", "q_lora_rank": config["q_lora_rank"], "o_lora_rank": config["o_lora_rank"],
             "o_groups": config["o_groups"]}  # fmt: skip
    indexer = {
        "num_heads": config["index_n_heads"],
        "head_dim": config["index_head_dim"],
        "top_k": config["index_topk"],
    }
    mixers = {
        "window": ranks,
        "sparse": {**ranks, "ratio": 4, "overlap": True, "indexer": indexer},
        "compressed": {**ranks, "ratio": 128},
    }
    hashed = config["num_hash_layers"]
    own, behind = _names_of_v4(config)
    each = [
        layer_kind_fields(
            f"{name}-{'hashed' if i < hashed else 'moe'}", [mixers[name]], [{**MOE, "hashed": i < hashed}]
        )
        for i, name in enumerate(own)
    ]
    more = {"prediction": [layer_kind_fields(f"{behind[0]}-moe", [mixers[behind[0]]], [MOE])]} if behind else {}
    attention = gqa_fields(config, sinks=True, window=config["sliding_window"])
    if config["qk_rope_head_dim"] < attention["head_dim"]:
        attention["rotary_dim"] = config["qk_rope_head_dim"]
    fields = moe_fields(
        config, num_experts="n_routed_experts", score=config["scoring_func"], correction_bias=True,
        shared_hidden=config["n_shared_experts"] * config["moe_intermediate_size"],
    )  # fmt: skip
    return {
        "attention": attention, "mlp": activation_field_without_mlp(config), "moe": fields,
        "num_mtp_layers": len(behind),
        **layers_field(each, residual_streams=config["hc_mult"], **more),
    }  # fmt: skip


_INDEX = {"index_n_heads": size_key(64), "index_head_dim": size_key(128), "index_topk": size_key(2048),
          "mlp_layer_types": list_key(), "num_nextn_predict_layers": count_key(0)}  # fmt: skip

ARCHITECTURES = (
    ConfigFamily(
        "DeepseekV32Config", ("DeepseekV32ForCausalLM",), ("deepseek_v32",),
        {**common_keys(7168, 61, 128, 18432, 129280), **latent_attention_keys(1536, 512, 128, 64, 128),
         **deepseek_moe_keys(256, 1, 8, 2048, 3, 8, 4), **_INDEX, "moe_layer_freq": size_key(1)}, _deepseek_v32,
    ),
    ConfigFamily(
        "GlmMoeDsaConfig", ("GlmMoeDsaForCausalLM",), ("glm_moe_dsa",),
        {**common_keys(6144, 78, 64, 12288, 154880), **latent_attention_keys(2048, 512, 192, 64, 256),
         **deepseek_moe_keys(256, 1, 8, 2048, 3), **_INDEX, "index_n_heads": size_key(32), "indexer_types": list_key(),
         "index_topk_pattern": text_key(None), "index_topk_freq": count_key(1), "index_skip_topk_offset": count_key(2)},
        _glm_moe_dsa,
    ),
    ConfigFamily(
        "DeepseekV4Config", ("DeepseekV4ForCausalLM",), ("deepseek_v4",),
        {**common_keys(4096, 43, 64, None, 129280), "num_key_value_heads": size_key(1), "head_dim": size_key(512),
         "q_lora_rank": size_key(1024), "o_lora_rank": size_key(1024), "o_groups": size_key(8),
         "qk_rope_head_dim": size_key(64),
         "sliding_window": size_key(128), "attention_bias": flag_key(False), "layer_types": list_key(),
         "compress_ratios": list_key(), "index_n_heads": size_key(64), "index_head_dim": size_key(128),
         "index_topk": size_key(512),
         "n_routed_experts": size_key(256, "n_routed_experts", "num_local_experts"), "n_shared_experts": count_key(1),
         "num_experts_per_tok": size_key(6), "moe_intermediate_size": size_key(2048),
         "scoring_func": text_key("sqrtsoftplus"),
         "num_hash_layers": count_key(3), "hc_mult": size_key(4), "num_nextn_predict_layers": count_key(1)},
         _deepseek_v4,
    ),
)  # fmt: skip
