"""Give strategies the layouts with which their steps are shortest, found by CP-SAT and checked by replay."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from mofa.cost.model_flops import FlopsConvention
from mofa.errors import SpecError
from mofa.plan.launch_layout import LaunchLayout, LayoutBy, LayoutSearch
from mofa.plan.result import Plan
from mofa.search.fewer_gpus.merge_plans import with_idle_gpus
from mofa.search.job_setup import routing_loads_by_ep, with_numerics
from mofa.search.layout_search.problem_from_strategy import split_of_strategy, split_problem
from mofa.search.layout_search.shortest_split import WORK, shortest_split
from mofa.search.layout_search.split_problem import ChunkLayers, FloatA
from mofa.search.one_strategy import strategy_row
from mofa.search.request import check_constraints, resolve_framework
from mofa.search.search_result import Search
from mofa.search.to_plan.builder import Candidate, memory_limit_bytes
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.strategy import StrategySpec
from mofa.specs.workload import WorkloadSpec

Progress = Callable[[int, int], None]
CLOSED, REPLAYED = 6, 2
"""Layouts that are costed whole in closed form, and of these played, the shortest steps first. [-]"""
WORK_OF_PLAN = WORK / 2
"""Limit of the solver's deterministic seconds for one plan of several. [s]"""
SECONDS_OF_WORK = 12.0
"""What a deterministic second of the solver takes with all that is around it, on one core of 2.5 GHz. [s]"""
SECONDS_OF_PLAY, SECONDS_OF_PASS, MOST_PASSES = 0.3, 6e-5, 15_000
"""What playing a strategy takes there: at least, for each forward of a layer or chunk, and how many of these are played
before a steady state repeats. [s], [s], [-]"""


@dataclass(frozen=True)
class _Refined:
    """A plan with the layout that was found for it; the candidate is the strategy's, played as far as was needed."""

    candidate: Candidate
    plan: Plan
    seconds: float
    """What the search counts for. [s]"""


def find_layout(
    workload: WorkloadSpec,
    cluster: ClusterSpec,
    strategy: StrategySpec | Mapping[str, object] | str,
    *,
    framework: FrameworkSpec | None = None,
    flops_convention: FlopsConvention = "causal",
    replay: bool = True,
    work: float = WORK,
) -> Plan:
    """Find the layout of a strategy's pipeline with which its step is shortest.

    Parameters
    ----------
    workload, cluster, framework
        The job, the machines, the framework; the workload's own or ``megatron`` where absent.
    strategy
        As :func:`mofa.estimate` takes it. A layout that it names is where the search begins; without one the
        framework's own split is.
    flops_convention
        Whether TFLOP/s and MFU halve causal attention.
    replay
        Whether layouts are compared by replay; else in closed form.
    work
        Limit of CP-SAT, in its deterministic seconds: the result is the same on every machine. [s]

    Returns
    -------
    Plan
        The strategy with that layout, or with its own where none is shorter. ``plan.layout.search`` has the step
        before, and a lower bound of every layout's pipeline. Of ``full:n`` another n may be chosen.

    Raises
    ------
    SpecError
        If there is no layout to choose: no pipeline, or no option of the framework that says one.
    StrategyError
        If the framework cannot run the strategy on these GPUs.

    Notes
    -----
    The heaviest rank is made lightest, then the step shortest, under every rank's memory
    (:mod:`mofa.search.layout_search.shortest_split`). A layout that replay finds slower, or too big, is not taken.

    Examples
    --------
    >>> import mofa
    >>> job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
    >>> plan = mofa.find_layout(job, machines, "tp=2 pp=4 recompute=full", replay=False)
    >>> plan.layout.text[:7], plan.layout.by
    ('Et*8|t*', 'search')
    """
    check_constraints({}, {}, 1, flops_convention)
    framework = resolve_framework(workload, cluster, framework)
    workload, cluster, framework = with_numerics(workload, cluster, framework, ())
    row = strategy_row(workload, cluster, framework, strategy)
    candidate = Candidate(workload, cluster, framework, row, routing_loads_by_ep(workload, row), flops_convention)
    refined = _refined(candidate, None, replay=replay, work=work)
    if refined is None:
        raise SpecError(
            f"strategy: there is no layout to search for; give {framework.name} a pipeline (pp above 1) that it takes "
            "layouts of, without recompute=every:n and without expert_overlap"
        )
    plan = refined.candidate.plan(replay=True) if replay else refined.plan
    return plan.model_copy(update={"layout": refined.plan.layout})


def refine_layouts(search: Search, seconds: float = 10.0, *, progress: Progress | None = None) -> Search:
    """Give the best plans of a search the layouts with which their steps are shortest.

    Parameters
    ----------
    search
        What :func:`mofa.find_plans` returned.
    seconds
        About how long. It is counted by the solver's work and by what is played, not by the clock, so that the result
        is the same on every machine. [s]
    progress
        Told plans done, and plans in all.

    Returns
    -------
    Search
        The same with plans in the order of their new steps. The table has the strategies with their own layouts.

    Raises
    ------
    SpecError
        If plans were ranked by whole runs with their failures.

    Notes
    -----
    Plans are refined from the best on, until the next one would take longer than what is left. See
    :func:`mofa.find_layout`; ``plan.layout.search`` says which plans were. What the search was held to stays: a layout
    that was asked for, and the number of ``full:n`` where recomputation was.

    Examples
    --------
    >>> import mofa
    >>> job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
    >>> search = mofa.find_plans(job, machines, fix={"tp": 2, "pp": 4, "recompute": "full"}, top=1, replay=False)
    >>> refined = mofa.refine_layouts(search, 5.0)
    >>> refined.report.plans[0].step_s <= search.report.plans[0].step_s
    True
    """
    started = time.perf_counter()
    report, left_s = search.report, seconds
    if any(plan.long_run is not None for plan in report.plans):
        raise SpecError("plans are ranked by whole runs; refine those of a search without failures")
    by_number: dict[int, _Refined] = {}
    keeps = "recompute=" in report.defaults.get("fixed", "")
    for number, plan in enumerate(report.plans):
        candidate, replay = _candidate(search, plan), plan.costed_by == "replay"
        if plan.layout is None or plan.layout.by == "strategy":
            continue
        if SECONDS_OF_WORK * WORK_OF_PLAN + REPLAYED * replay * _seconds_of_play(candidate) > left_s:
            break
        refined = _refined(candidate, plan, replay=replay, work=WORK_OF_PLAN, keep_recomputed=keeps)
        if refined is not None:
            by_number[number] = refined
            left_s -= refined.seconds
        if progress is not None:
            progress(number + 1, len(report.plans))
    plans = {
        number: by_number[number].plan if number in by_number else plan for number, plan in enumerate(report.plans)
    }
    order = sorted(plans, key=lambda number: (round(plans[number].step_s, 12), number))
    ranked = [plans[number] for number in order]
    if order and order[0] in by_number and _is_new(ranked[0]) and ranked[0].costed_by == "replay":
        ranked[0] = by_number[order[0]].candidate.plan(replay=True).model_copy(update={"layout": ranked[0].layout})
    ranked = [with_idle_gpus(plan, report.plans[number]) for number, plan in zip(order, ranked, strict=True)]
    elapsed_s = report.elapsed_s + time.perf_counter() - started
    return replace(search, report=report.model_copy(update={"plans": tuple(ranked), "elapsed_s": elapsed_s}))


def _is_new(plan: Plan) -> bool:
    return plan.layout is not None and plan.layout.by == "search"


def _candidate(search: Search, plan: Plan) -> Candidate:
    """A plan's strategy, as the search costed it."""
    used = search.cluster.model_copy(update={"num_gpus": search.cluster.num_gpus - plan.idle_gpus})
    row = strategy_row(search.workload, used, search.framework, plan.strategy)
    loads = routing_loads_by_ep(search.workload, row)
    return Candidate(search.workload, used, search.framework, row, loads, plan.flops_convention)


def _refined(
    candidate: Candidate, own: Plan | None, *, replay: bool, work: float, keep_recomputed: bool = False
) -> _Refined | None:  # fmt: skip
    """The strategy with the layout that its step is shortest with, at least as short as its own; None where no layout
    can be said. ``own`` is its plan, where known."""
    estimator, limit_bytes = candidate.estimator, memory_limit_bytes(*candidate.job[1:3])
    problem = split_problem(estimator, limit_bytes, keep_recomputed=keep_recomputed)
    if problem is None:
        return None
    own = own or _costed(candidate, replay)
    assert own.layout is not None
    start, framework = split_of_strategy(estimator), candidate.job[2].name
    known: dict[ChunkLayers, Candidate] = {start: candidate}

    def with_layout(split: ChunkLayers) -> Candidate:
        if split not in known:
            known[split] = candidate.with_layout(split.layout(problem.num_predictions).text, _layers(candidate, split))
        return known[split]

    def over_bytes(split: ChunkLayers) -> FloatA:
        layout = split.layout(problem.num_predictions).text
        changed = estimator if split == start else estimator.with_layout(layout, _layers(candidate, split))
        return np.array(changed.stage_device_bytes()) - limit_bytes

    def closed_s(split: ChunkLayers) -> float:
        return float(with_layout(split).estimator.component_seconds(every_stage=True)[0].sum())

    result = shortest_split(problem, start, over_bytes=over_bytes, work=work)
    tried = {split: closed_s(split) for split in result.splits[:CLOSED] if split != start}
    at_most_s = closed_s(start) if own.memory.fits else np.inf
    chosen, best = start, own
    played = 0
    for split in sorted((split for split in tried if tried[split] < at_most_s), key=lambda split: tried[split]):
        if played == REPLAYED:
            break
        played += 1
        if replay and best.memory.fits and with_layout(split).time.step_s >= best.step_s:
            continue
        plan = _costed(with_layout(split), replay)
        if plan.memory.fits and (plan.step_s < best.step_s or not best.memory.fits):
            chosen, best = split, plan
    if replay and chosen != start:  # with all that a plan explains, other ranks may turn out fuller
        best = with_layout(chosen).plan(replay=True)
        if not best.memory.fits or (own.memory.fits and best.step_s >= own.step_s):
            chosen, best = start, own
    by: LayoutBy = own.layout.by if chosen == start else "search"
    pipeline_s = problem.step_s(chosen)
    search = LayoutSearch(
        before=own.layout.text, before_step_s=own.step_s, before_recompute=own.strategy.recompute,
        before_fits=own.memory.fits, pipeline_s=pipeline_s, bound_s=min(result.bound_s, pipeline_s),
    )  # fmt: skip
    layout = LaunchLayout.from_layout(chosen.layout(problem.num_predictions), by, framework)
    seconds = SECONDS_OF_WORK * result.work + played * replay * _seconds_of_play(candidate)
    best = best.model_copy(update={"layout": layout.model_copy(update={"search": search})})
    return _Refined(with_layout(chosen), best, seconds)


def _seconds_of_play(candidate: Candidate) -> float:
    return SECONDS_OF_PLAY + SECONDS_OF_PASS * min(candidate.num_layer_forwards, MOST_PASSES)


def _costed(candidate: Candidate, replay: bool) -> Plan:
    return candidate.plan(replay=True, explain=False) if replay else candidate.plan_in_closed_form()


def _layers(candidate: Candidate, split: ChunkLayers) -> int:
    """The number of recomputed layers of a strategy with a split, as its table says it."""
    own = int(candidate.job[3].recompute_layers[0])
    return own if own < 0 else split.recomputed
