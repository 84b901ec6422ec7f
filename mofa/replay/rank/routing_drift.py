"""Later steps, whose routers send other tokens: the same programs in other sizes.

A block that is a little larger than any before it finds no hole, and a segment more is taken, until there are holes for
all that comes up. Two steps of equal tokens never show it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mofa.cost.allocations.allocation_trace import Life
from mofa.replay.allocator.pools import MIN_BLOCK, SMALL_SIZE
from mofa.replay.rank.program import Bound, Script

FloatA = NDArray[np.float64]

MOST_STEPS = 12
"""Steps that a run is played for at most, with the two of equal tokens. [-]"""
MOST_PASSES = 400
"""Forwards and backwards of layers in all of them; where steps are too long for one more, none is. [-]"""


@dataclass(frozen=True)
class Routers:
    """What the routers of a rank's layers send it, step by step.

    Parameters
    ----------
    shares
        Share of a layer's token copies that each expert of each rank gets. (L, ep, experts of a rank) [-]
    rank
        Which of the ranks this is.
    copies
        Token copies that the group sends in a layer and micro-batch. [tokens]
    spread
        How far popularity moves from step to step (:func:`mofa.cost.kernels.kernel_selection.wandering`). [-]
    chosen
        Experts of a token. [-]
    steps
        Steps of the run that is played. [-]
    """

    shares: FloatA
    rank: int
    copies: float
    spread: float
    chosen: int
    steps: int

    def step(self, rng: np.random.Generator) -> FloatA:
        """Popularity of all experts in one more step. (L, ep, experts of a rank) [-]"""
        moved = np.maximum(self.shares * (1.0 + self.spread * rng.standard_normal(self.shares.shape)), 0.0)
        return np.asarray(moved / np.maximum(moved.sum(axis=(1, 2), keepdims=True), 1e-12))

    def tokens(self, popularity: FloatA, rng: np.random.Generator) -> FloatA:
        """What the experts of this rank get in one layer of one micro-batch. (experts of a rank,) [tokens]

        Tokens choose one by one, but no expert twice: hypergeometric about the mean, as a normal number.

        Parameters
        ----------
        popularity
            Of one layer's experts. (ep, experts of a rank) [-]
        """
        others = (popularity.size - self.chosen) / max(popularity.size - 1, 1)
        scatter = np.sqrt(popularity * np.maximum(1.0 - popularity, 0.0) * self.copies * others)
        counts = np.maximum(popularity * self.copies + scatter * rng.standard_normal(popularity.shape), 0.0)
        rounded = np.round(counts * (self.copies / max(counts.sum(), 1e-12)))
        return np.asarray(rounded[self.rank])


@dataclass(frozen=True)
class Moving:
    """A layer whose tokens move: its lives with ``held`` of the mean rows and with one mean more, all experts alike."""

    held: float
    some: Life
    more: Life
    place: int
    """Among the layers with experts."""


@dataclass(frozen=True)
class Wander:
    """The layers of a rank that move, by chunk and piece, and how far."""

    routers: Routers
    moving: tuple[tuple[Moving | None, ...], ...]

    def steps(self, computations: int) -> int:
        """How many steps are played so, of so many computations."""
        pieces = max(sum(map(len, self.moving)) / len(self.moving), 1.0)
        most = int(MOST_PASSES // max(computations * pieces, 1.0))
        return min(self.routers.steps, MOST_STEPS, most)


class Drawn:
    """The scripts of a step whose tokens are drawn."""

    def __init__(self, wander: Wander, script: Callable[[Life], Script], plain: list[list[Script]]) -> None:
        self.wander, self.plain = wander, plain
        self.rng = np.random.default_rng(0)
        self.popularity = wander.routers.shares
        self.known: dict[tuple[int, int], list[Script]] = {}
        self.sizes: dict[tuple[int, int], _Sizes] = {}
        self.script = script

    def step(self) -> None:
        """One more step begins."""
        self.popularity = self.wander.routers.step(self.rng)
        self.known = {}

    def scripts(self, c: int, i: int) -> list[Script]:
        """Those of a chunk's pieces in a micro-batch."""
        if (c, i) not in self.known:
            pieces = zip(self.wander.moving[c], self.plain[c], strict=True)
            self.known[c, i] = [code if moving is None else self._drawn(moving) for moving, code in pieces]
        return self.known[c, i]

    def _drawn(self, moving: Moving) -> Script:
        return self.of_tokens(moving, self.wander.routers.tokens(self.popularity[moving.place], self.rng))

    def of_tokens(self, moving: Moving, tokens: FloatA) -> Script:
        """A layer's whose experts get so many. (experts of a rank,) [tokens]"""
        routers = self.wander.routers
        rows = tokens.sum() * routers.shares.shape[1] / routers.copies
        key = id(moving.some), id(moving.more)
        if key not in self.sizes:
            self.sizes[key] = _Sizes(self.script(moving.some), self.script(moving.more))
        return self.sizes[key].script(rows - moving.held, tokens / max(tokens.mean(), 1e-12))


class _Sizes:
    """Two scripts that differ in sizes alone, and any between them."""

    def __init__(self, some: Script, more: Script) -> None:
        self.code = some
        self.forward, self.backward = _Stretch(some.forward, more.forward), _Stretch(some.backward, more.backward)

    def script(self, way: float, of_experts: FloatA) -> Script:
        """So far on the way from the one to the other; experts' rows over their mean. [-], (experts of a rank,) [-]"""
        return replace(
            self.code, forward=self.forward.bound(way, of_experts), backward=self.backward.bound(way, of_experts)
        )


class _Stretch:
    def __init__(self, some: Bound, more: Bound) -> None:
        self.acts = some
        both = enumerate(zip(some, more, strict=True))
        self.at = [n for n, (a, b) in both if b[3] and (a[3] != b[3] or a[0].expert >= 0)]
        self.some = np.array([some[n][3] for n in self.at], dtype=float)
        self.rise = np.array([more[n][3] for n in self.at], dtype=float) - self.some
        self.expert = np.array([some[n][0].expert for n in self.at], dtype=int)

    def bound(self, way: float, of_experts: FloatA) -> Bound:
        share = np.where(self.expert >= 0, of_experts[np.maximum(self.expert, 0)], 1.0)
        wanted = (self.some + way * self.rise) * share
        sizes = np.maximum(np.ceil(wanted / MIN_BLOCK - 1e-3), 1.0).astype(int) * MIN_BLOCK
        out = list(self.acts)
        for n, size in zip(self.at, sizes.tolist(), strict=True):
            act, kind, slot, _, pool = out[n]
            out[n] = act, kind, slot, size, pool >> 1 << 1 | (size <= SMALL_SIZE)
        return tuple(out)
