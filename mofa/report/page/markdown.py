"""A report as Markdown, with the figures of matplotlib beside it."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from mofa.report.page.document_parts import Chart, Code, DataTable, Paragraph, Part, Section, Tiles
from mofa.report.tables import markdown_table
from mofa.specs.shown_text import escape_invisible

SPECIAL = re.compile(r"([\\`*_\[\]<>#|])")


def page_markdown(sections: Sequence[Section], title: str, images: Collection[str], made_on: str = "") -> str:
    """The report; of charts those whose image is among the files that stand beside it.

    Parameters
    ----------
    sections
        What it shows, in order.
    title
        Its heading.
    images
        Names of the files of figures.
    made_on
        The day; empty where it is not to be said.
    """
    lines = [f"# {escaped_for_markdown(title)}", *([f"A plan by mofa, {made_on}."] if made_on else [])]
    for section in sections:
        lines.append(f"## {escaped_for_markdown(section.title)}")
        lines += [text for part in section.parts if (text := _part_text(part, images))]
    return "\n\n".join(lines) + "\n"


def _part_text(part: Part, images: Collection[str]) -> str:
    if isinstance(part, Paragraph):
        return "".join(escaped_for_markdown(str(piece)) for piece in part.pieces)
    if isinstance(part, Tiles):
        rows = [[tile.label, str(tile.number), tile.note] for tile in part.tiles]
        return _table((("figure", "left"), ("", "right"), ("", "left")), rows)
    if isinstance(part, DataTable):
        heading = part.caption or part.folded
        table = _table(part.columns, [[str(piece) for piece in row] for row in part.rows])
        return f"{escaped_for_markdown(heading)}\n\n{table}" if heading else table
    if isinstance(part, Chart):
        return f"![{escaped_for_markdown(part.caption)}]({part.image})" if part.image in images else ""
    if isinstance(part, Code):
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", part.text)), default=0))
        return f"{escaped_for_markdown(part.name)}\n\n{fence}\n{part.text.rstrip()}\n{fence}"
    raise TypeError(type(part).__name__)


def _table(columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]]) -> str:
    sides = [(name, "right" if side == "right" else "left") for name, side in columns]
    return markdown_table(sides, [[escaped_for_markdown(cell) for cell in row] for row in rows], are_escaped=True)


def escaped_for_markdown(text: str) -> str:
    r"""Text that Markdown shows as it is, on one line; blanks at its ends stay.

    Examples
    --------
    >>> print(escaped_for_markdown("a*b [c](d)"))
    a\*b \[c\](d)
    """
    return SPECIAL.sub(r"\\\1", escape_invisible(re.sub(r"\s+", " ", text)))
