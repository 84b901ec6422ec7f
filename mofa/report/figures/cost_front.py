"""Cost against days of the points of a sweep, with the front that no other point beats in both."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import NullFormatter

from mofa.report.figures.accuracy_plot import GROUP_COLOURS
from mofa.report.figures.pareto import pareto_front
from mofa.report.figures.scaling_plots import MOST_SERIES
from mofa.report.figures.style import INK, given_or_new_axes, remove_clutter
from mofa.report.sweep_text import (
    JOB,
    Row,
    cost_column,
    differing_columns,
    jobs_of_sweep,
    label_value_text,
    rows_of_sweep,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


def jobs_with_days(table: pd.DataFrame) -> list[list[Row]]:
    """Points of each job whose days are known, for jobs with two or more of them.

    Parameters
    ----------
    table
        Of :func:`mofa.search.sweeps.run_sweep.sweep`.
    """
    known = [row for row in rows_of_sweep(table) if row["days"] is not None]
    return [group for group in jobs_of_sweep(known) if len(group) > 1]


def plot_cost_front(table: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Plot every point as a dot of its job's colour, and each job's front.

    Parameters
    ----------
    table
        Of :func:`mofa.search.sweeps.run_sweep.sweep`; jobs have two points with days or are left out.
    ax
        Axes to draw on; new ones where absent.
    """
    groups = jobs_with_days(table)
    ax = given_or_new_axes(ax, 8.0, 5.0)
    column = cost_column([row for group in groups for row in group])
    label_names = differing_columns([group[0] for group in groups], JOB) or ["model"]
    for colour, group in zip(GROUP_COLOURS * 2, groups[:MOST_SERIES], strict=False):
        days = np.array([row["days"] for row in group], dtype=np.float64)
        cost = np.array([row[column] for row in group], dtype=np.float64)
        name = ", ".join(label_value_text(label, group[0][label]) for label in label_names)
        front = pareto_front(days, -cost)
        ax.plot(days, cost, "o", color=colour, markersize=5, label=name)
        ax.plot(days[front], cost[front], "-", color=colour, linewidth=1.0)
        others = differing_columns(group, ("cluster", "framework"))
        for i in front:
            text = " ".join([f"{group[i]['num_gpus']:,}", *(str(group[i][label]) for label in others)])
            ax.annotate(text, (days[i], cost[i]), textcoords="offset points", xytext=(4, 4),
                        fontsize=7, color=INK)  # fmt: skip
    ax.set_xscale("log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:,.0f}")
        axis.set_minor_formatter("{x:,.0f}" if axis is ax.xaxis else NullFormatter())
    ax.set_xlabel("days of the run")
    ax.set_ylabel("cost [USD]" if column == "usd" else "cost [GPU-hours]")
    left_out = f" ({MOST_SERIES} of {len(groups)} jobs)" if len(groups) > MOST_SERIES else ""
    ax.set_title(f"Cost against days; numbers are GPUs of points on the front{left_out}", loc="left")
    remove_clutter(ax, grid_axis="both")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return ax
