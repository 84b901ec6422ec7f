"""What PyTorch's watchdog holds of coalesced gathers: by hand, against a run, and in closed form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mofa.cost.allocations.watchdog import QUEUE, BlockPassTime, Shelf
from mofa.cost.memory.peak import stage_peak_bytes
from mofa.replay.memory.rank_memory import play_memory
from mofa.replay.rank.from_estimator import describe_ranks, gathered_row_of_strategy
from tests.replay.runs import load

RUN = "te2-tp2-llama8b-10l-blockwise"


def test_a_host_leads_by_no_more_than_the_devices_queue() -> None:
    """Blocks of 512 launches, 16 ms on the device and nothing on the host: issued two ahead, and let go a tenth of a
    second behind their end."""
    shelf: Shelf[int] = Shelf()
    gone = []
    for n in range(15):
        shelf.shelve(n)
        gone.append(shelf.issue_block_and_pop_due(BlockPassTime(0.016, 0.0), QUEUE / 2))
    assert gone.index([0]) == 9  # 128 ms, when the first has been through for 112
    assert shelf.host_s == pytest.approx(13 * 0.016)
    shelf.synchronize()
    assert shelf.host_s == shelf.device_s == pytest.approx(15 * 0.016)


def test_what_a_run_allocates_with_it() -> None:
    """Without it 6.2 % are missing."""
    run = load(RUN)
    (rank,) = describe_ranks(run.estimator)
    assert play_memory(rank).allocated / run.allocated - 1 == pytest.approx(0.0, abs=0.015)
    assert play_memory(replace(rank, launch_blocking=True)).allocated / run.allocated - 1 == pytest.approx(
        -0.062, abs=0.003
    )


def test_the_closed_form_follows() -> None:
    some = gathered_row_of_strategy(load(RUN).estimator)
    (rank,) = describe_ranks(load(RUN).estimator)
    played, closed = play_memory(rank), stage_peak_bytes(some)
    assert float(closed.allocated[0, 0]) == pytest.approx(played.allocated, rel=0.015)


def test_tensors_in_bf16_leave_nothing() -> None:
    (rank,) = describe_ranks(load("te2-tp2-llama8b-10l").estimator)
    assert not any(piece.trace.held_by_watchdog for piece in rank.chunks[0])
