"""One rank's training steps played through the allocator: what is allocated and reserved when, and at the peak why."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from mofa.replay.allocator import Allocator
from mofa.replay.collection import no_collection
from mofa.replay.journal import Journal, Moment
from mofa.replay.player import Player
from mofa.replay.rank import Rank

NUM_STEPS = 2


@dataclass(frozen=True)
class MemoryPlayed:
    """What playing the steps gave; peaks are over the steps after the first. [B]

    ``highest`` is the event of the peak. ``out_of_memory`` says where the device was full first, None where never, and
    ``missing_bytes`` how much more that request wanted.
    """

    allocated: int
    peak_reserved: int
    between_steps: int
    ready: int
    first_step_peak: int
    retries: int
    missing_bytes: int
    journal: Journal
    highest: int
    failed: tuple[int, Moment] | None

    @cached_property
    def peak(self) -> Moment:
        """The instant at which most is allocated."""
        return self.journal.moment(self.highest, _at(self.journal.grown, self.highest))

    @property
    def out_of_memory(self) -> Moment | None:
        """The instant at which the device was full."""
        return self.failed[1] if self.failed else None


def play(
    rank: Rank, *, capacity: int | None = None, expandable: bool = False, num_steps: int = NUM_STEPS,
    skip_rounds: bool = True,
) -> MemoryPlayed:  # fmt: skip
    """Play the start and ``num_steps`` steps of a rank.

    Optimizer states appear at the first step's end, so that the second differs; from the third on steps repeat. A step
    that begins in the state in which the last one began is not played again, nor are rounds of a step that repeat
    others (:class:`mofa.replay.rounds.Rounds`).

    Parameters
    ----------
    capacity
        What the device has for the allocator; None is without end. [B]
    skip_rounds
        Whether rounds and steps that repeat are left out; they change nothing but the journal's length.
    """
    allocator = Allocator(capacity, expandable=expandable)
    with no_collection():
        player = Player(rank, allocator, skip_rounds=skip_rounds)
        player.start()
        ready = allocator.allocated
        before: object = None
        for _ in range(num_steps):
            state = player.between() if skip_rounds else None
            if state is not None and state == before and player.step > 1:
                break
            before = state
            player.run_step()
    peak, start, before, end = max(player.highest[2:], key=lambda item: item[0])
    journal = player.journal
    highest = start + next(i for i, x in enumerate(accumulate(journal.sizes[start:end], initial=before)) if x == peak)
    failed, missing = None, 0
    if player.failed is not None:
        event, full, act = player.failed
        journal_then = journal.moment(event - 1, full.reserved)
        journal.acts.insert(event, act)
        where = journal.where(event)
        del journal.acts[event]
        failed = event, Moment(
            journal.step_of(event), where, journal_then.allocated, full.reserved, journal_then.alive,
            journal_then.tensors,
        )  # fmt: skip
        missing = max(full.reserved + full.wanted - full.capacity, 0)
    return MemoryPlayed(
        peak, allocator.peak_reserved, allocator.allocated, ready, max(h[0] for h in player.highest[:2]),
        allocator.num_retries, missing, journal, highest - 1, failed,
    )  # fmt: skip


def _at(grown: list[tuple[int, int]], event: int) -> int:
    """The reserved bytes after an event, to the end of the passage that it belongs to."""
    return grown[max(bisect_right(grown, (event, 1 << 62)) - 1, 0)][1]
