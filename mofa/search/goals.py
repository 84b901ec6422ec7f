"""What a search that bounds rows is after: the best rows by one key, or the front of memory and key."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mofa.search.objective import SearchObjective

FloatN = NDArray[np.float64]
BoolN = NDArray[np.bool_]
TIED = 1e-9
"""Keys that differ by less, as a share, may be of equal rows. [-]"""


class SearchGoal(Protocol):
    """Which rows are sought, by what is known of those costed so far."""

    objective: SearchObjective

    def note_costed_rows(self, key: FloatN, device_bytes: FloatN) -> None:
        """Take note of fitting rows that have been costed. (n,) each"""

    def is_dominated(self, key: FloatN, device_bytes: FloatN) -> BoolN:
        """Whether rows whose key and memory are no smaller than these cannot be among those sought. (n,)"""

    def excess_over_last_wanted_key(self, key: FloatN) -> FloatN:
        """How much rows with such keys are beaten by. (n,)"""


class BestRowsGoal:
    """So many rows with the smallest keys, all of them below a limit.

    Examples
    --------
    >>> from mofa.search.objective import SHORTEST_STEP
    >>> best = BestRowsGoal(SHORTEST_STEP, 2)
    >>> best.note_costed_rows(np.array([5.0, 3.0, 4.0]), np.ones(3))
    >>> best.is_dominated(np.array([3.5, 4.5]), np.ones(2)), best.excess_over_last_wanted_key(np.array([4.5]))
    (array([False,  True]), array([0.5]))
    """

    def __init__(self, objective: SearchObjective, wanted: int, limit: float = np.inf) -> None:
        self.objective, self.wanted, self.limit, self.keys = objective, wanted, limit, np.empty(0)

    @property
    def last_wanted_key(self) -> float:
        """The key of the last of the wanted rows; the limit while fewer fit."""
        return float(self.keys[-1]) if len(self.keys) == self.wanted else self.limit

    def note_costed_rows(self, key: FloatN, device_bytes: FloatN) -> None:
        """Keep the smallest keys. (n,) each"""
        self.keys = np.sort(np.concatenate([self.keys, key[key < self.limit]]))[: self.wanted]

    def is_dominated(self, key: FloatN, device_bytes: FloatN) -> BoolN:
        """Whether keys are above the last of the wanted ones. (n,)"""
        return np.asarray(key > self.last_wanted_key * (1.0 + TIED))

    def excess_over_last_wanted_key(self, key: FloatN) -> FloatN:
        """What keys are above the last of the wanted ones. (n,)"""
        return np.maximum(key - self.last_wanted_key, 0.0)


class ParetoFrontGoal:
    """The rows that no other beats in key and memory at once, with keys up to ``longest`` times the smallest.

    Keys are positive.

    Examples
    --------
    >>> from mofa.search.objective import SHORTEST_STEP
    >>> front = ParetoFrontGoal(SHORTEST_STEP)
    >>> front.note_costed_rows(np.array([1.0, 2.0, 3.0]), np.array([8.0, 9.0, 4.0]))
    >>> front.is_dominated(np.array([2.5, 2.5, 3.5]), np.array([9.0, 7.0, 4.0]))
    array([ True, False,  True])
    >>> front.longest = 1.5
    >>> front.is_dominated(np.array([1.4, 1.6]), np.array([7.0, 7.0]))
    array([False,  True])
    """

    def __init__(self, objective: SearchObjective, longest: float = np.inf) -> None:
        self.objective, self.longest, self.keys, self.device_bytes = objective, longest, np.empty(0), np.empty(0)

    def note_costed_rows(self, key: FloatN, device_bytes: FloatN) -> None:
        """Keep what is not beaten, by rising key and falling memory. (n,) each"""
        keys, device = np.concatenate([self.keys, key]), np.concatenate([self.device_bytes, device_bytes])
        order = np.lexsort((device, keys))
        keys, device = keys[order], device[order]
        least_before = np.concatenate([[np.inf], np.minimum.accumulate(device)[:-1]])
        on_front = device < least_before
        self.keys, self.device_bytes = keys[on_front], device[on_front]

    def is_dominated(self, key: FloatN, device_bytes: FloatN) -> BoolN:
        """Whether a row of the front has a smaller key and no more memory, or keys are too large. (n,)"""
        if not len(self.keys):
            return np.zeros(len(key), dtype=bool)
        place = np.searchsorted(self.keys * (1.0 + TIED), key) - 1
        is_beaten = (place >= 0) & (self.device_bytes[np.maximum(place, 0)] <= device_bytes)
        return np.asarray(is_beaten | (key > self.longest * self.keys[0] * (1.0 + TIED)))

    def excess_over_last_wanted_key(self, key: FloatN) -> FloatN:
        """Nothing: a front has no last row. (n,)"""
        return np.zeros_like(key)
