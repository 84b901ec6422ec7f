"""Where the steps of plans go: exposed seconds stacked to the step, hidden seconds hatched beneath."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mofa.report.figures.style import (
    TIME_COLOURS,
    distinct_names_in_order,
    given_or_new_axes,
    plan_labels,
    remove_clutter,
)
from mofa.report.phrases import component_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mofa.plan.result import Plan


def plot_time_breakdown(plans: Sequence[Plan], *, labels: Sequence[str] | None = None, ax: Axes | None = None) -> Axes:
    """Plot the step of each plan as a bar of its exposed parts over a thin, hatched bar of its hidden parts.

    Parameters
    ----------
    plans
        The plans, best first.
    labels
        A name per plan; its strategy where absent.
    ax
        Axes to draw on; new ones where absent.
    """
    ax = given_or_new_axes(ax, 10.0, 1.9 + 0.55 * len(plans))
    rows = np.arange(len(plans), dtype=np.float64)
    hidden_names = distinct_names_in_order(plan.time.hidden for plan in plans)
    names = [*TIME_COLOURS, *(name for name in hidden_names if name not in TIME_COLOURS)]
    left_exposed, left_hidden = np.zeros(len(plans)), np.zeros(len(plans))
    for name in names:
        colour = TIME_COLOURS.get(name, "#cccccc")
        exposed = np.array([dict(plan.time.exposed).get(name, 0.0) for plan in plans])  # type: ignore[call-overload]
        hidden = np.array([plan.time.hidden.get(name, 0.0) for plan in plans])
        if exposed.any():
            ax.barh(rows - 0.12, exposed, 0.46, left_exposed, color=colour, edgecolor="white", linewidth=0.4,
                    label=component_words(name))  # fmt: skip
        if hidden.any():
            ax.barh(rows + 0.26, hidden, 0.22, left_hidden, facecolor="white", edgecolor=colour, linewidth=0.8,
                    hatch="//////", label=f"{component_words(name)}, hidden")  # fmt: skip
        left_exposed += exposed
        left_hidden += hidden
    for row, plan in zip(rows, plans, strict=True):
        ax.annotate(f"{plan.step_s:.3g} s", (plan.step_s, row - 0.12), (4, 0), textcoords="offset points", va="center",
                    fontsize=8)  # fmt: skip
    ax.set_yticks(rows, labels if labels is not None else plan_labels(plans), fontsize=8)
    ax.invert_yaxis()
    ax.margins(x=0.1)
    ax.set_xlim(left=0.0)
    ax.set_xlabel("time of the slowest rank per step [s]; hatched: hidden behind computing")
    ax.set_title("Where the step goes", loc="left")
    remove_clutter(ax, grid_axis="x")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return ax
