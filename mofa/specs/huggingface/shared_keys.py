"""Keys that many architectures share, and the parts of a model that they become."""

from __future__ import annotations

from typing import Any

from mofa.specs.attention.gqa import GQA
from mofa.specs.attention.mla import MLA
from mofa.specs.files import shown_value
from mofa.specs.huggingface.record import (
    REQUIRED,
    Config,
    ConfigKey,
    count_key,
    flag_key,
    list_key,
    number_key,
    size_key,
    text_key,
)


def hidden_over_heads(config: Config) -> int:
    """``hidden_size // num_attention_heads``, the classes' own rule."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if hidden % heads:
        raise ValueError(f"hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads}); correct one")
    return int(hidden // heads)


def kv_heads_as_query_heads(config: Config) -> int:
    """One head of keys and values for each of queries."""
    return int(config["num_attention_heads"])


def four_times_hidden(config: Config) -> int:
    """``4 * hidden_size``."""
    return 4 * int(config["hidden_size"])


HEAD_DIM = size_key(None, rule=hidden_over_heads)
KV_HEADS = size_key(None, rule=kv_heads_as_query_heads)


def head_dim_key(default: int) -> ConfigKey:
    """Width of a head where an absent key is a number, and null the hidden width over the heads."""
    return size_key(default, rule=hidden_over_heads)


def kv_heads_key(default: int) -> ConfigKey:
    """Heads of keys and values where an absent key is a number, and null as many as of queries."""
    return size_key(default, rule=kv_heads_as_query_heads)


def common_keys(
    hidden: Any, layers: Any, heads: Any, ffn: Any, vocab: Any, act: Any = "silu", tied: bool = False
) -> dict[str, ConfigKey]:
    """The keys that all have, with a class's defaults. The feed-forward's width is left out where None."""
    keys = {
        "hidden_size": size_key(hidden),
        "num_hidden_layers": size_key(layers),
        "num_attention_heads": size_key(heads),
        "intermediate_size": size_key(ffn),
        "vocab_size": size_key(vocab),
        "hidden_act": text_key(act),
        "tie_word_embeddings": flag_key(tied),
    }
    if ffn is None:
        del keys["intermediate_size"]
    return keys


def gpt2_common_keys(hidden: int, layers: int, heads: int, vocab: int, act: str, tied: bool) -> dict[str, ConfigKey]:
    """The keys that all have, by the names of GPT-2's files."""
    return {
        "hidden_size": size_key(hidden, "n_embd", "hidden_size"),
        "num_hidden_layers": size_key(layers, "n_layer", "num_hidden_layers"),
        "num_attention_heads": size_key(heads, "n_head", "num_attention_heads"),
        "intermediate_size": size_key(None, "n_inner", rule=four_times_hidden),
        "vocab_size": size_key(vocab),
        "hidden_act": text_key(act, "activation_function"),
        "tie_word_embeddings": flag_key(tied),
    }


REQUIRED_SIZES = common_keys(REQUIRED, REQUIRED, REQUIRED, REQUIRED, REQUIRED)
WINDOW: dict[str, ConfigKey] = {"sliding_window": count_key(None), "layer_types": list_key()}
NO_WINDOW = 0
"""A window of no length is none: Qwen2-MoE's class sets it where the switch is off."""


def rotary_share_key(default: float) -> dict[str, ConfigKey]:
    """The rotated share of a head, which transformers 5 writes among the parameters of rotation."""
    return {
        "partial_rotary_factor": number_key(default, "partial_rotary_factor", "rope_parameters.partial_rotary_factor")
    }


def rotary_dim_field(config: Config) -> dict[str, Any]:
    """Rotated elements of a head, by their share; nothing where they are all."""
    share = config["partial_rotary_factor"]
    if not 0 < share <= 1:
        raise ValueError(f"partial_rotary_factor ({shown_value(share)}) must be above 0 and at most 1; correct it")
    turned = int(config["head_dim"] * share)
    return {} if turned == config["head_dim"] else {"rotary_dim": turned}


def gqa_fields(config: Config, *, qkv_bias: bool = False, out_bias: bool = False, **more: Any) -> dict[str, Any]:
    """Grouped-query attention; multi-head attention where the architecture has no key of its own for its heads."""
    return {
        "kind": GQA.name,
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config.get("num_key_value_heads", config["num_attention_heads"]),
        "head_dim": config["head_dim"] if "head_dim" in config else hidden_over_heads(config),
        "qkv_bias": qkv_bias,
        "out_bias": out_bias,
        **more,
    }


def latent_attention_fields(config: Config) -> dict[str, Any]:
    """Multi-head latent attention."""
    refuse_other_value(config, "attention_bias", False, "biases in latent attention")
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {"kind": MLA.name, "num_heads": config["num_attention_heads"], **{name: config[name] for name in names}}


_GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu"}
_PLAIN = {"gelu": "gelu", "relu": "relu", "relu2": "relu2"}


def activation_name(config: Config, *, gated: bool) -> str:
    """mofa's name of the activation; the approximations of GELU are one."""
    given = config["hidden_act"]
    name = "gelu" if given.startswith("gelu") else given
    known = _GATED if gated else _PLAIN
    if name not in known:
        shape = "gated" if gated else "plain"
        raise ValueError(f"hidden_act ({shown_value(given)}) is not {_listed(known)}; mofa has no other {shape} layer")
    return known[name]


def _listed(names: Any) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}"


def gated_mlp_fields(config: Config, *, bias: bool = False, width: str = "intermediate_size") -> dict[str, Any]:
    """A gated feed-forward layer."""
    return {"activation": activation_name(config, gated=True), "ffn_hidden": config[width], "bias": bias}


def ungated_mlp_fields(config: Config, *, bias: bool) -> dict[str, Any]:
    """A feed-forward layer of two products."""
    return {"activation": activation_name(config, gated=False), "ffn_hidden": config["intermediate_size"], "bias": bias}


def activation_field_without_mlp(config: Config) -> dict[str, Any]:
    """The activation of a model of whose layers none is dense."""
    return {"activation": activation_name(config, gated=True)}


def moe_fields(
    config: Config, *, num_experts: str = "num_experts", width: str = "moe_intermediate_size", **more: Any
) -> dict[str, Any]:
    """Routed experts."""
    return {
        "num_experts": config[num_experts],
        "top_k": config["num_experts_per_tok"],
        "expert_hidden": config[width],
        **more,
    }


def every_layer_window_field(config: Config) -> dict[str, Any]:
    """The same window in all layers, or none."""
    return {"window": config["sliding_window"]} if config["sliding_window"] else {}


def listed_window_fields(
    config: Config, kinds: list[Any] | None, window: str = "sliding_window", kind: str = "sliding_attention"
) -> dict[str, Any]:
    """Window and its period from a list of each layer's attention; the window of every layer where there is none."""
    length = config[window] or None
    if kinds is None:
        return {} if length is None else {"window": length}
    layers = config["num_hidden_layers"]
    if len(kinds) != layers:
        raise ValueError(f"layer_types lists {len(kinds)} layers, num_hidden_layers is {layers}; correct one")
    unknown = [k for k in kinds if k not in (kind, "full_attention")]
    if unknown:
        raise ValueError(f"layer_types holds {shown_value(unknown[0])!r}; mofa has {kind} and full_attention")
    windowed = [k == kind for k in kinds]
    if not any(windowed):
        return {}
    if length is None:
        raise ValueError(f"{window} is null or 0, but layer_types has {kind}; give its length")
    if all(windowed):
        return {"window": length}
    every = windowed.index(False) + 1
    if every > 1 and windowed == [i % every < every - 1 for i in range(layers)]:
        return {"window": length, "window_every": every}
    raise ValueError("layer_types is no regular pattern of n - 1 sliding layers and a full one; mofa has no other")


def unrotated_full_attention_field(window: dict[str, Any]) -> dict[str, Any]:
    """Layers without rotation where those without a window have none, by the fields of the window."""
    return {"nope_every": window.get("window_every", 0) if window else 1}


def periodic_window_fields(config: Config, every: int) -> dict[str, Any]:
    """A window in all but every n-th layer where the file lists none, by the file's list where it does."""
    if config["layer_types"] is not None:
        return listed_window_fields(config, config["layer_types"])
    if not config["sliding_window"] or every == 1:
        return {}
    return {"window": config["sliding_window"], "window_every": every}


def switched_window_fields(config: Config, switch: str = "use_sliding_window") -> dict[str, Any]:
    """Qwen's window: only with its switch, and from layer ``max_window_layers`` on."""
    if not config.get(switch, True) or not config["sliding_window"]:
        return {}
    if config["layer_types"] is not None:
        return listed_window_fields(config, config["layer_types"])
    if config["max_window_layers"] >= config["num_hidden_layers"]:
        return {}
    if config["max_window_layers"] > 0:
        raise ValueError(
            f"max_window_layers ({config['max_window_layers']}): mofa has no window that begins at a later layer"
        )
    return listed_window_fields(config, None)


def first_dense_layers_field(config: Config, key: str = "first_k_dense_replace") -> dict[str, Any]:
    """Dense layers ahead of those with experts."""
    return {"first_k_dense": config[key]}


def dense_and_moe_fields(config: Config, moe_fields: dict[str, Any]) -> dict[str, Any]:
    """The feed-forward fields of a model with experts: a dense width where it has dense layers."""
    has_dense = moe_fields.get("every", 1) > 1 or bool(moe_fields.get("first_k_dense"))
    return {"mlp": gated_mlp_fields(config) if has_dense else activation_field_without_mlp(config), "moe": moe_fields}


def refuse_other_value(config: Config, key: str, wanted: Any, lacks: str) -> None:
    """Refuse a key that has another value than the one that mofa holds.

    Raises
    ------
    ValueError
        If it has.
    """
    if config[key] != wanted:
        raise ValueError(f"{key} ({shown_value(config[key])}) is not {str(wanted).lower()}; mofa has no {lacks}")
