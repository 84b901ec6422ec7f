"""House rule: what a schedule, a framework or an op does stands in its record; nobody outside asks by name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from mofa.schedules import SCHEDULES

ROOT = Path(__file__).parents[1]


def _modules(*but: str) -> Iterator[tuple[str, ast.Module]]:
    """Modules of the package, but for those below some folders."""
    for path in sorted((ROOT / "mofa").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(but):
            yield name, ast.parse(path.read_text(encoding="utf-8"), name)


def test_no_schedule_is_named_outside_of_its_room() -> None:
    """Neither compared, nor a default or a key: :data:`mofa.schedules.SCHEDULES` has the records."""
    named = [
        f"{name}:{node.lineno}: {node.value}"
        for name, tree in _modules("mofa/schedules/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in SCHEDULES
    ]
    assert named == []
