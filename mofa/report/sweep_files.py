"""A sweep into files: one Parquet table, and figures where it has points for them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from mofa.report.save import figure_files, write_files

if TYPE_CHECKING:
    import pandas as pd

TABLE = "sweep.parquet"
"""The table of all points, below the folder of a sweep."""


def parquet_bytes(table: pd.DataFrame) -> bytes:
    """A table as Parquet."""
    buffer = io.BytesIO()
    table.to_parquet(buffer, engine="pyarrow", index=False)
    return buffer.getvalue()


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
    from mofa.report.figures.scaling_plots import plot_strong_scaling, plot_weak_scaling, strong_series, weak_series

    files = {TABLE: parquet_bytes(table)}
    if strong_series(table):
        files |= figure_files("strong_scaling", plot_strong_scaling(table))
    if weak_series(table):
        files |= figure_files("weak_scaling", plot_weak_scaling(table))
    if jobs_with_days(table):
        files |= figure_files("cost_front", plot_cost_front(table))
    return write_files(directory, files)
