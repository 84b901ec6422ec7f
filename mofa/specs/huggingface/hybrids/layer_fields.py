"""Layers of several kinds, as the fields of a model: what architectures of such layers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mofa.specs.files import short
from mofa.specs.huggingface.record import Config

ATTENTION, GATED = {"kind": "attention"}, {"kind": "gated"}
"""Mixers that take all their sizes from the model's attention."""
MLP, MOE = {"kind": "mlp"}, {"kind": "moe"}
"""Feed-forwards that take their sizes from the model's."""


def kind(name: str, mixers: Sequence[Any] = (), ffns: Sequence[Any] = (), norms: int | None = None) -> dict[str, Any]:
    """A kind of layer; a norm in front of the mixers and one in front of the feed-forwards unless said."""
    own = bool(mixers) + bool(ffns) if norms is None else norms
    return {"name": name, "mixers": list(mixers), "ffns": list(ffns), "norms": own}


def layers(
    each: Sequence[Mapping[str, Any]], *, prediction: Sequence[Mapping[str, Any]] = (), **more: Any
) -> dict[str, Any]:
    """The field of a model whose layers are these, one after the other: kinds once, and the shortest pattern.

    Parameters
    ----------
    each
        The model's layers, made by :func:`kind`.
    prediction
        The layers of a multi-token-prediction entry.
    more
        Other fields of :class:`mofa.specs.layer_kinds.LayersSpec`.

    Examples
    --------
    >>> made = layers([kind("a", [ATTENTION]), kind("b", [GATED])] * 3)["layers"]
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


def listed(c: Config, key: str, known: Mapping[Any, str], length: int | None = None) -> list[str]:
    """A list of each layer's kind, by mofa's names.

    Raises
    ------
    ValueError
        If it has another length than the layers, or holds what is unknown.
    """
    given, wanted = c[key], c["num_hidden_layers"] if length is None else length
    if given is None:
        raise ValueError(f"{key} is null; list the kind of each layer")
    if len(given) != wanted:
        raise ValueError(f"{key} lists {len(given)} layers, there are {wanted}; correct one")
    unknown = [value for value in given if not isinstance(value, (str, int)) or value not in known]
    if unknown:
        raise ValueError(f"{key} holds {short(unknown[0])!r}; mofa has {', '.join(map(str, known))}")
    return [known[value] for value in given]


def numbers(c: Config, key: str) -> set[int]:
    """Numbers of layers that a key lists, none where it is null.

    Raises
    ------
    ValueError
        If it holds anything else.
    """
    given = c[key] or ()
    if not all(type(number) is int for number in given):
        raise ValueError(f"{key} ({short(given)}) must list numbers of layers; correct it")
    return set(given)


LINEAR_OR_FULL = {"linear_attention": "linear", "full_attention": "full"}
MAMBA_OR_FULL = {**LINEAR_OR_FULL, "mamba": "linear", "attention": "full"}
"""Names of layers in files of before transformers had its own."""
