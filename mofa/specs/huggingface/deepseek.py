"""DeepSeek V1 to V3.1, Moonlight, Kimi K2 and others whose layers are theirs: latent attention, or many experts."""

from __future__ import annotations

from typing import Any

from mofa.specs.files import shown_value
from mofa.specs.huggingface.record import (
    REQUIRED,
    Config,
    ConfigFamily,
    count_key,
    flag_key,
    list_key,
    size_key,
    text_key,
)
from mofa.specs.huggingface.shared_keys import (
    KV_HEADS,
    common_keys,
    dense_and_moe_fields,
    gated_mlp_fields,
    gqa_fields,
    kv_heads_key,
    latent_attention_fields,
    moe_fields,
    refuse_other_value,
    switched_window_fields,
)


def num_first_dense_layers(config: Config) -> int:
    """Dense layers ahead of those with experts: a list of the layers' kinds wins over their number."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return int(config["first_k_dense_replace"])
    dense = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    if kinds != ["dense"] * dense + ["sparse"] * (config["num_hidden_layers"] - dense):
        raise ValueError("mlp_layer_types is not dense layers, then sparse ones; mofa has no other pattern")
    return dense


def deepseek_moe_fields(config: Config, score: str, *, grouped: bool, correction: bool) -> dict[str, Any]:
    """Routed experts with shared ones beside, behind dense layers: DeepSeekMoE."""
    groups = (config["n_group"], config["topk_group"])
    if grouped and None in groups:
        raise ValueError(
            f"n_group and topk_group are null, but topk_method is {config.get('topk_method', 'noaux_tc')}; give both"
        )
    fields = moe_fields(
        config, num_experts="n_routed_experts", score=score, correction_bias=correction,
        shared_hidden=(config["n_shared_experts"] or 0) * config["moe_intermediate_size"],
        first_k_dense=num_first_dense_layers(config),
        num_groups=groups[0] if grouped else 1, groups_per_token=groups[1] if grouped else 1,
    )  # fmt: skip
    raw = (
        {"mlp": gated_mlp_fields(config), "moe": fields}
        if config.get("intermediate_size")
        else dense_and_moe_fields(config, fields)
    )
    return {**raw, "num_mtp_layers": config.get("num_nextn_predict_layers", 0)}


def _by_method(config: Config) -> dict[str, Any]:
    refuse_other_value(config, "moe_layer_freq", 1, "such pattern of layers")
    if config["scoring_func"] not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring_func ({shown_value(config['scoring_func'])}) must be softmax or sigmoid")
    method = config["topk_method"]
    if method not in ("greedy", "group_limited_greedy", "noaux_tc"):
        raise ValueError(f"topk_method ({shown_value(method)}) must be greedy, group_limited_greedy or noaux_tc")
    return deepseek_moe_fields(
        config, config["scoring_func"], grouped=method != "greedy", correction=method == "noaux_tc"
    )


def _deepseek(config: Config) -> dict[str, Any]:
    return {"attention": latent_attention_fields(config), **_by_method(config)}


def _glm4_moe_lite(config: Config) -> dict[str, Any]:
    return {
        "attention": latent_attention_fields(config),
        **deepseek_moe_fields(config, "sigmoid", grouped=True, correction=True),
    }


def _youtu(config: Config) -> dict[str, Any]:
    return {"attention": latent_attention_fields(config), "mlp": gated_mlp_fields(config)}


def _deepseek_v1_moe(config: Config) -> dict[str, Any]:
    refuse_other_value(config, "moe_layer_freq", 1, "such pattern of layers")
    bias = config["attention_bias"]
    raw = deepseek_moe_fields(
        {**config, "topk_method": "greedy"}, config["scoring_func"], grouped=False, correction=False
    )
    return {"attention": gqa_fields(config, qkv_bias=bias, out_bias=bias), **raw}


def _dots1(config: Config) -> dict[str, Any]:
    bias = config["attention_bias"]
    attention = gqa_fields(config, qkv_bias=bias, out_bias=bias, qk_norm=True, **switched_window_fields(config))
    return {"attention": attention, **deepseek_moe_fields(config, "sigmoid", grouped=True, correction=True)}


def latent_attention_keys(queries: Any, keys: Any, nope: Any, rope: Any, value: Any) -> dict[str, Any]:
    """Keys of latent attention with a class's defaults."""
    return {
        "q_lora_rank": size_key(queries, nullable=True), "kv_lora_rank": size_key(keys),
        "qk_nope_head_dim": size_key(nope),
        "qk_rope_head_dim": size_key(rope), "v_head_dim": size_key(value), "attention_bias": flag_key(False),
    }  # fmt: skip


def deepseek_moe_keys(
    experts: Any, shared: Any, chosen: Any, width: Any, dense: Any, groups: Any = 1, topk_group: Any = 1
) -> dict[str, Any]:
    """Keys of DeepSeekMoE with a class's defaults."""
    return {
        "n_routed_experts": size_key(experts, "n_routed_experts", "num_local_experts"),
        "n_shared_experts": count_key(shared, nullable=True), "num_experts_per_tok": size_key(chosen),
        "moe_intermediate_size": size_key(width), "first_k_dense_replace": count_key(dense),
        "n_group": size_key(groups, nullable=True), "topk_group": size_key(topk_group, nullable=True),
    }  # fmt: skip


_MTP = {"num_nextn_predict_layers": count_key(1, "num_nextn_predict_layers", "num_mtp_layers")}
_V2 = {
    **common_keys(4096, 32, 32, 11008, 102400), **latent_attention_keys(1536, 512, 128, 64, 128),
    **deepseek_moe_keys(64, 2, REQUIRED, 1407, 0, None, None),
    "moe_layer_freq": size_key(1), "topk_method": text_key("greedy"), "scoring_func": text_key("softmax"),
}  # fmt: skip
_V3 = {
    **common_keys(7168, 61, 128, 18432, 129280), **latent_attention_keys(1536, 512, 128, 64, 128),
    **deepseek_moe_keys(256, 1, 8, 2048, 3, 8, 4), **_MTP,
    "moe_layer_freq": size_key(1), "topk_method": text_key("noaux_tc"), "scoring_func": text_key("sigmoid"),
}  # fmt: skip

ARCHITECTURES = (
    ConfigFamily("DeepseekV2Config", ("DeepseekV2ForCausalLM",), ("deepseek_v2",), _V2, _deepseek),
    ConfigFamily(
        "DeepseekV3Config", ("DeepseekV3ForCausalLM", "KimiK2ForCausalLM", "KimiK25ForConditionalGeneration"),
        ("deepseek_v3", "kimi_k2", "kimi_k25"), _V3, _deepseek,
    ),
    ConfigFamily(
        "Glm4MoeLiteConfig", ("Glm4MoeLiteForCausalLM",), ("glm4_moe_lite",),
        {**common_keys(2048, 47, 20, 10240, 154880), **latent_attention_keys(768, 512, 192, 64, 256),
         **deepseek_moe_keys(64, 1, 4, 1536, 1), "mlp_layer_types": list_key()}, _glm4_moe_lite,
    ),
    ConfigFamily(
        "YoutuConfig", ("YoutuForCausalLM",), ("youtu",),
        {**common_keys(2048, 32, 16, 6144, 128256, tied=True), **latent_attention_keys(1536, 512, 128, 64, 128)},
         _youtu,
    ),
    ConfigFamily(
        "Dots1Config", ("Dots1ForCausalLM",), ("dots1",),
        {**common_keys(4608, 62, 32, 10944, 152064), "num_key_value_heads": kv_heads_key(32),
         **deepseek_moe_keys(REQUIRED, None, REQUIRED, 1408, 0), "attention_bias": flag_key(False),
         "layer_types": list_key(),
         "sliding_window": count_key(4096, nullable=True), "max_window_layers": count_key(62)}, _dots1,
    ),
    ConfigFamily(
        "DeepseekConfig", ("DeepseekForCausalLM",), ("deepseek",),
        {**common_keys(4096, 30, 32, 11008, 102400), "num_key_value_heads": KV_HEADS, "attention_bias": flag_key(False),
         "n_routed_experts": size_key(REQUIRED), "n_shared_experts": count_key(None),
         "num_experts_per_tok": size_key(REQUIRED),
         "moe_intermediate_size": size_key(1407), "first_k_dense_replace": count_key(0), "moe_layer_freq": size_key(1),
         "scoring_func": text_key("softmax"), "n_group": size_key(1), "topk_group": size_key(1)}, _deepseek_v1_moe,
        remote="deepseek-ai/deepseek-moe-16b-base",
    ),
)  # fmt: skip
