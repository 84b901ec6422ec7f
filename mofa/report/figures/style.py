"""Colours, names and axes that the figures share; pyplot, and with it global state, is never touched."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mofa.plan.result import Plan

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
    "stragglers": "#636363",
    "optimizer": "#31a354",
}
"""Computing is blue, recomputation purple, communication orange, waiting grey, the optimizer green."""


@dataclass(frozen=True)
class AreaFill:
    """How an area is filled: its colour, and a hatch with the colour of its lines and of its edge."""

    colour: str
    hatch: str = ""

    @property
    def edge_colour(self) -> str:
        """White between plain areas; dark where it draws the hatch as well."""
        return "#444444" if self.hatch else "white"


_MEMORY_FILLS = {
    "parameters": AreaFill("#08519c"),
    "gradients": AreaFill("#9ecae1"),
    "optimizer_states": AreaFill("#41ab5d"),
    "activations": AreaFill("#e6550d"),
    "weight_copies": AreaFill("#4292c6", "\\\\\\\\"),
    "buffers": AreaFill("#fdae6b", "...."),
    "temporaries": AreaFill("#fee391", "xxxx"),
    "allocator_slack": AreaFill("#9e9ac8", "----"),
    "cuda_context": AreaFill("#d9d9d9", "||||"),
    "communicators": AreaFill("#252525"),
}
"""Plain areas differ in how dark they are and the rest in their hatch, to be told apart in print too; ``/`` is the
margin's."""
_SPARE_FILLS = (
    AreaFill("#41b6c4", "++++"), AreaFill("#c994c7", "oooo"), AreaFill("#c7a16b", "**"), AreaFill("#f768a1", "OO"),
)  # fmt: skip
INK, ACCENT, MUTED = "#222222", "#cb181d", "#9ecae1"


def memory_fills(components: Iterable[str]) -> dict[str, AreaFill]:
    """A fill per component of memory; a component without its own takes a spare one, by order.

    Examples
    --------
    >>> memory_fills(["parameters", "logits"])
    {'parameters': AreaFill(colour='#08519c', hatch=''), 'logits': AreaFill(colour='#41b6c4', hatch='++++')}
    """
    names = list(components)
    spare = [name for name in names if name not in _MEMORY_FILLS]
    others = {name: _SPARE_FILLS[i % len(_SPARE_FILLS)] for i, name in enumerate(spare)}
    return {name: _MEMORY_FILLS.get(name) or others[name] for name in names}


def distinct_names_in_order(dicts: Iterable[Iterable[str]]) -> list[str]:
    """Names of several mappings without repeats, in order of first appearance."""
    return list(dict.fromkeys(name for names in dicts for name in names))


def given_or_new_axes(ax: Axes | None, width_in: float = 8.0, height_in: float = 5.0) -> Axes:
    """These axes, or new ones on a figure of their own that no global registry knows."""
    if ax is not None:
        return ax
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    return figure.subplots()


def remove_clutter(ax: Axes, *, grid_axis: str) -> None:
    """Take away what carries no information: two spines, tick marks, half of the grid."""
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.grid(visible=True, axis=grid_axis, color="#e5e5e5", linewidth=0.8)  # type: ignore[arg-type]
    ax.set_axisbelow(True)
    ax.tick_params(length=0)


def plan_labels(plans: Iterable[Plan]) -> list[str]:
    """Short names of plans for an axis."""
    from mofa.report.phrases import strategy_in_two_lines

    return [f"{i}: {strategy_in_two_lines(plan.strategy)}" for i, plan in enumerate(plans, start=1)]
