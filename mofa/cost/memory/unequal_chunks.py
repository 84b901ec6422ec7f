"""Bytes kept in flight by ranks of Megatron's interleaved pipelines whose chunks hold different layers.

With equal chunks it does not matter which of them micro-batches in flight have passed. Otherwise that changes from
computation to computation: while a rank's first chunk runs backward, its last may be in flight as often as ever.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.cost.memory.chunk_layer_order import layers_behind_last_by_mode
from mofa.cost.memory.in_flight import WALKED_ROUNDS, in_flight_at_computations
from mofa.cost.rows import GatheredRows

ArrayN = NDArray[np.float64]


class UnequalChunks:
    """What is kept in the backwards of ranks whose chunks differ, of candidates of one pp x vpp."""

    def __init__(self, rows: GatheredRows) -> None:
        lay, stages = rows.stage_layers, rows.stage_layers.stages
        self.rows = rows
        self.recomputed = lay.fully_recomputed_by_chunk[lay.recompute_choice]
        """Layers that are recomputed whole. (n, kinds, R, vpp)"""
        self.base_mode = stages.layer_counts[:, lay.shown.shown_stages] - self.recomputed
        self.saved = rows.in_base_and_full_mode(rows.layers.saved_bytes)
        self.layers_behind = layers_behind_last_by_mode(rows)
        plain, full = self.saved
        self.per_micro_batch = np.einsum("nkrc,nk->nrc", self.base_mode, plain) + np.einsum(
            "nkrc,nk->nrc", self.recomputed, full
        )

    @staticmethod
    def any_rank_has_unequal_chunks(rows: GatheredRows) -> bool:
        """Whether any rank that is shown has chunks of different layers, or that recompute differently."""
        lay, stages = rows.stage_layers, rows.stage_layers.stages
        if stages.vpp == 1:
            return False
        counts = stages.layer_counts[:, lay.shown.shown_stages], lay.fully_recomputed_by_chunk
        return any(bool(np.any(by_chunk != by_chunk[..., :1])) for by_chunk in counts)

    def most_kept_bytes_in_backward(self, kind: int, recomputed: int) -> ArrayN:
        """The most that layers keep while the last one of a kind in a chunk, recomputed whole or not, runs backward,
        without its own. (n, R) [B]

        What layers behind it in its chunk kept of its micro-batch is gone by then.
        """
        rows, lay = self.rows, self.rows.stage_layers
        stages, ranks = lay.stages, tuple(lay.shown.shown_stages.tolist())
        plain, full = self.saved
        behind = self.layers_behind[:, :, :, kind, recomputed][lay.recompute_choice]
        there = (self.recomputed if recomputed else self.base_mode)[:, kind] > 0
        gone = np.einsum("nkrc,nk->nrc", behind[:, :, 0], plain) + np.einsum("nkrc,nk->nrc", behind[:, :, 1], full)
        gone = np.where(there, gone + self.saved[recomputed][:, kind, None, None], np.inf)
        walked = np.minimum(rows.num_micro_batches, WALKED_ROUNDS * stages.pp)
        out = np.zeros(there.shape[:2])
        for length in np.unique(walked).tolist():
            some = np.flatnonzero(walked == length)
            states = in_flight_at_computations(
                rows.schedule, rows.framework.traits.runtime, stages.pp, stages.vpp, length, "B", False, ranks
            )
            alive = np.einsum("rsc,nrc->nrs", states.in_flight, self.per_micro_batch[some])
            of_chunk = np.take_along_axis(gone[some], np.broadcast_to(states.chunk, alive.shape), axis=2)
            out[some] = (alive - of_chunk).max(axis=2)
        return out
