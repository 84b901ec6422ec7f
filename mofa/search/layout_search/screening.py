"""Which strategies of a search a better layout may bring among the best: a short search of each, the likeliest first.

Strategies of one pipeline depth, number of chunks and schedule have the same split of their own, and gain alike by a
better one. The first of them says how much the others may gain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from mofa.plan.result import Plan
from mofa.search.job_setup import routing_loads_by_ep
from mofa.search.layout_search.candidate_layouts import CandidateLayouts
from mofa.search.layout_search.cut_rows import timed_rows_of_all_pipelines
from mofa.search.layout_search.split_problem import ChunkLayers
from mofa.search.search_result import Search
from mofa.search.to_plan.builder import CandidatePlan

WORK_OF_SCREENING, CHUNKS_OF_SCREENING = 0.1, 300_000
"""Limit of the solver's deterministic seconds for one strategy, of which an eighth makes its heaviest rank lightest;
and of chunks that moves of one layer try in one go. [s], [-]"""
SECONDS_OF_ESTIMATE, SECONDS_OF_STRATEGY, SECONDS_OF_CHUNK = 0.02, 0.05, 4e-7
"""What a strategy's estimate and bound take, what screening it takes beside the solver's work, and each chunk of a
split that moves of one layer lead to, on one core of an AMD EPYC of 2.6 GHz. [s]"""
Shape = tuple[int, int, int, bool]
"""pp, vpp, schedule, and whether the framework's own split fits."""
MISSED = 1.25
"""By how much a strategy of a shape is put back when none of the layouts fits that another of it was tried with. [-]"""


@dataclass
class StrategyForLayoutSearch:
    """A strategy that a pipeline layout may be searched for, with its steps in closed form by its own and by the best
    layout that was found. [s]

    ``plan`` is its plan where it is among the best as it is. ``split`` is the best that was found.
    """

    shape: Shape
    make: Callable[[], CandidatePlan]
    own_step_s: float
    plan: Plan | None
    screened_step_s: float = math.inf
    split: ChunkLayers | None = None
    is_screened: bool = False
    layouts: CandidateLayouts | None = None
    """What was tried of it, where anything was."""

    @property
    def fitting_step_s(self) -> float:
        """The shortest step that is known to fit. [s]"""
        return min(self.screened_step_s, self.own_step_s if self.shape[-1] else math.inf)


def strategies_for_layout_search(
    search: Search, candidate_of_plan: Callable[[Plan], CandidatePlan]
) -> list[StrategyForLayoutSearch]:
    """The plans of a search, and of each shape and recomputation the strategy with the shortest step beside them.

    Parameters
    ----------
    search
        What :func:`mofa.find_plans` returned.
    candidate_of_plan
        Gives the strategy of a plan.

    Returns
    -------
    list
        The shortest steps first.
    """
    timed = timed_rows_of_all_pipelines(search)
    table, loads = timed.table, routing_loads_by_ep(search.workload, timed.table)
    plans = {(plan.strategy, plan.idle_gpus): plan for plan in search.report.plans}
    convention = search.report.plans[0].flops_convention
    out, seen = [], set()

    def candidate(i: int) -> CandidatePlan:
        row = table.select_rows(np.array([i]))
        return CandidatePlan(search.workload, search.cluster, search.framework, row, loads, convention)

    for i in np.argsort(timed.step_s, kind="stable").tolist():
        fits = bool(timed.fits[i])
        shape = int(table.pp[i]), int(table.vpp[i]), int(table.schedule[i]), fits
        kind = *shape, int(table.recompute[i])
        if shape[0] == 1 or kind in seen or table.layout_text_of_row(i):
            continue
        seen.add(kind)
        plan = plans.pop((table.row(i, search.framework.name), 0), None) if fits else None
        make = partial(candidate, i) if plan is None else partial(candidate_of_plan, plan)
        out.append(StrategyForLayoutSearch(shape, make, float(timed.step_s[i]), plan))
    for plan in plans.values():
        if plan.layout is not None and plan.layout.by != "strategy":
            row = candidate_of_plan(plan).job[3]
            shape = int(row.pp[0]), int(row.vpp[0]), int(row.schedule[0]), True
            step_s = float(candidate_of_plan(plan).estimator.exposed_and_hidden_seconds(every_stage=True)[0].sum())
            out.append(StrategyForLayoutSearch(shape, partial(candidate_of_plan, plan), step_s, plan))
    return sorted(out, key=lambda each: each.own_step_s)


def search_layouts_of_strategies(
    some: Sequence[StrategyForLayoutSearch],
    seconds: float,
    seconds_of_work: float,
    wanted: int,
    *,
    keep_recomputed: bool,
) -> float:
    """Search the layouts of the strategies that may come among the best, until none is left or the time is over.

    Parameters
    ----------
    some
        The strategies, the shortest steps first; what was found is put into them.
    seconds, seconds_of_work
        The time, and what a deterministic second of the solver counts for. [s]
    wanted
        How many are wanted. [-]
    keep_recomputed
        Whether numbers of recomputed layers stay.

    Returns
    -------
    float
        The time that is left. [s]

    Notes
    -----
    A strategy is left out where no layout could bring it among the wanted: the bound on its pipeline
    (:attr:`mofa.search.layout_search.split_problem.LayerSplitProblem.least_pipeline_step_s`) leaves its step above
    theirs, or
    the lightest that its heaviest rank can be does.
    """
    gains: dict[Shape, float] = {}
    left = {shape: [each for each in some if each.shape == shape] for shape in dict.fromkeys(c.shape for c in some)}

    def layouts_of(each: StrategyForLayoutSearch) -> CandidateLayouts:
        if each.layouts is None:
            each.layouts = CandidateLayouts(each.make(), keep_recomputed=keep_recomputed)
        return each.layouts

    for shape, of_shape in left.items():
        first = layouts_of(of_shape[0])
        gains[shape] = first.likely_step_s / first.own_step_s if first.has_layout_choice else 1.0
        if not first.has_layout_choice:
            of_shape.clear()
    while any(left.values()) and seconds > 0.0:
        shape = min((s for s in left if left[s]), key=lambda s: left[s][0].own_step_s * gains[s])
        next_ = left[shape].pop(0)
        worst_wanted_s = sorted(each.fitting_step_s for each in some)[:wanted][-1]
        tried = layouts_of(next_)
        seconds -= SECONDS_OF_ESTIMATE
        if not tried.has_layout_choice or tried.least_step_s >= worst_wanted_s:
            continue
        next_.is_screened = True
        result = tried.shortest_splits(
            WORK_OF_SCREENING, closes=False, most_tried=CHUNKS_OF_SCREENING, beaten_from_s=worst_wanted_s
        )
        seconds -= seconds_of_work * result.work + SECONDS_OF_STRATEGY + SECONDS_OF_CHUNK * result.num_tried
        if result.splits:
            next_.split, next_.screened_step_s = result.splits[0], tried.step_s_of_split(result.splits[0])
        gains[shape] = next_.screened_step_s / next_.own_step_s if result.splits else MISSED * gains[shape]
    return seconds
