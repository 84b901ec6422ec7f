"""Which layers each pipeline stage and virtual chunk holds, and how many activations are in flight there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.build import CostedLayerKind, distinct_layer_kinds, kind_of_each_layer
from mofa.cost.layer_split import LayerSplit, layer_split_of
from mofa.schedules import SCHEDULE_NAMES, SCHEDULES, Placement
from mofa.schedules.order import ranks_of_stages, sends_to_other_rank
from mofa.specs.framework import FrameworkSpec
from mofa.specs.model import ModelSpec
from mofa.specs.strategy import RecomputeSpec, StrategyTable
from mofa.specs.workload import WorkloadSpec

ArrayN = NDArray[np.float64]
IntA = NDArray[np.int64]
BoolA = NDArray[np.bool_]


Recomputed = tuple[tuple[tuple[bool, ...], ...], ...]
"""Whether each layer of each chunk of each rank is recomputed whole. (pp, vpp, layers of the chunk)"""


@dataclass(frozen=True)
class Stages:
    """Which layers each pipeline rank holds in each of its chunks, and what a chunk has at its ends.

    ``layer_counts`` (kinds, pp, vpp); ``kinds`` names the first axis; ``layers`` (pp, vpp) lists the layers of each
    chunk by index of kind, in forward order, ``first_layers`` (pp, vpp) the number of the first of them in the model.
    The embedding is on rank 0, the head on ``rank_with_head``: the last one, or rank 0 where chunks are placed in a V.
    Multi-token-prediction layers are on ``rank_with_predictions``, in its last chunk: the head's, unless a layout says
    another.
    """

    kinds: tuple[CostedLayerKind, ...]
    layer_counts: IntA
    layers: tuple[tuple[tuple[int, ...], ...], ...]
    first_layers: tuple[tuple[int, ...], ...]
    placement: Placement
    split: LayerSplit

    @property
    def pp(self) -> int:
        """Ranks of the pipeline."""
        return int(self.layer_counts.shape[1])

    @property
    def vpp(self) -> int:
        """Chunks of each rank."""
        return int(self.layer_counts.shape[2])

    @property
    def num_chunks(self) -> int:
        """Chunks of the model on all ranks. [-]"""
        return self.pp * self.vpp

    @cached_property
    def rank_of_each_chunk(self) -> tuple[int, ...]:
        """The rank of each of the model's chunks, along the model."""
        return ranks_of_stages(self.pp, self.vpp, self.placement)

    @cached_property
    def position_of_each_chunk(self) -> IntA:
        """Where along the model each chunk is; the first chunk of a model has the embedding. (pp, vpp)"""
        out = np.empty((self.pp, self.vpp), dtype=np.int64)
        for position, rank in enumerate(self.rank_of_each_chunk):
            out[rank, position // self.pp] = position
        return out

    @property
    def rank_of_each_layer(self) -> IntA:
        """The rank of each layer of the model. (layers,)"""
        chunks = (
            (rank, self.layers[rank][position // self.pp]) for position, rank in enumerate(self.rank_of_each_chunk)
        )
        return np.array([rank for rank, chunk in chunks for _ in chunk], dtype=np.int64)

    @property
    def rank_with_head(self) -> int:
        """The rank with the model's last chunk, which has the head behind it."""
        return self.rank_of_each_chunk[-1]

    @cached_property
    def ranks_with_embedding(self) -> BoolA:
        """Whether each rank has the embedding. (pp,)"""
        return np.asarray((self.position_of_each_chunk == 0).any(axis=1))

    @cached_property
    def ranks_with_head(self) -> BoolA:
        """Whether each rank has the head. (pp,)"""
        return np.asarray((self.position_of_each_chunk == self.num_chunks - 1).any(axis=1))

    @property
    def rank_with_predictions(self) -> int:
        """The rank with the multi-token-prediction layers; the head's where there are none."""
        return self.rank_of_each_chunk[self.split.layout.prediction_chunk]

    @cached_property
    def ranks_with_predictions(self) -> BoolA:
        """Whether each rank has the multi-token-prediction layers, or would have them. (pp,)"""
        return np.asarray(np.arange(self.pp) == self.rank_with_predictions)

    @cached_property
    def is_last_rank(self) -> BoolA:
        """Whether each rank is the pipeline's last. (pp,)"""
        return np.asarray(np.arange(self.pp) == self.pp - 1)

    @cached_property
    def chunks_that_send(self) -> BoolA:
        """Whether each chunk's output goes to another rank. (pp, vpp)"""
        return np.array(sends_to_other_rank(self.rank_of_each_chunk))[self.position_of_each_chunk]

    @cached_property
    def chunks_that_receive(self) -> BoolA:
        """Whether each chunk's input comes from another rank. (pp, vpp)"""
        return np.array((False, *sends_to_other_rank(self.rank_of_each_chunk)))[self.position_of_each_chunk]

    @cached_property
    def chunks_that_feed_own_rank(self) -> BoolA:
        """Whether each chunk's output goes to another chunk of its rank, where others have chunks too. (pp, vpp)"""
        return np.asarray(~self.chunks_that_send & (self.position_of_each_chunk < self.num_chunks - 1) & (self.pp > 1))

    @cached_property
    def layers_behind_last_of_kind(self) -> ArrayN:
        """Layers of each other kind behind the last layer of a kind in the last chunk. (kinds, kinds, pp)"""
        out = np.zeros((len(self.kinds), len(self.kinds), self.pp))
        for r, chunks in enumerate(self.layers):
            chunk = chunks[-1]
            for kind in set(chunk):
                last = len(chunk) - 1 - chunk[::-1].index(kind)
                for other in chunk[last + 1 :]:
                    out[kind, other, r] += 1
        return out

    def recomputed_layers(self, spec: RecomputeSpec, first: int) -> Recomputed:
        """Which layers are recomputed whole.

        Parameters
        ----------
        spec
            ``full`` recomputes the ``first`` layers of every chunk, Megatron's block method; ``every`` each n-th layer
            of a rank, counted over its chunks, torchtitan's layer-selective mode. Others recompute none whole.
        first
            All layers of a chunk where negative. [-]
        """
        known = self._recomputed
        if (spec, first) not in known:
            known[spec, first] = tuple(_recomputed(chunks, spec, first) for chunks in self.layers)
        return known[spec, first]

    def num_recomputed_layers(self, spec: RecomputeSpec, first: int) -> IntA:
        """Numbers of the layers of :meth:`recomputed_layers`. (kinds, pp, vpp)"""
        known = self._num_recomputed
        if (spec, first) not in known:
            out = known[spec, first] = np.zeros_like(self.layer_counts)
            for r, chunks in enumerate(self.recomputed_layers(spec, first) if spec.kind in ("full", "every") else ()):
                for c, chunk in enumerate(chunks):
                    for kind, is_recomputed in zip(self.layers[r][c], chunk, strict=True):
                        out[kind, r, c] += is_recomputed
        return known[spec, first]

    @cached_property
    def _recomputed(self) -> dict[tuple[RecomputeSpec, int], Recomputed]:
        return {}

    @cached_property
    def _num_recomputed(self) -> dict[tuple[RecomputeSpec, int], IntA]:
        return {}

    @property
    def most_layers_of_chunk(self) -> int:
        """Layers of the chunk that has most."""
        return int(self.layer_counts.sum(axis=0).max())


def _recomputed(chunks: tuple[tuple[int, ...], ...], spec: RecomputeSpec, first: int) -> tuple[tuple[bool, ...], ...]:
    """Of the layers of a rank's chunks those that are recomputed whole."""
    if spec.kind == "full":
        return tuple(tuple(first < 0 or j < first for j in range(len(chunk))) for chunk in chunks)
    if spec.kind != "every":
        return tuple((False,) * len(chunk) for chunk in chunks)
    number = count(1)
    return tuple(tuple(next(number) % (spec.layers or 1) == 0 for _ in chunk) for chunk in chunks)


@lru_cache(maxsize=512)
def split_layers(
    model: ModelSpec, pp: int, vpp: int, framework: str, placement: Placement = "loop", splits: str = "even",
    layout: str = "",
) -> Stages:  # fmt: skip
    """Split a model's layers over stages and chunks as the strategy's layout says, else as the framework does.

    Raises
    ------
    ValueError
        If the framework refuses the layout, or there are too few layers for the chunks.
    """
    split = layer_split_of(model, pp, vpp, framework, splits, layout)
    kinds = distinct_layer_kinds(model)
    index = {kind: i for i, kind in enumerate(kinds)}
    number_of_layer = [index[kind] for kind in kind_of_each_layer(model)]
    counts = np.zeros((len(kinds), pp, vpp), dtype=np.int64)
    layers: list[list[tuple[int, ...]]] = [[] for _ in range(pp)]
    first_layers: list[list[int]] = [[] for _ in range(pp)]
    start = 0
    for rank, size in zip(ranks_of_stages(pp, vpp, placement), split.layout.layers_by_chunk, strict=True):
        chunk = tuple(number_of_layer[start : start + size])
        for kind in chunk:
            counts[kind, rank, len(layers[rank])] += 1
        layers[rank].append(chunk)
        first_layers[rank].append(start)
        start += size
    return Stages(kinds, counts, tuple(map(tuple, layers)), tuple(map(tuple, first_layers)), placement, split)


def stages_of_row(workload: WorkloadSpec, framework: FrameworkSpec, table: StrategyTable, row: int) -> Stages:
    """The stages of a row of a table: which layers each pipeline rank has, and where."""
    schedule = SCHEDULES[SCHEDULE_NAMES[int(table.schedule[row])]]
    return split_layers(
        workload.model, int(table.pp[row]), int(table.vpp[row]), framework.name, schedule.placement,
        framework.splits_layers, table.layout_text_of_row(row),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _in_flight(pp: int, vpp: int, schedule: str, num_micro_batches: int) -> ArrayN:
    return np.array(SCHEDULES[schedule].in_flight(pp, vpp, num_micro_batches), dtype=float)


def in_flight_at_first_backward(pp: int, vpp: int, schedule: str, num_micro_batches: int) -> ArrayN:
    """Micro-batches whose activations each chunk of each stage holds when the first backward begins. (pp, vpp)

    GPipe holds all; 1F1B ``min(m, pp - r)``; interleaved 1F1B runs ``2 (pp - r - 1) + (vpp - 1) pp`` chunk forwards
    before its first backward and one with it (Narayanan et al. 2021, arXiv 2104.04473, section 2.2); where pp does not
    divide m, PyTorch's rounds take the place of pp (:func:`mofa.schedules.interleaved.micro_batches_per_round`).

    Examples
    --------
    >>> in_flight_at_first_backward(4, 1, "1f1b", 8)[:, 0]
    array([4., 3., 2., 1.])
    >>> in_flight_at_first_backward(2, 2, "interleaved", 8).sum(axis=1)
    array([5., 3.])
    """
    return _in_flight(
        pp, vpp, schedule, int(micro_batches_for_full_flight(pp, schedule, np.array([num_micro_batches]))[0])
    )


def micro_batches_for_full_flight(pp: int, schedule: str, num_micro_batches: IntA) -> IntA:
    """Micro-batches with which as many are in flight, but for those that GPipe holds: four rounds of equal length. (n,)

    Examples
    --------
    >>> micro_batches_for_full_flight(4, "interleaved", np.array([7, 10, 64]))
    array([ 7, 10, 16])
    """
    if SCHEDULES[schedule].forwards_first:
        return num_micro_batches
    count = np.maximum(num_micro_batches // pp, 1)
    return np.where(count > 4, 4 * (num_micro_batches // count), num_micro_batches)
