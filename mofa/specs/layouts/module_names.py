"""torchtitan's lists of module names (``module_fqns_per_model_part``) as layouts, and layouts as such lists."""

from __future__ import annotations

import json
from collections.abc import Sequence

from mofa.specs.layouts.pipeline_layout import PipelineLayout

EMBEDDING, NORM, OUTPUT = "tok_embeddings", "norm", "output"
"""The modules of torchtitan's models beside ``layers.0``, ``layers.1`` and so on."""


class ModuleNamesError(ValueError):
    """Lists of module names that say no model, with the part and the name where they don't."""


def module_names_by_chunk(layout: PipelineLayout) -> list[list[str]]:
    """The modules of each chunk by name.

    torchtitan 0.2.2, distributed/pipeline_parallel.py, ``pipeline_module_split``.

    Examples
    --------
    >>> module_names_by_chunk(PipelineLayout.of_layers([1, 1]))
    [['tok_embeddings', 'layers.0'], ['layers.1', 'norm', 'output']]
    """
    out, first, last = [], 0, len(layout.chunks) - 1
    for part, layers in enumerate(layout.layers_by_chunk):
        names = [f"layers.{i}" for i in range(first, first + layers)]
        out.append([EMBEDDING] * (part == 0) + names + [NORM, OUTPUT] * (part == last))
        first += layers
    return out


def parse_module_names(text: str) -> PipelineLayout:
    """The layout that lists of module names say, written as JSON.

    Names of a part may come in any order, as torchtitan keeps a model's own. Layers must go on from part to part, as
    they run one after the other.

    Raises
    ------
    ModuleNamesError
        If the text is no list of lists of names, or the lists are no model cut in pieces.

    Examples
    --------
    >>> parse_module_names('[["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]').text
    'Et|tL'
    """
    try:
        parts = json.loads(text)
    except ValueError as error:
        raise ModuleNamesError(f"is no JSON ({error}); write [[names of the first part], ...]") from None
    if not isinstance(parts, list) or not all(
        isinstance(part, list) and all(isinstance(name, str) for name in part) for part in parts
    ):
        raise ModuleNamesError("is no list of lists of module names; write [[names of the first part], ...]")
    if not parts:
        raise ModuleNamesError("has no parts; write [[names of the first part], ...]")
    layers: list[int] = []
    for part, names in enumerate(parts):
        _check_ends(parts, part, names)
        numbers = [_layer(part, name) for name in names if name not in (EMBEDDING, NORM, OUTPUT)]
        expected = range(sum(layers), sum(layers) + len(numbers))
        if sorted(numbers) != list(expected):
            wrong = next(n for n, wanted in zip(sorted(numbers), expected, strict=True) if n != wanted)
            missing = next(n for n, wanted in zip(expected, sorted(numbers), strict=True) if n != wanted)
            raise ModuleNamesError(
                f"part {part}: layers.{wrong} where layers.{missing} comes next; name each layer once, in order"
            )
        layers.append(len(numbers))
    return PipelineLayout.of_layers(layers)


def _check_ends(parts: Sequence[Sequence[str]], part: int, names: Sequence[str]) -> None:
    """Check that a part has the embedding, the norm and the output once, where it is the first or the last."""
    for name, place in ((EMBEDDING, 0), (NORM, len(parts) - 1), (OUTPUT, len(parts) - 1)):
        if names.count(name) != (part == place):
            raise ModuleNamesError(
                f"part {part}: {name} is named {names.count(name)} times; name it once, in part {place}"
            )


def _layer(part: int, name: str) -> int:
    """The number of a layer's name."""
    kind, _, number = name.partition(".")
    if kind != "layers" or not (number.isascii() and number.isdigit()):
        raise ModuleNamesError(
            f"part {part}: {name[:60]!r} is no module; use {EMBEDDING}, layers.0 and so on, {NORM}, {OUTPUT}"
        )
    return int(number)
