"""What a tenth less and more of each resource does to a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mofa.report.figures.style import INK, given_or_new_axes, remove_clutter

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
    names = [change.resource for change in changes]
    less = [100.0 * change.step_change_less for change in changes]
    more = [100.0 * change.step_change_more for change in changes]
    title = "The same strategy with a tenth less and more of each resource"
    return draw_less_and_more_bars(names, less, more, ("change of the step [%]", title), ax=ax)


def draw_less_and_more_bars(
    names: Sequence[str],
    less: Sequence[float],
    more: Sequence[float],
    words: tuple[str, str],
    *,
    ax: Axes | None = None,
) -> Axes:
    """Draw two bars for each name.

    Parameters
    ----------
    names
        Of resources, the strongest first.
    less, more
        What a tenth less and a tenth more of each does; NaN leaves a bar out. [%]
    words
        Under the axis, and above the figure.
    ax
        Axes to draw on; new ones where absent.
    """
    ax = given_or_new_axes(ax, 8.0, 1.4 + 0.4 * len(names))
    rows = np.arange(len(names), dtype=np.float64)
    ax.barh(rows, less, 0.6, color=SLOWER, edgecolor="white", hatch="////", label="10 % less")
    ax.barh(rows, more, 0.6, color=FASTER, edgecolor="white", label="10 % more")
    ax.axvline(0.0, color=INK, linewidth=1.0)
    ax.set_yticks(rows, names, fontsize=9)
    ax.invert_yaxis()
    ax.set_xlabel(words[0])
    ax.set_title(words[1], loc="left")
    remove_clutter(ax, grid_axis="x")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return ax
