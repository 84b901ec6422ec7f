"""The split problem of one strategy, from what its layers and ends are estimated to take and keep.

Linear about the layout that the strategy has: there times and bytes are the estimate's own.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mofa.blocks.build import layer_kind
from mofa.cost.block.host_clock import NEVER
from mofa.cost.estimate import TableEstimator
from mofa.cost.layer_arrays import LayerArrays
from mofa.cost.rank_rules import host_waits_at_exchanges
from mofa.cost.rows import GatheredRows
from mofa.cost.stages import in_flight_at_first_backward
from mofa.cost.step_time.hand_over import hop_seconds, slowdown_beside_hops
from mofa.cost.step_time.longest_paths import FormulaPaths, LongestPaths
from mofa.cost.step_time.micro_batch import MicroBatchPasses, host_s_around_exchange, micro_batch_passes
from mofa.search.layout_search.split_problem import ChunkLayers, FloatA, IntA, LayerSplitProblem, ScheduleTimer
from mofa.specs.params import layer_params, mtp_layer_params

MORE_RECOMPUTED = 2
"""Layers above those of an even chunk that may be recomputed of every chunk. [-]"""


def split_of_strategy(estimator: TableEstimator) -> ChunkLayers:
    """The split that a strategy has: the table's only row."""
    layout, row = estimator.stages_of_row().split.layout, estimator.row_with_every_stage
    recomputed = int(row.table.recompute_layers[0]) if _recomputes_whole(row) else 0
    return ChunkLayers(layout.layers_by_chunk, layout.prediction_chunk, recomputed)


def split_problem_of_strategy(
    estimator: TableEstimator, limit_bytes: float, *, keep_recomputed: bool = False
) -> LayerSplitProblem | None:
    """The problem of a strategy's split; None where there is nothing to deal out, or no option says how.

    Parameters
    ----------
    estimator
        Of one strategy, its table having one row.
    limit_bytes
        What a rank may hold. [B]
    keep_recomputed
        Whether the number of recomputed layers stays.

    Notes
    -----
    Layers that are recomputed whole are all of every chunk, or the first so many, which are searched as well. Every
    n-th layer of a rank, as torchtitan selects them, is none of both. Where forwards run beside backwards, what a layer
    takes depends on which one it runs beside: no split is searched.
    """
    timed = split_problem_without_bytes(estimator, limit_bytes, keep_recomputed=keep_recomputed)
    return None if timed is None else with_bytes_of_strategy(timed, estimator)


def split_problem_without_bytes(
    estimator: TableEstimator, limit_bytes: float, *, keep_recomputed: bool = False
) -> LayerSplitProblem | None:
    """The problem of a strategy's split without bytes: few are asked for those, as a bound leaves others out."""
    rows, stages, framework = estimator.row_with_every_stage, estimator.stages_of_row(), estimator.framework
    mode = rows.table.recompute_modes[int(rows.table.recompute[0])]
    if stages.pp == 1 or not framework.traits.takes_layouts or mode.kind == "every":
        return None
    if rows.schedule_record.pairs_passes:
        return None
    model, split = estimator.workload.model, split_of_strategy(estimator)
    chunks = stages.num_chunks
    counts_ends = framework.traits.split_rule.counts_ends  # then only the ends may hold no layer
    least = [int(counts_ends and 0 < p < chunks - 1) for p in range(chunks)]
    searched = split.recomputed > 0 and not keep_recomputed
    most_recomputed = max(-(-model.num_layers // chunks) + MORE_RECOMPUTED, split.recomputed)
    problem = LayerSplitProblem(
        kinds=tuple(stages.kinds.index(layer_kind(model, i)) for i in range(model.num_layers)),
        ranks=stages.rank_of_each_chunk,
        chunk_s=np.zeros((1, chunks)), layer_s=np.zeros((1, chunks, len(stages.kinds), 2)),
        prediction_s=np.zeros((1, chunks)),
        bytes_without_layers=np.zeros(stages.pp), layer_bytes=np.zeros((chunks, len(stages.kinds), 2)),
        prediction_bytes=np.zeros(chunks),
        limit_bytes=limit_bytes, num_predictions=model.num_mtp_layers,
        first_prediction_chunk=stages.pp * (stages.vpp - 1), least_layers=tuple(least),
        least_recomputed=1 if searched else split.recomputed,
        most_recomputed=most_recomputed if searched else split.recomputed,
        schedule_clock=_pipeline(rows),
    )  # fmt: skip
    counts, place = problem.layer_counts([split])[0], problem.chunk_places
    layer_s, prediction_s, chunk_s = _seconds(rows, split, counts, place)
    return replace(problem, chunk_s=chunk_s, layer_s=layer_s, prediction_s=prediction_s)


def with_bytes_of_strategy(problem: LayerSplitProblem, estimator: TableEstimator) -> LayerSplitProblem:
    """The problem with what layers, predictions and ranks keep. Its split is the strategy's."""
    split, pp = split_of_strategy(estimator), estimator.stages_of_row().pp
    counts, place = problem.layer_counts([split])[0], problem.chunk_places
    layer_bytes, prediction_bytes = _bytes(estimator.row_with_every_stage, place)
    of_chunks = np.einsum("pkm,pkm->p", layer_bytes, counts)
    of_chunks[split.prediction_chunk] += prediction_bytes[split.prediction_chunk]
    layers_bytes = np.bincount(place[0], of_chunks, pp)
    return replace(
        problem, layer_bytes=layer_bytes, prediction_bytes=prediction_bytes,
        bytes_without_layers=np.array(estimator.stage_device_bytes()) - layers_bytes,
    )  # fmt: skip


def _recomputes_whole(rows: GatheredRows) -> bool:
    """Whether layers are recomputed whole: all of them, or the first of every chunk."""
    return rows.table.recompute_modes[int(rows.table.recompute[0])].kind == "full"


def _pipeline(rows: GatheredRows) -> ScheduleTimer:
    """The clock of a strategy's schedule."""
    schedule, stages, m = rows.schedule_record, rows.stage_layers.stages, int(rows.num_micro_batches[0])
    if _has_formula(rows):
        return FormulaPaths(stages.pp, m, forwards_first=schedule.forwards_first)
    runtime, slowdown = rows.framework.traits.runtime, float(slowdown_beside_hops(rows)[0])
    return LongestPaths(rows.schedule, runtime, stages.pp, stages.vpp, m, float(hop_seconds(rows)[0]), slowdown)


def _seconds(
    rows: GatheredRows, split: ChunkLayers, counts: IntA, place: tuple[IntA, IntA]
) -> tuple[FloatA, FloatA, FloatA]:
    """What a layer takes on each chunk by kind of computation, what predictions do, and what a chunk does besides.

    A chunk between the ends is like others, whatever it holds: what it does besides is the mean of these.
    """
    chunks, last = len(counts), len(counts) - 1
    each = micro_batch_passes(rows)
    of_mtp = _layer_seconds(rows, rows.mtp, each) if rows.mtp is not None else np.zeros((3, 1, 2))
    mode = int(rows.mtp_mode_indices[0] == rows.full_mode_index[0])
    layer_s = np.repeat(_layer_seconds(rows, rows.layers, each)[:, None], chunks, axis=1)
    prediction_s = np.repeat(rows.workload.model.num_mtp_layers * of_mtp[:, :1, mode], chunks, axis=1)
    of_chunks = _chunk_seconds(rows, each)[:, place[0], place[1]]
    if rows.schedule_record.defers_weight_gradients:  # the first chunk's inputs have no gradients
        for of in (layer_s, prediction_s, of_chunks):
            of[2, 0] += of[1, 0]
            of[1, 0] = 0.0
    elif not _has_formula(rows):
        layer_s, prediction_s = layer_s[:2], prediction_s[:2]
    besides = of_chunks - np.einsum("cpkm,pkm->cp", layer_s, counts)
    besides[:, split.prediction_chunk] -= prediction_s[:, split.prediction_chunk]
    between = [p for p in range(1, last) if p != split.prediction_chunk]
    if between:
        besides[:, 1:last] = besides[:, between].mean(axis=1, keepdims=True)
    return layer_s, prediction_s, np.maximum(besides, 0.0)


def _has_formula(rows: GatheredRows) -> bool:
    return rows.schedule_record.has_closed_form or rows.schedule_record.forwards_first


def _chunk_seconds(rows: GatheredRows, each: MicroBatchPasses) -> FloatA:
    """What each kind of computation takes on each chunk of each rank. (C, pp, vpp) [s]"""
    forward_s, backward_s, weights_s = each.forward_s[0], each.backward_s[0], each.weights_s[0]
    if rows.schedule_record.defers_weight_gradients:
        return np.stack([forward_s, backward_s - weights_s, weights_s])
    if not _has_formula(rows):
        return np.stack([forward_s, backward_s])
    rested_s = each.passes_after_wait_s()[0][:, None]
    if host_waits_at_exchanges(rows):  # each pass counts with what it receives for
        exchange_s = float(hop_seconds(rows)[0]) + rows.cluster.sync_s + host_s_around_exchange(rows)[1]
        stages = rows.stage_layers.stages
        received = exchange_s * stages.chunks_that_receive[:, :1], exchange_s * stages.chunks_that_send[:, -1:]
        forward_s, backward_s = forward_s + received[0], backward_s + received[1]
        rested_s = rested_s + received[0] + received[1]
    return np.stack([forward_s, backward_s, rested_s])


def _layer_seconds(rows: GatheredRows, layers: LayerArrays, each: MicroBatchPasses) -> FloatA:
    """What one more layer takes: forward, backward, and weights' part of it, or both where a stage had to wait.

    A host that is late in a layer counts where it begins with its device, behind each exchange, or waits for it in the
    layer. (3, kinds, 2) [s]
    """
    forward_s, backward_s, weights_s = (
        _of_row(rows, of) for of in (layers.forward_s, layers.backward_s, layers.weight_backward_s)
    )
    both_s = forward_s + backward_s
    part = weights_s / backward_s
    if each.host_bound is not None:
        clocks = [
            np.stack([_of_row(rows, of[..., i]) for i in range(4)])
            for of in (layers.forward_clocks, layers.backward_clocks)
        ]
        both_s = clocks[0][0] + clocks[1][0]
        together = host_waits_at_exchanges(rows)
        forward_s, backward_s = (
            np.where((woken_s > NEVER / 2) | together, np.maximum(device_s, host_s), device_s)
            for device_s, _, woken_s, host_s in clocks
        )
    if rows.schedule_record.defers_weight_gradients:
        return np.stack([forward_s, (1.0 - part) * backward_s, part * backward_s])
    return np.stack([forward_s, backward_s, both_s])


def _of_row(rows: GatheredRows, by_mode: FloatA) -> FloatA:
    """A quantity of layers that are not recomputed whole and of those that are, of the only row. (kinds, 2)"""
    return np.stack([of[0] for of in rows.in_base_and_full_mode(by_mode)], axis=-1)


def _bytes(rows: GatheredRows, place: tuple[IntA, IntA]) -> tuple[FloatA, FloatA]:
    """What a layer keeps on each chunk, of all its micro-batches in flight, and what predictions do.

    What parameters take is as many bytes each of dense and of experts' ones as ranks' differences say.
    """
    stages, model, m = rows.stage_layers.stages, rows.workload.model, int(rows.num_micro_batches[0])
    flight = in_flight_at_first_backward(stages.pp, stages.vpp, rows.schedule, m)[place]
    static = (rows.static.params + rows.static.grads + rows.static.states + rows.static.buffers)[rows.grid_index[0]]
    rank_params = np.stack([rows.shards.dense[rows.grid_index[0]], rows.shards.expert[rows.grid_index[0]]], axis=1)
    bytes_per_param = np.linalg.lstsq(rank_params, static, rcond=None)[0]
    tp, spread = float(rows.table.tp[0]), float(rows.table.ep[0] * rows.table.etp[0])
    of_kinds = [layer_params(model, kind.moe) for kind in stages.kinds]
    dense, expert = (
        np.array([(p.matrices_tp + p.shared) / tp + p.replicated for p in of_kinds]),
        np.array([p.routed / spread for p in of_kinds]),
    )
    saved = _of_row(rows, rows.layers.saved_bytes) + _of_row(rows, rows.layers.saved_rounding_bytes)
    layer_bytes = flight[:, None, None] * saved + (bytes_per_param @ np.stack([dense, expert]))[None, :, None]
    prediction_bytes = np.zeros(len(flight))
    if rows.mtp is not None:
        p, mode = mtp_layer_params(model), int(rows.mtp_mode_indices[0] == rows.full_mode_index[0])
        saved = _of_row(rows, rows.mtp.saved_bytes) + _of_row(rows, rows.mtp.saved_rounding_bytes)
        copied = (p.matrices_tp + p.shared) / tp + p.replicated, p.routed / spread
        depth = model.num_mtp_layers
        prediction_bytes = depth * (flight * saved[0, mode] + float(bytes_per_param @ np.array(copied)))
        prediction_bytes += bytes_per_param[0] * model.vocab * model.hidden / tp  # the embedding is copied there
    return layer_bytes, prediction_bytes
