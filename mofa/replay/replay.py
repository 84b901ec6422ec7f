"""One costed strategy played out: the memory of every pipeline rank, and the clock of its step."""

from __future__ import annotations

from dataclasses import dataclass

from mofa.cost.estimate import Estimator
from mofa.replay.play import MemoryPlayed, play
from mofa.replay.ranks import outside_of, ranks_of
from mofa.replay.step import time_of
from mofa.replay.timed import TimeReplayed


@dataclass(frozen=True)
class MemoryReplayed:
    """What every pipeline rank's steps said, beside the context and the communicators of its device. [B]"""

    ranks: tuple[MemoryPlayed, ...]
    context_bytes: float
    communicator_bytes: float

    def device_bytes(self, rank: int) -> float:
        """Reserved memory, context and communicators of a pipeline rank. [B]"""
        return self.ranks[rank].peak_reserved + self.context_bytes + self.communicator_bytes

    @property
    def fullest(self) -> int:
        """The pipeline rank whose device holds most; the first among equals."""
        return max(range(len(self.ranks)), key=lambda r: (self.device_bytes(r), -r))


@dataclass(frozen=True)
class Replayed:
    """A strategy played out. ``time`` is None where only memory was played."""

    memory: MemoryReplayed
    time: TimeReplayed | None = None


def replay(estimator: Estimator) -> Replayed:
    """Play a strategy's steps on every pipeline rank.

    Parameters
    ----------
    estimator
        Of one strategy, its table having one row.

    Returns
    -------
    Replayed
        Peaks of allocated and reserved memory per pipeline rank, and the time of a step on all of their clocks.

    Notes
    -----
    Ranks of a pipeline stage are alike but for routing, where the most loaded one is played.
    """
    context, communicators = outside_of(estimator)
    capacity = int(estimator.cluster.gpu.usable_memory_bytes.value - context - communicators)
    expandable = estimator.framework.allocator == "expandable"
    ranks = tuple(play(rank, capacity=capacity, expandable=expandable) for rank in ranks_of(estimator))
    return Replayed(MemoryReplayed(ranks, context, communicators), time_of(estimator))
