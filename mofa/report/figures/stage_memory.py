"""Memory of the fullest rank of every pipeline stage of one plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mofa.report.figures.style import ACCENT, distinct_names_in_order, given_or_new_axes, memory_fills, remove_clutter
from mofa.report.phrases import component_words, strategy_short
from mofa.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mofa.plan.result import Plan


def plot_stage_memory(plan: Plan, *, label: str | None = None, ax: Axes | None = None) -> Axes:
    """Plot a stacked bar per pipeline stage, the number of its layers above it, and the capacity.

    Parameters
    ----------
    plan
        The plan; its ``memory.by_stage`` holds the stages.
    label
        Name of the plan; its strategy where absent.
    ax
        Axes to draw on; new ones where absent.
    """
    stages = plan.memory.by_stage
    ax = given_or_new_axes(ax, max(6.5, 3.5 + 0.3 * len(stages)), 4.5)
    x = np.arange(len(stages), dtype=np.float64)
    bottom = np.zeros(len(stages))
    for name, fill in memory_fills(distinct_names_in_order(stage.by_component for stage in stages)).items():
        size = np.array([stage.by_component.get(name, 0.0) for stage in stages]) / GIB
        if size.any():
            ax.bar(
                x, size, 0.75, bottom, color=fill.colour, edgecolor=fill.edge_colour, hatch=fill.hatch, linewidth=0.4,
                label=component_words(name),
            )  # fmt: skip
        bottom += size
    for i, stage in enumerate(stages):
        ax.annotate(
            str(stage.num_layers), (x[i], bottom[i]), (0, 2), textcoords="offset points", ha="center", fontsize=7
        )
    capacity = plan.memory.capacity_bytes / GIB
    ax.axhline(capacity, color=ACCENT, linewidth=1.2, label=f"capacity {capacity:.1f} GiB")
    limit = plan.memory.limit_bytes / GIB
    ax.axhline(limit, color=ACCENT, linewidth=1.0, linestyle="--", label="limit")
    step = max(1, len(stages) // 16)
    ax.set_xticks(x[::step], [str(stage.stage) for stage in stages[::step]])
    ax.set_xlabel("pipeline stage (above each bar: its layers)")
    ax.set_ylabel("device memory [GiB]")
    ax.set_title(f"Memory per stage: {label or strategy_short(plan.strategy)}", loc="left", fontsize=10)
    remove_clutter(ax, grid_axis="y")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return ax
