"""One costed strategy played out: the memory of every pipeline rank, and the clock of its step."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

from mofa.cost.estimate import TableEstimator
from mofa.replay.allocator.pools import ReservedLimitPassed
from mofa.replay.memory.rank_memory import RankMemoryReplay, ReplayedRankMemory, play_memory, ranks_that_may_be_fullest
from mofa.replay.memory.shared_recordings import SharedRecordings
from mofa.replay.rank.description import Rank
from mofa.replay.rank.from_estimator import (
    describer_of_rank,
    describers_of_fullest_and_emptiest,
    outside_allocator_bytes,
    tokens_over_mean_by_rank,
)
from mofa.replay.rank.uneven_layers import rows_over_mean_by_layer
from mofa.replay.time.step import replay_step_time
from mofa.replay.time.time_replayed import ReplayedTime, scaled_to_runs_per_step, weighted_mean_of_steps
from mofa.specs.residuals import load_residuals
from mofa.specs.shared_facts import load_shared_facts


def mean_step_of_run(estimator: TableEstimator, played: ReplayedTime) -> ReplayedTime:
    """What a played step takes in the mean of all: in some, kernels that are loaded take the host's lead, and some run
    again. Its spans, transfers and ops are those of the one that was played."""
    if share := float(estimator.drains[0]):
        played = weighted_mean_of_steps(
            played, replay_step_time(estimator.without_host_lead, detail=False, spans=False), share
        )
    return scaled_to_runs_per_step(played, float(estimator.runs_per_step(estimator.table)[0]))


class PeaksAtRoutingLoad(NamedTuple):
    """What a rank whose experts get so many tokens over the mean allocates and reserves at most. [-], [B]"""

    tokens_over_mean: float
    allocated: float
    reserved: float


class Replayer:
    """A strategy whose ranks are played when they are asked for.

    Ranks of a pipeline stage are alike but for routing and for the parts of Megatron's distributed optimizer. Where the
    tokens of each layer are known, the most and the least loaded one are played, else one whose layers all have what
    memory must hold; of the parts the first and the last, which hold the head and the embedding; in long steps only the
    fuller one where that is plain (:func:`mofa.replay.memory.rank_memory.ranks_that_may_be_fullest`) and fits by more
    than ends differ.

    Parameters
    ----------
    estimator
        Of one strategy, its table having one row.
    """

    def __init__(self, estimator: TableEstimator) -> None:
        self.estimator = estimator
        self.context_bytes, self.communicator_bytes = outside_allocator_bytes(estimator)
        self.num_ranks = int(estimator.table.pp[0])
        self._played: dict[int, ReplayedRankMemory] = {}
        self._recordings = SharedRecordings()
        self._others: dict[int, tuple[bool, Rank, ReplayedRankMemory]] = {}
        """Of pipeline ranks whether the one that reserves most has the fewest tokens, and the other end of routing."""
        self._ends: dict[int, tuple[PeaksAtRoutingLoad, PeaksAtRoutingLoad] | None] = {}

    @cached_property
    def _makers(self) -> tuple[tuple[Callable[[int], Rank], ...], tuple[Callable[[int], Rank], ...]]:
        """Of the ends of what a distributed optimizer cuts, and of the one with the fewest tokens."""
        uneven = int(self.estimator.table.ep[0]) > 1 and rows_over_mean_by_layer(self.estimator) is not None
        ends, emptiest = describers_of_fullest_and_emptiest(self.estimator)
        return ends, (emptiest,) if uneven else ()

    def rank_memory(self, pipeline_rank: int) -> ReplayedRankMemory:
        """The memory of a pipeline rank; of its ranks the one that reserves most."""
        if pipeline_rank not in self._played:
            self._played[pipeline_rank] = self._fullest_of_stage(pipeline_rank)
        return self._played[pipeline_rank]

    def _fullest_of_stage(self, pipeline_rank: int, limit: float = math.inf) -> ReplayedRankMemory:
        """As :meth:`rank`; raises :class:`ReservedLimitPassed` as soon as one of the ranks reserves more than a limit.
        [B]"""
        capacity_bytes = self.allocator_capacity_bytes(pipeline_rank)
        expandable = self.estimator.framework.allocator == "expandable"
        ends, emptiest = (tuple(make(pipeline_rank) for make in makers) for makers in self._makers)
        known = self._recordings
        fullest = ranks_that_may_be_fullest(
            ends, capacity_bytes=int(capacity_bytes), expandable=expandable, recordings=known
        )
        ranks = *fullest, *emptiest

        def playing(rank: Rank) -> RankMemoryReplay:
            return RankMemoryReplay(
                rank,
                capacity_bytes=int(capacity_bytes),
                expandable=expandable,
                recordings=known,
                limit=limit,
            )

        def reserves(index: int) -> tuple[int, int]:
            return every[index].peak_reserved, every[index].allocated

        # steps with other tokens are played of the one that reserves most without them
        tried = [playing(rank) for rank in ranks]
        every = [rank.memory_played_so_far() for rank in tried]
        if self._may_not_fit(max(rank.peak_reserved for rank in every), capacity_bytes):
            left = [playing(rank) for rank in ends if all(rank is not other for other in fullest)]
            tried += left
            every += [rank.memory_played_so_far() for rank in left]
        most = max(range(len(every)), key=reserves)
        if emptiest:
            few = len(fullest)
            other = max((n for n in range(len(every)) if n != few), key=reserves) if most == few else few
            self._others[pipeline_rank] = most == few, tried[other].rank, every[other]
        return every[most] if tried[most].rank.routing_drift is None else tried[most].play_drawn_steps()

    def peaks_of_fewest_and_most_tokens(
        self, pipeline_rank: int
    ) -> tuple[PeaksAtRoutingLoad, PeaksAtRoutingLoad] | None:
        """What the ranks of a pipeline rank with the fewest and with the most tokens hold; None where all have as many.

        Where each layer's tokens are known both are played of those, else of the quantiles of a distribution.
        """
        if pipeline_rank not in self._ends:
            self._ends[pipeline_rank] = (
                self._by_layer(pipeline_rank) if self._makers[1] else self._by_quantile(pipeline_rank)
            )
        return self._ends[pipeline_rank]

    def tokens_over_mean_by_rank(self, pipeline_rank: int) -> tuple[float, ...]:
        """As :func:`mofa.replay.rank.from_estimator.tokens_over_mean_by_rank`, of a pipeline rank."""
        return tokens_over_mean_by_rank(self.estimator, pipeline_rank)

    def _by_layer(self, pipeline_rank: int) -> tuple[PeaksAtRoutingLoad, PeaksAtRoutingLoad] | None:
        tokens = self.tokens_over_mean_by_rank(pipeline_rank)
        if not tokens or max(tokens) == min(tokens):
            return None
        own = self.rank_memory(pipeline_rank)
        own_is_emptiest, rank, other = self._others[pipeline_rank]
        if rank.routing_drift is not None:  # of what was compared, later steps were played of one alone
            other = self._play(rank, pipeline_rank)
        few, many = (own, other) if own_is_emptiest else (other, own)
        return (
            PeaksAtRoutingLoad(min(tokens), float(few.allocated), float(few.peak_reserved)),
            PeaksAtRoutingLoad(max(tokens), float(many.allocated), float(many.peak_reserved)),
        )

    def _by_quantile(self, pipeline_rank: int) -> tuple[PeaksAtRoutingLoad, PeaksAtRoutingLoad] | None:
        estimator, ep = self.estimator, int(self.estimator.table.ep[0])
        least = estimator.loads.with_memory_of_emptiest_rank(ep) if int(estimator.table.balancing[0]) == 0 else None
        if least is None:
            return None
        emptier = TableEstimator(estimator.workload, estimator.cluster, estimator.framework, estimator.table, least)
        few, many = (
            self._play(describer_of_rank(emptier)(pipeline_rank), pipeline_rank),
            self.rank_memory(pipeline_rank),
        )
        if few.allocated == many.allocated and few.peak_reserved == many.peak_reserved:  # no experts here
            return None
        return (
            PeaksAtRoutingLoad(least.quantile_rows_over_mean[ep], float(few.allocated), float(few.peak_reserved)),
            PeaksAtRoutingLoad(
                estimator.loads.quantile_rows_over_mean[ep], float(many.allocated), float(many.peak_reserved)
            ),
        )

    def _play(self, rank: Rank, pipeline_rank: int) -> ReplayedRankMemory:
        return play_memory(
            rank,
            capacity_bytes=int(self.allocator_capacity_bytes(pipeline_rank)),
            expandable=self.estimator.framework.allocator == "expandable",
        )

    def allocator_capacity_bytes(self, pipeline_rank: int) -> float:
        """What the capacity leaves the allocator of a pipeline rank, beside context and communicators. [B]"""
        return (
            self.estimator.cluster.gpu.capacity_bytes.value
            - self.context_bytes
            - self.communicator_bytes[pipeline_rank]
        )

    def _may_not_fit(self, reserved: int, capacity_bytes: float) -> bool:
        """Whether what was played so far fits, but with the margin of a plan would not if it were the emptier end."""
        capacity = self.estimator.cluster.gpu.capacity_bytes.value
        share = load_residuals().device_memory.value + load_shared_facts().tolerances.shard_ends.value
        return capacity_bytes - share * capacity < reserved <= capacity_bytes

    def device_bytes(self, pipeline_rank: int, limit: float = math.inf) -> float:
        """Reserved memory, context and communicators of a pipeline rank; what it takes so far, as soon as that is above
        a ``limit``, where it is not played on. [B]"""
        outside = self.context_bytes + self.communicator_bytes[pipeline_rank]
        if pipeline_rank not in self._played:
            try:
                self._played[pipeline_rank] = self._fullest_of_stage(pipeline_rank, limit - outside)
            except ReservedLimitPassed as passed:
                return passed.reserved + outside
        return self._played[pipeline_rank].peak_reserved + outside

    @cached_property
    def replayed_time(self) -> ReplayedTime:
        """The step on the clocks of all ranks; its spans are those of one run where steps may run again."""
        return mean_step_of_run(self.estimator, replay_step_time(self.estimator, detail=False))

    def replayed_time_without_spans(self) -> ReplayedTime:
        """The step on the clocks of all ranks, without the spans of its computations."""
        return mean_step_of_run(self.estimator, replay_step_time(self.estimator, detail=False, spans=False))

    @property
    def played_ranks(self) -> tuple[int, ...]:
        """The pipeline ranks whose memory has been played."""
        return tuple(sorted(self._played))

    def fullest_rank_device_bytes(self, enough: float = math.inf, *, exact: bool = True) -> float:
        """Device bytes of the fullest rank, played: from the fullest in closed form on, while another may be it. [B]

        Parameters
        ----------
        enough
            Once a rank takes more than this, no other is played. [B]
        exact
            Whether that rank is played to its end; else what it takes so far is returned.

        Notes
        -----
        A rank is played where its closed form is above the fullest one played, or below it by no more than closed forms
        are off. The latter is not said of a stage that holds the same layers as one that was played, with no fewer
        micro-batches in flight. Stages with the embedding or the head whose chunks FSDP reduces one by one are
        always played: closed forms are up to a quarter off.
        """
        expected, limit = self.estimator.stage_device_bytes(), math.inf if exact else enough
        most, like = 0.0, set[object]()
        for r in sorted(range(self.num_ranks), key=lambda r: (-expected[r], r)):
            off, layers = self._is_off(r), self._layers(r)
            if expected[r] > most or (expected[r] >= (1.0 - off) * most and layers not in like):
                like.add(layers)
                most = max(most, self.device_bytes(r, limit))
                if most > enough:
                    break
        return most

    def ranks_that_may_exceed(self, limit: float) -> tuple[int, ...]:
        """Pipeline ranks that may take more than a limit of device bytes, by their closed forms. [B]

        Notes
        -----
        Closed forms are taken to be twice as far off as when the fullest is looked for: of 193 strategies the fullest
        was once 3.6 % above the rank that was taken for it (docs/evidence/steady_state.md, which ranks are played).
        """
        expected = self.estimator.stage_device_bytes()
        return tuple(r for r in range(self.num_ranks) if expected[r] * (1.0 + 2.0 * self._is_off(r)) > limit)

    def _is_off(self, pipeline_rank: int) -> float:
        """By how much the closed form of a pipeline rank may be too low, as a share. [-]"""
        spec = self.estimator.rank_specs[pipeline_rank]
        tolerances = load_shared_facts().tolerances
        if not spec.place.has_model_end:
            return tolerances.stage.value
        if spec.gradients.reduces_by_chunk:
            return 1.0
        is_moe = self.estimator.workload.model.moe is not None
        makes_whole_gradients = spec.gradients.keeps_params_gathered and is_moe
        return (tolerances.stage_with_whole_expert_gradients if makes_whole_gradients else tolerances.stage).value

    def _layers(self, pipeline_rank: int) -> object:
        """Equal for pipeline ranks that hold the same; an end is like no other, nor is any where layers get tokens of
        their own."""
        spec = self.estimator.rank_specs[pipeline_rank]
        alone = spec.place.has_model_end or rows_over_mean_by_layer(self.estimator) is not None
        return (
            pipeline_rank
            if alone
            else tuple(tuple((block.role, block.kind) for block in chunk.blocks) for chunk in spec.chunks)
        )
