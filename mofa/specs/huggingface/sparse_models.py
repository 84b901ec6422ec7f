"""gpt-oss, Llama 4, DBRX, ERNIE 4.5 and Hunyuan: models with experts that share no class's layers."""

from __future__ import annotations

import math
from typing import Any

from mofa.specs.files import shown_value
from mofa.specs.huggingface.llama import unrotated_layer_period
from mofa.specs.huggingface.olmo import clipped_qkv_note
from mofa.specs.huggingface.record import (
    Config,
    ConfigFamily,
    count_key,
    flag_key,
    list_key,
    number_key,
    object_key,
    per_layer_key,
    size_key,
)
from mofa.specs.huggingface.shared_keys import (
    HEAD_DIM,
    KV_HEADS,
    WINDOW,
    activation_field_without_mlp,
    activation_name,
    common_keys,
    dense_and_moe_fields,
    gated_mlp_fields,
    gqa_fields,
    head_dim_key,
    kv_heads_key,
    listed_window_fields,
    moe_fields,
    refuse_other_value,
)


def _gpt_oss(config: Config) -> dict[str, Any]:
    bias, layers = config["attention_bias"], config["num_hidden_layers"]
    alternating = [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]
    kinds = alternating if config["layer_types"] is None else config["layer_types"]
    fields = moe_fields(
        config, num_experts="num_local_experts", width="intermediate_size", router_bias=True, expert_bias=True
    )
    attention = gqa_fields(config, qkv_bias=bias, out_bias=bias, sinks=True, **listed_window_fields(config, kinds))
    return {
        "attention": attention,
        "mlp": activation_field_without_mlp(config),
        "moe": fields,
        "rope_scale": _yarn_scale(config),
    }


def _yarn_scale(config: Config) -> float:
    """YaRN's factor of cosine and sine: 0.1 ln s + 1 for positions stretched s times; 1 without YaRN."""
    scaling = config["rope_scaling"] or {}
    if scaling.get("rope_type", scaling.get("type")) != "yarn":
        return 1.0
    factor = scaling.get("factor")
    if not isinstance(factor, (int, float)) or isinstance(factor, bool) or not factor >= 1:
        raise ValueError(f"rope_scaling.factor ({shown_value(factor)}) is no factor of at least 1; correct it")
    return round(0.1 * math.log(factor) + 1.0, 4)


def _llama4(config: Config) -> dict[str, Any]:
    """Rotated layers attend within chunks, the others to all; a list of sparse layers must be every n-th."""
    bias, layers, step = config["attention_bias"], config["num_hidden_layers"], config["interleave_moe_layer_step"]
    every = unrotated_layer_period(config)
    window = {}
    if config["attention_chunk_size"] and every != 1:
        rotated = [not every or (i + 1) % every for i in range(layers)]
        kinds = config["layer_types"] or [("full_attention", "chunked_attention")[bool(turned)] for turned in rotated]
        window = listed_window_fields(config, kinds, "attention_chunk_size", "chunked_attention")
    if config["moe_layers"] is not None and config["moe_layers"] != list(range(step - 1, layers, step)):
        raise ValueError("moe_layers is not every interleave_moe_layer_step-th layer; mofa has no other pattern")
    norm = {"qk_norm": True, "qk_norm_kind": "unweighted"} if config["use_qk_norm"] else {}
    attention = gqa_fields(
        config, qkv_bias=bias, out_bias=bias, nope_every=every, chunked="window" in window, **norm, **window
    )
    fields = moe_fields(
        config, num_experts="num_local_experts", width="intermediate_size", score="sigmoid",
        shared_hidden=config["intermediate_size"], every=step,
    )  # fmt: skip
    mlp = gated_mlp_fields(config, width="intermediate_size_mlp") if step > 1 else activation_field_without_mlp(config)
    return {"attention": attention, "mlp": mlp, "moe": fields}


def _dbrx(config: Config) -> dict[str, Any]:
    refuse_other_value(config, "tie_word_embeddings", False, "tied DBRX, as its class has none")
    act = config["ffn_config.ffn_act_fn"] or {}
    config = {**config, "hidden_act": act.get("name", "silu"), "num_experts_per_tok": config["ffn_config.moe_top_k"]}
    fields = moe_fields(config, num_experts="ffn_config.moe_num_experts", width="ffn_config.ffn_hidden_size")
    attention = {**gqa_fields(config), "num_kv_heads": config["attn_config.kv_n_heads"]}
    return {
        "attention": attention,
        "mlp": activation_field_without_mlp(config),
        "moe": fields,
        "norm": "layernorm",
        "norm_bias": False,
    }


def _dbrx_left_out(config: Config) -> tuple[str, ...]:
    return clipped_qkv_note({"clip_qkv": config["attn_config.clip_qkv"]})


def _ernie_moe(config: Config) -> dict[str, Any]:
    refuse_other_value(config, "use_bias", False, "biases of ERNIE's experts")
    first, last, layers = config["moe_layer_start_index"], config["moe_layer_end_index"], config["num_hidden_layers"]
    if config["moe_layer_interval"] != 1 or (last is not None and last >= 0 and last < layers - 1):
        raise ValueError(
            f"moe_layer_interval ({config['moe_layer_interval']}) and moe_layer_end_index ({last}) must leave experts "
            "in every layer after the first dense ones; mofa has no other pattern"
        )
    fields = moe_fields(
        config, num_experts="moe_num_experts", correction_bias=True, first_k_dense=first,
        shared_hidden=config["moe_num_shared_experts"] * config["moe_intermediate_size"],
    )  # fmt: skip
    return {"attention": gqa_fields(config), **dense_and_moe_fields(config, fields)}


def _hunyuan(config: Config) -> dict[str, Any]:
    bias = config["attention_bias"]
    return {
        "attention": gqa_fields(config, qkv_bias=bias, out_bias=bias, qk_norm=True),
        "mlp": gated_mlp_fields(config),
    }


def _one_for_all(config: Config, key: str) -> int:
    """A number of each layer, which must be the same in all."""
    given = config[key]
    listed = given if isinstance(given, list) else [given]
    if len(set(listed)) != 1:
        raise ValueError(f"{key} lists other numbers for other layers; mofa has one for all")
    return int(listed[0])


def _hunyuan_moe(config: Config) -> dict[str, Any]:
    """One shared expert as wide as a routed one; the class reads no key of its number."""
    config = {
        **config,
        "num_experts": _one_for_all(config, "num_experts"),
        "num_experts_per_tok": _one_for_all(config, "moe_topk"),
    }
    bias = config["attention_bias"]
    attention = gqa_fields(config, qkv_bias=bias, out_bias=bias, qk_norm=True)
    fields = moe_fields(config, width="intermediate_size", shared_hidden=config["intermediate_size"])
    return {"attention": attention, "mlp": {"activation": activation_name(config, gated=True)}, "moe": fields}


ARCHITECTURES = (
    ConfigFamily(
        "GptOssConfig", ("GptOssForCausalLM",), ("gpt_oss",),
        {**common_keys(2880, 36, 64, 2880, 201088), "num_key_value_heads": kv_heads_key(8), "head_dim": size_key(64),
         **WINDOW,
         "sliding_window": count_key(128, nullable=True), "attention_bias": flag_key(True),
         "num_local_experts": size_key(128, "num_local_experts", "num_experts"), "num_experts_per_tok": size_key(4),
         "rope_scaling": object_key("rope_scaling", "rope_parameters", default={"rope_type": "yarn", "factor": 32.0})},
        _gpt_oss,
    ),
    ConfigFamily(
        "Llama4TextConfig", ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"), ("llama4_text", "llama4"),
        {**common_keys(5120, 48, 40, 8192, 202048), "num_key_value_heads": kv_heads_key(8),
         "head_dim": head_dim_key(128),
         "intermediate_size_mlp": size_key(16384), "attention_bias": flag_key(False), "num_local_experts": size_key(16),
         "num_experts_per_tok": size_key(1), "interleave_moe_layer_step": size_key(1), "moe_layers": list_key(),
         "use_qk_norm": flag_key(True), "no_rope_layers": list_key(), "no_rope_layer_interval": size_key(4),
         "attention_chunk_size": count_key(8192, nullable=True), "layer_types": list_key()}, _llama4,
    ),
    ConfigFamily(
        "DbrxConfig", ("DbrxForCausalLM",), ("dbrx",),
        {"hidden_size": size_key(2048, "d_model", "hidden_size"),
         "num_hidden_layers": size_key(24, "n_layers", "num_hidden_layers"),
         "num_attention_heads": size_key(16, "n_heads", "num_attention_heads"), "vocab_size": size_key(32000),
         "tie_word_embeddings": flag_key(False), "attn_config.kv_n_heads": size_key(1),
         "attn_config.clip_qkv": number_key(None),
         "ffn_config.ffn_hidden_size": size_key(3584), "ffn_config.moe_num_experts": size_key(4),
         "ffn_config.moe_top_k": size_key(1), "ffn_config.ffn_act_fn": object_key()}, _dbrx, left_out=_dbrx_left_out,
    ),
    ConfigFamily(
        "Ernie4_5_MoeConfig", ("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoEForCausalLM"), ("ernie4_5_moe",),
        {**common_keys(2560, 28, 20, 12288, 103424, tied=True), "num_key_value_heads": kv_heads_key(4),
         "use_bias": flag_key(False),
         "moe_num_experts": size_key(64, "moe_num_experts", "num_experts"), "moe_intermediate_size": size_key(1536),
         "num_experts_per_tok": size_key(6, "moe_k", "num_experts_per_tok"), "moe_num_shared_experts": count_key(2),
         "moe_layer_start_index": count_key(1), "moe_layer_end_index": number_key(-1),
         "moe_layer_interval": size_key(1)},
        _ernie_moe,
    ),
    ConfigFamily(
        "HunYuanDenseV1Config", ("HunYuanDenseV1ForCausalLM",), ("hunyuan_v1_dense",),
        {**common_keys(4096, 32, 32, 11008, 290943), "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
         "attention_bias": flag_key(False)}, _hunyuan,
    ),
    ConfigFamily(
        "HunYuanMoEV1Config", ("HunYuanMoEV1ForCausalLM",), ("hunyuan_v1_moe",),
        {**common_keys(4096, 32, 32, 11008, 290943), "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
         "attention_bias": flag_key(False), "num_experts": per_layer_key(1, "num_experts", "num_local_experts"),
         "moe_topk": per_layer_key(1, "moe_topk", "num_experts_per_tok")}, _hunyuan_moe,
    ),
)  # fmt: skip
