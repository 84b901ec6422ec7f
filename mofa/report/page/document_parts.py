"""What a report is made of: sections with paragraphs, tiles, tables, charts and code, whatever they are rendered as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from mofa.report.table_layout import Columns


@dataclass(frozen=True)
class Number:
    """A number of the results as people read it, with its place in the JSON that the page carries."""

    text: str
    path: str
    """Keys and positions, such as ``result.plans.0.step_s``."""
    value: float | int
    """As the JSON has it, SI."""

    def __str__(self) -> str:
        return self.text


Piece = str | Number
"""A cell of a table, or a piece of a sentence."""


@dataclass(frozen=True)
class Paragraph:
    """Sentences; pieces follow each other without a blank."""

    kind: ClassVar[str] = "paragraph"
    pieces: tuple[Piece, ...]
    tone: Literal["plain", "lead", "note", "warning"] = "plain"


@dataclass(frozen=True)
class Tile:
    """One figure that a reader looks for first."""

    label: str
    number: Piece
    note: str = ""


@dataclass(frozen=True)
class Tiles:
    """Figures beside each other."""

    kind: ClassVar[str] = "tiles"
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class DataTable:
    """Rows under headings."""

    kind: ClassVar[str] = "table"
    columns: Columns
    rows: Sequence[Sequence[Piece]]
    caption: str = ""
    folded: str = ""
    """The line under which it is folded away until asked for; empty: it is shown."""


@dataclass(frozen=True)
class Chart:
    """A Plotly figure: its traces and its layout, as Plotly's schema has them."""

    kind: ClassVar[str] = "chart"
    name: str
    caption: str
    figure: Mapping[str, Any]
    height_px: int = 360
    filters: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Choices by column of the traces' ``customdata``, in its order; empty where nothing is filtered."""
    image: str = ""
    """Name of the PNG of matplotlib that shows the same, for Markdown; empty where there is none."""


@dataclass(frozen=True)
class Code:
    """A file's text."""

    kind: ClassVar[str] = "code"
    name: str
    text: str


Part = Paragraph | Tiles | DataTable | Chart | Code


@dataclass(frozen=True)
class Section:
    """Parts under a heading."""

    key: str
    title: str
    parts: tuple[Part, ...]


def paragraph(*pieces: Piece, tone: Literal["plain", "lead", "note", "warning"] = "plain") -> Paragraph:
    """A paragraph of pieces.

    Examples
    --------
    >>> paragraph("A step takes ", Number("1.00 s", "result.plans.0.step_s", 1.0), ".").pieces[1].text
    '1.00 s'
    """
    return Paragraph(pieces, tone)
