"""What policies for the number of token chunks cost over the iterations: throughput and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mofa.report.figures.style import ACCENT, INK, given_or_new_axes, remove_clutter
from mofa.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mofa.search.experts.token_chunks import ChunkPolicy, ChunkReport

WORDS = {"mact": "mact, sees the iteration", "past": "sees past iterations alone"}
_FIXED = ("#c6dbef", "#9ecae1", "#6baed6", "#3182bd", "#08519c", "#08306b")


def plot_throughput(report: ChunkReport, *, ax: Axes | None = None) -> Axes:
    """Plot the throughput of every iteration, a line a policy, as MemFine's figure 4; dotted where one does not fit.

    Parameters
    ----------
    report
        What was chosen.
    ax
        Axes to draw on; new ones where absent.
    """
    ax = _lines(report, lambda p: report.tokens_per_gpu / np.array(p.steps_s), given_or_new_axes(ax, 9.0, 4.5))
    ax.set_ylabel("tokens/s/GPU")
    ax.set_title(f"{report.workload}: throughput, {report.routing} (dotted: does not fit)", loc="left")
    _legend_above(ax)
    return ax


def plot_policy_memory(report: ChunkReport, *, ax: Axes | None = None) -> Axes:
    """Plot the fullest rank's memory of every iteration, a line a policy, and the limit.

    Parameters
    ----------
    report
        What was chosen.
    ax
        Axes to draw on; new ones where absent.
    """
    ax = _lines(report, lambda p: np.array(p.peaks_bytes) / GIB, given_or_new_axes(ax, 9.0, 4.5))
    ax.axhline(report.limit_bytes / GIB, color=ACCENT, linewidth=1.0, label="limit")
    ax.set_ylabel("memory of the fullest rank [GiB]")
    ax.set_title(f"{report.workload}: memory, {report.routing}", loc="left")
    _legend_above(ax)
    return ax


def _lines(report: ChunkReport, of: Callable[[ChunkPolicy], NDArray[np.float64]], ax: Axes) -> Axes:
    for number, policy in enumerate(report.policies):
        values = of(policy)
        ax.plot(
            np.arange(len(values)), values, marker="o", markersize=3, linestyle="-" if policy.fits else ":",
            color=_colour(policy, number), linewidth=1.8 if policy.name == "mact" else 1.0, label=_label(policy),
        )  # fmt: skip
    label_whole_iterations(ax)
    remove_clutter(ax, grid_axis="y")
    return ax


def _legend_above(ax: Axes) -> None:
    """A legend over the lines, with room made for its rows."""
    low, high = ax.get_ylim()
    ax.set_ylim(low, high + 0.2 * (high - low))
    ax.legend(frameon=False, fontsize=8, ncols=4, loc="upper left")


def label_whole_iterations(ax: Axes) -> None:
    """Label the x axis as iterations, with ticks at whole numbers alone however few there are."""
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.set_xlabel("iteration")


def _colour(policy: ChunkPolicy, number: int) -> str:
    return {"mact": INK, "past": "#e6550d"}.get(policy.name) or _FIXED[min(number, len(_FIXED) - 1)]


def _label(policy: ChunkPolicy) -> str:
    return WORDS.get(policy.name, policy.name)
