"""A search as ``mofa plan`` makes it: the best plans, then better layouts of their pipelines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mofa.search.search_result import Search
    from mofa.specs.hardware import ClusterSpec
    from mofa.specs.workload import WorkloadSpec

REFINE_SECONDS = 10.0
"""How long the layouts of the best plans are searched by default. [s]"""


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
    if refine_seconds and any(best.layout is not None for best in search.report.plans):
        search = mofa.refine_layouts(
            search,
            refine_seconds,
            progress=lambda done, of: progress(done, of, "searching layouts of the best plans"),
        )
    return search
