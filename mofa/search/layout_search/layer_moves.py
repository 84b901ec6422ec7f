"""Moves of one layer from chunk to chunk: a descent to a split that none of them makes shorter."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from mofa.search.layout_search.split_problem import ALL, ChunkLayers, LayerSplitProblem, SplitTable

MOST_TRIED = 2_000_000
"""Chunks of the splits that one local search tries: a second. Pipelines of up to 64 chunks end long before. [-]"""

MOST_MOVED_CHUNKS = 256
"""Layers of longer pipelines are not moved: of 256 chunks one go of all moves is 16 million, eight times
:data:`MOST_TRIED`, and of 1,000 chunks a thousand million. [-]"""


class _BestMove(NamedTuple):
    """Splits that fit one move behind another split: how many, and the first of those with the shortest step. [s]"""

    num_fitting: int
    split: ChunkLayers
    step_s: float


class LayerMoves:
    """Moves of one layer between the splits of a problem; the best one of a split is remembered.

    Descents from many splits come by the same ones.
    """

    def __init__(self, problem: LayerSplitProblem) -> None:
        self.problem = problem
        self._best: dict[ChunkLayers, _BestMove] = {}

    def improved_split_and_num_tried(self, split: ChunkLayers, most_tried: int = MOST_TRIED) -> tuple[ChunkLayers, int]:
        """The split that moves of one layer lead to, each the one after which the step is shortest.

        Those that do not fit by memory that is linear in layers are not tried. It ends early where it has tried
        ``most_tried`` chunks, those of remembered splits counted: what it returns does not depend on what is known.

        Returns
        -------
        tuple
            The split, and how many chunks of splits were tried. Of a pipeline that is too long for it
            (:data:`MOST_MOVED_CHUNKS`) that is as many as its moves have.
        """
        problem = self.problem
        if problem.num_chunks > MOST_MOVED_CHUNKS:
            return split, problem.num_chunks**2 * (problem.num_chunks - 1)
        step_s = problem.pipeline_step_s(split) if len(problem.splits_that_fit([split])) else math.inf
        tried = 0
        while True:
            best = self._best.get(split) or self._find_best(split, most_tried - tried)
            tried += best.num_fitting * problem.num_chunks
            if not best.num_fitting or tried > most_tried or best.step_s >= step_s * (1.0 - 1e-9):
                return split, tried
            split, step_s = best.split, best.step_s

    def _find_best(self, split: ChunkLayers, most_tried: int) -> _BestMove:
        """Find and remember it; splits of more chunks than that are counted and not timed."""
        moved = self.problem.splits_that_fit(neighbouring_splits(self.problem, split))
        if len(moved) * self.problem.num_chunks > most_tried:
            return _BestMove(len(moved), split, math.inf)
        best = _BestMove(0, split, math.inf)
        if len(moved):
            steps_s = self.problem.pipeline_steps_s(moved)
            row = int(np.argmin(steps_s))
            best = _BestMove(len(moved), moved.split_of_row(row), float(steps_s[row]))
        self._best[split] = best
        return best


def neighbouring_splits(problem: LayerSplitProblem, split: ChunkLayers) -> SplitTable:
    """Splits with one layer on another chunk, predictions on another chunk, or one more or fewer recomputed layer."""
    layers, least = np.array(split.layers, dtype=np.int64), np.array(problem.least_layers, dtype=np.int64)
    filled = np.flatnonzero(layers)
    last, sources = int(filled[-1]), filled[layers[filled] != least[filled]]
    source, target = (each.ravel() for each in np.meshgrid(sources, np.arange(problem.num_chunks), indexing="ij"))
    source, target = source[source != target], target[source != target]
    moved, rows = np.repeat(layers[None], len(source), axis=0), np.arange(len(source))
    moved[rows, source] -= 1
    moved[rows, target] += 1
    chunk = np.full(len(source), split.prediction_chunk)
    if problem.num_predictions:
        last_without_source = int(filled[-2]) if len(filled) > 1 else 0
        last_filled = np.where((source == last) & (layers[source] == 1), last_without_source, last)
        chunk = np.maximum(np.maximum(chunk, last_filled), target)
    others = []
    if problem.num_predictions:
        chunks = range(max(last, problem.first_prediction_chunk), problem.num_chunks)
        others += [(p, split.recomputed) for p in chunks if p != split.prediction_chunk]
    if split.recomputed != ALL:
        numbers = (split.recomputed - 1, split.recomputed + 1)
        others += [
            (split.prediction_chunk, n) for n in numbers if problem.least_recomputed <= n <= problem.most_recomputed
        ]
    other = np.array(others, dtype=np.int64).reshape(-1, 2)
    return SplitTable(
        np.concatenate([moved, np.repeat(layers[None], len(other), axis=0)]),
        np.concatenate([chunk, other[:, 0]]),
        np.concatenate([np.full(len(source), split.recomputed), other[:, 1]]),
    )
