"""Classes whose code is published with their weights: InternLM2, Baichuan, Ling, Grok."""

from __future__ import annotations

from typing import Any

from mofa.specs.huggingface.record import (
    REQUIRED,
    Config,
    ConfigFamily,
    count_key,
    flag_key,
    number_key,
    size_key,
    text_key,
)
from mofa.specs.huggingface.shared_keys import (
    HEAD_DIM,
    KV_HEADS,
    REQUIRED_SIZES,
    activation_field_without_mlp,
    dense_and_moe_fields,
    gated_mlp_fields,
    gqa_fields,
    moe_fields,
    refuse_other_value,
    rotary_dim_field,
    rotary_share_key,
)


def _internlm2(config: Config) -> dict[str, Any]:
    bias = config["bias"]
    return {"attention": gqa_fields(config, qkv_bias=bias, out_bias=bias), "mlp": gated_mlp_fields(config)}


def _baichuan(config: Config) -> dict[str, Any]:
    """The class of 13 billion parameters knows no ``max_position_embeddings``, and has ALiBi."""
    positions = "rope" if config["max_position_embeddings"] else "alibi"
    return {"attention": gqa_fields(config), "mlp": gated_mlp_fields(config), "positions": positions}


def _qwen1(config: Config) -> dict[str, Any]:
    """Gate and up are each half of ``intermediate_size`` wide; queries, keys and values alone have biases."""
    refuse_other_value(config, "no_bias", True, "the first Qwen with biases beside those of queries, keys and values")
    mlp = {"activation": "swiglu", "ffn_hidden": config["intermediate_size"] // 2}
    return {"attention": gqa_fields(config, qkv_bias=True), "mlp": mlp}


def _bailing(config: Config) -> dict[str, Any]:
    attention = gqa_fields(config, qkv_bias=config["use_qkv_bias"] or config["use_bias"], out_bias=config["use_bias"])
    fields = moe_fields(
        config, first_k_dense=config["first_k_dense_replace"],
        shared_hidden=config["num_shared_experts"] * config["moe_intermediate_size"],
    )  # fmt: skip
    return {"attention": attention, **dense_and_moe_fields(config, fields)}


def _bailing_v2(config: Config) -> dict[str, Any]:
    raw = _bailing(config)
    attention = {**raw["attention"], "qk_norm": config["use_qk_norm"], **rotary_dim_field(config)}
    grouped = {"num_groups": config["n_group"], "groups_per_token": config["topk_group"]}
    chosen = {"score": config["score_function"], "correction_bias": config["moe_router_enable_expert_bias"], **grouped}
    return {**raw, "attention": attention, "moe": {**raw["moe"], **chosen},
            "num_mtp_layers": config["num_nextn_predict_layers"]}  # fmt: skip


_GROK = {"norm_placement": "both", "multipliers": ("embedding", "logits")}


def _grok1(config: Config) -> dict[str, Any]:
    """Scores go through a tanh (``max_attn_value``), and all parts have a norm on either side."""
    fields = moe_fields(config, width="intermediate_size")
    return {
        "attention": gqa_fields(config, softcap=True),
        "mlp": activation_field_without_mlp(config),
        "moe": fields,
        **_GROK,
    }


def _grok2(config: Config) -> dict[str, Any]:
    """A dense feed-forward layer runs beside the experts in every layer, as a shared expert does."""
    refuse_other_value(config, "residual_moe", True, "Grok-2 without a dense layer beside its experts")
    fields = moe_fields(config, num_experts="num_local_experts", shared_hidden=config["intermediate_size"])
    attention = gqa_fields(config, softcap=config["attn_logit_softcapping"] is not None)
    raw = {"attention": attention, "mlp": activation_field_without_mlp(config), "moe": fields, **_GROK}
    return {**raw, "logit_softcap": config["final_logit_softcapping"] is not None}


_BAILING = {
    **REQUIRED_SIZES, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "use_qkv_bias": flag_key(False),
    "use_bias": flag_key(True), "num_experts": size_key(REQUIRED), "num_experts_per_tok": size_key(REQUIRED),
    "moe_intermediate_size": size_key(REQUIRED), "num_shared_experts": count_key(0),
    "first_k_dense_replace": count_key(0),
}  # fmt: skip

_QWEN1_SIZES = {name: key for name, key in REQUIRED_SIZES.items() if name != "hidden_act"}

ARCHITECTURES = (
    ConfigFamily(
        "QWenConfig", ("QWenLMHeadModel",), ("qwen",), {**_QWEN1_SIZES, "no_bias": flag_key(True)}, _qwen1,
        remote="Qwen/Qwen-7B",
    ),
    ConfigFamily(
        "InternLM2Config", ("InternLM2ForCausalLM",), ("internlm2",),
        {**REQUIRED_SIZES, "num_key_value_heads": KV_HEADS, "bias": flag_key(True)}, _internlm2,
        remote="internlm/internlm2-20b",
    ),
    ConfigFamily(
        "BaichuanConfig", ("BaichuanForCausalLM", "BaiChuanForCausalLM"), ("baichuan",),
        {**REQUIRED_SIZES, "max_position_embeddings": size_key(None)}, _baichuan,
         remote="baichuan-inc/Baichuan2-13B-Base",
    ),
    ConfigFamily(
        "BailingMoeConfig", ("BailingMoeForCausalLM",), ("bailing_moe",), _BAILING, _bailing,
        remote="inclusionAI/Ling-lite",
    ),
    ConfigFamily(
        "BailingMoeV2Config", ("BailingMoeV2ForCausalLM",), ("bailing_moe_v2",),
        {**_BAILING, "use_bias": flag_key(False), **rotary_share_key(1.0), "use_qk_norm": flag_key(True),
         "n_group": size_key(8),
         "topk_group": size_key(4), "score_function": text_key("sigmoid"),
         "moe_router_enable_expert_bias": flag_key(True),
         "num_nextn_predict_layers": count_key(0)}, _bailing_v2, remote="inclusionAI/Ling-mini-2.0",
    ),
    ConfigFamily(
        "Grok1Config", ("Grok1ModelForCausalLM",), ("grok-1",),
        {**REQUIRED_SIZES, "hidden_act": text_key("gelu"), "tie_word_embeddings": flag_key(True),
         "num_key_value_heads": KV_HEADS, "num_experts": size_key(REQUIRED),
         "num_experts_per_tok": size_key(REQUIRED)}, _grok1,
        remote="hpcai-tech/grok-1",
    ),
    ConfigFamily(
        "Grok1Config", ("Grok1ForCausalLM",), ("grok-2",),
        {**REQUIRED_SIZES, "hidden_act": text_key("gelu"), "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
         "num_local_experts": size_key(REQUIRED), "num_experts_per_tok": size_key(REQUIRED),
         "moe_intermediate_size": size_key(REQUIRED), "residual_moe": flag_key(REQUIRED),
         "attn_logit_softcapping": number_key(30.0, nullable=True),
         "final_logit_softcapping": number_key(50.0, nullable=True)},
        _grok2, remote="xai-org/grok-2",
    ),
)  # fmt: skip
