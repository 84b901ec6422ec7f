"""How often the library of matrix products meets a shape that it does not remember, and chooses a kernel anew; and how
often that is one that no product has used yet, which the driver then loads.

Experts whose products are kernels of their own, one after the other or on several streams, multiply as many rows as
they got tokens, a number that changes with every micro-batch. Each new number takes a choice for each product of it,
forward and back; those of other experts and layers are of the same weights' shape and serve as well. PyTorch's product
asks the library each time, and so does Transformer Engine's (2.20, common/gemm/cublaslt_gemm.cu: ``cublas_gemm`` calls
cublasLtMatmulAlgoGetHeuristic); in fp8 the numbers are padded to a multiple, so that there are fewer of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mofa.specs.gpu_facts import KernelSelectionFacts
from mofa.specs.shared_facts import load_shared_facts

FloatN = NDArray[np.float64]

REMEMBERED = 8192
"""Shapes that cuBLAS remembers unless told otherwise, dropping about those that were used longest ago (NVIDIA, cuBLAS
documentation, cublasLt, "Heuristics Cache"). [-]"""
PRODUCTS = 6
"""Products of an expert's rows: two forward, and two of each behind them. [-]"""
MOST_EXPERTS = 256
"""Experts of all layers that are told apart; of more, as many from the least to the most popular."""
Places = tuple[FloatN, FloatN, FloatN]
NUM_NODES = 9
"""Numbers of tokens that stand for a normal distribution of them. [-]"""


def heuristic_cache_miss_rate(
    means: FloatN, draws: float, spread: float = 0.0, places: Places | None = None, multiple: float = 1.0
) -> float:
    """Share of numbers of tokens that are new to the library, or forgotten. [-]

    Parameters
    ----------
    means
        Mean number of tokens of each expert of each layer of one rank. (n,) [tokens]
    draws
        Numbers that came up before, in all micro-batches so far; infinite in the middle of a long run. [-]
    spread
        As :func:`expert_popularity_drift` has it. [-]
    places
        :func:`token_count_densities` of all of these, where they are known.
    multiple
        That numbers are padded to. [tokens]

    Notes
    -----
    Tokens choose one by one, so that an expert's number is normal with its mean as its variance, to which ``spread``
    times the mean adds its square; ``p(m)`` is the mean of all experts' densities. A number is unseen with
    ``exp(-T p)``, averaged over the numbers that come up, where ``T`` are the draws so far, but no more than those in
    which as many different numbers come up as are remembered (Che, Tung, Wang 2002, doi:10.1109/JSAC.2002.801752: a
    cache that drops what was used longest ago). Assumes that the mean popularity stays as it is.

    Examples
    --------
    Eight experts of 2048 tokens each are soon remembered; 64 of very different popularity are forgotten, but not where
    numbers are padded to 16:

    >>> even, uneven = np.full(8, 2048.0), np.geomspace(200.0, 20000.0, 64)
    >>> [round(heuristic_cache_miss_rate(even, n), 2) for n in (0.0, 100.0, 1000.0, np.inf)]
    [1.0, 0.55, 0.04, 0.0]
    >>> [round(heuristic_cache_miss_rate(uneven, np.inf, multiple=m), 2) for m in (1.0, 16.0)]
    [0.73, 0.0]
    """
    _, density, weights = token_count_densities(means, spread, multiple) if places is None else places
    remembered = min(draws, _longest(density, weights))
    return float((weights * np.exp(-remembered * density)).sum())


def expected_first_use_kernels(
    means: FloatN, draws: float, ways: Sequence[Sequence[float]], selection: KernelSelectionFacts, spread: float = 0.0,
    places: Places | None = None, multiple: float = 1.0,
) -> float:  # fmt: skip
    """Kernels that the next number of tokens needs and nothing has used before, of its products forward and back. [-]

    Parameters
    ----------
    means, draws, spread, places, multiple
        As of :func:`heuristic_cache_miss_rate`.
    ways
        Width of the output of each of an expert's products, by way: forward, and for the inputs' gradients. [-]
    selection
        How the library chooses, of the GPU.

    Notes
    -----
    Each product's choices change at random, ``a m`` apart in the mean, ``a`` the less of ``unchanged_share`` and
    ``c``. Those of a number are independent of those before it where one lies between it and the nearest on either
    side. With density ``p`` and ``T`` draws before, none came up down to ``d`` below it with ``exp(-T p d)``: with
    ``b = 1 - exp(-1 / (a m))`` a share ``exp(-T p) (b / (1 - (1 - b) exp(-T p)))^2`` of numbers is alone. Among the
    stretches around it, a share ``T p a m / (1 + T p a m)`` had a number before. Of those within reach, ``2 (c - a)
    / a`` in all, ``c`` says how many have its kernel; of those far from it, of either product of its way,
    ``far_share`` does. Each takes away from the kernels that are new as if independent. Assumes that all kernels of
    a place are chosen alike. Against the kernels that are named, for the experts of seven models and numbers around
    400, 1,500 and 4,000, from the fifth step on 0.6 to 1.5 times as many, 0.96 of all. Of what nothing was read
    off: the four series of measurements/h200-products/products.json have 18, 22, 22 and 21 where there were 19, 20,
    21 and 25, the first four of measurements/h200-host-second/products.json 91 in all where there were 130 (narrow
    experts between 256 and 2048). Nine ranks' traced steps with uneven experts (mc1-phimoe-2l-full-skewed-traced
    and the fitting half's others) have one load where 4.4 are expected, 6 by one pool for all widths.

    Examples
    --------
    At first a number needs four; of even experts soon hardly any, as their numbers are alike, of uneven ones later;
    wide experts, whose products are many waves, need fewer:

    >>> even, uneven = np.full(8, 2048.0), np.geomspace(200.0, 20000.0, 64)
    >>> from mofa.cost.kernels.toy_gpu import toy_gpu
    >>> chosen = toy_gpu().curves.kernel_selection
    >>> narrow, wide = ((1536, 2048), (2048, 768)), ((28672, 4096), (4096, 14336))
    >>> [round(expected_first_use_kernels(even, n, narrow, chosen), 3) for n in (0.0, 64.0, 512.0, np.inf)]
    [4.0, 0.031, 0.003, 0.0]
    >>> draws = (0.0, 64.0, 512.0)
    >>> [[round(expected_first_use_kernels(uneven, n, w, chosen), 3) for n in draws] for w in (narrow, wide)]
    [[4.0, 0.863, 0.027], [4.0, 0.571, 0.017]]
    """
    if not np.isfinite(draws):
        return 0.0
    numbers, density, weights = token_count_densities(means, spread, multiple) if places is None else places
    unseen = np.exp(-draws * density)
    num_new = 0.0
    for products in ways:
        waves = numbers * np.array(products)[:, None, None] / selection.wave_outputs.value
        alike = selection.alike_share.value * waves**-selection.alike_exponent.value
        unchanged = np.minimum(selection.unchanged_share.value, alike)
        different = unchanged * numbers / multiple
        change = -np.expm1(-1.0 / different)
        between = change / (1.0 - (1.0 - change) * unseen)
        reached = draws * density * different
        near = reached / (1.0 + reached) * 2.0 * (alike - unchanged) / unchanged
        within = _within(waves, weights * between * (1.0 - unseen) / density, selection.far_reach.value)
        far = within * selection.far_share.value * np.log2(1.0 + waves)
        num_new += float((weights * unseen * between**2 * np.exp(-near - far)).sum())
    return num_new


def expected_poisson_max(mean: float, ranks: int) -> float:
    """Expected maximum of ``ranks`` independent Poisson counts of mean ``mean``. [-]

    Ranks that load fewer kernels in a layer's pass wait for the one that loads most.

    Examples
    --------
    Two ranks' larger count exceeds one's by more than half where they are few:

    >>> [round(expected_poisson_max(mean, ranks), 2) for mean, ranks in ((1.0, 1), (1.0, 2), (0.1, 2), (16.0, 2))]
    [1.0, 1.52, 0.19, 18.25]
    """
    counts = np.arange(int(mean + 10.0 * np.sqrt(mean)) + 20)
    logs = counts * np.log(max(mean, 1e-12)) - mean - np.cumsum(np.log(np.maximum(counts, 1)))
    return float((1.0 - np.minimum(np.cumsum(np.exp(logs)), 1.0) ** ranks).sum())


def expert_popularity_drift(means: FloatN) -> float:
    """How far experts' popularity moves from step to step, a standard deviation over its mean: no further than theirs
    differ in one step, and not at all where tokens fall at random. [-]

    Examples
    --------
    >>> all_means = ([1010.0, 990.0], [1050.0, 950.0], [400.0, 1600.0])
    >>> [round(expert_popularity_drift(np.array(means)), 2) for means in all_means]
    [0.0, 0.04, 0.18]
    """
    mean = max(float(np.mean(means)), 1.0)
    seen = float(np.sqrt(max(float(np.var(means)) / mean**2 - 1.0 / mean, 0.0)))
    return min(load_shared_facts().routing.popularity_spread.value, seen)


@lru_cache(maxsize=1)
def _quadrature() -> tuple[FloatN, FloatN]:
    """Gauss-Hermite nodes and weights of a standard normal distribution; made when asked for, as NumPy loads its
    polynomials for them. (9,) each [-]"""
    nodes, weights = np.polynomial.hermite_e.hermegauss(NUM_NODES)
    return nodes, weights


def token_count_densities(means: FloatN, spread: float, multiple: float = 1.0) -> Places:
    """Token counts around each mean, the probability of each over all experts, and integration weights. (n, 9) each

    Counts are padded to ``multiple``.
    """
    means = np.sort(np.maximum(means, 1.0))
    if len(means) > MOST_EXPERTS:
        means = means[np.linspace(0, len(means) - 1, MOST_EXPERTS).astype(int)]
    variance = means + (spread * means) ** 2
    nodes, weights = _quadrature()
    numbers = means[:, None] + nodes * np.sqrt(variance)[:, None]
    squared_distance = (numbers[:, :, None] - means) ** 2 / (2.0 * variance)
    same = np.minimum(multiple / np.sqrt(2.0 * np.pi * variance), 1.0)
    density = (np.exp(-squared_distance) * same).mean(axis=-1)
    return np.maximum(numbers, 1.0), density, np.broadcast_to(weights / weights.sum() / len(means), density.shape)


def _within(waves: FloatN, weights: FloatN, reach: float) -> FloatN:
    """Weight of what is within a factor of each, up or down. (...)"""
    order = np.argsort(waves, axis=None)
    ordered, below = waves.flat[order], np.concatenate([[0.0], np.cumsum(weights.flat[order])])
    return np.asarray(below[np.searchsorted(ordered, reach * waves)] - below[np.searchsorted(ordered, waves / reach)])


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
