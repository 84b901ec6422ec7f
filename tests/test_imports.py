"""Modules import one another in no circle, imports inside functions and those for types counted."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def imports() -> dict[str, set[str]]:
    """The modules that each module imports anywhere, by their names behind ``mofa.``."""
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / "mofa").rglob("*.py")}
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    found: dict[str, set[str]] = {}
    for name, path in paths.items():
        wanted = found.setdefault(name.removeprefix("mofa."), set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                of = (f"{node.module}.{one.name}" for one in node.names)
                named = [one if one in paths else node.module for one in of]
            elif isinstance(node, ast.Import):
                named = [one.name for one in node.names]
            else:
                continue
            wanted |= {one.removeprefix("mofa.") for one in named if one in paths and one != name}
    return found


def test_no_module_is_in_a_circle() -> None:
    TopologicalSorter(imports()).prepare()
