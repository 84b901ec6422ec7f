"""How long forward and backward of one micro-batch take on each chunk of each stage, with the host's lead carried over.

A host that is late in one pass gets ahead in the other, and while its device waits for a neighbour. So where any layer
is bound by the host, what a pass takes depends on how far ahead the host is when it begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import is_

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.elementwise import max_of_array_rows
from mofa.blocks.tapes import layer_label
from mofa.cost.block.host_clock import NEVER, ClockAdvance
from mofa.cost.block.tape_clock import TapeTime
from mofa.cost.rank_rules import gradient_reducer, host_waits_at_exchanges
from mofa.cost.rows import GatheredRows
from mofa.cost.step_time.fsdp_ends import time_savings_beside_others
from mofa.cost.step_time.host_copies import wait_for_host_copies_s

ArrayN = NDArray[np.float64]
IntA = NDArray[np.intp]

_BARELY = 0.01
"""A device that waits by less of a layer's time for a host that has no lead is taken not to wait. [-]"""


@dataclass(frozen=True)
class HostBoundPasses:
    """Passes of rows whose host is late in any layer, on both clocks. (late rows, R, vpp)"""

    rows: IntA
    """Positions in the table. (late rows,)"""
    forward: ClockAdvance
    backward: ClockAdvance

    waits: NDArray[np.bool_]
    """Whether the host waits for the device, in a pass or between two, and so never gets far ahead. (late rows,)"""

    with_full_queue: tuple[ClockAdvance, ClockAdvance]
    """Forward and backward with no more launches ahead than the device's queue takes."""

    split_backward: tuple[ClockAdvance, ClockAdvance] | None = None
    """Backwards by inputs and by weights, where a schedule defers weight gradients."""

    @property
    def clock_advances_by_kind(self) -> tuple[ClockAdvance, ...]:
        """Each kind of computation."""
        forward, backward = self.with_full_queue
        return (forward, *(self.split_backward or (backward,)))

    def earliest_end_by_hosts_s(self, of: IntA, num_micro_batches: ArrayN, lead_s: ArrayN) -> ArrayN:
        """When the first rank may end at the earliest, as far as hosts are concerned. (late rows,) [s]

        The host of every rank issues all that it has without a pause; the last backward goes on to the first rank. Of
        a schedule that defers weights' gradients a rank's last work is one of these, for which no other rank waits.
        ``of`` says which of the stages that are shown each one is like (pp,), ``lead_s`` how far each host is ahead as
        the step begins (late rows, R).
        """
        issue = np.sum([clocks.host_s for clocks in self.clock_advances_by_kind], axis=0).sum(axis=2)[:, of]
        backward_s = np.sum([clocks.device_s for clocks in self.clock_advances_by_kind[1:]], axis=0)[:, of, 0]
        ahead_s = 0.0 if self.split_backward is not None else np.cumsum(backward_s, axis=1) - backward_s
        return max_of_array_rows(num_micro_batches[:, None] * issue + ahead_s - lead_s[:, of])

    def single_stage_host_wait_s(
        self, num_micro_batches: ArrayN, behind_s: ArrayN, lead_s: ArrayN, behind_late_s: ArrayN | None = None,
        first_forward: ClockAdvance | None = None,
    ) -> ArrayN:  # fmt: skip
        """What the device of a single stage waits for the host in a step. (late rows,) [s]

        Parameters
        ----------
        behind_s
            What the device waits for behind each backward while the host goes on. (late rows,)
        lead_s
            How far the host is ahead as the step begins. (late rows,)
        behind_late_s
            As ``behind_s``, behind a backward whose device waits for its host all along, where it differs. (late rows,)

        Notes
        -----
        The first forward begins with a host that is ahead by ``lead_s``, passes behind with what it has got by then.
        """
        wait_s, late_wait_s = (
            seconds[:, None, None] for seconds in (behind_s, behind_s if behind_late_s is None else behind_late_s)
        )
        forward, backward = self.with_full_queue
        backward = backward._replace(
            device_s=backward.device_s + wait_s, device_behind_host_s=backward.device_behind_host_s + late_wait_s
        )
        turn = forward.followed_by(backward)
        alone_s = (self.forward.device_s + self.backward.device_s + wait_s)[:, 0, 0]
        step = ClockAdvance(*(part[:, 0, 0] for part in np.broadcast_arrays(*turn)))
        if first_forward is None:
            step = step.repeated(num_micro_batches)
        else:
            first = ClockAdvance(*(part[:, 0, 0] for part in np.broadcast_arrays(*first_forward.followed_by(backward))))
            step = first.followed_by(step.repeated(num_micro_batches - 1.0))
        ended_s = np.maximum(step.device_s, step.device_behind_host_s - lead_s)
        return np.asarray(ended_s - num_micro_batches * alone_s)

    def first_forward_s(self, lead_s: ArrayN) -> ArrayN:
        """What the device of a single stage takes for a forward whose host begins it ahead by ``lead_s``.
        (late rows,) [s]"""
        forward = self.with_full_queue[0]
        return np.asarray(np.maximum(forward.device_s[:, 0, 0], forward.device_behind_host_s[:, 0, 0] - lead_s))

    def last_backward_s(
        self, num_micro_batches: ArrayN, lead_s: ArrayN, first_forward: ClockAdvance | None = None
    ) -> ArrayN:
        """What the device of a single stage takes for a step's last backward, from the last forward's end on.

        Parameters
        ----------
        lead_s
            How far the host is ahead as the step begins. (late rows,) [s]

        Returns
        -------
        ArrayN
            (late rows,) [s]
        """
        forward, backward = (
            ClockAdvance(*(np.broadcast_to(part, clocks.device_s.shape)[:, 0, 0] for part in clocks))
            for clocks in self.with_full_queue
        )
        if first_forward is None:
            until_last = forward.followed_by(backward).repeated(num_micro_batches - 1.0).followed_by(forward)
        else:
            first = ClockAdvance(*(np.asarray(part)[:, 0, 0] for part in first_forward[:4]))
            until_last = first.followed_by(backward.followed_by(forward).repeated(num_micro_batches - 1.0))
        ends = [
            np.maximum(clocks.device_s, clocks.device_behind_host_s - lead_s)
            for clocks in (until_last, until_last.followed_by(backward))
        ]
        return np.asarray(ends[1] - ends[0])

    def passes_between_exchanges_s(self, first: NDArray[np.bool_], last: NDArray[np.bool_]) -> tuple[ArrayN, ...]:
        """Forward and backward of 1F1B's steady state, and both of a stage that had to wait. (late rows, R, 1) each [s]

        The host waits for the device at every exchange. Both clocks begin together behind an exchange, and what is
        handed on is there once both have ended. The ``first`` stage goes from a backward on to the next forward, the
        ``last`` from a forward to its backward. (R,)
        """
        forward, backward = self.with_full_queue
        ended = [clocks.both_ended_s for clocks in (forward, backward)]
        before, behind = (
            backward.followed_by(forward).both_ended_s - ended[1],
            forward.followed_by(backward).both_ended_s - ended[0],
        )
        steady = np.where(first[:, None], before, ended[0]), np.where(last[:, None], behind, ended[1])
        return *steady, ended[0] + steady[1]

    def first_forward_savings_by_lead_s(
        self, lead_s: ArrayN, gather_s: ArrayN, first_forward: ClockAdvance | None = None
    ) -> ArrayN:
        """What the first forward takes less by ``lead_s``, the lead of its host as the step begins. (late rows, R) [s]

        ``gather_s`` is what its device waits for a gather meanwhile, whose end is no sooner; ``first_forward`` the
        first stage's forward with gathers in it, where the host launches them on the way. (late rows, R) [s]
        """
        forward = self.with_full_queue[0]
        behind_device_s = gather_s[:, :, None] + np.maximum(forward.device_s, forward.host_behind_device_s)
        behind_host_s = np.maximum(forward.device_behind_host_s, forward.host_s)
        if first_forward is not None:
            behind_device_s[:, :1] = np.maximum(first_forward.device_s, first_forward.host_behind_device_s)
            behind_host_s = np.broadcast_to(behind_host_s, behind_device_s.shape).copy()
            behind_host_s[:, :1] = np.maximum(first_forward.device_behind_host_s, first_forward.host_s)
        sooner_s = np.maximum(behind_device_s, behind_host_s - lead_s[:, :, None])
        return np.asarray((np.maximum(behind_device_s, behind_host_s) - sooner_s)[:, :, 0])

    def gather_s_beside_host_issue(self, gather_s: ArrayN, last: NDArray[np.bool_]) -> ArrayN:
        """How much of a gather ahead of a forward the host issues passes beside, and so makes them no later.

        Parameters
        ----------
        gather_s
            What the device waits for while the host goes on. (late rows, R) [s]
        last
            The stage that goes on from its forward to that one's backward, without an exchange in between. (R,)

        Returns
        -------
        ArrayN
            (late rows, R) [s]

        Notes
        -----
        Both clocks begin together. A forward of ``F`` seconds that a late host takes, and of ``D`` on the device, ends
        after ``max(F, gather + D)``, not after ``gather + F``.
        """
        wait_s = gather_s[:, :, None]
        nothing = np.zeros_like(wait_s)
        forward, backward = self.with_full_queue
        turn = forward.followed_by(backward)
        waits = ClockAdvance(wait_s, nothing + NEVER, nothing + NEVER, nothing)
        later_s = [waits.followed_by(passes).both_ended_s - passes.both_ended_s for passes in (forward, turn)]
        return np.asarray((wait_s - np.where(last[:, None], later_s[1], later_s[0]))[:, :, 0])

    def lead_behind_last_backward_s(self) -> ArrayN:
        """How far the host is ahead behind the last backward, of the first chunk. (late rows, R) [s]

        Both clocks begin a forward and its backward together.
        """
        turn = self.with_full_queue[0].followed_by(self.with_full_queue[1])
        ended = np.maximum(turn.device_s, turn.device_behind_host_s) - np.maximum(
            turn.host_behind_device_s, turn.host_s
        )
        return np.asarray(np.maximum(ended, 0.0)[:, :, 0])

    def device_waits_for_host_s(self) -> tuple[ArrayN, ArrayN]:
        """What the device waits for the host in a forward and in a backward that take turns. (late rows, R, vpp) [s]

        What a turn of both takes more than the device does is shared by how late the host is in either. Nothing where
        the host waits for nothing, as then the whole step counts.
        """
        forward, backward = self.forward, self.backward
        turn = self.with_full_queue[0].followed_by(self.with_full_queue[1])
        wait_s = np.maximum(turn.repetition_s - forward.device_s - backward.device_s, 0.0)
        wait_s *= self.waits[:, None, None]
        forward_s, backward_s = (np.maximum(each.host_s - each.device_s, 1e-12) for each in (forward, backward))
        return wait_s * forward_s / (forward_s + backward_s), wait_s * backward_s / (forward_s + backward_s)


@dataclass(frozen=True)
class MicroBatchPasses:
    """What one micro-batch takes on each chunk of each stage. (n, R, vpp) [s]

    Where the pipeline's walk carries the host's clock, passes are those of a host far ahead. Elsewhere they have what a
    turn of forward and backward takes more.
    """

    forward_s: ArrayN
    backward_s: ArrayN
    weights_s: ArrayN
    """The part of the backward that makes weights' gradients."""
    host_wait_saved_s: ArrayN | float
    """What layers by themselves wait more for the host than passes do, which carry its lead over. (n, R) [s]"""
    host_bound: HostBoundPasses | None
    """None where no row's host is late."""
    waited_s: ArrayN | None = None
    """Forward and backward of a stage that had to wait for others, where known. (n, R) [s]"""
    split_backward_extra_s: ArrayN | None = None
    """What backwards by inputs and by weights take more than undivided ones. (n, R) [s]"""
    copies_wait_s: ArrayN | None = None
    """What backwards wait for copies to the host, of the first chunk. (n, R) [s]"""
    spared_at_ends_s: ArrayN | float = 0.0
    """What both take less than layers by themselves, as FSDP gathers and reduces the ends of the model. (n,) [s]"""

    def stage_forward_and_backward_s(self) -> tuple[ArrayN, ArrayN]:
        """Forward and backward of all chunks of a stage. (n, R) each [s]"""
        return self.forward_s.sum(axis=2), self.backward_s.sum(axis=2)

    def passes_after_wait_s(self) -> ArrayN:
        """Forward and backward of all chunks of a stage that had to wait for others: behind a host that is far ahead,
        or at an exchange. (n, R) [s]"""
        if self.waited_s is not None:
            return self.waited_s
        rested: ArrayN = (self.forward_s + self.backward_s).sum(axis=2)
        if self.host_bound is not None:
            device_s = self.host_bound.forward.device_s + self.host_bound.backward.device_s
            rested[self.host_bound.rows] = device_s.sum(axis=2)
        return rested


def micro_batch_passes(rows: GatheredRows) -> MicroBatchPasses:
    """What one micro-batch takes on every chunk of every stage."""
    passes = _passes(rows)
    if not rows.framework.offloaded_activations.offloads_any:
        return passes
    wait_s = wait_for_host_copies_s(rows, *passes.stage_forward_and_backward_s())
    backward_s = passes.backward_s.copy()
    backward_s[:, :, 0] += wait_s
    return replace(passes, backward_s=backward_s, copies_wait_s=wait_s)


def _passes(rows: GatheredRows) -> MicroBatchPasses:
    """The passes of every chunk, whose activations are there when they are read."""
    c = rows.costs
    forward = _over_chunks(rows, "forward_s", c.embedding.forward.total_s, c.head.forward.total_s)
    backward = _over_chunks(rows, "backward_s", c.embedding.backward.total_s, c.head.backward.total_s)
    weights = np.zeros_like(forward)
    splits = rows.schedule_record.defers_weight_gradients
    if splits:
        weights = _over_chunks(rows, "weight_backward_s", c.embedding.backward.weights, c.head.backward.weights)
    spared = time_savings_beside_others(rows)
    for passes, spared_s in zip((forward, backward), spared, strict=True):
        passes[:, 0, 0] -= spared_s
    index = np.flatnonzero(_is_host_bound(rows))
    if not len(index):
        return MicroBatchPasses(forward, backward, weights, 0.0, None, spared_at_ends_s=sum(spared))
    (forward_clocks, queued_forward), (backward_clocks, queued_backward) = (
        [clock.with_device_sooner(spared_s[index, None, None]) for clock in _clocks_of(rows, index, direction)]
        for direction, spared_s in zip(("forward", "backward"), spared, strict=True)
    )
    clocks = forward_clocks, backward_clocks
    waits = np.maximum(*(clock.host_behind_device_s for clock in clocks)).max(axis=(1, 2)) > NEVER / 2
    # a single stage's passes follow each other, and in 1F1B Megatron's host waits behind every exchange
    exchanges = host_waits_at_exchanges(rows)
    waits |= rows.stage_layers.stages.pp == 1 or exchanges
    queued = queued_forward, queued_backward
    host = HostBoundPasses(
        index, *clocks, waits, queued, _split_backward_clocks(rows, index, clocks[1]) if splits else None
    )
    before, waited = (forward + backward).sum(axis=2), None
    extra_s: ArrayN | None = None
    forward[index], backward[index] = host.forward.device_s, host.backward.device_s
    if host.split_backward is not None:
        by_inputs, by_weights = host.split_backward
        both = by_inputs.device_s + by_weights.device_s
        extra_s = np.zeros_like(before)
        extra_s[index] = (both - backward[index]).sum(axis=2)
        before += extra_s
        backward[index], weights[index] = both, by_weights.device_s
    elif exchanges:
        waited = before.copy()
        ends = rows.is_embedding_stage > 0, rows.is_last_stage > 0
        forward[index], backward[index], both = host.passes_between_exchanges_s(*ends)
        waited[index] = both[:, :, 0]
    elif rows.schedule_record.has_closed_form and not rows.schedule_record.pairs_passes:
        held_forward, held_backward = host.device_waits_for_host_s()
        forward[index] += held_forward
        backward[index] += held_backward
    return MicroBatchPasses(
        forward, backward, weights, before - (forward + backward).sum(axis=2), host, waited, extra_s,
        spared_at_ends_s=sum(spared),
    )  # fmt: skip


def _is_host_bound(rows: GatheredRows) -> NDArray[np.bool_]:
    """Where issuing any of a row's layers takes longer than computing it, with what is handed on behind it.

    All rows where backwards by inputs and by weights are more than whole ones, or passes run in pairs. Under FSDP's
    pipelines also rows whose host waits for the device in a layer: it gathers the next one's parameters no earlier.
    (n,)
    """
    if rows.schedule_record.defers_weight_gradients or rows.schedule_record.pairs_passes:
        return np.ones(len(rows.table), dtype=bool)
    layers, lay = rows.layers, rows.stage_layers
    host_bound = np.zeros(layers.forward_s.shape, dtype=bool)  # modes, K, kinds
    chunk = max(float(lay.stages.layer_counts.sum(axis=0).min()), 1.0)
    handed_s = sum(host_s_around_exchange(rows)) / chunk if not rows.schedule_record.joins_send_and_receive else 0.0
    gathers = rows.schedule_record.has_closed_form and gradient_reducer(rows) == "FSDP by step"
    for clocks in (layers.forward_clocks, layers.backward_clocks):
        if gathers:
            host_bound |= clocks[..., 2] > NEVER / 2
        host_bound |= (clocks[..., 3] + handed_s > clocks[..., 0]) | (clocks[..., 1] > (1.0 + _BARELY) * clocks[..., 0])
    if not host_bound.any():
        return np.zeros(len(rows.table), dtype=bool)
    plain, full = (host_bound[mode, rows.k] for mode in (rows.base_mode_index, rows.full_mode_index))
    bound_stages = plain & (lay.base_mode > 0).any(axis=2) | full & (lay.fully_recomputed > 0).any(axis=2)
    return np.asarray(bound_stages.any(axis=1))


def _over_chunks(rows: GatheredRows, name: str, first: ArrayN, head: ArrayN) -> ArrayN:
    """Something of the layers summed over each chunk, with that of the embedding and the heads. (n, R, vpp)"""
    stages, shown = rows.stage_layers.stages, rows.stage_layers.shown
    depth, lay = rows.workload.model.num_mtp_layers, rows.stage_layers
    plain, full = rows.in_base_and_full_mode(getattr(rows.layers, name))
    chunks = np.einsum("krc,nk->nrc", stages.layer_counts[:, shown.shown_stages], plain)
    for kind in range(len(stages.kinds) if rows.stage_layers.any_fully_recomputed else 0):
        num_full = rows.stage_layers.fully_recomputed_by_chunk[:, kind][rows.stage_layers.recompute_choice]
        chunks += num_full * (full - plain)[:, kind, None, None]
    chunks[:, 0, 0] += first[rows.k]
    chunks[:, lay.head_stage_index, -1] += (1 + depth) * head[rows.k]
    mtp = rows.mtp_layer_quantity(name)
    if mtp is not None:
        chunks[:, lay.prediction_stage_index, -1] += depth * mtp
    return np.asarray(chunks)


def _clocks_of(rows: GatheredRows, index: IntA, direction: str) -> tuple[ClockAdvance, ClockAdvance]:
    """The forward or the backward of each chunk of the rows ``index``, and the same as the device's queue takes it."""
    name, c = f"{direction}_clocks", rows.costs
    ends: list[TapeTime] = [getattr(cost, direction) for cost in (c.embedding, c.head)]
    grid: ArrayN = getattr(rows.layers, name)
    return _clocks(
        rows, index, grid, [end.clocks for end in ends], rows.mtp_layer_quantity(name), forward=direction == "forward"
    )


def _split_layer_clocks(rows: GatheredRows) -> tuple[ArrayN, ArrayN]:
    """The clocks of layers' backwards by inputs and by weights; those of whole ones are
    :class:`mofa.cost.layer_arrays.LayerArrays`'s."""
    c, kinds = rows.costs, rows.stage_layers.stages.kinds
    both = np.array([[c.split_backward_clock_advances[layer_label(kind, mode)] for kind in kinds] for mode in c.blocks])
    grids = both.transpose(2, 0, 4, 1, 3)  # modes, kinds, parts, 4, K
    return grids[0], grids[1]


def _split_backward_clocks(rows: GatheredRows, index: IntA, unsplit: ClockAdvance) -> tuple[ClockAdvance, ClockAdvance]:
    """The backward of each chunk of the rows ``index`` by inputs and by weights; the first stage has no input to
    differentiate by, and does all of it with its weights'."""
    grids, c = _split_layer_clocks(rows), rows.costs
    parts = [
        _clocks(
            rows,
            index,
            grid,
            [c.split_backward_clock_advances[end][n] for end in ("embedding", "head")],
            None,
            forward=False,
        )[1]
        for n, grid in enumerate(grids)
    ]
    for none, by_weights, both, nothing in zip(*parts, unsplit, (0.0, NEVER, NEVER, 0.0, 0.0), strict=True):
        none[:, 0, 0], by_weights[:, 0, 0] = nothing, both[:, 0, 0]
    return parts[0], parts[1]


def _clocks(
    rows: GatheredRows, index: IntA, grid: ArrayN, ends: Sequence[ArrayN], mtp: ArrayN | None, *, forward: bool
) -> tuple[ClockAdvance, ClockAdvance]:  # fmt: skip
    """Passes of each chunk of the rows ``index``: its layers by kind, between its ends.

    First by a host that may be ahead as far as it likes, then as far as the device's queue takes.
    """
    stages, shown, model = rows.stage_layers.stages, rows.stage_layers.shown, rows.workload.model
    counts = stages.layer_counts[:, shown.shown_stages].astype(float)
    num_full = rows.stage_layers.fully_recomputed_by_chunk[rows.stage_layers.recompute_choice[index]]
    first, predictions, heads = np.zeros((3, 1, *counts.shape[1:]))
    first[0, 0, 0] = 1.0
    predictions[0, rows.stage_layers.prediction_stage_index, -1] = model.num_mtp_layers
    heads[0, rows.stage_layers.head_stage_index, -1] = 1 + model.num_mtp_layers
    k, plain, full = rows.k[index], rows.base_mode_index[index], rows.full_mode_index[index]
    period = _period_of_recomputed(rows, index)
    ordered = [ClockAdvance(*ends[0][:, k]).with_chunk_axes().repeated(first)]
    for kind in range(len(stages.kinds)):
        layer, num_plain = ClockAdvance(*grid[plain, k, kind].T).with_chunk_axes(), counts[kind] - num_full[:, kind]
        if not rows.stage_layers.any_fully_recomputed:
            ordered.append(layer.repeated(num_plain))
            continue
        recomputed = ClockAdvance(*grid[full, k, kind].T).with_chunk_axes()
        ordered += _in_order(layer, recomputed, num_plain, num_full[:, kind], period, forward=forward)
    if mtp is not None:
        ordered.append(ClockAdvance(*mtp[index].T).with_chunk_axes().repeated(predictions))
    ordered.append(ClockAdvance(*ends[1][:, k]).with_chunk_axes().repeated(heads))
    passed = ordered if forward else ordered[::-1]
    through_queue = [piece.limited_by_launch_queue() for piece in passed]
    fits = all(map(is_, through_queue, passed))  # as nearly always
    ahead = reduce(ClockAdvance.followed_by, passed)
    queued = ahead if fits else reduce(ClockAdvance.followed_by, through_queue)
    behind_s, ahead_s = host_s_around_exchange(rows)
    # after 1F1B's exchanges the host waits for the device: what it does then is on the pipeline's path
    only_host = behind_s + (ahead_s if not rows.schedule_record.joins_send_and_receive else 0.0)
    if not only_host:
        return ahead, queued
    handed = ClockAdvance(*(np.full((1, 1, 1), x) for x in (0.0, NEVER, NEVER, only_host)))
    both = ahead.followed_by(handed)
    return both, both if fits else queued.followed_by(handed)


def _period_of_recomputed(rows: GatheredRows, index: IntA) -> ArrayN:
    """Of how many layers the last is recomputed whole; 0 where the first of a chunk are. (late rows, 1, 1) [-]"""
    modes = rows.table.recompute_modes
    period = np.array([float(spec.layers or 1) if spec.kind == "every" else 0.0 for spec in modes])
    return np.asarray(period[rows.table.recompute[index], None, None])


def _in_order(
    plain: ClockAdvance, recomputed: ClockAdvance, num_plain: ArrayN, num_recomputed: ArrayN, period: ArrayN, *,
    forward: bool,
) -> list[ClockAdvance]:  # fmt: skip
    """A kind's layers in the order of a forward: recomputed ones ahead (Megatron's block method), or each last of a
    ``period``. Their order decides how far the host is ahead when the device gets to a layer.

    Of a period too few plain layers are left for, recomputed ones come ahead; plain ones that fill none come behind.
    """
    if not np.any(period):
        return [recomputed.repeated(num_recomputed), plain.repeated(num_plain)]
    others = np.maximum(period - 1.0, 0.0)
    periods = np.where(period > 0.0, num_recomputed, 0.0)
    periods = np.where(others > 0.0, np.minimum(periods, num_plain // np.maximum(others, 1.0)), periods)
    between = plain.repeated(np.broadcast_to(others, num_plain.shape))
    unit = between.followed_by(recomputed) if forward else recomputed.followed_by(between)
    return [
        recomputed.repeated(num_recomputed - periods),
        unit.repeated(periods),
        plain.repeated(num_plain - periods * others),
    ]


def host_s_around_exchange(rows: GatheredRows) -> tuple[float, float]:
    """What Megatron's host does behind a forward or backward of a stage, up to the exchange, and ahead of the next one.
    [s]

    Scales of losses, the exchange's tensors and its launch; ``backward`` is called from Python, tensors that were sent
    are let go, the batch is fetched (pipeline_parallel/schedules.py, p2p_communication.py).
    """
    if rows.framework.traits.has_pytorch_modules or rows.stage_layers.stages.pp == 1:
        return 0.0, 0.0
    host, slowest = rows.cluster.gpu.curves.host, rows.cluster.slowest_host_factor
    return slowest * host.exchange_s.value, slowest * host.pass_start_s.value
