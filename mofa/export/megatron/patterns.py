"""Which layers have experts, as Megatron's ``--moe-layer-freq`` says it: a number, or an expression of lists."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from itertools import groupby

from mofa.export.arguments import GivenArguments
from mofa.units import is_whole_number

MAX_LAYERS = 10_000
"""Longest pattern that is read. [layers]"""


def list_expression_of_layers(layers: Sequence[bool]) -> str:
    """The layers as an expression of lists.

    Examples
    --------
    >>> list_expression_of_layers([False, True, True]), list_expression_of_layers([False, True, False, True])
    ('([0]*1+[1]*2)', '([0]*1+[1]*1+[0]*1+[1]*1)')
    """
    return "(" + "+".join(f"[{int(kind)}]*{len(list(run))}" for kind, run in groupby(layers)) + ")"


def expert_layers_of_frequency(text: object, num_layers: int, given: GivenArguments) -> list[bool]:
    """Whether each layer has experts: of a number N every N-th from the first, else as the expression says.

    Raises
    ------
    SpecError
        If it is neither, or does not say each layer.
    """
    said = str(text).strip("'\"")
    if is_whole_number(said) and int(said):
        return [i % int(said) == 0 for i in range(num_layers)]
    try:
        values = evaluate_list_expression(said)
    except ValueError as error:
        raise given.refusal(f"moe-layer-freq ({said[:40]}) cannot be read", str(error)) from None
    if len(values) != num_layers:
        raise given.refusal(f"moe-layer-freq says {len(values)} layers", f"num-layers is {num_layers}; make them equal")
    return [bool(value) for value in values]


def evaluate_list_expression(text: str) -> list[int]:
    """The list that an expression of lists, sums and repetitions says; nothing is evaluated.

    Raises
    ------
    ValueError
        If it has anything else in it, or more than :data:`MAX_LAYERS` entries.

    Examples
    --------
    >>> evaluate_list_expression("[0]*3+[1]*2"), evaluate_list_expression("([0]+[1]*1)*2")
    ([0, 0, 0, 1, 1], [0, 1, 0, 1])
    """
    if len(text) > MAX_LAYERS:
        raise ValueError("it is too long; write it with repetitions")
    try:
        tree = ast.parse(text, mode="eval").body
        value = _value(tree)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("it is no list; write it like ([0]*3+[1]*58)") from None
    if isinstance(value, int):
        raise ValueError("it is no list; write it like ([0]*3+[1]*58)")
    return value


def _value(node: ast.expr) -> list[int] | int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        entries = [_value(entry) for entry in node.elts]
        if all(isinstance(entry, int) for entry in entries):
            return [entry for entry in entries if isinstance(entry, int)]
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return _checked(left, right)
        if isinstance(node.op, ast.Mult) and isinstance(left, list) != isinstance(right, list):
            entries_, times = (left, right) if isinstance(left, list) else (right, left)
            assert isinstance(entries_, list) and isinstance(times, int)
            if len(entries_) * times > MAX_LAYERS:
                raise ValueError(f"it says more than {MAX_LAYERS:,} layers; shorten it")
            return entries_ * times
    raise ValueError("it has more than lists of numbers, + and * in it; write it like ([0]*3+[1]*58)")


def _checked(left: list[int], right: list[int]) -> list[int]:
    if len(left) + len(right) > MAX_LAYERS:
        raise ValueError(f"it says more than {MAX_LAYERS:,} layers; shorten it")
    return left + right


def first_dense_and_expert_flags(layers: Sequence[bool], given: GivenArguments) -> tuple[int, int]:
    """First layers without experts, and which of the others have them: every n-th.

    Raises
    ------
    SpecError
        If no such two numbers say the same.
    """
    places = [i for i, has_experts in enumerate(layers) if has_experts]
    if places:
        every = places[1] - places[0] if len(places) > 1 else max(len(layers) - places[0], 1)
        first = places[0] - every + 1
        if first >= 0 and [i >= first and (i - first + 1) % every == 0 for i in range(len(layers))] == list(layers):
            return first, every
    raise given.refusal(
        "moe-layer-freq has a pattern that is not modelled", "what is: first layers without experts, then every n-th"
    )
