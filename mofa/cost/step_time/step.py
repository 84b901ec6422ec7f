"""From blocks to a step, for candidates of one pp x vpp: stages, micro-batches, data parallelism, the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.elementwise import first_largest_index, max_of_array_rows
from mofa.blocks.tapes import layer_label
from mofa.cost.amax_reductions import amax_reduction_seconds
from mofa.cost.block.host_clock import ClockAdvance
from mofa.cost.block.tape_clock import EXPOSED
from mofa.cost.breakdown import HIDDEN_COMPONENTS, TIME_COMPONENTS
from mofa.cost.rank_rules import gradient_reducer, host_waits_at_exchanges
from mofa.cost.rows import GatheredRows
from mofa.cost.step_time.bubble import num_exchanges_waited_for, one_f_one_b_s, pipeline_s
from mofa.cost.step_time.combined_passes import PairedPasses, paired_passes
from mofa.cost.step_time.communication_outside import CommunicationOutsideBlocks
from mofa.cost.step_time.critical_path import (
    MOST_WALKED_ROUNDS,
    ComputationDurations,
    critical_path_and_host_waits_s,
    critical_path_s,
)
from mofa.cost.step_time.data_parallel import communication_outside_blocks
from mofa.cost.step_time.hand_over import hop_seconds, slowdown_beside_hops
from mofa.cost.step_time.micro_batch import (
    HostBoundPasses,
    MicroBatchPasses,
    host_s_around_exchange,
    micro_batch_passes,
)
from mofa.cost.step_time.optimizer_step import (
    gradient_norm_seconds,
    host_lead_at_step_start_s,
    optimizer_and_host_wait_seconds,
)
from mofa.cost.step_time.staggered_starts import staggered_start_saving_s

ArrayN = NDArray[np.float64]
_T = {name: i for i, name in enumerate(TIME_COMPONENTS)}
_H = {name: i for i, name in enumerate(HIDDEN_COMPONENTS)}
_OF_TAPES = [_T[name] for name in EXPOSED]


@dataclass(frozen=True)
class StepTime:
    """Time of a step: ``exposed`` (14, n) sums to it. [s]"""

    exposed: ArrayN
    hidden: ArrayN
    stage_s: ArrayN
    slowest: NDArray[np.intp]
    named_last_s: ArrayN
    """What the slowest stage's own reductions take beyond those that ``exposed`` has as data parallel, and what of pp
    and of host idle are waits for other stages. (3, n)"""


def step_time(rows: GatheredRows) -> StepTime:
    """Time of one optimizer step.

    ``m * max_r t_r + bubble``: the slowest stage runs all micro-batches, and the pipeline fills and drains through the
    others. Then what data parallelism (:mod:`mofa.cost.step_time.data_parallel`) and the optimizer leave exposed.
    """
    c, lay, table = rows.costs, rows.stage_layers, rows.table
    n = len(table)
    rowsel = np.arange(n)
    each = micro_batch_passes(rows)
    fwd, bwd = each.stage_forward_and_backward_s()
    stage_s = fwd + bwd
    slowest = first_largest_index(stage_s)
    exposed = np.zeros((len(TIME_COMPONENTS), n))
    hidden = np.zeros((len(HIDDEN_COMPONENTS), n))
    m = rows.num_micro_batches.astype(float)
    # the slowest stage's own micro-batches
    shares = lay.base_mode[rowsel, :, slowest], lay.fully_recomputed[rowsel, :, slowest]
    per_batch = rows.sum_over_layers(rows.layers.exposed_by_family_s, *shares, "nk,nkf->fn")
    per_batch_hidden = rows.sum_over_layers(rows.layers.hidden_by_family_s, *shares, "nk,nkf->fn")
    depth = rows.workload.model.num_mtp_layers
    for cost, there, times in ((c.embedding, rows.is_embedding_stage, 1), (c.head, rows.is_head_stage, 1 + depth)):
        index = np.flatnonzero(there[slowest])
        per_batch[:, index] += times * (cost.forward.exposed + cost.backward.exposed)[:, rows.k[index]]
        per_batch_hidden[:, index] += times * (cost.forward.hidden + cost.backward.hidden)[:, rows.k[index]]
    mtp_exposed, mtp_hidden = map(rows.mtp_layer_quantity, ("exposed_by_family_s", "hidden_by_family_s"))
    if mtp_exposed is not None and mtp_hidden is not None:
        there = rows.is_prediction_stage[slowest]
        per_batch += there * depth * mtp_exposed.T
        per_batch_hidden += there * depth * mtp_hidden.T
    exposed[_OF_TAPES] += m * per_batch
    saved_s = each.host_wait_saved_s
    exposed[_T["host_idle"]] -= m * (saved_s if isinstance(saved_s, float) else saved_s[rowsel, slowest])
    exposed[_T["dp"]] -= m * each.spared_at_ends_s
    if each.split_backward_extra_s is not None:  # blocks made again for each weight, or sums of one gradient
        extra_s = m * each.split_backward_extra_s[rowsel, slowest]
        exposed[_OF_TAPES] += extra_s * _split_backward_shares(rows, *shares)
    if each.copies_wait_s is not None:
        exposed[_T["memory_bound"]] += m * each.copies_wait_s[rowsel, slowest]
    hidden += m * per_batch_hidden
    pairs = paired_passes(rows, each.host_bound)
    if pairs is not None:
        exposed[_OF_TAPES] -= pairs.sum_over_step(pairs.exposed_s, slowest).T
        hidden += pairs.sum_over_step(pairs.hidden_s, slowest).T
    lead_s, sooner_s = host_lead_at_step_start_s(rows), np.zeros(n)
    outside = communication_outside_blocks(rows, fwd, bwd, m, each.host_bound, lead_s)
    exposed[_T["dp"]] += outside.exposed
    hidden[_H["dp"]] += outside.hidden
    of_others_s = _pipeline(rows, exposed, hidden, (each, pairs), slowest, m, outside, lead_s)
    if each.host_bound is not None and pairs is not None and rows.stage_layers.stages.pp == 1:
        lead_s = lead_s + outside.before_forward  # the host goes on while its device waits for the first gather
        passed_s = m * (fwd + bwd)[:, 0] - pairs.step_savings_by_rank_s[:, 0]
        exposed[_T["host_idle"]] += pairs.single_stage_passes_s(each.host_bound, m, lead_s[:, 0]) - passed_s
    elif each.host_bound is not None and rows.stage_layers.stages.pp == 1:
        index = each.host_bound.rows
        counted = stage_s[index, 0] - (each.host_bound.forward.device_s + each.host_bound.backward.device_s)[:, 0, 0]
        if each.copies_wait_s is not None:
            counted -= each.copies_wait_s[index, 0]
        behind_s = np.broadcast_to(outside.after_each_backward_s, len(m))[index]
        late_s = outside.after_late_backward_s
        first, before_s = outside.first_forward, 0.0 if outside.first_forward is None else outside.before_forward[:, 0]
        idle_s = each.host_bound.single_stage_host_wait_s(m[index], behind_s, lead_s[index, 0], late_s, first)
        exposed[_T["host_idle"], index] += idle_s - np.broadcast_to(before_s, m.shape)[index] - m[index] * counted
    elif each.host_bound is not None:
        by_step = rows.schedule_record.has_closed_form and gradient_reducer(rows) in ("FSDP by step", "none")
        walked = by_step and _walk_late_hosts(rows, exposed, each, slowest, outside)
        _catch_up(rows, exposed, each.host_bound, outside, walked, lead_s[each.host_bound.rows])
        if rows.schedule_record.has_closed_form:
            sooner_s = _start_ahead(rows, exposed, each.host_bound, outside, lead_s)
    negative_idle = np.minimum(exposed[_T["host_idle"]], 0.0)  # regained where a late host had launched gathers late
    exposed[_T["dp"]] += negative_idle
    exposed[_T["host_idle"]] -= negative_idle
    gathers_s = np.clip(outside.waited_ahead_s, -exposed[_T["dp"]], exposed[_T["host_idle"]])
    exposed[_T["dp"]] += gathers_s
    exposed[_T["host_idle"]] -= gathers_s
    exposed[_T["dp"]] += amax_reduction_seconds(rows)
    ends = optimizer_and_host_wait_seconds(rows, each)
    exposed[_T["optimizer"]] += max_of_array_rows(ends) + gradient_norm_seconds(rows)
    _stagger(rows, exposed, each, ends, m, outside, sooner_s)
    beyond_path_s = np.broadcast_to(outside.beyond_path_s, stage_s.shape)[rowsel, slowest]
    named_last_s = np.array([beyond_path_s, *of_others_s])
    return StepTime(exposed, hidden, stage_s, lay.shown.shown_stages[slowest], named_last_s)


def slowest_stages_of_micro_batch(each: MicroBatchPasses) -> NDArray[np.bool_]:
    """The stages that take longest for a micro-batch, by one of which the seconds of a step are counted.

    The closed form takes the first, whose parts are those of the others. The replay takes that of them which waits
    least for other stages. Of two stages of nearly one length both count the same, as their parts may be quite other.

    Returns
    -------
    array
        Of the stages that are shown. (n, R)
    """
    fwd, bwd = each.stage_forward_and_backward_s()
    stage_s = fwd + bwd
    return np.asarray(np.isclose(stage_s, stage_s.max(axis=1, keepdims=True), rtol=1e-12, atol=0.0))


def _split_backward_shares(rows: GatheredRows, num_plain: ArrayN, num_full: ArrayN) -> ArrayN:
    """Whose the seconds are that backwards by inputs and by weights take more than whole ones, as parts of them.

    Counted on a stage's layers, of which so many are plain and so many recomputed whole. Without any such seconds
    all is memory-bound: sums of one gradient. (len(EXPOSED), n) [-]
    """
    c, kinds = rows.costs, rows.stage_layers.stages.kinds
    more_s = np.array([
        [(c.split_backward_exposed_s[layer_label(kind, mode)] - cost.backward.exposed_with_host_far_ahead_s).T
         for kind, cost in zip(kinds, costs, strict=True)]
        for mode, costs in c.blocks.items()
    ])  # fmt: skip
    by_family = rows.sum_over_layers(more_s.transpose(0, 2, 1, 3), num_plain, num_full, "nk,nkf->fn")
    by_family = np.maximum(by_family, 0.0)
    total = by_family.sum(axis=0)
    of_sums = (np.array(EXPOSED) == "memory_bound")[:, None]
    return np.where(total > 0.0, by_family / np.where(total > 0.0, total, 1.0), of_sums)


def name_waits_of_slowest_stage(exposed: ArrayN, named_last_s: ArrayN) -> None:
    """Name what the slowest stage reduces behind its last backward, and waits for other stages, as the replay does.

    Until then its reductions are named by the stage for which all others wait, hops by those of a whole pipeline, and
    waits for hosts by those of the longest path. The rest is bubble. The step stays the same.

    Parameters
    ----------
    exposed
        Seconds of steps by component, changed in place. (TIME_COMPONENTS, n) [s]
    named_last_s
        :attr:`StepTime.named_last_s` of the same steps. (3, n) [s]
    """
    beyond_path_s, *of_others_s = named_last_s
    bubble = exposed[_T["bubble"]]
    for name, others_s in zip(("pp", "host_idle"), of_others_s, strict=True):
        moved_s = np.clip(others_s, -bubble, exposed[_T[name]])
        exposed[_T[name]] -= moved_s
        bubble += moved_s
    more_s = np.clip(beyond_path_s, -exposed[_T["dp"]], bubble)
    more_s = np.where(bubble > 0.0, more_s, 0.0)
    exposed[_T["dp"]] += more_s
    bubble -= more_s


def _pipeline(
    rows: GatheredRows,
    exposed: ArrayN,
    hidden: ArrayN,
    passes: tuple[MicroBatchPasses, PairedPasses | None],
    slowest: NDArray[np.intp],
    num_micro_batches: ArrayN,
    outside: CommunicationOutsideBlocks,
    lead_s: ArrayN,
) -> ArrayN:
    """Bubble and the hand-over of activations between stages; what of pp and of host idle are waits for other stages,
    (2, n). [s]"""
    stages, before, (each, pairs) = rows.stage_layers.stages, outside.before_forward, passes
    nothing = np.zeros((2, len(num_micro_batches)))
    if stages.pp == 1:
        exposed[_T["dp"]] += before[:, 0]
        return nothing
    schedule = rows.schedule_record
    hop, slow = hop_seconds(rows), slowdown_beside_hops(rows)
    fwd, bwd = each.stage_forward_and_backward_s()
    counted = np.arange(len(num_micro_batches)), slowest
    busy, own_gather = num_micro_batches * (fwd + bwd)[counted], before[counted]
    if pairs is not None:
        busy = busy - pairs.step_savings_by_rank_s[counted]
    num_passes = 2.0 * num_micro_batches * stages.vpp
    # in the warm-up a micro-batch comes back to its rank for every further chunk, and in the cool-down
    fill = 2.0 * (stages.pp - 1 + (stages.vpp - 1) * (stages.pp - 1 if schedule.placement == "v" else stages.pp))
    # a pass waits for one hop of its own at most, as on the replay's clock: while others send, that is bubble
    own_hops = np.minimum(fill, num_passes)
    if not schedule.has_closed_form:
        sent = own_hops * hop + slow * num_passes * hop
        plan = (rows.schedule, rows.framework.traits.runtime, stages.pp, stages.vpp)
        given = ComputationDurations(
            each.forward_s, each.backward_s, each.weights_s, hop, slow, outside.once,
            pairs=None if pairs is None else pairs.clocks,
        )  # fmt: skip
        total = critical_path_s(plan, given, rows.num_micro_batches, of=rows.stage_layers.shown.shown_index)
        late_s, own_s = np.zeros((2, len(total)))
        if each.host_bound is not None:
            index = each.host_bound.rows
            with_host = given.select_plans(index, each.host_bound.clock_advances_by_kind, lead_s[index])
            until, waited_s = critical_path_and_host_waits_s(
                plan, with_host, rows.num_micro_batches[index], of=rows.stage_layers.shown.shown_index
            )
            ahead = np.where(
                each.host_bound.waits,
                0.0,
                np.broadcast_to(outside.exposed_while_host_issues, len(num_micro_batches))[index],
            )
            late_s[index] = np.maximum(until - total[index] - ahead, 0.0)
            is_counted = slowest_stages_of_micro_batch(each)[index][:, rows.stage_layers.shown.shown_index]
            own_s[index] = max_of_array_rows(np.where(is_counted, waited_s, 0.0))
        idle = np.maximum(total - busy, 0.0)
        for name, part in (("pp", sent), ("dp", outside.exposed_on_path)):
            shown = np.minimum(part, idle)
            exposed[_T[name]] += shown
            idle = idle - shown
        exposed[_T["host_idle"]] += late_s
        exposed[_T["bubble"]] += idle
        hidden[_H["pp"]] += num_passes * hop
        return np.array([nothing[0], late_s - own_s])  # others' hosts may be late too
    fwd, bwd = rows.spread_to_all_stages(fwd), rows.spread_to_all_stages(bwd)
    # a host that a stage's wait lets get ahead, or that Megatron's exchanges hold
    rested = rows.spread_to_all_stages(each.passes_after_wait_s()) if each.host_bound is not None else None
    if host_waits_at_exchanges(rows):
        stage, timed = rows.stage_layers.shown.shown_stages[slowest], (fwd, bwd, rested)
        of_others_s = _exchanging(rows, exposed, timed, busy, num_micro_batches, before, own_gather, hop, stage)
        # the device waits for the gather then, not for the host
        named_s = np.broadcast_to(outside.issued_beside_s, before.shape)[counted]
        named_s = np.minimum(named_s, np.maximum(exposed[_T["host_idle"]], 0.0))
        exposed[_T["dp"]] += named_s
        exposed[_T["host_idle"]] -= named_s
        return of_others_s
    between_s = _exchanged_between_passes_s(stages.pp, hop)
    alone = pipeline_s(schedule, fwd, bwd, num_micro_batches, rested_s=rested, exchanged_s=between_s)
    exposed[_T["bubble"]] += alone - busy
    if np.any(before):
        before = rows.spread_to_all_stages(before)
        with_gathers = pipeline_s(
            schedule, fwd, bwd, num_micro_batches, before_s=before, rested_s=rested, exchanged_s=between_s
        )
        _count_gathers(exposed, with_gathers - alone, own_gather)
    exposed[_T["bubble"]] += (fill - own_hops) * hop
    exposed[_T["pp"]] += (own_hops + (1.0 if schedule.joins_send_and_receive else slow) * num_passes) * hop
    if not schedule.joins_send_and_receive:
        hidden[_H["pp"]] += num_passes * hop
    return nothing


def _exchanged_between_passes_s(pp: int, hop_s: ArrayN) -> ArrayN:
    """What a stage of GPipe sends and receives between two forwards, or two backwards. (n, pp) [s]

    PyTorch has one stream for all of a rank's sends and receives: what a pass hands on leaves before the next one's
    input comes, and neither is beside a pass of this rank. The ends of the pipeline only send or only receive.
    """
    stage = np.arange(pp)
    return np.asarray(hop_s[:, None] * ((stage > 0) + 1.0 * (stage < pp - 1)))


def _count_gathers(exposed: ArrayN, added_s: ArrayN, own_gather_s: ArrayN) -> None:
    """Name what gathers ahead of first forwards add to a step: a stage's own is data-parallel communication.

    What it waits for while other stages gather is bubble, as on the clock of the replay.
    """
    own_s = np.minimum(added_s, own_gather_s)
    exposed[_T["dp"]] += own_s
    exposed[_T["bubble"]] += added_s - own_s


def _exchanging(
    rows: GatheredRows, exposed: ArrayN, passes_s: tuple[ArrayN, ArrayN, ArrayN | None], busy: ArrayN,
    num_micro_batches: ArrayN, before: ArrayN, own_gather: ArrayN, hop: ArrayN, stage: NDArray[np.intp],
) -> ArrayN:  # fmt: skip
    """Megatron's 1F1B: behind every pass an exchange, and behind it the host waits for the device
    (p2p_communication.py, ``batch_p2p_sync``). Each is counted with what it receives for: the first stage has none for
    a forward, the last none for a backward. Hops are those of an inner stage and of filling the pipeline; returned is
    what of pp and of host idle the stage that is counted waits less. (2, n) [s]"""
    fwd, bwd, rested = passes_s
    pp = rows.stage_layers.stages.pp
    wait_s = rows.cluster.sync_s + host_s_around_exchange(rows)[1]
    each = (hop + wait_s)[:, None]
    receives = _received_s(rows, hop)
    given = fwd + receives[0], bwd + receives[1], num_micro_batches
    waited = (fwd + bwd if rested is None else rested) + receives[0] + receives[1]
    total = one_f_one_b_s(*given, rested_s=waited)
    if np.any(before):
        with_gathers = one_f_one_b_s(*given, before_s=rows.spread_to_all_stages(before), rested_s=waited)
        _count_gathers(exposed, with_gathers - total, own_gather)
    idle = total - busy
    share = hop / each[:, 0]
    sent = np.minimum((num_micro_batches * (1.0 + (pp > 2)) + 2.0 * (pp - 2)) * each[:, 0], idle)
    exposed[_T["pp"]] += share * sent
    exposed[_T["host_idle"]] += (1.0 - share) * sent
    exposed[_T["bubble"]] += idle - sent
    less = sent - np.minimum(num_exchanges_waited_for(pp, stage, num_micro_batches) * each[:, 0], idle)
    return np.array([share * less, (1.0 - share) * less])


MOST_WALKED = 4096
"""Passes of a micro-batch through a rank that are walked at most, of schedules that have a closed form. [-]"""


def _walk_late_hosts(
    rows: GatheredRows,
    exposed: ArrayN,
    each: MicroBatchPasses,
    slowest: NDArray[np.intp],
    outside: CommunicationOutsideBlocks,
) -> NDArray[np.bool_]:
    """Give steps of PyTorch's pipelines whose host is late the time of their own longest path.

    A host has no lead in the first forwards, which gather under FSDP, and gets one while its device waits for others.
    What the slowest stage waits for its own host along that path is host idle, the rest of the waits bubble.

    Returns
    -------
    array
        Of which late rows every round was walked: neither long steps nor those of many ranks. (late rows,)
    """
    host_bound = each.host_bound
    assert host_bound is not None
    stages, late_rows = rows.stage_layers.stages, host_bound.rows
    num_micro_batches = rows.num_micro_batches[late_rows]
    walked = np.minimum(num_micro_batches, MOST_WALKED_ROUNDS * stages.pp) * stages.pp <= MOST_WALKED
    some, index = np.flatnonzero(walked), late_rows[walked]
    if not len(some):
        return walked
    forward, backward = (_of_rows(clocks, some) for clocks in host_bound.clock_advances_by_kind)
    once = outside.once
    given = ComputationDurations(
        forward.device_s, backward.device_s, np.zeros_like(backward.device_s), hop_seconds(rows)[index],
        slowdown_beside_hops(rows)[index], None if once is None else once.select_plans(index),
        (forward, backward), None if outside.first_forward is None else _of_rows(outside.first_forward, some),
    )  # fmt: skip
    plan = (rows.schedule, rows.framework.traits.runtime, stages.pp, stages.vpp)
    shown = rows.stage_layers.shown.shown_index
    total, waited_s = critical_path_and_host_waits_s(plan, given, num_micro_batches[some], of=shown)
    turn_s = np.zeros((len(rows.table), forward.device_s.shape[1]))
    turn_s[index] = (forward.device_s + backward.device_s)[:, :, 0]
    # what rounds that are left out take may be less, where a rank's own rounds differ
    computed_s = max_of_array_rows(
        num_micro_batches[some][:, None] * turn_s[index] + rows.sum_over_stages_ahead(turn_s)[index]
    )
    missing_s = np.maximum(total, computed_s) - exposed[:, index].sum(axis=0)
    in_tapes_s = exposed[_T["host_idle"], index].copy()
    exposed[_T["bubble"], index] += np.maximum(missing_s, 0.0)
    over_s = np.maximum(-missing_s, 0.0)
    for name in ("bubble", "dp", "host_idle"):
        part = np.minimum(over_s, np.maximum(exposed[_T[name], index], 0.0))
        exposed[_T[name], index] -= part
        over_s = over_s - part
    is_counted = slowest_stages_of_micro_batch(each)[index][:, shown]
    own_s = max_of_array_rows(np.where(is_counted, waited_s, 0.0))
    passes_s = each.stage_forward_and_backward_s()[0] + each.stage_forward_and_backward_s()[1]
    held_s = (passes_s - turn_s)[index, slowest[index]]  # of each micro-batch's waits for the host, as they were named
    host_idle, bubble = exposed[_T["host_idle"], index], exposed[_T["bubble"], index]
    moved_s = in_tapes_s - num_micro_batches[some] * held_s + own_s - host_idle
    moved_s = np.clip(moved_s, -host_idle, bubble)
    exposed[_T["host_idle"], index] += moved_s
    exposed[_T["bubble"], index] -= moved_s
    return walked & (num_micro_batches <= MOST_WALKED_ROUNDS * stages.pp)


def _of_rows(clocks: ClockAdvance, some: NDArray[np.intp]) -> ClockAdvance:
    return ClockAdvance(*(np.broadcast_to(each, clocks.device_s.shape)[some] for each in clocks))


def _catch_up(
    rows: GatheredRows, exposed: ArrayN, host_bound: HostBoundPasses, outside: CommunicationOutsideBlocks,
    walked: NDArray[np.bool_] | bool, lead_s: ArrayN,
) -> None:  # fmt: skip
    """Where the host waits for nothing a step takes as long as it issues: a lead may last for many rounds, then it is
    gone, but whatever the device waits for meanwhile counts as well. Steps that were ``walked`` have that already."""
    missing_s = np.maximum(_left_to_issue_s(rows, exposed, host_bound, outside, lead_s), 0.0)
    exposed[_T["host_idle"], host_bound.rows] += np.where(host_bound.waits | walked, 0.0, missing_s)


def _start_ahead(
    rows: GatheredRows,
    exposed: ArrayN,
    host_bound: HostBoundPasses,
    outside: CommunicationOutsideBlocks,
    lead_s: ArrayN,
) -> ArrayN:
    """Take off what the first stage's first forward takes less, and with it the pipeline's filling; add what it takes
    more under a host behind its device. Returned is by how much it is sooner. (n,) [s]"""
    index = host_bound.rows
    slower_s = np.broadcast_to(outside.slower_first_forward_s, len(rows.table))[:, None]
    gather_s = outside.before_forward + outside.issued_beside_s + slower_s * rows.is_embedding_stage
    first = outside.first_forward if host_waits_at_exchanges(rows) else None
    saved_s = (
        host_bound.first_forward_savings_by_lead_s(lead_s[index], gather_s[index], first) * rows.is_embedding_stage
    ).sum(axis=1)
    exposed[_T["host_idle"], index] += np.maximum(-saved_s, 0.0)
    saved_s = np.minimum(np.maximum(saved_s, 0.0), np.maximum(exposed[_T["bubble"], index], 0.0))
    exposed[_T["bubble"], index] -= saved_s
    sooner_s = np.zeros(len(rows.table))
    sooner_s[index] = saved_s
    return sooner_s


def _left_to_issue_s(
    rows: GatheredRows, exposed: ArrayN, host_bound: HostBoundPasses, outside: CommunicationOutsideBlocks,
    lead_s: ArrayN,
) -> ArrayN:  # fmt: skip
    """By how much the host of a step issues longer than the step's parts take so far. (late rows,) [s]"""
    index = host_bound.rows
    num_micro_batches = rows.num_micro_batches[index].astype(float)
    reduced = np.broadcast_to(outside.exposed - outside.exposed_while_host_issues, len(rows.table))[index]
    issued_s = host_bound.earliest_end_by_hosts_s(rows.stage_layers.shown.shown_index, num_micro_batches, lead_s)
    return np.asarray(issued_s + reduced - exposed[:, index].sum(axis=0))


def _stagger(
    rows: GatheredRows, exposed: ArrayN, each: MicroBatchPasses, ends: ArrayN, num_micro_batches: ArrayN,
    outside: CommunicationOutsideBlocks, first_forward_sooner_s: ArrayN,
) -> None:  # fmt: skip
    """Take off what stages gain that begin a step as their own optimizer is over: of the bubble, where that is shorter
    of the longest optimizer and the gathers behind it."""
    schedule = rows.schedule_record
    if rows.stage_layers.stages.pp == 1 or not schedule.has_closed_form:
        return
    fwd, bwd = (rows.spread_to_all_stages(passes) for passes in each.stage_forward_and_backward_s())
    rested = rows.spread_to_all_stages(each.passes_after_wait_s()) if each.host_bound is not None else fwd + bwd
    if host_waits_at_exchanges(rows):
        received = _received_s(rows, hop_seconds(rows))
        fwd, bwd, rested = fwd + received[0], bwd + received[1], rested + received[0] + received[1]
    before, after = outside.before_forward, np.broadcast_to(outside.after_optimizer_s, ends.shape)
    gained = max_of_array_rows(ends) + max_of_array_rows(after) - max_of_array_rows(ends + after)
    gained = gained + staggered_start_saving_s(
        fwd, bwd, num_micro_batches, rows.spread_to_all_stages(ends + after), rested_s=rested,
        before_s=rows.spread_to_all_stages(before) if np.any(before) else None, forwards_first=schedule.forwards_first,
        first_forward_sooner_s=first_forward_sooner_s,
    )  # fmt: skip
    for name in ("bubble", "optimizer", "dp"):
        part = np.minimum(gained, exposed[_T[name]])
        exposed[_T[name]] -= part
        gained = gained - part


def _received_s(rows: GatheredRows, hop: ArrayN) -> tuple[ArrayN, ArrayN]:
    """What each stage's forward and backward take with the exchange that they receive in. (n, pp) each [s]"""
    stages = rows.stage_layers.stages
    each = (hop + rows.cluster.sync_s + host_s_around_exchange(rows)[1])[:, None]
    return each * stages.chunks_that_receive[:, 0], each * stages.chunks_that_send[:, -1]


def hand_over_bytes(rows: GatheredRows) -> ArrayN:
    """What a rank sends to the next stage for a micro-batch. (n,) [B]"""
    payload = np.asarray(rows.costs.stage_boundary_bytes[rows.k], dtype=np.float64)
    if not rows.framework.scatters_pipeline_sends:
        return payload
    return np.where(rows.table.sp, payload, payload / rows.table.tp)
