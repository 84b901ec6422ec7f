"""How many nodes of a cluster stand by: the search is made for several numbers, and the best plan wins."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from mofa.errors import SpecError
from mofa.faults.outlook import failures_per_node_day
from mofa.faults.spares import poisson_spares
from mofa.search.find import Search, estimate, find_plans
from mofa.search.goodput import LongRuns
from mofa.search.longrun import OBJECTIVES, Objective
from mofa.search.result import ClusterSummary, FlopsConvention, Plan
from mofa.search.space import Space, constrain, default_space
from mofa.specs.faults import FaultSpec
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.workload import WorkloadSpec
from mofa.units import SECONDS_PER_DAY

QUANTILES = (0.5, 0.9, 0.99)
"""Probabilities with which the numbers of spares that are tried suffice. [-]"""
MOST_SPARES = 0.25
"""Share of the nodes that may stand by. [-]"""


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
        What fails, what a restart takes, how checkpoints are kept, what it costs. What it lacks leaves figures unknown,
        and without reliability, restarts or storage plans are ranked by their steps.
    objective
        ``tokens`` per second and GPU, ``days``, ``usd`` or ``kwh`` of the whole run. All GPUs are paid for, so that the
        first three rank alike.
    top, replay, options
        As in :func:`mofa.search.find.find_plans`.

    Raises
    ------
    SpecError
        If the objective is unknown or cannot be known from these facts, or there are more spares than nodes.

    Notes
    -----
    Where ``faults.spares`` is absent, none are tried (the scheduler replaces nodes), and the numbers that suffice with
    50, 90 and 99 % (:func:`mofa.faults.spares.poisson_spares`), each raised to the next for which the rest of the
    cluster admits a strategy. The best of the closed forms decides, and is played out where ``replay`` asks for it.
    """
    started = time.perf_counter()
    if objective not in OBJECTIVES:
        raise SpecError(f"objective: {objective!r} is unknown; use one of {', '.join(OBJECTIVES)}")
    if framework is None:
        from mofa.specs.load import load_framework

        framework = load_framework(workload.framework or "megatron")
    numbers = spare_numbers(workload, cluster, framework, faults, options)
    judges = [
        LongRuns(workload, without_spares(cluster, spares, faults.name), framework, faults, objective, spares)
        for spares in numbers
    ]
    judges[0].check()
    found: list[tuple[float, LongRuns, Search]] = []
    played = replay and len(judges) == 1
    for judge in judges:
        try:
            search = find_plans(
                workload, judge.cluster, framework=framework, top=top, replay=played, judge=judge, **options
            )
        except SpecError:
            if judge is judges[0]:
                raise
            continue  # what the user fixed does not go with fewer GPUs
        judge = _as_searched(judge, search)
        plans = search.report.plans
        found.append((judge.order(plans[0]) if plans else np.inf, judge, search))
    _, judge, search = min(found, key=lambda item: item[0])
    if replay and not played:
        search = find_plans(workload, judge.cluster, framework=framework, top=top, replay=True, judge=judge, **options)
    return _whole(search, judge, cluster, [j.spares for _, j, _ in found], objective, started)


def estimate_long_run(
    workload: WorkloadSpec,
    cluster: ClusterSpec,
    strategy: object,
    faults: FaultSpec,
    *,
    framework: FrameworkSpec | None = None,
    flops_convention: FlopsConvention = "causal",
    replay: bool = True,
) -> Plan:
    """Cost one strategy with the figures of a long run of it.

    Parameters
    ----------
    cluster
        All machines; ``faults.spares`` of its nodes stand by, none where that is absent.
    strategy, flops_convention, replay
        As in :func:`mofa.search.find.estimate`; the strategy is of the GPUs without the spares.
    """
    if framework is None:
        from mofa.specs.load import load_framework

        framework = load_framework(workload.framework or "megatron")
    spares = faults.spares or 0
    job = without_spares(cluster, spares, faults.name)
    plan = estimate(workload, job, strategy, framework=framework, flops_convention=flops_convention, replay=replay)
    return LongRuns(workload, job, framework, faults, spares=spares).finished(plan)


def spare_numbers(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, faults: FaultSpec,
    options: Mapping[str, Any] | None = None,
) -> list[int]:  # fmt: skip
    """Numbers of spare nodes to try: the one asked for, or none and those that may pay. [nodes]

    Raises
    ------
    SpecError
        If the spares asked for leave no node.
    """
    if faults.spares is not None:
        return [faults.spares]
    reliability, restart = faults.reliability, faults.restart
    node = cluster.node.gpus_per_node
    nodes = cluster.num_gpus // node
    if reliability is None or restart is None or faults.storage is None or nodes < 2:
        return [0]
    gone = sum(kind.share.value for kind in reliability.kinds if kind.path == "node")
    rate = failures_per_node_day(reliability, node) * nodes * gone / SECONDS_PER_DAY
    if rate == 0:
        return [0]
    wanted = sorted({max(int(poisson_spares(rate, restart.repair_s.value, q)), 1) for q in QUANTILES})
    options = options or {}
    numbers = [0]
    for least in wanted:
        for spares in range(max(least, numbers[-1]), int(MOST_SPARES * nodes) + 1):
            smaller = without_spares(cluster, spares, faults.name)
            if spares == numbers[-1] or _admits(workload, smaller, framework, options):
                numbers.append(spares)
                break
    return list(dict.fromkeys(numbers))


def without_spares(cluster: ClusterSpec, spares: int, where: str) -> ClusterSpec:
    """The cluster that the job runs on, without the nodes that stand by."""
    node = cluster.node.gpus_per_node
    left = cluster.num_gpus - spares * node
    if left < min(node, cluster.num_gpus):
        raise SpecError(
            f"{where}: {spares} spares of {node} GPUs leave nothing of {cluster.num_gpus} GPUs; the GPUs include the "
            f"spares, so take at most {max(cluster.num_gpus // node - 1, 0)}"
        )
    return cluster.model_copy(update={"num_gpus": left})


def _admits(workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, options: Mapping[str, Any]) -> bool:
    """Whether some degrees divide these GPUs and the batch: cheap, before any search."""
    space: Space = default_space(workload, cluster, framework)
    try:
        space = constrain(
            space, fix=options.get("fix") or {}, maximum=options.get("maximum") or {},
            with_=options.get("with_") or (), without=options.get("without") or (),
        )  # fmt: skip
    except SpecError:
        return False
    inner = np.unique([t * c * p for t in space.tp for c in space.cp for p in space.pp])
    inner = inner[cluster.num_gpus % inner == 0]
    dp = cluster.num_gpus // inner
    fixed = (options.get("fix") or {}).get("dp")
    return bool(np.any((workload.batch.global_batch % dp == 0) & ((dp == fixed) if fixed is not None else True)))


def _as_searched(judge: LongRuns, search: Search) -> LongRuns:
    """The judge of the job as the search ran it, with what ``--with`` changed."""
    from dataclasses import replace

    return replace(judge, workload=search.workload, framework=search.framework)


def _whole(
    search: Search, judge: LongRuns, cluster: ClusterSpec, tried: list[int], objective: Objective, started: float
) -> Search:
    """The search as one of the whole cluster, with every plan's figures."""
    from dataclasses import replace

    judge = _as_searched(judge, search)
    report = search.report
    by = {"tokens": "effective_tokens_per_s_per_gpu"}.get(objective, objective)
    known = "ettr" not in judge.missing()
    described = f"{by}, over the whole run with its failures" if known else "tokens_per_s_per_gpu"
    defaults = {**report.defaults, "objective": described, "fault profile": judge.faults.name}
    if known:
        defaults["checkpoints"] = judge.faults.checkpoint.mode
        defaults["spare nodes"] = f"{judge.spares} (of {', '.join(map(str, tried))} tried)"
        defaults["power"] = "a model: shares of the TDP by what a GPU does, node overhead, PUE"
    whole = report.model_copy(
        update={
            "cluster": ClusterSummary.of(cluster),
            "objective": by if known else report.objective,
            "plans": tuple(judge.finished(plan) for plan in report.plans),
            "elapsed_s": time.perf_counter() - started,
            "defaults": defaults,
        }
    )
    return replace(search, report=type(report).model_validate(whole.model_dump()))
