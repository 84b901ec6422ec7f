"""Rows costed in parts, here and by other processes, are the same rows."""

from __future__ import annotations

import numpy as np
import pytest

from mofa.search import costing
from mofa.search.entry_points import find_plans
from mofa.search.legality.masks import JobAndMachines, check_strategies
from mofa.search.search_result import Search
from mofa.search.space import combinations_of_space, default_space
from tests.cost.toy import cluster, framework, workload
from tests.search.toy_searches import MAXIMUM, MODELS, costed_whole, search_every_row


def assert_same(one: Search, other: Search) -> None:
    assert np.array_equal(one.reasons, other.reasons)
    assert np.array_equal(one.combinations.recompute_layers, other.combinations.recompute_layers)
    assert np.array_equal(one.costed.rows, other.costed.rows)
    assert [plan.strategy for plan in one.report.plans] == [plan.strategy for plan in other.report.plans]
    for name in ("step_s", "device_bytes", "allocated_bytes", "checkpoint_bytes"):
        values = getattr(one.costed, name), getattr(other.costed, name)
        np.testing.assert_allclose(*values, rtol=1e-12, atol=0.0, err_msg=name)
    atol = 1e-12 * float(np.nanmax(one.costed.step_s))
    np.testing.assert_allclose(one.costed.exposed_s, other.costed.exposed_s, rtol=1e-9, atol=atol)
    np.testing.assert_allclose(one.short, other.short, rtol=1e-9)


@pytest.mark.parametrize(
    ("model", "name", "parts"),
    [
        ("dense", "megatron", 2),
        ("moe", "megatron", 5),  # in two below, by two processes
        ("mla", "megatron", 2),
        ("moe", "torchtitan", 5),
    ],
)
def test_parts_cost_what_the_whole_does(model: str, name: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number of parts of each space: what a row costs does not depend on its part
    (tests/cost/test_rows_alone.py), and every number of parts has each row once (below)."""
    whole = costed_whole(model, name)
    monkeypatch.setattr(costing, "MANY", 0)
    monkeypatch.setattr(costing, "PARTS", parts)
    assert_same(whole, search_every_row(model, name))


def test_another_process_costs_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = costed_whole("moe", "megatron")
    monkeypatch.setattr(costing, "MANY", 0)
    monkeypatch.setattr(costing, "PARTS", 2)
    assert_same(whole, search_every_row("moe", "megatron", jobs=2))


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 7])
def test_parts_share_no_block_and_leave_nothing_out(parts: int) -> None:
    job = JobAndMachines(workload(MODELS["moe"], seq_len=4096, global_batch=32), cluster(16), framework("megatron"))
    space = combinations_of_space(default_space(job.workload, job.cluster, job.framework), job.cluster, job.framework)
    legal = check_strategies(job, space).reason < 0
    found = costing.split_space_into_equal_parts(space, legal, parts)
    sets = len(space.degrees.option_sets)
    assert len(found) <= parts * sets and (parts == 1 or len(found) > sets)
    each = legal.reshape(-1, len(space.recompute)).any(axis=1)
    assert np.array_equal(np.sort(np.concatenate(found)), np.flatnonzero(each))
    columns = space.degrees.tp, space.degrees.cp, space.degrees.options
    blocks = [set(zip(*(column[part].tolist() for column in columns), strict=True)) for part in found]
    assert sum(map(len, blocks)) == len(set.union(*blocks))


def test_progress_counts_every_row_once() -> None:
    told: list[tuple[int, int]] = []
    job = workload(MODELS["moe"], seq_len=4096, global_batch=32)
    found = find_plans(
        job, cluster(16, memory_gib=16.0), framework=framework("megatron"), top=1, replay=False,
        banded=False, maximum=MAXIMUM["moe"], progress=lambda done, of: told.append((done, of)),
    )  # fmt: skip
    legal = int(np.sum((found.reasons < 0) | (found.reasons >= costing.NEEDLESS)))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (legal, legal)
    assert {of for _, of in told} == {legal}
