"""What a tenth less and more of each resource does to a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mofa.report.figures.style import INK, new_axes, remove_clutter

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mofa.plan.plan_analysis import ResourceChange

SLOWER, FASTER = "#e6550d", "#3182bd"


def plot_resource_changes(changes: Sequence[ResourceChange], *, ax: Axes | None = None) -> Axes:
    """Plot a bar to either side for each resource, the strongest on top.

    Parameters
    ----------
    changes
        Of :attr:`mofa.plan.plan_analysis.PlanAnalysis.resources`.
    ax
        Axes to draw on; new ones where absent.
    """
    ax = new_axes(ax, 8.0, 1.4 + 0.4 * len(changes))
    rows = np.arange(len(changes), dtype=np.float64)
    less = [100.0 * change.step_change_less for change in changes]
    more = [100.0 * change.step_change_more for change in changes]
    ax.barh(rows, less, 0.6, color=SLOWER, edgecolor="white", hatch="////", label="10 % less")
    ax.barh(rows, more, 0.6, color=FASTER, edgecolor="white", label="10 % more")
    ax.axvline(0.0, color=INK, linewidth=1.0)
    ax.set_yticks(rows, [change.resource for change in changes], fontsize=9)
    ax.invert_yaxis()
    ax.set_xlabel("change of the step [%]")
    ax.set_title("The same strategy with a tenth less and more of each resource", loc="left")
    remove_clutter(ax, grid_axis="x")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return ax
