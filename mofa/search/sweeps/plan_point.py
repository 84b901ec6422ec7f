"""Plan one point of a sweep: in this process, in another, or on another machine."""

from __future__ import annotations

import threading
from typing import Any

from mofa.errors import MofaError, NothingFits
from mofa.plan.result import PlanReport
from mofa.plan.run_costs import days_of_run, gpu_hours_of_run, gpu_seconds_per_million_tokens
from mofa.plan.summary import strategy_text
from mofa.search.sweeps.points import PointTask

Result = dict[str, Any]
"""Columns of a point's row but for its labels, and whether they are ``final``: not to be computed again."""

PLANNED, NOTHING_FITS, FAILED = "planned", "nothing fits", "failed"
"""What may have come of a point."""
_LOCK = threading.Lock()
"""A worker of several threads plans one point at a time."""


def plan_point(task: PointTask, jobs: int = 1) -> Result:
    """The best plan of a point, or why there is none; it raises nothing but what ends the process.

    Parameters
    ----------
    task
        The point.
    jobs
        Processes that search, this one counted. [-]
    """
    try:
        with _LOCK:
            report = _search(task, jobs)
    except NothingFits as error:
        return result_without_plan(NOTHING_FITS, str(error), is_final=True)
    except MofaError as error:
        return result_without_plan(FAILED, str(error), is_final=True)
    except Exception as error:  # a bug, or no memory: the other points go on, and the next run tries this one again
        return result_without_plan(FAILED, f"internal error: {type(error).__name__}: {error}", is_final=False)
    return _row(task, report)


def result_without_plan(status: str, reason: str, *, is_final: bool) -> Result:
    """What is known of a point without a plan.

    Examples
    --------
    >>> result_without_plan("failed", "no\\nmemory", is_final=False)
    {'status': 'failed', 'reason': 'no memory', 'final': False}
    """
    return {"status": status, "reason": " ".join(reason.split()), "final": is_final}


def _search(task: PointTask, jobs: int) -> PlanReport:
    from mofa.search.entry_points import find_plans
    from mofa.search.layout_search.refine import refine_layouts
    from mofa.search.long_run.spare_nodes import find_long_runs

    how = task.search
    options: dict[str, Any] = {
        "framework": task.framework,
        "top": 1,
        "fix": {name: tuple(value) if isinstance(value, list) else value for name, value in how.fix.items()},
        "maximum": how.maximum,
        "with_": how.with_,
        "without": how.without,
        "replay": not how.fast,
        "offers": False,  # a row has no place for them
        "jobs": jobs,
    }
    if task.faults is not None:
        search = find_long_runs(task.workload, task.cluster, task.faults, objective=how.objective, **options)
    else:
        search = find_plans(task.workload, task.cluster, **options)
        if how.refine_seconds:
            search = refine_layouts(search, how.refine_seconds)
    return search.report


def _row(task: PointTask, report: PlanReport) -> Result:
    gpus = task.cluster.num_gpus
    if not report.plans:
        least = f"{report.min_gpus:,} GPUs would do" if report.min_gpus else report.min_gpus_note or "add GPUs"
        return {
            **result_without_plan(NOTHING_FITS, f"nothing fits; {least}", is_final=True),
            "min_gpus": report.min_gpus,
        }
    plan = report.plans[0]
    busy = gpus - plan.idle_gpus
    return {
        "status": PLANNED,
        "reason": "",
        "final": True,
        "gpu": task.cluster.gpu.name,
        "strategy": strategy_text(plan.strategy, moe=task.workload.model.moe is not None),
        "tokens_per_s": plan.tokens_per_s_per_gpu * busy,
        "days": days_of_run(plan),
        "gpu_seconds_per_million_tokens": gpu_seconds_per_million_tokens(plan) * gpus / busy,
        **plan.to_row(),
        "gpu_hours": gpu_hours_of_run(plan, gpus),
    }
