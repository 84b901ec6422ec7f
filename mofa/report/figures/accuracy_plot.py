"""Predicted against measured, log-log, with bands of 5 and 10 percent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mofa.report.figures.style import INK, given_or_new_axes, remove_clutter
from mofa.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mofa.validate.validation_report import RunScore

GROUP_COLOURS = (
    "#08519c", "#cb181d", "#31a354", "#e6550d", "#807dba", "#636363", "#c7a16b", "#41b6c4", "#c994c7", "#525252",
    "#9e9ac8", "#fdae6b",
)  # fmt: skip
BANDS = ((0.10, "#eeeeee"), (0.05, "#d9d9d9"))
WORDS = {
    "step_time": ("step time", "s", 1.0),
    "peak_allocated": ("peak allocated memory", "GiB", GIB),
    "peak_reserved": ("peak reserved memory", "GiB", GIB),
    "peak_device": ("peak memory of the device", "GiB", GIB),
}


def plot_accuracy(runs: Sequence[RunScore], field: str, *, ax: Axes | None = None) -> Axes:
    """Plot one dot a run, coloured by group.

    Parameters
    ----------
    runs
        Scored runs; those without a measurement of the quantity are left out.
    field
        ``step_time``, ``peak_allocated``, ``peak_reserved`` or ``peak_device``.
    ax
        Axes to draw on; new ones where absent.
    """
    name, unit, scale = WORDS[field]
    ax = given_or_new_axes(ax, 8.0, 6.0)
    compared = [(run.group, getattr(run, field)) for run in runs if getattr(run, field) is not None]
    values = np.array([v for _, c in compared for v in (c.measured, c.predicted)]) / scale
    ends = np.array([values.min() / 1.5, values.max() * 1.5])
    for width, colour in BANDS:
        ax.fill_between(ends, ends * (1 - width), ends * (1 + width), color=colour, linewidth=0, label=f"±{width:.0%}")
    ax.plot(ends, ends, color=INK, linewidth=0.8)
    for i, group in enumerate(dict.fromkeys(group for group, _ in compared)):
        own = [c for g, c in compared if g == group]
        error = np.mean([abs(c.error) for c in own])
        ax.plot(
            [c.measured / scale for c in own], [c.predicted / scale for c in own], "o", markersize=4,
            color=GROUP_COLOURS[i % len(GROUP_COLOURS)], markeredgecolor="white", markeredgewidth=0.4,
            label=f"{group} ({len(own)}), mean {error:.1%}",
        )  # fmt: skip
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(*ends)
    ax.set_ylim(*ends)
    ax.set_xlabel(f"measured [{unit}]")
    ax.set_ylabel(f"predicted [{unit}]")
    ax.set_title(f"Predicted and measured {name}", loc="left")
    remove_clutter(ax, grid_axis="both")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return ax
