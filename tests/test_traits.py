"""House rule: what a schedule, a framework, an attention kind or an op does stands in its record; others ask that."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import get_args

import pytest

import mofa
from mofa.blocks.build import BlockTapes
from mofa.blocks.context import Context, Primitives
from mofa.blocks.op import Op, Tape
from mofa.blocks.tapes import ModelTapes, model_tapes
from mofa.schedules import SCHEDULES
from mofa.specs.attention import ATTENTION_KINDS, AttentionSpec
from mofa.specs.framework import FRAMEWORK_NAMES
from mofa.specs.framework_traits import TRAITS
from mofa.specs.strategy import RecomputeSpec
from tests.committed import ROOT, nodes_of


def _modules(*but: str) -> Iterator[tuple[str, tuple[ast.AST, ...]]]:
    """Nodes of the modules of the package, but for those below some folders."""
    for path in sorted((ROOT / "mofa").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(but):
            yield name, nodes_of(name)


def test_no_schedule_is_named_outside_of_its_room() -> None:
    """Neither compared, nor a default or a key: :data:`mofa.schedules.SCHEDULES` has the records."""
    named = [
        f"{name}:{node.lineno}: {node.value}"
        for name, nodes in _modules("mofa/schedules/")
        for node in nodes
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
        for name, nodes in _modules(*own)
        for node in nodes
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
        for name, nodes in _modules("mofa/specs/attention/", "mofa/calibrate/")
        for node in nodes
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
OP_NAMES = re.compile(r"(^|\.)(op|op_trace|other|behind)\.name$|(^|\.)op_trace\.op$")


def _matches_an_op(node: ast.AST, *, sets: bool = True) -> bool:
    """Whether an expression looks into the spelling of an op's name; ``sets``: or for it among names."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MATCHES:
        return bool(OP_NAMES.search(ast.unparse(node.func.value)))
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        spelt = any(isinstance(c, ast.Constant | ast.Tuple) for c in sides)
        inside = sets and any(isinstance(op, ast.In | ast.NotIn) for op in node.ops)
        return (spelt or inside) and any(OP_NAMES.search(ast.unparse(side)) for side in sides)
    return False


def test_no_op_is_known_by_the_spelling_of_its_name() -> None:
    """Transforms of tapes, time and memory read :class:`mofa.blocks.op.Op`'s fields: a renamed op costs the same."""
    matched = [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, nodes in _modules()
        if name.startswith(("mofa/blocks/", "mofa/cost/", "mofa/replay/"))
        for node in nodes
        if _matches_an_op(node, sets=not name.startswith("mofa/blocks/"))
    ]
    assert matched == []


def test_no_kind_of_block_pass_or_transfer_is_known_by_how_its_name_begins() -> None:
    """They are literals with sets of them; regions alone have a hierarchy, which two functions read."""
    matched = [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, nodes in _modules("mofa/blocks/recomputation.py")
        if name.startswith(("mofa/blocks/", "mofa/cost/", "mofa/replay/", "mofa/schedules/"))
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("startswith", "endswith")
    ]  # fmt: skip
    assert matched == []


NAMES = re.compile(r"(^|[._])name$")
ROOMS = ("mofa/cost/allocations/", "mofa/cost/memory/", "mofa/replay/rank/")


def test_no_tensor_is_known_by_the_spelling_of_its_name() -> None:
    """What has a name has fields that say what it is; a program's names in traces are joined by a mark of their own."""
    marks = ("-", "#")
    matched = [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, nodes in _modules()
        if name.startswith(ROOMS)
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MATCHES
        and NAMES.search(ast.unparse(node.func.value))
        and not all(isinstance(arg, ast.Constant) and arg.value in marks for arg in node.args)
    ]  # fmt: skip
    assert matched == []


class Renamed:
    """Other names for all ops and tensors of a model's tapes, the same in each of them."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def of(self, name: str) -> str:
        """A name that says nothing."""
        return self.names.setdefault(name, f"n{len(self.names) * 7919 % 100_003}.") if name else ""

    def all_of(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(self.of(name) for name in names)

    def op(self, op: Op) -> Op:
        return op._replace(
            name=self.of(op.name), reads=self.all_of(op.reads), writes=self.all_of(op.writes),
            saves=self.all_of(op.saves), origin=self.of(op.origin), weight=self.of(op.weight),
            claims=self.of(op.claims),
        )  # fmt: skip

    def tape(self, tape: Tape) -> Tape:
        tensors = {
            self.of(name): tensor._replace(name=self.of(name), weight=self.of(tensor.weight))
            for name, tensor in tape.tensors.items()
        }
        inputs, outputs, lingers = map(self.all_of, (tape.inputs, tape.outputs, tape.retained_by_dispatcher))
        return Tape(tuple(map(self.op, tape.ops)), tensors, inputs, outputs, lingers)

    def block(self, block: BlockTapes) -> BlockTapes:
        return replace(block, forward=self.tape(block.forward), backward=self.tape(block.backward))


def _numbers(of: object) -> list[float]:
    """All numbers of a plan, in order, but for how long it took to make it; tensors as large are in that of names."""
    if isinstance(of, dict):
        tensors = [n for tensor in sorted(map(_numbers, of.get("tensors", ()))) for n in tensor]
        return tensors + [
            n for key, value in of.items() if key not in ("elapsed_s", "tensors") for n in _numbers(value)
        ]
    if isinstance(of, list):
        return [n for value in of for n in _numbers(value)]
    return [float(of)] if isinstance(of, int | float) else []


@pytest.mark.parametrize(
    ("name", "model", "strategy"),
    [
        ("fsdp1", "llama3-8b", "micro_batch=1 recompute=full"),
        ("megatron", "llama3-8b", "tp=2 sp=true pp=2 micro_batch=1"),
        ("megatron", "deepseek-v2-lite", "ep=4 micro_batch=1 recompute=selective:mla_up_proj+layernorm"),
        ("megatron", "qwen3-30b-a3b", "tp=2 sp=true etp=1 ep=4 micro_batch=1 recompute=full"),
        ("megatron-2022", "llama3-8b", "tp=8 micro_batch=1 recompute=selective"),
        ("megatron-local", "mixtral-8x7b", "ep=8 pp=1 micro_batch=1 recompute=full"),
        ("torchtitan", "llama3-8b", "tp=2 sp=true micro_batch=1 recompute=ops"),
        ("torchtitan", "llama3-8b", "tp=4 pp=2 sp=true micro_batch=1 recompute=none"),
        ("torchtitan", "llama3-8b", "pp=2 schedule=zbv vpp=2 micro_batch=1 recompute=none"),
        ("torchtitan", "qwen3-30b-a3b", "pp=2 schedule=interleaved-zb vpp=2 ep=4 micro_batch=1 recompute=full"),
        ("torchtitan", "deepseek-v2-lite", "pp=2 schedule=zbv vpp=2 ep=2 micro_batch=1 recompute=full"),
        ("torchtitan", "deepseek-v2-lite", "ep=4 micro_batch=1 recompute=full"),
        ("torchtitan", "qwen3-30b-a3b", "tp=2 sp=true ep=4 etp=1 micro_batch=1 recompute=full"),
    ],
)
def test_renamed_ops_and_tensors_change_nothing(
    name: str, model: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes and seconds of closed form and replay are the same, whatever the ops and tensors of tapes are called."""

    def estimated() -> list[list[float]]:
        job = mofa.load_workload(model, global_batch=16, overrides={"model.num_layers": 9})
        nodes = mofa.load_cluster("h100-hgx", 8)
        framework = mofa.load_framework(name)
        estimates = (
            mofa.estimate(job, nodes, strategy, framework=framework, replay=replay) for replay in (False, True)
        )
        return [_numbers(json.loads(estimate.model_dump_json())) for estimate in estimates]

    plain, renamed = estimated(), Renamed()

    def renamed_tapes(ctx: Context, modes: tuple[RecomputeSpec, ...]) -> ModelTapes:
        tapes = model_tapes(ctx, modes)
        blocks = {label: renamed.block(block) for label, block in tapes.blocks.items()}
        layer_ops = tuple(tuple(map(renamed.op, ops)) for ops in tapes.layer_ops)
        return replace(tapes, blocks=blocks, layer_ops=layer_ops)

    monkeypatch.setattr("mofa.cost.block.block_cost.model_tapes", renamed_tapes)
    assert estimated() == plain
    assert len(renamed.names) > 100
