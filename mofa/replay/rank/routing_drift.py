"""Later steps, whose routers send other tokens: the same programs in other sizes.

A block that is a little larger than any before it finds no hole, and a segment more is taken, until there are holes for
all that comes up. Two steps of equal tokens never show it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mofa.cost.allocations.block_trace import BlockTrace
from mofa.replay.allocator.pools import MIN_BLOCK, SMALL_SIZE
from mofa.replay.rank.program import BlockProgram, Packed

FloatA = NDArray[np.float64]

MOST_STEPS = 12
"""Steps that a run is played for at most, with the two of equal tokens. [-]"""
MOST_PASSES = 400
"""Forwards and backwards of layers in all of them; where steps are too long for one more, none is. [-]"""


@dataclass(frozen=True)
class DriftingRouters:
    """What the routers of a rank's layers send it, step by step.

    Parameters
    ----------
    shares
        Share of a layer's token copies that each expert of each rank gets. (L, ep, experts of a rank) [-]
    rank
        Which of the ranks this is.
    token_copies
        Token copies that the group sends in a layer and micro-batch. [tokens]
    popularity_spread
        How far popularity moves from step to step (:func:`mofa.cost.kernels.kernel_selection.expert_popularity_drift`).
        [-]
    top_k
        Experts of a token. [-]
    num_steps
        Steps of the run that is played. [-]
    """

    shares: FloatA
    rank: int
    token_copies: float
    popularity_spread: float
    top_k: int
    num_steps: int

    def next_popularity(self, rng: np.random.Generator) -> FloatA:
        """Popularity of all experts in one more step. (L, ep, experts of a rank) [-]"""
        moved = np.maximum(self.shares * (1.0 + self.popularity_spread * rng.standard_normal(self.shares.shape)), 0.0)
        return np.asarray(moved / np.maximum(moved.sum(axis=(1, 2), keepdims=True), 1e-12))

    def draw_tokens(self, popularity: FloatA, rng: np.random.Generator) -> FloatA:
        """What the experts of this rank get in one layer of one micro-batch. (experts of a rank,) [tokens]

        Tokens choose one by one, but no expert twice: hypergeometric about the mean, as a normal number.

        Parameters
        ----------
        popularity
            Of one layer's experts. (ep, experts of a rank) [-]
        """
        others = (popularity.size - self.top_k) / max(popularity.size - 1, 1)
        scatter = np.sqrt(popularity * np.maximum(1.0 - popularity, 0.0) * self.token_copies * others)
        counts = np.maximum(popularity * self.token_copies + scatter * rng.standard_normal(popularity.shape), 0.0)
        rounded = np.round(counts * (self.token_copies / max(counts.sum(), 1e-12)))
        return np.asarray(rounded[self.rank])


@dataclass(frozen=True)
class DriftingLayerTraces:
    """A layer whose tokens move: its traces with ``rows_over_mean`` of the mean rows and with one mean more.

    All its experts get alike many.
    """

    rows_over_mean: float
    trace: BlockTrace
    trace_with_more_rows: BlockTrace
    moe_layer_index: int
    """Among the layers with experts."""
    filled_up_to: int = 1
    """Rows of an expert are filled up to a multiple of this. [tokens]"""


@dataclass(frozen=True)
class RoutingDrift:
    """The layers of a rank whose tokens change from step to step, by chunk and block."""

    routers: DriftingRouters
    layers: tuple[tuple[DriftingLayerTraces | None, ...], ...]

    def num_drift_steps(self, computations: int) -> int:
        """How many steps are played so, of so many computations."""
        pieces = max(sum(map(len, self.layers)) / len(self.layers), 1.0)
        most = int(MOST_PASSES // max(computations * pieces, 1.0))
        return min(self.routers.num_steps, MOST_STEPS, most)


class StepProgramsOfDrawnTokens:
    """The programs of a step whose tokens are drawn."""

    def __init__(
        self, drift: RoutingDrift, program: Callable[[BlockTrace], BlockProgram], plain: list[list[BlockProgram]]
    ) -> None:
        self.drift, self.plain = drift, plain
        self.rng = np.random.default_rng(0)
        self.popularity = drift.routers.shares
        self.known: dict[tuple[int, int], list[BlockProgram]] = {}
        self.sizes: dict[tuple[int, int], _Sizes] = {}
        self.program = program

    def begin_step(self) -> None:
        """Begin a step, with popularity of its own."""
        self.popularity = self.drift.routers.next_popularity(self.rng)
        self.known = {}

    def block_programs_of_chunk(self, chunk: int, micro_batch: int) -> list[BlockProgram]:
        """The programs of a chunk's blocks in a micro-batch."""
        if (chunk, micro_batch) not in self.known:
            pieces = zip(self.drift.layers[chunk], self.plain[chunk], strict=True)
            self.known[chunk, micro_batch] = [
                code if moving is None else self._drawn(moving) for moving, code in pieces
            ]
        return self.known[chunk, micro_batch]

    def _drawn(self, moving: DriftingLayerTraces) -> BlockProgram:
        return self.program_of_tokens(
            moving, self.drift.routers.draw_tokens(self.popularity[moving.moe_layer_index], self.rng)
        )

    def program_of_tokens(self, moving: DriftingLayerTraces, tokens: FloatA) -> BlockProgram:
        """The program of a layer whose experts get these tokens. (experts of a rank,) [tokens]"""
        routers = self.drift.routers
        rows = tokens.sum() * routers.shares.shape[1] / routers.token_copies
        key = id(moving.trace), id(moving.trace_with_more_rows)
        if key not in self.sizes:
            self.sizes[key] = _Sizes(
                self.program(moving.trace), self.program(moving.trace_with_more_rows), moving.rows_over_mean
            )
        return self.sizes[key].program(
            rows - moving.rows_over_mean, tokens / max(tokens.mean(), 1e-12),
            padding_over_expected_padding(tokens, moving.filled_up_to),
        )  # fmt: skip


def padding_over_expected_padding(tokens: FloatA, filled_up_to: int) -> float:
    """Rows that fill experts up to whole pieces, over what is expected: half a piece less a half for each. [-]

    Examples
    --------
    >>> [padding_over_expected_padding(np.array([16.0, 17.0]), filled_up_to) for filled_up_to in (16, 1)]
    [1.0, 1.0]
    """
    if filled_up_to <= 1:
        return 1.0
    return float((-tokens % filled_up_to).mean() / ((filled_up_to - 1) / 2.0))


class _Sizes:
    """Programs between two that differ in sizes alone."""

    def __init__(self, some: BlockProgram, more: BlockProgram, rows_over_mean: float) -> None:
        self.code = some
        self.forward, self.backward = (
            _SizesBetween(some.forward, more.forward, rows_over_mean),
            _SizesBetween(some.backward, more.backward, rows_over_mean),
        )

    def program(self, fraction: float, of_experts: FloatA, filled_over_mean: float) -> BlockProgram:
        """So far on the way from the one to the other; experts' rows over their mean, and what fills them up.
        [-], (experts of a rank,) [-], [-]"""
        return replace(
            self.code,
            forward=self.forward.bound(fraction, of_experts, filled_over_mean),
            backward=self.backward.bound(fraction, of_experts, filled_over_mean),
        )


class _SizesBetween:
    def __init__(self, some: Packed, more: Packed, rows_over_mean: float) -> None:
        self.smaller = some
        both = enumerate(zip(some, more, strict=True))
        self.resized = [n for n, (a, b) in both if b[3] and (a[3] != b[3] or a[0].expert >= 0)]
        self.some = np.array([some[n][3] for n in self.resized], dtype=float)
        self.rise = np.array([more[n][3] for n in self.resized], dtype=float) - self.some
        self.expert = np.array([some[n][0].expert for n in self.resized], dtype=int)
        # what does not grow with the tokens: rows that fill experts up, in the mean
        self.filled = np.maximum(self.some - rows_over_mean * self.rise, 0.0)

    def bound(self, fraction: float, of_experts: FloatA, filled_over_mean: float) -> Packed:
        share = np.where(self.expert >= 0, of_experts[np.maximum(self.expert, 0)], 1.0)
        wanted = (self.some + fraction * self.rise + (filled_over_mean - 1.0) * self.filled) * share
        sizes = np.maximum(np.ceil(wanted / MIN_BLOCK - 1e-3), 1.0).astype(int) * MIN_BLOCK
        out = list(self.smaller)
        for n, size in zip(self.resized, sizes.tolist(), strict=True):
            instruction, kind, slot, _, pool = out[n]
            out[n] = instruction, kind, slot, size, pool >> 1 << 1 | (size <= SMALL_SIZE)
        return tuple(out)
