"""The record of an architecture: the keys of its ``config.json``, their defaults, and how they become a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

KeyType = Literal[
    "count", "positive", "number", "text", "truth", "list", "object", "positive or list", "count or text",
    "positive or auto",
]  # fmt: skip
Config = Mapping[str, Any]
"""Checked values by the table's names of the keys."""
Rule = Callable[[Config], Any]
"""A value that the configuration class derives from others."""


class _Required:
    """Stands for the default of a key that has none."""

    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED = _Required()


@dataclass(frozen=True)
class ConfigKey:
    """A key of the file: its type, and what the configuration class makes of an absent or null one."""

    type: KeyType
    default: Any = REQUIRED
    """What the class takes for an absent key; None is a null one."""
    nullable: bool = False
    rule: Rule | None = None
    """What the class makes of a null key; null stays null without a rule."""
    names: tuple[str, ...] = ()
    """Names in files, first the one that messages use; the table's name where empty. A dot enters an object."""


def size_key(default: Any = REQUIRED, *names: str, rule: Rule | None = None, nullable: bool = False) -> ConfigKey:
    """A positive whole number; it may be null where its default is, or where null has a rule."""
    return ConfigKey("positive", default, nullable or default is None or rule is not None, rule, names)


def count_key(default: Any = REQUIRED, *names: str, nullable: bool = False) -> ConfigKey:
    """A whole number of at least 0."""
    return ConfigKey("count", default, nullable or default is None, None, names)


def number_key(default: Any, *names: str, nullable: bool = False) -> ConfigKey:
    """Any number; it may be null where its default is."""
    return ConfigKey("number", default, nullable or default is None, None, names)


def flag_key(default: Any, *names: str) -> ConfigKey:
    """True or false."""
    return ConfigKey("truth", default, default is None, None, names)


def text_key(default: Any, *names: str, nullable: bool = False) -> ConfigKey:
    """Text."""
    return ConfigKey("text", default, nullable or default is None, None, names)


def size_or_auto_key(*names: str) -> ConfigKey:
    """A positive whole number, or ``auto``, as null or none: the class derives it."""
    return ConfigKey("positive or auto", None, True, None, names)


def per_layer_key(default: Any, *names: str) -> ConfigKey:
    """A positive whole number, or a list of one for each layer; null where its default is."""
    return ConfigKey("positive or list", default, default is None, None, names)


def count_or_text_key(default: Any, *names: str) -> ConfigKey:
    """A whole number of at least 0, text, or null."""
    return ConfigKey("count or text", default, True, None, names)


def list_key(*names: str, default: Any = None) -> ConfigKey:
    """A list; null or none where the class derives it from other keys."""
    return ConfigKey("list", default, True, None, names)


def object_key(*names: str, default: Any = None) -> ConfigKey:
    """An object that is read as it is."""
    return ConfigKey("object", default, True, None, names)


def no_left_out_notes(values: Config) -> tuple[str, ...]:
    """Of an architecture of which all that matters is read."""
    return ()


@dataclass(frozen=True)
class ConfigFamily:
    """One family of files: how it names itself, the keys that it has, and how they become a model."""

    config_class: str
    """The configuration class whose defaults the keys have."""
    classes: tuple[str, ...]
    """What ``architectures`` holds."""
    model_types: tuple[str, ...]
    keys: Mapping[str, ConfigKey]
    """By the table's names. Nothing else of the file is read."""
    convert: Callable[[Config], dict[str, Any]]
    """Fields of a :class:`~mofa.specs.model.ModelSpec`, without name, source, layers, width, vocabulary and tying.

    It raises ValueError, whose text begins with a key, where the model has what mofa lacks.
    """
    remote: str = ""
    """Where the configuration class is published; empty for one of transformers."""
    built_as: str = ""
    """Class of transformers that builds its models where the type has none of its own; saved files name that one."""
    left_out: Callable[[Config], tuple[str, ...]] = no_left_out_notes
    """What the file says and the model lacks, in words."""

    @property
    def owner_of_defaults(self) -> str:
        """Whose defaults absent keys take, in words.

        Examples
        --------
        >>> ConfigFamily("LlamaConfig", (), (), {}, dict).owner_of_defaults
        "transformers' LlamaConfig"
        """
        return f"{self.config_class} of {self.remote}" if self.remote else f"transformers' {self.config_class}"
