"""Routing load as the cost model reads it: token rows of a rank over the mean, per expert-parallel degree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mofa.cost.kernels.kernel_selection import (
    expected_first_use_kernels,
    expected_poisson_max,
    expert_popularity_drift,
    heuristic_cache_miss_rate,
    token_count_densities,
)
from mofa.specs.gpu_facts import KernelSelectionFacts

FloatN = NDArray[np.float64]
MOST_RANKS = 8


@dataclass(frozen=True)
class LoadsWithTokenScheduling:
    """Routing load of ranks where token scheduling shares tokens out over replicas of experts, in merged
    expert-parallel groups.

    ``slowest_rows_over_mean`` and ``quantile_rows_over_mean`` are rows of a rank over the mean [-].
    ``sent_bytes_over_mean`` is the busiest rank's tokens, sent or received, over those of a uniform exchange in the
    merged group [-]. ``host_s`` is what the host adds to every layer and micro-batch [s].
    """

    slowest_rows_over_mean: float
    quantile_rows_over_mean: float
    sent_bytes_over_mean: float
    host_s: float


@dataclass(frozen=True)
class LoadColumns:
    """Load of every candidate: rows over the mean for time and memory, bytes sent over the mean, host time, how
    uneven a rank's experts are. (n,)"""

    slowest_rows_over_mean: FloatN
    quantile_rows_over_mean: FloatN
    sent_bytes_over_mean: FloatN
    host_s: FloatN
    expert_rows_deviation: FloatN


@dataclass(frozen=True)
class RoutingLoads:
    """Rows of the slowest rank, and of the quantile that memory must hold, over the mean of all ranks. [-]

    ``slowest_rows_over_mean`` and ``quantile_rows_over_mean`` map an expert-parallel degree to its ratio, at least 1; a
    degree that is missing is balanced. ``scheduled_over_replicas`` has the degrees at which tokens may be scheduled
    over replicas.
    """

    slowest_rows_over_mean: Mapping[int, float]
    quantile_rows_over_mean: Mapping[int, float]
    scheduled_over_replicas: Mapping[int, LoadsWithTokenScheduling] = field(default_factory=dict)
    sent_bytes_over_mean: Mapping[int, float] = field(default_factory=dict)
    """Bytes of the busiest rank's exchange over the mean, where rows are padded and bytes are not. [-]"""
    over_budget_fraction: Mapping[int, float] = field(default_factory=dict)
    """Share of micro-batches of one expert-parallel group in which a rank is over its budget of rows. [-]"""
    expert_rows_deviation: Mapping[int, float] = field(default_factory=dict)
    """Standard deviation of the rows of the slowest rank's experts over their mean; 0 where a degree is missing. [-]"""
    shares: FloatN | None = None
    """Share of the token copies that each expert of each layer gets, None where all get the same. (L, E) [-]"""
    steps_before: float = np.inf
    """Steps that the run has made before. [-]"""
    drifts: bool = True
    """Whether experts' popularity moves from step to step in these."""
    by_layer: Mapping[int, FloatN] = field(default_factory=dict)
    """Rows of every rank over the mean, per layer with experts, where they are known. (L, ep) [-]"""
    emptiest: Mapping[int, float] = field(default_factory=dict)
    """Rows of the emptiest rank over the mean, by as rare a quantile as ``quantile_rows_over_mean``; of a missing
    degree those. [-]"""

    def with_memory_of_emptiest_rank(self, ep: int) -> RoutingLoads | None:
        """The loads with the rows of the emptiest rank in memory; None where ranks are alike.

        Examples
        --------
        >>> loads = RoutingLoads({2: 1.2}, {2: 1.5}, emptiest={2: 0.5})
        >>> loads.with_memory_of_emptiest_rank(2).quantile_rows_over_mean, loads.with_memory_of_emptiest_rank(4)
        ({2: 0.5}, None)
        """
        least = self.emptiest.get(ep)
        if ep == 1 or least is None or least >= self.quantile_rows_over_mean[ep]:
            return None
        return replace(self, quantile_rows_over_mean={**self.quantile_rows_over_mean, ep: least})

    def unremembered_share_and_first_use_kernels(
        self, ep: FloatN, copies: FloatN, chunks: FloatN, inner: FloatN, ends: tuple[float, float],
        selection: KernelSelectionFacts, multiple: float = 1.0,
    ) -> tuple[FloatN, FloatN]:  # fmt: skip
        """Share of experts' numbers of tokens without a remembered kernel, and kernels that a number needs first.

        On the rank that needs most of them. (n,), (n,) [-]

        Parameters
        ----------
        ep
            Expert-parallel degree. (n,)
        copies
            Token copies that an expert-parallel group sends in one layer and micro-batch. (n,) [tokens]
        chunks
            Micro-batches of a step, over the pipeline's stages, that share the layers. (n,) [-]
        inner
            Width of an expert on one rank. (n,) [-]
        ends
            Width of a token, and of what an expert makes of it first over its own. [-], [-]
        selection
            How the GPU's library chooses kernels.
        multiple
            That an expert's rows are padded to. [tokens]

        Examples
        --------
        >>> from mofa.cost.kernels.toy_gpu import toy_gpu
        >>> chosen = toy_gpu().curves.kernel_selection
        >>> loads = RoutingLoads({}, {}, shares=np.full((2, 8), 0.125), steps_before=3)
        >>> copies, inner = np.array([16384.0]), np.array([1024.0])
        >>> share, kernels = loads.unremembered_share_and_first_use_kernels(  # 96 draws of 160
        ...     np.array([1.0]), copies, np.array([2.0]), inner, (2048, 2), chosen
        ... )
        >>> share.round(2), kernels.round(2)
        (array([0.57]), array([0.02]))
        """
        if self.shares is None:
            return np.zeros(len(ep)), np.zeros(len(ep))
        keys, inverse = np.unique(np.stack([ep, copies, chunks, inner]), axis=1, return_inverse=True)
        hidden, up = ends
        given = self.shares.tobytes(), self.shares.shape, self.steps_before, self.drifts, selection, multiple
        shares_and_kernels = [
            _unseen(*given, int(degree), sent, each, ((up * width, hidden), (hidden, width)))
            for degree, sent, each, width in keys.T.tolist()
        ]
        share, kernels = np.array(shares_and_kernels)[np.asarray(inverse).reshape(-1)].T
        return share, kernels

    def runs_per_step(self, ep: NDArray[np.int64], draws: NDArray[np.float64]) -> FloatN:
        """How often a step runs: once more if any of its ``draws`` (micro-batches of groups) is over. (n,), (n,) [-]

        Examples
        --------
        >>> loads = RoutingLoads({8: 1.5}, {8: 1.5}, over_budget_fraction={8: 0.5})
        >>> loads.runs_per_step(np.array([8, 8, 1]), np.array([1.0, 2.0, 2.0]))
        array([1.5 , 1.75, 1.  ])
        """
        if not self.over_budget_fraction:
            return np.ones(len(ep))
        degrees, inverse = np.unique(ep, return_inverse=True)
        over = np.array([self.over_budget_fraction.get(int(degree), 0.0) for degree in degrees])[inverse]
        return np.asarray(2.0 - (1.0 - over) ** draws)

    def load_columns(self, ep: NDArray[np.int64], balancing: NDArray[np.int64]) -> LoadColumns:
        """The load of each candidate, scheduled where ``balancing`` is above 0. (n,), (n,)"""
        keys = list(zip(ep.tolist(), (balancing > 0).tolist(), strict=True))
        known = {key: self._row(*key) for key in set(keys)}
        return LoadColumns(*np.array([known[key] for key in keys]).reshape(-1, 5).T)

    def _row(self, ep: int, scheduled: bool) -> tuple[float, float, float, float, float]:
        if scheduled and ep in self.scheduled_over_replicas:
            load = self.scheduled_over_replicas[ep]
            return (
                load.slowest_rows_over_mean,
                load.quantile_rows_over_mean,
                load.sent_bytes_over_mean,
                load.host_s,
                0.0,
            )
        time = self.slowest_rows_over_mean.get(ep, 1.0)
        return (
            time,
            self.quantile_rows_over_mean.get(ep, 1.0),
            self.sent_bytes_over_mean.get(ep, time),
            0.0,
            self.expert_rows_deviation.get(ep, 0.0),
        )


BALANCED = RoutingLoads({}, {})


@lru_cache(maxsize=256)
def _unseen(
    shares: bytes, shape: tuple[int, int], steps_before: float, drifts: bool, selection: KernelSelectionFacts,
    multiple: float, ep: int, copies: float, chunks: float, ways: tuple[tuple[float, float], ...],
) -> tuple[float, float]:  # fmt: skip
    """Over the ranks, or as many of them as tell enough. Kept, as it is half of what costing an uneven strategy takes,
    and a replay costs one several times."""
    layers, experts = shape
    means = copies * np.frombuffer(shares).reshape(layers, ep, experts // ep)
    draws = steps_before * chunks * layers * (experts // ep)
    each = [means[:, rank].reshape(-1) for rank in range(min(ep, MOST_RANKS))]
    # in a run's first steps; how far popularity moves later was not measured
    spread = expert_popularity_drift(means) if drifts and np.isfinite(draws) else 0.0
    places = [token_count_densities(mean, spread, multiple) for mean in each]
    of_ranks = [heuristic_cache_miss_rate(mean, draws, spread, of) for mean, of in zip(each, places, strict=True)]
    kernels = [
        expected_first_use_kernels(mean, draws, ways, selection, spread, of, multiple)
        for mean, of in zip(each, places, strict=True)
    ]
    local = 0.5 * (experts // ep)  # half of a number's kernels are needed on the way forward, half on the way back
    return float(np.mean(of_ranks)), expected_poisson_max(float(np.mean(kernels)) * local, ep) / local
