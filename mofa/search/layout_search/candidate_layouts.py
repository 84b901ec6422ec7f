"""A strategy with layouts that are tried for it: what each takes and keeps in closed form."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from mofa.search.layout_search.layer_moves import MOST_TRIED, LayerMoves
from mofa.search.layout_search.problem_from_strategy import (
    split_of_strategy,
    split_problem_without_bytes,
    with_bytes_of_strategy,
)
from mofa.search.layout_search.shortest_split import ShortestSplit, shortest_split
from mofa.search.layout_search.split_problem import ChunkLayers, FloatA, LayerSplitProblem
from mofa.search.to_plan.builder import CandidatePlan, memory_limit_bytes


class CandidateLayouts:
    """The layouts that a search tries of one strategy.

    Parameters
    ----------
    candidate
        The strategy, with the layout to begin with.
    keep_recomputed
        Whether the number of recomputed layers stays.
    """

    def __init__(self, candidate: CandidatePlan, *, keep_recomputed: bool = False) -> None:
        self.candidate = candidate
        self.limit_bytes = memory_limit_bytes(*candidate.job[1:3])
        self._timed = split_problem_without_bytes(
            candidate.estimator, self.limit_bytes, keep_recomputed=keep_recomputed
        )
        self._by_split: dict[ChunkLayers, CandidatePlan] = {}

    @property
    def has_layout_choice(self) -> bool:
        """Whether there is anything to deal out, and an option that says how."""
        return self._timed is not None

    @property
    def timed_split_problem(self) -> LayerSplitProblem:
        """The problem of its split without bytes, where it has a choice."""
        assert self._timed is not None
        return self._timed

    @cached_property
    def split_problem(self) -> LayerSplitProblem:
        """The problem of its split, where it has a choice."""
        return with_bytes_of_strategy(self.timed_split_problem, self.candidate.estimator)

    @cached_property
    def _moves(self) -> LayerMoves:
        """The moves of a layer that its searches know so far."""
        return LayerMoves(self.split_problem)

    @cached_property
    def start_split(self) -> ChunkLayers:
        """The split that the strategy has."""
        return split_of_strategy(self.candidate.estimator)

    @cached_property
    def own_step_s(self) -> float:
        """The step with the layout that it has, in closed form. [s]"""
        return self.step_s_of_split(self.start_split)

    @property
    def least_step_s(self) -> float:
        """An estimate of the least that a layout could make of the step: the pipeline is at its bound, all else as it
        is. [s]"""
        return (
            self.own_step_s
            - self.timed_split_problem.pipeline_step_s(self.start_split)
            + self.timed_split_problem.least_pipeline_step_s
        )

    @property
    def likely_step_s(self) -> float:
        """The step that the best layout likely reaches: with fill and drain of chunks that are all alike. [s]"""
        problem = self.timed_split_problem
        chunks, clock = len(problem.ranks), problem.schedule_clock
        pp = len(problem.bytes_without_layers)
        fill = 0.0 if clock.fills_with_stages else (pp - 1) * pp / (chunks * clock.num_micro_batches)
        return self.least_step_s + fill * problem.least_pipeline_step_s

    def with_layout(self, split: ChunkLayers) -> CandidatePlan:
        """The strategy with another split."""
        if split == self.start_split:
            return self.candidate
        if split not in self._by_split:
            text = split.layout(self.split_problem.num_predictions).text
            self._by_split[split] = self.candidate.with_layout(text, self._recompute_layers(split))
        return self._by_split[split]

    def step_s_of_split(self, split: ChunkLayers) -> float:
        """The step with a split, in closed form. [s]"""
        return float(self.with_layout(split).estimator.exposed_and_hidden_seconds(every_stage=True)[0].sum())

    def excess_bytes_by_rank(self, split: ChunkLayers) -> FloatA:
        """By how much each rank passes its memory, in closed form; negative where it fits. (pp,) [B]"""
        estimator = self.candidate.estimator
        if split != self.start_split:
            text = split.layout(self.split_problem.num_predictions).text
            estimator = estimator.with_layout(text, self._recompute_layers(split))
        return np.array(estimator.stage_device_bytes()) - self.limit_bytes

    def shortest_splits(
        self, work: float, *, also: ChunkLayers | None = None, closes: bool = True, most_tried: int = MOST_TRIED,
        beaten_from_s: float = math.inf, gap_fraction: float = 0.0,
    ) -> ShortestSplit:  # fmt: skip
        """The splits with the shortest pipelines that a solver's work finds.

        Parameters
        ----------
        work
            Limit of the solver's deterministic seconds. [s]
        also
            Another split to begin with.
        closes
            Whether the pipeline's paths are weighed, beside its heaviest rank.
        most_tried
            Chunks that one descent by moves of a layer tries at most. [-]
        beaten_from_s
            Steps from this on are of no use, all else than their pipeline being as it is with the layout that it has.
            [s]
        gap_fraction
            By how much the shortest pipeline may pass its bound where the search ends, as a share of it. [-]

        Returns
        -------
        ShortestSplit
            What fits.
        """
        if math.isfinite(beaten_from_s):
            beaten_from_s += self.timed_split_problem.pipeline_step_s(self.start_split) - self.own_step_s
        return shortest_split(
            self.split_problem,
            self.start_split,
            over_bytes=self.excess_bytes_by_rank,
            work=work,
            also=also,
            closes=closes,
            most_tried=most_tried,
            moves=self._moves,
            beaten_from_s=beaten_from_s,
            gap_fraction=gap_fraction,
        )

    def _recompute_layers(self, split: ChunkLayers) -> int:
        """The number of recomputed layers of the strategy with a split, as its table says it."""
        own = int(self.candidate.job[3].recompute_layers[0])
        return own if own < 0 else split.recomputed
