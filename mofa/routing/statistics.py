"""What a routing load is like: how far its fullest expert and rank are above the mean, by layer, rank and iteration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mofa.routing.rank_load import rank_shares

FloatA = NDArray[np.float64]
QUANTILES = (0.5, 0.9, 0.99, 0.999)


@dataclass(frozen=True)
class LoadStatistics:
    """Loads over their mean; ``group`` says of what each row is. (n,) [-]

    ``max_over_mean`` is the average over the rest of the fullest unit of a layer and iteration, ``largest`` the largest
    that occurred, ``max_violation`` the MaxVio of the load summed over the rest, ``quantiles`` (n, 4) those of
    :data:`QUANTILES` over all units.
    """

    group: NDArray[np.int64]
    max_over_mean: FloatA
    largest: FloatA
    smallest: FloatA
    max_violation: FloatA
    quantiles: FloatA


def load_statistics(load_ratios: FloatA, group_by: str = "layer") -> LoadStatistics:
    """Statistics of loads per layer, per iteration, per unit (an expert or a rank), or of everything.

    Parameters
    ----------
    load_ratios
        Loads of experts or ranks over their mean. (I, L, units) [-]
    group_by
        ``layer``, ``iteration``, ``unit`` or ``all``.

    Notes
    -----
    ``MaxVio = (max_i load_i - mean) / mean`` of the load summed over iterations (and of all layers for ``all`` and
    ``iteration``: over layers separately, then averaged), as its authors define it for a whole validation set. Of a
    single unit it is how far the unit's own mean is above the mean.

    References
    ----------
    Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", arXiv 2408.15664, section 3.

    Examples
    --------
    Two iterations of one layer; over both the first unit has 3 of 4: MaxVio 0.5.

    >>> found = load_statistics(np.array([[[2.0, 0.0]], [[1.0, 1.0]]]))
    >>> float(found.max_over_mean[0]), float(found.largest[0]), float(found.max_violation[0])
    (1.5, 2.0, 0.5)
    """
    axis = {"iteration": 0, "layer": 1, "unit": 2}
    if group_by == "all":
        parts, summed = [load_ratios], [load_ratios.mean(axis=0)]
    else:
        parts = [np.expand_dims(part, axis[group_by]) for part in np.moveaxis(load_ratios, axis[group_by], 0)]
        summed = [part.mean(axis=0) for part in parts]
    fullest = [part.max(axis=-1) for part in parts]
    return LoadStatistics(
        group=np.arange(len(parts)),
        max_over_mean=np.array([f.mean() for f in fullest]),
        largest=np.array([f.max() for f in fullest]),
        smallest=np.array([part.min() for part in parts]),
        max_violation=np.array([(load.max(axis=-1) - 1.0).mean() for load in summed]),
        quantiles=np.array([np.quantile(part, QUANTILES, method="inverted_cdf") for part in parts]),
    )


def expert_loads_over_mean(shares: FloatA) -> FloatA:
    """Loads of experts over their mean. (..., E) [-]"""
    return np.asarray(shares * shares.shape[-1])


def rank_loads_over_mean(shares: FloatA, ep: int) -> FloatA:
    """Loads of expert-parallel ranks over their mean. (..., ep) [-]"""
    return np.asarray(ep * rank_shares(shares, ep))
