"""Classes whose code is published with their weights: InternLM2, Baichuan, Ling, Grok."""

from __future__ import annotations

from typing import Any

from mofa.specs.huggingface.record import REQUIRED, Architecture, Config, count, flag, number, size, text
from mofa.specs.huggingface.shared_keys import (
    HEAD_DIM,
    KV_HEADS,
    REQUIRED_SIZES,
    dense_or_experts,
    experts_only,
    gated_mlp,
    gqa,
    moe,
    refuse,
    rotary,
    rotary_dim,
)


def _internlm2(config: Config) -> dict[str, Any]:
    bias = config["bias"]
    return {"attention": gqa(config, qkv_bias=bias, out_bias=bias), "mlp": gated_mlp(config)}


def _baichuan(config: Config) -> dict[str, Any]:
    """The class of 13 billion parameters knows no ``max_position_embeddings``, and has ALiBi."""
    positions = "rope" if config["max_position_embeddings"] else "alibi"
    return {"attention": gqa(config), "mlp": gated_mlp(config), "positions": positions}


def _qwen1(config: Config) -> dict[str, Any]:
    """Gate and up are each half of ``intermediate_size`` wide; queries, keys and values alone have biases."""
    refuse(config, "no_bias", True, "the first Qwen with biases beside those of queries, keys and values")
    mlp = {"activation": "swiglu", "ffn_hidden": config["intermediate_size"] // 2}
    return {"attention": gqa(config, qkv_bias=True), "mlp": mlp}


def _bailing(config: Config) -> dict[str, Any]:
    attention = gqa(config, qkv_bias=config["use_qkv_bias"] or config["use_bias"], out_bias=config["use_bias"])
    fields = moe(
        config, first_k_dense=config["first_k_dense_replace"],
        shared_hidden=config["num_shared_experts"] * config["moe_intermediate_size"],
    )  # fmt: skip
    return {"attention": attention, **dense_or_experts(config, fields)}


def _bailing_v2(config: Config) -> dict[str, Any]:
    raw = _bailing(config)
    attention = {**raw["attention"], "qk_norm": config["use_qk_norm"], **rotary_dim(config)}
    grouped = {"num_groups": config["n_group"], "groups_per_token": config["topk_group"]}
    chosen = {"score": config["score_function"], "correction_bias": config["moe_router_enable_expert_bias"], **grouped}
    return {**raw, "attention": attention, "moe": {**raw["moe"], **chosen},
            "num_mtp_layers": config["num_nextn_predict_layers"]}  # fmt: skip


_GROK = {"norm_placement": "both", "multipliers": ("embedding", "logits")}


def _grok1(config: Config) -> dict[str, Any]:
    """Scores go through a tanh (``max_attn_value``), and all parts have a norm on either side."""
    fields = moe(config, width="intermediate_size")
    return {"attention": gqa(config, softcap=True), "mlp": experts_only(config), "moe": fields, **_GROK}


def _grok2(config: Config) -> dict[str, Any]:
    """A dense feed-forward layer runs beside the experts in every layer, as a shared expert does."""
    refuse(config, "residual_moe", True, "Grok-2 without a dense layer beside its experts")
    fields = moe(config, num_experts="num_local_experts", shared_hidden=config["intermediate_size"])
    attention = gqa(config, softcap=config["attn_logit_softcapping"] is not None)
    raw = {"attention": attention, "mlp": experts_only(config), "moe": fields, **_GROK}
    return {**raw, "logit_softcap": config["final_logit_softcapping"] is not None}


_BAILING = {
    **REQUIRED_SIZES, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "use_qkv_bias": flag(False),
    "use_bias": flag(True), "num_experts": size(REQUIRED), "num_experts_per_tok": size(REQUIRED),
    "moe_intermediate_size": size(REQUIRED), "num_shared_experts": count(0), "first_k_dense_replace": count(0),
}  # fmt: skip

_QWEN1_SIZES = {name: key for name, key in REQUIRED_SIZES.items() if name != "hidden_act"}

ARCHITECTURES = (
    Architecture(
        "QWenConfig", ("QWenLMHeadModel",), ("qwen",), {**_QWEN1_SIZES, "no_bias": flag(True)}, _qwen1,
        remote="Qwen/Qwen-7B",
    ),
    Architecture(
        "InternLM2Config", ("InternLM2ForCausalLM",), ("internlm2",),
        {**REQUIRED_SIZES, "num_key_value_heads": KV_HEADS, "bias": flag(True)}, _internlm2,
        remote="internlm/internlm2-20b",
    ),
    Architecture(
        "BaichuanConfig", ("BaichuanForCausalLM", "BaiChuanForCausalLM"), ("baichuan",),
        {**REQUIRED_SIZES, "max_position_embeddings": size(None)}, _baichuan, remote="baichuan-inc/Baichuan2-13B-Base",
    ),
    Architecture(
        "BailingMoeConfig", ("BailingMoeForCausalLM",), ("bailing_moe",), _BAILING, _bailing,
        remote="inclusionAI/Ling-lite",
    ),
    Architecture(
        "BailingMoeV2Config", ("BailingMoeV2ForCausalLM",), ("bailing_moe_v2",),
        {**_BAILING, "use_bias": flag(False), **rotary(1.0), "use_qk_norm": flag(True), "n_group": size(8),
         "topk_group": size(4), "score_function": text("sigmoid"), "moe_router_enable_expert_bias": flag(True),
         "num_nextn_predict_layers": count(0)}, _bailing_v2, remote="inclusionAI/Ling-mini-2.0",
    ),
    Architecture(
        "Grok1Config", ("Grok1ModelForCausalLM",), ("grok-1",),
        {**REQUIRED_SIZES, "hidden_act": text("gelu"), "tie_word_embeddings": flag(True),
         "num_key_value_heads": KV_HEADS, "num_experts": size(REQUIRED), "num_experts_per_tok": size(REQUIRED)}, _grok1,
        remote="hpcai-tech/grok-1",
    ),
    Architecture(
        "Grok1Config", ("Grok1ForCausalLM",), ("grok-2",),
        {**REQUIRED_SIZES, "hidden_act": text("gelu"), "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
         "num_local_experts": size(REQUIRED), "num_experts_per_tok": size(REQUIRED),
         "moe_intermediate_size": size(REQUIRED), "residual_moe": flag(REQUIRED),
         "attn_logit_softcapping": number(30.0, nullable=True), "final_logit_softcapping": number(50.0, nullable=True)},
        _grok2, remote="xai-org/grok-2",
    ),
)  # fmt: skip
