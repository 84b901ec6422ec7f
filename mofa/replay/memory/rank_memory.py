"""One rank's training steps played through the allocator: what is allocated and reserved when, and at the peak why."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np

from mofa.replay.allocator.compiled import fastest_allocator
from mofa.replay.allocator.timeline import Journal, MemoryInstant
from mofa.replay.garbage_collection import without_garbage_collection
from mofa.replay.memory.executor import StepExecutor
from mofa.replay.memory.fsdp_and_optimizer import step_optimizer
from mofa.replay.memory.shared_recordings import SharedRecordings
from mofa.replay.rank.description import Rank

FIRST_STEPS = 2
"""Steps of equal tokens that are counted among those with drawn tokens: without and with optimizer states. [-]"""
NUM_STEPS = 4
"""Steps that are played at most: 252 of 271 measured configurations then begin as the step before did. [-]"""
EXTRA_MICRO_BATCHES_OF_SHORT_STEP = 8
"""Micro-batches that a short step has beyond those in flight. [-]"""
MIN_SHORTENING = 4
"""Times as many computations of a step from which a short one is played first. [-]"""


@dataclass(frozen=True)
class ReplayedRankMemory:
    """Memory of a rank as playing its steps gave it; peaks are over the steps after the first. [B]

    ``peak_window`` are the first event, the event after the last and the bytes in front of where the peak is.
    ``out_of_memory`` says where the device was full first, None where never, and ``missing_bytes`` how much more that
    request wanted.
    """

    allocated: int
    peak_reserved: int
    allocated_between_steps: int
    allocated_at_start: int
    first_step_peak: int
    retries: int
    missing_bytes: int
    journal: Journal
    peak_window: tuple[int, int, int]
    first_failure: tuple[int, MemoryInstant] | None

    @cached_property
    def peak_event(self) -> int:
        """The event of the peak."""
        peak, num = self.journal.allocated_peak_and_event(*self.peak_window)
        assert peak == self.allocated, (peak, self.allocated)
        return num - 1

    @cached_property
    def peak_instant(self) -> MemoryInstant:
        """The instant at which most is allocated."""
        return self.journal.instant_at(self.peak_event, _reserved_at(self.journal.grown, self.peak_event))

    @property
    def out_of_memory_instant(self) -> MemoryInstant | None:
        """The instant at which the device was full."""
        return self.first_failure[1] if self.first_failure else None


def play_memory(
    rank: Rank, *, capacity_bytes: int | None = None, expandable: bool = False, num_steps: int = NUM_STEPS,
    skip_rounds: bool = True, recordings: SharedRecordings | None = None,
) -> ReplayedRankMemory:  # fmt: skip
    """Play the start and up to ``num_steps`` steps of a rank.

    Optimizer states appear at the first step's end, so that the second differs. It may leave other holes than it found,
    so that the third needs more segments. A step that begins in the state in which the last one began is not played
    again, nor are rounds of a step that repeat others (:class:`mofa.replay.memory.skipped_rounds.RoundSkipper`).
    Behind them come steps with other tokens (:mod:`mofa.replay.rank.routing_drift`), where routers' counts are known:
    what is reserved is theirs too, what is allocated and written down is not.

    Parameters
    ----------
    capacity_bytes
        What the device has for the allocator; None is without end. [B]
    skip_rounds
        Whether rounds that repeat are left out; they change nothing but the journal's length.
    recordings
        What was noted down of other ranks of the plan, if any; it changes nothing.
    """
    playing = RankMemoryReplay(
        rank, capacity_bytes=capacity_bytes, expandable=expandable, num_steps=num_steps, skip_rounds=skip_rounds,
        recordings=recordings,
    )  # fmt: skip
    return playing.play_drawn_steps() if rank.routing_drift is not None else playing.memory_played_so_far()


class RankMemoryReplay:
    """A rank whose steps of equal tokens are played, as :func:`play_memory` has them; of several that of one is
    played on.

    As soon as it reserves more than a ``limit``, :class:`~mofa.replay.allocator.pools.ReservedLimitPassed` is raised,
    here or in :meth:`play_drawn_steps`. [B]
    """

    def __init__(
        self, rank: Rank, *, capacity_bytes: int | None = None, expandable: bool = False, num_steps: int = NUM_STEPS,
        skip_rounds: bool = True, recordings: SharedRecordings | None = None, limit: float = inf,
    ) -> None:  # fmt: skip
        self.rank = rank
        self.room_bytes = capacity_bytes
        self.allocator = fastest_allocator(capacity_bytes, expandable=expandable, limit=limit)
        with without_garbage_collection():
            self.player = player = StepExecutor(rank, self.allocator, skip_rounds=skip_rounds, recordings=recordings)
            player.allocate_parameters_and_buffers()
            self.ready = self.allocator.allocated
            before: object = None
            for _ in range(num_steps):
                between = player.fingerprint_between_steps()
                if between == before and player.state.step > 1:
                    break
                before = between
                player.run_step()
        self.num_highest = len(player.state.highest)

    def play_drawn_steps(self) -> ReplayedRankMemory:
        """What these and steps with other tokens behind them gave."""
        drift, player = self.rank.routing_drift, self.player
        assert drift is not None
        mark = player.state.journal.end_mark()
        with without_garbage_collection():
            for _ in range(drift.num_drift_steps(len(self.rank.computations)) - FIRST_STEPS):
                player.draw_tokens()
                player.run_step()
        result = self.memory_played_so_far()
        player.state.journal.truncate_to(mark)
        return result

    def memory_played_so_far(self) -> ReplayedRankMemory:
        """What was played so far gave."""
        player, allocator = self.player, self.allocator
        peak, start, before, end = max(player.state.highest[2 : self.num_highest], key=lambda item: item[0])
        journal = player.state.journal
        failed, missing = None, 0
        if player.state.first_failure is not None:
            event, full, instruction = player.state.first_failure
            journal_then = journal.instant_at(event - 1, full.reserved)
            failed = event, MemoryInstant(
                journal.step_of_event(event), journal.running_op(event, instruction), journal_then.allocated,
                full.reserved,
                journal_then.alive, journal_then.tensors,
            )  # fmt: skip
            missing = max(full.reserved + full.wanted - full.capacity_bytes, 0)
        reserved = allocator.peak_reserved
        if waiting := self.rank.late_copies_bytes:
            limit = inf if self.room_bytes is None else self.room_bytes - self.rank.margin_bytes
            reserved += int(max(min(waiting, limit - reserved), 0))
        return ReplayedRankMemory(
            peak, reserved, allocator.allocated, self.ready, max(h[0] for h in player.state.highest[:2]),
            allocator.num_retries, missing, journal, (start, end, before), failed,
        )  # fmt: skip


def ranks_that_may_be_fullest(
    ranks: Sequence[Rank], *, capacity_bytes: int | None = None, expandable: bool = False,
    recordings: SharedRecordings | None = None,
) -> Sequence[Rank]:  # fmt: skip
    """Of ranks of one stage that differ in what their optimizers own those that may reserve most.

    Where a step of one chunk is long, that is the one that reserves more than each other in three states: ready, with
    its optimizer's states but nothing computed, and behind steps of few micro-batches. Where no one does, or memory is
    short, or steps are short, it is all of them.

    Parameters
    ----------
    capacity_bytes
        What the device has for the allocator; None is without end. [B]
    expandable
        Whether segments are expandable.
    recordings
        What is noted down of the plan's ranks.

    Notes
    -----
    Not proven, as one's holes may suit later micro-batches better. With buffers where they are first used, of seven
    stages of DeepSeek-V3 at tp 2, pp 16 and ep 16 that this decides the chosen end reserves up to 1.0 % less in four.
    Before that, of DeepSeek-V3 at tp 2, pp 16, ep 16 with 240
    micro-batches the sixth stage is said to reserve 0.6 % less than its other end does. Of 95 stages that this
    decides (40 to 480 micro-batches, of random plans and DeepSeek-V3's best on 2,048 GPUs, at whose ends up to 9 %
    differ) playing both whole gave the same rank in all; of 1,462 of a wider draw in all but four, where up to 1.2
    % less is then said to be reserved. With ranks of several chunks it failed in two of 81: they are played whole.
    So no verdict is left to it: near the limit all ends are played (:class:`mofa.replay.replayer.Replayer`).
    """
    few = [_of_few(rank) for rank in ranks]
    if (
        len(ranks) < 2
        or len(ranks[0].chunks) > 1
        or MIN_SHORTENING * len(few[0].computations) > len(ranks[0].computations)
    ):
        return ranks
    rest = np.array([_at_rest(rank, expandable) for rank in ranks])
    n = int(rest.min(axis=1).argmax())
    if not np.all(rest[n] > np.delete(rest, n, axis=0)):
        return ranks
    played = [
        play_memory(rank, capacity_bytes=capacity_bytes, expandable=expandable, recordings=recordings) for rank in few
    ]
    reserved = np.array([memory.peak_reserved for memory in played])
    short = any(memory.retries or memory.first_failure for memory in played)
    return ranks if short or np.any(reserved[n] <= np.delete(reserved, n)) else ranks[n : n + 1]


def _of_few(rank: Rank) -> Rank:
    """The rank in a step of fewer micro-batches: those in flight and some more."""
    in_flight = next((n for n, (kind, _, _) in enumerate(rank.computations) if kind != "F"), 0)
    return replace(
        rank,
        computations=tuple(a for a in rank.computations if a[2] < in_flight + EXTRA_MICRO_BATCHES_OF_SHORT_STEP),
        routing_drift=None,
    )


def _at_rest(rank: Rank, expandable: bool) -> tuple[int, int]:
    """What a rank reserves when it is ready, and when its optimizer has stepped, with nothing computed before. [B]"""
    player = StepExecutor(rank, fastest_allocator(expandable=expandable))
    player.allocate_parameters_and_buffers()
    ready = player.state.a.reserved
    player.state.step = 1
    step_optimizer(player.state)
    return ready, player.state.a.reserved


def _reserved_at(grown: list[tuple[int, int]], event: int) -> int:
    """The reserved bytes after an event, to the end of the passage that it belongs to."""
    return grown[max(bisect_right(grown, (event, 1 << 62)) - 1, 0)][1]
