"""Hugging Face ``config.json`` into a model, through the table :mod:`mofa.specs.architectures`: no default is ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mofa.errors import SpecError
from mofa.specs.architectures import ARCHITECTURES, Architecture, ConfigKey
from mofa.specs.files import short
from mofa.specs.from_mapping import build_spec
from mofa.specs.model import ModelSpec


def model_from_config(config: Mapping[str, Any], where: str, name: str | None = None) -> ModelSpec:
    """Model that a Hugging Face ``config.json`` describes.

    Parameters
    ----------
    config
        The file's object; where it nests the language model in ``text_config``, that is read.
        ``quantization_config`` says how the released weights are stored, not how they are trained, and is not read.
    where
        The file, which begins error messages.
    name
        The model's name; ``model_type`` by default.

    Raises
    ------
    SpecError
        If the architecture is unknown, a key is missing or of the wrong type, or the model uses what mofa lacks.

    References
    ----------
    Hugging Face transformers 4.57, ``src/transformers/models/*/configuration_*.py``.
    """
    inner, prefix = _language_model(config, where)
    architecture = _architecture(inner, where, prefix)
    values: dict[str, Any] = {}
    for key, rule in architecture.keys.items():
        if key not in inner:
            raise SpecError(f"{where}: {prefix}{key} is missing; a {inner.get('model_type')} config needs it, add it")
        values[key] = _checked(inner[key], key, rule, f"{where}: {prefix}")
    try:
        for key, (rule, derive) in architecture.derived.items():
            given = inner.get(key)
            values[key] = derive(values) if given is None else _checked(given, key, rule, f"{where}: {prefix}")
        if values["hidden_act"] != "silu":
            raise ValueError(f"hidden_act ({short(values['hidden_act'])}) is not silu; mofa has no such layer")
        raw = architecture.convert(values, prefix)
    except SpecError:
        raise
    except ValueError as error:
        raise SpecError(f"{where}: {prefix}{error}") from None
    label = (name or str(inner.get("model_type") or "model"))[:200]
    common = {
        "name": label,
        "source": f"Hugging Face config.json of {label}",
        "num_layers": values["num_hidden_layers"],
        "hidden": values["hidden_size"],
        "vocab": values["vocab_size"],
        "tied_embeddings": values["tie_word_embeddings"],
    }
    return build_spec(ModelSpec, {**common, **raw}, where)


def _language_model(config: Mapping[str, Any], where: str) -> tuple[dict[str, Any], str]:
    nested = config.get("text_config")
    if nested is None:
        return dict(config), ""
    if not isinstance(nested, dict):
        raise SpecError(f"{where}: text_config ({short(nested)}) must be an object; correct it")
    inner = dict(nested)
    if "tie_word_embeddings" not in inner and "tie_word_embeddings" in config:
        inner["tie_word_embeddings"] = config["tie_word_embeddings"]
    return inner, "text_config."


def _architecture(config: Mapping[str, Any], where: str, prefix: str) -> Architecture:
    names = config.get("architectures")
    model_type = config.get("model_type")
    if names is not None and not (isinstance(names, list) and all(isinstance(n, str) for n in names)):
        raise SpecError(f"{where}: {prefix}architectures ({short(names)}) must be a list of names; correct it")
    if not names and not isinstance(model_type, str):
        raise SpecError(
            f"{where}: {prefix}architectures and model_type are missing; is it a language model's config.json?"
        )
    for architecture in ARCHITECTURES:
        by_class = names and names[0] in architecture.classes
        if by_class or (not names and model_type in architecture.model_types):
            return architecture
    known = ", ".join(a.classes[0] for a in ARCHITECTURES)
    named = names[0] if names else model_type
    raise SpecError(
        f"{where}: {prefix}architectures ({short(named)}) is no model that mofa reads; use one of {known}, "
        "or write a workload YAML"
    )


def _checked(value: Any, key: str, rule: ConfigKey, where: str) -> Any:
    if value is None and rule.nullable:
        return None
    number = isinstance(value, int) and not isinstance(value, bool)
    good, wanted = {
        "positive": (number and value > 0, "a positive whole number"),
        "count": (number and value >= 0, "a whole number, 0 or more"),
        "text": (isinstance(value, str), "text"),
        "truth": (isinstance(value, bool), "true or false"),
        "list": (isinstance(value, list), "a list"),
        "object": (isinstance(value, dict), "an object"),
    }[rule.type]
    if not good:
        raise SpecError(f"{where}{key} ({short(value)}) must be {wanted}; correct it")
    return value
