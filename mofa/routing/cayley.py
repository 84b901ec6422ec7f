"""Cayley graphs on groups of order 2^p: experts as edges between the two GPUs that hold them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

IntA = NDArray[np.int64]
Element = tuple[int, ...]

PUBLISHED: dict[tuple[int, int], tuple[Element, tuple[Element, ...]]] = {
    (8, 8): ((8,), ((1,), (7,))),
    (16, 32): ((4, 4), ((0, 1), (0, 3), (1, 0), (3, 0))),
    (8, 16): ((2, 4), ((0, 1), (0, 3), (1, 1), (1, 3))),
    (8, 4): ((2, 2, 2), ((0, 0, 1),)),  # beside a complete graph: 32 experts on 8 GPUs
}
"""Orders of the factors and the generators by (GPUs, experts): MicroMoE, arXiv 2511.16947, appendix B."""

MAX_TRIALS = 400


def cayley_gpu_pairs_of_experts(num_gpus: int, num_experts: int) -> IntA:
    """The two GPUs of every expert, so that every GPU holds equally many.

    Parameters
    ----------
    num_gpus
        A power of two. [-]
    num_experts
        A multiple of ``num_gpus / 2``. [-]

    Returns
    -------
    IntA
        GPUs, the two of an expert different; every ``num_gpus / 2`` consecutive experts hold all of them.
        (num_experts, 2)

    Notes
    -----
    Every GPU has ``2 * experts / GPUs`` edges. As often as that allows every pair of GPUs shares one (a complete
    graph); what is left is a Cayley graph of an abelian group, whose generators are the paper's where it prints them,
    else those of a bounded search with the smallest second eigenvalue: the fewer edges lie within a subset of the GPUs,
    the less load can be locked in it, and ``(second + (degree - second) * |S| / n) / 2`` bounds the edges within S per
    GPU. All eigenvalues are sums of characters, ``sum_s chi(s)``. Orders of elements are powers of two, so that each
    generator's cycles are even and the edges can be coloured (:func:`edges_by_color`).

    References
    ----------
    MicroMoE, arXiv 2511.16947, section 6 and appendix B. Alon and Chung 1988, "Explicit construction of linear sized
    tolerant networks", lemma 2.3: edges within a subset.

    Examples
    --------
    8 GPUs, 8 experts: a cycle.

    >>> cayley_gpu_pairs_of_experts(8, 8).tolist()[:3]
    [[0, 1], [2, 3], [4, 5]]
    """
    degree = 2 * num_experts // num_gpus
    assert num_gpus > 1 and num_gpus & (num_gpus - 1) == 0 and degree * num_gpus == 2 * num_experts
    num_complete, rest = divmod(degree, num_gpus - 1)
    p = num_gpus.bit_length() - 1
    complete = (2,) * p, tuple(e for e in np.ndindex(*(2,) * p) if any(e))
    graphs = [complete] * num_complete
    if rest:
        graphs.append(PUBLISHED.get((num_gpus, rest * num_gpus // 2)) or _best(num_gpus, rest))
    return np.concatenate([edges for orders, generators in graphs for edges in edges_by_color(orders, generators)])


def edges_by_color(orders: Element, generators: tuple[Element, ...]) -> list[IntA]:
    """A Cayley graph's edges by colour: each colour holds every GPU once, so its experts have one local index.

    An element of order 2 gives one colour, another and its inverse the two that alternate along their even cycles.

    >>> [edges.tolist() for edges in edges_by_color((4,), ((1,), (3,)))]
    [[[0, 1], [2, 3]], [[1, 2], [3, 0]]]
    """
    shape = np.array(orders)
    elements = np.stack(np.unravel_index(np.arange(int(np.prod(shape))), orders), axis=1)
    done: set[Element] = set()
    colours = []
    for s in generators:
        if s in done:
            continue
        inverse = tuple(int(x) for x in -np.array(s) % shape)
        done |= {s, inverse}
        following = np.ravel_multi_index(tuple(((elements + np.array(s)) % shape).T), orders)
        first: list[tuple[int, int]] = []
        second: list[tuple[int, int]] = []
        seen = np.zeros(len(following), dtype=bool)
        for start in range(len(following)):
            place = start
            while not seen[place]:
                middle = int(following[place])
                seen[[place, middle]] = True
                first.append((place, middle))
                place = int(following[middle])
                second.append((middle, place))
        colours.append(np.array(first))
        if inverse != s:
            colours.append(np.array(second))
    return colours


def second_eigenvalue(orders: Element, generators: tuple[Element, ...]) -> float:
    """Largest eigenvalue of a Cayley graph but the trivial one: ``max_chi sum_s chi(s)``.

    >>> round(second_eigenvalue((4, 4), ((0, 1), (0, 3), (1, 0), (3, 0))), 9), second_eigenvalue((2,), ((1,),))
    (2.0, -1.0)
    """
    shape = np.array(orders)
    characters = np.stack(np.unravel_index(np.arange(1, int(np.prod(shape))), orders), axis=1)
    angles = 2 * np.pi * (characters / shape) @ np.array(generators).T
    return float(np.round(np.cos(angles).sum(axis=1), 9).max())


@lru_cache(maxsize=64)
def _best(num_gpus: int, degree: int) -> tuple[Element, tuple[Element, ...]]:
    """Factors and generators with the smallest second eigenvalue that a bounded search finds."""
    best: tuple[float, Element, tuple[Element, ...]] | None = None
    for orders in _factorings(num_gpus.bit_length() - 1):
        for generators in _generating_sets(orders, degree):
            value = second_eigenvalue(orders, generators)
            if best is None or value < best[0]:
                best = value, orders, generators
    assert best is not None
    return best[1], best[2]


def _factorings(p: int) -> Iterator[Element]:
    """Z_n, Z_2 x Z_n/2, Z_4 x Z_n/4 and Z_2^p."""
    orders = [(2**p,), *((2**a, 2 ** (p - a)) for a in range(1, p // 2 + 1)), (2,) * p]
    yield from dict.fromkeys(orders)


def _generating_sets(orders: Element, degree: int) -> Iterator[tuple[Element, ...]]:
    """Sets of ``degree`` elements closed under inverses, without the neutral one; drawn where there are too many."""
    shape = np.array(orders)
    elements = [tuple(int(x) for x in e) for e in np.ndindex(*orders) if any(e)]
    classes = list(dict.fromkeys(tuple(sorted({e, tuple(int(x) for x in -np.array(e) % shape)})) for e in elements))
    rng = np.random.default_rng(0)
    for _ in range(MAX_TRIALS):
        chosen: list[Element] = []
        for i in rng.permutation(len(classes)):
            if len(chosen) + len(classes[i]) <= degree:
                chosen.extend(classes[i])
        if len(chosen) == degree:
            yield tuple(chosen)
