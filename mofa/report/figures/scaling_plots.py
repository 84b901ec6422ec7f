"""Strong and weak scaling of a sweep: throughput against GPUs at one batch, and at one batch for each GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mofa.report.figures.accuracy_plot import GROUP_COLOURS
from mofa.report.figures.style import given_or_new_axes, remove_clutter
from mofa.report.sweep_text import CHOICE, JOB, Row, differing_columns, label_value_text, rows_of_sweep

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

MOST_SERIES = 10
"""Lines of a plot at most: so many colours are told from each other. [-]"""

NOT_OF_SERIES = ("num_gpus", "global_batch", "usd_per_gpu_hour", "price_case")
"""Labels in which the points of a line may differ; a price changes no throughput."""


def strong_scaling_series(table: pd.DataFrame) -> dict[str, list[Row]]:
    """Points that differ in nothing but their GPUs, by what they have in common, the fewest GPUs first.

    Parameters
    ----------
    table
        Of :func:`mofa.search.sweeps.run_sweep.sweep`.
    """
    return _series(table, lambda row: row["global_batch"])


def weak_scaling_series(table: pd.DataFrame) -> dict[str, list[Row]]:
    """Points whose batch grows as their GPUs, by what they have in common, the fewest GPUs first."""
    return _series(table, lambda row: row["global_batch"] / row["num_gpus"])


def _series(table: pd.DataFrame, batch: Any) -> dict[str, list[Row]]:
    rows = [row for row in rows_of_sweep(table) if row["status"] == "planned"]
    names = tuple(n for n in (*JOB, *CHOICE) if n not in NOT_OF_SERIES)
    groups: dict[tuple[Any, ...], dict[int, Row]] = {}
    for row in rows:
        groups.setdefault((*(row[name] for name in names), batch(row)), {})[row["num_gpus"]] = row
    series = {key: [by_gpus[n] for n in sorted(by_gpus)] for key, by_gpus in groups.items() if len(by_gpus) > 1}
    firsts = [points[0] for points in series.values()]
    label_names = differing_columns(firsts, names) or ["model"]
    several_batches = len({key[-1] for key in series}) > 1
    out: dict[str, list[Row]] = {}
    for key, points in series.items():
        text = ", ".join(label_value_text(name, points[0][name]) for name in label_names)
        out[f"{text}, batch {key[-1]:,.6g}" if several_batches else text] = points
    return out


def plot_strong_scaling(table: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Plot tokens per second against GPUs at one batch, dashed what the fewest GPUs would give on more.

    Parameters
    ----------
    table
        Of :func:`mofa.search.sweeps.run_sweep.sweep`.
    ax
        Axes to draw on; new ones where absent.
    """
    series = strong_scaling_series(table)
    ax = given_or_new_axes(ax, 8.0, 5.0)
    for colour, (name, points) in zip(GROUP_COLOURS * 2, list(series.items())[:MOST_SERIES], strict=False):
        gpus = [point["num_gpus"] for point in points]
        ax.plot(gpus, [point["tokens_per_s"] for point in points], "o-", color=colour, markersize=4, label=name)
        rate = points[0]["tokens_per_s"] / gpus[0]
        ax.plot(gpus, [rate * number for number in gpus], "--", color=colour, linewidth=0.9)
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.set_ylabel("throughput [tokens/s]")
    return _finished(ax, series, "Strong scaling at one batch; dashed in proportion to GPUs")


def plot_weak_scaling(table: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Plot a GPU's throughput against GPUs at one batch for each, over that on the fewest.

    Parameters
    ----------
    table
        Of :func:`mofa.search.sweeps.run_sweep.sweep`.
    ax
        Axes to draw on; new ones where absent.
    """
    series = weak_scaling_series(table)
    ax = given_or_new_axes(ax, 8.0, 5.0)
    for colour, (name, points) in zip(GROUP_COLOURS * 2, list(series.items())[:MOST_SERIES], strict=False):
        gpus = [point["num_gpus"] for point in points]
        rates = [point["tokens_per_s"] / point["num_gpus"] for point in points]
        ax.plot(gpus, [rate / rates[0] for rate in rates], "o-", color=colour, markersize=4, label=name)
    ax.set_ylim(0.0, 1.05 * max(1.0, ax.get_ylim()[1]))
    ax.set_ylabel("rate of a GPU over that on the fewest")
    return _finished(ax, series, "Weak scaling: the batch grows with the GPUs")


def _finished(ax: Axes, series: dict[str, list[Row]], title: str) -> Axes:
    ax.set_xscale("log", base=2)
    counts = sorted({point["num_gpus"] for points in series.values() for point in points})
    ax.set_xticks(counts, [f"{count:,}" for count in counts])
    ax.minorticks_off()
    ax.set_xlabel("GPUs")
    left_out = f" ({MOST_SERIES} of {len(series)} series)" if len(series) > MOST_SERIES else ""
    ax.set_title(title + left_out, loc="left")
    remove_clutter(ax, grid_axis="both")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return ax
