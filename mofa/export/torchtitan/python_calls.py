"""Calls in a Python file, read by ``ast``: nothing of the file is run."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any


class NotLiteralError:
    """A value that Python would have to compute."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text[:60]


class UnreadablePythonError(ValueError):
    """A file that is no Python, or too deep to be read."""


def parse_python(text: str) -> ast.Module:
    """Parse the text of a file to its Python syntax tree.

    Raises
    ------
    UnreadablePythonError
        If it is no Python.
    """
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnreadablePythonError(f"is no Python ({str(error)[:60]})") from None


def called_function_name(node: ast.expr) -> str:
    """The last name of what is called; ``Config`` keeps the name in front of it.

    >>> called_function_name(ast.parse("a.Trainer.Config()").body[0].value)
    'Trainer.Config'
    """
    function = node.func if isinstance(node, ast.Call) else node
    if isinstance(function, ast.Attribute):
        inner = called_function_name(function.value) if isinstance(function.value, ast.Attribute | ast.Name) else ""
        return f"{inner.rpartition('.')[2]}.{function.attr}" if function.attr == "Config" else function.attr
    return function.id if isinstance(function, ast.Name) else ""


def literal_value(node: ast.expr, names: Mapping[str, ast.expr] | None = None) -> Any:
    """A literal value, or that of a name that the file gives one; else :class:`NotLiteralError`.

    >>> literal_value(ast.parse("[1, 'a']", mode="eval").body), literal_value(ast.parse("f(1)", mode="eval").body)
    ([1, 'a'], f(1))
    """
    if isinstance(node, ast.Name) and names and node.id in names:
        return literal_value(names[node.id])
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return NotLiteralError(ast.unparse(node))


def keyword_arguments(call: ast.Call, names: Mapping[str, ast.expr]) -> dict[str, Any]:
    """Keyword arguments of a call by name; those that are calls stay nodes."""
    return {
        keyword.arg: keyword.value if isinstance(keyword.value, ast.Call) else literal_value(keyword.value, names)
        for keyword in call.keywords
        if keyword.arg is not None
    }


def assigned_values(tree: ast.Module) -> dict[str, ast.expr]:
    """Names that a file gives a value once, and the value."""
    values: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    values.setdefault(target.id, []).append(node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            values.setdefault(node.target.id, []).append(node.value)
    return {name: nodes[0] for name, nodes in values.items() if len(nodes) == 1}
