"""Hugging Face ``config.json`` into a model, by the record of its architecture: no default is ours."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from mofa.errors import SpecError
from mofa.specs.files import shown_value
from mofa.specs.from_mapping import spec_from_mapping
from mofa.specs.huggingface.left_out import left_out_notes
from mofa.specs.huggingface.misnamed import refuse_misnamed_sizes
from mofa.specs.huggingface.nearest import unknown_class_message
from mofa.specs.huggingface.record import REQUIRED, ConfigFamily, ConfigKey
from mofa.specs.huggingface.registry import ARCHITECTURES
from mofa.specs.model import MAX_LAYERS, ModelSpec

_ABSENT = object()
_NESTED = ("text_config", "llm_config", "language_config")
"""Where files of images or sound hold their language model."""


class ReadConfig(NamedTuple):
    """What a ``config.json`` says."""

    model: ModelSpec
    notes: tuple[str, ...]
    """Which absent keys took a default, and what of the file the model lacks, in words."""


def model_from_config(config: Mapping[str, Any], where: str, name: str | None = None) -> ModelSpec:
    """Model that a Hugging Face ``config.json`` describes; :func:`read_config` says what it assumed besides.

    Parameters
    ----------
    config
        The file's object; where it nests the language model (``text_config`` and the like), that is read.
    where
        The file, which begins error messages.
    name
        The model's name; ``model_type`` by default.

    Raises
    ------
    SpecError
        If the architecture is unknown, a key without a default is missing, one is of the wrong type, or the model uses
        what mofa lacks.
    """
    return read_config(config, where, name).model


def read_config(config: Mapping[str, Any], where: str, name: str | None = None) -> ReadConfig:
    """Model that a Hugging Face ``config.json`` describes, with the defaults taken and what is left out.

    Parameters
    ----------
    config, where, name
        As of :func:`model_from_config`.

    Raises
    ------
    SpecError
        As by :func:`model_from_config`.

    References
    ----------
    Hugging Face transformers 5.24, ``src/transformers/models/*/configuration_*.py``; files published with the weights
    for classes that it has not.
    """
    inner, prefix = language_model_keys(config, where)
    architecture = _architecture(inner, config, where, prefix)
    reading = _Reading(inner, f"{where}: {prefix}", architecture)
    try:
        values = reading.values()
        layers = values["num_hidden_layers"]
        if layers is not None and layers > MAX_LAYERS:
            raise ValueError(f"num_hidden_layers ({layers}) must be at most {MAX_LAYERS}; correct it")
        raw = architecture.convert(values)
        notes = architecture.left_out(values)
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
    model = spec_from_mapping(ModelSpec, {**common, **raw}, where)
    return ReadConfig(model, (*reading.default_notes(), *left_out_notes(config, inner), *notes))


class _Reading:
    """One file's keys, checked, and which of them took a default."""

    def __init__(self, config: Mapping[str, Any], where: str, architecture: ConfigFamily) -> None:
        self.config, self.where, self.architecture = config, where, architecture
        self.absent: dict[str, str] = {}
        """Table's names of absent keys by the names that messages use."""
        self.taken: dict[str, Any] = {}

    def values(self) -> dict[str, Any]:
        """All keys of the table, with the class's defaults where the file has none."""
        keys = self.architecture.keys
        refuse_misnamed_sizes(self.config, self.architecture, self.where)
        values = {key: self._given(key, rule) for key, rule in keys.items()}
        for key, rule in keys.items():
            if values[key] is None and rule.rule is not None:
                values[key] = rule.rule(values)
        self.taken = {shown: values[key] for key, shown in self.absent.items()}
        return values

    def _given(self, key: str, rule: ConfigKey) -> Any:
        names = rule.names or (key,)
        seen = [(name, value) for name in names if (value := self._value_of(name)) is not _ABSENT]
        if len({json.dumps(value, sort_keys=True) for _, value in seen}) > 1:
            says = " and ".join(f"{name} {_shown(value)}" for name, value in seen)
            raise SpecError(f"{self.where}{says} are one key of this class; keep one")
        if seen:
            return _checked(seen[0][1], seen[0][0], rule, self.where)
        if rule.default is REQUIRED:
            raise SpecError(
                f"{self.where}{names[0]} is missing, and {self.architecture.owner_of_defaults} has no default; add it"
            )
        self.absent[key] = names[0]
        return rule.default

    def _value_of(self, name: str) -> Any:
        """Value of a dotted name, or ``_ABSENT``."""
        outer, _, last = name.rpartition(".")
        place: Any = self.config
        if outer:
            place = self.config.get(outer)
            if place is None:
                return _ABSENT
            if not isinstance(place, dict):
                raise SpecError(f"{self.where}{outer} ({_shown(place)}) must be an object; correct it")
        return place.get(last, _ABSENT)

    def default_notes(self) -> tuple[str, ...]:
        """A line of the keys that the file lacks; those that stand for nothing where null are left out of it."""
        said = ", ".join(f"{name} {_said(value)}" for name, value in self.taken.items() if value is not None)
        return (f"absent keys as {self.architecture.owner_of_defaults} has them: {said}",) if said else ()


def _said(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def language_model_keys(config: Mapping[str, Any], where: str) -> tuple[dict[str, Any], str]:
    """The keys of a file's language model, and where in the file they are."""
    place = next((name for name in _NESTED if config.get(name) not in (None, {})), None)
    if place is None:
        return dict(config), ""
    nested = config[place]
    if not isinstance(nested, dict):
        raise SpecError(f"{where}: {place} ({_shown(nested)}) must be an object; correct it")
    deeper = next((name for name in _NESTED if nested.get(name) is not None), None)
    if deeper is not None:
        raise SpecError(f"{where}: {place} holds another {deeper}; keep the one that is the language model's")
    inner = dict(nested)
    tied = [part["tie_word_embeddings"] for part in (config, inner) if "tie_word_embeddings" in part]
    if len(tied) > 1 and tied[0] != tied[1]:
        said = f"tie_word_embeddings ({_shown(tied[0])}) and {place}.tie_word_embeddings ({_shown(tied[1])})"
        raise SpecError(f"{where}: {said} differ; keep one")
    if tied:
        inner["tie_word_embeddings"] = tied[0]
    return inner, f"{place}."


def _architecture(config: Mapping[str, Any], outer: Mapping[str, Any], where: str, prefix: str) -> ConfigFamily:
    """By the class that the file names, else by its model type; a nested one that names neither is its outer one's."""
    for part, place in ((config, prefix), (outer, "")):
        names, model_type = part.get("architectures"), part.get("model_type")
        if names is not None and not (isinstance(names, list) and all(isinstance(n, str) for n in names)):
            raise SpecError(f"{where}: {place}architectures ({_shown(names)}) must be a list of names; correct it")
        by_type = [a for a in ARCHITECTURES if model_type in a.model_types]
        if by_type and names and names[0] == by_type[0].built_as:
            return by_type[0]
        for architecture in ARCHITECTURES:
            if names and names[0] in architecture.classes:
                _refuse_two_classes(architecture, by_type, f"{where}: {place}architectures ({names[0]})")
                return architecture
        if by_type and not names:
            return by_type[0]
        if names or isinstance(model_type, str):
            named = ("architectures", names[0]) if names else ("model_type", str(model_type))
            raise SpecError(f"{where}: {place}{unknown_class_message(named, config, ARCHITECTURES, where)}")
    raise SpecError(f"{where}: {prefix}architectures and model_type are missing; is it a language model's config.json?")


def _refuse_two_classes(by_class: ConfigFamily, by_type: list[ConfigFamily], said: str) -> None:
    """Refuse a class and a model type of two classes of transformers, which goes by the type.

    Classes whose code is published may name another's type, as Ling-mini-2.0 does.
    """
    if by_type and by_class not in by_type and not by_class.remote and not by_type[0].remote:
        raise SpecError(f"{said} and model_type ({by_type[0].model_types[0]}) are of two classes; keep the model's own")


def _checked(value: Any, key: str, rule: ConfigKey, where: str) -> Any:
    if value is None and rule.nullable:
        return None
    integer = isinstance(value, int) and not isinstance(value, bool)
    good, wanted = {
        "positive": (integer and value > 0, "a positive whole number"),
        "count": (integer and value >= 0, "a whole number, 0 or more"),
        "number": (integer or (isinstance(value, float) and math.isfinite(value)), "a number"),
        "text": (isinstance(value, str), "text"),
        "truth": (isinstance(value, bool), "true or false"),
        "list": (isinstance(value, list), "a list"),
        "object": (isinstance(value, dict), "an object"),
        "count or text": ((integer and value >= 0) or isinstance(value, str), "a whole number, 0 or more, or text"),
        "positive or list": (
            (integer and value > 0)
            or (isinstance(value, list) and value and all(type(n) is int and n > 0 for n in value)),
            "a positive whole number, or a list of them",
        ),
        "positive or auto": ((integer and value > 0) or value == "auto", "a positive whole number, or auto"),
    }[rule.type]
    if not good:
        raise SpecError(f"{where}{key} ({_shown(value)}) must be {wanted}; correct it")
    return value


def _shown(value: Any) -> str:
    """A value in an error: text in quotes, so that ``"4096"`` is seen to be no number."""
    return shown_value(json.dumps(value, ensure_ascii=False) if isinstance(value, str) else value)
