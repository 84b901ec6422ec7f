"""Peak memory of every pipeline stage: the maximum over the instants at which it may occur."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.elementwise import first_largest_index
from mofa.cost.memory.communicators import communicator_bytes_of_stages
from mofa.cost.memory.late_gradient_copies import late_gradient_copies_bytes, room_for_waiting_copies_bytes
from mofa.cost.memory.peak_candidates import PeakCandidates
from mofa.cost.memory.reserved import fsdp_shard_waste_bytes, whole_segment_bytes
from mofa.cost.memory.unsplit_remainders import unsplit_remainders
from mofa.cost.rank_rules import has_flat_gradient_buffers, shards_params
from mofa.cost.rows import GatheredRows

ArrayN = NDArray[np.float64]


@dataclass(frozen=True)
class StagePeakBytes:
    """Peak of each stage and at which instant it is. (n, R) [B]"""

    allocated: ArrayN
    reserved: ArrayN
    device: ArrayN
    instant: NDArray[np.int64]
    communicators: ArrayN
    candidates: PeakCandidates


@dataclass(frozen=True)
class StagePeaks:
    """Peak of each stage, which is the fullest (n,), and the names of the instants."""

    stages: StagePeakBytes
    fullest: NDArray[np.intp]
    names: tuple[str, ...]


def stage_peak_bytes(rows: GatheredRows) -> StagePeakBytes:
    """The peak of every stage."""
    candidates = PeakCandidates(rows)
    candidates.add_all_candidates()
    allocated, which = candidates.largest_bytes_and_instant()
    reserved = _reserved(rows, candidates, allocated)  # which has rests of its own
    rests = unsplit_remainders(rows, candidates.freed_bytes_by_step_end())
    if rests is not None:
        candidates.add_unsplit_remainders(rests)
        allocated, which = candidates.largest_bytes_and_instant()
        reserved = np.maximum(reserved, allocated)
    comm = communicator_bytes_of_stages(rows)
    outside = rows.cluster.gpu.context_bytes.value + comm
    if rows.framework.graphs.captures_any:
        reserved = reserved + np.minimum(
            late_gradient_copies_bytes(rows), room_for_waiting_copies_bytes(rows, reserved, outside)
        )
    return StagePeakBytes(allocated, reserved, reserved + outside, which, comm, candidates)


def stage_peaks(rows: GatheredRows) -> StagePeaks:
    """The peak of every stage and which is the fullest."""
    return peaks_with_fullest_stage(stage_peak_bytes(rows))


def peaks_with_fullest_stage(stages: StagePeakBytes) -> StagePeaks:
    """Peaks of stages, with which of them is the fullest."""
    return StagePeaks(
        stages, first_largest_index(stages.device), tuple(candidate.name for candidate in stages.candidates.all)
    )


def _reserved(rows: GatheredRows, candidates: PeakCandidates, allocated: ArrayN) -> ArrayN:
    """What the allocator holds. (n, R) [B]

    - Requests are rounded; see :func:`mofa.cost.block.liveness.allocator_rounded_bytes`.
    - Memory is pooled per stream. FSDP's sharded gradients live in the reduce-scatter stream's pool, which holds them
      all and what waits for sums over replicas, while the computing stream's holds the most of all else, at another
      instant. Gathered weights are in the gather stream's, at their own peaks.
    - Whole segments, of which larger tensors find none that fits
      (:func:`mofa.cost.memory.reserved.whole_segment_bytes`). The expandable allocator maps pages instead; pages
      once mapped stay, those of the parameters that Megatron copied too.
    """
    lay, c, static = rows.stage_layers, rows.costs, rows.static
    slack = rows.sum_over_layers(
        rows.layers.saved_rounding_bytes, lay.base_mode_in_flight, lay.fully_recomputed_in_flight, "nkr,nk->nr"
    )
    ends = np.maximum(c.head.memory.pool_slack[rows.k][:, None] * rows.is_head_stage,
                      c.embedding.memory.pool_slack[rows.k][:, None] * rows.is_embedding_stage)  # fmt: skip
    slack = slack + np.maximum(ends, rows.largest_layer_by_stage(rows.layers.pool_peaks_beyond_layer_peak_bytes))
    shards = shards_params(rows)
    has_own_pool = shards and not rows.mode.pipelined
    if has_own_pool:
        allocated = candidates.largest_bytes_without_gradients()
        slack = slack + candidates.grads + candidates.sums
    if rows.framework.allocator != "expandable":
        if shards:  # under no pipeline the gradients' too
            slack = slack + fsdp_shard_waste_bytes(rows) * (1.0 if rows.mode.pipelined else 2.0)
        return whole_segment_bytes(rows, candidates.live_peaks(allocated, without_gradients=has_own_pool)) + slack
    if shards and rows.mode.pipelined:  # they come when the others have gone
        slack = slack + rows.shards.sharded_bytes(rows.framework.grads_bytes_per_param)[rows.grid_index]
    if has_flat_gradient_buffers(rows):
        return np.maximum(allocated + slack, (2.0 * static.params + static.grads)[rows.grid_index])
    return allocated + slack
