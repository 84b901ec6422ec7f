"""Published routing loads, put together again from what was printed of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatA = NDArray[np.float64]

MEMFINE_EXPERTS = 256
MEMFINE_MEAN = 4096.0
"""Rows of an expert on average: 32 ranks x 4096 tokens x top 8 / 256 experts. [tokens]"""
MEMFINE_ITERATION_7 = np.array([
    [19352, 31702, 15], [26981, 35313, 38], [33391, 46104, 4], [35881, 50780, 0], [41529, 73130, 0], [40685, 84049, 0],
    [76459, 119728, 0], [76315, 126887, 0], [82480, 105174, 0], [70353, 121822, 0], [73427, 93234, 0],
    [80488, 129170, 0],
])  # fmt: skip
"""99th percentile, maximum and minimum of the tokens of an expert in layers 4 to 15, iteration 7: the text in MemFine's
figure 2 (arXiv 2511.21431). (12, 3) [tokens]"""


def memfine_iteration_7_shares(num_layers: int, num_experts: int) -> FloatA:
    """Expert shares of MemFine's seventh iteration, the most popular expert first.

    Parameters
    ----------
    num_layers
        Layers with experts; the twelve printed ones are spread over them by depth.
    num_experts
        Experts of a layer. [-]

    Returns
    -------
    FloatA
        Shares, which sum to 1 over the experts. (num_layers, num_experts) [-]

    Notes
    -----
    **Assumed.** Of each layer only the 99th percentile, the maximum and the minimum were printed. The counts between
    are taken to be lognormal in two pieces over the normal scores ``z_i`` of the ranks, ``z_i = probit((i - 1/2) /
    256)``: above the 99th percentile the one through it and the maximum, below it the one through it whose spread
    makes the mean 4096 tokens; the smallest is the printed minimum. One lognormal through all of it does not exist: at
    a mean of 1 its 99th percentile is at most ``exp(z**2 / 2) = 15``, and layers 10 to 15 have 17 to 20. 256 experts
    are DeepSeek-V3's; the paper does not say how many its models have.

    References
    ----------
    MemFine, arXiv 2511.21431, figure 2; table 3 (top 8, sequence 4096, 32 expert-parallel ranks).

    Examples
    --------
    >>> shares = memfine_iteration_7_shares(12, 256)
    >>> (shares.max(axis=-1) * 4096 * 256).round()[[0, 11]]
    array([ 31702., 129170.])
    """
    printed = np.array([_memfine_counts(*row) for row in MEMFINE_ITERATION_7.astype(float)])
    depth = np.linspace(0, len(printed) - 1, num_layers) if num_layers > 1 else np.array([len(printed) / 2])
    counts = printed[np.round(depth).astype(int)]
    if num_experts != MEMFINE_EXPERTS:
        place = (np.arange(num_experts) + 0.5) / num_experts * MEMFINE_EXPERTS - 0.5
        counts = np.array([np.interp(place, np.arange(MEMFINE_EXPERTS), row) for row in counts])
    return np.asarray(counts / counts.sum(axis=-1, keepdims=True))


def _memfine_counts(p99: float, largest: float, smallest: float) -> FloatA:
    """Tokens of 256 experts, largest first, with these three statistics and the mean that all layers have. (256,)"""
    from scipy.optimize import brentq
    from scipy.special import ndtri

    z = ndtri((np.arange(MEMFINE_EXPERTS) + 0.5) / MEMFINE_EXPERTS)
    percentile_rank = 0.99 * (MEMFINE_EXPERTS - 1)  # where NumPy's percentile lies between order statistics
    below = int(percentile_rank)
    z99 = z[below] + (percentile_rank - below) * (z[below + 1] - z[below])
    tail = p99 * np.exp(np.log(largest / p99) / (z[-1] - z99) * (z - z99))
    total = MEMFINE_MEAN * MEMFINE_EXPERTS

    def counts(sigma: float) -> FloatA:
        body = np.minimum(p99 * np.exp(sigma * (z - z99)), p99)
        both = np.where(np.arange(MEMFINE_EXPERTS) > below, tail, np.maximum(body, smallest))
        both[0] = smallest
        # the percentile lies on the line between its neighbours, which stay in order
        part = percentile_rank - below
        both[below + 1] = min(both[below] + (p99 - both[below]) / part, both[below + 2])
        both[below] = (p99 - part * both[below + 1]) / (1 - part)
        return np.asarray(both)

    sigma = brentq(lambda s: float(counts(s).sum()) - total, 1e-3, 20.0)
    return np.asarray(np.flip(counts(float(sigma))))
