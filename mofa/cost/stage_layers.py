"""Layers of the candidates of one pp x vpp on the pipeline stages that differ, and micro-batches in flight there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mofa.cost.block.block_cost import recomputes_layers_whole, unique_rows
from mofa.cost.stages import Stages, in_flight_at_first_backward, micro_batches_for_full_flight
from mofa.schedules import SCHEDULES
from mofa.specs.strategy import StrategyTable

ArrayN = NDArray[np.float64]
BoolR = NDArray[np.bool_]
IntN = NDArray[np.int64]


@dataclass(frozen=True)
class DistinctStages:
    """Stages that stand for all that are alike: the same layers, the same ends, no more micro-batches in flight.

    The first stage of each kind is shown, so that what is largest over the shown stages is largest over all, and what
    is first among equals is too. R of pp stages are shown.
    """

    shown_stages: NDArray[np.intp]
    """The stages that are shown, in order. (R,)"""
    shown_index: NDArray[np.intp]
    """Which of them each stage is like. (pp,)"""

    @classmethod
    def all_stages(cls, pp: int) -> DistinctStages:
        """All stages, each for itself."""
        return cls(np.arange(pp), np.arange(pp))

    @classmethod
    def one_of_each_kind(cls, stages: Stages, full: ArrayN, flight: ArrayN) -> DistinctStages:
        """The first of each kind of stage.

        Parameters
        ----------
        full
            Layers that are recomputed whole under each choice of recomputation. (choices, kinds, pp, vpp)
        flight
            Micro-batches in flight under each number of them. (numbers, pp, vpp)
        """
        ends = stages.ranks_with_embedding, stages.ranks_with_head, stages.ranks_with_predictions, stages.is_last_rank
        first: dict[object, int] = {}
        stage: list[int] = []
        of = np.zeros(stages.pp, dtype=np.intp)
        for r in range(stages.pp):
            key = stages.layers[r], full[:, :, r].tobytes(), *(bool(end[r]) for end in ends)
            place = first.get(key)
            if place is None or np.any(flight[:, stage[place]] < flight[:, r]):
                place = first[key] = len(stage)
                stage.append(r)
            of[r] = place
        return cls(np.array(stage), of)

    @cached_property
    def num_equal_stages(self) -> ArrayN:
        """Stages that each stands for. (R,)"""
        return np.bincount(self.shown_index).astype(float)

    @cached_property
    def num_equal_stages_ahead(self) -> ArrayN:
        """Stages like each shown one (first axis) that are ahead of each shown one. (R, R)"""
        of_each = self.shown_index == np.arange(len(self.shown_stages))[:, None]
        return np.take(np.cumsum(of_each, axis=1) - of_each, self.shown_stages, axis=1).astype(float)


@dataclass(frozen=True)
class StageLayers:
    """Layer counts of the candidates of one pp x vpp on the stages that are shown: (n, kinds, R) unless said."""

    stages: Stages
    shown: DistinctStages
    base_mode: ArrayN
    """Layers that run in the base mode."""
    fully_recomputed: ArrayN
    """Layers that are recomputed whole."""
    base_mode_in_flight: ArrayN
    fully_recomputed_in_flight: ArrayN
    last_in_flight: ArrayN
    """Micro-batches of the last chunk in flight. (n, R)"""
    layers_behind: ArrayN
    """As :attr:`mofa.cost.stages.Stages.layers_behind_last_of_kind`. (kinds, kinds, R)"""
    fully_recomputed_by_chunk: ArrayN
    """Layers that are recomputed whole under each choice of recomputation. (choices, kinds, R, vpp)"""
    recompute_choice: NDArray[np.intp]
    """Each candidate's choice. (n,)"""
    any_base_mode: bool
    any_fully_recomputed: bool
    """Whether any candidate has layers of either sort."""

    @property
    def layer_counts(self) -> ArrayN:
        """Layers, recomputed whole or not."""
        return self.base_mode + self.fully_recomputed

    @property
    def head_stage_index(self) -> int:
        """The stage with the head, among those that are shown."""
        return int(self.shown.shown_index[self.stages.rank_with_head])

    @property
    def prediction_stage_index(self) -> int:
        """The stage with the multi-token-prediction layers, among those that are shown."""
        return int(self.shown.shown_index[self.stages.rank_with_predictions])

    @property
    def stages_with_embedding(self) -> BoolR:
        """Whether each stage has the embedding. (R,)"""
        return self.stages.ranks_with_embedding[self.shown.shown_stages]

    @property
    def stages_with_head(self) -> BoolR:
        """Whether each stage has the head. (R,)"""
        return self.stages.ranks_with_head[self.shown.shown_stages]

    @property
    def stages_with_predictions(self) -> BoolR:
        """Whether each stage has the multi-token-prediction layers, where there are any. (R,)"""
        return self.stages.ranks_with_predictions[self.shown.shown_stages]

    @property
    def is_last_stage(self) -> BoolR:
        """Whether each stage is the last. (R,)"""
        return self.stages.is_last_rank[self.shown.shown_stages]

    @property
    def chunks_that_receive(self) -> BoolR:
        """Whether each chunk's input comes from another rank. (R, vpp)"""
        return self.stages.chunks_that_receive[self.shown.shown_stages]

    @property
    def chunks_that_send(self) -> BoolR:
        """Whether each chunk's output goes to another rank. (R, vpp)"""
        return self.stages.chunks_that_send[self.shown.shown_stages]

    @property
    def chunks_that_feed_own_rank(self) -> BoolR:
        """Whether each chunk's output goes to another chunk of its rank. (R, vpp)"""
        return self.stages.chunks_that_feed_own_rank[self.shown.shown_stages]


def count_stage_layers(
    table: StrategyTable, stages: Stages, schedule: str, num_micro_batches: IntN, *, every_stage: bool = True
) -> StageLayers:  # fmt: skip
    """Gather the layer counts of each candidate: which layers it recomputes, how many micro-batches are in flight."""
    pp, vpp = stages.pp, stages.vpp
    has_full = np.array([recomputes_layers_whole(spec) for spec in table.recompute_modes])[table.recompute]
    first, which = unique_rows([np.where(has_full, table.recompute, -1), table.recompute_layers])
    full = np.zeros((len(first), *stages.layer_counts.shape))
    for u, layers in enumerate(table.recompute_layers[first]):
        spec = table.recompute_modes[int(table.recompute[first[u]])]
        full[u] = stages.num_recomputed_layers(spec, int(layers))
    cap = micro_batches_for_full_flight(pp, schedule, num_micro_batches)
    batches, batch_of = unique_rows([cap])
    flight = np.stack([in_flight_at_first_backward(pp, vpp, schedule, int(b)) for b in cap[batches]])
    if every_stage or SCHEDULES[schedule].defers_weight_gradients:  # what is put off may be more
        shown = DistinctStages.all_stages(pp)
    else:
        shown = DistinctStages.one_of_each_kind(stages, full, flight)
    full, flight = full[:, :, shown.shown_stages], flight[:, shown.shown_stages]
    plain = stages.layer_counts[:, shown.shown_stages] - full
    plain_fl = np.einsum("ukrc,brc->ubkr", plain, flight)
    full_fl = np.einsum("ukrc,brc->ubkr", full, flight)
    return StageLayers(
        stages, shown, _given(plain.sum(axis=3), which), _given(full.sum(axis=3), which),
        plain_fl[which, batch_of], full_fl[which, batch_of], flight[:, :, -1][batch_of],
        stages.layers_behind_last_of_kind[:, :, shown.shown_stages], full, which, bool(plain.any()), bool(full.any()),
    )  # fmt: skip


def _given(of_choice: ArrayN, which: NDArray[np.intp]) -> ArrayN:
    """What each candidate's choice says; one choice is not copied. (choices, ...) -> (n, ...)"""
    if len(of_choice) == 1:
        return np.broadcast_to(of_choice, (len(which), *of_choice.shape[1:]))
    return of_choice[which]
