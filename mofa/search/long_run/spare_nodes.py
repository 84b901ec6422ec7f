"""How many nodes of a cluster to keep as spares: search for several numbers and take the best plan."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mofa.errors import SpecError, StrategyError
from mofa.plan.long_run import FIGURES, OBJECTIVES, Objective
from mofa.plan.result import FlopsConvention, Plan
from mofa.plan.summaries import ClusterSummary
from mofa.search.entry_points import find_plans
from mofa.search.goodput import LongRunObjective, storage_note
from mofa.search.near_best import space_near_best
from mofa.search.one_plan import estimate
from mofa.search.search_result import Search
from mofa.search.space import StrategySpace, default_space, without_indivisible_degrees
from mofa.specs.faults import FaultSpec
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.workload import WorkloadSpec

MOST_SPARES = 0.25
"""Largest share of the nodes that may be spares. [-]"""
SCOUTED = 16
"""Numbers of spares searched near the best plans without spares. [-]"""
SEARCHED, CLOSE = 2, 0.02
"""Numbers of spares searched in the whole space, and how far their scouted plan may be behind the best. [-]"""


def find_long_runs(
    workload: WorkloadSpec,
    cluster: ClusterSpec,
    faults: FaultSpec,
    *,
    framework: FrameworkSpec | None = None,
    objective: Objective = "tokens",
    top: int = 10,
    replay: bool = False,
    **options: Any,
) -> Search:
    """The best strategies of a workload on a cluster over a long run with its failures.

    Parameters
    ----------
    workload, cluster, framework
        The job, all machines with the spares among them, the framework.
    faults
        Rates of failures, times of restarts, checkpoints, prices. A figure that needs a missing fact is unknown.
        Without reliability, restarts or storage, plans are ranked by their steps.
    objective
        ``tokens`` per second and GPU, ``days``, ``usd`` or ``kwh`` of the whole run. The first three rank alike, as all
        GPUs are paid for.
    top
        How many plans to return. [-]
    replay, options
        As in :func:`mofa.search.entry_points.find_plans`.

    Returns
    -------
    Search
        The report for the whole cluster, with long-run figures in every plan, and the table for the computing nodes.

    Raises
    ------
    SpecError
        If the objective is unknown or cannot be known from these facts, or there are more spares than nodes.

    Notes
    -----
    Where ``faults.spares`` is absent, the number of spares is chosen in four steps:

    1. A search without spares: all GPUs compute. 2. Closed forms rate every number of spares with the step of its best
    plan (:func:`spare_counts_most_promising_first`). Numbers
       that leave GPUs which no degrees and batch divide drop out.
    3. The most promising are searched near the best plans (:func:`space_near_best`).
    4. The best two of these are searched in the whole space.

    The best by closed form wins, and is replayed where ``replay`` asks for it.

    References
    ----------
    Effective training time ratio (ETTR): Kokolis et al. 2024, arXiv 2410.21680. docs/faults.md has the sources of all
    other figures.

    Examples
    --------
    >>> import mofa
    >>> job, machines = mofa.load_workload("llama3-8b", tokens="1T"), mofa.load_cluster("h100-hgx", 16)
    >>> faults = mofa.load_faults("llama3", {"spares": 0})
    >>> search = mofa.find_long_runs(job, machines, faults, fix={"tp": 2, "pp": 2, "vpp": 1, "cp": 1}, top=1)
    >>> plan = search.report.plans[0]
    >>> plan.days.p10 < plan.days.p50 < plan.days.p90
    True
    """
    started = time.perf_counter()
    if objective not in OBJECTIVES:
        raise SpecError(f"objective: {objective!r} is unknown; use one of {', '.join(OBJECTIVES)}")
    if framework is None:
        from mofa.specs.load import load_framework

        framework = load_framework(workload.framework or "megatron")
    first = faults.spares or 0
    judge = LongRunObjective(workload, without_spares(cluster, first, faults.name), framework, faults, objective, first)
    judge.refuse_unknown_objective()
    alone = faults.spares is not None or set(FIGURES) <= set(judge.unknown_figures())
    again = replay and not alone  # then the plans of these searches are made anew, with their bands
    options = {"closed_form_margin": not replay, **options}
    # numbers of spares are scouted near the shortest steps, which may not be those of the best runs
    of_first = options if alone else {**options, "every_row": True}
    full_search = _searched(judge, replay and alone, top=top, banded=not again, **of_first)
    searches, tried = [full_search], [first]
    if not alone and searches[0].search.report.plans:
        scouts = _scouts(searches[0], cluster, **options)
        tried += sorted(scout.judge.spares for scout in scouts)
        near = sorted((s for s in scouts if s.order < searches[0].order * (1 + CLOSE)), key=lambda scout: scout.order)
        searches += [
            _searched(s.judge, False, _dividing(s.judge), top=top, banded=not again, **options) for s in near[:SEARCHED]
        ]
    best = min(searches, key=lambda item: item.order)
    if again:
        best = _searched(best.judge, True, best.space, top=top, searched=best.search, **options)
    return _whole_cluster(best.search, best.judge, cluster, tried, objective, started)


@dataclass(frozen=True)
class _SearchedSize:
    """A search with one number of spares, the key of its best plan, and the space that was searched."""

    judge: LongRunObjective
    search: Search
    order: float
    space: StrategySpace | None = None


def _searched(
    judge: LongRunObjective, replay: bool, space: StrategySpace | None = None, **options: Any
) -> _SearchedSize:
    """A search ranked by a judge."""
    search = find_plans(
        judge.workload, judge.cluster, framework=judge.framework, replay=replay, judge=judge, space=space, **options
    )
    judge = replace(judge, workload=search.workload, framework=search.framework)  # what --with changed
    plans = search.report.plans
    return _SearchedSize(judge, search, judge.plan_ranking_key(plans[0]) if plans else np.inf, space)


def _scouts(full_search: _SearchedSize, cluster: ClusterSpec, **options: Any) -> list[_SearchedSize]:
    """Searches near the best plans, with the promising numbers of spares."""
    judge = full_search.judge
    options = {name: value for name, value in options.items() if name != "progress"}
    costed, reasons = full_search.search.costed, full_search.search.reasons
    scouts: list[_SearchedSize] = []
    for spares in spare_counts_most_promising_first(judge, full_search.search.report.plans[0]):
        smaller = replace(judge, cluster=without_spares(cluster, spares, judge.faults.name), spares=spares)
        space = _dividing(smaller)
        if not space.pp:
            continue
        try:
            scouts.append(
                _searched(smaller, False, space_near_best(costed, reasons, space), top=1, banded=False, **options)
            )
        except SpecError:
            continue  # what the user fixed does not go with fewer GPUs
        if len(scouts) == SCOUTED:
            break
    return scouts


def _dividing(judge: LongRunObjective) -> StrategySpace:
    """The space of strategies that a job can have on its GPUs."""
    space = default_space(judge.workload, judge.cluster, judge.framework)
    return without_indivisible_degrees(space, judge.cluster.num_gpus, judge.workload.batch.global_batch)


def spare_counts_most_promising_first(judge: LongRunObjective, plan: Plan) -> list[int]:
    """Numbers of spare nodes, the most promising first, by closed forms of all numbers at once.

    Parameters
    ----------
    judge
        Rates runs on all GPUs, without spares.
    plan
        The best plan there. Fewer GPUs are assumed to have its tokens per second and GPU, and its checkpoint.

    Returns
    -------
    list of int
        Nodes, none more than a quarter of all. [nodes]

    Examples
    --------
    >>> import mofa
    >>> job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 64)
    >>> plan = mofa.estimate(job, machines, "tp=2 recompute=full", replay=False)
    >>> judge = LongRunObjective(job, machines, mofa.load_framework("megatron"), mofa.load_faults("llama3"))
    >>> spare_counts_most_promising_first(judge, plan)
    [1, 2]
    """
    node, nodes = judge.cluster.node.gpus_per_node, judge.num_nodes
    spares = np.arange(1, int(MOST_SPARES * nodes) + 1)
    spares = spares[nodes - spares >= judge.faults.checkpoint.least_nodes_for_copies]
    if len(spares) == 0:
        return []
    outlook = judge.long_run_outlook(
        np.array([plan.step_s]), np.array([plan.checkpoint_bytes or 0.0]), plan.strategy.dp, spares=spares,
        num_gpus=judge.cluster.num_gpus - spares * node,
    )  # fmt: skip
    return [int(s) for s in spares[np.argsort(-outlook.ettr * (nodes - spares), kind="stable")]]


def estimate_long_run(
    workload: WorkloadSpec,
    cluster: ClusterSpec,
    strategy: object,
    faults: FaultSpec,
    *,
    framework: FrameworkSpec | None = None,
    flops_convention: FlopsConvention = "causal",
    replay: bool = True,
    jobs: int = 1,
) -> Plan:
    """Predict a long run of one strategy: its step, and the productive time beside failures, checkpoints and restarts.

    Parameters
    ----------
    workload, framework
        The job with its tokens, and the framework; the workload's own or ``megatron`` where absent.
    cluster
        All machines; ``faults.spares`` of the nodes are spares, none where that is absent.
    faults
        What fails, what a restart takes, how checkpoints are kept, what it costs.
    strategy, flops_convention, replay
        As in :func:`mofa.search.one_plan.estimate`; the strategy is of the GPUs without the spares.
    jobs
        Processes that play, this one counted. [-]

    Returns
    -------
    Plan
        The plan with days, GPU-hours, cost and energy of the whole run. A figure that these facts leave unknown is
        None, and ``unknown`` has the reason.

    Raises
    ------
    StrategyError
        If the framework cannot run it on these GPUs.
    SpecError
        If there are more spares than nodes, or the strategy cannot be read.

    Notes
    -----
    ``ettr`` is productive over wall-clock time; effective_tokens_per_s_per_gpu is ettr * tokens_per_s_per_gpu * the
    share of the GPUs that compute.

    References
    ----------
    Effective training time ratio (ETTR): Kokolis et al. 2024, arXiv 2410.21680. docs/faults.md has the sources of all
    other figures.

    Examples
    --------
    >>> import mofa
    >>> job, machines = mofa.load_workload("llama3-8b", tokens="1T"), mofa.load_cluster("h100-hgx", 64)
    >>> plan = mofa.estimate_long_run(job, machines, "tp=2 recompute=full", mofa.load_faults("llama3"), replay=False)
    >>> round(plan.effective_tokens_per_s_per_gpu / plan.tokens_per_s_per_gpu - plan.ettr, 9)
    0.0
    >>> plan.usd, plan.unknown
    (None, {'usd': 'no price given'})
    """
    if framework is None:
        from mofa.specs.load import load_framework

        framework = load_framework(workload.framework or "megatron")
    spares = faults.spares or 0
    job = without_spares(cluster, spares, faults.name)
    try:
        plan = estimate(
            workload, job, strategy, framework=framework, flops_convention=flops_convention, replay=replay, jobs=jobs
        )
    except StrategyError as error:
        note = indivisible_batch_note(workload.batch.global_batch, job.num_gpus) if spares else ""
        raise StrategyError(f"{error}; {note}" if note else str(error)) from None
    return LongRunObjective(workload, job, framework, faults, spares=spares).with_long_run_figures(plan)


def indivisible_batch_note(global_batch: int, num_gpus: int, which: str = "GPUs that compute") -> str:
    """That a batch does not divide over the GPUs that compute, and which near one would; empty where it does.

    The odd factor of the number of GPUs is what degrees of powers of two cannot take: the batch must have it.

    Parameters
    ----------
    global_batch
        [sequences]
    num_gpus
        GPUs that compute. [-]
    which
        What they are, for the sentence.

    Returns
    -------
    str
        The sentence, or nothing.

    Examples
    --------
    >>> indivisible_batch_note(1024, 56)
    'a batch of 1,024 has no factor 7 as the 56 GPUs that compute have; 1,008 or 1,064 would divide over them'
    >>> indivisible_batch_note(1024, 64), indivisible_batch_note(1008, 56)
    ('', '')
    """
    odd = num_gpus // (num_gpus & -num_gpus)
    if global_batch % odd == 0:
        return ""
    less, more = global_batch // num_gpus * num_gpus, (global_batch // num_gpus + 1) * num_gpus
    would = f"{less:,} or {more:,}" if less else f"{more:,}"
    have = f"has no factor {odd} as the {num_gpus:,} {which} have"
    return f"a batch of {global_batch:,} {have}; {would} would divide over them"


def without_spares(cluster: ClusterSpec, spares: int, where: str) -> ClusterSpec:
    """The cluster that the job runs on, without the spare nodes.

    Parameters
    ----------
    cluster
        All GPUs, spares among them.
    spares
        [nodes]
    where
        What asked for them, for the message.

    Returns
    -------
    ClusterSpec
        The same nodes, fewer of them.

    Raises
    ------
    SpecError
        If they leave less than a node.

    Examples
    --------
    >>> import mofa
    >>> without_spares(mofa.load_cluster("h100-hgx", 64), 1, "spares").num_gpus
    56
    """
    node = cluster.node.gpus_per_node
    left = cluster.num_gpus - spares * node
    if left < min(node, cluster.num_gpus):
        raise SpecError(
            f"{where}: {spares} spares of {node} GPUs leave nothing of {cluster.num_gpus} GPUs; the GPUs include the "
            f"spares, so take at most {max(cluster.num_gpus // node - 1, 0)}"
        )
    return cluster.model_copy(update={"num_gpus": left})


def _whole_cluster(
    search: Search,
    judge: LongRunObjective,
    cluster: ClusterSpec,
    tried: list[int],
    objective: Objective,
    started: float,
) -> Search:
    """The search as one of the whole cluster, with the long-run figures of every plan."""
    report = search.report
    by = {"tokens": "effective_tokens_per_s_per_gpu"}.get(objective, objective)
    known = "ettr" not in judge.unknown_figures()
    described = f"{by}, over the whole run with its failures" if known else "tokens_per_s_per_gpu"
    profile = judge.faults.name if judge.faults.reliability is not None else "none with reliability"
    defaults = {**report.defaults, "objective": described, "fault profile": profile}
    if known:
        defaults["checkpoints"] = judge.faults.checkpoint.mode
        most = f"of {len(tried)} numbers up to {max(tried)} tried" if len(tried) > 1 else "no other number tried"
        defaults["spare nodes"] = f"{judge.spares} ({most})"
        if judge.faults.storage is not None:
            defaults["storage"] = storage_note(judge.faults.name, judge.faults.storage).removeprefix("storage: ")
        defaults["power"] = "a model: shares of the TDP by what a GPU does, node overhead, PUE"
    if indivisible := indivisible_batch_note(judge.workload.batch.global_batch, judge.cluster.num_gpus):
        defaults["batch"] = indivisible
    least, note = report.min_gpus, report.min_gpus_note
    if least is not None and judge.spares:  # found for what computes; what is asked for includes what stands by
        least += judge.spare_gpus
        note = f"{note}, {judge.spare_gpus:,} GPUs that stand by included"
    joined = report.model_copy(
        update={
            "cluster": ClusterSummary.from_spec(cluster),
            "min_gpus": least,
            "min_gpus_note": note,
            "objective": by if known else report.objective,
            "plans": tuple(judge.with_long_run_figures(plan) for plan in report.plans),
            "elapsed_s": time.perf_counter() - started,
            "defaults": defaults,
        }
    )
    return replace(search, report=type(report).model_validate(joined.model_dump()))
