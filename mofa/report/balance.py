"""What scheduled replicas do to the load of the fullest GPU: as text, and per layer as a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mofa.report.figures.style import ACCENT, INK, MUTED, given_or_new_axes, remove_clutter
from mofa.report.phrases import count_and_noun
from mofa.report.save import csv_bytes, figure_files, write_files
from mofa.report.tables import print_paragraph, print_table
from mofa.routing.placement_file import placement_csv
from mofa.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from rich.console import Console

    from mofa.routing.placement import Placement
    from mofa.search.experts.balance import BalancedStepComparison, BalanceReport

DENSITY = "maximum induced density, {} placement"
"""Of the placement that was scheduled on; EPLB's and adaptive placements have lower ones where they are better."""
_STYLES = {
    "plain": ("plain expert parallelism", ACCENT, "-", "o"),
    "eplb": ("replicas by past loads (EPLB)", "#fd8d3c", "-", "s"),
    "micro_moe": ("scheduled, {} placement", "#08519c", "-", "o"),
    "micro_moe_adaptive": ("scheduled, adaptive placement", "#31a354", "-", "^"),
    "lower_bound": (DENSITY, INK, ":", ""),
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
    ax = given_or_new_axes(ax, 9.0, 4.5)
    layers = np.array([row.layer for row in report.layers])
    for scheme, (label, colour, line, marker) in _STYLES.items():
        values = np.array([row.max_over_mean[scheme] for row in report.layers])
        ax.plot(layers, values, line, color=colour, marker=marker, markersize=4, linewidth=1.4,
                label=label.format(report.group.placement).replace("density, ", "density,\n"))  # fmt: skip
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
    remove_clutter(ax, grid_axis="both")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return ax


_NAMES = {
    "plain": "plain expert parallelism",
    "capacity": "plain, tokens beyond capacity dropped",
    "eplb": "replicas by past loads (EPLB)",
    "micro_moe_random": "scheduled, random placement",
    "micro_moe": "scheduled, {} placement",
    "micro_moe_adaptive": "scheduled, adaptive placement",
    "lower_bound": DENSITY,
}


def print_balance(report: BalanceReport, console: Console, *, quiet: bool = False) -> None:
    """Print the load of the fullest GPU under every scheme, the solver's time and the step before and after."""
    g = report.group
    rows = [
        [name.format(g.placement), f"{report.max_over_mean[key]:.4f}", f"{report.worst_max_over_mean[key]:.4f}"]
        for key, name in _NAMES.items()
    ]
    columns = [("tokens of the fullest GPU over the mean", "left"), ("mean", "right"), ("worst", "right")]
    title = (
        f"{g.name}: {g.experts} experts on {g.gpus} GPUs, {g.merged} groups of ep {g.ep} merged, {g.routing}, "
        f"{count_and_noun(g.micro_batches, 'micro-batch', 'micro-batches')} of {count_and_noun(g.layers, 'layer')}"
    )
    print_table(console, title, columns, rows)
    if report.step is not None:
        _print_step(report.step, console)
    if quiet:
        return
    a = report.adaptive
    settled = "none followed" if a.settled_max_over_mean is None else f"{a.settled_max_over_mean:.4f}"
    start = "warm" if g.micro_batches > 1 else "cold"
    took = f"median {format_seconds(report.solve_s.median)}, 99th percentile {format_seconds(report.solve_s.p99)}"
    facts = [
        [f"solver ({g.solver}), {start}", took],
        ["tokens above the density", f"{report.gap_tokens:.3g} at most"],
        ["tokens sent by the busiest GPU", (f"{report.sent_over_mean.plain:.3f} of the mean plain, "
         f"{report.sent_over_mean.micro_moe:.3f} scheduled, {report.sent_over_mean.micro_moe_adaptive:.3f} adaptive")],
        ["tokens that leave the busiest node", (f"{report.crossing_over_mean.plain:.3f} of the mean plain, "
         f"{report.crossing_over_mean.micro_moe:.3f} scheduled, "
         f"{report.crossing_over_mean.micro_moe_adaptive:.3f} adaptive")],
        ["dropped by the capacity", f"{report.dropped_fraction:.1%} of the tokens"],
        ["new placements", f"{a.new_placements}; settled at {settled}"
         + ("" if a.migration_s is None else f", {format_seconds(a.migration_s)} each") + _payback(report)],
    ]  # fmt: skip
    print_table(console, "", [("", "left"), ("", "left")], facts)
    for note in report.notes:
        print_paragraph(console, note)


def _payback(report: BalanceReport) -> str:
    """After how many steps a new placement has paid for itself."""
    steps = None if report.step is None else report.step.payback_steps
    return "" if steps is None else f", paid back after {count_and_noun(max(round(steps), 1), 'step')}"


def _print_step(step: BalancedStepComparison, console: Console) -> None:
    times = [
        ("plain expert parallelism", step.before_s, step.before_bytes, step.fits_before),
        ("plain, tokens beyond capacity dropped", step.capacity_s, None, True),
        ("replicas by past loads (EPLB)", step.eplb_s, None, True),
        ("scheduled replicas", step.after_s, step.after_bytes, step.fits_after),
        ("scheduled, adaptive placement", step.adaptive_s, step.adaptive_bytes, step.fits_adaptive),
        ("were routing balanced", step.balanced_s, None, True),
    ]
    rows = [
        [
            name, format_seconds(time_s), "" if time_s == step.before_s else f"{step.before_s / time_s - 1:+.1%}",
            "" if memory_bytes is None else format_bytes(memory_bytes),
            "" if memory_bytes is None else "yes" if fits else "no",
        ]
        for name, time_s, memory_bytes, fits in times
    ]  # fmt: skip
    heads = [("step", "left"), ("time", "right"), ("throughput", "right"), ("fullest rank", "right"), ("fits", "left")]
    print_table(console, step.strategy, heads, rows)
    for name, memory_bytes, fits in (
        ("Plain", step.before_bytes, step.fits_before),
        ("Scheduled", step.after_bytes, step.fits_after),
    ):
        if not fits:
            over = format_bytes(memory_bytes - step.limit_bytes)
            print_paragraph(
                console, f"{name} does not fit: {over} over the limit of {format_bytes(step.limit_bytes)}.", "red"
            )


def save_balance(report: BalanceReport, placement: Placement, directory: Path) -> list[Path]:
    """Write ``balance.json``, the layers as a table and as a figure, and the placement that was scheduled on.

    Returns
    -------
    list[Path]
        The files.
    """
    files = {"balance.json": (report.model_dump_json(indent=2) + "\n").encode()}
    files["layers.csv"] = csv_bytes(report.to_frame())
    files["placement.csv"] = placement_csv(placement).encode()
    files |= figure_files("balance", plot_balance(report))
    return write_files(directory, files)
