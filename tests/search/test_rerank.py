"""The best rows of a search, played out and ranked again."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import pytest

from mofa.cost.block.routing_loads import BALANCED, RoutingLoads
from mofa.search.entry_points import find_plans
from mofa.search.one_plan import estimate
from mofa.search.one_strategy import checked_strategy_row
from mofa.search.rerank import MORE_LAYERS, PATIENCE, REPLAYED, ReplayedRanking, replay_best_rows
from mofa.search.to_plan.builder import CandidatePlan
from mofa.search.workers import WorkerProcesses
from mofa.specs.load import load_cluster, load_framework, load_workload
from tests.cost.toy import cluster, framework, workload
from tests.report.fake import make_plan
from tests.search.test_entry_points import DENSE

SMALL = {"cp": 1, "pp": 2, "vpp": 1, "micro_batch": 2}
"""A space of few pipelines."""


@dataclass
class _Clock:
    step_s: float


class _Fake:
    """A candidate of so many seconds; ``device_gib`` is what its fullest rank is found to hold of 80."""

    def __init__(self, step_s: float, device_gib: float = 60.0) -> None:
        self.replayed_time, self.device_gib = _Clock(step_s), device_gib
        self.explained = self.played = self.forgotten = 0

    num_layer_forwards = 0
    order_key = (0, 1, 1, 1)
    options_key = property(id)
    """Alone in its options: no steps are costed together."""
    more: _Fake | None = None
    """What takes its place where it does not fit."""

    def with_more_recomputed_layers(self, lacking_bytes: float) -> _Fake | None:
        assert lacking_bytes > 0
        return self.more

    def forget_played_ranks(self) -> None:
        self.forgotten += 1

    def plan_in_closed_form(self, *, banded: bool = True) -> Any:
        return make_plan(self.replayed_time.step_s, self.device_gib)

    def replayed_plan(self, *, replay: bool, explain: bool = True) -> Any:
        assert replay and not explain
        self.played += 1
        return make_plan(self.replayed_time.step_s, self.device_gib)

    def plan_with_certain_verdict(self, workers: WorkerProcesses | None = None) -> Any:
        self.explained += 1
        return make_plan(self.replayed_time.step_s, self.device_gib)


def _best(candidates: list[_Fake], top: int = 10) -> ReplayedRanking:
    return replay_best_rows(range(len(candidates)), lambda i: cast(CandidatePlan, candidates[i]), top)


def test_a_played_step_keeps_no_spans_but_gives_them_again() -> None:
    """What the best plan's memory over time needs is played anew: the other candidates' would only stay."""
    machine = load_cluster("h200-hgx", 8)
    one = CandidatePlan(
        load_workload("llama3-8b"), machine, load_framework("megatron"),
        checked_strategy_row(load_workload("llama3-8b"), machine, load_framework("megatron"),
                             "tp=2 pp=4 micro_batch=1"),
        RoutingLoads({}, {}), "causal",
    )  # fmt: skip
    step_s = one.replayed_time.step_s
    assert not one.replayed_time.spans and "replayed_time" not in vars(one.replayer)
    assert one.replayer.replayed_time.step_s == step_s and len(one.replayer.replayed_time.spans) == 4


def test_plans_are_ranked_by_their_replay() -> None:
    fakes = [_Fake(s) for s in (3.0, 1.0, 2.0)]
    found = _best(fakes)
    assert [p.step_s for p in found.plans] == [1.0, 2.0, 3.0]
    assert found.rows == [1, 2, 0] and not found.lacking_bytes
    assert [f.explained for f in fakes] == [0, 1, 0]


def test_among_equals_the_smaller_memory_wins() -> None:
    assert _best([_Fake(1.0, 70.0), _Fake(1.0, 50.0), _Fake(1.0, 60.0)]).rows == [1, 2, 0]


class _Counted(_Fake):
    """A candidate that counts how often its step is played."""

    def __init__(self, step_s: float, device_gib: float = 60.0) -> None:
        self.steps_played = 0
        super().__init__(step_s, device_gib)

    @property
    def replayed_time(self) -> _Clock:
        self.steps_played += 1
        return self._clock

    @replayed_time.setter
    def replayed_time(self, clock: _Clock) -> None:
        self._clock = clock


def test_rows_that_closed_forms_leave_too_slow_are_not_played() -> None:
    """Two are wanted. The third may be as fast as the second by 2 %, the fourth not, until the first does not fit."""
    steps_s = [1.0, 1.1, 1.12, 1.13, 1.2]
    for first_gib, played in ((60.0, 3), (90.0, 4)):
        fakes = [_Counted(s, first_gib if i == 0 else 60.0) for i, s in enumerate(steps_s)]
        found = replay_best_rows(range(5), cast(Any, fakes.__getitem__), 2, closed=steps_s)
        assert [fake.steps_played > 0 for fake in fakes] == [i < played for i in range(5)]
        every = _best([_Fake(s, first_gib if i == 0 else 60.0) for i, s in enumerate(steps_s)], top=2)
        assert found.rows == every.rows and found.lacking_bytes == every.lacking_bytes


def test_what_does_not_fit_makes_room_for_the_next() -> None:
    fakes = [_Fake(1.0, 90.0), _Fake(2.0), _Fake(3.0), _Fake(4.0)]
    found = _best(fakes, top=2)
    assert [p.step_s for p in found.plans] == [2.0, 3.0]
    assert set(found.lacking_bytes) == {0} and found.lacking_bytes[0] > 0
    assert fakes[3].played == 0  # its step alone


def test_what_was_played_of_all_but_the_best_row_is_dropped() -> None:
    """All ranks are asked for of the best plan alone; those of 30 long steps are gigabytes."""
    fakes = [_Fake(3.0), _Fake(1.0), _Fake(0.5, 90.0), _Fake(2.0)]
    assert _best(fakes).rows == [1, 3, 0]
    assert [min(fake.forgotten, 1) for fake in fakes] == [1, 0, 1, 1]


def test_no_more_are_played_than_promised() -> None:
    fits = [_Fake(float(i + 1)) for i in range(3 * REPLAYED)]
    found = _best(fits, top=100)
    assert found.rows == list(range(REPLAYED))
    few = [_Fake(1.0)] + [_Fake(1.0, 90.0) for i in range(1, 200)]
    found = _best(few)
    assert found.rows == [0] and len(found.lacking_bytes) == PATIENCE - 1
    none = _best([_Fake(1.0, 90.0) for _ in range(PATIENCE + 5)] + [_Fake(2.0)])
    assert none.rows == [PATIENCE + 5]


def _chain(*fakes: _Fake) -> _Fake:
    """The first, in whose place the others are tried."""
    for one, more in pairwise(fakes):
        one.more = more
    return fakes[0]


def test_a_row_recomputes_more_until_it_fits() -> None:
    first = _chain(_Fake(1.0, 90.0), _Fake(1.5, 85.0), _Fake(2.5, 70.0), _Fake(2.6))
    found = _best([first, _Fake(2.0), _Fake(3.0)])
    assert [p.step_s for p in found.plans] == [2.0, 2.5, 3.0]
    assert found.rows == [1, 0, 2] and not found.lacking_bytes
    assert set(found.changed) == {0} and cast(_Fake, found.changed[0]).replayed_time.step_s == 2.5
    quickest = _best([_chain(_Fake(1.0, 90.0), _Fake(2.5)), _Fake(2.0)], top=1)
    assert quickest.rows == [1] and set(quickest.changed) == {0} and not quickest.lacking_bytes


def test_a_row_is_given_up_after_some_numbers_of_layers() -> None:
    never = [_Fake(1.0 + i, 90.0) for i in range(MORE_LAYERS + 2)]
    found = _best([_chain(*never), _Fake(9.0)])
    assert found.rows == [1] and set(found.lacking_bytes) == {0}
    assert [f.played for f in never] == [1] * (MORE_LAYERS + 1) + [0]


def test_a_row_that_is_slower_than_those_looked_at_waits_for_its_place() -> None:
    fakes = [_chain(_Fake(1.0, 90.0), more := _Fake(1.5))]
    fakes += [_Fake(1.0, 90.0) for _ in range(REPLAYED - 1)]
    found = _best([*fakes, _Fake(1.4), _Fake(1.6)], top=1)
    assert [p.step_s for p in found.plans] == [1.4] and more.played == 0
    assert [p.step_s for p in _best([*fakes, _Fake(1.6)], top=1).plans] == [1.5]


def test_more_layers_are_recomputed_where_the_closed_form_is_too_hopeful() -> None:
    """A GPU that holds, margin included, what the closed form says of six layers, and not what is played of them."""
    job, machines = load_workload("llama3-8b"), load_cluster("h100-hgx", 3)
    fix = {"pp": 3, "micro_batch": 1}
    said, played = (
        estimate(job, machines, "pp=3 micro_batch=1 recompute=full:6", explain=False, replay=replay).memory
        for replay in (False, True)
    )
    assert said.peak_bytes < played.peak_bytes
    capacity_bytes = (played.capacity_bytes - played.margin_bytes) / machines.gpu.memory_bytes.value
    between = (said.peak_bytes + played.peak_bytes) / 2 / capacity_bytes
    machines = load_cluster("h100-hgx", 3, overrides={"gpu.memory_bytes": f"{between:.0f} B"})
    closed = find_plans(job, machines, fix=fix, replay=False, banded=False, closed_form_margin=False)
    search = find_plans(job, machines, fix=fix, banded=False)
    before, report = closed.report, search.report
    best, hopeful = report.plans[0], before.plans[0]
    n, fewest = (int(p.strategy.recompute.removeprefix("full:")) for p in (best, hopeful))
    assert n > fewest == 6 and best.memory.fits
    assert not estimate(job, machines, f"pp=3 micro_batch=1 recompute=full:{n - 1}", explain=False).memory.fits
    assert report.space == before.space and report.rejected == before.rejected
    assert len(report.plans) == report.feasible
    table = search.table()
    assert list(table.recompute[table.fits]).count(f"full:{n}") == 1 and f"full:{fewest}" not in set(table.recompute)
    fixed = find_plans(job, machines, fix=fix | {"recompute": f"full:{fewest}"}).report
    assert not fixed.plans and fixed.rejected["memory"] == 1  # that very number was asked for


def found_by(jobs: int) -> list[dict[str, Any]]:
    """The best three plans, searched and played by so many processes."""
    job = workload(DENSE, seq_len=4096, global_batch=32)
    plans = find_plans(
        job, cluster(8), framework=framework("megatron"), top=3, jobs=jobs, maximum=SMALL
    ).report.plans  # fmt: skip
    return [plan.model_dump() for plan in plans]


def test_more_processes_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mofa.search.to_plan.builder.SMALL", 0)
    assert found_by(1) == found_by(3)


def test_a_search_replays_its_best() -> None:
    job = workload(DENSE, seq_len=4096, global_batch=32)
    told: list[tuple[int, int]] = []
    found = find_plans(
        job, cluster(8), framework=framework("megatron"), top=3, maximum=SMALL,
        replay_progress=lambda i, n: told.append((i, n)),
    )  # fmt: skip
    assert [p.costed_by for p in found.report.plans] == ["replay"] * 3
    assert all(p.memory.fits for p in found.report.plans)
    steps = [p.step_s for p in found.report.plans]
    assert steps == sorted(steps)
    assert told[-1][0] == told[-1][1]
    best, other, _ = found.report.plans
    played = [stage for stage in best.memory.by_stage if stage.costed_by == "replay"]
    assert max(best.memory.by_stage, key=lambda stage: stage.device_bytes) in played
    assert all(stage.curve is not None for stage in played)
    fullest = max(other.memory.by_stage, key=lambda stage: stage.device_bytes)
    assert fullest.costed_by == "replay" and fullest.curve is None
    closed = find_plans(
        job, cluster(8), framework=framework("megatron"), top=3, maximum=SMALL, replay=False, banded=False
    )
    assert [p.costed_by for p in closed.report.plans] == ["closed_form"] * 3


def test_of_the_best_plan_all_ranks_are_played_that_may_not_fit() -> None:
    """Others are in closed form, whatever they hold: with little memory left all are played."""
    job = workload(DENSE, seq_len=4096, global_batch=32)
    row = checked_strategy_row(job, cluster(8), framework("megatron"), "pp=4 vpp=1")
    candidate = CandidatePlan(job, cluster(8), framework("megatron"), row, BALANCED, "causal")
    every = candidate.replayed_plan(replay=True)
    closed, limit = candidate.estimator.stage_device_bytes(), max(stage.device_bytes for stage in every.memory.by_stage)
    assert candidate.replayer.ranks_that_may_exceed(2.0 * limit) == ()
    assert candidate.replayer.ranks_that_may_exceed(0.5 * min(closed)) == (0, 1, 2, 3)
    assert candidate.replayer.ranks_that_may_exceed(1.02 * closed[0]) == tuple(
        rank for rank in range(4) if 1.06 * closed[rank] > 1.02 * closed[0]
    )
    again = CandidatePlan(job, cluster(8), framework("megatron"), row, BALANCED, "causal").plan_with_certain_verdict()
    assert again.memory.device_bytes == every.memory.device_bytes and again.step_s == every.step_s
    assert [stage.costed_by for stage in again.memory.by_stage].count("replay") < 4
    for mine, known in zip(again.memory.by_stage, every.memory.by_stage, strict=True):
        assert mine == known or mine.costed_by == "closed_form"


def test_more_plans_than_are_replayed() -> None:
    job = workload(DENSE, seq_len=4096, global_batch=32)
    found = find_plans(job, cluster(8), framework=framework("megatron"), top=REPLAYED + 5, maximum=SMALL, banded=False)
    by = [p.costed_by for p in found.report.plans]
    assert by == ["replay"] * REPLAYED + ["closed_form"] * 5


def test_a_plan_that_only_its_replay_finds_too_big_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a context of 128 GiB all are too big: the reasons say so, and nothing fits."""
    monkeypatch.setattr("mofa.replay.replayer.outside_allocator_bytes", lambda estimator: (float(2**37), (0.0,)))
    job = workload(DENSE, seq_len=4096, global_batch=32)
    fixed = {"tp": 1, "pp": 1, "cp": 1, "micro_batch": 1}
    closed = find_plans(job, cluster(8), framework=framework("megatron"), fix=fixed, replay=False, banded=False).report
    report = find_plans(job, cluster(8), framework=framework("megatron"), fix=fixed, banded=False).report
    assert not report.plans and closed.plans
    assert report.rejected["memory"] == closed.rejected.get("memory", 0) + closed.feasible
    assert report.nearest_miss["memory"].short_by > 2**35
