"""Windows in no regular pattern, gated outputs, and norms of some layers alone: GPT-Neo, CWM, Granite with windows,
Flint, Lara Mini, AFMoE (Trinity) and A.X K1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mofa.specs.files import shown_value
from mofa.specs.huggingface.deepseek import latent_attention_keys
from mofa.specs.huggingface.granite import GRANITE, GRANITE_MOE, granite_fields, granite_moe_fields
from mofa.specs.huggingface.hybrids.layer_fields import (
    ATTENTION,
    DENSE_OR_EXPERTS,
    FULL_OR_WINDOWED,
    GATED,
    MLP,
    MOE,
    delta_net_keys,
    gated_delta_net_fields,
    layer_kind_fields,
    layers_field,
    listed_layer_kinds,
    listed_layer_numbers,
    sigmoid_grouped_moe_fields,
)
from mofa.specs.huggingface.record import Config, ConfigFamily, count_key, flag_key, list_key, size_key, text_key
from mofa.specs.huggingface.shared_keys import (
    KV_HEADS,
    activation_field_without_mlp,
    common_keys,
    dense_and_moe_fields,
    four_times_hidden,
    gated_mlp_fields,
    gqa_fields,
    head_dim_key,
    kv_heads_key,
    latent_attention_fields,
    listed_window_fields,
    moe_fields,
    refuse_other_value,
    ungated_mlp_fields,
    unrotated_full_attention_field,
)
from mofa.specs.model import MAX_LAYERS


def _first_of_four(config: Config) -> list[str]:
    """Each layer by its list, else the first of every four is full."""
    if config["layer_types"] is None:
        return ["windowed" if i % 4 else "full" for i in range(config["num_hidden_layers"])]
    return listed_layer_kinds(config, "layer_types", FULL_OR_WINDOWED)


def _mixers(config: Config, names: Sequence[str], attention: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The attention of each layer: the model's, or one of its own shape, which is rotated, where it has a window."""
    if "windowed" in names and not config["sliding_window"]:
        raise ValueError("sliding_window is null or 0, but layer_types has sliding_attention; give its length")
    windowed = _windowed(attention, config["sliding_window"])
    return [{"full": ATTENTION, "windowed": windowed}[name] for name in names]


def _windowed(attention: Mapping[str, Any], length: int) -> dict[str, Any]:
    return _other({**attention, "nope_every": 0, "window": length})


def _other(shape: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "other_attention", "shape": shape}


def _every_nth(flags: Sequence[bool]) -> int | None:
    """Of which period the last layer is flagged: 0 where none is, 1 where all are, None where there is no period.

    Examples
    --------
    >>> [_every_nth(flags) for flags in ([False, True] * 2, [True, False] * 2, [False], [True])]
    [2, None, 0, 1]
    """
    if True not in flags:
        return 0
    every = list(flags).index(True) + 1
    return every if all(flag == ((i + 1) % every == 0) for i, flag in enumerate(flags)) else None


def _regular_attention(config: Config, names: Sequence[str], unrotated: Sequence[bool]) -> dict[str, Any] | None:
    """Fields of attention where full layers and layers without a rotation are every n-th; None where they are not."""
    full, nope = _every_nth([name == "full" for name in names]), _every_nth(unrotated)
    if full is None or nope is None:
        return None
    if full == 1:
        return {"nope_every": nope}
    period = {"window_every": full} if full else {}
    return {"nope_every": nope, "window": config["sliding_window"], **period}


def _regular_experts(sparse: Sequence[bool]) -> dict[str, Any] | None:
    """Fields of experts where these are in every n-th layer behind the first ones; None where they are not."""
    if True not in sparse:
        return None
    places = [i for i, has_experts in enumerate(sparse) if has_experts]
    every = places[1] - places[0] if len(places) > 1 else len(sparse) - places[0]
    first = places[0] - every + 1
    if first < 0 or any(flag != (i >= first and (i - first + 1) % every == 0) for i, flag in enumerate(sparse)):
        return None
    return {"first_k_dense": first, "every": every}


def _cwm(config: Config) -> dict[str, Any]:
    attention, names = gqa_fields(config), _first_of_four(config)
    mixers = _mixers(config, names, attention)
    regular = _regular_attention(config, names, [False] * len(names))
    if regular is not None:
        return {"attention": {**attention, **regular}, "mlp": gated_mlp_fields(config, bias=config["mlp_bias"])}
    each = [layer_kind_fields(name, [mixer], [MLP]) for name, mixer in zip(names, mixers, strict=True)]
    return {"attention": attention, "mlp": gated_mlp_fields(config, bias=config["mlp_bias"]), **layers_field(each)}


def _gpt_neo(config: Config) -> dict[str, Any]:
    """Global and local layers by turns, listed as periods with the number of their repeats."""
    names = [name for period in config["attention_types"] or [[["global", "local"], 12]] for name in _repeated(period)]
    config = {**config, "attention_types": names}
    listed_names = listed_layer_kinds(config, "attention_types", {"global": "full", "local": "windowed"})
    attention = gqa_fields(config, out_bias=True)
    mixers = {"full": ATTENTION, "windowed": _windowed(attention, config["window_size"])}
    each = [layer_kind_fields(name, [mixers[name]], [MLP]) for name in listed_names]
    raw = {
        "attention": attention,
        "mlp": ungated_mlp_fields(config, bias=True),
        "norm": "layernorm",
        **layers_field(each),
    }
    return {**raw, "positions": "learned", "max_positions": config["max_position_embeddings"]}


def _repeated(period: Any) -> list[Any]:
    match period:
        case [list(names), int(times)] if 0 <= times <= MAX_LAYERS and len(names) <= MAX_LAYERS:
            return names * min(times, MAX_LAYERS // max(len(names), 1) + 1)
    raise ValueError(f"attention_types holds {shown_value(period)}; list periods as [[names of layers], repeats]")


def _granite_windows(config: Config, raw: dict[str, Any], ffn: dict[str, str]) -> dict[str, Any]:
    """Sinks in all layers, a window in most, and a rotation where the layer's base is not 0."""
    attention, names = {**raw["attention"], "sinks": True}, _first_of_four(config)
    bases = [1.0] * len(names) if config["layer_rope_theta"] is None else config["layer_rope_theta"]
    if len(bases) != len(names) or not all(type(base) in (int, float) and base >= 0 for base in bases):
        raise ValueError(
            f"layer_rope_theta ({shown_value(bases)}) must list {len(names)} bases of at least 0; correct it"
        )
    mixers = _mixers(config, names, attention)
    regular = _regular_attention(config, names, [not base for base in bases])
    if regular is not None:
        return {**raw, "attention": {**attention, **regular}}
    each = []
    for name, mixer, base in zip(names, mixers, bases, strict=True):
        if base:
            each.append(layer_kind_fields(name, [mixer], [ffn]))
        else:
            shape = {**mixer.get("shape", attention), "nope_every": 1}
            each.append(layer_kind_fields(f"{name}-unrotated", [_other(shape)], [ffn]))
    return {**raw, "attention": attention, **layers_field(each)}


def _granite_swa(config: Config) -> dict[str, Any]:
    return _granite_windows(config, granite_fields(config), MLP)


def _granite_moe_swa(config: Config) -> dict[str, Any]:
    return _granite_windows(config, granite_moe_fields(config), MOE)


def _flint(config: Config) -> dict[str, Any]:
    """Full layers, which alone have no rotation, are the first two, every fourth and the last unless listed."""
    total, step, bias = config["num_hidden_layers"], config["decoder_sparse_step"], config["attention_bias"]
    if config["layer_types"] is None:
        names = ["full" if i < 2 or i % 4 == 1 or i == total - 1 else "windowed" for i in range(total)]
    else:
        names = listed_layer_kinds(config, "layer_types", FULL_OR_WINDOWED)
    dense = {0, 1} if config["mlp_only_layers"] is None else listed_layer_numbers(config, "mlp_only_layers")
    sparse = [(i + 1) % step == 0 and i not in dense for i in range(total)]
    attention = gqa_fields(config, qkv_bias=bias, out_bias=bias, qk_norm=True, sinks=True, nope_every=1)
    fields = moe_fields(config, score="sigmoid", shared_hidden=config["shared_expert_intermediate_size"])
    mixers = _mixers(config, names, attention)
    regular, places = _regular_attention(config, names, [name == "full" for name in names]), _regular_experts(sparse)
    if regular is not None and places is not None:
        return {"attention": {**attention, **regular}, **dense_and_moe_fields(config, {**fields, **places})}
    each = []
    for name, mixer, has_experts in zip(names, mixers, sparse, strict=True):
        ffn = MOE if has_experts else MLP
        each.append(layer_kind_fields(f"{name}-{ffn['kind']}", [mixer], [ffn]))
    return {"attention": attention, "mlp": gated_mlp_fields(config), "moe": fields, **layers_field(each)}


def _lara_mini(config: Config) -> dict[str, Any]:
    """Gated delta nets, windowed layers and full ones, which have no rotation, by turns."""
    if config["layer_types"] is None:
        period = ("linear", "windowed", "linear", "full", "windowed")
        names = [period[i % len(period)] for i in range(config["num_hidden_layers"])]
    else:
        names = listed_layer_kinds(config, "layer_types", {**FULL_OR_WINDOWED, "linear_attention": "linear"})
    bias = config["attention_bias"]
    attention = gqa_fields(config, qkv_bias=bias, out_bias=bias, qk_norm=True, nope_every=1)
    softmax = sorted(set(names) - {"linear"})
    mixers = dict(zip(softmax, _mixers(config, softmax, attention), strict=True), linear=gated_delta_net_fields(config))
    fields = moe_fields(config, shared_hidden=config["shared_expert_intermediate_size"])
    each = [layer_kind_fields(name, [mixers[name]], [MOE]) for name in names]
    return {"attention": attention, "mlp": activation_field_without_mlp(config), "moe": fields, **layers_field(each)}


def _afmoe(config: Config) -> dict[str, Any]:
    """Outputs of attention are gated, and norms are on either side of both parts."""
    refuse_other_value(config, "attention_bias", False, "biases of gated attention beside a gate without one")
    total, every = config["num_hidden_layers"], config["global_attn_every_n_layers"]
    names = ("sliding_attention", "full_attention")
    window = listed_window_fields(config, config["layer_types"] or [names[(i + 1) % every == 0] for i in range(total)])
    attention = gqa_fields(config, qk_norm=True, **window, **unrotated_full_attention_field(window))
    kinds = [layer_kind_fields(ffn["kind"], [GATED], [ffn], norms=4) for ffn in (MLP, MOE)]
    each = [kinds[i >= config["num_dense_layers"]] for i in range(total)]
    shared = config["num_shared_experts"] * config["moe_intermediate_size"]
    fields = moe_fields(config, score="sigmoid", correction_bias=True, shared_hidden=shared)
    scaled = {"multipliers": ("embedding",)} if config["mup_enabled"] else {}
    return {"attention": attention, "mlp": gated_mlp_fields(config), "moe": fields, "norm_placement": "both", **scaled,
            **layers_field(each)}  # fmt: skip


def _axk1(config: Config) -> dict[str, Any]:
    """DeepSeek-V3's layers with a norm behind the experts, and none behind dense feed-forwards."""
    if config["mlp_layer_types"] is None:
        first, every = config["first_k_dense_replace"], config["moe_layer_freq"]
        ffns = ["moe" if i >= first and i % every == 0 else "mlp" for i in range(config["num_hidden_layers"])]
    else:
        ffns = listed_layer_kinds(config, "mlp_layer_types", DENSE_OR_EXPERTS)
    named = {ffn["kind"]: layer_kind_fields(ffn["kind"], [ATTENTION], [ffn], norms=norms)
             for ffn, norms in ((MLP, 2), (MOE, 3))}  # fmt: skip
    fields = sigmoid_grouped_moe_fields(config, config["n_shared_experts"] * config["moe_intermediate_size"])
    return {
        "attention": latent_attention_fields(config),
        "mlp": gated_mlp_fields(config),
        "moe": fields,
        **layers_field([named[ffn] for ffn in ffns]),
    }


_LISTED = {"layer_types": list_key()}
_GRANITE_SWA = {"sliding_window": count_key(128, nullable=True), **_LISTED, "layer_rope_theta": list_key()}

ARCHITECTURES = (
    ConfigFamily(
        "GPTNeoConfig", ("GPTNeoForCausalLM",), ("gpt_neo",),
        {**common_keys(2048, 24, 16, None, 50257, tied=True),
         "intermediate_size": size_key(None, rule=four_times_hidden),
         "num_hidden_layers": size_key(24, "num_layers", "num_hidden_layers"),
         "num_attention_heads": size_key(16, "num_heads", "num_attention_heads"),
         "hidden_act": text_key("gelu_new", "activation_function"), "max_position_embeddings": size_key(2048),
         "window_size": size_key(256), "attention_types": list_key()}, _gpt_neo,
    ),
    ConfigFamily(
        "CwmConfig", ("CwmForCausalLM",), ("cwm",),
        {**common_keys(6144, 64, 48, 21504, 128256), "num_key_value_heads": kv_heads_key(8),
         "head_dim": head_dim_key(128),
         "mlp_bias": flag_key(False), "sliding_window": count_key(8192, nullable=True), **_LISTED}, _cwm,
    ),
    ConfigFamily(
        "GraniteSWAConfig", ("GraniteSWAForCausalLM",), ("granite_swa",),
        {**GRANITE, **common_keys(2560, 24, 20, 8192, 100352, tied=True), "num_key_value_heads": kv_heads_key(4),
         "mlp_bias": flag_key(False), **_GRANITE_SWA}, _granite_swa,
    ),
    ConfigFamily(
        "GraniteMoeSWAConfig", ("GraniteMoeSWAForCausalLM",), ("granitemoe_swa",),
        {**GRANITE_MOE, "shared_intermediate_size": count_key(0), **_GRANITE_SWA}, _granite_moe_swa,
    ),
    ConfigFamily(
        "FlintConfig", ("FlintForCausalLM",), ("flint",),
        {**common_keys(2048, 49, 32, 6144, 150144), "num_key_value_heads": size_key(4), "head_dim": size_key(128),
         "attention_bias": flag_key(False), "sliding_window": count_key(513), **_LISTED,
         "decoder_sparse_step": size_key(1),
         "mlp_only_layers": list_key(), "num_experts": size_key(256), "num_experts_per_tok": size_key(6),
         "moe_intermediate_size": size_key(512), "shared_expert_intermediate_size": size_key(1024)}, _flint,
    ),
    ConfigFamily(
        "LaraMiniConfig", ("LaraMiniForCausalLM",), ("lara_mini",),
        {**common_keys(1024, 34, 16, None, 151936, tied=True), "num_key_value_heads": size_key(4),
         "head_dim": size_key(128),
         "attention_bias": flag_key(False), "sliding_window": count_key(512), **_LISTED,
         **delta_net_keys(8, 16, 128, 128), "num_experts": size_key(128), "num_experts_per_tok": size_key(4),
         "moe_intermediate_size": size_key(512), "shared_expert_intermediate_size": size_key(512)}, _lara_mini,
    ),
    ConfigFamily(
        "AfmoeConfig", ("AfmoeForCausalLM",), ("afmoe",),
        {**common_keys(2048, 32, 16, 6144, 200192), "num_key_value_heads": KV_HEADS, "head_dim": size_key(128),
         "attention_bias": flag_key(False), "sliding_window": count_key(1024, nullable=True), **_LISTED,
         "global_attn_every_n_layers": size_key(4), "num_dense_layers": count_key(1), "num_experts": size_key(64),
         "num_experts_per_tok": size_key(6), "num_shared_experts": count_key(2),
         "moe_intermediate_size": size_key(1408),
         "mup_enabled": flag_key(False)}, _afmoe,
    ),
    ConfigFamily(
        "AXK1Config", ("AXK1ForCausalLM",), ("axk1",),
        {**common_keys(7168, 61, 64, 18432, 163840), **latent_attention_keys(1536, 512, 128, 64, 128),
         "q_lora_rank": size_key(1536),
         "mlp_layer_types": list_key(), "first_k_dense_replace": count_key(1), "moe_layer_freq": size_key(1),
         "n_routed_experts": size_key(192, "n_routed_experts", "num_local_experts"), "n_shared_experts": count_key(1),
         "num_experts_per_tok": size_key(8), "moe_intermediate_size": size_key(2048), "n_group": size_key(8),
         "topk_group": size_key(4)}, _axk1,
    ),
)  # fmt: skip
