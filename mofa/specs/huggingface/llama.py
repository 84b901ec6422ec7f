"""Llama and the classes whose layers are Llama's: a norm ahead of each part, gated feed-forward, rotary positions."""

from __future__ import annotations

from typing import Any

from mofa.specs.huggingface.record import (
    Config,
    ConfigFamily,
    count_key,
    count_or_text_key,
    flag_key,
    list_key,
    size_key,
    text_key,
)
from mofa.specs.huggingface.shared_keys import (
    HEAD_DIM,
    KV_HEADS,
    WINDOW,
    common_keys,
    gated_mlp_fields,
    gqa_fields,
    head_dim_key,
    kv_heads_key,
    listed_window_fields,
    periodic_window_fields,
    refuse_other_value,
    ungated_mlp_fields,
)

_BIASES = {"attention_bias": flag_key(False), "mlp_bias": flag_key(False)}


def _llama(config: Config) -> dict[str, Any]:
    bias = config["attention_bias"]
    return {
        "attention": gqa_fields(config, qkv_bias=bias, out_bias=bias),
        "mlp": gated_mlp_fields(config, bias=config["mlp_bias"]),
    }


def _internlm3(config: Config) -> dict[str, Any]:
    if config["attention_bias"] != config["mlp_bias"]:
        raise ValueError(
            f"qkv_bias ({config['attention_bias']}) and bias ({config['mlp_bias']}) differ; transformers builds no "
            "such model, give both one value"
        )
    return _llama(config)


def _arcee(config: Config) -> dict[str, Any]:
    return {**_llama_attention(config), "mlp": ungated_mlp_fields(config, bias=config["mlp_bias"])}


def _llama_attention(config: Config) -> dict[str, Any]:
    bias = config["attention_bias"]
    return {"attention": gqa_fields(config, qkv_bias=bias, out_bias=bias)}


def _jais(config: Config) -> dict[str, Any]:
    return {**_arcee(config), "norm": "layernorm"}


def _iquestcoder(config: Config) -> dict[str, Any]:
    refuse_other_value(config, "use_sliding_window", False, "window of IQuest-Coder's, and nor has transformers")
    return _llama(config)


def _seed_oss(config: Config) -> dict[str, Any]:
    attention = gqa_fields(config, qkv_bias=config["attention_bias"], out_bias=config["attention_out_bias"])
    return {"attention": attention, "mlp": gated_mlp_fields(config, bias=config["mlp_bias"])}


def _helium(config: Config) -> dict[str, Any]:
    """Helium's output projection has no bias, and is as wide as the model whatever the heads are."""
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        raise ValueError(f"head_dim ({config['head_dim']}) must be hidden_size / num_attention_heads; correct it")
    return {
        "attention": gqa_fields(config, qkv_bias=config["attention_bias"]),
        "mlp": gated_mlp_fields(config, bias=config["mlp_bias"]),
    }


def _one_bias(config: Config) -> dict[str, Any]:
    bias = config["use_bias"]
    return {"attention": gqa_fields(config, qkv_bias=bias, out_bias=bias), "mlp": gated_mlp_fields(config, bias=bias)}


def _smollm3(config: Config) -> dict[str, Any]:
    every = unrotated_layer_period(config)
    bias = config["attention_bias"]
    window: dict[str, Any] = {}
    if config["use_sliding_window"] and config["sliding_window"]:
        if config["layer_types"] is None:
            raise ValueError("use_sliding_window is true, but layer_types is absent; say which layers have the window")
        window = listed_window_fields(config, config["layer_types"])
    attention = gqa_fields(config, qkv_bias=bias, out_bias=bias, nope_every=every, **window)
    return {"attention": attention, "mlp": gated_mlp_fields(config, bias=config["mlp_bias"])}


def unrotated_layer_period(config: Config) -> int:
    """Every how many layers one has no rotary embedding, 0 for none; a list of the layers must be so regular."""
    listed, layers = config["no_rope_layers"], config["num_hidden_layers"]
    if not listed:
        return int(config["no_rope_layer_interval"])
    if len(listed) != layers:
        raise ValueError(f"no_rope_layers lists {len(listed)} layers, num_hidden_layers is {layers}; correct one")
    if all(listed):
        return 0
    every = [bool(rotated) for rotated in listed].index(False) + 1
    if [bool(rotated) for rotated in listed] != [(i + 1) % every != 0 for i in range(layers)]:
        raise ValueError("no_rope_layers is no regular pattern of every n-th layer; mofa has no other")
    return every


def _exaone4(config: Config) -> dict[str, Any]:
    """EXAONE 4.0: norms behind the parts; windowed layers are rotated, the others only where there are no windows."""
    pattern = config["sliding_window_pattern"]
    every = len(pattern) if isinstance(pattern, str) else pattern
    window = periodic_window_fields(config, every or 1) if config["sliding_window"] else {}
    unrotated = window.get("window_every", 0)
    attention = gqa_fields(config, qk_norm=True, nope_every=unrotated, **window)
    return {"attention": attention, "mlp": gated_mlp_fields(config), "norm_placement": "after"}


_ROPE_LISTS = {"no_rope_layers": list_key(), "no_rope_layer_interval": size_key(4)}

LLAMA = ConfigFamily(
    "LlamaConfig", ("LlamaForCausalLM",), ("llama",),
    {**common_keys(4096, 32, 32, 11008, 32000), "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, **_BIASES},
     _llama,
)  # fmt: skip

ARCHITECTURES = (
    ConfigFamily(
        "Emu3TextConfig", ("Emu3ForCausalLM", "Emu3ForConditionalGeneration"), ("emu3_text_model", "emu3"),
        {**common_keys(4096, 32, 32, 14336, 184622), "num_key_value_heads": size_key(8), "head_dim": HEAD_DIM,
         **_BIASES},
        _llama,
    ),
    LLAMA,
    ConfigFamily(
        "InternLM3Config", ("InternLM3ForCausalLM",), ("internlm3",),
        {**common_keys(4096, 48, 32, 10240, 128512), "num_key_value_heads": kv_heads_key(2),
         "head_dim": head_dim_key(128),
         "attention_bias": flag_key(False, "qkv_bias", "attention_bias"),
         "mlp_bias": flag_key(False, "bias", "mlp_bias")},
        _internlm3, built_as="LlamaForCausalLM",
    ),
    ConfigFamily(
        "IQuestCoderConfig", ("IQuestCoderForCausalLM",), ("iquestcoder",),
        {**common_keys(5120, 80, 40, 27648, 76800), "num_key_value_heads": kv_heads_key(8),
         "head_dim": head_dim_key(128),
         **_BIASES, "use_sliding_window": flag_key(False)}, _iquestcoder, built_as="LlamaForCausalLM",
    ),
    ConfigFamily(
        "ExaoneConfig", ("ExaoneForCausalLM",), ("exaone",),
        {**common_keys(4096, 32, 32, 14336, 102400), "num_key_value_heads": kv_heads_key(8), "head_dim": HEAD_DIM,
         **_BIASES,
         "num_hidden_layers": size_key(32, "num_layers", "num_hidden_layers"),
         "hidden_act": text_key("silu", "activation_function", "hidden_act")}, _llama, built_as="LlamaForCausalLM",
    ),
    ConfigFamily(
        "ArceeConfig", ("ArceeForCausalLM",), ("arcee",),
        {**common_keys(2560, 32, 32, 18432, 32000, "relu2"), "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
         **_BIASES}, _arcee,
    ),
    ConfigFamily(
        "Jais2Config", ("Jais2ForCausalLM",), ("jais2",),
        {**common_keys(3328, 32, 26, 26624, 150272, "relu2"), "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
         "attention_bias": flag_key(True), "mlp_bias": flag_key(True)}, _jais,
    ),
    ConfigFamily(
        "SeedOssConfig", ("SeedOssForCausalLM",), ("seed_oss",),
        {**common_keys(4096, 64, 80, 27648, 155136), "num_key_value_heads": kv_heads_key(8),
         "head_dim": head_dim_key(128),
         "attention_bias": flag_key(True), "attention_out_bias": flag_key(False), "mlp_bias": flag_key(False)},
         _seed_oss,
    ),
    ConfigFamily(
        "HeliumConfig", ("HeliumForCausalLM",), ("helium",),
        {**common_keys(2560, 24, 20, 7040, 48000), "num_key_value_heads": kv_heads_key(20),
         "head_dim": head_dim_key(128),
         **_BIASES}, _helium,
    ),
    ConfigFamily(
        "Ernie4_5Config", ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"), ("ernie4_5",),
        {**common_keys(1024, 18, 16, 3072, 103424, tied=True), "num_key_value_heads": kv_heads_key(2),
         "head_dim": head_dim_key(128), "use_bias": flag_key(False)}, _one_bias,
    ),
    ConfigFamily(
        "SmolLM3Config", ("SmolLM3ForCausalLM",), ("smollm3",),
        {**common_keys(2048, 36, 16, 11008, 128256, tied=True), "num_key_value_heads": kv_heads_key(4),
         "head_dim": HEAD_DIM,
         **_BIASES, **_ROPE_LISTS, **WINDOW, "use_sliding_window": flag_key(False)}, _smollm3,
    ),
    ConfigFamily(
        "Exaone4Config", ("Exaone4ForCausalLM",), ("exaone4",),
        {**common_keys(4096, 32, 32, 16384, 102400), "num_key_value_heads": kv_heads_key(32), "head_dim": HEAD_DIM,
         "sliding_window": count_key(4096, nullable=True), "layer_types": list_key(),
         "sliding_window_pattern": count_or_text_key(4)}, _exaone4,
    ),
)  # fmt: skip
