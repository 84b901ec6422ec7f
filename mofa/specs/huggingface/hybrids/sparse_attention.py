"""Sparse attention: DeepSeek-V3.2 and GLM-5 with an indexer, DeepSeek-V4 over compressed tokens."""

from __future__ import annotations

from typing import Any

from mofa.specs.huggingface.deepseek import expert_sizes, latent_sizes, many_experts
from mofa.specs.huggingface.hybrids.layer_fields import ATTENTION, MLP, MOE, kind, layers, listed
from mofa.specs.huggingface.record import Architecture, Config, count, entries, flag, size, text
from mofa.specs.huggingface.shared_keys import experts_only, gqa, latent_attention, moe, refuse, sizes


def _indexed(config: Config, has_indexer: list[bool]) -> dict[str, Any]:
    """Latent attention with an indexer, in layers without one by the keys that an earlier one chose."""
    sparse = {
        "kind": "sparse", "num_heads": config["index_n_heads"], "head_dim": config["index_head_dim"],
        "top_k": config["index_topk"],
    }  # fmt: skip
    raw = many_experts(config, "sigmoid", grouped=True, correction=True)
    fields = {**raw["moe"]}
    dense = fields.pop("first_k_dense")
    each = []
    for i, own in enumerate(has_indexer):
        name, ffn = ("indexed" if own else "shared-index"), (MLP if i < dense else MOE)
        each.append(kind(f"{name}-{ffn['kind']}", [sparse if own else ATTENTION], [ffn]))
    return {**raw, "attention": latent_attention(config), "moe": fields, **layers(each)}


def _deepseek_v32(config: Config) -> dict[str, Any]:
    refuse(config, "moe_layer_freq", 1, "such pattern of layers")
    return _indexed(config, [True] * config["num_hidden_layers"])


def _glm_moe_dsa(config: Config) -> dict[str, Any]:
    """Which layers have an indexer: a list, a pattern of letters, or every so many behind the first ones."""
    every, first, given = (
        max(config["index_topk_freq"], 1),
        config["index_skip_topk_offset"],
        config["num_hidden_layers"],
    )
    if config["indexer_types"] is not None:
        own = [name == "F" for name in listed(config, "indexer_types", {"full": "F", "shared": "S"})]
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
        return listed(config, "layer_types", _KINDS_OF_V4), ["window"] * predictions
    if config["compress_ratios"] is None:
        alternating = ["sparse" if i % 2 else "compressed" for i in range(max(given - 2, 0))]
        return ["compressed"] * min(given, 2) + alternating, ["window"] * predictions
    length = len(config["compress_ratios"])
    if length not in (given, given + predictions):
        raise ValueError(f"compress_ratios lists {length} layers, there are {given} and {predictions} predictions")
    names = listed(config, "compress_ratios", _RATIOS_OF_V4, length)
    return names[:given], names[given:] or ["window"] * predictions


def _deepseek_v4(config: Config) -> dict[str, Any]:
    """A window in all layers, in most also compressed tokens: those an indexer chooses, or all where they are few."""
    refuse(config, "attention_bias", False, "biases in this attention")
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
        kind(f"{name}-{'hashed' if i < hashed else 'moe'}", [mixers[name]], [{**MOE, "hashed": i < hashed}])
        for i, name in enumerate(own)
    ]
    more = {"prediction": [kind(f"{behind[0]}-moe", [mixers[behind[0]]], [MOE])]} if behind else {}
    attention = gqa(config, sinks=True, window=config["sliding_window"])
    if config["qk_rope_head_dim"] < attention["head_dim"]:
        attention["rotary_dim"] = config["qk_rope_head_dim"]
    fields = moe(
        config, num_experts="n_routed_experts", score=config["scoring_func"], correction_bias=True,
        shared_hidden=config["n_shared_experts"] * config["moe_intermediate_size"],
    )  # fmt: skip
    return {
        "attention": attention, "mlp": experts_only(config), "moe": fields, "num_mtp_layers": len(behind),
        **layers(each, residual_streams=config["hc_mult"], **more),
    }  # fmt: skip


_INDEX = {"index_n_heads": size(64), "index_head_dim": size(128), "index_topk": size(2048),
          "mlp_layer_types": entries(), "num_nextn_predict_layers": count(0)}  # fmt: skip

ARCHITECTURES = (
    Architecture(
        "DeepseekV32Config", ("DeepseekV32ForCausalLM",), ("deepseek_v32",),
        {**sizes(7168, 61, 128, 18432, 129280), **latent_sizes(1536, 512, 128, 64, 128),
         **expert_sizes(256, 1, 8, 2048, 3, 8, 4), **_INDEX, "moe_layer_freq": size(1)}, _deepseek_v32,
    ),
    Architecture(
        "GlmMoeDsaConfig", ("GlmMoeDsaForCausalLM",), ("glm_moe_dsa",),
        {**sizes(6144, 78, 64, 12288, 154880), **latent_sizes(2048, 512, 192, 64, 256),
         **expert_sizes(256, 1, 8, 2048, 3), **_INDEX, "index_n_heads": size(32), "indexer_types": entries(),
         "index_topk_pattern": text(None), "index_topk_freq": count(1), "index_skip_topk_offset": count(2)},
        _glm_moe_dsa,
    ),
    Architecture(
        "DeepseekV4Config", ("DeepseekV4ForCausalLM",), ("deepseek_v4",),
        {**sizes(4096, 43, 64, None, 129280), "num_key_value_heads": size(1), "head_dim": size(512),
         "q_lora_rank": size(1024), "o_lora_rank": size(1024), "o_groups": size(8), "qk_rope_head_dim": size(64),
         "sliding_window": size(128), "attention_bias": flag(False), "layer_types": entries(),
         "compress_ratios": entries(), "index_n_heads": size(64), "index_head_dim": size(128), "index_topk": size(512),
         "n_routed_experts": size(256, "n_routed_experts", "num_local_experts"), "n_shared_experts": count(1),
         "num_experts_per_tok": size(6), "moe_intermediate_size": size(2048), "scoring_func": text("sqrtsoftplus"),
         "num_hash_layers": count(3), "hc_mult": size(4), "num_nextn_predict_layers": count(1)}, _deepseek_v4,
    ),
)  # fmt: skip
