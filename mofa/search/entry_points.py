"""Find the best plans: enumerate, mask, cost what is legal, keep what fits, rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mofa.cost.model_flops import FlopsConvention
from mofa.errors import SpecError
from mofa.plan.job_facts import JobFacts
from mofa.plan.result import NumericsOffer, Plan, PlanReport
from mofa.plan.summaries import ClusterSummary, FrameworkSummary, WorkloadSummary
from mofa.replay.garbage_collection import without_garbage_collection
from mofa.search import branch_and_bound
from mofa.search.borderline import admit_borderline_rows, best_rows_with_fewer_recomputed_layers
from mofa.search.costing import MEMORY, CostedRows, CostedSpace, cost_all_legal_rows
from mofa.search.fewer_gpus.faster_rows import faster_rows_on_fewer_gpus_near_best
from mofa.search.fewer_gpus.merge_plans import best_plans_of_all_gpu_counts, report_counts_of_all_searches
from mofa.search.fewer_gpus.numbers_together import RowsOnFewerGpus
from mofa.search.fewest_gpus import fewest_fitting_gpus_and_note
from mofa.search.fixed_values import fixed_values_that_run_nowhere
from mofa.search.job_setup import routing_loads_by_ep, with_numerics
from mofa.search.legality.masks import CHECKS, JobAndMachines, check_strategies
from mofa.search.legality.named_check import Verdicts, refuse_idle_dispatcher
from mofa.search.objective import SHORTEST_STEP, SearchObjective, reject_rows_for_host_memory
from mofa.search.offers import numerics_offers
from mofa.search.rejections import refuse_indivisible_batch, rejections_and_nearest_misses
from mofa.search.request import check_constraints, checked_framework_or_default
from mofa.search.rerank import PATIENCE, REPLAYED, ReplayedRanking, replay_best_rows
from mofa.search.search_progress import OnProgress, progress_callback, progress_callback_with_best_row
from mofa.search.search_result import Search
from mofa.search.space import (
    FEWER_GPUS,
    SOLVED,
    SpaceCombinations,
    StrategySpace,
    combinations_of_space,
    constrain_space,
    default_space,
    values_of_fixed_field,
)
from mofa.search.space_constraints import SpaceConstraints
from mofa.search.to_plan.builder import CandidatePlan, memory_limit_bytes, replay_workers
from mofa.search.to_plan.steps_on_hosts import plans_in_closed_form
from mofa.search.workers import WorkerProcesses
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.workload import WorkloadSpec

if TYPE_CHECKING:
    from mofa.search.goodput import LongRunObjective

Progress = Callable[[int, int], None]
AT_WORK = ("mofa.search.costing", "mofa.replay.replayer")
"""Modules that worker processes import while this one begins to play."""


def find_plans(
    workload: WorkloadSpec,
    cluster: ClusterSpec,
    *,
    framework: FrameworkSpec | None = None,
    top: int = 10,
    fix: Mapping[str, object] | None = None,
    maximum: Mapping[str, int] | None = None,
    with_: Sequence[str] = (),
    without: Sequence[str] = (),
    flops_convention: FlopsConvention = "causal",
    progress: Progress | None = None,
    replay: bool = True,
    replay_progress: Progress | None = None,
    judge: LongRunObjective | None = None,
    space: StrategySpace | None = None,
    searched: Search | RowsOnFewerGpus | None = None,
    banded: bool = True,
    offers: bool = True,
    every_row: bool = False,
    closed_form_margin: bool = True,
    jobs: int = 1,
    on_progress: OnProgress | None = None,
) -> Search:
    """The strategies with which a workload trains fastest on a cluster.

    Parameters
    ----------
    workload, cluster, framework
        The job, the machines, the framework; the workload's own or ``megatron`` where absent.
    top
        How many plans to return. [-]
    fix, maximum
        Columns with one value, such as ``{"tp": 2}``; upper bounds of degrees.
    with_, without
        Options to search that may change numerics or are off by default; options not to search.
    flops_convention
        Whether TFLOP/s and MFU halve causal attention.
    progress
        Told rows done and rows in all.
    replay
        Whether the best :data:`~mofa.search.rerank.REPLAYED` rows are ranked again by their replayed steps, and the
        memory of the returned plans is replayed.
    replay_progress
        Told plans played and plans to play.
    judge
        Ranks by a whole run with its failures, not by a step;
        :func:`mofa.search.long_run.spare_nodes.find_long_runs` makes it.
    space
        The space to search under the constraints, in place of all that the framework offers. If nothing in it fits, the
        fewest GPUs that would do are not sought.
    searched
        A search of the same job under the same constraints, without replay, whose costs are reused. Fewer GPUs are then
        not looked at, nor with a ``space``, nor if a ``judge`` ranks by failures, where GPUs stand by as spares.
    banded
        Whether plans without a replay have a band, which takes two more estimates of each.
    offers
        Whether the report says what other numerics would bring to the best plan, one estimate each; not without
        ``banded``.
    every_row
        Whether every legal row is costed, not only those that may be among the best.
    closed_form_margin
        Whether plans without a replay leave free what a replay may reserve beyond closed forms, as
        :func:`mofa.estimate` does without one.
    jobs
        Processes that cost and play, this one counted; see :mod:`mofa.search.workers`. The result is the same. [-]
    on_progress
        Told a :class:`mofa.search.search_progress.SearchProgress` at every step: the phase, how far it is, and the best
        plan so far, which is there when the closed forms have ranked all.

    Returns
    -------
    Search
        The report with up to ``top`` plans that fit, best first, and the table of all that was costed on all GPUs.
        Plans on fewer GPUs are among the best where they are faster (``plan.idle_gpus``); ``without=["fewer_gpus"]``
        leaves them out. Where nothing fits, the report has no plans and says how many GPUs would do.

    Raises
    ------
    SpecError
        If a constraint is unknown or leaves nothing to search.
    StrategyError
        If no data parallelism that the GPUs leave divides the global batch.

    Notes
    -----
    The objective is tokens per second and GPU at the fixed global batch, seq_len * global_batch / (step_s * GPUs).
    Among equals the smaller memory wins. Legal strategies of the space are costed in closed form, all those that lower
    bounds leave (:mod:`mofa.search.branch_and_bound`). A better one is missed only by an error of these forms.

    Examples
    --------
    >>> import mofa
    >>> job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
    >>> search = mofa.find_plans(job, machines, fix={"tp": 2, "pp": 2, "vpp": 1, "cp": 1}, top=2, replay=False)
    >>> [plan.strategy.dp for plan in search.report.plans]
    [2, 2]
    """
    started = time.perf_counter()
    framework = checked_framework_or_default(workload, cluster, framework)
    workload_given, framework_given = workload, framework
    fix, maximum = dict(fix or {}), dict(maximum or {})
    check_constraints(fix, maximum, top, flops_convention)
    workload, cluster, framework = with_numerics(workload, cluster, framework, with_)
    refuse_idle_dispatcher(workload.model, fix.get("dispatcher"))
    in_closed_form = closed_form_margin and not replay
    job = JobAndMachines(workload, cluster, framework, is_judged_in_closed_form=in_closed_form)
    constraints = SpaceConstraints(fix, maximum, tuple(without))
    without = (*without, *_given_options(judge, fix))
    constrained = partial(constrain_space, fix=fix, maximum=maximum, with_=with_, without=without)
    may_use_fewer = space is None and searched is None and _may_use_fewer(without, judge)
    default = space is None and not isinstance(searched, RowsOnFewerGpus)
    given_space = default_space(workload, cluster, framework) if space is None else space
    space = _constrained_on(constrained, fix, given_space, cluster)
    progress = progress_callback(progress, on_progress, "costing", None)
    with WorkerProcesses(jobs) as workers, without_garbage_collection():
        # what a judge ranks may be ranked again by its replay
        wanted = max(top, PATIENCE) if replay or judge is not None else top
        objective: SearchObjective = SHORTEST_STEP
        if judge is not None:
            objective = judge = replace(judge, workload=workload, framework=framework)
        if searched is None:
            bounded = None if every_row else (objective, wanted)
            checks_batch = not fix and not may_use_fewer
            enumerated, searched_rows = _search(job, space, progress, workers, checks_batch, bounded=bounded)
        else:
            enumerated = searched.enumerated
            searched_rows = CostedSpace(
                searched.combinations, searched.costed, searched.reasons.copy(), searched.short.copy()
            )
        costed, reason, shortfall = searched_rows.costed, searched_rows.reason, searched_rows.shortfall
        key = reject_rows_for_host_memory(objective, searched_rows)
        loads = routing_loads_by_ep(workload, searched_rows.space.degrees)

        known: dict[int, CandidatePlan] = {}  # what was played of a row is not played again

        def candidate(i: int) -> CandidatePlan:
            if i not in known:
                row, mode = costed.table.select_rows(np.array([i])), int(costed.rows[i]) % len(space.recompute)
                solved = space.recompute[mode][1] == SOLVED
                known[i] = CandidatePlan(workload, cluster, framework, row, loads, flops_convention, solved=solved)
            return known[i]

        replay_progress = progress_callback_with_best_row(
            replay_progress, on_progress, _rank(costed, key, reason, 1), candidate
        )
        if replay:
            played = _rank(costed, key, reason, REPLAYED).tolist()
            workers = replay_workers([candidate(i) for i in played], workers)
            workers.start_processes(AT_WORK)
            some = REPLAYED if judge is not None else top
            admit_borderline_rows(searched_rows, key, memory_limit_bytes(cluster, framework), candidate, workers, some)
        best = _rank(costed, key, reason, wanted)
        final = ReplayedRanking()
        if replay and (fewer := best_rows_with_fewer_recomputed_layers(best[:REPLAYED].tolist(), candidate, workers)):
            searched_rows = searched_rows.with_recompute_layers(
                {i: candidate_found.closed_form_breakdown for i, candidate_found in fewer.items()}
            )
            costed = searched_rows.costed
            known.update(fewer)
            best = _ranked_again(costed, best, judge)
        if replay:
            order = judge.plan_ranking_key if judge is not None else None
            closed_s = costed.step_s[best].tolist() if judge is None else None
            final = replay_best_rows(best.tolist(), candidate, top, replay_progress, order, workers, closed_s)
    if final.changed:
        searched_rows = searched_rows.with_recompute_layers(
            {i: candidate_found.closed_form_breakdown for i, candidate_found in final.changed.items()}
        )
        costed = searched_rows.costed
        known.update(final.changed)
        best = _ranked_again(costed, best, judge)
    for i, over in final.lacking_bytes.items():
        reason[costed.rows[i]], shortfall[costed.rows[i]] = MEMORY, over
        costed.device_bytes[i] = memory_limit_bytes(cluster, framework) + over
    plans, best = final.plans, best[~np.isin(best, [*final.rows, *final.lacking_bytes])]
    others = plans_in_closed_form([candidate(i) for i in best[: top - len(plans)].tolist()], banded=banded,
                                  doubted=in_closed_form)  # fmt: skip
    plans += islice(others, 0 if plans else 1)
    min_gpus, note = None, None
    if not plans and default:
        min_gpus, note = fewest_fitting_gpus_and_note(job, constrained, space.dp, replay=replay, judge=judge)
    reports: list[PlanReport] = []
    if may_use_fewer and (plans or (min_gpus or math.inf) < cluster.num_gpus):
        solved = np.array([number == SOLVED for _, number in space.recompute])
        on_cluster = partial(_constrained_on, constrained, fix)
        reports = [
            find_plans(
                *given, framework=framework_given, top=top, fix=fix, maximum=maximum, with_=with_, without=without,
                flops_convention=flops_convention, replay=replay, judge=judge, searched=rows, banded=banded, jobs=jobs,
                closed_form_margin=closed_form_margin,
            ).report
            for rows in faster_rows_on_fewer_gpus_near_best(job, on_cluster, objective, wanted, searched_rows, key,
            solved)
            for given in [(workload_given, rows.cluster)]
        ]  # fmt: skip
        plans = best_plans_of_all_gpu_counts(plans, others, reports, cluster.num_gpus, top)
    else:
        plans += others
    if plans:
        min_gpus, note = None, None
    elif default and not len(costed.rows):
        note = _why_nothing_runs(job, searched_rows, fix, min_gpus, note)
    rejected, nearest = rejections_and_nearest_misses(reason, shortfall, searched_rows.space, framework, objective)
    report = PlanReport(
        workload=WorkloadSummary.from_spec(workload),
        cluster=ClusterSummary.from_spec(cluster),
        framework=FrameworkSummary.from_spec(framework),
        job=JobFacts.from_specs(workload, framework, cluster),
        space=len(searched_rows.space),
        searched=len(costed.rows),
        rejected=rejected,
        nearest_miss=nearest,
        min_gpus=min_gpus,
        min_gpus_note=note,
        elapsed_s=time.perf_counter() - started,
        numerics_offers=(_offers(job, plans[0]) if plans and banded and offers and default else ()),
        defaults=_defaults(workload, framework, fix, flops_convention),
    )
    if unused := fixed_values_that_run_nowhere(job, searched_rows, fix):
        report.defaults["fixed values"] = f"of --fix, {unused}"
    report = PlanReport(**{**dict(report), **report_counts_of_all_searches(report, plans, reports)})
    return Search(
        report,
        costed,
        workload,
        cluster,
        framework,
        reason,
        searched_rows.space,
        shortfall,
        objective,
        enumerated,
        in_closed_form,
        constraints,
    )


def _may_use_fewer(without: Sequence[str], judge: LongRunObjective | None) -> bool:
    """Whether plans may leave GPUs idle: with failures known these stand by as spares."""
    return FEWER_GPUS not in without and (judge is None or judge.ranks_by_step_alone)


def _why_nothing_runs(
    job: JobAndMachines, searched_rows: CostedSpace, fix: Mapping[str, object], min_gpus: int | None, note: str | None
) -> str | None:
    """The note on the fewest GPUs with what stopped those strategies that came furthest, where no number would do.

    An error where the user fixed something, or where the batch is what no strategy divides.
    """
    if not fix:
        refuse_indivisible_batch(job, searched_rows.space.degrees)
    if min_gpus is not None:
        return note
    why = int(searched_rows.reason.max())
    row = searched_rows.space.select_rows(np.flatnonzero(searched_rows.reason == why)[:1])
    says = CHECKS[why].message(job.with_options(row.common_options), row)
    if fix:
        raise SpecError(f"--fix: leaves nothing that {job.framework.name} runs: {says}")
    return f"{note}: {says}"


def _constrained_on(
    constrained: Callable[[StrategySpace], StrategySpace], fix: Mapping[str, object], space: StrategySpace,
    cluster: ClusterSpec,
) -> StrategySpace:  # fmt: skip
    """A cluster's space under what the user asked for."""
    some = constrained(space)
    return _with_dp(some, cluster, fix["dp"]) if "dp" in fix else some


def _offers(job: JobAndMachines, plan: Plan) -> tuple[NumericsOffer, ...]:
    """What other numerics would bring to a plan, on the GPUs that it uses."""
    used = job.cluster.model_copy(update={"num_gpus": job.cluster.num_gpus - plan.idle_gpus})
    return numerics_offers(job.workload, used, job.framework, plan.strategy)


def _given_options(judge: LongRunObjective | None, fix: Mapping[str, object]) -> tuple[str, ...]:
    """Options that are the framework's in all plans: what goes on after a failure asks it for its replicas."""
    if judge is None or judge.faults.recovery != "replica":
        return ()
    if "dp_replicate" in fix:
        raise SpecError("--fix dp_replicate: with --recovery replica give it as --set framework.dp_replicate")
    return ("dp_replicate",)


def _with_dp(space: StrategySpace, cluster: ClusterSpec, dp: object) -> StrategySpace:
    if not isinstance(dp, int) or cluster.num_gpus % dp:
        raise SpecError(f"--fix: dp ({dp}) must divide gpus ({cluster.num_gpus}); change dp")
    rest = cluster.num_gpus // dp
    if not any(t * c * p == rest for t in space.tp for c in space.cp for p in space.pp):
        raise SpecError(f"--fix: dp ({dp}) leaves no tp x cp x pp = {rest}; change dp")
    return replace(space, dp=dp)


def _search(
    job: JobAndMachines, space: StrategySpace, progress: Progress | None, workers: WorkerProcesses, checks_batch: bool,
    bounded: tuple[SearchObjective, int] | None,
) -> tuple[SpaceCombinations | None, CostedSpace]:  # fmt: skip
    """Enumerate, mask, cost: every legal row, or with an objective those that may be among so many of the best.

    With the rows as they were enumerated, if some legal ones are not costed. With ``checks_batch`` the batch is refused
    where no degrees divide it.
    """
    all_rows = combinations_of_space(space, job.cluster, job.framework)
    if len(all_rows) == 0:
        raise SpecError("the constraints leave no strategy; loosen --fix, --max or --without")
    if checks_batch:
        refuse_indivisible_batch(job, all_rows.degrees)
    verdict = check_strategies(job, all_rows)
    loads = routing_loads_by_ep(job.workload, all_rows.degrees)
    if bounded is not None and np.count_nonzero(verdict.reason < 0) > branch_and_bound.FEW_ROWS:
        searched_rows = branch_and_bound.cost_best_rows(
            job, loads, all_rows, verdict.reason, verdict.shortfall, *bounded, progress
        )
        return all_rows, searched_rows
    return None, cost_all_legal_rows(job, loads, all_rows, verdict.reason, verdict.shortfall, progress, workers)


def _rank(costed: CostedRows, key: NDArray[np.float64], reason: Verdicts, top: int) -> NDArray[np.intp]:
    """Positions in ``costed`` of the fitting rows with the smallest key: the step's time, or the key of ``judge``.

    Among equals the smaller memory comes first, then the earlier row.
    """
    fits = np.flatnonzero(reason[costed.rows] < 0)
    if len(fits) > 20 * top:
        value = key[fits]
        fits = fits[value <= np.partition(value, 10 * top)[10 * top] * (1 + 1e-12)]
    order = np.lexsort((costed.device_bytes[fits], np.round(key[fits], 12)))
    return fits[order[:top]]


def _ranked_again(costed: CostedRows, best: NDArray[np.intp], judge: LongRunObjective | None) -> NDArray[np.intp]:
    """The best rows, ordered by their costs as they are now."""
    some = costed.select_rows(best)
    return best[np.argsort(np.round(some.step_s if judge is None else judge.ranking_key(some), 12), kind="stable")]


def _defaults(
    workload: WorkloadSpec, framework: FrameworkSpec, fix: Mapping[str, object], convention: str
) -> dict[str, str]:
    return {
        "framework": framework.name,
        "objective": "tokens/s/GPU at the fixed global batch, ties by memory",
        "gemm_format": workload.precision.gemm,
        "routing": workload.routing.kind,
        "flops_convention": convention,
        **(
            {"fixed": " ".join(f"{k}={','.join(map(str, values_of_fixed_field(v)))}" for k, v in fix.items())}
            if fix
            else {}
        ),
    }
