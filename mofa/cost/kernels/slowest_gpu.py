"""How much longer the slowest of a job's GPUs takes than a typical one: the others wait for it wherever they meet.

A rank meets the others in a layer (tp, cp, ep), at hand-overs (pp), and once a step at the reduction and the norm. What
makes a GPU slow for a whole step is waited for once, whichever of these comes first: the largest of all GPUs counts.
Three things do: chips differ, a node may be slow, and a GPU's own pace differs from step to step. Clocks that swing
within a step average out where ranks meet once, and are waited for in every layer where they meet there
(:meth:`mofa.cost.block.durations.OpTimingMachine.slowdown_by_clock_swings`).
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, hypot
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.elementwise import FloatK, maximum
from mofa.blocks.op import COMPUTING_FAMILIES, Op
from mofa.blocks.work import PRODUCTS, MemoryBound
from mofa.specs.fitted import expected_max_normal
from mofa.specs.hardware import ClusterSpec

FloatArray = NDArray[np.float64]
POINTS = 2001
"""Points of a quadrature, of which 4001 change the expectation by less than 1e-6. [-]"""
ALIKE = 1e-9
"""Deviation below which chips count as alike beside slow nodes. [-]"""
TAIL = 8.0
"""Standard deviations beyond which nothing is drawn: of a million GPUs one in 10^9 jobs. [-]"""


class PaceSpread(NamedTuple):
    """How unequal the paces of a cluster's GPUs are.

    ``chips`` is the standard deviation of the time of power-limited kernels over GPUs and steps, ``slow_share`` the
    share of slow nodes, ``slowdown`` how much longer all kernels take on one, ``per_node`` the GPUs of a node. [-]
    """

    chips: float
    slow_share: float
    slowdown: float
    per_node: int

    @classmethod
    def from_cluster(cls, cluster: ClusterSpec) -> PaceSpread:
        """That of a cluster's profile; nothing where the profile has none."""
        curves, slow = cluster.gpu.curves, cluster.node.slow_nodes
        chips, jitter = (0.0 if fact is None else fact.value for fact in (curves.chip_spread, curves.step_jitter))
        share, slowdown = (0.0, 0.0) if slow is None else (slow.share.value, slow.slowdown.value)
        return cls(hypot(chips, jitter), share, slowdown, cluster.node.gpus_per_node)


class PaceFactors(NamedTuple):
    """How much longer kernels take than on a typical GPU: those that the power limit slows down, and others. [-]"""

    products: float
    others: float


class StragglerFractions(NamedTuple):
    """Of a tape's products, and of its memory-bound kernels, what a typical GPU waits for the slowest. (K,) each [-]"""

    of_products: FloatK
    of_others: FloatK

    def of_op(self, op: Op) -> FloatK:
        """That of an op; nothing but computing counts. (K,) [-]"""
        if op.stream != "compute" or op.family not in COMPUTING_FAMILIES:
            return 0.0
        if type(op.work) in PRODUCTS:
            return self.of_products
        return self.of_others if type(op.work) is MemoryBound else 0.0


@lru_cache(maxsize=4096)
def expected_slowest(spread: PaceSpread, num_gpus: int) -> PaceFactors:
    """Expected pace of the slowest of ``num_gpus`` GPUs, over that of a typical one. [-]

    Parameters
    ----------
    spread
        How they differ.
    num_gpus
        GPUs that meet in a step; whole nodes, or a part of one.

    Notes
    -----
    Chips alone: ``1 + chips * E[max of n standard normals]``, by Blom. Slow nodes are drawn by themselves, so that the
    slowest kernel of a node of ``g`` GPUs is below x with ``(1 - p) Phi(x / chips)^g + p Phi((x - d) / chips)^g``, that
    of N nodes with this to the N. The expectation is the integral of ``1 - F`` less that of F below zero; what slow
    nodes add to it is added to Blom's. Other kernels take longer on slow nodes alone: ``1 + d (1 - (1 - p)^N)``.

    Assumes that a slow node is slow in all steps of a job, and GPUs draw independently. A chip's and a step's normal
    deviations add in squares.

    References
    ----------
    David and Nagaraja 2003, "Order Statistics"; Blom 1958, "Statistical Estimates and Transformed Beta-Variables".

    Examples
    --------
    Chips that differ by 1 %: the slowest of 8 is 1.4 % behind. One node in ten a tenth slower, 10 nodes: 65 % have one.

    >>> expected_slowest(PaceSpread(0.01, 0.0, 0.0, 8), 8).products.__round__(4)
    1.0143
    >>> expected_slowest(PaceSpread(0.0, 0.1, 0.1, 8), 80).others.__round__(4)
    1.0651
    """
    chips, share, slowdown, per_node = spread
    products = 1.0 + chips * expected_max_normal(num_gpus) if chips else 1.0
    if not share or not slowdown:
        return PaceFactors(products, 1.0)
    nodes = ceil(num_gpus / per_node)
    others = slowdown * (1.0 - (1.0 - share) ** nodes)
    if chips < ALIKE:
        return PaceFactors(1.0 + others, 1.0 + others)
    of_node = min(num_gpus, per_node)
    deviations = np.linspace(-TAIL * chips, slowdown + TAIL * chips, POINTS)
    alike = _normal_cdf(deviations / chips) ** of_node
    slow = _normal_cdf((deviations - slowdown) / chips) ** of_node
    below = ((1.0 - share) * alike + share * slow) ** nodes
    step = float(deviations[1] - deviations[0])
    more = float((alike**nodes - below).sum()) * step  # E[max] of one less that of the other
    return PaceFactors(products + more, 1.0 + others)


def expected_slowest_of_gpu_counts(spread: PaceSpread, numbers: NDArray[np.int64]) -> tuple[FloatArray, FloatArray]:
    """Pace of the slowest of each number of GPUs, by :func:`expected_slowest`: products and others. (K,) each [-]

    Examples
    --------
    >>> expected_slowest_of_gpu_counts(PaceSpread(0.01, 0.0, 0.0, 8), np.array([1, 8]))[0].round(4)
    array([1.    , 1.0143])
    """
    unique, of = np.unique(numbers, return_inverse=True)
    factors = np.array([expected_slowest(spread, number) for number in unique.tolist()])[of]
    return factors[:, 0], factors[:, 1]


def waiting_fraction(factor: FloatK) -> FloatK:
    """Of kernels that take ``factor`` times as long as on a typical GPU, what a typical one waits. (K,) or of all [-]

    Nothing where they are faster.

    Examples
    --------
    >>> waiting_fraction(2.0)
    0.5
    """
    return maximum(1.0 - 1.0 / factor, 0.0)


def _normal_cdf(deviations: FloatArray) -> FloatArray:
    normal = NormalDist()
    return np.array([normal.cdf(x) for x in deviations.tolist()])
