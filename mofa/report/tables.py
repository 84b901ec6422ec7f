"""Tables for people: on a console, plain and without colour where that is no terminal, and in Markdown."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mofa.specs.shown_text import visible

Columns = Sequence[tuple[str, str]]
"""Heading of each column with its side, ``left`` or ``right``."""
PIPED_WIDTH = 4000
"""Rows of a table are not wrapped where a program reads them."""


class SafeConsole(Console):
    """A console that writes out what a terminal would act on."""

    def print(self, *objects: Any, **options: Any) -> None:
        """As :meth:`rich.console.Console.print`; names of users are in texts."""
        super().print(*(_safe(item) for item in objects), **options)


def _safe(item: Any) -> Any:
    if isinstance(item, str):
        return visible(item, lines=True)
    if isinstance(item, Text) and not item.plain.replace("\n", "").isprintable():
        return Text(visible(item.plain, lines=True), style=item.style)
    return item


def make_console(file: TextIO | None = None) -> Console:
    """A console on standard output, wide and plain where that is a pipe or a file."""
    file = file or sys.stdout
    terminal = file.isatty()
    return SafeConsole(
        file=file,
        width=None if terminal else PIPED_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
        no_color=None if terminal else True,
        force_terminal=None if terminal else False,
    )


def print_table(console: Console, title: str, columns: Columns, rows: Sequence[Sequence[str]]) -> None:
    """Print a table under a title.

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
    """
    if title:
        console.print(Text(title, style="bold"))
    table = Table(
        box=box.SIMPLE_HEAD if console.is_terminal else None,
        pad_edge=False,
        show_edge=False,
        show_header=any(heading for heading, _ in columns),
    )
    for heading, side in columns:
        table.add_column(
            Text(visible(heading)),
            justify="right" if side == "right" else "left",
            overflow="fold",
            no_wrap=side == "right",
        )
    for row in rows:
        table.add_row(*(Text(visible(cell, lines=True)) for cell in row))
    if console.is_terminal:
        console.print(table)
    else:
        with console.capture() as capture:
            console.print(table)
        console.file.writelines(line.rstrip() + "\n" for line in capture.get().splitlines())
    console.print()


def markdown_table(columns: Columns, rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown.

    Examples
    --------
    >>> print(markdown_table((("a", "left"), ("b", "right")), [["x", "1"]]))
    | a | b |
    |---|---:|
    | x | 1 |
    """
    lines = ["| " + " | ".join(heading for heading, _ in columns) + " |"]
    lines.append("|" + "|".join("---:" if side == "right" else "---" for _, side in columns) + "|")
    lines += ["| " + " | ".join(visible(cell).replace("|", "/") for cell in row) + " |" for row in rows]
    return "\n".join(lines)
