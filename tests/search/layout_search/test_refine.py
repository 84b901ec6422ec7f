"""Layouts that are found for strategies and for the plans of a search are launched, checked and told."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

import mofa
from mofa.errors import SpecError
from mofa.report.layout_text import layout_lines
from mofa.search.layout_search.shortest_split import shortest_split

JOB, MACHINES = mofa.load_workload("llama3-8b", global_batch=64), mofa.load_cluster("h100-hgx", 8)
STRATEGY = "tp=2 pp=4 recompute=full"


def test_a_found_layout_is_shorter_by_replay_and_costs_what_it_says() -> None:
    own, plan = mofa.estimate(JOB, MACHINES, STRATEGY), mofa.find_layout(JOB, MACHINES, STRATEGY)
    assert own.layout is not None
    assert plan.layout is not None
    search = plan.layout.search
    assert search is not None
    assert (plan.layout.by, search.before, search.before_step_s) == ("search", own.layout.text, own.step_s)
    assert plan.step_s < own.step_s
    assert plan.memory.fits
    assert search.bound_s <= search.pipeline_s
    assert search.gap_fraction < 1e-3
    written = mofa.estimate(JOB, MACHINES, f"{STRATEGY} layout={plan.layout.text}")
    assert written.step_s == plan.step_s
    assert written.memory == plan.memory


def test_a_layout_that_is_best_is_kept() -> None:
    found = mofa.find_layout(JOB, MACHINES, STRATEGY, replay=False)
    assert found.layout is not None
    again = mofa.find_layout(JOB, MACHINES, f"{STRATEGY} layout={found.layout.text}", replay=False)
    assert again.layout is not None
    assert (again.layout.text, again.layout.by) == (found.layout.text, "strategy")
    assert again.step_s == found.step_s
    assert "none is shorter" in layout_lines([again])[-1]


def test_a_layout_is_found_where_the_own_split_does_not_fit() -> None:
    """NVIDIA/Megatron-LM, pull request 6429: 14 layers of DeepSeek-V3; its own layout is ``Ett|(tt|)*6mL``."""
    job = mofa.load_workload(
        "deepseek-v3", seq_len=2048, global_batch=256,
        overrides={"model.num_layers": 14, "model.num_mtp_layers": 1},
    )  # fmt: skip
    machines = mofa.load_cluster("h100-hgx", 64)
    strategy = "tp=1 pp=4 vpp=2 ep=16 etp=1 schedule=interleaved recompute=full"
    plan = mofa.find_layout(job, machines, strategy, replay=False)
    assert plan.memory.fits
    assert plan.layout is not None
    assert plan.layout.search is not None
    assert not plan.layout.search.before_fits
    recipe = mofa.estimate(job, machines, f"{strategy} layout=Ett|(tt|)*6mL", replay=False)
    assert plan.step_s <= recipe.step_s * 1.001
    assert "does not fit" in layout_lines([plan])[-1]


@pytest.mark.parametrize("strategy", ["tp=8", "tp=2 pp=4 recompute=every:2 framework=torchtitan"])
def test_no_layout_is_searched_without_a_choice(strategy: str) -> None:
    strategy, _, name = strategy.partition(" framework=")
    framework = mofa.load_framework(name or "megatron")
    with pytest.raises(SpecError, match="no layout to search for"):
        mofa.find_layout(JOB, MACHINES, strategy, framework=framework)


@pytest.fixture(scope="module")
def search() -> mofa.Search:
    """A search whose best plans have pipelines."""
    fix = {"tp": 1, "pp": 4, "cp": 1}
    return mofa.find_plans(JOB, MACHINES, fix=fix, top=4, replay=False, closed_form_margin=False)


def test_plans_are_refined_from_the_best_on_within_the_time(search: mofa.Search) -> None:
    refined = mofa.refine_layouts(search, 60.0)
    before, after = (sorted(plan.step_s for plan in each.report.plans) for each in (search, refined))
    assert all(new <= old for new, old in zip(after, before, strict=True))
    assert [plan.step_s for plan in refined.report.plans] == after
    assert any(plan.layout is not None and plan.layout.by == "search" for plan in refined.report.plans)
    assert all(plan.memory.fits for plan in refined.report.plans)
    best = search.report.model_construct(**{**dict(search.report), "plans": search.report.plans[:1]})
    (again,) = mofa.refine_layouts(replace(search, report=best), 60.0).report.plans
    assert again in refined.report.plans  # whatever else was refined beside it
    assert mofa.refine_layouts(search, 0.5).report.plans == search.report.plans
    few = mofa.refine_layouts(search, 1.5).report.plans
    assert 0 < sum(plan.layout is not None and plan.layout.search is not None for plan in few) < len(few)


def test_whole_runs_are_not_refined_by_their_steps(search: mofa.Search) -> None:
    judged = [plan.model_construct(**{**dict(plan), "long_run": object()}) for plan in search.report.plans]
    report = search.report.model_construct(**{**dict(search.report), "plans": tuple(judged)})
    with pytest.raises(SpecError, match="whole runs"):
        mofa.refine_layouts(replace(search, report=report))


def test_deepseek_on_16_stages_of_two_chunks_is_searched_within_its_work() -> None:
    """Over Megatron's layout of 16 x 2 chunks, DeepSeek-V3's recipe; by the solver's deterministic work."""
    from mofa.search.layout_search.problem_from_strategy import split_of_strategy, split_problem_of_strategy
    from mofa.search.layout_search.shortest_split import WORK
    from mofa.search.strategy_estimator import strategy_estimator
    from mofa.units import GIB

    job, machines = mofa.load_workload("deepseek-v3", global_batch=16384), mofa.load_cluster("h800-hgx", 2048)
    strategy = "pp=16 vpp=2 ep=64 recompute=full layout=Et*3|(tt|)*29m|L"
    estimator = strategy_estimator(job, machines, mofa.load_framework("megatron"), strategy)
    problem = split_problem_of_strategy(estimator, 74 * GIB)
    assert problem is not None
    recipe = split_of_strategy(estimator)
    found = shortest_split(problem, recipe)
    assert found.work < 1.2 * WORK
    assert found.steps_s[0] <= problem.pipeline_step_s(recipe)
    assert found.gap_fraction < 0.06


def test_a_search_without_refinement_loads_no_solver() -> None:
    code = (
        "import sys, mofa; job = mofa.load_workload('llama3-8b', global_batch=64);"
        "machines = mofa.load_cluster('h100-hgx', 8);"
        "mofa.find_plans(job, machines, fix={'tp': 1, 'pp': 4, 'cp': 1}, top=1, replay=False);"
        "assert not any(name.startswith('ortools') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_was_asked_for_stays() -> None:
    """A layout, and the number of recomputed layers."""
    fixed = {"tp": 1, "pp": 4, "vpp": 2, "cp": 1, "layout": "E|(t*5|)*6ttL"}
    asked = mofa.find_plans(JOB, MACHINES, fix=fixed, top=1, replay=False)
    assert mofa.refine_layouts(asked).report.plans == asked.report.plans
    fixed = {"tp": 1, "pp": 4, "vpp": 1, "cp": 1, "recompute": "full:2"}
    asked = mofa.find_plans(JOB, MACHINES, fix=fixed, top=1, replay=False)
    (plan,) = mofa.refine_layouts(asked).report.plans
    assert plan.layout is not None
    assert plan.layout.search is not None
    assert plan.strategy.recompute == "full:2"
