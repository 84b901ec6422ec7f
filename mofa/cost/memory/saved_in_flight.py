"""What passes of micro-batches in flight keep: of the model's ends in bytes, of all by kind of tensor."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.op import KINDS
from mofa.cost.memory.fsdp_root import embedding_gathered_bytes, keeps_embedding_gathered
from mofa.cost.memory.stage_inputs import kept_output_part_bytes
from mofa.cost.rows import GatheredRows

ArrayN = NDArray[np.float64]


def saved_bytes_outside_layers(rows: GatheredRows) -> ArrayN:
    """What a stage keeps for micro-batches in flight beside its layers. (n, R) [B]

    That is of the embedding and the prediction layers, of outputs that it sent, and of losses. The head's of the
    micro-batch at hand comes apart.
    """
    out = np.zeros((len(rows.table), len(rows.stage_layers.shown.shown_stages)))
    saved = rows.mtp_layer_quantity("saved_bytes")
    if saved is not None:
        depth = rows.workload.model.num_mtp_layers
        out += depth * saved[:, None] * rows.is_prediction_stage * rows.stage_layers.last_in_flight
    if rows.framework.deepspeed:
        out += kept_output_part_bytes(rows) * rows.stage_layers.last_in_flight
    return out + _loss_saved(rows) + embedding_gathered_bytes(rows)


def _loss_saved(rows: GatheredRows) -> ArrayN:
    """What the loss keeps for micro-batches before the one at hand: GPipe runs all forwards first. (n, R)"""
    if not rows.schedule_record.forwards_first:
        return np.zeros((len(rows.table), len(rows.stage_layers.shown.shown_stages)))
    before = np.maximum(rows.stage_layers.last_in_flight - 1.0, 0.0)
    return np.asarray(rows.costs.head.memory.saved[rows.k][:, None] * rows.is_head_stage * before)


def saved_bytes_in_flight_by_kind(rows: GatheredRows, rows_at: NDArray[np.intp], stage: NDArray[np.intp]) -> ArrayN:
    """What is kept of the micro-batches in flight, by kind. (len(KINDS), len(at))"""
    lay = rows.stage_layers
    saved_kinds, k = rows.layers.saved_bytes_by_kind, rows.k[rows_at]
    in_flight = np.einsum(
        "nk,nkf->fn", lay.base_mode_in_flight[rows_at, :, stage], saved_kinds[rows.base_mode_index[rows_at], k]
    )
    if lay.any_fully_recomputed:
        in_flight = in_flight + np.einsum(
            "nk,nkf->fn",
            lay.fully_recomputed_in_flight[rows_at, :, stage],
            saved_kinds[rows.full_mode_index[rows_at], k],
        )
    if rows.framework.deepspeed:
        in_flight[KINDS.index("activation")] += (kept_output_part_bytes(rows) * lay.last_in_flight)[rows_at, stage]
    if keeps_embedding_gathered(rows):
        in_flight = in_flight + rows.is_embedding_stage[stage] * rows.costs.embedding.memory.saved_kinds[:, k]
    mtp_kinds = rows.mtp_layer_quantity("saved_bytes_by_kind")
    if mtp_kinds is not None:
        weight = (
            rows.workload.model.num_mtp_layers * rows.is_prediction_stage[stage] * lay.last_in_flight[rows_at, stage]
        )
        in_flight = in_flight + weight * mtp_kinds[rows_at].T
    if rows.schedule_record.forwards_first:
        before = np.maximum(lay.last_in_flight[rows_at, stage] - 1.0, 0.0) * rows.is_head_stage[stage]
        in_flight = in_flight + before * rows.costs.head.memory.saved_kinds[:, rows.k[rows_at]]
    return np.asarray(in_flight)
