"""A search that bounds has the same best rows as one that costs every row."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import mofa
from mofa.plan.long_run import Objective
from mofa.report.figures.pareto import pareto_front
from mofa.search import branch_and_bound
from mofa.search.costing import MEMORY, NEEDLESS, SLOWER
from mofa.search.objective import ranking_keys_and_missing_host_bytes
from mofa.search.search_result import SHOWN_FRONT, Search

JOBS: dict[str, tuple[str, str, int, str, dict[str, Any]]] = {
    "dense": ("llama3-8b", "h100-hgx", 16, "megatron", {"maximum": {"pp": 4, "cp": 2, "vpp": 2}}),
    "solved layers": ("llama3-70b", "h100-hgx", 32, "megatron", {"maximum": {"pp": 8, "vpp": 2, "micro_batch": 2}}),
    "experts": (
        "qwen3-30b-a3b",
        "h100-hgx",
        16,
        "megatron",
        {"maximum": {"pp": 4, "vpp": 2, "cp": 1, "micro_batch": 2}},
    ),
    "expert overlap": (
        "qwen3-30b-a3b",
        "h100-hgx",
        32,
        "megatron",
        {"maximum": {"pp": 4, "vpp": 3, "cp": 1, "micro_batch": 2}, "with_": ["expert_overlap"]},
    ),
    "local": (
        "mixtral-8x7b",
        "h100-hgx",
        32,
        "megatron-local",
        {"maximum": {"pp": 4, "cp": 1, "vpp": 2, "micro_batch": 2}},
    ),
    "torchtitan": (
        "llama3-8b",
        "h100-hgx",
        32,
        "torchtitan",
        {"maximum": {"pp": 4, "cp": 1, "vpp": 2, "micro_batch": 2}},
    ),
    "nothing fits": ("llama3-405b", "h100-hgx", 8, "megatron", {"maximum": {"vpp": 2}}),
}
FRONTS = ("solved layers", "experts", "torchtitan")
"""Jobs whose one best row and whose front are sought."""
MANY = 12
"""Best rows that are sought. [-]"""


def search(name: str, top: int, **options: Any) -> Search:
    workload, cluster, gpus, framework, asked = JOBS[name]
    job, machines = mofa.load_workload(workload), mofa.load_cluster(cluster, gpus)
    return mofa.find_plans(
        job, machines, framework=mofa.load_framework(framework), top=top, replay=False, banded=False, **asked, **options
    )


@cache
def costed_whole(name: str) -> Search:
    return search(name, 1, every_row=True)


@cache
def bounded_once(name: str, top: int) -> Search:
    """A search that bounds, for all tests that look at nothing else."""
    return search(name, top)


def long_runs(objective: Objective, spares: int, *, every_row: bool = False) -> Search:
    """The best long runs of Llama 3 8B on three nodes, of which so many stand by."""
    price = {"value": 2.0, "provenance": "assumed", "source": "a bill"}
    return mofa.find_long_runs(
        mofa.load_workload("llama3-8b", tokens="1T"), mofa.load_cluster("h100-hgx", 24),
        mofa.load_faults("llama3", {"spares": spares, "price.usd_per_gpu_hour": price}),
        framework=mofa.load_framework("megatron"), top=10, replay=False, objective=objective, every_row=every_row,
        maximum={"cp": 2, "pp": 8, "micro_batch": 4},
    )  # fmt: skip


@cache
def all_long_runs(spares: int) -> Search:
    return long_runs("tokens", spares, every_row=True)


def best(found: Search, wanted: int) -> tuple[list[int], list[float]]:
    """The best rows and their keys, as they are ranked."""
    key, _ = ranking_keys_and_missing_host_bytes(found.objective, found.costed)
    fits = np.flatnonzero((found.reasons[found.costed.rows] < 0) & np.isfinite(key))
    order = fits[np.lexsort((found.costed.device_bytes[fits], np.round(key[fits], 12)))][:wanted]
    return found.costed.rows[order].tolist(), key[order].tolist()


def assert_same(ours: tuple[list[int], list[float]], theirs: tuple[list[int], list[float]]) -> None:
    """The same rows in one order; sums of a few rows may differ in their last bits from those of many."""
    assert ours[0] == theirs[0]
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-12)


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds however few rows there are, and several batches of them."""
    monkeypatch.setattr(branch_and_bound, "FEW_ROWS", 0)
    monkeypatch.setattr(branch_and_bound, "FIRST_DEGREES", 6)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [(name, MANY) for name in JOBS if name != "nothing fits"] + [(name, 1) for name in FRONTS],
)
def test_the_best_rows_are_those_of_all(name: str, wanted: int) -> None:
    bounded, whole = bounded_once(name, wanted), costed_whole(name)
    assert_same(best(bounded, wanted), best(whole, wanted))
    assert bounded.report.rejected["slower"] > 0
    assert bounded.report.searched < whole.report.searched


@pytest.mark.parametrize("name", list(JOBS))
def test_what_is_costed_is_judged_as_ever(name: str) -> None:
    """Rows have the verdicts of a search that costs all, or are slower than the best."""
    bounded, whole = bounded_once(name, MANY), costed_whole(name)
    slower = bounded.reasons == SLOWER
    memory = bounded.reasons == MEMORY
    assert np.array_equal(bounded.reasons[~slower], whole.reasons[~slower])
    assert np.all((whole.reasons[slower] < 0) | (whole.reasons[slower] >= NEEDLESS))
    worst = best(bounded, MANY)[1][-1] if bounded.report.plans else np.inf
    fits = whole.reasons[whole.costed.rows] < 0
    cut = fits & slower[whole.costed.rows]
    assert np.all(whole.costed.step_s[cut] >= worst)
    miss = bounded.report.nearest_miss["memory"]
    assert miss.short_by == pytest.approx(whole.short[memory].min(), rel=1e-9)
    assert np.all(bounded.short[slower] >= 0.0)
    assert np.all(whole.costed.step_s[cut] - worst >= bounded.short[whole.costed.rows[cut]] * (1 - 1e-9))


def test_nothing_fits_as_ever() -> None:
    bounded = bounded_once("nothing fits", MANY)
    assert not bounded.report.plans and "slower" not in bounded.report.rejected
    assert bounded.report.min_gpus == costed_whole("nothing fits").report.min_gpus


def test_the_table_has_all_rows() -> None:
    bounded, whole = bounded_once("solved layers", MANY), costed_whole("solved layers")
    np.testing.assert_array_equal(bounded.every_row.costed.rows, whole.costed.rows)
    for name in ("step_s", "device_bytes", "allocated_bytes"):
        one, other = getattr(bounded.every_row.costed, name), getattr(whole.costed, name)
        np.testing.assert_allclose(one, other, rtol=1e-12)
    assert len(bounded.table()) == len(whole.table())
    assert bounded.table()["fits"].sum() == whole.table()["fits"].sum()


@pytest.mark.parametrize("name", FRONTS)
def test_the_front_is_that_of_all(name: str) -> None:
    """Of rows that are all costed, by the definition."""
    front, table = bounded_once(name, 1).front(), costed_whole(name).table()
    fitting = table[table["fits"]]
    step_s, device = fitting["step_s"].to_numpy(), fitting["device_bytes"].to_numpy()
    front_s, front_bytes = front["step_s"].to_numpy(), front["device_bytes"].to_numpy()
    for least_s, least_bytes in zip(front_s * (1 - 1e-12), front_bytes * (1 - 1e-12), strict=True):
        assert not np.any((step_s <= least_s) & (device <= least_bytes))
    beaten = (front_s <= step_s[:, None] * (1 + 1e-12)) & (front_bytes <= device[:, None] * (1 + 1e-12))
    assert np.all(beaten.any(axis=1))
    assert front["step_s"].is_monotonic_increasing and front["device_bytes"].is_monotonic_decreasing
    np.testing.assert_allclose(front["step_s"], costed_whole(name).front()["step_s"], rtol=1e-12)


@pytest.mark.parametrize("name", FRONTS)
def test_the_costed_table_has_the_front_as_far_as_it_is_shown(name: str) -> None:
    bounded = bounded_once(name, 1)
    front, table = bounded.front(), bounded.costed_table()
    near = front[front["step_s"] <= SHOWN_FRONT * front["step_s"].min()]
    fitting = table[table["fits"]]
    shown = fitting.iloc[pareto_front(fitting["device_bytes"].to_numpy(), fitting["tokens_per_s_per_gpu"].to_numpy())]
    np.testing.assert_allclose(shown["step_s"].sort_values(), near["step_s"], rtol=1e-12)
    np.testing.assert_allclose(shown["device_bytes"].sort_values(ascending=False), near["device_bytes"], rtol=1e-12)
    assert bounded.enumerated is not None and len(table) < len(bounded.table())


def test_other_processes_change_nothing() -> None:
    one, two = bounded_once("dense", MANY), search("dense", MANY, jobs=2)
    assert np.array_equal(one.reasons, two.reasons)
    assert np.array_equal(one.costed.rows, two.costed.rows)
    assert [plan.step_s for plan in one.report.plans] == [plan.step_s for plan in two.report.plans]


@pytest.mark.parametrize(("objective", "spares"), [("tokens", 0), ("days", 1), ("usd", 0), ("kwh", 1)])
def test_the_best_long_runs_are_those_of_all(objective: Objective, spares: int) -> None:
    """Rows cost the same whatever they are judged by: all of them are costed once for all objectives."""
    bounded = long_runs(objective, spares)
    whole = replace(all_long_runs(spares), objective=bounded.objective)
    assert_same(best(bounded, 60), best(whole, 60))
    assert bounded.report.searched < whole.report.searched
    assert bounded.report.nearest_miss["slower"].unit == ("J" if objective == "kwh" else "s")


def test_a_replay_ranks_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {
        "framework": mofa.load_framework("megatron"), "top": 3, "fix": {"cp": 1, "micro_batch": 1},
        "maximum": {"pp": 4, "vpp": 2},
    }  # fmt: skip
    job = mofa.load_workload("llama3-8b", global_batch=32, overrides={"model.num_layers": 8})
    machines = mofa.load_cluster("h100-hgx", 8)
    bounded, whole = (mofa.find_plans(job, machines, every_row=every, **options).report for every in (False, True))
    assert [plan.strategy for plan in bounded.plans] == [plan.strategy for plan in whole.plans]
    assert [plan.step_s for plan in bounded.plans] == [plan.step_s for plan in whole.plans]
