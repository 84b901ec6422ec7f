"""Token chunks per layer over iterations, as MemFine's figure 5 draws them, and what each policy costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mofa.report.figures.chunk_policies import label_whole_iterations, plot_policy_memory, plot_throughput
from mofa.report.figures.style import given_or_new_axes
from mofa.report.save import csv_bytes, figure_files, write_files
from mofa.report.tables import print_paragraph, print_table
from mofa.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from rich.console import Console

    from mofa.search.experts.token_chunks import ChunkReport

MAX_ROWS = 24


def plot_chunks(report: ChunkReport, *, ax: Axes | None = None) -> Axes:
    """Plot the number of chunks of every layer and iteration.

    Parameters
    ----------
    report
        What was chosen.
    ax
        Axes to draw on; new ones where absent.
    """
    from matplotlib import colormaps
    from matplotlib.colors import BoundaryNorm, ListedColormap

    ax = given_or_new_axes(ax, 9.0, 4.5)
    chunks = np.array(report.chunks).T
    num_bins = len(report.bins)
    shown = np.where(chunks > 0, np.searchsorted(report.bins, chunks), np.nan)
    colours = ListedColormap(colormaps["Blues"](np.linspace(0.12, 1.0, num_bins)))
    edges = BoundaryNorm(np.arange(num_bins + 1) - 0.5, num_bins)
    image = ax.imshow(shown, aspect="auto", cmap=colours, norm=edges, interpolation="nearest")
    ax.set_facecolor("#cb181d")  # where no number of chunks fits
    step = max(len(report.layers) // 16, 1)
    ax.set_yticks(np.arange(0, len(report.layers), step), [str(layer) for layer in report.layers[::step]])
    label_whole_iterations(ax)
    ax.set_ylabel("layer")
    ax.set_title(f"{report.workload}: token chunks, {report.routing} (red: none fits)", loc="left")
    bar = ax.figure.colorbar(image, ax=ax, ticks=np.arange(num_bins), label="chunks")
    bar.set_ticklabels([str(c) for c in report.bins])
    return ax


def print_chunks(report: ChunkReport, console: Console, *, quiet: bool = False) -> None:
    """Print what each policy costs, the rows that fit, and the chunks of every layer over the iterations."""
    rows = [
        [
            p.name, "yes" if p.fits else f"no, {p.over} over", format_bytes(p.peak_bytes), format_seconds(p.step_s),
            f"{p.tokens_per_s_per_gpu:,.1f}", f"{p.mean_chunks:.2f}",
        ]
        for p in report.policies
    ]  # fmt: skip
    columns = [("chunks", "left"), ("fits", "left"), ("fullest rank", "right"), ("step", "right"),
               ("tokens/s/GPU", "right"), ("mean", "right")]  # fmt: skip
    title = f"{report.workload}: {report.strategy}, {report.routing}, limit {format_bytes(report.limit_bytes)}"
    print_table(console, title, columns, rows, leaves=("mean", "fullest rank"))
    if report.joint is not None:
        j = report.joint
        uniform = "none fits" if j.uniform_step_s is None else f"{format_seconds(j.uniform_step_s)} ({j.uniform})"
        facts = [
            ["step", format_seconds(j.step_s)],
            ["bound", format_seconds(j.bound_s) + (", reached" if j.optimal else "")],
            ["best single option for all layers", uniform],
            ["layers", ", ".join(f"{x.layer}: {x.recompute}/{x.token_chunks}" for x in j.layers)],
        ]
        heads = [("recomputation and chunks chosen together", "left"), ("", "left")]
        print_table(console, "", heads, facts)
    elif report.joint_asked:
        print_paragraph(console, "\nrecomputation and chunks chosen together: none fits")
    if quiet:
        return
    stages = len(next(iter(report.max_rows.values())))
    heads = [("rows that fit, by chunks", "left"), *((f"stage {s}", "right") for s in range(stages))]
    cells = [[c, *(_rows(x, report.largest_rows) for x in most)] for c, most in report.max_rows.items()]
    print_table(
        console, f"the fullest rank of all layers and iterations gets {report.largest_rows:,.0f} rows", heads, cells
    )
    chunks = np.array(report.chunks).T
    lines = [
        [str(layer), " ".join(str(c) if c else "-" for c in row)]
        for layer, row in zip(report.layers[:MAX_ROWS], chunks, strict=False)
    ]
    print_table(console, "", [("layer", "right"), ("chunks in each iteration (-: none fits)", "left")], lines)


def _rows(most: float, largest: float) -> str:
    """Rows that fit: ``all`` that occur, or how many; ``none`` where not even balanced ones do.

    >>> _rows(100.0, 100.0), _rows(1234.5, 5000.0), _rows(0.0, 5000.0)
    ('all', '1,234', 'none')
    """
    if most >= largest * (1 - 1e-6):
        return "all"
    return f"{most:,.0f}" if most > 0 else "none"


def save_chunks(report: ChunkReport, directory: Path) -> list[Path]:
    """Write ``chunks.json``, the chunks as a table, and figures: chunks, throughput and memory over the iterations.

    Returns
    -------
    list[Path]
        The files.
    """
    files = {"chunks.json": (report.model_dump_json(indent=2) + "\n").encode()}
    files["chunks.csv"] = csv_bytes(report.to_frame())
    files |= figure_files("chunks", plot_chunks(report))
    files |= figure_files("throughput", plot_throughput(report))
    files |= figure_files("memory", plot_policy_memory(report))
    return write_files(directory, files)
