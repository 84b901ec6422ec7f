"""House rule: what a schedule, a framework, an attention kind or an op does stands in its record; others ask that."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_args

from mofa.blocks.context import Primitives
from mofa.schedules import SCHEDULES
from mofa.specs.attention import ATTENTION_KINDS, AttentionSpec
from mofa.specs.framework import FRAMEWORK_NAMES
from mofa.specs.framework_traits import TRAITS

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


FRAMEWORK = re.compile(r"(^|\.|\b)(framework|fw|spec)(\.name|\['name'\])$")


def _asks_a_framework(node: ast.AST) -> bool:
    """Whether an expression compares a framework's name, or the name that follows from it."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        asked, asking = node.args, node.func.attr in ("startswith", "endswith")
    elif isinstance(node, ast.Compare):
        asked, asking = [node.left, *node.comparators], True
        listed = any(isinstance(op, ast.In | ast.NotIn) for op in node.ops)
        if listed and FRAMEWORK.search(ast.unparse(node.left)):
            return True
    else:
        return False
    named = [c.value for part in asked for c in ast.walk(part) if isinstance(c, ast.Constant)]
    return asking and any(name in FRAMEWORK_NAMES for name in named)


def test_no_framework_is_asked_for_its_name() -> None:
    """:mod:`mofa.specs.framework_traits` has their records; what measures real runs launches each in its own way."""
    own = ("mofa/blocks/frameworks/", "mofa/specs/framework", "mofa/measure/", "mofa/calibrate/")
    asked = [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, tree in _modules(*own)
        for node in ast.walk(tree)
        if isinstance(node, ast.expr) and _asks_a_framework(node)
    ]
    assert asked == []


def test_every_framework_has_a_record() -> None:
    assert tuple(TRAITS) == FRAMEWORK_NAMES


def test_no_attention_kind_is_named_outside_of_its_room() -> None:
    """Neither compared nor asked for its class: :data:`mofa.specs.attention.ATTENTION_KINDS` has the records."""
    classes = {get_args(get_args(AttentionSpec)[0])[i].__name__ for i in range(len(ATTENTION_KINDS))}
    named = [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, tree in _modules("mofa/specs/attention/", "mofa/calibrate/")
        for node in ast.walk(tree)
        if (isinstance(node, ast.Constant) and node.value in ATTENTION_KINDS)
        or (isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"
            and classes & {n.id for n in ast.walk(node) if isinstance(n, ast.Name)})
    ]  # fmt: skip
    assert named == []


def test_every_attention_kind_has_a_record() -> None:
    """The list, what a model's file may write, and the primitives that records name are the same ones."""
    written = [member.model_fields["kind"].default for member in get_args(get_args(AttentionSpec)[0])]
    assert list(ATTENTION_KINDS) == written
    primitives = {field.name for field in fields(Primitives)}
    for kind in ATTENTION_KINDS.values():
        assert set(kind.primitives) <= primitives, kind.name


MATCHES = ("startswith", "endswith", "removesuffix", "removeprefix", "partition", "rpartition", "split", "rsplit")
OP_NAMES = re.compile(r"(^|\.)(op|deed|other|behind)\.name$|(^|\.)deed\.op$")


def _matches_an_op(node: ast.AST) -> bool:
    """Whether an expression looks into the spelling of an op's name."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MATCHES:
        return bool(OP_NAMES.search(ast.unparse(node.func.value)))
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        spelt = any(isinstance(c, ast.Constant | ast.Tuple) for c in sides)
        inside = any(isinstance(op, ast.In | ast.NotIn) for op in node.ops)
        return (spelt or inside) and any(OP_NAMES.search(ast.unparse(side)) for side in sides)
    return False


def test_no_op_is_known_by_the_spelling_of_its_name() -> None:
    """Time and memory read :class:`mofa.blocks.op.Op`'s fields: a renamed op costs the same."""
    matched = [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, tree in _modules()
        if name.startswith(("mofa/cost/", "mofa/replay/"))
        for node in ast.walk(tree)
        if _matches_an_op(node)
    ]
    assert matched == []
