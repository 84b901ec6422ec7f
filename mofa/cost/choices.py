"""How often the library of matrix products meets a shape that it does not remember, and chooses a kernel anew.

Experts that run one after the other multiply as many rows as they got tokens, a number that changes with every
micro-batch. Each new number takes a choice for each product of it, forward and back; those of other experts and layers
are of the same weights' shape and serve as well.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatN = NDArray[np.float64]

REMEMBERED = 8192
"""Shapes that cuBLAS remembers unless told otherwise, dropping about those that were used longest ago (NVIDIA, cuBLAS
documentation, cublasLt, "Heuristics Cache"). It says tens of microseconds a choice; ``gemm_choice_s`` is what runs
showed. [-]"""
PRODUCTS = 6
"""Products of an expert's rows: two forward, and two of each behind them. [-]"""
MOST_EXPERTS = 256
"""Experts of all layers that are told apart; of more, as many from the least to the most popular."""
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(9)


def unseen_share(means: FloatN, draws: float) -> float:
    """Share of numbers of tokens that are new to the library, or forgotten. [-]

    Parameters
    ----------
    means
        Mean number of tokens of each expert of each layer of one rank. (n,) [tokens]
    draws
        Numbers that came up before, in all micro-batches so far; infinite in the middle of a long run. [-]

    Notes
    -----
    Tokens choose one by one, so that an expert's number is normal with its mean as its variance; ``p(m)`` is the mean
    of all experts' densities. A number is unseen with ``exp(-T p)``, averaged over the numbers that come up, where
    ``T`` are the draws so far, but no more than those in which as many different numbers come up as are remembered
    (Che, Tung, Wang 2002, doi:10.1109/JSAC.2002.801752: a cache that drops what was used longest ago). Assumes that
    popularity stays as it is.

    Examples
    --------
    Eight experts of 2048 tokens each are soon remembered; 64 of very different popularity are forgotten:

    >>> even, uneven = np.full(8, 2048.0), np.geomspace(200.0, 20000.0, 64)
    >>> [round(unseen_share(even, n), 2) for n in (0.0, 100.0, 1000.0, np.inf)]
    [1.0, 0.55, 0.04, 0.0]
    >>> round(unseen_share(uneven, np.inf), 2)
    0.73
    """
    means = np.sort(np.maximum(means, 1.0))
    if len(means) > MOST_EXPERTS:
        means = means[np.linspace(0, len(means) - 1, MOST_EXPERTS).astype(int)]
    numbers = means[:, None] + NODES * np.sqrt(means)[:, None]
    apart = (numbers[:, :, None] - means) ** 2 / (2.0 * means)
    density = (np.exp(-apart) / np.sqrt(2.0 * np.pi * means)).mean(axis=-1)
    weights = np.broadcast_to(WEIGHTS / WEIGHTS.sum() / len(means), density.shape)
    remembered = min(draws, _longest(density, weights))
    return float((weights * np.exp(-remembered * density)).sum())


def _longest(density: FloatN, weights: FloatN) -> float:
    """Draws in which as many different numbers come up as are remembered; infinite where there are fewer. [-]"""

    def different(draws: float) -> float:
        return float((weights * -np.expm1(-draws * density) / density).sum())

    most = REMEMBERED / PRODUCTS
    low, high = 0.0, 1e7
    if different(high) <= most:
        return np.inf
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if different(middle) <= most else (low, middle)
    return high
