"""A sweep into files: one Parquet table, the same as JSON, and figures where it has points for them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from mofa.plan.sweep_report import SweepReport, SweptJob
from mofa.report.save import figure_files, write_files
from mofa.report.sweep_text import best_of_job, cost_column, jobs_of_sweep, rows_of_sweep

if TYPE_CHECKING:
    import pandas as pd

TABLE = "sweep.parquet"
"""The table of all points, below the folder of a sweep."""


def parquet_bytes(table: pd.DataFrame) -> bytes:
    """A table as Parquet."""
    buffer = io.BytesIO()
    table.to_parquet(buffer, engine="pyarrow", index=False)
    return buffer.getvalue()


def sweep_report(table: pd.DataFrame) -> SweepReport:
    """The table of a sweep as what ``--json`` prints, with the cheapest and the fastest point of each job.

    Parameters
    ----------
    table
        Of :func:`mofa.search.sweeps.run_sweep.sweep`.

    Returns
    -------
    SweepReport
        Every cell of the table, and the verdict that is printed for people.
    """
    rows = rows_of_sweep(table)
    number_of = {id(row): number for number, row in enumerate(rows)}
    jobs = []
    for group in jobs_of_sweep(rows):
        cheapest, fastest = best_of_job(group)
        jobs.append(
            SweptJob(
                points=tuple(number_of[id(row)] for row in group),
                compared_by=cost_column(group),
                cheapest=number_of[id(cheapest)],
                fastest=number_of[id(fastest)],
            )
        )
    return SweepReport(points=tuple(rows), jobs=tuple(jobs))


def save_sweep(table: pd.DataFrame, directory: Path) -> list[Path]:
    """Write the table of a sweep and its figures.

    Parameters
    ----------
    table
        Of :func:`mofa.search.sweeps.run_sweep.sweep`.
    directory
        Where to; made if absent.

    Returns
    -------
    list[Path]
        ``sweep.parquet``, and as PNG and SVG ``strong_scaling`` and ``weak_scaling``, where some points differ in GPUs,
        and ``cost_front``, where a job has points with days.
    """
    from mofa.report.figures.cost_front import jobs_with_days, plot_cost_front
    from mofa.report.figures.scaling_plots import (
        plot_strong_scaling,
        plot_weak_scaling,
        strong_scaling_series,
        weak_scaling_series,
    )

    files = {TABLE: parquet_bytes(table)}
    if strong_scaling_series(table):
        files |= figure_files("strong_scaling", plot_strong_scaling(table))
    if weak_scaling_series(table):
        files |= figure_files("weak_scaling", plot_weak_scaling(table))
    if jobs_with_days(table):
        files |= figure_files("cost_front", plot_cost_front(table))
    return write_files(directory, files)
