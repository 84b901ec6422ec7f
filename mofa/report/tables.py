"""Tables for people: on a console, plain and without colour where that is no terminal, and in Markdown."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, Literal, TextIO

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mofa.report.table_layout import GAP, Columns, TableLayout, fit_columns
from mofa.specs.shown_text import escape_invisible

__all__ = ["Columns", "make_console", "markdown_table", "print_paragraph", "print_table"]

PIPED_WIDTH = 4000
"""Rows of a table are not wrapped where a program reads them."""
UNDER = 4
"""How far what stands under a row is indented. [characters]"""


class SafeConsole(Console):
    """A console that writes out what a terminal would act on."""

    def print(self, *objects: Any, **options: Any) -> None:
        """As :meth:`rich.console.Console.print`; names of users are in texts."""
        super().print(*(_safe(item) for item in objects), **options)


def _safe(item: Any) -> Any:
    if isinstance(item, str):
        return escape_invisible(item, lines=True)
    if isinstance(item, Text) and not item.plain.replace("\n", "").isprintable():
        return Text(escape_invisible(item.plain, lines=True), style=item.style)
    return item


def make_console(file: TextIO | None = None) -> Console:
    """A console on standard output: as wide as the terminal, or as ``COLUMNS`` says; a pipe's lines are not folded."""
    file = file or sys.stdout
    terminal = file.isatty()
    said = os.environ.get("COLUMNS", "")
    width = int(said) if said.isdigit() and int(said) else None if terminal else PIPED_WIDTH
    return SafeConsole(
        file=file,
        width=width,
        highlight=False,
        markup=False,
        emoji=False,
        no_color=None if terminal else True,
        force_terminal=None if terminal else False,
    )


def print_paragraph(console: Console, text: str, style: str = "", indent: int = 0) -> None:
    """Print a paragraph, folded at spaces where the console has a width.

    Parameters
    ----------
    console
        Where to.
    text
        The paragraph.
    style
        Of rich.
    indent
        Of all lines but the first. [characters]
    """
    if console.width >= PIPED_WIDTH:
        console.print(Text(text, style=style), soft_wrap=True)
        return
    for paragraph in text.split("\n"):
        lines = textwrap.wrap(paragraph, console.width, subsequent_indent=" " * indent, break_on_hyphens=False)
        for line in lines or [""]:
            console.print(Text(line, style=style), soft_wrap=True)


def print_table(
    console: Console,
    title: str,
    columns: Columns,
    rows: Sequence[Sequence[str]],
    *,
    leaves: Sequence[str | int] = (),
    under: str = "",
    names_under: bool = False,
) -> None:
    """Print a table under a title; no number is ever cut.

    Where the console is too narrow, text folds at spaces, then a column goes under its row, then columns leave. What
    still does not fit is printed row by row, a line for each cell.

    Parameters
    ----------
    console
        Where to.
    title
        A line above the table; none where empty.
    columns
        Heading of each column with its side, ``left`` or ``right``.
    rows
        Cells as text.
    leaves
        Headings or numbers of columns that may leave, the least important first.
    under
        Heading of the column that may go under its row, such as the strategy.
    names_under
        Whether its heading stands in front of what is under a row, as that does not explain itself.
    """
    if title:
        print_paragraph(console, title, "bold")
    layout = fit_columns(columns, rows, console.width, leaves, under)
    if layout is None:
        _print_records(console, columns, rows)
    else:
        _print_grid(console, columns, rows, layout, under, f"{under} " if names_under else "")
        if layout.left_out:
            names = ", ".join(columns[c][0] for c in layout.left_out)
            print_paragraph(console, f"(no room for: {names}; a wider terminal shows them)")
    console.print()


def _print_grid(
    console: Console, columns: Columns, rows: Sequence[Sequence[str]], layout: TableLayout, under: str, name: str
) -> None:  # fmt: skip
    """The cells that stand beside each other, each row followed by what stands under it, behind ``name``.

    A cell with a word that its column would break, and a line of its own would not, stands under its row as well.
    """
    shown = [columns[c] for c in layout.shown]
    cells = [[row[c] for c in layout.shown] for row in rows]
    room = console.width - UNDER
    below = [""] * len(rows)
    if layout.is_under:
        lower = [heading for heading, _ in columns].index(under)
        below = [name + row[lower] if row[lower] else "" for row in rows]
    else:
        for number, row in enumerate(cells):
            if (place := _broken_cell(shown, layout.widths, row, room)) is not None:
                below[number], row[place] = row[place], ""
    if any(below):
        lines = _grid_lines(console, shown, layout.widths, [])
        body = _grid_lines(console, shown, layout.widths, cells, with_head=False)
        folds = len(body) != len(rows)
        for number, beside in enumerate(cells):
            own = _grid_lines(console, shown, layout.widths, [beside], with_head=False) if folds else [body[number]]
            lines += own
            if text := below[number]:
                lines += _lines_of(console, Padding(Text(fold_words(text, room), overflow="fold"), (0, 0, 0, UNDER)))
    else:
        lines = _grid_lines(console, shown, layout.widths, cells)
    console.file.writelines(line + "\n" for line in lines)


def _broken_cell(columns: Columns, widths: Sequence[int], row: Sequence[str], room: int) -> int | None:
    """The last column of text, but not the first, that would break a word that fits a line of so much room."""
    for place in range(len(row) - 1, 0, -1):
        longest = max(map(cell_len, row[place].split()), default=0)
        if columns[place][1] == "left" and widths[place] < longest <= room:
            return place
    return None


def fold_words(text: str, width: int) -> str:
    r"""Break words that are longer than a line, such as addresses, behind a separator where there is one.

    Examples
    --------
    >>> fold_words("see github.com/NVIDIA/Megatron-LM/blob", 24)
    'see github.com/NVIDIA/\nMegatron-LM/blob'
    >>> fold_words("tp=2 pp=4", 24)
    'tp=2 pp=4'
    """
    for word in text.split():
        if cell_len(word) <= width or width < 1:
            continue
        pieces, rest = [], word
        while cell_len(rest) > width:
            head = rest[:width]
            last = max(head.rfind(separator) for separator in "/,;|")
            cut = last + 1 if last >= width // 3 else width
            pieces.append(rest[:cut])
            rest = rest[cut:]
        text = text.replace(word, "\n".join((*pieces, rest)), 1)
    return text


def _grid_lines(
    console: Console,
    columns: Columns,
    widths: Sequence[int],
    rows: Sequence[Sequence[str]],
    *,
    with_head: bool = True,
) -> list[str]:
    """Rows of cells in columns of these widths, as lines."""
    table = Table(
        box=box.SIMPLE_HEAD if console.is_terminal else None,
        pad_edge=False,
        show_edge=False,
        padding=(0, GAP - 1 if console.is_terminal else GAP, 0, 0),
        show_header=with_head and any(heading for heading, _ in columns),
    )
    for (heading, side), width in zip(columns, widths, strict=True):
        justify: Literal["left", "right"] = "right" if side == "right" else "left"
        table.add_column(Text(escape_invisible(heading)), justify=justify, overflow="fold", width=width)
    for row in rows:
        cells = [fold_words(cell, width) for cell, width in zip(row, widths, strict=True)]
        table.add_row(*(Text(escape_invisible(cell, lines=True)) for cell in cells))
    return _lines_of(console, table)


def _lines_of(console: Console, renderable: Table | Padding) -> list[str]:
    with console.capture() as capture:
        console.print(renderable)
    return [line.rstrip() for line in capture.get().splitlines()]


def _print_records(console: Console, columns: Columns, rows: Sequence[Sequence[str]]) -> None:
    """Each row as lines of a heading and its cell, for a table that no choice of columns fits."""
    for row in rows:
        for (heading, _), cell in zip(columns, row, strict=True):
            if cell:
                print_paragraph(console, f"{heading}: {cell}" if heading else cell, indent=UNDER)
        if row is not rows[-1]:
            console.print()


def markdown_table(columns: Columns, rows: Sequence[Sequence[str]], *, are_escaped: bool = False) -> str:
    r"""A table in Markdown; bars in cells are escaped, unless the cells are Markdown already.

    Examples
    --------
    >>> print(markdown_table((("a", "left"), ("b", "right")), [["x", "1"]]))
    | a | b |
    |---|---:|
    | x | 1 |
    >>> print(markdown_table((("a", "left"),), [["Et|L"]]).splitlines()[-1])
    | Et\|L |
    """
    if not are_escaped:
        rows = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    lines = ["| " + " | ".join(heading for heading, _ in columns) + " |"]
    lines.append("|" + "|".join("---:" if side == "right" else "---" for _, side in columns) + "|")
    lines += ["| " + " | ".join(escape_invisible(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)
