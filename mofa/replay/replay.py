"""One costed strategy played out: the memory of every pipeline rank, and the clock of its step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property

from mofa.cost.estimate import Estimator
from mofa.replay.play import MemoryPlayed, play
from mofa.replay.rank import Rank
from mofa.replay.ranks import outside_of, rank_maker
from mofa.replay.step import time_of
from mofa.replay.timed import TimeReplayed, again


class Replayer:
    """A strategy whose ranks are played when they are asked for.

    Ranks of a pipeline stage are alike but for routing, where the most loaded one is played.

    Parameters
    ----------
    estimator
        Of one strategy, its table having one row.
    """

    def __init__(self, estimator: Estimator) -> None:
        self.estimator = estimator
        self.context_bytes, self.communicator_bytes = outside_of(estimator)
        self.num_ranks = int(estimator.table.pp[0])
        self._played: dict[int, MemoryPlayed] = {}

    @cached_property
    def _rank(self) -> Callable[[int], Rank]:
        return rank_maker(self.estimator)

    def rank(self, r: int) -> MemoryPlayed:
        """The memory of a pipeline rank."""
        if r not in self._played:
            room = self.estimator.cluster.gpu.usable_memory_bytes.value - self.context_bytes - self.communicator_bytes
            expandable = self.estimator.framework.allocator == "expandable"
            self._played[r] = play(self._rank(r), capacity=int(room), expandable=expandable)
        return self._played[r]

    def device_bytes(self, r: int) -> float:
        """Reserved memory, context and communicators of a pipeline rank. [B]"""
        return self.rank(r).peak_reserved + self.context_bytes + self.communicator_bytes

    @cached_property
    def time(self) -> TimeReplayed:
        """The step on the clocks of all ranks; its spans are those of one run where steps may run again."""
        runs = float(self.estimator.runs(self.estimator.table)[0])
        return again(time_of(self.estimator, detail=False), runs)

    @property
    def played(self) -> tuple[int, ...]:
        """The pipeline ranks whose memory has been played."""
        return tuple(sorted(self._played))

    def fullest_bytes(self, expected: Sequence[float], enough: float = math.inf) -> float:
        """Device bytes of the fullest rank, played: until no other is ``expected`` to hold more, or one ``enough``. [B]

        Parameters
        ----------
        expected
            Device bytes of every pipeline rank by the closed form. [B]
        enough
            More than this is not of interest. [B]
        """
        known = list(expected)
        while True:
            r = max(range(len(known)), key=lambda i: (known[i], -i))
            if r in self._played:
                return known[r]
            known[r] = self.device_bytes(r)
            if known[r] > enough:
                return known[r]
