"""A study of key factors: the best plan, what resources buy, what optimisations bring, and where stages wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mofa.errors import NothingFits, SpecError
from mofa.plan.factor_results import FactorPlan, KeyFactors, RankedBy, StageBottleneck
from mofa.plan.long_run import OBJECTIVES, Objective
from mofa.plan.result import Plan, PlanReport
from mofa.plan.summaries import ClusterSummary, FrameworkSummary, WorkloadSummary
from mofa.search.entry_points import find_plans
from mofa.search.goodput import LongRunObjective
from mofa.search.job_setup import with_numerics
from mofa.search.key_factors.ablation import Ablation, ablation
from mofa.search.key_factors.changed_machines import resource_sensitivities
from mofa.search.key_factors.factor_search import FactorSearch, best_plan_or_refusal
from mofa.search.long_run.spare_nodes import find_long_runs, without_spares
from mofa.search.one_plan import plan_with_replayed_time
from mofa.search.request import checked_framework_or_default
from mofa.search.workers import WorkerProcesses
from mofa.specs.faults import FaultSpec
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.workload import WorkloadSpec

Progress = Callable[[int, int, str], None]
"""Told searches done, searches of this part of the study, and what it is."""


def key_factors(
    workload: WorkloadSpec,
    cluster: ClusterSpec,
    *,
    framework: FrameworkSpec | None = None,
    faults: FaultSpec | None = None,
    objective: Objective = "tokens",
    fix: Mapping[str, object] | None = None,
    maximum: Mapping[str, int] | None = None,
    with_: Sequence[str] = (),
    without: Sequence[str] = (),
    replay: bool = False,
    optimisations: bool = True,
    jobs: int = 1,
    progress: Progress | None = None,
) -> KeyFactors:
    """What a tenth of each resource buys a job by planning anew, and what each optimisation brings.

    Parameters
    ----------
    workload, cluster, framework
        The job, all machines, the framework; the workload's own or ``megatron`` where absent.
    faults
        Rates of failures, restarts, storage, prices: plans are ranked by the whole run. Nothing fails where absent.
    objective
        As of :func:`mofa.find_long_runs`; another than ``tokens`` needs ``faults`` with failures.
    fix, maximum, with_, without
        As of :func:`mofa.find_plans`, in all searches.
    replay
        Whether plans are played out; else they are ranked by closed forms, as ``mofa plan --fast`` does.
    optimisations
        Whether they are taken out and added up.
    jobs
        Processes that search, this one counted. The result is the same. [-]
    progress
        Told how far the study is.

    Returns
    -------
    KeyFactors
        Resources, the strongest first; optimisations in their order; stages of the best plan.

    Raises
    ------
    SpecError
        If a constraint or the objective is unknown, a constraint leaves nothing to search, or nothing is said of
        failures that the objective needs.
    NothingFits
        If no plan fits on the machines as they are.

    Notes
    -----
    All plans are on the GPUs that the best plan computes with: GPUs that it leaves idle, and spare nodes, stay so in
    all. Kernels keep launches and floors, links latencies (:func:`mofa.specs.changed_resources.cluster_with_resource`).

    Examples
    --------
    >>> import mofa
    >>> job, machines = mofa.load_workload("llama3-8b", global_batch=64), mofa.load_cluster("h100-hgx", 8)
    >>> factors = mofa.key_factors(job, machines, fix={"tp": 2, "cp": 1, "pp": 1}, optimisations=False)
    >>> factors.resources[0].resource, factors.change_from_best_plan(factors.resources[0].more.planned_again) < 0.0
    ('matrix products and attention', True)
    """
    _refuse_objective(objective, faults)
    framework = checked_framework_or_default(workload, cluster, framework)
    search = FactorSearch(
        workload, cluster, framework, None, dict(fix or {}), dict(maximum or {}), tuple(with_), tuple(without), replay
    )
    show = progress or (lambda done, of, text: None)
    show(0, 1, "the best plan")
    search, idle_note = _on_computing_gpus(search, faults, objective)

    with WorkerProcesses(jobs) as workers:

        def best_plans(searches: Sequence[FactorSearch], text: str) -> list[FactorPlan | str | None]:
            results = []
            for result in workers.map(best_plan_or_refusal, searches):
                results.append(result)
                show(len(results), len(searches), text)
            return results

        best = search.best_plan()
        if best is None:
            raise NothingFits(
                f"{workload.name} on {_gpus_text(search.cluster.num_gpus)}: nothing fits on all; add GPUs"
            )
        resources = resource_sensitivities(
            search, best, lambda searches: best_plans(searches, "plans on changed machines")
        )
        added = Ablation(None, ())
        if optimisations:
            added = ablation(search, best, lambda searches: best_plans(searches, "plans with fewer optimisations"))
    judge, played = search.judge, _played(search, best)
    return KeyFactors(
        workload=WorkloadSummary.from_spec(workload),
        cluster=ClusterSummary.from_spec(cluster),
        framework=FrameworkSummary.from_spec(framework),
        faults=None if faults is None or faults.reliability is None else faults.name,
        spare_nodes=0 if judge is None else judge.spares,
        computing_gpus=search.cluster.num_gpus,
        idle_gpus=search.idle_gpus,
        idle_note=idle_note,
        costed_by="replay" if replay else "closed_form",
        objective=_ranked_by(judge),
        value_unit="J" if _ranked_by(judge) == "energy of a step" else "s",
        best=best,
        resources=resources,
        without_optimisations=added.without_optimisations,
        ablation=added.rows,
        stages=_stages(played),
        played_step_s=played.step_s,
    )


def _refuse_objective(objective: Objective, faults: FaultSpec | None) -> None:
    """Refuse an objective that there is not, and one of whole runs where nothing is said of failures."""
    if objective not in OBJECTIVES:
        raise SpecError(f"objective: {objective!r} is unknown; use one of {', '.join(OBJECTIVES)}")
    if objective != "tokens" and (faults is None or faults.reliability is None):
        raise SpecError(f"--objective {objective}: needs failures, storage and tokens; give --faults NAME|FILE")


def _on_computing_gpus(
    search: FactorSearch, faults: FaultSpec | None, objective: Objective
) -> tuple[FactorSearch, str]:
    """The search on the GPUs that the best plan computes with, judged by the whole run where something fails; and why
    it leaves others idle."""
    options: dict[str, Any] = {
        "framework": search.framework, "fix": search.fix, "maximum": search.maximum, "with_": search.with_,
        "without": search.without, "replay": False, "top": 1,
    }  # fmt: skip
    cluster, judge = search.cluster, None
    if faults is not None:
        first = faults.spares or 0
        judge = LongRunObjective(
            search.workload, without_spares(cluster, first, faults.name), search.framework, faults, objective, first
        )
        judge.refuse_unknown_objective()
    if judge is None or judge.ranks_by_step_alone:
        alone = cluster if judge is None else judge.cluster
        plan = _best(find_plans(search.workload, alone, banded=False, **options).report)
        alone = alone.model_copy(update={"num_gpus": alone.num_gpus - plan.idle_gpus})
        note = plan.notes[0] if plan.idle_gpus else ""
        return replace(search, cluster=alone, judge=judge, idle_gpus=plan.idle_gpus), note
    if faults is not None and faults.spares is None:
        plan = _best(find_long_runs(search.workload, cluster, faults, objective=objective, **options).report)
        spares = plan.spare_gpus // cluster.node.gpus_per_node
        judge = replace(judge, cluster=without_spares(cluster, spares, faults.name), spares=spares)
    return replace(search, cluster=judge.cluster, judge=judge), ""


def _best(report: PlanReport) -> Plan:
    if report.plans:
        return report.plans[0]
    least = f"{_gpus_text(report.min_gpus)} would do" if report.min_gpus else report.min_gpus_note or "add GPUs"
    name, gpus = report.workload.name, _gpus_text(report.cluster.num_gpus)
    raise NothingFits(f"{name} on {gpus}: nothing fits; {least}")


def _gpus_text(number: int) -> str:
    return f"{number:,} {'GPU' if number == 1 else 'GPUs'}"


def _ranked_by(judge: LongRunObjective | None) -> RankedBy:
    if judge is None or judge.ranks_by_step_alone:
        return "step"
    return "energy of a step" if judge.key_unit == "J" else "wall-clock time of a step"


def _played(search: FactorSearch, best: FactorPlan) -> Plan:
    """The best plan, played out, with the time of every stage."""
    job = with_numerics(search.workload, search.cluster, search.framework, search.with_)
    try:
        return plan_with_replayed_time(job[0], job[1], best.strategy, framework=job[2])
    except SpecError as error:
        raise SpecError(f"stages of the best plan: {error}") from None


def _stages(plan: Plan) -> tuple[StageBottleneck, ...]:
    bytes_by_stage = {stage.stage: stage.device_bytes for stage in plan.memory.by_stage}
    return tuple(
        StageBottleneck(stage=stage.stage, exposed=stage.exposed, device_bytes=bytes_by_stage.get(stage.stage))
        for stage in plan.time.by_stage
    )
