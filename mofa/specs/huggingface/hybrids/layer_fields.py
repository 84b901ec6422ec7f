"""Layers of several kinds, as the fields of a model: what architectures of such layers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mofa.specs.files import shown_value
from mofa.specs.huggingface.record import Config, ConfigKey, size_key
from mofa.specs.huggingface.shared_keys import moe_fields

ATTENTION, GATED = {"kind": "attention"}, {"kind": "gated"}
"""Mixers that take all their sizes from the model's attention."""
MLP, MOE = {"kind": "mlp"}, {"kind": "moe"}
"""Feed-forwards that take their sizes from the model's."""


def layer_kind_fields(
    name: str, mixers: Sequence[Any] = (), ffns: Sequence[Any] = (), norms: int | None = None
) -> dict[str, Any]:
    """A kind of layer; a norm in front of the mixers and one in front of the feed-forwards unless said."""
    own = bool(mixers) + bool(ffns) if norms is None else norms
    return {"name": name, "mixers": list(mixers), "ffns": list(ffns), "norms": own}


def layers_field(
    each: Sequence[Mapping[str, Any]], *, prediction: Sequence[Mapping[str, Any]] = (), **more: Any
) -> dict[str, Any]:
    """The field of a model whose layers are these, one after the other: kinds once, and the shortest pattern.

    Parameters
    ----------
    each
        The model's layers, made by :func:`layer_kind_fields`.
    prediction
        The layers of a multi-token-prediction entry.
    more
        Other fields of :class:`mofa.specs.layer_kinds.LayersSpec`.

    Examples
    --------
    >>> made = layers_field([layer_kind_fields("a", [ATTENTION]), layer_kind_fields("b", [GATED])] * 3)["layers"]
    >>> made["pattern"], [k["name"] for k in made["kinds"]]
    (['a', 'b'], ['a', 'b'])
    """
    names = [str(layer["name"]) for layer in each]
    period = next(n for n in range(1, len(names) + 1) if len(names) % n == 0 and names == names[:n] * (len(names) // n))
    kinds = {str(layer["name"]): layer for layer in (*each, *prediction)}
    fields = {"kinds": list(kinds.values()), "pattern": names[:period], **more}
    if prediction:
        fields["prediction"] = [layer["name"] for layer in prediction]
    return {"layers": fields}


def listed_layer_kinds(config: Config, key: str, known: Mapping[Any, str], length: int | None = None) -> list[str]:
    """A list of each layer's kind, by mofa's names.

    Raises
    ------
    ValueError
        If it has another length than the layers, or holds what is unknown.
    """
    given, wanted = config[key], config["num_hidden_layers"] if length is None else length
    if given is None:
        raise ValueError(f"{key} is null; list the kind of each layer")
    if len(given) != wanted:
        raise ValueError(f"{key} lists {len(given)} layers, there are {wanted}; correct one")
    unknown = [value for value in given if not isinstance(value, (str, int)) or value not in known]
    if unknown:
        raise ValueError(f"{key} holds {shown_value(unknown[0])!r}; mofa has {', '.join(map(str, known))}")
    return [known[value] for value in given]


def listed_layer_numbers(config: Config, key: str) -> set[int]:
    """Numbers of layers that a key lists, none where it is null.

    Raises
    ------
    ValueError
        If it holds anything else.
    """
    given = config[key] or ()
    if not all(type(number) is int for number in given):
        raise ValueError(f"{key} ({shown_value(given)}) must list numbers of layers; correct it")
    return set(given)


LINEAR_OR_FULL = {"linear_attention": "linear", "full_attention": "full"}
MAMBA_OR_FULL = {**LINEAR_OR_FULL, "mamba": "linear", "attention": "full"}
"""Names of layers in files of before transformers had its own."""
FULL_OR_WINDOWED = {"full_attention": "full", "sliding_attention": "windowed"}
DENSE_OR_EXPERTS = {"dense": "mlp", "sparse": "moe"}
"""What ``mlp_layer_types`` lists, by the kinds of feed-forwards."""


def delta_net_keys(key_heads: Any, value_heads: Any, key_width: Any, value_width: Any) -> dict[str, ConfigKey]:
    """Keys of a gated delta net with a class's defaults, each a number or a key of its own."""
    given = {
        "linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads, "linear_key_head_dim": key_width,
        "linear_value_head_dim": value_width, "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    return {name: value if isinstance(value, ConfigKey) else size_key(value) for name, value in given.items()}


def gated_delta_net_fields(config: Config) -> dict[str, Any]:
    """The mixer of these keys."""
    return {
        "kind": "gated_delta_net", "num_key_heads": config["linear_num_key_heads"],
        "num_value_heads": config["linear_num_value_heads"], "key_head_dim": config["linear_key_head_dim"],
        "value_head_dim": config["linear_value_head_dim"], "conv_kernel": config["linear_conv_kernel_dim"],
    }  # fmt: skip


def sigmoid_grouped_moe_fields(config: Config, shared_hidden: int = 0) -> dict[str, Any]:
    """Experts that sigmoids and a correction bias choose, in groups, by DeepSeek's keys."""
    return moe_fields(
        config, num_experts="n_routed_experts", score="sigmoid", correction_bias=True, num_groups=config["n_group"],
        groups_per_token=config["topk_group"], shared_hidden=shared_hidden,
    )  # fmt: skip
