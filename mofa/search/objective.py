"""What a search makes smallest: the key of rows that are costed, and what it is at least of rows that are bounded."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mofa.search.costing import HOST_MEMORY, CostedRows, CostedSpace

FloatN = NDArray[np.float64]


class SearchObjective(Protocol):
    """The key that a search makes smallest."""

    @property
    def key_unit(self) -> str:
        """What keys are in, divided by :attr:`key_of_one_unit`."""

    @property
    def key_of_one_unit(self) -> float:
        """A key of one unit."""

    @property
    def computing_weights(self) -> Mapping[str, float]:
        """Weights of the families of computing whose seconds the key depends on; none where on the step alone."""

    def ranking_key(self, costed: CostedRows) -> FloatN:
        """The key of timed rows. (n,)"""

    def missing_host_bytes(self, per_rank_bytes: FloatN) -> FloatN:
        """Host memory that a node lacks for the checkpoints of rows. (n,) [B]"""

    def ranking_key_lower_bound(self, step_s: FloatN, computing_j: FloatN) -> FloatN:
        """A number below the key of every row.

        Parameters
        ----------
        step_s
            Below its step. (n,) [s]
        computing_j
            Below the sum of its seconds of computing by :attr:`computing_weights`. (n,)
        """


class ShortestStep:
    """Rows by the time of their steps. [s]"""

    key_unit = "s"
    key_of_one_unit = 1.0
    computing_weights: Mapping[str, float] = MappingProxyType({})

    def ranking_key(self, costed: CostedRows) -> FloatN:
        """The step. (n,) [s]"""
        return costed.step_s

    def missing_host_bytes(self, per_rank_bytes: FloatN) -> FloatN:
        """Nothing: checkpoints are not asked about. (n,) [B]"""
        return np.zeros_like(per_rank_bytes)

    def ranking_key_lower_bound(self, step_s: FloatN, computing_j: FloatN) -> FloatN:
        """The bound of the step. (n,) [s]"""
        return step_s


SHORTEST_STEP = ShortestStep()


def ranking_keys_and_missing_host_bytes(objective: SearchObjective, costed: CostedRows) -> tuple[FloatN, FloatN]:
    """The key of each row, and the host memory that it lacks. (n,) each [-, B]

    NaN and 0 where rows are not timed, infinite where host memory is lacking.
    """
    key, lack = np.full(len(costed.rows), np.nan), np.zeros(len(costed.rows))
    timed = np.flatnonzero(np.isfinite(costed.step_s))
    some = costed.select_rows(timed)
    lack[timed] = objective.missing_host_bytes(some.checkpoint_bytes)
    key[timed] = np.where(lack[timed] > 0, np.inf, objective.ranking_key(some))
    return key, lack


def reject_rows_for_host_memory(objective: SearchObjective, searched_rows: CostedSpace) -> FloatN:
    """The keys of costed rows (:func:`ranking_keys_and_missing_host_bytes`); those whose checkpoints exceed the hosts'
    memory are rejected. (n,)"""
    costed = searched_rows.costed
    key, lack = ranking_keys_and_missing_host_bytes(objective, costed)
    full = (lack > 0) & (searched_rows.reason[costed.rows] < 0)
    rows = costed.rows[full]
    searched_rows.reason[rows], searched_rows.shortfall[rows] = HOST_MEMORY, lack[full]
    return key
