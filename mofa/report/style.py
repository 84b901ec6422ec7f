"""Colours, names and axes that the figures share; pyplot, and with it global state, is never touched."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mofa.search.result import Plan

TIME_COLOURS = {
    "gemm": "#08519c",
    "grouped_gemm": "#3182bd",
    "attention": "#6baed6",
    "memory_bound": "#bdd7e7",
    "recompute": "#807dba",
    "host_idle": "#969696",
    "tp": "#a63603",
    "cp": "#e6550d",
    "ep": "#fd8d3c",
    "pp": "#fdbe85",
    "dp": "#fee391",
    "bubble": "#d9d9d9",
    "optimizer": "#31a354",
}
"""Computing is blue, recomputation purple, communication orange, waiting grey, the optimizer green."""

_MEMORY_COLOURS = {
    "weight": "#08519c",
    "weight_copy": "#3182bd",
    "grad": "#6baed6",
    "state": "#31a354",
    "activation": "#e6550d",
    "buffer": "#fd8d3c",
    "scratch": "#fdbe85",
    "allocator_slack": "#807dba",
    "context": "#969696",
    "communicators": "#636363",
}
_SPARE_COLOURS = ("#74c476", "#9e9ac8", "#c7a16b", "#c994c7", "#41b6c4", "#a1d99b", "#bcbddc", "#525252")
INK, ACCENT, MUTED = "#222222", "#cb181d", "#9ecae1"


def memory_colours(components: Iterable[str]) -> dict[str, str]:
    """A colour per component of memory; a component without its own takes a spare one, by order.

    Examples
    --------
    >>> memory_colours(["context", "logits"])
    {'context': '#969696', 'logits': '#74c476'}
    """
    spare = 0
    colours = {}
    for name in components:
        key = name.removesuffix("_bytes")
        if key not in _MEMORY_COLOURS and key.removesuffix("s") in _MEMORY_COLOURS:
            key = key.removesuffix("s")
        if key in _MEMORY_COLOURS:
            colours[name] = _MEMORY_COLOURS[key]
        else:
            colours[name] = _SPARE_COLOURS[spare % len(_SPARE_COLOURS)]
            spare += 1
    return colours


def ordered_names(dicts: Iterable[Iterable[str]]) -> list[str]:
    """Names of several mappings without repeats, in order of first appearance."""
    return list(dict.fromkeys(name for names in dicts for name in names))


def new_axes(ax: Axes | None, width_in: float = 8.0, height_in: float = 5.0) -> Axes:
    """These axes, or new ones on a figure of their own that no global registry knows."""
    if ax is not None:
        return ax
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    return figure.subplots()


def tidy(ax: Axes, *, grid_axis: str) -> None:
    """Take away what carries no information: two spines, tick marks, half of the grid."""
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.grid(visible=True, axis=grid_axis, color="#e5e5e5", linewidth=0.8)  # type: ignore[arg-type]
    ax.set_axisbelow(True)
    ax.tick_params(length=0)


def plan_labels(plans: Iterable[Plan]) -> list[str]:
    """Short names of plans for an axis."""
    from mofa.report.words import strategy_short

    return [f"{i}: {strategy_short(plan.strategy)}" for i, plan in enumerate(plans, start=1)]
