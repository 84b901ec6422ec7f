"""Run a sweep: plan what is not finished yet, and put all points into one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mofa.search.sweeps.finished_points import FinishedPoints
from mofa.search.sweeps.plan_point import FAILED, Result, result_without_plan
from mofa.search.sweeps.points import PointTask, SweepPoint, sweep_points
from mofa.specs.sweep_lists import load_sweep

if TYPE_CHECKING:
    import pandas as pd

PARTS = "points"
"""Folder of finished points below that of a sweep."""
_HOURS = "gpu_hours"
ALWAYS = ("strategy", "step_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu", "days", _HOURS, "usd")
"""Columns of every table, known or not."""


def sweep(
    source: str | Path | Mapping[str, Any],
    *,
    out: str | Path | None = None,
    scheduler: str | None = None,
    jobs: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> pd.DataFrame:
    """Plan every combination of models, clusters, GPUs, batches, sequences, routing, failures and prices.

    Parameters
    ----------
    source
        A YAML file (docs/sweep.md), or a mapping with the same fields.
    out
        Folder whose ``points`` finished points are written to, and read from: a run that was killed goes on where it
        was, and a changed sweep computes new points alone. Nothing is written where absent.
    scheduler
        Address of a Dask cluster that plans, such as ``tcp://10.0.0.1:8786``; this machine where absent.
    jobs
        Processes on this machine; with more than one, a script guards its code by ``if __name__ == "__main__"``. [-]
    progress
        Told points done and points in all. [-]

    Returns
    -------
    pandas.DataFrame
        A row for each point, in the order of the lists: what was asked, ``status`` (planned, nothing fits or failed),
        ``reason``, and the best plan's figures as in docs/json.md.

    Raises
    ------
    SpecError
        If the sweep is wrong, names something that cannot be read, or the scheduler does not answer. A point that
        fails raises nothing: its row says why.

    Notes
    -----
    A price changes no plan, only its dollars: points that differ in it alone are planned once.

    Examples
    --------
    >>> import mofa
    >>> asked = {"models": "llama3-8b", "clusters": "h100-hgx", "gpus": [8, 12], "prices": 2.5, "tokens": "1T",
    ...          "search": {"fast": True, "fix": {"tp": 2, "pp": 2, "vpp": 1, "cp": 1}}}
    >>> mofa.sweep(asked)["status"].tolist()
    ['planned', 'failed']
    """
    folder = None if isinstance(source, Mapping) else Path(source).parent
    points = sweep_points(load_sweep(source), folder)
    finished = FinishedPoints(None if out is None else Path(out) / PARTS)
    tasks = {point.task.key: point.task for point in points if point.task is not None}
    results = finished.read(tasks)
    if progress is not None:
        progress(len(results), len(tasks))
    for key, result in _planned([task for key, task in tasks.items() if key not in results], scheduler, jobs):
        finished.add(key, result)
        results[key] = result
        if progress is not None:
            progress(len(results), len(tasks))
    return _table(points, results)


def _planned(tasks: list[PointTask], scheduler: str | None, jobs: int) -> Any:
    """Keys and results as they come; none where nothing is left to plan."""
    if not tasks:
        return iter(())
    if scheduler is not None:
        from mofa.search.sweeps.dask_cluster import plan_on_dask

        return plan_on_dask(tasks, scheduler)
    from mofa.search.sweeps.local_processes import plan_on_this_machine

    return plan_on_this_machine(tasks, jobs)


def _table(points: list[SweepPoint], results: Mapping[str, Result]) -> pd.DataFrame:
    """A row for each point; what a point does not have is missing."""
    import pandas as pd

    rows = []
    for point in points:
        result = (
            result_without_plan(FAILED, point.error, is_final=True) if point.task is None else results[point.task.key]
        )
        row = {**point.labels, "usd_per_gpu_hour": point.usd_per_gpu_hour}
        row |= {name: value for name, value in result.items() if name != "final"}
        hours = row.get(_HOURS)
        if point.usd_per_gpu_hour is not None and hours is not None:
            row["usd"] = hours * point.usd_per_gpu_hour
        row["key"] = "" if point.task is None else point.task.key
        rows.append(row)
    names = list(dict.fromkeys([*(name for row in rows for name in row), *ALWAYS]))
    return pd.DataFrame({name: _column([row.get(name) for row in rows]) for name in names})


def _column(values: list[Any]) -> Any:
    """Values of one kind as a column in which some may be missing; whole numbers stay whole."""
    import pandas as pd

    kinds = {type(value) for value in values if value is not None}
    if not kinds <= {bool, int, float}:
        return pd.Series([None if value is None else str(value) for value in values], dtype=object)
    kind = "boolean" if kinds == {bool} else "Int64" if kinds == {int} else "Float64"
    return pd.array(values, dtype=kind)  # type: ignore[call-overload]
