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
POOL, ALIKE = 120.0, 0.021
"""Kernels that products of one way (forward, or for the input's gradient) come to need, whatever their widths, and how
far, as a share of a number of rows, the library's choice stays what it is: the mean distance from one change to the
next. Fitted (maximum likelihood) to which of 960 products took milliseconds more, 187 of them, in
measurements/h200-host-second/products.json: 80 random numbers between 256 and 4096, three models' experts, one after
the other in a process (PyTorch 2.11). So as many are expected in each series as there were within 8 (38, 39, 29, 24,
16, 9, 6, 11, 6, 4, 0, 5). Kernels' names agree (measurements/h200-products/kernels.json: seven models' widths, 250
numbers each, PyTorch 2.11): between 256 and 4096 rows choices change 0.0245 apart in the mean of 34 series (0.014 to
0.039), and both products of a model draw from 133 kernels a way in the mean, 70 to 274 by model. For a weight's
gradient a width took four at most. [-], [-]"""
PRODUCTS = 6
"""Products of an expert's rows: two forward, and two of each behind them. [-]"""
MOST_EXPERTS = 256
"""Experts of all layers that are told apart; of more, as many from the least to the most popular."""
SPREAD = 0.18
"""Standard deviation, over steps, of the popularity of an expert whose router learns, over its mean: beside tokens
that choose one by one. Counts of one configuration at different ones of its first 25 steps (reference_runs/measured,
fitting half) differ by 13 % (mc2-ep2-dsmoe16b-4l-full-skewed, steps 13 and 17), 17 % (mc2-tp2-granite3b-8l-skewed, 13
and 17) and 23 % (mc2-pp2-vpp2-qwen30b-4l-skewed, 13 to 25) in the median, of which tokens one by one would be 2 to 3
%; at the same step by 0.4 and 1.0 % in the first two: it is the step that moves them. A normal difference's median is
0.954 standard deviations of one. [-]"""
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(9)


def unseen_share(means: FloatN, draws: float, spread: float = 0.0) -> float:
    """Share of numbers of tokens that are new to the library, or forgotten. [-]

    Parameters
    ----------
    means
        Mean number of tokens of each expert of each layer of one rank. (n,) [tokens]
    draws
        Numbers that came up before, in all micro-batches so far; infinite in the middle of a long run. [-]
    spread
        As :func:`wandering` has it. [-]

    Notes
    -----
    Tokens choose one by one, so that an expert's number is normal with its mean as its variance, to which ``spread``
    times the mean adds its square; ``p(m)`` is the mean of all experts' densities. A number is unseen with
    ``exp(-T p)``, averaged over the numbers that come up, where ``T`` are the draws so far, but no more than those in
    which as many different numbers come up as are remembered (Che, Tung, Wang 2002, doi:10.1109/JSAC.2002.801752: a
    cache that drops what was used longest ago). Assumes that the mean popularity stays as it is.

    Examples
    --------
    Eight experts of 2048 tokens each are soon remembered; 64 of very different popularity are forgotten:

    >>> even, uneven = np.full(8, 2048.0), np.geomspace(200.0, 20000.0, 64)
    >>> [round(unseen_share(even, n), 2) for n in (0.0, 100.0, 1000.0, np.inf)]
    [1.0, 0.55, 0.04, 0.0]
    >>> round(unseen_share(uneven, np.inf), 2)
    0.73
    """
    _, density, weights = _densities(means, spread)
    remembered = min(draws, _longest(density, weights))
    return float((weights * np.exp(-remembered * density)).sum())


def new_kernels(means: FloatN, draws: float, spread: float = 0.0) -> float:
    """Kernels that the next number of tokens needs and nothing has used before, of its products forward and back. [-]

    Arguments as of :func:`unseen_share`.

    Notes
    -----
    Two products and two input gradients of a number choose a kernel each, from ``POOL`` for each way. Choices change at
    random, each ``ALIKE m`` apart in the mean: a number's is independent of those before it where one lies between it
    and the nearest on either side. With density ``p`` and ``T`` draws before, none came up down to ``d`` below it with
    ``exp(-T p d)``: with ``a = 1 - exp(-1 / (ALIKE m))`` a share ``exp(-T p) (a / (1 - (1 - a) exp(-T p)))^2`` of
    numbers is alone. Of what is chosen independently the share of the pool that is loaded was loaded for another, and
    ``n`` independent choices, the share's integral over the draws, have loaded ``POOL (1 - exp(-n / POOL))``. Assumes
    that all of the pool are chosen alike; late in a run some more are loaded (three behind 1350 numbers, in the 109 new
    ones of both ranks of host-mc2-ep2-olmoe-3l-skewed-traced).

    Examples
    --------
    At first a number needs four; of even experts soon hardly any, as their numbers are alike, of uneven ones later:

    >>> even, uneven = np.full(8, 2048.0), np.geomspace(200.0, 20000.0, 64)
    >>> [round(new_kernels(even, n), 3) for n in (0.0, 64.0, 512.0, np.inf)]
    [4.0, 0.051, 0.005, 0.0]
    >>> [round(new_kernels(uneven, n), 3) for n in (0.0, 64.0, 512.0, np.inf)]
    [4.0, 0.997, 0.033, 0.0]
    """
    if not np.isfinite(draws):
        return 0.0
    numbers, density, weights = _densities(means, spread)
    change = -np.expm1(-1.0 / (ALIKE * numbers))
    unseen = np.exp(-draws * density)
    between = change / (1.0 - (1.0 - change) * unseen)
    alone = float((weights * unseen * between**2).sum())
    before = between * (1.0 - unseen) / density
    loaded = 2.0 * float((weights * before).sum())
    return 4.0 * alone * float(np.exp(-loaded / POOL))


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


def wandering(means: FloatN) -> float:
    """How far experts' popularity moves from step to step, a standard deviation over its mean: no further than theirs
    differ in one step, and not at all where tokens fall at random. [-]

    Examples
    --------
    >>> [round(wandering(np.array(means)), 2) for means in ([1010.0, 990.0], [1050.0, 950.0], [400.0, 1600.0])]
    [0.0, 0.04, 0.18]
    """
    mean = max(float(np.mean(means)), 1.0)
    return min(SPREAD, float(np.sqrt(max(float(np.var(means)) / mean**2 - 1.0 / mean, 0.0))))


def _densities(means: FloatN, spread: float) -> tuple[FloatN, FloatN, FloatN]:
    """Numbers of tokens around each mean, the density of all experts' there, and the weights of these places. (n, 9)"""
    means = np.sort(np.maximum(means, 1.0))
    if len(means) > MOST_EXPERTS:
        means = means[np.linspace(0, len(means) - 1, MOST_EXPERTS).astype(int)]
    variance = means + (spread * means) ** 2
    numbers = means[:, None] + NODES * np.sqrt(variance)[:, None]
    apart = (numbers[:, :, None] - means) ** 2 / (2.0 * variance)
    density = (np.exp(-apart) / np.sqrt(2.0 * np.pi * variance)).mean(axis=-1)
    return np.maximum(numbers, 1.0), density, np.broadcast_to(WEIGHTS / WEIGHTS.sum() / len(means), density.shape)


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
