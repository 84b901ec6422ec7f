"""A training step on the clock: every rank of a pipeline computes its tapes, sends, reduces and steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from mofa.blocks.work import Collective, Work
from mofa.cost.amax_reductions import amax_reduction_seconds
from mofa.cost.block.streams import OWN_ORDER
from mofa.cost.block.tape_clock import EXPOSED
from mofa.cost.breakdown import HIDDEN_COMPONENTS, TIME_COMPONENTS
from mofa.cost.estimate import TableEstimator
from mofa.cost.rank_spec import RankSpec
from mofa.cost.rows import GatheredRows
from mofa.cost.step_time.data_parallel import tied_embedding_all_reduce_s
from mofa.cost.step_time.hand_over import hop_seconds, slowdown_beside_hops
from mofa.cost.step_time.micro_batch import host_s_around_exchange, micro_batch_passes
from mofa.cost.step_time.optimizer_step import (
    GRADIENT_NORM_BYTES,
    gradient_norm_seconds,
    host_lead_at_step_start_s,
    optimizer_and_host_wait_seconds,
)
from mofa.cost.step_time.step import slowest_stages_of_micro_batch
from mofa.replay.garbage_collection import without_garbage_collection
from mofa.replay.rank.from_estimator import gathered_row_of_strategy
from mofa.replay.time.computation_tapes import PlanTapes
from mofa.replay.time.data_parallel import DataParallelSteps, data_parallel_steps
from mofa.replay.time.extrapolate import InsertedRounds, insert_rounds, shorter_steps_to_play
from mofa.replay.time.kernel_runs import FAMILY
from mofa.replay.time.pipeline import ExchangeSpans, play_on_ranks
from mofa.replay.time.rank_clock import ClockInputsOfPlan, RankTimeline
from mofa.replay.time.send_recv import NumberedExchanges, match_exchanges
from mofa.replay.time.stream_clocks import StreamClocks
from mofa.replay.time.time_replayed import Computation, ReplayedTime, Transfer
from mofa.schedules import Order, Placement, Program, Runtime, computation_order_of, program_with_exchanges
from mofa.schedules.order_check import OrderError, check_program
from mofa.schedules.point_to_point import overlapped_exchanges

PP, DP = FAMILY["pp"], FAMILY["dp"]


def replay_step_time(
    estimator: TableEstimator, *, detail: bool = True, variants: Sequence[TableEstimator] = (), jitter: float = 0.0,
    seed: int = 0, order: Order | None = None, watched: frozenset[tuple[int, int]] = frozenset(), cached: bool = True,
    spans: bool = True, paced: Sequence[TableEstimator] = (),
) -> ReplayedTime:  # fmt: skip
    """Play a training step of one strategy on the clocks of its pipeline ranks.

    Parameters
    ----------
    detail
        Whether sends and receives are kept.
    variants
        The strategy under other routing loads: micro-batch ``i`` takes the one at ``i`` modulo their number.
    jitter
        Standard deviation of the logarithm of each computation's seconds, drawn per rank and micro-batch. [-]
    order
        Another order of computations than the schedule's; its hand-overs run beside computing.
    watched
        Ranks and micro-batches all of whose ops are kept.
    cached
        Whether a computation that begins like an earlier one is looked up; the result is the same.
    spans
        Whether all computations are kept.
    paced
        The strategy on the GPUs of each pipeline rank, where those have paces of their own
        (:mod:`mofa.replay.time.drawn_stragglers`); without variants.

    Returns
    -------
    ReplayedTime
        The step, from one gradient norm, at which all ranks meet, to the next. [s]

    Notes
    -----
    The ranks of a tensor, context, expert or data parallel group are alike but for routing; the rank played is the one
    whose experts got the most tokens in every layer, for which the others wait at the next all-to-all. All compute at
    the clock that the wait of the slowest leaves it by the closed form (:mod:`mofa.cost.step_time.power_averaging`).

    Raises
    ------
    OrderError
        If an order can't be; the message names the op that waits and for what.
    """
    estimator = estimator.at_power_limited_clock
    rows = gathered_row_of_strategy(estimator)
    stages, fw = rows.stage_layers.stages, rows.framework
    num = int(rows.num_micro_batches[0])
    tapes = tuple(PlanTapes.from_rows(gathered_row_of_strategy(e.at_power_limited_clock)) for e in variants) or (
        PlanTapes.from_rows(rows),
    )
    plan = ClockInputsOfPlan(
        rows, tapes, _hop_seconds(rows), float(slowdown_beside_hops(rows)[0]),
        estimator.rank_specs[0].schedule.waits_at_exchanges, host_s_around_exchange(rows), _optimizer_seconds(rows),
        {} if cached else None, watched, jitter, seed,
    )  # fmt: skip
    paces = [replace(plan, tapes=(PlanTapes.from_rows(gathered_row_of_strategy(e)),), cache={}) for e in paced]
    plain = cached and order is None and not (detail or variants or watched or jitter or paced)
    with without_garbage_collection():
        for inserted in shorter_steps_to_play(rows.schedule_record, stages.pp, stages.vpp, num) if plain else ():
            wiring = _wiring(rows.schedule, fw.traits.runtime, stages.pp, stages.vpp, inserted.num_played)
            ranks = _ranks(plan, estimator.rank_specs, wiring.program.order, inserted)
            play_on_ranks(wiring, ranks, plan.hop_s)
            if insert_rounds(inserted, ranks, spans):
                return _finish(plan, ranks, None, spans)
        if order is None:
            wiring = _wiring(rows.schedule, fw.traits.runtime, stages.pp, stages.vpp, num)
        else:
            wiring = match_exchanges(_own(order, stages.pp, stages.vpp, num, stages.placement))
        ranks = _ranks(plan, estimator.rank_specs, wiring.program.order, paces=paces)
        flights = play_on_ranks(wiring, ranks, plan.hop_s)
        return _finish(plan, ranks, flights if detail else None, spans)


def _ranks(
    plan: ClockInputsOfPlan, specs: Sequence[RankSpec], order: Order, inserted: InsertedRounds | None = None,
    paces: Sequence[ClockInputsOfPlan] = (),
) -> list[RankTimeline]:  # fmt: skip
    """The ranks in front of a step, each as much later as its optimizer is, and each on ``paces`` of its own if any."""
    rows = plan.rows
    sync_s = rows.cluster.sync_s
    own_order = any(line.op is not None and line.op.stream in OWN_ORDER for b in plan.tapes for d in b.resolved.values()
                    for line in d.lines) or rows.mode.pipelined  # fmt: skip
    ranks = []
    for r, spec in enumerate(specs):
        of_rank = paces[r] if paces else plan
        extra = data_parallel_steps(rows, of_rank.tapes[0], spec, order, of_rank.shared)
        marked = (
            frozenset(inserted.computations_that_begin_rounds(order, r)) if inserted is not None else frozenset[int]()
        )
        ranks.append(RankTimeline(of_rank, order, spec, extra, StreamClocks(sync_s, own_order=own_order), marked))
    ends = _ends(plan, ranks)
    leads = np.broadcast_to(host_lead_at_step_start_s(rows), (1, len(ranks)))[0].tolist()
    for rank, seconds, lead_s in zip(ranks, ends, leads, strict=True):
        rank.clock.compute = seconds - min(ends)
        rank.clock.host = rank.clock.compute - lead_s
    return ranks


def _ends(plan: ClockInputsOfPlan, ranks: Sequence[RankTimeline]) -> list[float]:
    """How long each rank's optimizer and what follows it take. [s]"""
    return [
        seconds + rank.data_parallel.after_optimizer_s for seconds, rank in zip(plan.optimizer_s, ranks, strict=True)
    ]


@lru_cache(maxsize=8)
def _wiring(schedule: str, runtime: Runtime, pp: int, vpp: int, num_micro_batches: int) -> NumberedExchanges:
    return match_exchanges(
        program_with_exchanges(computation_order_of(schedule, runtime, pp, vpp, num_micro_batches), schedule, runtime)
    )


def _own(order: Order, pp: int, vpp: int, num_micro_batches: int, placement: Placement) -> Program:
    """The sends and receives of an order that no framework made: beside its computations, on a stream for each way."""
    has, wants = (order.pp, order.vpp, order.num_micro_batches), (pp, vpp, num_micro_batches)
    if has != wants:
        raise OrderError(
            f"the order has {has[0]} ranks, {has[1]} chunks and {has[2]} micro-batches, the strategy "
            f"{wants[0]}, {wants[1]} and {wants[2]}; give one for the strategy"
        )
    if order.placement != placement:
        raise OrderError(
            f"the order places chunks in a {order.placement}, the strategy in a {placement}; give one for it"
        )
    program = overlapped_exchanges(order)
    check_program(program)
    return program


def _finish(
    plan: ClockInputsOfPlan, players: Sequence[RankTimeline], flights: ExchangeSpans | None, spans: bool
) -> ReplayedTime:
    rows, optimizer = plan.rows, plan.optimizer_s
    last = _ends(plan, players)
    ends, tails = [], []
    for player in players:
        clock = player.clock
        player.restore_work_left_by_last_computation()
        clock.reset_counts()
        clock.watch = player.recorder if player.keeps_all_ops else None
        clock.play_steps(player.data_parallel.at_step_end)
        clock.wait_for_all_streams(DP)
        tails.append(np.array(clock.exposed_side_stream_idle_late_s()))
        ends.append(clock.compute)
    tied = float(tied_embedding_all_reduce_s(rows)[0])
    meet = max(ends)
    if tied:
        with_ends = (seconds for seconds, player in zip(ends, players, strict=True) if player.spec.place.has_model_end)
        meet = max(meet, max(with_ends) + tied)
    norm, amaxes = float(gradient_norm_seconds(rows)[0]), float(amax_reduction_seconds(rows)[0])
    step = meet + amaxes + norm + max(last) - (max(last) - min(last))
    shown: list[dict[str, float]] = []
    hiddens: list[dict[str, float]] = []
    late_issues: list[dict[str, float]] = []
    for r, player in enumerate(players):
        counts = player.exposed_side_stream_idle_late_s() + tails[r]
        both = tied if player.spec.place.has_model_end else 0.0
        drain = meet - ends[r] - both
        player.idle["drain"] += drain
        exposed = dict(zip(EXPOSED, counts[0].tolist(), strict=True))
        exposed["pp"] += player.pp_s
        exposed["dp"] += player.data_parallel.after_optimizer_s + both + amaxes
        exposed["optimizer"] += optimizer[r] + norm
        exposed["bubble"] = player.bubble_s + drain
        shown.append({name: max(exposed[name], 0.0) for name in TIME_COMPONENTS})
        late_issues.append(dict(zip(EXPOSED, counts[3].tolist(), strict=True)))
        hidden = {
            name: max(float(counts[1][FAMILY[name]] - counts[2][FAMILY[name]]), 0.0) for name in HIDDEN_COMPONENTS
        }
        hidden["pp"] += player.hidden_pp_s
        hiddens.append(hidden)
        for name in (*HIDDEN_COMPONENTS, "host_idle"):
            player.idle[name] = float(counts[2][FAMILY[name]])
        start = meet + amaxes + norm
        if (recorder := player.clock.watch) is not None:
            recorder.add_end_of_step(meet - both, _end_of_step(both, amaxes, norm, optimizer[r], player.data_parallel))
        player.spans.append(("O", 0, 0, start, start + optimizer[r] + player.data_parallel.after_optimizer_s))
        assert abs(sum(shown[-1].values()) - step) < 1e-6 * step, (sum(shown[-1].values()), step)
    step = sum(min(shown, key=lambda parts: parts["bubble"]).values())
    counted = slowest_stages_of_micro_batch(micro_batch_passes(rows))[0, rows.stage_layers.shown.shown_index]
    slowest = min(np.flatnonzero(counted).tolist(), key=lambda r: (shown[r]["bubble"], r))
    for parts, late_s in zip(shown, late_issues, strict=True):
        _name_late_issue(parts, late_s)
    return ReplayedTime(
        step, shown[slowest], hiddens[slowest], slowest, tuple(shown), tuple(p.idle for p in players),
        tuple(tuple(map(Computation._make, p.spans)) for p in players) if spans else (),
        _transfers(flights, len(players)),
        tuple(() if p.recorder is None else tuple(p.recorder.ops) for p in players),
        tuple(() if p.recorder is None else tuple(p.recorder.ops_of_computations) for p in players),
    )  # fmt: skip


def _end_of_step(
    tied_s: float, amaxes_s: float, norm_s: float, optimizer_s: float, data_parallel: DataParallelSteps
) -> list[tuple[str, str, float, tuple[Work, ...]]]:
    """What a rank does when all have met: name, family, seconds and what is sent, where that is known."""
    return [
        ("all-reduce of the tied embedding", "dp", tied_s, (Collective("all_reduce", "embd", np.nan),)),
        ("reductions of largest elements", "dp", amaxes_s, (Collective("all_reduce", "world", np.nan),)),
        ("gradient norm", "optimizer", norm_s, (Collective("all_reduce", "world", GRADIENT_NORM_BYTES),)),
        ("optimizer", "optimizer", optimizer_s, ()),
        ("gathering of parameters", "dp", data_parallel.after_optimizer_s, tuple(data_parallel.after_optimizer)),
    ]


def _name_late_issue(exposed: dict[str, float], late_s: dict[str, float]) -> None:
    """Call host idle what a collective was waited for only because the host issued it late. Changed in place. [s]"""
    for family, seconds in late_s.items():
        moved_s = min(seconds, exposed[family])
        exposed[family] -= moved_s
        exposed["host_idle"] += moved_s


def _transfers(flights: ExchangeSpans | None, pp: int) -> tuple[tuple[Transfer, ...], ...]:
    out: list[list[Transfer]] = [[] for _ in range(pp)]
    if flights is not None:
        wiring, starts, ends = flights
        for n, item in enumerate(wiring.exchanges):
            out[wiring.rank_of[n]] += [Transfer(o.kind, o.stage, o.micro_batch, starts[n], ends[n]) for o in item.ops]
    return tuple(map(tuple, out))


def _hop_seconds(rows: GatheredRows) -> float:
    """One hand-over of activations to the next stage. [s]"""
    if rows.stage_layers.stages.pp == 1:
        return 0.0
    return float(hop_seconds(rows)[0])


def _optimizer_seconds(rows: GatheredRows) -> list[float]:
    return [
        float(s)
        for s in np.broadcast_to(
            optimizer_and_host_wait_seconds(rows, micro_batch_passes(rows)), (1, rows.stage_layers.stages.pp)
        )[0]
    ]
