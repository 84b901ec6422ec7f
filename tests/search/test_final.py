"""The best rows of a search, played out and ranked again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest

from mofa.search.final import PATIENCE, REPLAYED, Final, replay_best
from mofa.search.find import find_plans
from mofa.search.plan import Candidate
from tests.cost.toy import cluster, framework, workload
from tests.report.fake import make_plan
from tests.search.test_find import DENSE


@dataclass
class _Clock:
    step_s: float


@dataclass
class _Replayer:
    time: _Clock


class _Fake:
    """A candidate that lacks so many bytes on its likeliest rank, and on all of them."""

    def __init__(self, row: int, step_s: float, lacks: float, all_fit: bool) -> None:
        self.row, self.step_s, self._lacks, self.all_fit = row, step_s, lacks, all_fit
        self.replayer = _Replayer(_Clock(step_s))

    def lacks(self) -> float:
        return self._lacks

    def plan(self, *, replay: bool, explain: bool) -> Any:
        assert replay
        return make_plan(self.step_s, 60.0 if self.all_fit else 90.0)


def _best(candidates: list[_Fake], top: int = 10) -> Final:
    return replay_best(range(len(candidates)), lambda i: cast(Candidate, candidates[i]), top)


def test_plans_are_ranked_by_their_replay() -> None:
    found = _best([_Fake(i, s, -1.0, True) for i, s in enumerate([3.0, 1.0, 2.0])])
    assert [p.step_s for p in found.plans] == [1.0, 2.0, 3.0]
    assert found.seen == 3 and not found.too_big


def test_what_does_not_fit_makes_room_for_the_next() -> None:
    """Row 0 is too big on its likeliest rank, row 1 only when all of its ranks are played."""
    found = _best([_Fake(0, 1.0, 5.0, False), _Fake(1, 2.0, -1.0, False), _Fake(2, 3.0, -1.0, True)])
    assert [p.step_s for p in found.plans] == [3.0]
    assert set(found.too_big) == {0, 1} and found.too_big[0] == 5.0 and found.too_big[1] > 0


def test_no_more_are_played_than_promised() -> None:
    fits = [_Fake(i, float(i + 1), -1.0, True) for i in range(3 * REPLAYED)]
    assert _best(fits).seen == REPLAYED
    assert _best([_Fake(0, 1.0, -1.0, True)] + [_Fake(i, 1.0, 1.0, True) for i in range(1, 200)]).seen == PATIENCE


def test_a_search_replays_its_best() -> None:
    job = workload(DENSE, seq_len=4096, global_batch=32)
    told: list[tuple[int, int]] = []
    found = find_plans(
        job, cluster(8), framework=framework("megatron"), top=3, replay_progress=lambda i, n: told.append((i, n))
    )
    assert [p.costed_by for p in found.report.plans] == ["replay"] * 3
    assert all(p.memory.fits for p in found.report.plans)
    steps = [p.step_s for p in found.report.plans]
    assert steps == sorted(steps)
    assert told[-1][0] == told[-1][1]
    best, other, _ = found.report.plans
    assert all(stage.costed_by == "replay" and stage.curve is not None for stage in best.memory.by_stage)
    fullest = max(other.memory.by_stage, key=lambda stage: stage.device_bytes)
    assert fullest.costed_by == "replay" and fullest.curve is None
    closed = find_plans(job, cluster(8), framework=framework("megatron"), top=3, replay=False)
    assert [p.costed_by for p in closed.report.plans] == ["closed_form"] * 3


def test_more_plans_than_are_replayed() -> None:
    job = workload(DENSE, seq_len=4096, global_batch=32)
    found = find_plans(job, cluster(8), framework=framework("megatron"), top=REPLAYED + 5)
    by = [p.costed_by for p in found.report.plans]
    assert by == ["replay"] * REPLAYED + ["closed_form"] * 5


def test_a_plan_that_only_its_replay_finds_too_big_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything lacks a GiB: the reasons say so, and nothing fits."""
    monkeypatch.setattr(Candidate, "lacks", lambda self: float(2**30))
    job = workload(DENSE, seq_len=4096, global_batch=32)
    fixed = {"tp": 1, "pp": 1, "cp": 1, "micro_batch": 1}
    closed = find_plans(job, cluster(8), framework=framework("megatron"), fix=fixed, replay=False).report
    report = find_plans(job, cluster(8), framework=framework("megatron"), fix=fixed).report
    assert not report.plans and closed.plans
    assert report.rejected["memory"] == closed.rejected.get("memory", 0) + closed.feasible
    assert report.nearest_miss["memory"].short_by <= 2**30
