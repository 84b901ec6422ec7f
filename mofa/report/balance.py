"""What scheduled replicas do to the load of the fullest GPU: as text, and per layer as a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mofa.report.save import csv_bytes, figure_files, write_files
from mofa.report.style import ACCENT, INK, MUTED, new_axes, tidy
from mofa.report.text import print_table
from mofa.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from rich.console import Console

    from mofa.search.balance import BalanceReport

_STYLES = {
    "plain": ("plain expert parallelism", ACCENT, "-", "o"),
    "eplb": ("replicas by past loads (EPLB)", "#fd8d3c", "-", "s"),
    "micro_moe": ("scheduled replicas", "#08519c", "-", "o"),
    "micro_moe_adaptive": ("scheduled, adaptive placement", "#31a354", "-", "^"),
    "lower_bound": ("maximum induced density", INK, ":", ""),
}


def plot_balance(report: BalanceReport, *, ax: Axes | None = None) -> Axes:
    """Plot max over mean per layer for every scheme.

    Parameters
    ----------
    report
        What was balanced.
    ax
        Axes to draw on; new ones where absent.
    """
    ax = new_axes(ax, 9.0, 4.5)
    layers = np.array([row.layer for row in report.layers])
    for scheme, (label, colour, line, marker) in _STYLES.items():
        values = np.array([row.max_over_mean[scheme] for row in report.layers])
        ax.plot(layers, values, line, color=colour, marker=marker, markersize=4, linewidth=1.4, label=label)
    ax.axhline(1.0, color=MUTED, linewidth=1.0)
    if len(layers) == 1:
        ax.set_xticks(layers)
    ax.set_ylim(bottom=0.0)
    ax.set_xlabel("layer with experts")
    ax.set_ylabel("fullest GPU over the mean")
    group = report.group
    ax.set_title(
        f"{group.name}: {group.experts} experts on {group.gpus} GPUs, ep {group.ep}, {group.routing}", loc="left"
    )
    tidy(ax, grid_axis="both")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return ax


_NAMES = {
    "plain": "plain expert parallelism",
    "capacity": "plain, tokens beyond capacity dropped",
    "eplb": "replicas by past loads (EPLB)",
    "micro_moe_random": "scheduled, random placement",
    "micro_moe": "scheduled, symmetric placement",
    "micro_moe_adaptive": "scheduled, adaptive placement",
    "lower_bound": "maximum induced density",
}


def print_balance(report: BalanceReport, console: Console, *, quiet: bool = False) -> None:
    """Print the load of the fullest GPU under every scheme, the solver's time and the step before and after."""
    g = report.group
    rows = [
        [name, f"{report.max_over_mean[key]:.4f}", f"{report.worst_max_over_mean[key]:.4f}"]
        for key, name in _NAMES.items()
    ]
    columns = [("tokens of the fullest GPU over the mean", "left"), ("mean", "right"), ("worst", "right")]
    title = (
        f"{g.name}: {g.experts} experts on {g.gpus} GPUs, {g.merged} groups of ep {g.ep} merged, {g.routing}, "
        f"{g.micro_batches} micro-batches of {g.layers} layers"
    )
    print_table(console, title, columns, rows)
    if report.step is not None:
        s = report.step
        steps = [
            ["plain expert parallelism", format_seconds(s.before_s), "", format_bytes(s.before_bytes)],
            ["scheduled replicas", format_seconds(s.after_s), f"{s.gain_fraction:+.1%}", format_bytes(s.after_bytes)],
            ["on adaptive placements", format_seconds(s.adaptive_s), f"{s.before_s / s.adaptive_s - 1:+.1%}", ""],
            ["were routing balanced", format_seconds(s.balanced_s), f"{s.before_s / s.balanced_s - 1:+.1%}", ""],
        ]
        heads = [("step", "left"), ("time", "right"), ("throughput", "right"), ("fullest rank", "right")]
        print_table(console, s.strategy, heads, steps)
    if quiet:
        return
    a = report.adaptive
    settled = "none followed" if a.settled_max_over_mean is None else f"{a.settled_max_over_mean:.4f}"
    facts = [
        [f"solver ({g.solver}), warm", (f"median {format_seconds(report.solve_s.median)}, 99th percentile "
         f"{format_seconds(report.solve_s.p99)}")],
        ["tokens above the density", f"{report.gap_tokens:.3g} at most"],
        ["tokens sent by the busiest GPU", (f"{report.sent_over_mean.plain:.3f} of the mean plain, "
         f"{report.sent_over_mean.micro_moe:.3f} scheduled")],
        ["tokens that leave the busiest node", (f"{report.crossing_over_mean.plain:.3f} of the mean plain, "
         f"{report.crossing_over_mean.micro_moe:.3f} scheduled")],
        ["dropped by the capacity", f"{report.dropped_fraction:.1%} of the tokens"],
        ["new placements", f"{a.new_placements}; settled at {settled}"
         + (f", {format_seconds(a.migration_s)} each" if a.migration_s is not None else "")],
    ]  # fmt: skip
    print_table(console, "", [("", "left"), ("", "left")], facts)
    for note in report.notes:
        console.print(note)


def save_balance(report: BalanceReport, directory: Path) -> list[Path]:
    """Write ``balance.json``, the layers as a table and as a figure.

    Returns
    -------
    list[Path]
        The files.
    """
    files = {"balance.json": (report.model_dump_json(indent=2) + "\n").encode()}
    files["layers.csv"] = csv_bytes(report.to_frame())
    files |= figure_files("balance", plot_balance(report))
    return write_files(directory, files)
