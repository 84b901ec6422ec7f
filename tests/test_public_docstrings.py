"""Public names explain themselves: each docstring of ``mofa.__all__`` has the numpydoc sections that it needs."""

from __future__ import annotations

import builtins
import dataclasses
import importlib
import inspect
import re
from typing import Any

import pydantic
import pytest

import mofa


def public(name: str) -> Any:
    """What a public name is; of a package that can be called, the function of its name."""
    value = getattr(mofa, name)
    return getattr(importlib.import_module(f"mofa.{name}.entry"), name) if inspect.ismodule(value) else value


FUNCTIONS = [name for name in mofa.__all__ if inspect.isfunction(public(name))]
EXCEPTIONS = [name for name in mofa.__all__ if name not in FUNCTIONS and issubclass(public(name), Exception)]
RECORDS = [name for name in mofa.__all__ if name not in (*FUNCTIONS, *EXCEPTIONS)]
NUMBER = re.compile(r"\b(int|float)\b")
UNIT = re.compile(r"\[[^\]]+\]")


def sections(name: str) -> dict[str, str]:
    """Titles of a docstring's sections to what is below each."""
    doc = inspect.cleandoc(public(name).__doc__)
    pieces = re.split(r"^(\w[\w ]*)\n-{3,}$", doc, flags=re.MULTILINE)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def entries(section: str) -> dict[str, str]:
    """Names that a section lists, one or several a line, to what is indented below."""
    listed: dict[str, str] = {}
    names: list[str] = []
    for line in section.strip().splitlines():
        if line and not line.startswith(" "):
            names = [name.strip() for name in line.partition(" : ")[0].split(",")]
            listed |= dict.fromkeys(names, "")
        else:
            listed |= {name: f"{listed[name]} {line.strip()}" for name in names}
    return listed


def annotated_fields(record: type) -> dict[str, str]:
    """Fields of a record to what they hold."""
    if issubclass(record, pydantic.BaseModel):
        return {name: str(field.annotation) for name, field in record.model_fields.items()}
    return {field.name: str(field.type) for field in dataclasses.fields(record)}


def without_unit(listed: dict[str, str], annotations: dict[str, str]) -> list[str]:
    """Numbers whose entry has no unit in brackets."""
    numbers = [name for name, annotation in annotations.items() if NUMBER.search(annotation)]
    return [name for name in numbers if not UNIT.search(listed[name])]


@pytest.mark.parametrize("name", mofa.__all__)
def test_it_has_a_summary_and_an_example(name: str) -> None:
    summary = inspect.cleandoc(public(name).__doc__).split("\n\n")[0]
    assert summary.endswith(".")
    assert "\n" not in summary
    assert ">>> " in sections(name)["Examples"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_says_what_it_takes_returns_and_raises(name: str) -> None:
    parameters = inspect.signature(public(name)).parameters
    listed = entries(sections(name)["Parameters"])
    assert set(listed) == set(parameters)
    assert [text for text in listed.values() if not text.strip()] == []
    plain = {parameter: str(of.annotation) for parameter, of in parameters.items()}
    assert without_unit(listed, {p: a for p, a in plain.items() if not a.startswith(("Mapping", "bool"))}) == []
    assert entries(sections(name)["Returns"])
    for raised in entries(sections(name)["Raises"]):
        assert issubclass(getattr(mofa, raised, None) or getattr(builtins, raised), Exception)


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_says_what_its_fields_hold(name: str) -> None:
    record = public(name)
    listed = entries(sections(name)["Attributes"])
    assert set(listed) == set(annotated_fields(record))
    assert [text for text in listed.values() if not text.strip()] == []
    assert without_unit(listed, annotated_fields(record)) == []
    if issubclass(record, pydantic.BaseModel):
        assert list(entries(sections(name)["Raises"])) == ["pydantic.ValidationError"]


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_an_exception_says_who_raises_it(name: str) -> None:
    assert len(sections(name)["Notes"]) > 40


def test_the_docstring_of_mofa_lists_every_name() -> None:
    assert [name for name in mofa.__all__ if not re.search(rf"``{name}``", mofa.__doc__ or "")] == []
