"""Rounds of a steady state that are left out: what is played is as if they had been."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mofa.replay.memory import skipped_rounds
from mofa.replay.memory.rank_memory import ReplayedRankMemory, play_memory
from mofa.replay.memory.skipped_rounds import STEADY_FORWARDS, RoundSkipper
from mofa.replay.rank.description import Rank
from mofa.replay.rank.from_estimator import describe_ranks
from mofa.schedules import computation_order_of
from tests.replay.memory.test_rank_memory import said_of
from tests.replay.runs import load

FEW_STEADY_FORWARDS = 20
"""As many as long pipelines wait for here, in the place of 48, so that they need not be as long. [-]"""


def _longer(name: str, rank: int, m: int) -> Rank:
    """A rank of a run on two stages with more micro-batches."""
    acts = computation_order_of("1f1b", "megatron", 2, 1, m).ranks[rank]
    return replace(
        describe_ranks(load(name).estimator)[rank], computations=tuple((a.kind, 0, a.micro_batch) for a in acts),
        num_micro_batches=m,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "m", "rank"),
    [
        ("mc4-pp2-dp2-llama-16l", 2 * FEW_STEADY_FORWARDS + 3, 0),
        ("mc4-pp2-dp2-llama-16l", 2 * FEW_STEADY_FORWARDS, 1),
        ("mc2-pp2-qwen30b-6l", 2 * FEW_STEADY_FORWARDS, 0),
        ("mc2-pp2-qwen30b-6l", FEW_STEADY_FORWARDS + 9, 1),
    ],
)
def test_long_pipelines_leave_out_what_repeats(
    name: str, m: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Whole periods are left out, so that the last rounds begin as they would have."""
    monkeypatch.setattr(skipped_rounds, "LEAST_STEADY_FORWARDS", FEW_STEADY_FORWARDS)
    one = _longer(name, rank, m)
    short, whole = play_memory(one), play_memory(one, skip_rounds=False)
    assert said_of(short) == said_of(whole)
    assert short.journal.skipped_rounds and all(
        skipped % period == 0 for _, skipped, period in short.journal.skipped_rounds
    )
    assert len(short.journal.sizes) < 0.95 * len(whole.journal.sizes)


def test_rounds_without_a_new_peak_may_be_left_out() -> None:
    """A state that never comes back: nothing is left out until :data:`STEADY_FORWARDS` forwards were quiet."""
    m = 4 * STEADY_FORWARDS
    acts = tuple(("FB"[i % 2], 0, i // 2) for i in range(2 * m))

    def ended(new_peak_at: int) -> int:
        rounds = RoundSkipper(acts, (2,))
        for n in range(2, 2 * m, 2):
            assert rounds.is_round_end(n)
            if rounds.has_unchanged_in_flight(1):
                assert rounds.num_to_skip(n, n, lambda: 0) == (0, 0)
                skipped, period = rounds.num_rounds_to_skip_once_settled(n, n // 2 >= new_peak_at, STEADY_FORWARDS)
                if skipped:
                    assert (n + skipped, period) == (2 * m, 2)
                    return n // 2
        return m

    assert STEADY_FORWARDS <= ended(0) <= STEADY_FORWARDS + 2
    assert STEADY_FORWARDS + 30 <= ended(30) <= STEADY_FORWARDS + 32


def test_a_deep_interleaved_pipeline_is_quick() -> None:
    """Rounds of the steady state are left out: 256 micro-batches cost about what 128 do."""
    run = load("mc2-pp2-vpp2-llama-16l")
    rank = describe_ranks(run.estimator)[0]

    def played(m: int) -> ReplayedRankMemory:
        acts = tuple(
            (a.kind, a.stage // 2, a.micro_batch)
            for a in computation_order_of("interleaved", "megatron", 2, 2, m).ranks[0]
        )
        return play_memory(replace(rank, computations=acts, num_micro_batches=m))

    short, long = played(128), played(256)
    assert len(long.journal.sizes) < 1.2 * len(short.journal.sizes)
    assert (long.peak_instant.allocated, long.peak_reserved) == (short.peak_instant.allocated, short.peak_reserved)
