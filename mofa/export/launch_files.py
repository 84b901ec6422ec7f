"""The files of the job that runs the best plan of a search, as a report shows them."""

from __future__ import annotations

from collections.abc import Mapping

from mofa.errors import SpecError
from mofa.export.entry import export
from mofa.plan.result import PlanReport
from mofa.specs.framework_traits import TRAITS


def launch_files(report: PlanReport, target: str | None) -> tuple[Mapping[str, str], str]:
    """The files that run the best plan, and what they are, or why there are none.

    Parameters
    ----------
    report
        What a search found, with a plan.
    target
        The framework that they are for; the first that runs the plan where absent.

    Raises
    ------
    SpecError
        If ``target`` is named and cannot run the plan.

    Examples
    --------
    >>> import mofa
    >>> job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
    >>> search = mofa.find_plans(job, machines, fix={"tp": 2, "pp": 1, "cp": 1}, top=1, replay=False)
    >>> launch_files(search.report, "megatron")[1].split(",")[0]
    'A job for megatron'
    """
    targets = TRAITS[report.framework.name].exported_to
    if target is None and not targets:
        return {}, f"No job is written for {report.framework.name}: mofa export says what plans are written for."
    to = target or targets[0]
    try:
        files = export(report, to=to).files
    except SpecError as error:
        if target is not None:
            raise
        return {}, f"No job is written for {to}: {error}"
    return files, f"A job for {to}, as mofa export plan.json --to {to} writes it from the plan.json beside this page."


def why_not_launchable(report: PlanReport) -> str | None:
    """Why the framework of a search cannot run its best plan, in a sentence.

    None where it can, where mofa writes no jobs for it, and of a report that does not say its job.

    Examples
    --------
    >>> import mofa
    >>> job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
    >>> few = {"tp": 2, "pp": 1, "cp": 1}
    >>> why_not_launchable(mofa.find_plans(job, machines, fix=few, top=1, replay=False).report) is None
    True
    """
    if not report.plans or report.job is None or not TRAITS[report.framework.name].exported_to:
        return None
    files, note = launch_files(report, None)
    return None if files else note
