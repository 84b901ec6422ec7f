"""ETTR and effective throughput against the number of GPUs, a line per way to keep checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from mofa.report.figures.style import INK, given_or_new_axes, remove_clutter
from mofa.report.goodput import variant_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mofa.plan.goodput_by_scale import GoodputReport

Quantity = Literal["ettr", "throughput"]
STYLES = (("#636363", "-", "o", 4.5, 1.5), ("#3182bd", "-", "s", 9.0, 5.0), ("#9ecae1", "-", "^", 9.0, 5.0),
          ("#e6550d", "--", "D", 4.5, 1.5), ("#7f2704", ":", "v", 4.5, 1.8), ("#31a354", "-", "P", 5.0, 1.5),
          ("#74c476", "--", "X", 5.0, 1.5), ("#756bb1", "-.", "*", 6.0, 1.5))  # fmt: skip
"""One for each variant that a report may have. Colour, line, marker, its size and the line's width [pt]: lines are told
apart in print too, and where two are one the wide solid one shows under the thin broken one."""


def plot_goodput_curve(report: GoodputReport, quantity: Quantity = "ettr", *, ax: Axes | None = None) -> Axes:
    """Plot ETTR, or effective throughput with the failure-free one above it, against scale.

    Parameters
    ----------
    report
        What each scale gives.
    quantity
        ``ettr`` or ``throughput``.
    ax
        Axes to draw on; new ones where absent.
    """
    ax = given_or_new_axes(ax, 8.5, 5.0)
    points = [point for point in report.points if point.variants]
    gpus = [point.num_gpus for point in points]
    names = variant_names(report)
    if quantity == "throughput":
        ax.plot(gpus, [p.tokens_per_s_per_gpu or 0.0 for p in points], color=INK, linewidth=1.0, linestyle=":",
                label="without failures")  # fmt: skip
    for name, (colour, line, marker, size, width) in zip(names, STYLES[: len(names)], strict=True):
        outcomes = [(point.num_gpus, point.variants[name]) for point in points if name in point.variants]
        values = [v.ettr if quantity == "ettr" else v.effective_tokens_per_s_per_gpu for _, v in outcomes]
        num_gpus = [n for n, _ in outcomes]
        ax.plot(num_gpus, values, line, color=colour, marker=marker, markersize=size, linewidth=width, label=name)
    ax.set_xscale("log", base=2)
    ax.set_xticks(gpus, [f"{n // 1024}K" if n % 1024 == 0 else f"{n:,}" for n in gpus])
    ax.minorticks_off()
    if quantity == "ettr":
        low = min(v.ettr for p in points for v in p.variants.values())
        ax.set_ylim(top=1.0 + 0.03 * (1 - low))  # room for markers at 1
    ax.set_xlabel("GPUs, spares included")
    ax.set_ylabel("ETTR" if quantity == "ettr" else "effective throughput [tokens/s/GPU, spares included]")
    what = "Productive share of the wall clock" if quantity == "ettr" else "Effective throughput"
    ax.set_title(f"{what}: {report.workload.name}, failures of {report.faults}", loc="left")
    remove_clutter(ax, grid_axis="both")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return ax
