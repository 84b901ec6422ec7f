"""What data parallelism leaves exposed outside the blocks: gradients reduced and parameters gathered once a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.elementwise import max_of_array_rows
from mofa.blocks.work import CollectiveKind
from mofa.cost.block.host_clock import ClockAdvance
from mofa.cost.kernels.collectives import collective_s
from mofa.cost.kernels.topology import ProcessGroup, stacked_groups
from mofa.cost.rank_rules import (
    gathered_bytes_per_param,
    gradient_reducer,
    host_waits_at_exchanges,
    reduce_scatters_gradients,
    reduced_bytes_per_param,
    shards_optimizer_states,
)
from mofa.cost.rows import GatheredRows
from mofa.cost.step_time.bucket_gathers import FirstStageBucketGathers, first_forward_clock_advance_behind_gathers
from mofa.cost.step_time.communication_outside import CommunicationOutsideBlocks
from mofa.cost.step_time.critical_path import DataParallelOncePerStep
from mofa.cost.step_time.ddp import ddp_communication
from mofa.cost.step_time.gradient_buckets import FilledBuckets, megatron_first_chunk_buckets
from mofa.cost.step_time.hybrid_sharding import exposed_and_hidden_replica_all_reduces_s, replica_all_reduce_s
from mofa.cost.step_time.last_backwards import lost_and_hidden_beside_expert_reductions_s
from mofa.cost.step_time.micro_batch import HostBoundPasses
from mofa.cost.step_time.pipelined_fsdp import (
    computing_lost_beside_gathers_s,
    computing_lost_beside_reductions_s,
    first_forward_clock_advance,
    piece_seconds,
)
from mofa.cost.step_time.slowdown_of_stages import slowdown_of_passes, slowdown_of_stages

ArrayN = NDArray[np.float64]
BoolN = NDArray[np.bool_]


def _of_chunks(group: ProcessGroup) -> ProcessGroup:
    """The group with two trailing axes, to time payloads of shape (n, R, vpp)."""
    return group.with_indexed_arrays(np.s_[:, None, None])


def communication_outside_blocks(
    rows: GatheredRows,
    forward_s: ArrayN,
    backward_s: ArrayN,
    num_micro_batches: ArrayN,
    host_bound: HostBoundPasses | None = None,
    lead_s: ArrayN | float = 0.0,
) -> CommunicationOutsideBlocks:
    """Gathers and reductions outside the tapes, and how much of them computing hides.

    Parameters
    ----------
    forward_s, backward_s
        Of one micro-batch on each stage. (n, R) [s]
    num_micro_batches
        Micro-batches. (n,)
    host_bound
        The rows whose host is late.
    lead_s
        How far each stage's host is ahead as the step begins. (n, R) [s]
    """
    zero = np.zeros_like(num_micro_batches)
    none = CommunicationOutsideBlocks(zero, zero, np.zeros_like(forward_s))
    sharing = gradient_reducer(rows)
    if sharing == "Megatron":
        return _megatron(rows, forward_s, backward_s, host_bound, (num_micro_batches, lead_s))
    if sharing == "DDP":
        return ddp_communication(rows, backward_s, num_micro_batches, none, host_bound)
    if sharing == "none":
        return none
    if sharing == "FSDP by step":
        return _pipelined_fsdp(rows, forward_s, backward_s, host_bound)
    exposed, hidden = exposed_and_hidden_replica_all_reduces_s(rows, backward_s)
    return replace(
        none, exposed=num_micro_batches * exposed, hidden=num_micro_batches * hidden, after_each_backward_s=exposed
    )


def _over(rows: GatheredRows, *calls: tuple[CollectiveKind, float]) -> list[ArrayN]:
    """Seconds of collectives of so many bytes a parameter over all parameters of each chunk, dense and expert ones one
    after the other. (g, R, vpp) each [s]"""
    group = stacked_groups([_of_chunks(rows.groups[name]) for name in ("fsdp", "efsdp")])
    fabric = rows.costs.machine.network_fabric
    return [collective_s(kind, rows.params * each, group, fabric).sum(axis=0) for kind, each in calls]


def _lost(communication_s: ArrayN, room_s: ArrayN, slow: ArrayN) -> tuple[ArrayN, ArrayN]:
    """What computing of ``room_s`` loses beside communication, and how long both last together. (n,) each [s]

    Where communication takes longer than computing, what is lost is waited for anyway.
    """
    beside = np.minimum(communication_s, room_s)
    return np.minimum(slow * beside, np.maximum(room_s * (1.0 + slow) - communication_s, 0.0)), beside


def _after_last(seconds: ArrayN, chunk_s: ArrayN, drain_s: ArrayN, pp: int, vpp: int) -> ArrayN:
    """What is left of reductions when the last rank has ended: each chunk's begins behind its last backward.

    The last chunk's begins at the rank's end; the one before it ``pp`` backwards of a chunk earlier, and so on. (n, R)
    """
    left_s = np.maximum(seconds / vpp, seconds - (vpp - 1) * pp * chunk_s)
    return np.asarray(np.maximum(left_s - drain_s, 0.0))


def _megatron(
    rows: GatheredRows, forward_s: ArrayN, backward_s: ArrayN, host_bound: HostBoundPasses | None,
    step: tuple[ArrayN, ArrayN | float],
) -> CommunicationOutsideBlocks:  # fmt: skip
    """Megatron's buffers, in buckets on the first rank's first chunk, whole elsewhere.

    Gradients are reduced behind a chunk's last backward, bucket by bucket inside it on the first rank (not under
    interleaving, where all ranks begin at once, ``grad_sync_func``). Parameters are gathered bucket by bucket ahead of
    the first forward there; a later stage of 1F1B begins to gather when its first input has come
    (``finish_param_sync`` in the forward's hook), chunks of interleaving at the start and a chunk ahead. The device
    waits for a gather, and the host issues on. ``step`` are its micro-batches (n,) and each host's lead (n, R) [s].
    """
    fw, stages = rows.framework, rows.stage_layers.stages
    pp, vpp, width = stages.pp, stages.vpp, reduced_bytes_per_param(rows)
    slow = slowdown_of_stages(rows, host_ahead=vpp > 1)
    shards, scatters = (
        of_grids[:, None, None] for of_grids in (shards_optimizer_states(rows), reduce_scatters_gradients(rows))
    )
    each = gathered_bytes_per_param(rows)
    reduces, gathers = _over(rows, ("reduce_scatter", width), ("all_gather", each))
    if not scatters.all():
        reduces = np.where(scatters, reduces, *_over(rows, ("all_reduce", width)))
    reduces, gathers = reduces[rows.grid_index], np.where(shards, gathers, 0.0)[rows.grid_index]
    buckets = megatron_first_chunk_buckets(rows)
    first_forward: ClockAdvance | None = None
    (first_reduce, last_reduce), (first_gather, last_gather), of_buckets, experts_s = _first_chunk_s(
        rows, buckets, (width, each), scatters[:, 0, 0], shards[:, 0, 0]
    )
    reduces[:, 0, 0], gathers[:, 0, 0] = first_reduce, first_gather
    gather, reduce = gathers.sum(axis=2), reduces.sum(axis=2)
    before_f, before_b = rows.sum_over_stages_ahead(forward_s), rows.sum_over_stages_ahead(backward_s)
    if pp == 1 and host_bound is not None:
        gathers_s = (first_gather, last_gather) if fw.overlap_param_gather else (0.0 * first_gather, 0.0 * last_gather)
        if fw.overlap_param_gather:
            on_device_s = (host_bound.forward.device_s + host_bound.backward.device_s)[:, :, 0]
            first_forward = first_forward_clock_advance_behind_gathers(
                rows, host_bound.rows, of_buckets, host_bound.with_full_queue[0],
                slowdown_of_passes(rows, host_bound, on_device_s)[:, 0],
            )  # fmt: skip
        forward_s, backward_s = _passes_behind_lead(host_bound, (forward_s, backward_s), step, gathers_s, first_forward)
        slow[host_bound.rows] = slowdown_of_passes(rows, host_bound, (forward_s + backward_s)[host_bound.rows])
    heads = (rows.costs.head.forward, rows.costs.head.backward)  # gathered last, and reduced first: beside neither
    forward_s, backward_s = (
        (passes_s - (cost.total_s[rows.k, None] if pp == 1 else 0.0)) / (1 - slow)
        for passes_s, cost in zip((forward_s, backward_s), heads, strict=True)
    )
    before_forward = np.zeros_like(forward_s)
    exposed, hidden, on_path, in_passing = np.zeros((4, len(forward_s)))
    worst = max_of_array_rows(np.maximum(reduce - before_b / vpp, 0.0))  # while stages ahead have backwards left
    own_s = reduce.copy()
    if fw.overlap_grad_reduce:
        of_others_s, in_backward_s = lost_and_hidden_beside_expert_reductions_s(rows)
        left_s = _after_last(reduce - in_backward_s, backward_s / vpp, before_b / vpp, pp, vpp)
        if vpp == 1:
            own_s = own_s - in_backward_s
            behind_experts_s = last_reduce + experts_s[0] - _beside_first_layers_experts_s(rows, is_backward=True)
            own_s[:, 0] = left_s[:, 0] = np.maximum.reduce(
                [last_reduce, reduce[:, 0] - backward_s[:, 0], behind_experts_s]
            )
        worst = max_of_array_rows(left_s)
        beside = np.maximum(reduce[:, 0] - worst, 0.0)
        lost = slow[:, 0] * beside
        if vpp > 1:  # the last chunk's is beside nothing
            lost, beside = _lost(reduce[:, 0] - reduces[:, 0, 0], (vpp - 1) * pp * backward_s[:, 0] / vpp, slow[:, 0])
        exposed, hidden, in_passing = exposed + lost + of_others_s, hidden + beside, in_passing + lost
    if fw.overlap_grad_reduce and vpp > 1:
        on_path = on_path + worst
    else:
        exposed = exposed + worst
    ahead_of_experts_s = last_gather + experts_s[1] - _beside_first_layers_experts_s(rows, is_backward=False)
    first = np.maximum.reduce([last_gather, first_gather - forward_s[:, 0] / vpp, ahead_of_experts_s])
    after_optimizer_s, slower_s = np.zeros_like(gather), np.zeros(len(gather))
    if not fw.overlap_param_gather:
        after_optimizer_s = gather * num_gathers_after_optimizer(rows)[rows.grid_index]
        exposed = exposed + max_of_array_rows(after_optimizer_s)
    elif vpp == 1:
        before_forward = gather.copy()
        before_forward[:, 0] = first
        hidden = hidden + np.maximum(gather[:, 0] - first, 0.0)
        slower_s = slow[:, 0] * np.maximum(gather[:, 0] - first, 0.0)
        if host_bound is not None and first_forward is not None:  # it has both
            waits_s = first_forward.device_s - host_bound.with_full_queue[0].device_s
            before_forward[host_bound.rows, 0], slower_s[host_bound.rows] = waits_s[:, 0, 0], 0.0
        exposed = exposed + slower_s
    else:
        left_s = np.maximum(gather / vpp, gather - (vpp - 1) * pp * forward_s / vpp)
        left_s[:, 0] = np.maximum(first, gather[:, 0] - (vpp - 1) * pp * forward_s[:, 0] / vpp)
        worst = max_of_array_rows(np.maximum(left_s - before_f / vpp, 0.0))
        lost, beside = _lost(gather[:, 0] - gathers[:, 0, 0], (vpp - 1) * pp * forward_s[:, 0] / vpp, slow[:, 0])
        exposed, hidden, on_path = exposed + lost, hidden + beside, on_path + worst
        in_passing = in_passing + lost
    beside_s, waited_ahead_s = np.zeros_like(before_forward), np.zeros(len(gather))
    if host_bound is not None and pp == 1 and fw.overlap_param_gather:
        layers_s = rows.sum_layers_by_stage(rows.layers.forward_s_without_host_idle)[:, 0] / (1 - slow[:, 0])
        waits_s = np.maximum.reduce([first, last_gather, first_gather - layers_s])
        lost_s = slow[:, 0] * np.maximum(first_gather - waits_s, 0.0)
        index = host_bound.rows  # others wait as they are told to in any case
        waited_ahead_s[index] = (waits_s + lost_s - before_forward[:, 0])[index]
    if host_bound is not None and host_waits_at_exchanges(rows):
        host_rows, last = host_bound.rows, rows.is_last_stage > 0
        beside_s[host_rows] = host_bound.gather_s_beside_host_issue(before_forward[host_rows], last)
        first_forward = _first_forward_of_pipeline(rows, host_bound, of_buckets, before_forward, beside_s)
        has_loss = np.isin(np.arange(len(gather)), host_bound.rows) & (first_forward is not None)
        exposed, slower_s = exposed - slower_s * has_loss, slower_s * ~has_loss
    beyond_path_s: ArrayN | float = 0.0
    if vpp == 1:  # what computing loses beside communication is the first stage's alone
        with_first_s = exposed - max_of_array_rows(after_optimizer_s)
        beyond_path_s = own_s - np.where(rows.is_embedding_stage > 0, worst[:, None], with_first_s[:, None])
    exposed = exposed + tied_embedding_all_reduce_s(rows)
    once = None
    if vpp > 1:
        gathers = gathers * fw.overlap_param_gather
        starts = gathers.copy()
        starts[:, 0, 0] = np.maximum(last_gather * fw.overlap_param_gather, gathers[:, 0, 0] - forward_s[:, 0] / vpp)
        once = DataParallelOncePerStep(gathers, starts, reduces * fw.overlap_grad_reduce)
    return CommunicationOutsideBlocks(
        exposed, hidden, before_forward - beside_s, once, first_forward, on_path, in_passing if vpp > 1 else 0.0,
        after_optimizer_s=after_optimizer_s, issued_beside_s=beside_s, beyond_path_s=beyond_path_s,
        slower_first_forward_s=slower_s, waited_ahead_s=waited_ahead_s,
    )  # fmt: skip


def _first_forward_of_pipeline(
    rows: GatheredRows, host_bound: HostBoundPasses, of_buckets: FirstStageBucketGathers, before_forward_s: ArrayN,
    beside_s: ArrayN,
) -> ClockAdvance | None:  # fmt: skip
    """The first stage's first forward in Megatron's 1F1B, whose late host launches gathers bucket by bucket, if any.

    What it takes more than a forward without gathers is put into ``before_forward_s``, what of these is beside the
    host's issue into ``beside_s``, of the first stage. (n, R) each [s]
    """
    if not rows.framework.overlap_param_gather:
        return None
    index = host_bound.rows
    forward = ClockAdvance(*(np.asarray(part)[:, :1] for part in host_bound.with_full_queue[0][:4]))
    passes_s = (host_bound.forward.device_s + host_bound.backward.device_s)[:, :, 0]
    slow = slowdown_of_passes(rows, host_bound, passes_s)[:, 0]
    first = first_forward_clock_advance_behind_gathers(rows, index, of_buckets, forward, slow)
    more_s = (first.both_ended_s - forward.both_ended_s)[:, 0, 0]
    before_forward_s[index, 0] = np.maximum(before_forward_s[index, 0], more_s)
    beside_s[index, 0] = before_forward_s[index, 0] - more_s
    return first


def _passes_behind_lead(
    host_bound: HostBoundPasses, passes_s: tuple[ArrayN, ArrayN], step: tuple[ArrayN, ArrayN | float],
    gathers_s: tuple[ArrayN, ArrayN], first_forward: ClockAdvance | None,
) -> tuple[ArrayN, ArrayN]:  # fmt: skip
    """A single stage's forward that gathers, the step's first, and its backward that reduces, the last: what is left of
    the lead shortens them, and with them what they hide.

    The host's lead grows by what its device waits for the first gather. ``gathers_s`` are those of all buckets and of
    the first to be waited for. (n, 1) each [s]
    """
    forward_s, backward_s = (seconds.copy() for seconds in passes_s)
    index, first_s = host_bound.rows, gathers_s[1]
    lead_s = np.broadcast_to(step[1], forward_s.shape)[index, 0]
    forward_s[index, 0] = host_bound.first_forward_s(lead_s + first_s[index])
    backward_s[index, 0] = host_bound.last_backward_s(step[0][index], lead_s, first_forward)
    return forward_s, backward_s


def _first_chunk_s(
    rows: GatheredRows, buckets: FilledBuckets, bytes_per_param: tuple[float, float], scatters: BoolN, shards: BoolN
) -> tuple[tuple[ArrayN, ArrayN], tuple[ArrayN, ArrayN], FirstStageBucketGathers, tuple[ArrayN, ArrayN]]:  # fmt: skip
    """Reducing and gathering the first stage's first chunk bucket by bucket: all of them, and the one with the
    embedding, which is reduced last and gathered ahead of all; and, the last of four, reducing and gathering what the
    first weight of the first layer's experts fills, 0 where that layer has none. (n,) each [s]"""
    dense, expert = rows.params[:, :, 0, 0]
    sizes = [sizes.shares * params for sizes, params in zip(buckets.sizes, (dense, expert), strict=True)]
    payloads = np.concatenate([*sizes, np.minimum(buckets.last_params, dense)[None]])
    names = ["fsdp"] * len(sizes[0]) + ["efsdp"] * len(sizes[1]) + ["fsdp"]
    group, numbers = (
        stacked_groups([rows.groups[name] for name in names]),
        np.concatenate([each.numbers for each in buckets.sizes]),
    )

    def each_bucketed_s(kind: CollectiveKind, nbytes: float) -> tuple[ArrayN, ArrayN]:
        seconds = collective_s(kind, payloads * nbytes, group, rows.costs.machine.network_fabric)
        return numbers * seconds[:-1], seconds[-1]

    width, each = bytes_per_param
    reduced_s, last_s = each_bucketed_s("reduce_scatter" if scatters.any() else "all_reduce", width)
    if scatters.any() and not scatters.all():
        summed_s, last_summed_s = each_bucketed_s("all_reduce", width)
        reduced_s, last_s = np.where(scatters, reduced_s, summed_s), np.where(scatters, last_s, last_summed_s)
    each_s, first_s = (np.where(shards, part, 0.0) for part in each_bucketed_s("all_gather", each))
    total_s, gathered_s, index = reduced_s.sum(axis=0), each_s.sum(axis=0), rows.grid_index
    kinds = np.concatenate([sizes.kinds for sizes in buckets.sizes])
    # (dense and expert, seconds and numbers, kinds, g); experts' are gathered behind dense ones
    split, count = len(sizes[0]), np.maximum(rows.stage_layers.stages.layer_counts[:, 0, 0], 1)[:, None]
    by_kind = np.array([
        [[part[of][kinds[of] == kind].sum(axis=0) for kind in range(len(count))] for part in (each_s, numbers)]
        for of in (slice(split), slice(split, None))
    ]) / count  # fmt: skip
    (dense_s, num_dense), (expert_s, num_experts) = by_kind
    mean_s = (dense_s + expert_s) / np.maximum(num_dense + num_experts, 1.0)  # where few layers begin with a dense one
    of_first_s = np.where(num_dense < 1.0, mean_s, dense_s / np.maximum(num_dense, 1.0))
    head_s = each_s[kinds == len(count) + 1].sum(axis=0)
    of_buckets = FirstStageBucketGathers(first_s, of_first_s, dense_s + expert_s - of_first_s, head_s)
    experts_s = np.zeros((2, len(index)))
    of_experts = split + np.flatnonzero(kinds[split:] == 0)
    if len(of_experts):  # in the forward's order
        weight = of_experts[0]
        experts_s = (np.array([reduced_s[weight], each_s[weight]]) / np.maximum(numbers[weight], 1.0))[:, index]
    reduced, gathered = (total_s[index], last_s[index]), (gathered_s[index], first_s[index])
    return reduced, gathered, of_buckets, (experts_s[0], experts_s[1])


def _beside_first_layers_experts_s(rows: GatheredRows, *, is_backward: bool) -> ArrayN:
    """What the embedding and the first layer compute ahead of its experts, or behind their backward. (n,) [s]"""
    lay = rows.stage_layers
    is_full = lay.fully_recomputed_by_chunk[lay.recompute_choice][:, 0, 0, 0] > 0
    mode = np.where(is_full, rows.full_mode_index, rows.base_mode_index)
    (forward_s, backward_s), embedding = rows.layers.attention_passes_s, rows.costs.embedding
    layers_s, own = (backward_s, embedding.backward) if is_backward else (forward_s, embedding.forward)
    return np.asarray(layers_s[mode, rows.k, 0] + own.total_s[rows.k])


def _embedding_params(rows: GatheredRows) -> ArrayN:
    """Of the embedding on one rank, of each grid of ranks. (g,) [params]"""
    return rows.workload.model.vocab * rows.workload.model.hidden / rows.grids.tp


def tied_embedding_all_reduce_s(rows: GatheredRows) -> ArrayN:
    """Megatron's all-reduce of the gradients of an embedding that the first and the last stage share. (n,) [s]"""
    model = rows.workload.model
    if rows.framework.traits.has_pytorch_modules or not model.tied_embeddings or rows.stage_layers.stages.pp == 1:
        return np.zeros(len(rows.table))
    nbytes = _embedding_params(rows) * reduced_bytes_per_param(rows)
    return collective_s("all_reduce", nbytes, rows.groups["embd"], rows.costs.machine.network_fabric)[rows.grid_index]


def num_gathers_after_optimizer(rows: GatheredRows) -> ArrayN:
    """How often Megatron gathers a stage's parameters behind the optimizer, of each grid of ranks. (g, R) [-]

    Experts that are split have an optimizer beside that of the dense parameters. When either has stepped, it gathers
    all parameters of its model chunks, dense and expert (distrib_optimizer.py, step_with_ready_grads;
    ChainedOptimizer): twice 2.3 ms in the trace of mc2-ep2-qwen30b-4l-traced.
    """
    chained = (rows.grids.ep > 1) & rows.framework.traits.chains_optimizers
    return np.asarray(1.0 + (chained[:, None] & (rows.shards.expert > 0)))


def _pipelined_fsdp(
    rows: GatheredRows, forward_s: ArrayN, backward_s: ArrayN, host_bound: HostBoundPasses | None
) -> CommunicationOutsideBlocks:
    """FSDP under pipelines: gathered once, piece by piece ahead of the first forward; reduced behind the last backward.

    A later stage's host has the pipeline's fill to gather in; the runtime of several chunks gathers two ahead. What the
    pipeline's own path goes through is in :mod:`mofa.cost.step_time.pipelined_fsdp`.
    """
    stages = rows.stage_layers.stages
    pp, vpp = stages.pp, stages.vpp
    seconds = piece_seconds(rows)
    gathers, reduces = seconds.gather_and_reduce_of_chunks_s(rows)
    gather, reduce = gathers.sum(axis=2), reduces.sum(axis=2)
    before_f, before_b = rows.sum_over_stages_ahead(forward_s), rows.sum_over_stages_ahead(backward_s)
    pieces = np.maximum(rows.stage_layers.layer_counts.sum(axis=1) / vpp, 1.0)
    slow = slowdown_of_stages(rows)
    if host_bound is not None:
        slow[host_bound.rows] = slowdown_of_passes(rows, host_bound, (forward_s + backward_s)[host_bound.rows])
    alone_f = forward_s[:, :, None] / vpp
    forward_s, backward_s = forward_s / (1 - slow), backward_s / (1 - slow)  # beside communication
    chunk_f = forward_s / vpp
    left_s = np.maximum(gather / vpp / pieces, gather / vpp - chunk_f)
    left_s = np.maximum(left_s, gather - (vpp - 1) * pp * chunk_f - chunk_f)
    gathered = max_of_array_rows(np.maximum(left_s - before_f / vpp, 0.0))
    summed = replica_all_reduce_s(rows)[0]
    written = reduce + summed
    reduced = max_of_array_rows(_after_last(written, backward_s / vpp, before_b / vpp, pp, vpp))
    hidden = np.maximum(max_of_array_rows(gather + reduce) - gathered - reduced, 0.0)
    beside = np.maximum(gather[:, 0] - gathered, 0.0) + np.maximum(reduce[:, 0] * (vpp - 1) / vpp - reduced, 0.0)
    sums = summed[:, :, None] * reduces / np.maximum(reduce, 1e-12)[:, :, None]
    if rows.schedule_record.has_closed_form:
        in_passing = gathered + slow[:, 0] * beside
        first = None
        if host_bound is not None:
            forward = host_bound.with_full_queue[0]
            first = first_forward_clock_advance(rows, host_bound.rows, seconds, forward, slow[host_bound.rows])
        once = DataParallelOncePerStep(gathers, gathers, reduces, "FSDP of pieces", sums)
        return CommunicationOutsideBlocks(
            in_passing + reduced, hidden, np.zeros_like(forward_s), once if first is not None else None,
            exposed_while_host_issues=in_passing, first_forward=first,
        )  # fmt: skip
    each = pieces[:, :, None]
    behind_first = 1.0 - 1.0 / each  # of a chunk's pieces, gathered while it computes
    lost_s = slow[:, :, None] * gathers * behind_first
    lost_s[:, :, 1:] = 0.0  # counted below
    blocking = np.maximum(gathers / each + lost_s, gathers - alone_f * behind_first)
    once = DataParallelOncePerStep(gathers, blocking, reduces, "FSDP of chunks", sums)
    lost = computing_lost_beside_gathers_s(rows, gathers[:, 0, 1:].sum(axis=1), chunk_f[:, 0], slow[:, 0])
    by_sums, chunk_b = slowdown_of_stages(rows, "dp_replicate")[:, 0], backward_s[:, 0] / vpp
    lost = lost + computing_lost_beside_reductions_s(rows, reduces[:, 0], sums[:, 0], chunk_b, slow[:, 0], by_sums)
    return CommunicationOutsideBlocks(
        lost, hidden, np.zeros_like(forward_s), once, exposed_on_path=gathered + reduced, exposed_while_host_issues=lost
    )
