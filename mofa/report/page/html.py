"""A report as one HTML page that carries its charts, their library and its numbers, and loads nothing."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from mofa.plan.version import installed_version
from mofa.report.page.document_parts import Chart, Section
from mofa.report.page.facts import ReportFacts
from mofa.specs.shown_text import escape_invisible

if TYPE_CHECKING:
    from jinja2 import Environment

MOST_PAGE_BYTES = 5_000_000
"""What mail servers and chats take without asking. [B]"""


def page_html(facts: ReportFacts, sections: Sequence[Section], title: str) -> str:
    """The page.

    Parameters
    ----------
    facts
        What it is about; its document is embedded.
    sections
        What it shows, in order.
    title
        Of the page.
    """
    from markupsafe import Markup

    return _environment().get_template("template.html.j2").render(
        title=title, sections=sections, version=installed_version(), made_on=facts.made_on,
        css=Markup(page_source_file_text("page.css")),
        script=Markup(page_source_file_text("charts.js") + page_source_file_text("page.js")),
        plotly=Markup(packed_plotly_library()),
        document=Markup(script_safe(facts.page_json_text)),
        charts=Markup(script_safe(json.dumps(charts_of(sections), separators=(",", ":"), allow_nan=False))),
    )  # fmt: skip


def sections_html(sections: Sequence[Section]) -> str:
    """Sections alone, as they stand in the page; names are escaped."""
    return _environment().get_template("sections.html.j2").render(sections=sections)


def charts_of(sections: Sequence[Section]) -> dict[str, Mapping[str, Any]]:
    """Plotly's figures of sections, by their names."""
    return {part.name: part.figure for section in sections for part in section.parts if isinstance(part, Chart)}


@lru_cache(maxsize=1)
def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=FunctionLoader(page_source_file_text), autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, finalize=_visible,
    )  # fmt: skip
    environment.filters["tojson_number"] = json.dumps
    return environment


def _visible(value: Any) -> Any:
    """Text without what a reader cannot see, such as changes of direction in a user's names."""
    return escape_invisible(value, lines=True) if type(value) is str else value


def script_safe(text: str) -> str:
    """JSON that can stand inside a script element: no end of it, no comment.

    Examples
    --------
    >>> script_safe('{"name":"</script>&"}')
    '{"name":"\\\\u003c/script\\\\u003e\\\\u0026"}'
    """
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def page_source_file_text(name: str) -> str:
    """A file that pages are made of."""
    return (files("mofa.report.page") / name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def packed_plotly_library() -> str:
    """The library of the charts, packed: 4.8 MB of it as they are would leave no room in a page of 5 MB.

    Its package has no smaller build. Browsers unpack it by themselves (DecompressionStream, all since 2023).
    """
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()
