"""The distribution that is most like a trace: one parameter each, by the distance of the ordered loads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mofa.routing.rank_load import FIELDS, cap_and_redistribute_shares, draw_expert_shares
from mofa.specs.routing import RoutingSpec

FloatA = NDArray[np.float64]
DRAWS = 128
"""Draws of a layer that a candidate's ordered loads are averaged over."""
_LOG_RANGE = {"zipf": (1e-3, 5.0), "dirichlet": (1e-3, 1e4), "lognormal": (1e-3, 5.0)}


@dataclass(frozen=True)
class DistributionFit:
    """A distribution fitted to loads.

    ``distance`` is the mean over experts of how far the ordered loads are apart, over the mean load (the first
    Wasserstein distance); ``max_over_mean`` the average fullest expert, ``trace_max_over_mean`` the trace's. [-]
    """

    routing: RoutingSpec
    distance: float
    max_over_mean: float
    trace_max_over_mean: float


def fit_each_distribution(shares: FloatA, top_k: int = 1, seed: int = 0) -> tuple[DistributionFit, ...]:
    """Fit Zipf, Dirichlet and lognormal loads to counted ones, the nearest first.

    Parameters
    ----------
    shares
        Shares of the experts, which sum to 1. (..., E) [-]
    top_k
        Experts of a token: no expert gets more than ``1 / top_k`` of the copies. [-]
    seed
        Of the draws.

    Notes
    -----
    Each layer and iteration is ordered and the order statistics are averaged, so that which expert is popular does
    not count; the parameter is the one with the smallest mean absolute difference to the candidate's averaged order
    statistics, found by a bounded search on its logarithm with the same random numbers for every candidate. The
    average over layers hides that deep ones may be more uneven: fit layers on their own where
    :func:`~mofa.routing.statistics.load_statistics` says that they differ. Micro-batches of few tokens scatter, which
    counts as unevenness here.

    Examples
    --------
    >>> s = np.arange(1, 65.0) ** -0.8
    >>> best = fit_each_distribution((s / s.sum())[None, None])[0]
    >>> best.routing.kind, round(best.routing.s, 3), round(best.distance, 3)
    ('zipf', 0.8, 0.0)
    """
    num = shares.shape[-1]
    flat = shares.reshape(-1, num)
    wanted = np.sort(flat, axis=-1).mean(axis=0)[::-1] * num
    largest = float(flat.max(axis=-1).mean() * num)
    fits = [_fit(kind, wanted, largest, num, top_k, seed) for kind in _LOG_RANGE]
    return tuple(sorted(fits, key=lambda fit: fit.distance))


def _fit(kind: str, wanted: FloatA, largest: float, num: int, top_k: int, seed: int) -> DistributionFit:
    from scipy.optimize import minimize_scalar

    def routing(log_value: float) -> RoutingSpec:
        return RoutingSpec.model_validate({"kind": kind, FIELDS[kind]: float(np.exp(log_value)), "seed": seed})

    def ordered(log_value: float) -> FloatA:
        drawn = cap_and_redistribute_shares(draw_expert_shares(routing(log_value), (DRAWS, num)), 1.0 / top_k)
        return np.asarray(np.sort(drawn, axis=-1).mean(axis=0)[::-1] * num)

    def distance(log_value: float) -> float:
        return float(np.abs(ordered(log_value) - wanted).mean())

    low, high = np.log(_LOG_RANGE[kind])
    # the distance may have more than one dip: look along a grid first
    grid = np.linspace(low, high, 25)
    best = int(np.argmin([distance(x) for x in grid]))
    span = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    parameter = float(minimize_scalar(distance, bounds=span, method="bounded", options={"xatol": 1e-6}).x)
    return DistributionFit(routing(parameter), distance(parameter), float(ordered(parameter)[0]), largest)
