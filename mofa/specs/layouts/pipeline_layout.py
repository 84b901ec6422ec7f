"""The layout of a pipeline, parsed from Megatron's string and written as one.

The rules are those of Megatron-Core 0.16.1 (transformer/pipeline_parallel_layer_layout.py): the same result, or the
same refusal with its position in the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Literal

MODULES = {"E": "embedding", "t": "decoder layer", "m": "multi-token-prediction layer", "L": "loss"}
"""What each letter of a layout stands for."""
MAX_LETTERS = 1_000_000
"""Letters of an unrolled layout above which it is refused, where Megatron would run out of memory. [-]"""
_REPEATED = re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)")
"""A group and how often it is repeated, then a character and how often."""

Rule = Literal[
    "length", "letter", "stages", "first", "last", "one embedding", "one loss", "layers", "predictions",
    "layers before predictions", "predictions in last chunks", "predictions together",
]  # fmt: skip
"""Rules of a layout, in the order in which they are checked."""


class LayoutError(ValueError):
    """A layout that breaks a rule, with the place in the text where it does.

    Parameters
    ----------
    rule
        The rule that is broken.
    what
        What is wrong and what to do, in words.
    position
        In the text, from 0. [characters]
    """

    def __init__(self, rule: Rule, what: str, position: int) -> None:
        super().__init__(f"at character {position + 1}: {what}")
        self.rule, self.what, self.position = rule, what, position


@dataclass(frozen=True)
class PipelineLayout:
    """The letters of each virtual chunk along the model, with where each stands in the text.

    Examples
    --------
    >>> layout = parse_layout("Et*3|(tt|)*2m|L")
    >>> layout.chunks, layout.layers_by_chunk
    (('Ettt', 'tt', 'tt', 'm', 'L'), (3, 2, 2, 0, 0))
    >>> layout.text
    'Et*3|tt|tt|m|L'
    """

    chunks: tuple[str, ...]
    positions: tuple[tuple[int, ...], ...]
    """Of each letter in the text. [characters]"""
    ends: tuple[int, ...]
    """Where in the text each chunk ends. [characters]"""

    @classmethod
    def of_chunks(cls, chunks: Sequence[str]) -> PipelineLayout:
        """The layout of these letters, placed as :attr:`text` without repetitions has them."""
        starts = [sum(map(len, chunks[:i])) + i for i in range(len(chunks))]
        positions = tuple(tuple(range(start, start + len(c))) for start, c in zip(starts, chunks, strict=True))
        return cls(tuple(chunks), positions, tuple(s + len(c) for s, c in zip(starts, chunks, strict=True)))

    @classmethod
    def of_layers(cls, layers: Sequence[int], num_predictions: int = 0) -> PipelineLayout:
        """The layout of so many layers in each chunk, between the ends; predictions are ahead of the loss.

        Examples
        --------
        >>> PipelineLayout.of_layers([1, 2, 1], 1).chunks
        ('Et', 'tt', 'tmL')
        """
        chunks = ["t" * n for n in layers]
        chunks[0] = "E" + chunks[0]
        chunks[-1] += "m" * num_predictions + "L"
        return cls.of_chunks(chunks)

    @cached_property
    def layers_by_chunk(self) -> tuple[int, ...]:
        """Layers of each chunk, predictions' not counted. [-]"""
        return tuple(chunk.count("t") for chunk in self.chunks)

    @cached_property
    def prediction_chunk(self) -> int:
        """The chunk with the multi-token-prediction layers: the last one where there are none."""
        return next((i for i, chunk in enumerate(self.chunks) if "m" in chunk), len(self.chunks) - 1)

    @cached_property
    def text(self) -> str:
        """Megatron's string, with repetitions.

        Examples
        --------
        >>> PipelineLayout.of_chunks(["Et", *["tt"] * 30, "mL"]).text
        'Et|(tt|)*30mL'
        """
        runs = [(chunk, len(list(run))) for chunk, run in groupby(map(_chunk_text, self.chunks[:-1]))]
        repeated = (f"({chunk}|)*{n}" if n > 2 else f"{chunk}|" * n for chunk, n in runs)
        return "".join(repeated) + _chunk_text(self.chunks[-1])

    def check_against_model(self, pp: int, vpp: int, num_layers: int, num_predictions: int) -> None:
        """Check the layout against a pipeline and a model.

        Raises
        ------
        LayoutError
            Where Megatron-Core refuses it.
        """
        self.check_stages(pp, vpp)
        letters = [letter for chunk in self.chunks for letter in chunk]
        places = [position for chunk in self.positions for position in chunk]
        end = self.ends[-1]
        for rule, index, letter in (("first", 0, "E"), ("last", -1, "L")):
            if not letters or letters[index] != letter:
                instead = f", not with {letters[index]} ({MODULES[letters[index]]})" if letters else ""
                verb = "begin" if index == 0 else "end"
                what = f"it must {verb} with {letter} ({MODULES[letter]}){instead}"
                raise LayoutError(rule, what, places[index] if letters else end)  # type: ignore[arg-type]
        for rule, letter, number in (
            ("one embedding", "E", 1), ("one loss", "L", 1), ("layers", "t", num_layers),
            ("predictions", "m", num_predictions),
        ):  # fmt: skip
            of_letter = [place for place, other in zip(places, letters, strict=True) if other == letter]
            if len(of_letter) != number:
                what = f"it has {len(of_letter)} {letter} ({MODULES[letter]}), the model has {number}"
                raise LayoutError(rule, what, of_letter[number] if len(of_letter) > number else end)  # type: ignore[arg-type]
        self._check_predictions(pp, vpp, letters, places)

    def check_stages(self, pp: int, vpp: int) -> None:
        """Check that the layout has a chunk for each virtual stage."""
        number = len(self.chunks)
        if number % pp or number // pp != vpp:
            extra = self.ends[pp * vpp - 1] if number > pp * vpp else self.ends[-1]
            what = f"it has {number} chunks, and pp ({pp}) x vpp ({vpp}) is {pp * vpp}; write as many, | between them"
            raise LayoutError("stages", what, extra)

    def _check_predictions(self, pp: int, vpp: int, letters: Sequence[str], places: Sequence[int]) -> None:
        """Check that predictions are behind all layers, together, in the last chunk of a rank."""
        if "m" not in letters:
            return
        first = letters.index("m")
        if "t" in letters[first:]:
            what = "a decoder layer is behind a multi-token-prediction layer; put all m behind the last t"
            raise LayoutError("layers before predictions", what, places[first + letters[first:].index("t")])
        chunks = [i for i, chunk in enumerate(self.chunks) if "m" in chunk]
        if chunks[0] < pp * (vpp - 1):
            what = f"m must be in the last chunk of a rank: one of the last {pp} chunks of the layout"
            raise LayoutError("predictions in last chunks", what, places[first])
        if len(chunks) > 1:
            second = self.positions[chunks[1]][self.chunks[chunks[1]].index("m")]
            raise LayoutError("predictions together", "all m must be in one chunk; put them together", second)


def parse_layout(text: str) -> PipelineLayout:
    """The layout that a text in Megatron's words says.

    Commas are left out, groups in parentheses unrolled, then single characters; what is left must be letters of
    :data:`MODULES`. Groups don't nest.

    Raises
    ------
    LayoutError
        If a character stands for no module.

    Examples
    --------
    >>> parse_layout("Et|(tt|)*2,mL").chunks
    ('Et', 'tt', 'tt', 'mL')
    """
    letters = [(letter, place) for place, letter in enumerate(text) if letter != ","]
    for pattern in _REPEATED:
        letters = _unrolled(letters, pattern)
    chunks: list[list[tuple[str, int]]] = [[]]
    ends: list[int] = []
    for letter, place in letters:
        if letter == "|":
            ends.append(place)
            chunks.append([])
        elif letter in MODULES:
            chunks[-1].append((letter, place))
        else:
            what = f"{letter!r} is no module; use {', '.join(f'{known} ({name})' for known, name in MODULES.items())}"
            raise LayoutError("letter", what, place)
    return PipelineLayout(
        tuple("".join(letter for letter, _ in chunk) for chunk in chunks),
        tuple(tuple(place for _, place in chunk) for chunk in chunks), (*ends, len(text)),
    )  # fmt: skip


def _unrolled(letters: list[tuple[str, int]], pattern: re.Pattern[str]) -> list[tuple[str, int]]:
    """Letters with what a pattern says is repeated written out, each with its place."""
    text = "".join(letter for letter, _ in letters)
    out: list[tuple[str, int]] = []
    done = 0
    for match in pattern.finditer(text):
        out += letters[done : match.start()]
        group = letters[match.start(1) : match.end(1)]
        digits = match[2].lstrip("0")
        times = int(digits or 0) if len(digits) < len(str(MAX_LETTERS)) + 1 else MAX_LETTERS + 1
        if len(out) + len(group) * times > MAX_LETTERS:
            what = f"it is longer than {MAX_LETTERS:,} letters when {match[0][:60]!r} is written out; shorten it"
            raise LayoutError("length", what, letters[match.start()][1])
        out += group * times
        done = match.end()
    return out + letters[done:]


def _chunk_text(chunk: str) -> str:
    """A chunk's letters, with runs of three and more as repetitions.

    >>> _chunk_text("Ettttm")
    'Et*4m'
    """
    runs = ((letter, len(list(run))) for letter, run in groupby(chunk))
    return "".join(f"{letter}*{n}" if n > 2 else letter * n for letter, n in runs)
