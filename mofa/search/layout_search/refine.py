"""Give strategies the layouts with which their steps are shortest, found by CP-SAT and checked by replay."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from mofa.cost.model_flops import FlopsConvention
from mofa.errors import SpecError
from mofa.plan.launch_layout import LaunchLayout, LayoutBy, LayoutSearch
from mofa.plan.result import Plan
from mofa.search.fewer_gpus.merge_plans import with_idle_gpus
from mofa.search.job_setup import routing_loads_by_ep, with_numerics
from mofa.search.layout_search.candidate_layouts import CandidateLayouts
from mofa.search.layout_search.screening import (
    StrategyForLayoutSearch,
    search_layouts_of_strategies,
    strategies_for_layout_search,
)
from mofa.search.layout_search.shortest_split import CLOSE_ENOUGH, WORK
from mofa.search.layout_search.split_problem import ChunkLayers
from mofa.search.one_strategy import checked_strategy_row
from mofa.search.request import check_constraints, checked_framework_or_default
from mofa.search.search_result import Search
from mofa.search.to_plan.builder import CandidatePlan
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.strategy import StrategySpec
from mofa.specs.workload import WorkloadSpec

Progress = Callable[[int, int], None]
CLOSED, REPLAYED = 6, 2
"""Layouts that are costed whole in closed form, and of these played, the shortest steps first. [-]"""
WORK_OF_PLAN = WORK / 2
"""Limit of the solver's deterministic seconds for one plan of several. [s]"""
SCREENING_FRACTION = 1 / 3
"""The most of the time that goes to finding out which strategies are worth a search. [-]"""
SECONDS_OF_WORK = 8.0
"""What a deterministic second of the solver takes with all that is around it: 5 to 8 of strategies of DeepSeek-V3 on
2,048 GPUs, on one core of an AMD EPYC of 2.6 GHz. [s]"""
SECONDS_OF_PLAY, SECONDS_OF_PASS, MOST_PASSES = 0.2, 2e-5, 15_000
"""What playing a strategy's step and fullest rank takes there: at least, for each forward of a layer or chunk, and how
many of these are played before a steady state repeats. [s], [s], [-]"""


@dataclass(frozen=True)
class _Refined:
    """A plan with the layout that was found for it; the candidate is the strategy's, played as far as was needed."""

    candidate: CandidatePlan
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
    framework = checked_framework_or_default(workload, cluster, framework)
    workload, cluster, framework = with_numerics(workload, cluster, framework, ())
    row = checked_strategy_row(workload, cluster, framework, strategy)
    candidate = CandidatePlan(workload, cluster, framework, row, routing_loads_by_ep(workload, row), flops_convention)
    layouts = CandidateLayouts(candidate)
    if not layouts.has_layout_choice:
        raise SpecError(
            f"strategy: there is no layout to search for; give {framework.name} a pipeline (pp above 1) that it takes "
            "layouts of, without recompute=every:n and without expert_overlap"
        )
    refined = _refined(layouts, None, replay=replay, work=work, explains=True)
    plan = refined.candidate.replayed_plan(replay=True) if replay else refined.plan
    return plan.model_copy(update={"layout": refined.plan.layout})


def refine_layouts(search: Search, seconds: float = 12.0, *, progress: Progress | None = None) -> Search:
    """Give the best strategies of a search the layouts with which their steps are shortest.

    Parameters
    ----------
    search
        What :func:`mofa.find_plans` returned.
    seconds
        About how long. It is counted by the solver's work and by what is played, not by the clock, so that the result
        is the same on every machine. [s]
    progress
        Told strategies done, and strategies in all.

    Returns
    -------
    Search
        The same with as many plans, in the order of their new steps. The table has the strategies with their own
        layouts.

    Raises
    ------
    SpecError
        If plans were ranked by whole runs with their failures.

    Notes
    -----
    A strategy that is not among the best may be so with a better layout, whether or not it fits with its own. Those of
    every pipeline and recomputation are searched shortly (:mod:`mofa.search.layout_search.screening`), for a third of
    the time at most. Then plans and these strategies are refined, the shortest steps first, until the next one would
    take longer than what is left. See :func:`mofa.find_layout`; ``plan.layout.search`` says which plans were. What the
    search was held to stays: a layout that was asked for, and the number of ``full:n`` where recomputation was.

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
    report = search.report
    if any(plan.long_run is not None for plan in report.plans):
        raise SpecError("plans are ranked by whole runs; refine those of a search without failures")
    if not report.plans:
        return search
    keeps = "recompute=" in report.defaults.get("fixed", "")
    some, for_screening_s = (
        strategies_for_layout_search(search, partial(_candidate, search)),
        SCREENING_FRACTION * seconds,
    )
    left_s = seconds - for_screening_s
    left_s += max(
        search_layouts_of_strategies(some, for_screening_s, SECONDS_OF_WORK, len(report.plans), keep_recomputed=keeps),
        0.0,
    )
    ranked = [_Ranked(plan, plan) for plan in report.plans]
    _refine_best(ranked, some, left_s, keep_recomputed=keeps, progress=progress)
    _explain_best(ranked)
    ranked = ranked[: len(report.plans)]
    plans = tuple(each.plan if each.own is None else with_idle_gpus(each.plan, each.own) for each in ranked)
    elapsed_s = report.elapsed_s + time.perf_counter() - started
    return replace(search, report=report.model_copy(update={"plans": plans, "elapsed_s": elapsed_s}))


@dataclass
class _Ranked:
    """A plan, that of the search which it was made of, and its strategy where it was refined."""

    plan: Plan
    own: Plan | None
    candidate: CandidatePlan | None = None

    @property
    def is_new(self) -> bool:
        """Whether the search has no such plan, and one rank of it is played so far."""
        changed = self.plan.layout is not None and self.plan.layout.by == "search"
        return self.plan.costed_by == "replay" and self.candidate is not None and (changed or self.own is None)


def _explain_best(ranked: list[_Ranked]) -> None:
    """Sort by step, and play all ranks of the best that may not fit: one that turns out too full is as it was, or left
    out."""
    while True:
        ranked.sort(key=lambda each: round(each.plan.step_s, 12))
        best = ranked[0]
        if not best.is_new or best.candidate is None:
            return
        plan = best.candidate.plan_with_certain_verdict().model_copy(update={"layout": best.plan.layout})
        if plan.memory.fits:
            best.plan = plan
            return
        if best.own is None:
            del ranked[0]
        else:
            best.plan, best.candidate = best.own, None


def _refine_best(
    ranked: list[_Ranked], some: Sequence[StrategyForLayoutSearch], left_s: float, *, keep_recomputed: bool,
    progress: Progress | None,
) -> None:  # fmt: skip
    """Refine plans and other strategies in the order of what is known of their steps, while there is time.

    Refined plans take the place of their own ones in ``ranked``; fitting others come behind.
    """
    replay, wanted = ranked[0].plan.costed_by == "replay", len(ranked)
    of_plan = {id(each.plan): each for each in ranked}
    order = sorted((each for each in some if each.fitting_step_s < math.inf), key=lambda each: each.fitting_step_s)
    for number, each in enumerate(order):
        worst_wanted_s = sorted(plan.plan.step_s for plan in ranked)[wanted - 1]
        is_wanted = each.plan is not None and each.plan.step_s <= worst_wanted_s
        if not is_wanted and each.fitting_step_s >= worst_wanted_s:
            continue
        layouts = each.layouts or CandidateLayouts(each.make(), keep_recomputed=keep_recomputed)
        plays = REPLAYED + (each.plan is None)
        if SECONDS_OF_WORK * WORK_OF_PLAN + plays * replay * _seconds_of_play(layouts.candidate) > left_s:
            break
        if not layouts.has_layout_choice:
            continue
        refined = _refined(layouts, each.plan, replay=replay, work=WORK_OF_PLAN, also=each.split)
        left_s -= refined.seconds
        if each.plan is not None:
            replaced = of_plan[id(each.plan)]
            replaced.plan, replaced.candidate = refined.plan, refined.candidate
        elif refined.plan.memory.fits:
            ranked.append(_Ranked(refined.plan, None, refined.candidate))
        if progress is not None:
            progress(number + 1, len(order))


def _candidate(search: Search, plan: Plan) -> CandidatePlan:
    """A plan's strategy, as the search costed it."""
    used = search.cluster.model_copy(update={"num_gpus": search.cluster.num_gpus - plan.idle_gpus})
    row = checked_strategy_row(search.workload, used, search.framework, plan.strategy)
    loads = routing_loads_by_ep(search.workload, row)
    return CandidatePlan(search.workload, used, search.framework, row, loads, plan.flops_convention)


def _refined(
    layouts: CandidateLayouts, own: Plan | None, *, replay: bool, work: float, also: ChunkLayers | None = None,
    explains: bool = False,
) -> _Refined:  # fmt: skip
    """The strategy with the layout that its step is shortest with, at least as short as its own.

    ``own`` is its plan, where known; ``also`` a split that an earlier search found. With ``explains`` the solver goes
    on to its limit, and all ranks of the layout are played, of which another may turn out fuller.
    """
    candidate, start = layouts.candidate, layouts.start_split
    played, in_part = int(own is None), own is None and replay and not explains
    if own is None:
        own = candidate.plan_with_replayed_time() if in_part else _costed(candidate, replay)
    assert own.layout is not None
    result = layouts.shortest_splits(work, also=also, gap_fraction=0.0 if explains else CLOSE_ENOUGH)
    tried = {split: layouts.step_s_of_split(split) for split in result.splits[:CLOSED] if split != start}
    at_most_s = layouts.own_step_s if own.memory.fits else math.inf
    chosen, best = start, own
    shortest = sorted((split for split in tried if tried[split] < at_most_s), key=lambda split: tried[split])
    for split in shortest[:REPLAYED]:
        played += 1
        if replay and best.memory.fits and layouts.with_layout(split).replayed_time.step_s >= best.step_s:
            continue
        plan = _costed(layouts.with_layout(split), replay)
        if plan.memory.fits and (plan.step_s < best.step_s or not best.memory.fits):
            chosen, best = split, plan
    if explains and replay and chosen != start:
        best = layouts.with_layout(chosen).replayed_plan(replay=True)
        if not best.memory.fits or (own.memory.fits and best.step_s >= own.step_s):
            chosen, best = start, own
    if in_part and chosen == start:
        best = _costed(candidate, replay)
    by: LayoutBy = own.layout.by if chosen == start else "search"
    pipeline_s = layouts.split_problem.pipeline_step_s(chosen)
    search = LayoutSearch(
        before=own.layout.text, before_step_s=own.step_s, before_recompute=own.strategy.recompute,
        before_fits=own.memory.fits, pipeline_s=pipeline_s, bound_s=min(result.bound_s, pipeline_s),
    )  # fmt: skip
    named = chosen.layout(layouts.split_problem.num_predictions)
    layout = LaunchLayout.from_layout(named, by, candidate.job[2].name)
    seconds = SECONDS_OF_WORK * result.work + played * replay * _seconds_of_play(candidate)
    best = best.model_copy(update={"layout": layout.model_copy(update={"search": search})})
    return _Refined(layouts.with_layout(chosen), best, seconds)


def _seconds_of_play(candidate: CandidatePlan) -> float:
    return SECONDS_OF_PLAY + SECONDS_OF_PASS * min(candidate.num_layer_forwards, MOST_PASSES)


def _costed(candidate: CandidatePlan, replay: bool) -> Plan:
    return candidate.replayed_plan(replay=replay, explain=False)
