"""How a table fits a width: which columns fold, which one goes under its row, and which leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len

Columns = Sequence[tuple[str, str]]
"""Heading of each column with its side, ``left`` or ``right``."""
GAP = 2
"""Spaces between columns. [characters]"""
WHOLE_CELL = 24
"""A cell at the right edge of its column is folded at spaces where it is longer than this. [characters]"""
LONGEST_NAME, LONGEST_WORD = 44, 24
"""Words at the left edge of the first column, and of others, are folded where they are longer. [characters]"""


class TableLayout(NamedTuple):
    """What of a table is shown where."""

    shown: tuple[int, ...]
    """Columns that stand beside each other, in their order."""
    widths: tuple[int, ...]
    """Their widths. [characters]"""
    left_out: tuple[int, ...]
    """Columns that a narrow terminal has no room for."""
    is_under: bool
    """Whether the column that may go under its row does."""


def fit_columns(
    columns: Columns, rows: Sequence[Sequence[str]], width: int, leaves: Sequence[str | int] = (), under: str = ""
) -> TableLayout | None:
    """Fit a table into a width without cutting a number.

    In this order: headings and text fold at spaces, the one column goes under its row, columns leave.

    Parameters
    ----------
    columns, rows
        The table.
    width
        Of the terminal. [characters]
    leaves
        Headings or numbers of the columns that may leave, the least important first.
    under
        Heading of the column that may go on a line of its own under each row.

    Returns
    -------
    TableLayout | None
        None where no choice fits: such a table is shown row by row, a line for each cell.

    Examples
    --------
    >>> columns, rows = (("name", "left"), ("tokens/s", "right")), [["llama", "10,481.6"]]
    >>> fit_columns(columns, rows, 80)
    TableLayout(shown=(0, 1), widths=(5, 8), left_out=(), is_under=False)
    >>> fit_columns(columns, rows, 8, under="name")
    TableLayout(shown=(1,), widths=(8,), left_out=(), is_under=True)
    >>> fit_columns(columns, rows, 7) is None
    True
    >>> fit_columns((("", "left"), ("", "left")), [["step", "12.50 s"]], 10) is None  # no heading names a column
    True
    """
    headings = [heading for heading, _ in columns]
    cells = [[row[c] for row in rows] for c in range(len(columns))]
    wide = [max(map(cell_len, [heading, *of_column])) for heading, of_column in zip(headings, cells, strict=True)]
    narrow = [
        max(_least_width("left", [heading]), _least_width(side, of_column, LONGEST_WORD if c else LONGEST_NAME))
        for c, ((heading, side), of_column) in enumerate(zip(columns, cells, strict=True))
    ]
    shown = list(range(len(wide)))
    lower = [headings.index(under)] if under and under in headings else []
    going = [c if isinstance(c, int) else headings.index(c) for c in leaves if isinstance(c, int) or c in headings]
    left_out: list[int] = []
    while True:
        # text folds before the one column goes under its row only where that column need not fold itself
        least = [wide[c] if c in lower else narrow[c] for c in shown]
        if sum(least) + GAP * (len(shown) - 1) <= width:
            widths = _share_room([wide[c] for c in shown], least, width - GAP * (len(shown) - 1))
            return TableLayout(tuple(shown), tuple(widths), tuple(sorted(left_out)), bool(under) and not lower)
        if lower:
            shown.remove(lower.pop())
        elif going:
            left_out.append(going.pop(0))
            shown.remove(left_out[-1])
        else:
            return None


def _least_width(side: str, cells: Sequence[str], longest_word: int = LONGEST_NAME) -> int:
    """What a column needs at least: its longest word, or whole cells where it has numbers. [characters]

    >>> _least_width("right", ["12.50 s", "1,024"]), _least_width("left", ["interpolated 86.1 %", "a"])
    (7, 12)
    """
    pieces = [
        piece for cell in cells
        for piece in ([cell] if side == "right" and cell_len(cell) <= WHOLE_CELL else cell.split() or [""])
    ]  # fmt: skip
    lengths = [cell_len(piece) for piece in pieces]
    return max((min(n, longest_word) if side == "left" else n for n in lengths), default=0)


def _share_room(wide: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Widths between the least and the natural ones that use the room, the narrowest columns served first.

    >>> _share_room([5, 60, 30], [5, 10, 10], 60)
    [5, 28, 27]
    """
    widths, spare = list(least), room - sum(least)
    wanting = sorted(range(len(wide)), key=lambda c: wide[c] - least[c])
    for position, c in enumerate(wanting):
        share = min(wide[c] - least[c], spare // (len(wanting) - position))
        widths[c] += share
        spare -= share
    return widths
