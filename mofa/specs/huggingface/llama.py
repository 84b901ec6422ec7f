"""Llama and the classes whose layers are Llama's: a norm ahead of each part, gated feed-forward, rotary positions."""

from __future__ import annotations

from typing import Any

from mofa.specs.huggingface.record import Architecture, Config, count, count_or_text, entries, flag, size, text
from mofa.specs.huggingface.shared_keys import (
    HEAD_DIM,
    KV_HEADS,
    WINDOW,
    gated_mlp,
    gqa,
    head_dim,
    kv_heads,
    layer_pattern,
    period_window,
    refuse,
    sizes,
    ungated_mlp,
)

_BIASES = {"attention_bias": flag(False), "mlp_bias": flag(False)}


def _llama(config: Config) -> dict[str, Any]:
    bias = config["attention_bias"]
    return {"attention": gqa(config, qkv_bias=bias, out_bias=bias), "mlp": gated_mlp(config, bias=config["mlp_bias"])}


def _internlm3(config: Config) -> dict[str, Any]:
    if config["attention_bias"] != config["mlp_bias"]:
        raise ValueError(
            f"qkv_bias ({config['attention_bias']}) and bias ({config['mlp_bias']}) differ; transformers builds no "
            "such model, give both one value"
        )
    return _llama(config)


def _arcee(config: Config) -> dict[str, Any]:
    return {**_llama_attention(config), "mlp": ungated_mlp(config, bias=config["mlp_bias"])}


def _llama_attention(config: Config) -> dict[str, Any]:
    bias = config["attention_bias"]
    return {"attention": gqa(config, qkv_bias=bias, out_bias=bias)}


def _jais(config: Config) -> dict[str, Any]:
    return {**_arcee(config), "norm": "layernorm"}


def _iquestcoder(config: Config) -> dict[str, Any]:
    refuse(config, "use_sliding_window", False, "window of IQuest-Coder's, and nor has transformers")
    return _llama(config)


def _seed_oss(config: Config) -> dict[str, Any]:
    attention = gqa(config, qkv_bias=config["attention_bias"], out_bias=config["attention_out_bias"])
    return {"attention": attention, "mlp": gated_mlp(config, bias=config["mlp_bias"])}


def _helium(config: Config) -> dict[str, Any]:
    """Helium's output projection has no bias, and is as wide as the model whatever the heads are."""
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        raise ValueError(f"head_dim ({config['head_dim']}) must be hidden_size / num_attention_heads; correct it")
    return {
        "attention": gqa(config, qkv_bias=config["attention_bias"]),
        "mlp": gated_mlp(config, bias=config["mlp_bias"]),
    }


def _one_bias(config: Config) -> dict[str, Any]:
    bias = config["use_bias"]
    return {"attention": gqa(config, qkv_bias=bias, out_bias=bias), "mlp": gated_mlp(config, bias=bias)}


def _smollm3(config: Config) -> dict[str, Any]:
    every = unrotated_every(config)
    bias = config["attention_bias"]
    window: dict[str, Any] = {}
    if config["use_sliding_window"] and config["sliding_window"]:
        if config["layer_types"] is None:
            raise ValueError("use_sliding_window is true, but layer_types is absent; say which layers have the window")
        window = layer_pattern(config, config["layer_types"])
    attention = gqa(config, qkv_bias=bias, out_bias=bias, nope_every=every, **window)
    return {"attention": attention, "mlp": gated_mlp(config, bias=config["mlp_bias"])}


def unrotated_every(config: Config) -> int:
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
    window = period_window(config, every or 1) if config["sliding_window"] else {}
    unrotated = window.get("window_every", 0)
    attention = gqa(config, qk_norm=True, nope_every=unrotated, **window)
    return {"attention": attention, "mlp": gated_mlp(config), "norm_placement": "after"}


_ROPE_LISTS = {"no_rope_layers": entries(), "no_rope_layer_interval": size(4)}

LLAMA = Architecture(
    "LlamaConfig", ("LlamaForCausalLM",), ("llama",),
    {**sizes(4096, 32, 32, 11008, 32000), "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, **_BIASES}, _llama,
)  # fmt: skip

ARCHITECTURES = (
    Architecture(
        "Emu3TextConfig", ("Emu3ForCausalLM", "Emu3ForConditionalGeneration"), ("emu3_text_model", "emu3"),
        {**sizes(4096, 32, 32, 14336, 184622), "num_key_value_heads": size(8), "head_dim": HEAD_DIM, **_BIASES},
        _llama,
    ),
    LLAMA,
    Architecture(
        "InternLM3Config", ("InternLM3ForCausalLM",), ("internlm3",),
        {**sizes(4096, 48, 32, 10240, 128512), "num_key_value_heads": kv_heads(2), "head_dim": head_dim(128),
         "attention_bias": flag(False, "qkv_bias", "attention_bias"), "mlp_bias": flag(False, "bias", "mlp_bias")},
        _internlm3, built_as="LlamaForCausalLM",
    ),
    Architecture(
        "IQuestCoderConfig", ("IQuestCoderForCausalLM",), ("iquestcoder",),
        {**sizes(5120, 80, 40, 27648, 76800), "num_key_value_heads": kv_heads(8), "head_dim": head_dim(128),
         **_BIASES, "use_sliding_window": flag(False)}, _iquestcoder, built_as="LlamaForCausalLM",
    ),
    Architecture(
        "ExaoneConfig", ("ExaoneForCausalLM",), ("exaone",),
        {**sizes(4096, 32, 32, 14336, 102400), "num_key_value_heads": kv_heads(8), "head_dim": HEAD_DIM, **_BIASES,
         "num_hidden_layers": size(32, "num_layers", "num_hidden_layers"),
         "hidden_act": text("silu", "activation_function", "hidden_act")}, _llama, built_as="LlamaForCausalLM",
    ),
    Architecture(
        "ArceeConfig", ("ArceeForCausalLM",), ("arcee",),
        {**sizes(2560, 32, 32, 18432, 32000, "relu2"), "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
         **_BIASES}, _arcee,
    ),
    Architecture(
        "Jais2Config", ("Jais2ForCausalLM",), ("jais2",),
        {**sizes(3328, 32, 26, 26624, 150272, "relu2"), "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
         "attention_bias": flag(True), "mlp_bias": flag(True)}, _jais,
    ),
    Architecture(
        "SeedOssConfig", ("SeedOssForCausalLM",), ("seed_oss",),
        {**sizes(4096, 64, 80, 27648, 155136), "num_key_value_heads": kv_heads(8), "head_dim": head_dim(128),
         "attention_bias": flag(True), "attention_out_bias": flag(False), "mlp_bias": flag(False)}, _seed_oss,
    ),
    Architecture(
        "HeliumConfig", ("HeliumForCausalLM",), ("helium",),
        {**sizes(2560, 24, 20, 7040, 48000), "num_key_value_heads": kv_heads(20), "head_dim": head_dim(128),
         **_BIASES}, _helium,
    ),
    Architecture(
        "Ernie4_5Config", ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"), ("ernie4_5",),
        {**sizes(1024, 18, 16, 3072, 103424, tied=True), "num_key_value_heads": kv_heads(2),
         "head_dim": head_dim(128), "use_bias": flag(False)}, _one_bias,
    ),
    Architecture(
        "SmolLM3Config", ("SmolLM3ForCausalLM",), ("smollm3",),
        {**sizes(2048, 36, 16, 11008, 128256, tied=True), "num_key_value_heads": kv_heads(4), "head_dim": HEAD_DIM,
         **_BIASES, **_ROPE_LISTS, **WINDOW, "use_sliding_window": flag(False)}, _smollm3,
    ),
    Architecture(
        "Exaone4Config", ("Exaone4ForCausalLM",), ("exaone4",),
        {**sizes(4096, 32, 32, 16384, 102400), "num_key_value_heads": kv_heads(32), "head_dim": HEAD_DIM,
         "sliding_window": count(4096, nullable=True), "layer_types": entries(),
         "sliding_window_pattern": count_or_text(4)}, _exaone4,
    ),
)  # fmt: skip
