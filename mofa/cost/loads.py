"""Routing load as the cost model reads it: token rows of a rank over the mean, per expert-parallel degree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

FloatN = NDArray[np.float64]


@dataclass(frozen=True)
class Scheduled:
    """Load of the ranks where tokens are scheduled over replicas in merged expert-parallel groups.

    ``time`` and ``memory`` are rows of a rank over the mean, ``sent`` the tokens that the busiest rank sends or
    receives over those of a uniform exchange in the merged group [-]; ``host_s`` is what the host adds to every layer
    and micro-batch [s].
    """

    time: float
    memory: float
    sent: float
    host_s: float


@dataclass(frozen=True)
class LoadColumns:
    """Load of every candidate: rows over the mean for time and memory, bytes sent over the mean, host time. (n,)"""

    time: FloatN
    memory: FloatN
    sent: FloatN
    host_s: FloatN


@dataclass(frozen=True)
class RoutingLoads:
    """Rows of the slowest rank, and of the quantile that memory must hold, over the mean of all ranks. [-]

    ``time`` and ``memory`` map an expert-parallel degree to its ratio, at least 1; a degree that is missing is
    balanced. ``scheduled`` has the degrees at which tokens may be scheduled over replicas.
    """

    time: Mapping[int, float]
    memory: Mapping[int, float]
    scheduled: Mapping[int, Scheduled] = field(default_factory=dict)
    sent: Mapping[int, float] = field(default_factory=dict)
    """Bytes of the busiest rank's exchange over the mean, where rows are padded and bytes are not. [-]"""
    over: Mapping[int, float] = field(default_factory=dict)
    """Share of micro-batches of one expert-parallel group in which a rank is over its budget of rows. [-]"""

    def runs(self, ep: NDArray[np.int64], draws: NDArray[np.float64]) -> FloatN:
        """How often a step runs: once more if any of its ``draws`` (micro-batches of groups) is over. (n,), (n,) [-]

        Examples
        --------
        >>> loads = RoutingLoads({8: 1.5}, {8: 1.5}, over={8: 0.5})
        >>> loads.runs(np.array([8, 8, 1]), np.array([1.0, 2.0, 2.0]))
        array([1.5 , 1.75, 1.  ])
        """
        if not self.over:
            return np.ones(len(ep))
        degrees, inverse = np.unique(ep, return_inverse=True)
        over = np.array([self.over.get(int(degree), 0.0) for degree in degrees])[inverse]
        return np.asarray(2.0 - (1.0 - over) ** draws)

    def columns(self, ep: NDArray[np.int64], balancing: NDArray[np.int64]) -> LoadColumns:
        """The load of each candidate, scheduled where ``balancing`` is above 0. (n,), (n,)"""
        keys, inverse = np.unique(ep * 2 + (balancing > 0), return_inverse=True)
        rows = np.array([self._row(int(key) // 2, bool(key % 2)) for key in keys]).reshape(-1, 4)
        return LoadColumns(*rows[inverse].T)

    def _row(self, ep: int, scheduled: bool) -> tuple[float, float, float, float]:
        if scheduled and ep in self.scheduled:
            load = self.scheduled[ep]
            return load.time, load.memory, load.sent, load.host_s
        time = self.time.get(ep, 1.0)
        return time, self.memory.get(ep, 1.0), self.sent.get(ep, time), 0.0


BALANCED = RoutingLoads({}, {})
