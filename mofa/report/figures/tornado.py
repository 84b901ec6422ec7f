"""Which factors move the ETTR most: a bar from half to twice of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mofa.report.figures.style import INK, given_or_new_axes, remove_clutter

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mofa.plan.goodput_by_scale import GoodputReport

HALVED, DOUBLED = "#3182bd", "#e6550d"


def plot_tornado(report: GoodputReport, *, ax: Axes | None = None) -> Axes:
    """Plot the ETTR with each factor halved and doubled, the strongest on top.

    Parameters
    ----------
    report
        With its sensitivity.
    ax
        Axes to draw on; new ones where absent.
    """
    factors = report.sensitivity
    ax = given_or_new_axes(ax, 8.0, 1.4 + 0.38 * len(factors))
    rows = np.arange(len(factors), dtype=np.float64)
    base = report.sensitivity_ettr
    for values, colour, hatch, label in (
        ([item.ettr_halved for item in factors], HALVED, "", "halved"),
        ([item.ettr_doubled for item in factors], DOUBLED, "////", "doubled"),
    ):
        ax.barh(rows, np.array(values) - base, 0.6, base, color=colour, edgecolor="white", hatch=hatch, label=label)
    ax.axvline(base, color=INK, linewidth=1.0)
    ax.set_yticks(rows, [item.factor for item in factors], fontsize=9)
    ax.invert_yaxis()
    ax.locator_params(axis="x", nbins=6)
    ax.set_xlabel("ETTR")
    what = f"{report.workload.name}, failures of {report.faults}"
    ax.set_title(f"Key factors at {report.sensitivity_num_gpus:,} GPUs: {what}", loc="left")
    remove_clutter(ax, grid_axis="x")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return ax
