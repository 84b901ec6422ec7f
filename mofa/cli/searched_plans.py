"""A search as ``mofa plan`` makes it: the best plans, then better layouts of their pipelines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mofa.cli.progress import ProgressBar
    from mofa.plan.result import PlanReport
    from mofa.search.search_progress import SearchProgress
    from mofa.search.search_result import Search
    from mofa.specs.hardware import ClusterSpec
    from mofa.specs.workload import WorkloadSpec

REFINE_SECONDS = 12.0
"""How long the layouts of the best plans are searched by default. [s]"""


def best_plan_printer(progress: ProgressBar) -> Callable[[SearchProgress], None]:
    """A callback that prints the best plan as soon as the closed forms know it, while it is played and refined."""
    shown: list[object] = []

    def show(step: SearchProgress) -> None:
        if step.best is None or shown:
            return
        from mofa.report.phrases import best_so_far_text

        shown.append(step.best)
        progress.print_above_bar(best_so_far_text(step.best))

    return show


def enough_gpus_text(report: PlanReport) -> str:
    """How many GPUs would do where nothing fits, or what to do."""
    return f"{report.min_gpus:,} GPUs would do" if report.min_gpus else report.min_gpus_note or "add GPUs"


def print_why_not_launchable(report: PlanReport) -> None:
    """Say on standard error why the best plan becomes no job of its framework, before somebody exports it."""
    from mofa.export.launch_files import why_not_launchable

    if obstacle := why_not_launchable(report):
        print(f"mofa: {obstacle}", file=sys.stderr)


def search_plans(
    job: WorkloadSpec,
    machines: ClusterSpec,
    options: Mapping[str, Any],
    refine_seconds: float,
    progress: Callable[..., None],
) -> Search:
    """The best plans of a job, with layouts that were searched for so long."""
    import mofa

    search = mofa.find_plans(job, machines, **options)
    if refine_seconds:
        search = mofa.refine_layouts(
            search,
            refine_seconds,
            progress=lambda done, of: progress(done, of, "searching layouts of the best plans"),
        )
    return search
