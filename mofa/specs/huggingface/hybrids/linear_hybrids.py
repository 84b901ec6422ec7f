"""Hybrids of attention and linear attention: Qwen3-Next, Qwen3.5, OLMo Hybrid, Kimi Linear, MiniMax-01 and M1."""

from __future__ import annotations

from typing import Any

from mofa.specs.huggingface.deepseek import latent_attention_keys
from mofa.specs.huggingface.hybrids.layer_fields import (
    ATTENTION,
    DENSE_OR_EXPERTS,
    GATED,
    LINEAR_OR_FULL,
    MLP,
    MOE,
    delta_net_keys,
    gated_delta_net_fields,
    layer_kind_fields,
    layers_field,
    listed_layer_kinds,
    listed_layer_numbers,
)
from mofa.specs.huggingface.record import (
    REQUIRED,
    Config,
    ConfigFamily,
    ConfigKey,
    count_key,
    flag_key,
    list_key,
    object_key,
    size_key,
)
from mofa.specs.huggingface.shared_keys import (
    HEAD_DIM,
    KV_HEADS,
    activation_field_without_mlp,
    activation_name,
    common_keys,
    gated_mlp_fields,
    gqa_fields,
    kv_heads_as_query_heads,
    kv_heads_key,
    latent_attention_fields,
    moe_fields,
    refuse_other_value,
    rotary_dim_field,
    rotary_share_key,
)


def _full_or_linear(config: Config) -> list[str]:
    """Each layer by its list, else every n-th is full."""
    if config["layer_types"] is not None:
        return listed_layer_kinds(config, "layer_types", LINEAR_OR_FULL)
    every = config["full_attention_interval"]
    return ["linear" if (i + 1) % every else "full" for i in range(config["num_hidden_layers"])]


def _qwen_attention(config: Config) -> dict[str, Any]:
    bias = config["attention_bias"]
    return gqa_fields(config, qkv_bias=bias, out_bias=bias, qk_norm=True, **rotary_dim_field(config))


def _qwen3_next(config: Config) -> dict[str, Any]:
    """Layer i has experts where ``(i + 1) % decoder_sparse_step == 0`` and i is not in ``mlp_only_layers``."""
    step, dense = config["decoder_sparse_step"], listed_layer_numbers(config, "mlp_only_layers")
    sparse = [
        (i + 1) % step == 0 and i not in dense and config["num_experts"] > 0 for i in range(config["num_hidden_layers"])
    ]
    return _qwen(config, sparse)


def _qwen(config: Config, sparse: list[bool]) -> dict[str, Any]:
    """Gated attention or gated delta nets, each with experts or a dense feed-forward."""
    mixers = {"linear": gated_delta_net_fields(config), "full": GATED}
    both = len(set(sparse)) > 1
    each = []
    for name, has_experts in zip(_full_or_linear(config), sparse, strict=True):
        ffn = MOE if has_experts else MLP
        each.append(layer_kind_fields(f"{name}-{ffn['kind']}" if both else name, [mixers[name]], [ffn]))
    more: dict[str, Any] = {}
    if config["mtp_num_hidden_layers"]:
        ffn = MOE if sparse[-1] else MLP
        more["prediction"] = [layer_kind_fields(f"full-{ffn['kind']}" if both else "full", [GATED], [ffn])]
    raw = {
        "attention": _qwen_attention(config),
        "num_mtp_layers": config["mtp_num_hidden_layers"],
        **layers_field(each, **more),
    }
    if not any(sparse):
        return {**raw, "mlp": gated_mlp_fields(config)}
    fields = moe_fields(config, shared_hidden=config["shared_expert_intermediate_size"], shared_gate=True)
    mlp = activation_field_without_mlp(config) if all(sparse) else gated_mlp_fields(config)
    return {**raw, "mlp": mlp, "moe": fields}


def _qwen3_5_moe(config: Config) -> dict[str, Any]:
    return _qwen(config, [True] * config["num_hidden_layers"])


def _qwen3_5(config: Config) -> dict[str, Any]:
    return _qwen(config, [False] * config["num_hidden_layers"])


_HEADS = size_key(None, rule=kv_heads_as_query_heads)


def _three_quarters_of_hidden(config: Config) -> int:
    """Olmo Hybrid's width of a key head."""
    return int(0.75 * config["hidden_size"] / config["linear_num_key_heads"])


def _twice_key_head(config: Config) -> int:
    return 2 * int(config["linear_key_head_dim"])


def _olmo_hybrid(config: Config) -> dict[str, Any]:
    """Gated delta nets with norms ahead of the parts, attention with norms behind them."""
    total, bias = config["num_hidden_layers"], config["attention_bias"]
    if config["layer_types"] is None:
        names = ["full" if i % 4 == 3 else "linear" for i in range(total)]
        names[-1] = names[-1] if "full" in names else "full"
    else:
        names = listed_layer_kinds(config, "layer_types", LINEAR_OR_FULL)
    if len(set(names)) < 2:
        raise ValueError(f"layer_types has {names[0]} layers alone; transformers' class needs both kinds, give them")
    bases = config["rope_parameters"]
    unrotated = {} if bases is None or bases.get("rope_theta", 1) is not None else {"nope_every": 1}
    attention = gqa_fields(config, qkv_bias=bias, out_bias=bias, qk_norm=True, qk_norm_kind="full", **unrotated)
    mixers = {"linear": gated_delta_net_fields(config), "full": ATTENTION}
    return {
        "attention": attention,
        "mlp": gated_mlp_fields(config),
        **layers_field([layer_kind_fields(n, [mixers[n]], [MLP]) for n in names]),
    }


def _kimi_linear(config: Config) -> dict[str, Any]:
    """Kimi delta attention, and latent attention in every fourth layer or so. The class ties nothing."""
    delta = {
        "kind": "kimi_delta", "num_heads": config["linear_attn_config.num_heads"],
        "head_dim": config["linear_attn_config.head_dim"],
        "conv_kernel": config["linear_attn_config.short_conv_kernel_size"],
    }  # fmt: skip
    if config["layer_types"] is not None:
        names = listed_layer_kinds(config, "layer_types", LINEAR_OR_FULL)
    elif config["linear_attn_config.full_attn_layers"] is None:
        names = ["full" if i and i % 4 == 0 else "linear" for i in range(config["num_hidden_layers"])]
    else:  # counted from 1
        full = listed_layer_numbers(config, "linear_attn_config.full_attn_layers")
        names = ["full" if i + 1 in full else "linear" for i in range(config["num_hidden_layers"])]
    if config["mlp_layer_types"] is None:
        first = config["first_k_dense_replace"]
        ffns = [MLP if i < first else MOE for i in range(len(names))]
    else:
        ffns = [{"kind": name} for name in listed_layer_kinds(config, "mlp_layer_types", DENSE_OR_EXPERTS)]
    mixers = {"linear": delta, "full": ATTENTION}
    each = [
        layer_kind_fields(f"{name}-{ffn['kind']}", [mixers[name]], [ffn]) for name, ffn in zip(names, ffns, strict=True)
    ]
    fields = moe_fields(
        config, score="sigmoid", correction_bias=True,
        shared_hidden=config["num_shared_experts"] * config["moe_intermediate_size"],
        num_groups=config["num_expert_group"], groups_per_token=config["topk_group"],
    )  # fmt: skip
    raw = {
        "attention": latent_attention_fields(config),
        "mlp": gated_mlp_fields(config),
        "moe": fields,
        "tied_embeddings": False,
    }
    return {**raw, **layers_field(each)}


def _minimax(config: Config) -> dict[str, Any]:
    if config["layer_types"] is not None:
        names = listed_layer_kinds(config, "layer_types", LINEAR_OR_FULL)
    else:
        names = ["linear" if (i + 1) % 2 == 0 else "full" for i in range(config["num_hidden_layers"])]
    return _lightning(config, names)


def _minimax_m1(config: Config) -> dict[str, Any]:
    refuse_other_value(config, "shared_intermediate_size", 0, "shared expert of MiniMax's")
    return _lightning(config, listed_layer_kinds(config, "attn_type_list", {0: "linear", 1: "full"}))


def _lightning(config: Config, names: list[str]) -> dict[str, Any]:
    attention = gqa_fields(config)
    lightning = {"kind": "lightning", "num_heads": attention["num_heads"], "head_dim": attention["head_dim"]}
    mixers = {"linear": lightning, "full": ATTENTION}
    each = [layer_kind_fields(name, [mixers[name]], [MOE]) for name in names]
    fields = moe_fields(config, num_experts="num_local_experts", width="intermediate_size")
    return {
        "attention": attention,
        "mlp": {"activation": activation_name(config, gated=True)},
        "moe": fields,
        **layers_field(each),
    }


def _qwen_keys(interval: int = 4) -> dict[str, ConfigKey]:
    return {
        **rotary_share_key(0.25), "attention_bias": flag_key(False), "head_dim": size_key(256),
        "layer_types": list_key(),
        "full_attention_interval": size_key(interval), **delta_net_keys(16, 32, 128, 128),
        "mtp_num_hidden_layers": count_key(0, "mtp_num_hidden_layers", "num_nextn_predict_layers"),
    }  # fmt: skip


_MINIMAX = {"num_key_value_heads": kv_heads_key(8), "head_dim": HEAD_DIM, "num_local_experts": size_key(8),
            "num_experts_per_tok": size_key(2)}  # fmt: skip

ARCHITECTURES = (
    ConfigFamily(
        "Qwen3NextConfig", ("Qwen3NextForCausalLM",), ("qwen3_next",),
        {**common_keys(2048, 48, 16, 5632, 151936), "num_key_value_heads": kv_heads_key(2), **_qwen_keys(),
         "decoder_sparse_step": size_key(1), "moe_intermediate_size": size_key(512),
         "shared_expert_intermediate_size": size_key(512), "num_experts_per_tok": size_key(10),
         "num_experts": count_key(512),
         "mlp_only_layers": list_key()}, _qwen3_next,
    ),
    ConfigFamily(
        "Qwen3_5MoeTextConfig", ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        ("qwen3_5_moe_text", "qwen3_5_moe"),
        {**common_keys(2048, 40, 16, None, 248320), "num_key_value_heads": kv_heads_key(2), **_qwen_keys(),
         "moe_intermediate_size": size_key(512), "shared_expert_intermediate_size": size_key(512),
         "num_experts_per_tok": size_key(8), "num_experts": size_key(256)}, _qwen3_5_moe,
    ),
    ConfigFamily(
        "Qwen3_5TextConfig", ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), ("qwen3_5_text", "qwen3_5"),
        {**common_keys(4096, 32, 16, 12288, 248320), "num_key_value_heads": kv_heads_key(4), **_qwen_keys()}, _qwen3_5,
    ),
    ConfigFamily(
        "OlmoHybridConfig", ("OlmoHybridForCausalLM",), ("olmo_hybrid",),
        {**common_keys(3840, 32, 30, 11008, 100352), "num_key_value_heads": KV_HEADS, "attention_bias": flag_key(False),
         "layer_types": list_key(), "rope_parameters": object_key(), **delta_net_keys(
             _HEADS, _HEADS, size_key(None, rule=_three_quarters_of_hidden), size_key(None, rule=_twice_key_head),
         )}, _olmo_hybrid,
    ),
    ConfigFamily(
        "KimiLinearConfig", ("KimiLinearForCausalLM",), ("kimi_linear",),
        {**common_keys(2304, 27, 32, 9216, 163840), **latent_attention_keys(None, 512, 128, 64, 128),
         "first_k_dense_replace": count_key(1), "num_experts": size_key(256, "num_experts", "num_local_experts"),
         "num_experts_per_tok": size_key(8, "num_experts_per_token", "num_experts_per_tok"),
         "num_shared_experts": count_key(1, "num_shared_experts", "n_shared_experts"),
         "moe_intermediate_size": size_key(1024),
         "num_expert_group": size_key(1, "num_expert_group", "n_group"), "topk_group": size_key(1),
         "layer_types": list_key(),
         "mlp_layer_types": list_key(),
         "linear_attn_config.full_attn_layers": list_key("linear_attn_config.full_attn_layers"),
         "linear_attn_config.num_heads": size_key(32, "linear_attn_config.num_heads", "linear_num_heads"),
         "linear_attn_config.head_dim": size_key(128, "linear_attn_config.head_dim", "linear_head_dim"),
         "linear_attn_config.short_conv_kernel_size":
             size_key(4, "linear_attn_config.short_conv_kernel_size", "linear_conv_kernel_dim")}, _kimi_linear,
    ),
    ConfigFamily(
        "MiniMaxConfig", ("MiniMaxForCausalLM",), ("minimax",),
        {**common_keys(4096, 32, 32, 14336, 32000), **_MINIMAX, "layer_types": list_key()}, _minimax,
    ),
    ConfigFamily(
        "MiniMaxM1Config", ("MiniMaxM1ForCausalLM", "MiniMaxText01ForCausalLM"), ("minimax_m1", "minimax_text_01"),
        {**common_keys(4096, 32, 32, 14336, 32000), **_MINIMAX, "attn_type_list": list_key(default=REQUIRED),
         "shared_intermediate_size": count_key(0)}, _minimax_m1, remote="MiniMaxAI/MiniMax-M1-80k",
    ),
)  # fmt: skip
