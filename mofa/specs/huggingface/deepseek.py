"""DeepSeek V1 to V3.1, Moonlight, Kimi K2 and others whose layers are theirs: latent attention, or many experts."""

from __future__ import annotations

from typing import Any

from mofa.specs.files import short
from mofa.specs.huggingface.record import REQUIRED, Architecture, Config, count, entries, flag, size, text
from mofa.specs.huggingface.shared_keys import (
    KV_HEADS,
    dense_or_experts,
    gated_mlp,
    gqa,
    kv_heads,
    latent_attention,
    moe,
    refuse,
    sizes,
    switched_window,
)


def dense_layers(config: Config) -> int:
    """Dense layers ahead of those with experts: a list of the layers' kinds wins over their number."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return int(config["first_k_dense_replace"])
    dense = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    if kinds != ["dense"] * dense + ["sparse"] * (config["num_hidden_layers"] - dense):
        raise ValueError("mlp_layer_types is not dense layers, then sparse ones; mofa has no other pattern")
    return dense


def many_experts(config: Config, score: str, *, grouped: bool, correction: bool) -> dict[str, Any]:
    """Routed experts with shared ones beside, behind dense layers: DeepSeekMoE."""
    groups = (config["n_group"], config["topk_group"])
    if grouped and None in groups:
        raise ValueError(
            f"n_group and topk_group are null, but topk_method is {config.get('topk_method', 'noaux_tc')}; give both"
        )
    fields = moe(
        config, num_experts="n_routed_experts", score=score, correction_bias=correction,
        shared_hidden=(config["n_shared_experts"] or 0) * config["moe_intermediate_size"],
        first_k_dense=dense_layers(config),
        num_groups=groups[0] if grouped else 1, groups_per_token=groups[1] if grouped else 1,
    )  # fmt: skip
    raw = (
        {"mlp": gated_mlp(config), "moe": fields}
        if config.get("intermediate_size")
        else dense_or_experts(config, fields)
    )
    return {**raw, "num_mtp_layers": config.get("num_nextn_predict_layers", 0)}


def _by_method(config: Config) -> dict[str, Any]:
    refuse(config, "moe_layer_freq", 1, "such pattern of layers")
    if config["scoring_func"] not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring_func ({short(config['scoring_func'])}) must be softmax or sigmoid")
    method = config["topk_method"]
    if method not in ("greedy", "group_limited_greedy", "noaux_tc"):
        raise ValueError(f"topk_method ({short(method)}) must be greedy, group_limited_greedy or noaux_tc")
    return many_experts(config, config["scoring_func"], grouped=method != "greedy", correction=method == "noaux_tc")


def _deepseek(config: Config) -> dict[str, Any]:
    return {"attention": latent_attention(config), **_by_method(config)}


def _glm4_moe_lite(config: Config) -> dict[str, Any]:
    return {"attention": latent_attention(config), **many_experts(config, "sigmoid", grouped=True, correction=True)}


def _youtu(config: Config) -> dict[str, Any]:
    return {"attention": latent_attention(config), "mlp": gated_mlp(config)}


def _deepseek_v1_moe(config: Config) -> dict[str, Any]:
    refuse(config, "moe_layer_freq", 1, "such pattern of layers")
    bias = config["attention_bias"]
    raw = many_experts({**config, "topk_method": "greedy"}, config["scoring_func"], grouped=False, correction=False)
    return {"attention": gqa(config, qkv_bias=bias, out_bias=bias), **raw}


def _dots1(config: Config) -> dict[str, Any]:
    bias = config["attention_bias"]
    attention = gqa(config, qkv_bias=bias, out_bias=bias, qk_norm=True, **switched_window(config))
    return {"attention": attention, **many_experts(config, "sigmoid", grouped=True, correction=True)}


def latent_sizes(queries: Any, keys: Any, nope: Any, rope: Any, value: Any) -> dict[str, Any]:
    """Keys of latent attention with a class's defaults."""
    return {
        "q_lora_rank": size(queries, nullable=True), "kv_lora_rank": size(keys), "qk_nope_head_dim": size(nope),
        "qk_rope_head_dim": size(rope), "v_head_dim": size(value), "attention_bias": flag(False),
    }  # fmt: skip


def expert_sizes(
    experts: Any, shared: Any, chosen: Any, width: Any, dense: Any, groups: Any = 1, topk_group: Any = 1
) -> dict[str, Any]:
    """Keys of DeepSeekMoE with a class's defaults."""
    return {
        "n_routed_experts": size(experts, "n_routed_experts", "num_local_experts"),
        "n_shared_experts": count(shared, nullable=True), "num_experts_per_tok": size(chosen),
        "moe_intermediate_size": size(width), "first_k_dense_replace": count(dense),
        "n_group": size(groups, nullable=True), "topk_group": size(topk_group, nullable=True),
    }  # fmt: skip


_MTP = {"num_nextn_predict_layers": count(1, "num_nextn_predict_layers", "num_mtp_layers")}
_V2 = {
    **sizes(4096, 32, 32, 11008, 102400), **latent_sizes(1536, 512, 128, 64, 128),
    **expert_sizes(64, 2, REQUIRED, 1407, 0, None, None),
    "moe_layer_freq": size(1), "topk_method": text("greedy"), "scoring_func": text("softmax"),
}  # fmt: skip
_V3 = {
    **sizes(7168, 61, 128, 18432, 129280), **latent_sizes(1536, 512, 128, 64, 128),
    **expert_sizes(256, 1, 8, 2048, 3, 8, 4), **_MTP,
    "moe_layer_freq": size(1), "topk_method": text("noaux_tc"), "scoring_func": text("sigmoid"),
}  # fmt: skip

ARCHITECTURES = (
    Architecture("DeepseekV2Config", ("DeepseekV2ForCausalLM",), ("deepseek_v2",), _V2, _deepseek),
    Architecture(
        "DeepseekV3Config", ("DeepseekV3ForCausalLM", "KimiK2ForCausalLM", "KimiK25ForConditionalGeneration"),
        ("deepseek_v3", "kimi_k2", "kimi_k25"), _V3, _deepseek,
    ),
    Architecture(
        "Glm4MoeLiteConfig", ("Glm4MoeLiteForCausalLM",), ("glm4_moe_lite",),
        {**sizes(2048, 47, 20, 10240, 154880), **latent_sizes(768, 512, 192, 64, 256),
         **expert_sizes(64, 1, 4, 1536, 1), "mlp_layer_types": entries()}, _glm4_moe_lite,
    ),
    Architecture(
        "YoutuConfig", ("YoutuForCausalLM",), ("youtu",),
        {**sizes(2048, 32, 16, 6144, 128256, tied=True), **latent_sizes(1536, 512, 128, 64, 128)}, _youtu,
    ),
    Architecture(
        "Dots1Config", ("Dots1ForCausalLM",), ("dots1",),
        {**sizes(4608, 62, 32, 10944, 152064), "num_key_value_heads": kv_heads(32),
         **expert_sizes(REQUIRED, None, REQUIRED, 1408, 0), "attention_bias": flag(False), "layer_types": entries(),
         "sliding_window": count(4096, nullable=True), "max_window_layers": count(62)}, _dots1,
    ),
    Architecture(
        "DeepseekConfig", ("DeepseekForCausalLM",), ("deepseek",),
        {**sizes(4096, 30, 32, 11008, 102400), "num_key_value_heads": KV_HEADS, "attention_bias": flag(False),
         "n_routed_experts": size(REQUIRED), "n_shared_experts": count(None), "num_experts_per_tok": size(REQUIRED),
         "moe_intermediate_size": size(1407), "first_k_dense_replace": count(0), "moe_layer_freq": size(1),
         "scoring_func": text("softmax"), "n_group": size(1), "topk_group": size(1)}, _deepseek_v1_moe,
        remote="deepseek-ai/deepseek-moe-16b-base",
    ),
)  # fmt: skip
