"""Rows that the search estimates too full or recomputes too much of are played where that could matter."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from mofa.cost.estimate import TableEstimator
from mofa.cost.memory.row_memory import RowMemory
from mofa.search import borderline
from mofa.search.borderline import best_rows_with_fewer_recomputed_layers, borderline_rows
from mofa.search.costing import MEMORY, NEEDLESS, CostedSpace
from mofa.search.entry_points import find_plans
from mofa.search.job_setup import routing_loads_by_ep
from mofa.search.one_strategy import checked_strategy_row
from mofa.search.rerank import REPLAYED
from mofa.search.to_plan.builder import CandidatePlan, margin_bytes, memory_limit_bytes
from mofa.search.workers import WorkerProcesses
from mofa.specs.hardware import ClusterSpec
from tests.cost.toy import cluster, framework, workload
from tests.search.test_entry_points import DENSE

JOB = workload(DENSE, seq_len=4096, global_batch=32)
TITAN = framework("torchtitan")
FIX: dict[str, object] = {"tp": 1, "pp": 2, "vpp": 2, "cp": 1, "micro_batch": 4, "recompute": "ops"}


def with_room(capacity_bytes: float) -> ClusterSpec:
    """GPUs of which a plan may fill so much."""
    machines = cluster(16, memory_gib=1.0)
    return cluster(16, memory_gib=capacity_bytes / 2.0**30 / (1.0 - margin_bytes(machines, TITAN) / 2.0**30))


def candidate(
    machines: ClusterSpec, strategy: object, *, solved: bool = False, name: str = "torchtitan"
) -> CandidatePlan:
    facts = JOB, machines, framework(name)
    row = checked_strategy_row(*facts, strategy)
    return CandidatePlan(*facts, row, routing_loads_by_ep(JOB, row), "causal", solved=solved)


def test_what_fits_when_played_is_not_lost() -> None:
    one = candidate(cluster(16), {**FIX, "schedule": "interleaved"})
    played, estimated = one.replayed_device_bytes(), float(one.closed_form_breakdown.device_bytes[0])
    assert played < 0.95 * estimated
    machines = with_room((played + estimated) / 2)
    assert played < memory_limit_bytes(machines, TITAN) < estimated
    options: dict[str, Any] = {"framework": TITAN, "fix": {**FIX, "schedule": "interleaved", "dp_replicate": 1}}
    by_estimate = find_plans(JOB, machines, replay=False, **options)
    assert by_estimate.report.rejected["memory"] == 1 and not by_estimate.report.plans
    found = find_plans(JOB, machines, **options)
    assert "memory" not in found.report.rejected
    (plan,) = found.report.plans
    assert plan.memory.fits and plan.memory.device_bytes == pytest.approx(played, rel=0.02)
    assert found.table()["fits"].tolist() == [True]
    again = find_plans(JOB, machines, searched=by_estimate, **options)
    assert [p.strategy for p in again.report.plans] == [plan.strategy]


def test_what_does_not_fit_when_played_says_by_how_much() -> None:
    one = candidate(cluster(16), {**FIX, "schedule": "interleaved"})
    allocated, played = float(one.closed_form_breakdown.allocated_bytes[0]), one.replayed_device_bytes()
    cached = float(one.closed_form_breakdown.device_bytes[0] - one.closed_form_breakdown.reserved_bytes[0])
    machines = with_room((allocated + cached + played) / 2)
    found = find_plans(JOB, machines, framework=TITAN, fix={**FIX, "schedule": "interleaved", "dp_replicate": 1})
    assert not found.report.plans
    assert found.report.nearest_miss["memory"].short_by == pytest.approx(played - memory_limit_bytes(machines, TITAN))
    assert found.table()["step_s"].isna().all()


def _found(reason: list[int], device: list[float]) -> CostedSpace:
    costed = SimpleNamespace(rows=np.arange(len(reason)), device_bytes=np.array(device))
    return cast(CostedSpace, SimpleNamespace(costed=costed, reason=np.array(reason)))


def test_in_doubt_is_what_would_be_among_the_best() -> None:
    fits = list(range(10, 10 + REPLAYED))
    key = np.array([*fits, 9.0, 8.0, np.nan, 7.0, np.inf, 1e3], dtype=float)
    found = _found([-1] * REPLAYED + [MEMORY, MEMORY, MEMORY, NEEDLESS, MEMORY, MEMORY], [1.0] * len(key))
    assert borderline_rows(found, key).tolist() == [REPLAYED, REPLAYED + 1]


def test_rows_far_behind_the_wanted_are_not_in_doubt() -> None:
    """The second of two wanted takes 11 s: no more than 2 % behind it, whatever of the 30 fit there."""
    fits = list(range(10, 10 + REPLAYED))
    key = np.array([*fits, 11.2, 11.3, 12.5], dtype=float)
    found = _found([-1] * REPLAYED + [MEMORY] * 3, [1.0] * len(key))
    assert borderline_rows(found, key, 2).tolist() == [REPLAYED]
    assert borderline_rows(found, key, REPLAYED).tolist() == [REPLAYED, REPLAYED + 1, REPLAYED + 2]
    few = _found([-1, MEMORY, MEMORY], [1.0] * 3)
    assert borderline_rows(few, np.array([1.0, 2.0, 3.0]), 2).tolist() == [1, 2]


def test_the_least_full_and_the_fastest_others_are_played(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _found([-1, MEMORY, MEMORY, MEMORY], [1.0, 5.0, 3.0, 4.0])
    key = np.array([1.0, 2.0, 3.0, 4.0])
    assert borderline_rows(found, key).tolist() == [2, 3, 1]
    monkeypatch.setattr(borderline, "LOOKED_AT", 2)
    assert borderline_rows(found, key).tolist() == [2, 1]


def test_fewer_layers_are_recomputed_where_they_fit() -> None:
    strategy = {"tp": 1, "pp": 2, "micro_batch": 4, "recompute": "full:5"}
    wide = candidate(cluster(16), strategy, solved=True, name="megatron")
    at = {number: wide.with_recompute_layers(number).replayed_device_bytes() for number in (2, 3)}
    machines = with_room((at[2] + at[3]) / 2)
    one = candidate(machines, strategy, solved=True, name="megatron")
    with WorkerProcesses() as workers:
        changed = best_rows_with_fewer_recomputed_layers([7], lambda i: one, workers)
        assert changed.keys() == {7}
        assert changed[7].job[3].recompute_layers.tolist() == [3]
        assert not best_rows_with_fewer_recomputed_layers([7], lambda i: changed[7], workers)
        asked = candidate(machines, strategy, name="megatron")  # the user's own number stays
        assert not best_rows_with_fewer_recomputed_layers([7], lambda i: asked, workers)


def test_the_number_solved_by_a_high_estimate_is_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates that are too high make a search recompute more layers than it has to."""
    fix: dict[str, object] = {"tp": 1, "pp": 2, "vpp": 1, "cp": 1, "micro_batch": 4}
    options: dict[str, Any] = {"framework": framework("megatron"), "fix": fix, "without": ["selective"], "top": 1}
    strategy = {"tp": 1, "pp": 2, "micro_batch": 4, "recompute": "full:4"}
    machines = with_room(1.001 * candidate(cluster(16), strategy, solved=True, name="megatron").replayed_device_bytes())
    honest = find_plans(JOB, machines, **options)
    right = TableEstimator.memory_of_rows

    def too_high(self: TableEstimator, *args: Any) -> RowMemory:
        found = right(self, *args)
        return replace(found, device_bytes=found.device_bytes + 0.1 * memory_limit_bytes(machines, TITAN))

    monkeypatch.setattr(TableEstimator, "memory_of_rows", too_high)
    by_estimate = find_plans(JOB, machines, replay=False, **options)
    misled = find_plans(JOB, machines, **options)
    assert honest.report.plans[0].strategy == misled.report.plans[0].strategy
    assert misled.report.plans[0].step_s < by_estimate.report.plans[0].step_s
