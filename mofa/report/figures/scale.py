"""Efficiency against the number of GPUs: published series, measured and predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mofa.report.figures.accuracy_plot import GROUP_COLOURS
from mofa.report.figures.style import given_or_new_axes, remove_clutter

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mofa.validate.validation_report import ScaleSeries


def plot_scale(series: Sequence[ScaleSeries], *, ax: Axes | None = None) -> Axes:
    """Plot a solid line of what was measured and a dashed one of what is predicted for each series.

    Parameters
    ----------
    series
        Of :attr:`mofa.validate.validation_report.ValidationReport.scale`.
    ax
        Axes to draw on; new ones where absent.
    """
    ax = given_or_new_axes(ax, 8.0, 5.0)
    for i, each in enumerate(series):
        gpus = [point.num_gpus for point in each.points]
        colour = GROUP_COLOURS[i % len(GROUP_COLOURS)]
        name = f"{each.model}, {gpus[0]} to {gpus[-1]} {each.gpu}, drift {each.step_error_drift:+.1%}"
        ax.plot(
            gpus,
            each.scaling_efficiencies(predicted=False),
            "o-",
            color=colour,
            markersize=4,
            linewidth=1.2,
            label=name,
        )
        ax.plot(gpus, each.scaling_efficiencies(predicted=True), "s--", color=colour, markersize=3, linewidth=1.0)
    ax.set_xscale("log", base=2)
    most = max(point.num_gpus for each in series for point in each.points)
    counts = [2**k for k in range(3, most.bit_length() + 1) if 2**k <= most]
    ax.set_xticks(counts, [f"{count:,}" for count in counts])
    ax.set_xlabel("GPUs")
    ax.set_ylabel("rate of a GPU over that on the fewest")
    ax.set_title("Efficiency against scale: measured solid, predicted dashed", loc="left")
    remove_clutter(ax, grid_axis="both")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return ax
