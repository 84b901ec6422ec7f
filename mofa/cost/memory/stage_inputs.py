"""Bytes of what pipelines hold of stages' inputs and outputs beside their passes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.cost.rank_rules import held_input_counts_of_stages
from mofa.cost.rows import GatheredRows

ArrayN = NDArray[np.float64]


def held_input_bytes(rows: GatheredRows) -> tuple[ArrayN, ArrayN]:
    """Bytes of :func:`mofa.cost.rank_rules.held_input_counts`: all the time, and more between two steps. (n, R) each
    [B]"""
    throughout, at_end = np.array(held_input_counts_of_stages(rows), dtype=float).T
    boundary = rows.costs.stage_boundary_bytes[rows.k][:, None]
    return boundary * throughout, boundary * at_end


def freed_input_bytes(rows: GatheredRows) -> tuple[ArrayN | float, ArrayN | float]:
    """Bytes of held inputs that are freed already in a 1F1B's forwards, and in its backwards. (n, R) each [B]

    In a forward both are, in a backward the gradient alone; neither where as many micro-batches are in flight as the
    step has, so that no backward was before.
    """
    if rows.stage_layers.stages.vpp > 1:
        return 0.0, 0.0
    throughout = held_input_bytes(rows)[0]
    earlier = rows.num_micro_batches[:, None] > rows.stage_layers.last_in_flight
    return np.where(earlier, 0.0, throughout), np.where(earlier, 0.5, 1.0) * throughout


def pipeline_buffer_bytes(rows: GatheredRows) -> ArrayN:
    """Buffers in which schedules hold what neighbours send. (n, R) [B]

    All micro-batches' where that is preallocated.
    """
    if rows.stage_layers.stages.pp == 1:
        return np.zeros((len(rows.table), 1))
    boundary = rows.costs.stage_boundary_bytes[rows.k][:, None]
    if rows.framework.traits.has_pytorch_modules:
        return np.asarray(boundary * rows.num_micro_batches[:, None] * _received(rows))
    if rows.framework.deepspeed:  # what a gradient is received in, of which a rank has its part
        return kept_output_part_bytes(rows)
    return held_input_bytes(rows)[0]


def kept_output_part_bytes(rows: GatheredRows) -> ArrayN:
    """A rank's part of what a stage sends on, which DeepSpeed keeps until its backward. (n, R) [B]"""
    return np.asarray(
        (rows.costs.stage_boundary_bytes[rows.k] / rows.table.tp)[:, None] * rows.stage_layers.chunks_that_send[:, -1]
    )


def _received(rows: GatheredRows) -> ArrayN:
    """What PyTorch's pipelines keep of the boundary's size for each micro-batch, all chunks together. (R,)

    A buffer each way but at the model's ends. Where weights' gradients are put off, the gradient of every input
    too, until the next step's takes its place (stage_backward_input); in a V what turns round on the last rank
    instead of what it receives.
    """
    lay = rows.stage_layers
    ways = (lay.chunks_that_receive.astype(float) + lay.chunks_that_send + lay.chunks_that_feed_own_rank).sum(axis=1)
    if rows.schedule_record.defers_weight_gradients:
        ways = ways + lay.stages.vpp - lay.stages_with_embedding
    return np.asarray(ways)
