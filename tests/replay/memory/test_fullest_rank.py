"""The fullest rank of a plan: which ranks are played to find it, and how far."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest

import mofa
from mofa.cost.estimate import TableEstimator
from mofa.replay.allocator.caching import Allocator
from mofa.replay.allocator.pools import ReservedLimitPassed
from mofa.replay.replayer import Replayer
from mofa.search.strategy_estimator import strategy_estimator

MIB = 1 << 20


def replayer(name: str, framework: str, strategy: str, gpus: int = 16, cluster: str = "h100-hgx") -> Replayer:
    layers = {"model.num_layers": 16}
    job = mofa.load_workload(name, global_batch=4 * gpus, overrides=layers), mofa.load_cluster(cluster, gpus)
    return Replayer(strategy_estimator(*job, mofa.load_framework(framework), strategy))


@pytest.mark.parametrize("expandable", [False, True])
def test_an_allocator_says_when_a_limit_is_passed(expandable: bool) -> None:
    """40 MiB are no more than the limit; the third segment, or page, of 20 MiB is: nothing is refused before."""
    allocator = Allocator(expandable=expandable, limit=40 * MIB)
    blocks = [allocator.malloc(9 * MIB) for _ in range(4)]
    assert allocator.reserved == 40 * MIB
    with pytest.raises(ReservedLimitPassed) as passed:
        allocator.malloc(9 * MIB)
    assert passed.value.reserved == 60 * MIB
    assert len(blocks) == 4


@pytest.mark.parametrize(
    ("name", "framework", "strategy"),
    [
        ("llama3-8b", "torchtitan", "tp=2 sp=true pp=2 vpp=2 micro_batch=1 recompute=full"),
        ("qwen3-30b-a3b", "megatron", "pp=4 ep=4 micro_batch=1 recompute=full"),
        ("llama3-8b", "torchtitan", "pp=2 vpp=2 schedule=zbv micro_batch=1"),
    ],
)
def test_playing_ends_where_a_limit_is_passed(name: str, framework: str, strategy: str) -> None:
    """It says the same at a limit that is met as without one, and more than the limit, at once, where it is not."""
    one = replayer(name, framework, strategy)
    whole = one.fullest_rank_device_bytes()
    again = Replayer(one.estimator)
    assert again.fullest_rank_device_bytes(whole, exact=False) == whole
    assert again.played_ranks == one.played_ranks
    for share in (0.5, 0.9, 0.999):
        other = Replayer(one.estimator)
        assert share * whole < other.fullest_rank_device_bytes(share * whole, exact=False) <= whole
        assert other.fullest_rank_device_bytes(share * whole) in (
            whole,
            *(one.device_bytes(r) for r in one.played_ranks),
        )
    first = Replayer(one.estimator)
    assert first.device_bytes(0, 1.0) < 0.5 * one.device_bytes(0)
    assert first.played_ranks == ()
    assert first.device_bytes(0) == one.device_bytes(0)


def _played(expected: Sequence[float], held: Sequence[float], monkeypatch: pytest.MonkeyPatch, **of: Any) -> list[int]:
    """Which of 8 stages are played, in order, if they hold so much and their closed forms say so."""
    one = replayer(**{"name": "llama3-8b", "framework": "megatron", "strategy": "tp=2 pp=8 micro_batch=1", **of})
    order: list[int] = []

    def device_bytes(self: Replayer, r: int, limit: float) -> float:
        order.append(r)
        return held[r]

    monkeypatch.setattr(TableEstimator, "stage_device_bytes", lambda self: list(expected))
    monkeypatch.setattr(Replayer, "device_bytes", device_bytes)
    assert one.fullest_rank_device_bytes() == max(held[r] for r in order)
    return order


def test_what_may_be_the_fullest_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed forms of 3 % less may be too low. Stages 1 to 6 hold the same, of which the first has most in flight."""
    assert _played([98, 100, 99, 98, 97, 96, 95, 96.9], [100] * 8, monkeypatch) == [1, 0]
    assert _played([97, 100, 99, 98, 97, 96, 95, 97], [100] * 8, monkeypatch) == [1, 0, 7]


def test_no_closed_form_is_above_what_was_played(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage like one that was played is too, where the closed form has more of it than any rank holds."""
    assert _played([90, 100, 99, 98, 97, 96, 95, 90], [96] * 8, monkeypatch) == [1, 2, 3, 4]


def test_ends_of_torchtitans_pipelines_are_further_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of several chunks always, with experts those within 20 %: whole gradients may fit into no block."""
    expected, held = [50, 100, 96, 95, 94, 93, 92, 79], [100.0] * 8
    assert _played(expected, held, monkeypatch, framework="torchtitan", gpus=32) == [1]
    chunks = {"framework": "torchtitan", "gpus": 32, "strategy": "tp=2 pp=8 vpp=2 micro_batch=1"}
    assert _played(expected, held, monkeypatch, **chunks) == [1, 7, 0]
    experts = {"name": "qwen3-30b-a3b", "framework": "torchtitan", "strategy": "pp=8 dp=2 micro_batch=1"}
    assert _played([81, *expected[1:]], held, monkeypatch, **experts) == [1, 0]


def test_more_than_enough_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    one = replayer("llama3-8b", "megatron", "tp=2 pp=8 micro_batch=1")
    monkeypatch.setattr(TableEstimator, "stage_device_bytes", lambda self: [100.0 - r for r in range(8)])
    asked: list[tuple[int, float]] = []

    def device_bytes(self: Replayer, r: int, limit: float) -> float:
        asked.append((r, limit))
        return 80.0

    monkeypatch.setattr(Replayer, "device_bytes", device_bytes)
    assert one.fullest_rank_device_bytes(79.0, exact=False) == 80.0
    assert asked == [(0, 79.0)]
    assert one.fullest_rank_device_bytes(80.0) == 80.0
    assert {limit for _, limit in asked[1:]} == {float("inf")} and len(asked) == 9


@pytest.mark.parametrize("strategy", ["pp=4 ep=4 micro_batch=1 recompute=full", "pp=4 ep=1 micro_batch=8"])
def test_what_was_played_is_gone_with_its_replayer(strategy: str) -> None:
    """A search keeps the cycle collector off: neither a cycle nor a kept traceback may hold a rank. One fits; the other
    runs out of memory."""
    one = replayer("qwen3-30b-a3b", "megatron", strategy)
    gc.collect()
    gc.disable()
    try:
        one.fullest_rank_device_bytes()
        played = [one.rank_memory(r) for r in one.played_ranks]
        assert any(rank.first_failure for rank in played) == ("micro_batch=8" in strategy)
        journals = [weakref.ref(rank.journal) for rank in played]
        del played, one
        assert journals and not any(journal() for journal in journals)
        assert gc.collect() == 0
    finally:
        gc.enable()
