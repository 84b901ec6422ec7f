"""Public names explain themselves: their docstrings have the numpydoc sections that they need.

Those of ``mofa.__all__``, classes' too, and every public function of the rooms that people import first.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest

import mofa
from tests.committed import ROOT, tree_of


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


ROOMS = (
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "mofa" / "plan").glob("*.py")),
    "mofa/cost/estimate.py", "mofa/cost/precision_modes.py", "mofa/export/entry.py", "mofa/search/entry_points.py",
    "mofa/search/one_plan.py", "mofa/search/request.py", "mofa/search/search_result.py",
    "mofa/search/layout_search/refine.py", "mofa/search/long_run/spare_nodes.py", "mofa/specs/load.py",
    "mofa/specs/run_files.py", "mofa/units.py",
)  # fmt: skip
"""Where people look first: results, facts and their units, what predicts and what searches."""
INTERNAL = ("TableEstimator", "PrecisionModeCosts")
"""Classes of these rooms that the search and the replay alone use; their methods have a sentence each."""
ARRAY = re.compile(r"\b(NDArray|Array\w|Float\w)\b")
SHAPE_OR_UNIT = re.compile(r"\[[^\]]+\]|\([^)]*,[^)]*\)|\bAs (of|in)\b|:func:|:class:")


def room_functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Public functions of the rooms, and methods that take arguments, by module and name."""
    for module in ROOMS:
        for node in tree_of(module).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                yield f"{module}: {node.name}", node
            elif isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in INTERNAL:
                methods = (m for m in node.body if isinstance(m, ast.FunctionDef) and not m.name.startswith("_"))
                yield from ((f"{module}: {node.name}.{m.name}", m) for m in methods if parameters_of(m))


def parameters_of(function: ast.FunctionDef) -> dict[str, str]:
    """Names of parameters to their annotations, self and the class left out."""
    arguments = function.args
    given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    given += [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    return {a.arg: ast.unparse(a.annotation) if a.annotation else "" for a in given if a.arg not in ("self", "cls")}


def lacks(function: ast.FunctionDef) -> list[str]:
    """What a function's docstring does not say, in words."""
    doc = ast.get_docstring(function) or ""
    pieces = re.split(r"^(\w[\w ]*)\n-{3,}$", doc, flags=re.MULTILINE)
    said = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    parameters, listed = parameters_of(function), entries(said.get("Parameters", ""))
    missing = [f"parameter {name}" for name in parameters if not listed.get(name, "").strip()]
    missing += [f"{name}, which is no parameter" for name in listed if name not in parameters]
    numbers = {n: a for n, a in parameters.items() if (NUMBER.search(a) or ARRAY.search(a)) and "Mapping" not in a}
    missing += [f"unit or shape of {name}" for name in numbers if not SHAPE_OR_UNIT.search(listed.get(name, ""))]
    returns = ast.unparse(function.returns) if function.returns else "None"
    result = said.get("Returns", said.get("Yields", ""))
    if returns != "None" and not entries(result):
        missing.append("what it returns")
    if returns in ("int", "float") and not UNIT.search(pieces[0] + result):
        missing.append("unit of what it returns")
    raised = {node.exc.func.id for node in ast.walk(function) if isinstance(node, ast.Raise)
              and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name)}  # fmt: skip
    missing += [f"that it raises {name}" for name in raised if name not in entries(said.get("Raises", ""))]
    is_method = [a.arg for a in function.args.args[:1]] in (["self"], ["cls"])
    if not is_method and ">>> " not in said.get("Examples", ""):
        missing.append("an example")
    return missing


@pytest.mark.parametrize("name", [name for name, _ in room_functions()])
def test_a_function_of_the_first_rooms_says_all(name: str) -> None:
    assert lacks(dict(room_functions())[name]) == []


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ('def f(n: int) -> None:\n    """Do."""', "parameter n"),
        ('def f(n: int) -> None:\n    """Do.\n\n    Parameters\n    ----------\n    n\n        How many.\n    """',
         "unit or shape of n"),
        ('def f() -> float:\n    """Seconds. [s]"""', "what it returns"),
        ('def f() -> float:\n    """It.\n\n    Returns\n    -------\n    float\n        It.\n    """',
         "unit of what it returns"),
        ('def f() -> None:\n    """Do."""\n    raise ValueError("no")', "that it raises ValueError"),
        ('def f() -> None:\n    """Do."""', "an example"),
    ],
)  # fmt: skip
def test_what_is_missing_is_found(source: str, what: str) -> None:
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert what in lacks(function)
