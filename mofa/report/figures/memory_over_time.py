"""Memory of one rank over a step, stacked by kind, its peak marked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mofa.report.figures.style import ACCENT, INK, given_or_new_axes, memory_fills, remove_clutter
from mofa.report.phrases import component_words, strategy_short
from mofa.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mofa.plan.result import Plan

LABELLED = 0.9
"""Share of the height that is drawn on; the label of the peak is above it. [-]"""


def plot_memory_over_time(plan: Plan, stage: int, *, label: str | None = None, ax: Axes | None = None) -> Axes:
    """Plot what is allocated over a step by kind, what is reserved, what the device has, and where the peak is.

    Parameters
    ----------
    plan
        A replayed plan whose stage has a curve.
    stage
        The pipeline stage.
    label
        Name of the plan; its strategy where absent.
    ax
        Axes to draw on; new ones where absent.

    Raises
    ------
    ValueError
        If the stage has no curve.
    """
    of = plan.memory.by_stage[stage]
    curve = of.curve
    if curve is None:
        raise ValueError(f"stage {stage} has no memory curve; replay the plan")
    ax = given_or_new_axes(ax, 9.0, 4.5)
    time_s = np.asarray(curve.time_s)
    names = [name for name, values in curve.kinds.items() if any(values)]
    fills = memory_fills(names)
    sizes = [np.asarray(curve.kinds[name]) / GIB for name in names]
    areas = ax.stackplot(time_s, sizes, labels=[component_words(name) for name in names], linewidth=0.3)
    for area, name in zip(areas, names, strict=True):
        area.set(facecolor=fills[name].colour, edgecolor=fills[name].edge_colour, hatch=fills[name].hatch)
    ax.plot(time_s, np.asarray(curve.reserved_bytes) / GIB, color=INK, linewidth=1.2, label="reserved")
    outside = of.device_bytes - of.reserved_bytes
    room_gib = (plan.memory.capacity_bytes - outside) / GIB
    ax.axhline(room_gib, color=ACCENT, linewidth=1.2, label=f"room beside context and communicators {room_gib:.1f} GiB")
    top = sum(size[curve.peak] for size in sizes)
    ax.plot([time_s[curve.peak]], [top], marker="v", color=INK, linestyle="none")
    early = time_s[curve.peak] < time_s[-1] / 2
    ax.annotate(  # above all lines, where nothing is drawn
        f"{top:.1f} GiB: {of.instant}", (time_s[curve.peak], top), (0.02 if early else 0.98, 0.98),
        textcoords="axes fraction", ha="left" if early else "right", va="top", fontsize=8,
        bbox={"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none"},  # over the grid
        arrowprops={
            "arrowstyle": "-", "color": INK, "linewidth": 0.6, "shrinkA": 1.0, "shrinkB": 3.0,
            "relpos": (0.0 if early else 1.0, 0.0),
        },
    )  # fmt: skip
    ax.set_xlim(0.0, float(time_s[-1]))
    ax.set_ylim(0.0, max(room_gib, top, max(curve.reserved_bytes) / GIB) / LABELLED)
    ax.set_xlabel("time in the step [s]")
    ax.set_ylabel("memory of the allocator [GiB]")
    ax.set_title(
        f"Memory over a step, stage {stage}: {label or strategy_short(plan.strategy)}", loc="left", fontsize=10
    )
    remove_clutter(ax, grid_axis="y")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return ax
