"""Colours and layouts that the charts share; the page's script adds those of the reader's light or dark mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COMPONENT_COLOURS = {
    "gemm": "#2a6fb8", "grouped_gemm": "#4b92d4", "attention": "#7fb2e3", "memory_bound": "#a9cbe9",
    "recompute": "#8d7cc8", "host_idle": "#8a8f96", "tp": "#b4531f", "cp": "#d96f2c", "ep": "#ec9650",
    "pp": "#e0b07c", "dp": "#cfa92e", "bubble": "#b3b8be", "stragglers": "#6e747c",
    "optimizer": "#3f9f5a",
}  # fmt: skip
"""Middle tones, which stand out from white and from black: computing blue, communication orange, waiting grey."""
MEMORY_COLOURS = {
    "parameters": "#2a6fb8", "gradients": "#7fb2e3", "optimizer_states": "#3f9f5a", "activations": "#d96f2c",
    "weight_copies": "#4b92d4", "buffers": "#e0b07c", "temporaries": "#cfa92e", "allocator_slack": "#8d7cc8",
    "cuda_context": "#b3b8be", "communicators": "#6e747c",
}  # fmt: skip
SPARE_COLOURS = ("#3aa6b4", "#c26fb5", "#a98653", "#d65f8f")
ACCENT, QUIET, STRONG = "#d1495b", "#7fb2e3", "#2a6fb8"


def memory_colour(component: str, number: int = 0) -> str:
    """The colour of a component of memory; one without its own takes a spare one.

    Examples
    --------
    >>> memory_colour("parameters"), memory_colour("logits", 1)
    ('#2a6fb8', '#c26fb5')
    """
    return MEMORY_COLOURS.get(component, SPARE_COLOURS[number % len(SPARE_COLOURS)])


def plotly_figure(data: list[dict[str, Any]], x_title: str, y_title: str = "", **layout: Any) -> dict[str, Any]:
    """A figure with titles of its axes; ``layout`` is merged into those of the axes where it names them.

    Examples
    --------
    >>> plotly_figure([], "time [s]", yaxis={"autorange": "reversed"})["layout"]["yaxis"]
    {'title': {'text': ''}, 'automargin': True, 'autorange': 'reversed'}
    """
    axes = {"xaxis": _axis(x_title, layout.pop("xaxis", {})), "yaxis": _axis(y_title, layout.pop("yaxis", {}))}
    return {"data": data, "layout": {**axes, **layout}}


def _axis(title: str, more: Mapping[str, Any]) -> dict[str, Any]:
    return {"title": {"text": title}, "automargin": True, **more}


def escaped_for_plotly(text: str) -> str:
    """Text that Plotly shows as it is, which reads a few tags.

    Examples
    --------
    >>> escaped_for_plotly("a<b> & c")
    'a&lt;b&gt; &amp; c'
    """
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
