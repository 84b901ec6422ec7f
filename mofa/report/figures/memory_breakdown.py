"""What fills the memory of the fullest rank of plans, against the capacity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mofa.report.figures.style import (
    ACCENT,
    distinct_names_in_order,
    given_or_new_axes,
    memory_fills,
    plan_labels,
    remove_clutter,
)
from mofa.report.phrases import component_words
from mofa.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mofa.plan.result import Plan


def plot_memory_breakdown(
    plans: Sequence[Plan], *, labels: Sequence[str] | None = None, ax: Axes | None = None
) -> Axes:
    """Plot the device memory of each plan's fullest rank as a stacked bar, its margin hatched, and the capacity.

    Parameters
    ----------
    plans
        The plans, best first.
    labels
        A name per plan; its strategy where absent.
    ax
        Axes to draw on; new ones where absent.
    """
    ax = given_or_new_axes(ax, 9.0, 1.9 + 0.45 * len(plans))
    rows = np.arange(len(plans), dtype=np.float64)
    names = distinct_names_in_order(plan.memory.by_component for plan in plans)
    left = np.zeros(len(plans))
    for name, fill in memory_fills(names).items():
        size = np.array([plan.memory.by_component.get(name, 0.0) for plan in plans]) / GIB
        if size.any():
            ax.barh(
                rows, size, 0.62, left, color=fill.colour, edgecolor=fill.edge_colour, hatch=fill.hatch, linewidth=0.4,
                label=component_words(name),
            )  # fmt: skip
        left += size
    margin = np.array([plan.memory.margin_bytes for plan in plans]) / GIB
    ax.barh(
        rows, margin, 0.62, left, facecolor="none", edgecolor="#888888", linewidth=0.6, hatch="/////", label="margin"
    )
    for i, capacity in enumerate(sorted({plan.memory.capacity_bytes / GIB for plan in plans})):
        ax.axvline(capacity, color=ACCENT, linewidth=1.2, label="capacity" if i == 0 else None)
    ax.set_yticks(rows, labels if labels is not None else plan_labels(plans), fontsize=8)
    ax.invert_yaxis()
    ax.set_xlabel("device memory of the fullest rank [GiB]")
    ax.set_title("What fills the memory", loc="left")
    remove_clutter(ax, grid_axis="x")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return ax
