"""The kernels of a micro-batch against what the GPU can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mofa.report.figures.style import ACCENT, INK, TIME_COLOURS, given_or_new_axes, remove_clutter
from mofa.report.phrases import component_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mofa.plan.plan_analysis import Roofline

TERA = 1e12
MARKERS = {"gemm": "o", "grouped_gemm": "s", "attention": "D"}
"""Told apart in print too."""


def plot_roofline(roofline: Roofline, *, ax: Axes | None = None) -> Axes:
    """Plot the roof of the datasheet, and below it every kind of kernel that computes.

    Parameters
    ----------
    roofline
        Of :attr:`mofa.plan.plan_analysis.PlanAnalysis.roofline`.
    ax
        Axes to draw on; new ones where absent.
    """
    ax = given_or_new_axes(ax, 8.0, 4.5)
    bandwidth = roofline.memory_bandwidth_bytes_per_s
    peak = max(point.peak_flops_per_s for point in roofline.points)
    computing = [point for point in roofline.points if point.flops]
    ridge = peak / bandwidth
    ends = [ridge / 64, ridge, max([64 * ridge, *(2 * point.flops_per_byte for point in computing)])]
    ax.plot(ends, [min(peak, x * bandwidth) / TERA for x in ends], color=ACCENT, linewidth=1.4, label="roof")
    for point in computing:
        x, y = point.flops_per_byte, point.flops_per_s / TERA
        ax.plot([x], [y], MARKERS[point.kind], color=TIME_COLOURS[point.kind], markersize=9, markeredgecolor=INK,
                linestyle="none", label=component_words(point.kind))  # fmt: skip
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("FLOP per byte")
    ax.set_ylabel("TFLOP/s of a GPU")
    ax.set_title("Kernels of a micro-batch against the roof of the datasheet", loc="left")
    remove_clutter(ax, grid_axis="both")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return ax
