"""What dealing out a model's layers to virtual chunks is about: what layers and ends take and keep on each chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress, groupby
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mofa.cost.step_time.longest_paths import ComputationPath
from mofa.specs.layouts.pipeline_layout import PipelineLayout

FloatA = NDArray[np.float64]
IntA = NDArray[np.int64]
ALL = -1
"""Number of recomputed layers of a chunk that stands for all of them. [-]"""
MOST_CELLS = 2**22
"""Of a table of splits' layers by chunk and kind: what is counted at a time, in some 200 MiB. [-]"""


class ScheduleTimer(Protocol):
    """What times a schedule: its steps by durations of computations, and the paths that set them."""

    num_micro_batches: int
    num_computations: int
    """Kinds of computations that a micro-batch goes through, the first ones of all kinds. [-]"""
    hop_s: float
    slowdown: float
    fills_with_stages: bool
    """Whether a rank begins behind all that the ranks ahead of it have of the first micro-batch."""

    def steps_s(self, seconds: FloatA) -> FloatA:
        """From the first computation to the last, given what each takes. (n, kinds, pp, vpp) -> (n,) [s]"""

    def candidate_longest_paths(self, seconds: FloatA) -> list[ComputationPath]:
        """Paths of which one takes as long as the step with these durations. (kinds, pp, vpp) [s]"""

    def paths_along_ranks(self) -> list[ComputationPath]:
        """Paths along each rank, which most splits' longest ones are like."""


@dataclass(frozen=True)
class ChunkLayers:
    """Layers of each chunk along the model, the chunk with the multi-token-prediction layers, recomputed layers.

    ``recomputed`` first layers of every chunk are recomputed whole; all of them where it is :data:`ALL`.
    """

    layers: tuple[int, ...]
    prediction_chunk: int
    recomputed: int = 0

    def layout(self, num_predictions: int) -> PipelineLayout:
        """The layout of it.

        Examples
        --------
        >>> ChunkLayers((2, 1, 0), 1).layout(1).text
        'Ett|tm|L'
        """
        chunks = ["t" * layers for layers in self.layers]
        chunks[self.prediction_chunk] += "m" * num_predictions
        chunks[0], chunks[-1] = "E" + chunks[0], chunks[-1] + "L"
        return PipelineLayout.of_chunks(chunks)


@dataclass(frozen=True)
class SplitTable:
    """Many splits of one model, a row each: as :class:`ChunkLayers` has one. (n, P), (n,), (n,)"""

    layers: IntA
    prediction_chunk: IntA
    recomputed: IntA
    layer_counts: IntA | None = None
    """As :meth:`LayerSplitProblem.layer_counts` says, where they are known. (n, P, K, 2)"""

    @classmethod
    def of_splits(cls, splits: Sequence[ChunkLayers]) -> SplitTable:
        """The table of some splits, in their order."""
        return cls(
            np.array([split.layers for split in splits], dtype=np.int64),
            np.array([split.prediction_chunk for split in splits], dtype=np.int64),
            np.array([split.recomputed for split in splits], dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.prediction_chunk)

    def select_rows(self, rows: IntA | slice | NDArray[np.bool_]) -> SplitTable:
        """The table of some of its rows."""
        counts = None if self.layer_counts is None else self.layer_counts[rows]
        return SplitTable(self.layers[rows], self.prediction_chunk[rows], self.recomputed[rows], counts)

    def split_of_row(self, row: int) -> ChunkLayers:
        """The split of one row."""
        return ChunkLayers(tuple(self.layers[row].tolist()), int(self.prediction_chunk[row]), int(self.recomputed[row]))


Splits = Sequence[ChunkLayers] | SplitTable


def _table_of(splits: Splits) -> SplitTable:
    return splits if isinstance(splits, SplitTable) else SplitTable.of_splits(splits)


@dataclass(frozen=True)
class LayerSplitProblem:
    """Layers in model order, which contiguous parts of are dealt out to P virtual chunks of pp ranks.

    A quantity of a chunk is ``chunk + sum over its layers + predictions``: of each kind of computation, and of memory.

    Parameters
    ----------
    kinds
        Kind of each layer along the model, out of K. (L,)
    ranks
        Rank of each chunk along the model. (P,)
    chunk_s, layer_s, prediction_s
        Of one micro-batch by kind of computation: a chunk without its layers, with the embedding or the head where they
        are; a layer that is recomputed whole (last) or not; all multi-token-prediction layers. (C, P), (C, P, K, 2),
        (C, P) [s]
    bytes_without_layers, layer_bytes, prediction_bytes
        A rank without its layers; a layer with its micro-batches in flight; predictions. (pp,), (P, K, 2), (P,) [B]
    limit_bytes
        What a rank may hold. [B]
    num_predictions
        Multi-token-prediction layers, which are together behind the last layer. [-]
    first_prediction_chunk
        The first chunk in which predictions may be.
    least_layers
        Layers that each chunk must have at least. (P,) [-]
    least_recomputed, most_recomputed
        How many first layers of every chunk may be recomputed whole; both :data:`ALL` where all are. [-]
    schedule_clock
        The clock of its schedule.
    """

    kinds: tuple[int, ...]
    ranks: tuple[int, ...]
    chunk_s: FloatA
    layer_s: FloatA
    prediction_s: FloatA
    bytes_without_layers: FloatA
    layer_bytes: FloatA
    prediction_bytes: FloatA
    limit_bytes: float
    num_predictions: int
    first_prediction_chunk: int
    least_layers: tuple[int, ...]
    least_recomputed: int
    most_recomputed: int
    schedule_clock: ScheduleTimer

    @property
    def num_layers(self) -> int:
        """Layers to deal out."""
        return len(self.kinds)

    @property
    def num_chunks(self) -> int:
        """Chunks along the model that layers are dealt out to."""
        return len(self.ranks)

    @property
    def num_layer_kinds(self) -> int:
        """Kinds of layers that differ in time or memory."""
        return int(self.layer_s.shape[2])

    @cached_property
    def kind_prefix_counts(self) -> IntA:
        """Layers of each kind ahead of each layer, and of all of them. (K, L + 1)"""
        kinds = np.array(self.kinds, dtype=np.int64)
        of_kind = kinds == np.arange(self.num_layer_kinds)[:, None]
        return np.concatenate([np.zeros((self.num_layer_kinds, 1), dtype=np.int64), np.cumsum(of_kind, axis=1)], axis=1)

    @cached_property
    def most_frequent_kind(self) -> int:
        """The kind that most layers are of."""
        return int(np.argmax(self.kind_prefix_counts[:, -1]))

    def consecutive_layers_of_kind(self, kind: int) -> list[tuple[int, int]]:
        """First layer and number of layers of each run of a kind along the model."""
        out, start = [], 0
        for of, run in groupby(self.kinds):
            length = len(list(run))
            out += [(start, length)] if of == kind else []
            start += length
        return out

    @cached_property
    def chunk_places(self) -> tuple[IntA, IntA]:
        """Rank of each chunk, and which of its rank's chunks it is. (P,) each"""
        seen: dict[int, int] = {}
        number = []
        for rank in self.ranks:
            number.append(seen.get(rank, 0))
            seen[rank] = number[-1] + 1
        return np.array(self.ranks, dtype=np.int64), np.array(number, dtype=np.int64)

    def layer_counts(self, splits: Splits) -> IntA:
        """Layers of each kind on each chunk, not recomputed whole and recomputed whole. (n, P, K, 2)"""
        table = _table_of(splits)
        if table.layer_counts is not None:
            return table.layer_counts
        ends = np.zeros((len(table), self.num_chunks + 1), dtype=np.int64)
        np.cumsum(table.layers, axis=1, out=ends[:, 1:])
        start, end = ends[:, :-1], ends[:, 1:]
        recomputed = table.recomputed[:, None]
        until = np.where(recomputed == ALL, end, np.minimum(start + recomputed, end))
        at_start, at_until, at_end = (self.kind_prefix_counts.T[place] for place in (start, until, end))
        return np.stack([at_end - at_until, at_until - at_start], axis=3)

    def computation_seconds(self, splits: Splits) -> FloatA:
        """What each kind of computation of a micro-batch takes on each chunk of each rank. (n, C, pp, vpp) [s]"""
        table = _table_of(splits)
        of_chunks = self.chunk_s + np.einsum("cpkm,npkm->ncp", self.layer_s, self.layer_counts(table))
        which, chunk = np.arange(len(table)), table.prediction_chunk
        of_chunks[which, :, chunk] += self.prediction_s[:, chunk].T
        rank, number = self.chunk_places
        out = np.zeros((*of_chunks.shape[:2], len(self.bytes_without_layers), int(number.max()) + 1))
        out[:, :, rank, number] = of_chunks
        return out

    def pipeline_steps_s(self, splits: Splits) -> FloatA:
        """The pipeline's computations and hand-overs. (n,) [s]"""
        steps_s: FloatA = self.schedule_clock.steps_s(self.computation_seconds(splits))
        return steps_s

    def pipeline_step_s(self, split: ChunkLayers) -> float:
        """The pipeline's time of one split. [s]"""
        return float(self.pipeline_steps_s([split])[0])

    def bytes_by_rank(self, splits: Splits) -> FloatA:
        """Memory of each rank. (n, pp) [B]"""
        table = _table_of(splits)
        of_chunks = np.einsum("pkm,npkm->np", self.layer_bytes, self.layer_counts(table))
        chunk = table.prediction_chunk
        of_chunks[np.arange(len(table)), chunk] += self.prediction_bytes[chunk]
        return np.asarray(self.bytes_without_layers + of_chunks @ self._is_on_rank)

    @cached_property
    def _is_on_rank(self) -> FloatA:
        """1 where a chunk is on a rank. (P, pp)"""
        return np.asarray(self.chunk_places[0][:, None] == np.arange(len(self.bytes_without_layers)), dtype=float)

    def chunks_of_rank(self, rank: int) -> list[int]:
        """The chunks of a rank."""
        return [p for p, of in enumerate(self.ranks) if of == rank]

    def heaviest_rank_micro_batch_s(self, split: ChunkLayers) -> float:
        """Forward and backward of one micro-batch on the heaviest rank. [s]"""
        return float(
            self.computation_seconds([split])[0, : self.schedule_clock.num_computations].sum(axis=(0, 2)).max()
        )

    @cached_property
    def least_pipeline_step_s(self) -> float:
        """A lower bound of the pipeline's time under any split. [s]

        Notes
        -----
        With m micro-batches and W what one takes on all pp ranks, some rank takes W / pp or more of each:
        ``m W / pp``. In 1F1B rank r begins behind a forward of each rank ahead of it, and ends ahead of a backward:
        the step is at least ``m T_r + sum of T_q over the ranks q ahead``. The mean of these with weights
        ``(1 - 1/m)^(pp - 1 - r)`` has every T as often, so that ``W / (1 - (1 - 1/m)^pp)`` is a bound.
        """
        clock, pp = self.schedule_clock, len(self.bytes_without_layers)
        layer_s, chunk_s, prediction_s = (
            np.minimum(of[: clock.num_computations].sum(axis=0), of[clock.num_computations :].sum(axis=0))
            if len(of) > clock.num_computations
            else of.sum(axis=0)
            for of in (self.layer_s, self.chunk_s, self.prediction_s)
        )
        modes = slice(0, 1) if self.most_recomputed == 0 else slice(1 if self.most_recomputed == ALL else 0, 2)
        of_kinds = layer_s[:, :, modes].min(axis=(0, 2)) @ self.kind_prefix_counts[:, -1]
        besides = chunk_s.sum() + prediction_s[self.first_prediction_chunk :].min()
        number = clock.num_micro_batches
        share = (1.0 - (1.0 - 1.0 / number) ** pp) if clock.fills_with_stages else pp / number
        return float(of_kinds + besides) / share

    def splits_that_fit(self, splits: Splits) -> SplitTable:
        """Splits in which every rank holds something, and its memory, linear in its layers, is within the limit."""
        table, some = _table_of(splits), max(MOST_CELLS // (2 * self.num_layer_kinds * self.num_chunks), 1)
        if len(table) <= some:
            table = replace(table, layer_counts=self.layer_counts(table))
            return table.select_rows(self._fit(table))
        parts = [self._fit(table.select_rows(slice(i, i + some))) for i in range(0, len(table), some)]
        return table.select_rows(np.concatenate(parts))

    def _fit(self, table: SplitTable) -> NDArray[np.bool_]:
        """Whether each split does. (n,)"""
        return np.asarray(self._fill_ranks(table) & np.all(self.bytes_by_rank(table) <= self.limit_bytes, axis=1))

    def _fill_ranks(self, table: SplitTable) -> NDArray[np.bool_]:
        """Whether every rank holds a layer, predictions or an end of the model. (n,)"""
        modules = table.layers @ self._is_on_rank
        modules[:, [self.ranks[0], self.ranks[-1]]] += 1.0
        ranks = np.array(self.ranks)[table.prediction_chunk]
        modules[np.arange(len(table)), ranks] += self.num_predictions
        return np.asarray(np.all(modules > 0, axis=1))

    def has_embedding_or_head(self, rank: int) -> bool:
        """Whether a rank has the embedding or the head."""
        return rank in (self.ranks[0], self.ranks[-1])

    def even_split(self) -> ChunkLayers:
        """As many layers on each chunk as on others, or one more on the first ones."""
        base, more = divmod(self.num_layers - sum(self.least_layers), self.num_chunks)
        layers = tuple(least + base + (p < more) for p, least in enumerate(self.least_layers))
        return ChunkLayers(layers, self.num_chunks - 1, self.most_recomputed)

    def all_splits(self) -> list[ChunkLayers]:
        """All splits in which every rank holds something, to check a search on small problems."""
        out = []
        for layers in _compositions(self.num_layers, self.least_layers):
            last = max((p for p, number in enumerate(layers) if number), default=0)
            first = max(last, self.first_prediction_chunk) if self.num_predictions else self.num_chunks - 1
            numbers = range(self.least_recomputed, self.most_recomputed + 1)
            out += [ChunkLayers(layers, p, n) for p in range(first, self.num_chunks) for n in numbers]
        return list(compress(out, self._fill_ranks(SplitTable.of_splits(out)).tolist()))


def _compositions(total: int, least: Sequence[int]) -> list[tuple[int, ...]]:
    """All ways to write a number as a sum of as many in order, none below its least.

    >>> _compositions(2, (1, 0))
    [(1, 1), (2, 0)]
    """
    if len(least) == 1:
        return [(total,)] if total >= least[0] else []
    most = total - sum(least[1:])
    return [(n, *rest) for n in range(least[0], most + 1) for rest in _compositions(total - n, least[1:])]
