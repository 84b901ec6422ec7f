"""How often the library of matrix products meets a shape that it does not remember, and chooses a kernel anew; and how
often that is one that no product has used yet, which the driver then loads.

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
documentation, cublasLt, "Heuristics Cache"). [-]"""
KERNELS, NUMBERS = 415.0, 361.0
"""Kernels that all the products of experts come to need, and different numbers of tokens after which an e-th of them is
left: 39 for the 41st to 80th number between 256 and 2048 (both products of 2048 x 768 experts, PyTorch 2.11, in
measurements/h200-host-second/products.json: they take milliseconds more), and 3 in the 109 new numbers of both ranks,
behind 1350, in host-mc2-ep2-olmoe-3l-skewed-traced. [-]"""
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
    density, weights = _densities(means)
    remembered = min(draws, _longest(density, weights))
    return float((weights * np.exp(-remembered * density)).sum())


def new_kernels(means: FloatN, draws: float) -> float:
    """Kernels that the next number of tokens needs and nothing has used before, of all its products. [-]

    Arguments as of :func:`unseen_share`. ``KERNELS (1 - exp(-n / NUMBERS))`` have been loaded after ``n`` different
    numbers; assumes experts of all sizes alike, though larger ones need fewer (28 for the 11th to 80th number of 4096 x
    6400, behind those of the others).

    Examples
    --------
    At first a number needs one or two, after hundreds one in three, in the middle of a long run none does.

    >>> uneven = np.geomspace(200.0, 20000.0, 64)
    >>> [round(new_kernels(uneven, n), 2) for n in (0.0, 400.0, np.inf)]
    [1.15, 0.36, 0.0]
    """
    if not np.isfinite(draws):
        return 0.0
    density, weights = _densities(means)
    unseen = float((weights * np.exp(-draws * density)).sum())
    return unseen * KERNELS / NUMBERS * float(np.exp(-_different(draws, density, weights) / NUMBERS))


def most_of(mean: float, ranks: int) -> float:
    """Expected largest of the counts of so many ranks, of ``mean`` each: the ranks that load fewer kernels in a pass of
    a layer wait for it. Assumes that kernels come up independently (Poisson). [-]

    Examples
    --------
    Two ranks' larger count exceeds one's by more than half where they are few:

    >>> [round(most_of(mean, ranks), 2) for mean, ranks in ((1.0, 1), (1.0, 2), (0.1, 2), (16.0, 2))]
    [1.0, 1.52, 0.19, 18.25]
    """
    counts = np.arange(int(mean + 10.0 * np.sqrt(mean)) + 20)
    logs = counts * np.log(max(mean, 1e-12)) - mean - np.cumsum(np.log(np.maximum(counts, 1)))
    return float((1.0 - np.minimum(np.cumsum(np.exp(logs)), 1.0) ** ranks).sum())


def _densities(means: FloatN) -> tuple[FloatN, FloatN]:
    """Density of all experts' numbers of tokens around each mean, and the weights of these places. (n, 9)"""
    means = np.sort(np.maximum(means, 1.0))
    if len(means) > MOST_EXPERTS:
        means = means[np.linspace(0, len(means) - 1, MOST_EXPERTS).astype(int)]
    numbers = means[:, None] + NODES * np.sqrt(means)[:, None]
    apart = (numbers[:, :, None] - means) ** 2 / (2.0 * means)
    density = (np.exp(-apart) / np.sqrt(2.0 * np.pi * means)).mean(axis=-1)
    return density, np.broadcast_to(WEIGHTS / WEIGHTS.sum() / len(means), density.shape)


def _different(draws: float, density: FloatN, weights: FloatN) -> float:
    """Different numbers that come up in so many draws. [-]"""
    return float((weights * -np.expm1(-draws * density) / density).sum())


def _longest(density: FloatN, weights: FloatN) -> float:
    """Draws in which as many different numbers come up as are remembered; infinite where there are fewer. [-]"""
    most = REMEMBERED / PRODUCTS
    low, high = 0.0, 1e7
    if _different(high, density, weights) <= most:
        return np.inf
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _different(middle, density, weights) <= most else (low, middle)
    return high
