"""Routing load as the cost model reads it: token rows of a rank over the mean, per expert-parallel degree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatN = NDArray[np.float64]


@dataclass(frozen=True)
class RoutingLoads:
    """Rows of the slowest rank, and of the quantile that memory must hold, over the mean of all ranks. [-]

    ``time`` and ``memory`` map an expert-parallel degree to its ratio, at least 1; a degree that is missing is
    balanced.
    """

    time: Mapping[int, float]
    memory: Mapping[int, float]

    def ratios(self, ep: NDArray[np.int64]) -> tuple[FloatN, FloatN]:
        """Both ratios for each candidate. (n,)"""
        degrees, inverse = np.unique(ep, return_inverse=True)
        time = np.array([self.time.get(int(d), 1.0) for d in degrees])
        memory = np.array([self.memory.get(int(d), 1.0) for d in degrees])
        return time[inverse], memory[inverse]


BALANCED = RoutingLoads({}, {})
