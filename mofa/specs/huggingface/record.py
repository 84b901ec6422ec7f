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
class Key:
    """A key of the file: its type, and what the configuration class makes of an absent or null one."""

    type: KeyType
    default: Any = REQUIRED
    """What the class takes for an absent key; None is a null one."""
    nullable: bool = False
    rule: Rule | None = None
    """What the class makes of a null key; null stays null without a rule."""
    names: tuple[str, ...] = ()
    """Names in files, first the one that messages use; the table's name where empty. A dot enters an object."""


def size(default: Any = REQUIRED, *names: str, rule: Rule | None = None, nullable: bool = False) -> Key:
    """A positive whole number; it may be null where its default is, or where null has a rule."""
    return Key("positive", default, nullable or default is None or rule is not None, rule, names)


def count(default: Any = REQUIRED, *names: str, nullable: bool = False) -> Key:
    """A whole number of at least 0."""
    return Key("count", default, nullable or default is None, None, names)


def number(default: Any, *names: str, nullable: bool = False) -> Key:
    """Any number; it may be null where its default is."""
    return Key("number", default, nullable or default is None, None, names)


def flag(default: Any, *names: str) -> Key:
    """True or false."""
    return Key("truth", default, default is None, None, names)


def text(default: Any, *names: str, nullable: bool = False) -> Key:
    """Text."""
    return Key("text", default, nullable or default is None, None, names)


def size_or_auto(*names: str) -> Key:
    """A positive whole number, or ``auto``, as null or none: the class derives it."""
    return Key("positive or auto", None, True, None, names)


def per_layer(default: Any, *names: str) -> Key:
    """A positive whole number, or a list of one for each layer; null where its default is."""
    return Key("positive or list", default, default is None, None, names)


def count_or_text(default: Any, *names: str) -> Key:
    """A whole number of at least 0, text, or null."""
    return Key("count or text", default, True, None, names)


def entries(*names: str, default: Any = None) -> Key:
    """A list; null or none where the class derives it from other keys."""
    return Key("list", default, True, None, names)


def json_object(*names: str, default: Any = None) -> Key:
    """An object that is read as it is."""
    return Key("object", default, True, None, names)


def nothing_said(values: Config) -> tuple[str, ...]:
    """Of an architecture of which all that matters is read."""
    return ()


@dataclass(frozen=True)
class Architecture:
    """One family of files: how it names itself, the keys that it has, and how they become a model."""

    config_class: str
    """The configuration class whose defaults the keys have."""
    classes: tuple[str, ...]
    """What ``architectures`` holds."""
    model_types: tuple[str, ...]
    keys: Mapping[str, Key]
    """By the table's names. Nothing else of the file is read."""
    convert: Callable[[Config], dict[str, Any]]
    """Fields of a :class:`~mofa.specs.model.ModelSpec`, without name, source, layers, width, vocabulary and tying.

    It raises ValueError, whose text begins with a key, where the model has what mofa lacks.
    """
    remote: str = ""
    """Where the configuration class is published; empty for one of transformers."""
    built_as: str = ""
    """Class of transformers that builds its models where the type has none of its own; saved files name that one."""
    left_out: Callable[[Config], tuple[str, ...]] = nothing_said
    """What the file says and the model lacks, in words."""

    @property
    def owner_of_defaults(self) -> str:
        """Whose defaults absent keys take, in words.

        Examples
        --------
        >>> Architecture("LlamaConfig", (), (), {}, dict).owner_of_defaults
        "transformers' LlamaConfig"
        """
        return f"{self.config_class} of {self.remote}" if self.remote else f"transformers' {self.config_class}"
