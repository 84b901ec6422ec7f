"""The search: a reason for every row, the nearest misses, layers to recompute, and the order of what fits."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mofa.cost.estimate import estimate_table
from mofa.errors import SpecError
from mofa.search.entry_points import find_plans
from mofa.search.job_setup import routing_loads_by_ep
from mofa.search.legality.masks import CHECKS, JobAndMachines, check_strategies
from mofa.search.one_plan import estimate, plan_in_closed_form
from mofa.search.search_progress import SearchProgress
from mofa.search.search_result import Search
from mofa.search.space import SOLVED, combinations_table, constrain_space, default_space
from mofa.search.to_plan.builder import margin_bytes
from mofa.specs.load import load_cluster, load_workload
from mofa.specs.shared_facts import load_shared_facts
from tests.cost.toy import cluster, framework, llama, workload
from tests.search.toy_searches import MAXIMUM, MODELS, costed_whole, judged, search

DENSE = MODELS["dense"]
CASES = [
    ("dense", "megatron"),
    ("moe", "megatron"),
    ("dense", "megatron-local"),
    ("dense", "torchtitan"),
    ("moe", "torchtitan"),
]


def enumerated(found: Search) -> Any:
    """All rows of the space that :func:`tests.search.toy_searches.search` looks through."""
    space = default_space(found.workload, found.cluster, found.framework)
    limit = next(MAXIMUM[name] for name, model in MODELS.items() if model == found.workload.model)
    space = constrain_space(space, fix={}, maximum=limit, with_=(), without=())
    return combinations_table(space, found.cluster, found.framework)


@pytest.mark.parametrize(("model", "name"), CASES)
def test_every_row_fits_or_has_one_reason(model: str, name: str) -> None:
    found = search(model, name)
    report = found.report
    fits = int((found.reasons < 0).sum())
    assert len(found.reasons) == report.space == len(enumerated(found))
    assert sum(report.rejected.values()) + fits == report.space
    names = [*(c.reason for c in CHECKS), "needless", "memory", "host_memory", "slower"]
    assert report.rejected == {
        n: int((found.reasons == i).sum()) for i, n in enumerate(names) if np.any(found.reasons == i)
    }
    assert list(report.rejected) == [n for n in names if n in report.rejected]
    assert fits > 0 and report.rejected["memory"] > 0
    assert report.min_gpus is None


@pytest.mark.parametrize(("model", "name"), CASES)
def test_fits_means_within_the_capacity_less_the_margin(model: str, name: str) -> None:
    found = search(model, name)
    limit = found.cluster.gpu.capacity_bytes.value - margin_bytes(found.cluster, found.framework)
    table = costed_whole(model, name).table()  # what a search that bounds adds is test_branch_and_bound.py's
    assert np.array_equal(table["fits"], table["device_bytes"] <= limit)
    assert len(table) >= found.report.searched
    for plan in found.report.plans:
        assert plan.memory.fits
        assert plan.memory.device_bytes + plan.memory.margin_bytes <= plan.memory.capacity_bytes


@pytest.mark.parametrize(("model", "name"), CASES)
def test_costed_rows_are_what_they_cost_by_themselves(model: str, name: str) -> None:
    found = search(model, name)
    loads = routing_loads_by_ep(found.workload, found.costed.table)
    fits = found.reasons[found.costed.rows] < 0
    for here in (np.flatnonzero(fits), np.flatnonzero(~fits)):
        for i in here[np.linspace(0, len(here) - 1, 5).astype(int)] if len(here) else ():
            row = found.costed.table.select_rows(np.array([i]))
            alone = estimate_table(found.workload, found.cluster, found.framework, row, loads)
            assert found.costed.device_bytes[i] == pytest.approx(alone.device_bytes[0], rel=1e-9)
            if fits[i]:
                assert found.costed.step_s[i] == pytest.approx(alone.step_s[0], rel=1e-9)
                assert found.costed.allocated_bytes[i] == pytest.approx(alone.allocated_bytes[0], rel=1e-9)
            else:  # nobody asks how fast they would be that allocate more than fits
                limit = found.cluster.gpu.capacity_bytes.value - margin_bytes(found.cluster, found.framework)
                cached = alone.device_bytes[0] - alone.reserved_bytes[0]
                assert np.isfinite(found.costed.step_s[i]) == (
                    cached + (1.0 - load_shared_facts().tolerances.allocated.value) * alone.allocated_bytes[0] <= limit
                )


@pytest.mark.parametrize(("model", "name"), CASES)
def test_plans_are_the_best_in_order(model: str, name: str) -> None:
    """By time; among equal times by memory."""
    found = search(model, name)
    plans = found.report.plans
    steps = [p.step_s for p in plans]
    assert len(plans) == 10
    assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(steps))
    for a, b in itertools.pairwise(plans):
        if round(a.step_s, 12) == round(b.step_s, 12):
            assert a.memory.device_bytes <= b.memory.device_bytes
    table = costed_whole(model, name).table()
    best = table[table["fits"]]["step_s"].nsmallest(10)
    np.testing.assert_allclose(steps, best, rtol=1e-9)
    rates = [p.tokens_per_s_per_gpu for p in plans]
    assert rates == sorted(rates, reverse=True)


def test_more_plans_begin_with_fewer() -> None:
    few, many = search(top=3).report.plans, search(top=10).report.plans
    assert [p.strategy for p in few] == [p.strategy for p in many[:3]]


@pytest.mark.parametrize(("model", "name"), CASES)
def test_the_nearest_miss_is_the_nearest(model: str, name: str) -> None:
    found = search(model, name)
    report = found.report
    assert set(report.nearest_miss) == set(report.rejected)
    verdict = check_strategies(JobAndMachines(found.workload, found.cluster, found.framework), enumerated(found))
    for i, rule in enumerate(CHECKS):
        rows = verdict.reason == i
        if np.any(rows):
            miss = report.nearest_miss[rule.reason]
            assert miss.short_by == verdict.shortfall[rows].min() > 0
            assert miss.unit == rule.unit
    limit = found.cluster.gpu.capacity_bytes.value - margin_bytes(found.cluster, found.framework)
    over = report.nearest_miss["memory"]
    assert over.unit == "B"
    costed = found.costed.device_bytes[found.reasons[found.costed.rows] == len(CHECKS) + 1]
    assert over.short_by == pytest.approx(costed.min() - limit, abs=1.0)


@pytest.mark.parametrize(("model", "memory_gib"), [("dense", 9.0), ("dense", 12.0), ("moe", 16.0)])
def test_as_few_layers_as_fit_are_recomputed(model: str, memory_gib: float) -> None:
    """A row whose number was solved fits with it, if it is kept, and not with one layer fewer."""
    found = search(model, "megatron", memory_gib=memory_gib)
    table = enumerated(found)
    limit = found.cluster.gpu.capacity_bytes.value - margin_bytes(found.cluster, found.framework)
    solved = np.flatnonzero(
        (table.recompute_layers[found.costed.rows] == SOLVED) & (found.reasons[found.costed.rows] < 0)
    )
    assert len(solved) >= 5
    some = solved[:: max(len(solved) // 40, 1)]
    rows = found.costed.table.select_rows(some)
    layers = rows.recompute_layers
    assert np.all(layers >= 1)
    loads = routing_loads_by_ep(found.workload, rows)

    def device(number: Any) -> Any:
        from dataclasses import replace

        changed, out = replace(rows, recompute_layers=number), np.empty(len(rows))
        for _, same in changed.rows_by_options():
            costed = estimate_table(found.workload, found.cluster, found.framework, changed.select_rows(same), loads)
            out[same] = costed.device_bytes
        return out

    assert np.all(device(layers) <= limit)
    assert np.all(device(layers - 1) > limit)


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_no_number_of_layers_that_fits_is_missed(model: str) -> None:
    """Where the solved row is rejected for memory, recomputing all layers does not fit either."""
    found = search(model, "megatron", memory_gib=9.0)
    table = enumerated(found)
    open_ = np.flatnonzero((table.recompute_layers == SOLVED) & (found.reasons == len(CHECKS) + 1))
    assert np.all(found.reasons[open_ + 1] == len(CHECKS) + 1)  # full follows full:n


def test_constraints_hold_in_the_plans() -> None:
    job, machines, spec = workload(DENSE, seq_len=4096, global_batch=32), cluster(16), framework("megatron")
    found = find_plans(job, machines, framework=spec, fix={"tp": 4}, maximum={"pp": 2}, without=("vpp", "full"), top=5,
                       replay=False, banded=False)  # fmt: skip
    assert found.report.plans
    for plan in found.report.plans:
        assert plan.strategy.tp == 4 and plan.strategy.pp <= 2 and plan.strategy.vpp == 1
        assert not plan.strategy.recompute.startswith("full")
    four = find_plans(job, machines, framework=spec, fix={"dp": 4}, top=5, replay=False, banded=False)
    assert {p.strategy.dp for p in four.report.plans} == {4}
    with pytest.raises(SpecError, match=r"dp \(3\) must divide gpus \(16\)"):
        find_plans(job, machines, framework=spec, fix={"dp": 3})


def test_numerics_change_only_when_asked() -> None:
    job, machines, spec = workload(DENSE, seq_len=4096, global_batch=32), cluster(16), framework("megatron")
    fix = {"tp": 2, "pp": 1, "cp": 1, "recompute": "none", "micro_batch": 1}
    plain = find_plans(job, machines, framework=spec, fix=fix, top=1).report
    fp8 = find_plans(job, machines, framework=spec, fix=fix, with_=("fp8",), top=1).report
    half = find_plans(job, machines, framework=spec, fix=fix, with_=("bf16_moments",), top=1).report
    assert (plain.workload.gemm_format, fp8.workload.gemm_format) == ("bf16", "fp8")
    assert half.workload.moments_format == "bf16"
    assert half.plans[0].memory.device_bytes < plain.plans[0].memory.device_bytes
    for given in ({"with_": ("fp8",), "framework": framework("torchtitan")}, {"with_": ("zbv",)}):
        with pytest.raises(SpecError):
            find_plans(job, machines, **given)


def test_progress_ends_where_it_should() -> None:
    told = list[tuple[int, int]]()
    job = workload(DENSE, seq_len=4096, global_batch=32)
    find_plans(
        job,
        cluster(8),
        framework=framework("megatron"),
        replay=False,
        top=1,
        maximum=MAXIMUM["dense"],
        progress=lambda done, of: told.append((done, of)),
    )
    assert all(a[0] <= b[0] for a, b in itertools.pairwise(told))
    assert told[-1][0] <= told[-1][1]


def test_reasons_are_documented_in_their_order() -> None:
    text = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
    listed = ", ".join(
        f"`{name}`" for name in [*(c.reason for c in CHECKS), "needless", "memory", "host_memory", "slower"]
    )
    assert listed in " ".join(text.split())


@pytest.mark.parametrize(
    ("name", "options", "facts", "word"),
    [
        ("torchtitan", {}, {"precision": {"moments": "bf16"}}, "moments"),
        ("megatron-local", {}, {"precision": {"moments": "bf16"}}, "moments"),
        ("megatron", {"fp8_params": True}, {}, "fp8_params"),
        ("megatron-local", {}, {"precision": {"params": "fp32"}}, "bf16 parameters"),
    ],
)
def test_numerics_that_a_framework_lacks(
    name: str, options: dict[str, bool], facts: dict[str, dict[str, str]], word: str
) -> None:
    job, machines = workload(DENSE, **facts), cluster(8)
    with pytest.raises(SpecError, match=word):
        estimate(job, machines, "dp=8", framework=framework(name, **options))
    with pytest.raises(SpecError, match=word):
        find_plans(job, machines, framework=framework(name, **options))


def test_megatron_of_2022_has_no_windows() -> None:
    job = workload(llama(attention=DENSE.attention.model_copy(update={"window": 128})))
    with pytest.raises(SpecError, match="window"):
        estimate(job, cluster(8), "dp=8", framework=framework("megatron-2022"))


def test_a_number_of_recomputed_layers_is_megatrons_in_a_search_too() -> None:
    """`estimate` refuses it; a search that is told to has nothing left."""
    job = workload(DENSE, seq_len=4096, global_batch=32)
    with pytest.raises(SpecError, match="full:n is Megatron's"):
        find_plans(job, cluster(8), framework=framework("torchtitan"), fix={"recompute": "full:1"})
    found = find_plans(
        job, cluster(8), framework=framework("megatron"), fix={"recompute": "full:1"}, maximum=MAXIMUM["dense"],
        replay=False, banded=False,
    )  # fmt: skip
    assert {plan.strategy.recompute for plan in found.report.plans} == {"full:1"}


def test_progress_has_the_best_plan_so_far() -> None:
    job, machines = load_workload("llama3-8b"), load_cluster("h100-hgx", 8)
    steps: list[SearchProgress] = []
    fix = {"tp": 2, "pp": 2, "vpp": 1, "cp": 1, "micro_batch": 1, "recompute": "none"}
    search = find_plans(job, machines, fix=fix, top=1, replay=False, on_progress=steps.append)
    assert [step.phase for step in steps] == ["costing"] * (len(steps) - 1) + ["playing"]
    assert [step.best is None for step in steps] == [True] * (len(steps) - 1) + [False]
    assert steps[-1].best is not None
    assert steps[-1].best.step_s == search.report.plans[0].step_s


@pytest.mark.parametrize(("model", "name"), CASES)
def test_a_search_without_replay_fits_what_an_estimate_without_one_fits(model: str, name: str) -> None:
    """Both leave free what a replay may reserve beyond closed forms: of pipelines that is another fraction."""
    in_closed_form, before_replay = judged(model, name, 10, None), search(model, name)
    job, machines, used = in_closed_form.workload, in_closed_form.cluster, in_closed_form.framework
    best, *others = in_closed_form.report.plans
    alone = [estimate(job, machines, best.strategy, framework=used, replay=False)]
    alone += [plan_in_closed_form(job, machines, p.strategy, used, closed_form_margin=True) for p in others]
    for plan, own in zip(in_closed_form.report.plans, alone, strict=True):
        assert own.memory.fits and own.memory.margin_bytes == plan.memory.margin_bytes
        assert any("as no replay follows" in note for note in plan.notes)
    over = in_closed_form.report.nearest_miss["memory"]
    missed = estimate(job, machines, over.strategy, framework=used, replay=False)
    assert over.short_by == pytest.approx(-missed.memory.free_bytes, abs=1.0)
    dropped = {plan.strategy for plan in before_replay.report.plans}
    dropped -= {plan.strategy for plan in in_closed_form.report.plans}
    faster = [p for p in before_replay.report.plans if p.strategy in dropped and p.step_s < others[-1].step_s]
    assert faster
    for plan in faster:
        assert not plan_in_closed_form(job, machines, plan.strategy, used, closed_form_margin=True).memory.fits
