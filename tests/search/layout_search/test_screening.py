"""Strategies that a better layout brings among the best are refined, whatever their own split makes of them."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

import mofa
from mofa.plan.result import Plan
from mofa.search.layout_search.candidate_layouts import CandidateLayouts
from mofa.search.layout_search.cut_rows import timed_rows_of_all_pipelines
from mofa.search.layout_search.refine import SECONDS_OF_WORK, _candidate
from mofa.search.layout_search.screening import (
    StrategyForLayoutSearch,
    search_layouts_of_strategies,
    strategies_for_layout_search,
)

JOB = mofa.load_workload(
    "deepseek-v3", seq_len=2048, global_batch=512, overrides={"model.num_layers": 14, "model.num_mtp_layers": 1}
)
MACHINES = mofa.load_cluster("h100-hgx", 64)
WANTED = 3


@pytest.fixture(scope="module")
def search() -> mofa.Search:
    """Own splits leave pipelines behind that 14 layers and a prediction do not fill evenly."""
    fix = {"cp": 1, "tp": 1}
    return mofa.find_plans(JOB, MACHINES, replay=False, top=WANTED, banded=False, fix=fix, closed_form_margin=False)


@pytest.fixture(scope="module")
def screened(search: mofa.Search) -> list[StrategyForLayoutSearch]:
    some = strategies_for_layout_search(search, partial(_candidate, search))
    search_layouts_of_strategies(some, 1000.0, SECONDS_OF_WORK, WANTED, keep_recomputed=False)
    return some


def _shape(plan: Plan) -> tuple[int, int]:
    return plan.strategy.pp, plan.strategy.vpp


def test_a_pipeline_that_is_not_the_best_wins_with_its_layout(search: mofa.Search) -> None:
    before, after = search.report.plans, mofa.refine_layouts(search).report.plans
    assert len(after) == len(before)
    assert _shape(after[0]) != _shape(before[0])
    assert after[0].step_s < 0.99 * before[0].step_s
    assert all(new.step_s <= old.step_s for new, old in zip(after, before, strict=True))
    assert all(plan.memory.fits for plan in after)
    best = after[0]
    assert best.layout is not None
    written = {**best.strategy.model_dump(), "layout": best.layout.text}
    assert mofa.estimate(JOB, MACHINES, written, replay=False).step_s == best.step_s


def test_a_refined_search_is_the_same_again(search: mofa.Search) -> None:
    first, second = (mofa.refine_layouts(search, 4.0).report.plans for _ in range(2))
    assert first == second


def test_rows_that_were_cut_by_their_own_split_are_contenders(
    search: mofa.Search, screened: list[StrategyForLayoutSearch]
) -> None:
    timed = timed_rows_of_all_pipelines(search)
    known = np.count_nonzero(~np.isnan(search.costed.step_s))
    assert len(timed.table) > known
    every = mofa.find_plans(
        JOB, MACHINES, replay=False, top=1, banded=False, fix={"cp": 1, "tp": 1}, every_row=True,
        closed_form_margin=False,
    )  # fmt: skip
    steps_s = {
        every.costed.table.row(i, "megatron"): step_s
        for i, step_s in enumerate(every.costed.step_s.tolist())
        if not math.isnan(step_s)
    }
    for i in range(known, len(timed.table)):
        assert timed.step_s[i] == pytest.approx(steps_s[timed.table.row(i, "megatron")], rel=1e-12)
    assert all(each.shape[0] > 1 for each in screened)
    plans = {id(each.plan) for each in screened if each.plan is not None}
    assert plans == {id(plan) for plan in search.report.plans if plan.layout is not None}


def test_no_layout_brings_what_is_not_screened_among_the_wanted(screened: list[StrategyForLayoutSearch]) -> None:
    """By its bound, and of each pipeline by what a search finds."""
    worst_wanted_s = sorted(each.fitting_step_s for each in screened)[WANTED - 1]
    left_out = [each for each in screened if not each.is_screened]
    assert left_out and len(left_out) < len(screened)
    shapes = set()
    for each in left_out:
        layouts = CandidateLayouts(each.make())
        if not layouts.has_layout_choice:
            continue
        assert layouts.least_step_s >= worst_wanted_s
        if each.shape not in shapes:
            shapes.add(each.shape)
            splits = layouts.shortest_splits(0.1, closes=False).splits
            assert not splits or layouts.step_s_of_split(splits[0]) >= worst_wanted_s


def test_what_was_fixed_has_no_contenders() -> None:
    job, machines = mofa.load_workload("llama3-8b", global_batch=64), mofa.load_cluster("h100-hgx", 8)
    fixed = {"tp": 1, "pp": 4, "vpp": 2, "cp": 1, "layout": "E|(t*5|)*6ttL"}
    asked = mofa.find_plans(job, machines, fix=fixed, top=1, replay=False)
    assert strategies_for_layout_search(asked, partial(_candidate, asked)) == []
