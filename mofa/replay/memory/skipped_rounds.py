"""Which rounds of a pipeline's steady state need not be played, as they would change nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

STEADY_FORWARDS = 160
"""Forwards without more being asked of the device after which a first step counts as steady, where a rank has several
chunks: in the best plans of DeepSeek-V3 on 2,048 GPUs, 120 ranks, up to 128 pass between one segment and the next. [-]
"""
STEADY_TURNOVERS = 8
"""How often all that is in flight comes and goes meanwhile, where it has one chunk: up to 4.5 times there. [-]"""
LEAST_STEADY_FORWARDS = 48
"""Forwards that are waited for in any case. [-]"""
ROUNDS_FULLY_FINGERPRINTED = 32
"""Rounds whose whole state is put down; most that come back soon do so at once. [-]"""
STEADY_FORWARDS_OF_LATER_STEP = 320
"""The same of a later step, without a new peak either: of 92 ranks of best plans and those of 139 published pipelines,
whose later steps were played whole, none took a segment later than 128 forwards after the one before, and behind more
than these the peak of allocated memory rose by less than 5e-6. [-]"""
STEADY_FORWARDS_WITH_RETENTION = 1024
"""Forwards that are waited for in any step, where something lingers of several chunks. [-]"""


class MicroBatchShifts:
    """By how many micro-batches rounds follow those before them, of the computations of a step.

    Examples
    --------
    >>> order = (("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("F", 0, 2), ("B", 0, 1), ("F", 0, 3), ("B", 0, 2))
    >>> rounds = MicroBatchShifts(order, (2,))
    >>> [rounds.shift_of_round(n, 2) for n in range(len(order))], rounds.size_of_round(3)
    ([0, 0, 0, 1, 1, 1, 0], 2)
    """

    def __init__(self, computations: tuple[tuple[str, int, int], ...], sizes: tuple[int, ...]) -> None:
        self.computations = computations
        self._by = {size: self._of_size(size) for size in sizes if 2 * size <= len(computations)}

    def shift_of_round(self, position: int, size: int) -> int:
        """By how many micro-batches the ``size`` computations from ``position`` follow those before; 0 where other."""
        by = self._by.get(size)
        return by[position] if by is not None and position < len(by) else 0

    def size_of_round(self, position: int) -> int:
        """The least size of which a round ends in front of ``position`` and another like it follows; 0 where none."""
        for size, by in self._by.items():
            if by[position]:
                return size
        return 0

    def _of_size(self, size: int) -> list[int]:
        computations = self.computations
        what, micro_batch = self._numbers
        same, shift = what[size:] == what[:-size], micro_batch[size:] - micro_batch[:-size]
        # runs of computations that do the same as those a round ahead, so many micro-batches later
        ends = np.flatnonzero(np.append(~same[1:] | (shift[1:] != shift[:-1]), True))
        end = ends[np.searchsorted(ends, np.arange(len(same)))]
        alike = same & (end - np.arange(len(same)) >= size - 1)
        by = np.zeros(len(computations) + 1, dtype=np.int64)
        by[size:-1] = np.where(alike, np.maximum(shift, 0), 0)
        return by.tolist()

    @cached_property
    def _numbers(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """A number for what each computation does in which chunk, and its micro-batch. (n,) each"""
        number_of: dict[tuple[str, int], int] = {}
        what = [number_of.setdefault((kind, c), len(number_of)) for kind, c, _ in self.computations]
        return np.array(what, dtype=np.int64), np.array([i for _, _, i in self.computations], dtype=np.int64)


class RoundSkipper:
    """Finds rounds of a steady state that can be left out.

    A round is as many computations as are repeated a micro-batch (or some) later. Where the whole state after one comes
    back, all that follows does, and rounds are left out by whole periods: exactly. Blocks change places among the
    micro-batches in flight and what is left of free blocks wanders with them, so that a state may come back late or
    never. Of a first step only what it asked of the device is left at its end, as all activations are gone by then: its
    rounds are left out once nothing was asked for while all that is in flight came and went :data:`STEADY_TURNOVERS`
    times, with several chunks for :data:`STEADY_FORWARDS` forwards. Those of a later step are only where that and the
    peaks held for :data:`STEADY_FORWARDS_OF_LATER_STEP`.
    """

    def __init__(
        self,
        computations: tuple[tuple[str, int, int], ...],
        sizes: tuple[int, ...],
        later: MicroBatchShifts | None = None,
    ) -> None:
        self.computations, self.shifts = computations, later or MicroBatchShifts(computations, sizes)
        self.size = self.start = 0
        self.states: dict[object, dict[object, int]] = {}
        self.peaks: object = None
        self.changed = 0
        self.num_in_flight = 0
        self.chunks = len({c for _, c, _ in computations})

    def is_round_end(self, position: int) -> bool:
        """Whether a round ends in front of the computation at ``position`` and another like it follows."""
        if self.size and (position - self.start) % self.size:
            return False
        size = self.shifts.size_of_round(position)
        if size != self.size:
            self.size, self.start, self.states, self.peaks = size, position, {}, None
        return size > 0

    def has_unchanged_in_flight(self, flying: int) -> bool:
        """Whether as much is in flight as a round ago: else nothing can have come back."""
        before, self.num_in_flight = self.num_in_flight, flying
        return before == flying

    def num_to_skip(self, position: int, places_held: object, free: Callable[[], object]) -> tuple[int, int]:
        """How many computations can be left out here as the state came back, and how many those are that repeat.

        The state is what is ``places_held`` where and what is ``free``. That takes longer to put down: behind the first
        :data:`ROUNDS_FULLY_FINGERPRINTED` rounds it is only where the former has come back.
        """
        known = self.states.get(places_held)
        if known is None:
            known = self.states[places_held] = {}
            if len(self.states) > ROUNDS_FULLY_FINGERPRINTED:
                return 0, 0
        state = free()
        since = known.get(state)
        known[state] = position
        return (0, 0) if since is None else (self._following(position, position - since), position - since)

    @property
    def num_quiet_forwards(self) -> int:
        """Forwards after which a first step in which nothing more was asked for is steady."""
        return (
            min(max(STEADY_TURNOVERS * self.num_in_flight, LEAST_STEADY_FORWARDS), STEADY_FORWARDS)
            if self.chunks == 1
            else STEADY_FORWARDS
        )

    def num_rounds_to_skip_once_settled(self, position: int, peaks: object, quiet: int) -> tuple[int, int]:
        """How many rounds may be skipped where ``peaks`` have not changed for so many forwards."""
        if peaks != self.peaks:
            self.peaks, self.changed = peaks, position
        begun = max(sum(kind == "F" for kind, _, _ in self.computations[position : position + self.size]), 1)
        num_rounds = -(-max(self.num_in_flight, quiet) // begun)
        if position - self.changed < num_rounds * self.size:
            return 0, 0
        return self._following(position, self.size), self.size

    def _following(self, position: int, period: int) -> int:
        """How many computations follow in whole periods of rounds like the last one."""
        like = 0
        while self.shifts.shift_of_round(position + like * self.size, self.size):
            like += 1
        return like * self.size // period * period
