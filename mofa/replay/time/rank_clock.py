"""One rank of a pipeline on its clock: what it computes, waits for and counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mofa.cost.block.tape_clock import EXPOSED
from mofa.cost.kernels.launch_queue import QUEUE
from mofa.cost.rank_spec import RankSpec
from mofa.cost.rows import GatheredRows
from mofa.replay.time.computation_effect import NOTHING, ComputationEffect, StreamsAfterComputation
from mofa.replay.time.computation_tapes import Phase, PlanTapes, paired_label
from mofa.replay.time.data_parallel import DataParallelSharedByRanks, DataParallelSteps, DataParallelStepsOfComputation
from mofa.replay.time.kernel_runs import FAMILY, HostSyncStep
from mofa.replay.time.op_recorder import OpRecorder
from mofa.replay.time.paired_passes import PairedPiece, pieces_of_pair
from mofa.replay.time.pipeline import CAUSES
from mofa.replay.time.stream_clocks import Relative, StreamClocks
from mofa.replay.time.time_replayed import ComputationFields
from mofa.schedules import SCHEDULES, Action, Order
from mofa.schedules.combined import backward_beside_each_forward

_PLAIN = DataParallelStepsOfComputation()


@dataclass
class ClockInputsOfPlan:
    """What all ranks share: the tapes of every variant of a micro-batch, and what was played already."""

    rows: GatheredRows
    tapes: tuple[PlanTapes, ...]
    hop_s: float
    slowdown: float
    """What computing loses beside a hand-over. [-]"""
    host_waits: bool
    """Whether the host waits for the device after every exchange (Megatron's ``batch_p2p_sync``)."""
    host_s_around_exchange: tuple[float, float]
    """What Megatron's host does behind a computation before it is exchanged, and ahead of the next one. [s]"""
    optimizer_s: Sequence[float]
    """The optimizer of every rank. [s]"""
    cache: dict[tuple[object, ...], dict[Relative, ComputationEffect]] | None
    ops_kept_of: frozenset[tuple[int, int]]
    """Ranks and micro-batches whose ops are kept."""
    jitter: float = 0.0
    seed: int = 0
    chunk_kinds: dict[tuple[str, ...], int] = field(default_factory=dict)
    """Chunks that hold the same, by number."""
    shared: DataParallelSharedByRanks = field(default_factory=DataParallelSharedByRanks)


@dataclass(frozen=True)
class _KindPlayed:
    """How a rank's chunk computes one kind of action: what it plays (None: nothing), and results by what precedes."""

    phase: Phase | None
    chunk: int
    variant: int
    longest: float = 0.0
    """Time after which nothing from before a computation matters to it. [s]"""
    every: DataParallelStepsOfComputation = field(default_factory=DataParallelStepsOfComputation)
    known: dict[Relative, ComputationEffect] = field(default_factory=dict)
    waits: bool = False
    """Whether the host waits for the device on the played_kind."""
    launches: float = 0.0
    pieces: tuple[PairedPiece, ...] = ()
    """Of a forward that runs beside a backward, in order; empty of all others."""


class ClockSnapshot(NamedTuple):
    """A rank in front of a computation: the time, its clock relative to that, and what it has counted so far. [s]"""

    time: float
    state: tuple[float, ...]
    counted: tuple[float, float, float]
    idle: dict[str, float]
    uses: dict[int, list[float]]
    lead: float
    """How far the host is ahead; the clock's state has no more of it than any computation needs. [s]"""


@dataclass
class RankTimeline:
    """One rank: its clock, what it computes, and how its time went."""

    plan: ClockInputsOfPlan
    order: Order
    spec: RankSpec
    data_parallel: DataParallelSteps
    clock: StreamClocks
    snapshots_before: frozenset[int] = frozenset()
    """Computations in front of which it is written down how all is, by their number."""
    uses: dict[int, list[float]] = field(default_factory=dict)
    """Of each result how often it was used, stretched by jitter; and the result."""
    results: dict[int, ComputationEffect] = field(default_factory=dict)
    played_by_kind: dict[tuple[str, int | tuple[int, int], int], _KindPlayed] = field(default_factory=dict)
    """By kind of action, stage, or both stages of a pair, and variant."""
    left_by_last: tuple[StreamsAfterComputation, float] = NOTHING, 0.0
    """What the last computation left, and when it ended."""
    spans: list[ComputationFields] = field(default_factory=list)
    recorder: OpRecorder | None = None
    """Of a rank some of whose ops are kept."""
    idle: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    pp_s: float = 0.0
    bubble_s: float = 0.0
    hidden_pp_s: float = 0.0
    factors: NDArray[np.float64] | None = None
    snapshots: dict[int, ClockSnapshot] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rank = self.spec.place.pipeline_rank
        if any(rank == self.rank for rank, _ in self.plan.ops_kept_of):
            self.recorder = OpRecorder()
        self.chunks = tuple(chunk.blocks for chunk in self.spec.chunks)
        self.num_variants = len(self.plan.tapes)
        plan = self.plan
        self.plain = plan.cache is not None and not plan.jitter and not plan.ops_kept_of
        self.once = self.data_parallel.by_computation
        behind_s, self.ahead_s = plan.host_s_around_exchange
        self.handing_s = behind_s if plan.host_waits else behind_s + self.ahead_s
        tapes = [tuple(block.tapes for block in blocks) for blocks in self.chunks]
        self.kinds = [plan.chunk_kinds.setdefault(names, len(plan.chunk_kinds)) for names in tapes]
        is_paired = SCHEDULES[self.spec.schedule.name].pairs_passes
        self.backward_beside = backward_beside_each_forward(self.order.ranks[self.rank]) if is_paired else {}
        """The backward that runs beside each forward, which plays it."""
        self.played_in_forward = frozenset(self.backward_beside.values())
        self.launched_ahead = 0
        if self.plan.jitter:
            shape = (4, len(self.chunks), self.order.num_micro_batches)
            draws = np.random.default_rng([self.plan.seed, self.rank]).standard_normal(shape)
            self.factors = np.exp(self.plan.jitter * draws - self.plan.jitter**2 / 2)

    @property
    def keeps_all_ops(self) -> bool:
        """Whether the ops of all micro-batches are kept, and so those of the step's end."""
        return all((self.rank, i) in self.plan.ops_kept_of for i in range(self.order.num_micro_batches))

    def free_at_s(self) -> float:
        """When its device is free and its host has issued all. [s]"""
        clock = self.clock
        return clock.compute if clock.compute >= clock.host else clock.host

    def compute(self, action: Action, beside: int) -> None:
        """Compute, with so many exchanges launched beside it since the last computation."""
        clock, plan = self.clock, self.plan
        start = clock.compute
        kind, stage, micro_batch = action
        if self.played_in_forward and action in self.played_in_forward:
            self.launched_ahead = beside
            self.spans.append((kind, stage // self.order.pp, micro_batch, start, start))
            if self.recorder is not None:
                self.recorder.end_computation(len(self.recorder.ops))
            if len(self.spans) in self.snapshots_before:
                self._mark()
            return
        beside, self.launched_ahead = beside + self.launched_ahead, 0
        variant = micro_batch % self.num_variants if self.num_variants > 1 else 0
        first = 0 if self.recorder is None else len(self.recorder.ops)
        back = self.backward_beside.get(action) if self.backward_beside else None
        of_stage = stage if back is None else (stage, back.stage)
        played_kind = self.played_by_kind.get((kind, of_stage, variant)) or self._new_kind(action)
        if played_kind.phase is not None:
            before = clock.host
            if self.plain and action not in self.once:
                known = played_kind.known
                state = clock.forget_past_and_take_relative_state(played_kind.longest)
                ahead = clock.host - before
                result = known.get(state)
                if result is None:
                    result = known[state] = self._play(played_kind, _PLAIN, False)
                self._apply(result, start, 1.0)
            else:
                factor = self._factor(action, played_kind.chunk)
                result, ahead = self._result(action, played_kind, before)
                self._apply(result, start, factor)
                if factor != 1.0:
                    self._slow_down(first, start, factor)
            if (
                ahead > 0.0 and not played_kind.waits and played_kind.launches <= QUEUE
            ):  # a lead that a computation has no use for lasts
                clock.host -= ahead
        if beside and plan.hop_s:
            slow = plan.slowdown * min(plan.hop_s, clock.compute - start)
            self.pp_s += slow
            self.hidden_pp_s += plan.hop_s
            if slow and self.recorder is not None and first < len(self.recorder.ops):
                self.recorder.add_computation(
                    "slowed beside a hand-over", FAMILY["pp"], clock.compute, clock.compute + slow
                )
            clock.compute += slow
        if self.recorder is not None:
            self.recorder.end_computation(first)
        clock.host += self.handing_s
        spans = self.spans
        spans.append((kind, played_kind.chunk, micro_batch, start, clock.compute))
        if self.snapshots_before and len(spans) in self.snapshots_before:
            self._mark()

    def _slow_down(self, first: int, start: float, factor: float) -> None:
        """Jitter stretches what the computing stream does; the others keep their times."""
        if self.recorder is None:
            return
        ops = self.recorder.ops
        ops[first:] = [
            spot if spot.stream not in ("compute", "wait") else
            spot._replace(start_s=start + factor * (spot.start_s - start), end_s=start + factor * (spot.end_s - start))
            for spot in ops[first:]
        ]  # fmt: skip

    def _factor(self, action: Action, chunk: int) -> float:
        return (
            1.0 if self.factors is None else float(self.factors["FBIW".index(action.kind), chunk, action.micro_batch])
        )

    def wait_until(self, time: float, cause: str) -> None:
        """Compute nothing until a time; the wait counts under its cause. [s]"""
        clock = self.clock
        now = clock.compute
        if time > now:
            wait, hop_s = time - now, self.plan.hop_s
            self.idle["fill" if not self.spans else cause] += wait
            if wait > hop_s:
                self.pp_s += hop_s
                self.bubble_s += wait - hop_s
            else:
                self.pp_s += wait
            clock.idle_gaps.append((now, time))
            clock.compute = time

    def end_awaited_exchange(self) -> None:
        """An exchange that the rank waited for is over: the host waits for the device where the framework's does."""
        if self.plan.host_waits:
            self.clock.synchronise(self.ahead_s)

    # -- computing
    def _new_kind(self, action: Action) -> _KindPlayed:
        c, variant = action.stage // self.order.pp, action.micro_batch % self.num_variants
        phase: Phase | None = action.effective_kind  # type: ignore[assignment]
        if (back := self.backward_beside.get(action)) is not None:
            return self._new_pair(action, back, c, variant)
        played_kind = _KindPlayed(phase, c, variant)
        if phase is not None:
            tapes, cache = self.plan.tapes[variant], self.plan.cache
            every = self.data_parallel.by_chunk_backward.get(c, _PLAIN) if phase != "F" else _PLAIN
            of = (self.rank, c) if every is not _PLAIN else None
            known = {} if cache is None else cache.setdefault((self.kinds[c], phase, variant, of), {})
            tape_steps = [tapes.steps_of_tape(block.tapes, phase) for block in self.chunks[c]]
            waits = any(type(step) is HostSyncStep for part in tape_steps for step in part.steps)
            launches = sum(part.launches for part in tape_steps)
            played_kind = _KindPlayed(
                phase, c, variant, sum(part.horizon_s for part in tape_steps), every, known, waits, launches
            )
        self.played_by_kind[action.kind, action.stage, variant] = played_kind
        return played_kind

    def _new_pair(self, action: Action, backward: Action, chunk: int, variant: int) -> _KindPlayed:
        """A forward beside a backward of another chunk, or of its own."""
        c_back = backward.stage // self.order.pp
        pieces = tuple(pieces_of_pair(self.chunks[chunk], self.chunks[c_back]))
        of_chunks = (self.kinds[chunk], self.kinds[c_back])
        known = {} if self.plan.cache is None else self.plan.cache.setdefault((of_chunks, "FB", variant, None), {})
        steps = [self.plan.tapes[variant].steps_of_tape(*_tape_of(piece)) for piece in pieces]
        waits = any(type(step) is HostSyncStep for part in steps for step in part.steps)
        played_kind = _KindPlayed(
            "FB", chunk, variant, sum(part.horizon_s for part in steps), _PLAIN, known, waits,
            sum(part.launches for part in steps), pieces,
        )  # fmt: skip
        self.played_by_kind[action.kind, (action.stage, backward.stage), variant] = played_kind
        return played_kind

    def _result(self, action: Action, played_kind: _KindPlayed, before: float) -> tuple[ComputationEffect, float]:
        """What a computation does that may be none of the plain ones, which are looked up, and by how much its host was
        taken to be later than it is (``before``), as it was further ahead than it needs. [s]"""
        once = self.data_parallel.by_computation.get(action)
        watched = (self.rank, action.micro_batch) in self.plan.ops_kept_of
        if once is not None:  # what data parallelism launches once may begin long before: the host's whole lead counts
            self.restore_work_left_by_last_computation()
        state = self.clock.forget_past_and_take_relative_state(played_kind.longest if once is None else np.inf)
        ahead = self.clock.host - before
        if once is not None or watched or self.plan.cache is None:
            return self._play(played_kind, once or _PLAIN, watched), ahead
        result = played_kind.known.get(state)
        if result is None:
            result = played_kind.known[state] = self._play(played_kind, _PLAIN, False)
        return result, ahead

    def _play(self, played_kind: _KindPlayed, once: DataParallelStepsOfComputation, watched: bool) -> ComputationEffect:
        c, tapes, phase, every, clock = (
            played_kind.chunk,
            self.plan.tapes[played_kind.variant],
            played_kind.phase,
            played_kind.every,
            self.clock,
        )
        assert phase is not None
        blocks = self.chunks[c] if phase == "F" else self.chunks[c][::-1]
        start = clock.compute
        clock.empty_launch_queue()
        clock.reset_counts()
        handed_on = ""
        recorder = clock.watch = self.recorder if watched else None
        if recorder is not None:
            recorder.place = ""
        clock.play_steps(once.before)
        clock.play_steps(every.before)
        for piece in played_kind.pieces:
            if recorder is not None:
                recorder.place = piece.name
            part = tapes.steps_of_tape(*_tape_of(piece))
            clock.play_tape(part, "")
        if played_kind.pieces:
            blocks = ()
        for i, block in enumerate(blocks):
            if recorder is not None:
                recorder.place = block.name
            inserted: dict[int, list[object]] = {}
            for extra in (once, every):
                for line, steps in extra.after_line.get(i, {}).items():
                    inserted.setdefault(line, []).extend(steps)
            following = blocks[i + 1].tapes if i + 1 < len(blocks) else ""
            part = tapes.steps_of_tape(block.tapes, phase, inserted, next_label=following)  # type: ignore[arg-type]
            whole_phase: Phase = "F" if phase == "F" else "B"
            follow = tapes.resolved[following, whole_phase].input_tensor if following else ""
            clock.play_tape(part, follow)
            handed_on = part.output_tensor
        if blocks:  # a layout may leave a chunk without any
            clock.wait_for((handed_on,))
        if recorder is not None:
            recorder.place = ""
        clock.play_steps(every.after)
        clock.play_steps(once.after)
        clock.watch = None
        clock.forget_past_and_take_relative_state(np.inf)
        now = clock.compute
        left = StreamsAfterComputation(
            tuple((n, busy_until - now) for n, busy_until in clock.streams.items()),
            tuple((n, busy_until - now, family) for n, (busy_until, family) in clock.ready.items()),
            tuple(
                (begin - now, end - now, family, slows, launched - now)
                for begin, end, family, slows, launched in clock.ops_in_flight
            ),
            tuple((begin - now, end - now) for begin, end in clock.idle_gaps),
        )
        counts = np.array(clock.exposed_side_stream_idle_late_s())
        return ComputationEffect(now - start, clock.host - now, left, left.still_pending(), counts)

    def _apply(self, result: ComputationEffect, start: float, factor: float) -> None:
        clock = self.clock
        now = start + result.seconds
        clock.host = now + result.host
        self.left_by_last = result.left, now
        left = result.left if clock.own_order or self.factors is not None else result.ahead
        if left is NOTHING:
            if clock.streams or clock.ready or clock.ops_in_flight or clock.idle_gaps:
                clock.streams, clock.ready, clock.ops_in_flight, clock.idle_gaps = {}, {}, [], []
        else:
            self._leave(left, now)
        clock.compute = now if factor == 1.0 else start + factor * result.seconds
        key = id(result)
        use = self.uses.get(key)
        if use is None:
            self.uses[key] = [factor, 1.0]
            self.results[key] = result
        else:
            use[0] += factor
            use[1] += 1.0

    def _leave(self, left: StreamsAfterComputation, now: float) -> None:
        clock = self.clock
        streams, ready, flying, gaps = left
        if streams or clock.streams:
            clock.streams = {name: now + busy_for for name, busy_for in streams}
        if ready or clock.ready:
            clock.ready = {name: (now + busy_for, family) for name, busy_for, family in ready}
        if flying or clock.ops_in_flight:
            clock.ops_in_flight = [
                (now + begin, now + end, family, slows, now + launched)
                for begin, end, family, slows, launched in flying
            ]
        if gaps or clock.idle_gaps:
            clock.idle_gaps = [(now + begin, now + end) for begin, end in gaps]

    def restore_work_left_by_last_computation(self) -> None:
        """What the last computation left that is over as well: for what may have been launched long ago."""
        left, now = self.left_by_last
        since = [gap for gap in self.clock.idle_gaps if gap[1] > now]
        self._leave(left, now)
        self.clock.idle_gaps += since

    # -- rounds that are alike
    def _mark(self) -> None:
        clock = self.clock
        now = clock.compute
        needed = max((played_kind.longest for played_kind in self.played_by_kind.values()), default=0.0)
        times = [max(clock.host, now - needed), *(busy_until for _, busy_until in sorted(clock.streams.items()))]
        times += [busy_until for _, (busy_until, _) in sorted(clock.ready.items())]
        times += [
            busy_until for begin, end, *_ in (*clock.ops_in_flight, *clock.idle_gaps) for busy_until in (begin, end)
        ]
        self.snapshots[len(self.spans)] = ClockSnapshot(
            now, tuple(busy_until - now for busy_until in times), (self.pp_s, self.bubble_s, self.hidden_pp_s),
            dict(self.idle),
            {key: list(use) for key, use in self.uses.items()}, now - clock.host,
        )  # fmt: skip

    def insert_rounds(self, num_rounds: int, round_s: float, each: int, spans: bool) -> None:
        """Put so many rounds of ``each`` micro-batches, like the one in front of the last mark, there; with their
        computations where ``spans``."""
        *_, begin, end = self.snapshots
        before, after = self.snapshots[begin], self.snapshots[end]
        if spans:
            longer = self.spans[:end]
            for n in range(1, num_rounds + 1):
                longer += _later(self.spans[begin:end], n * each, n * round_s)
            self.spans = longer + _later(self.spans[end:], num_rounds * each, num_rounds * round_s)
        counted = (num_rounds * (b - a) for a, b in zip(before.counted, after.counted, strict=True))
        for name, more in zip(("pp_s", "bubble_s", "hidden_pp_s"), counted, strict=True):
            setattr(self, name, getattr(self, name) + more)
        for cause, seconds in after.idle.items():
            self.idle[cause] += num_rounds * (seconds - before.idle[cause])
        for key, use in after.uses.items():
            for i, (a, b) in enumerate(zip(before.uses.get(key, (0.0, 0.0)), use, strict=True)):
                self.uses[key][i] += num_rounds * (b - a)
        self.clock.delay_all_streams(num_rounds * round_s)
        self.left_by_last = self.left_by_last[0], self.left_by_last[1] + num_rounds * round_s

    # -- what it came to
    def exposed_side_stream_idle_late_s(self) -> NDArray[np.float64]:
        """Exposed, beside, waited and late-issue seconds of all computations. (4, len(EXPOSED)) [s]"""
        total = np.zeros((4, len(EXPOSED)))
        for key, (factor, times) in self.uses.items():
            total += self.results[key].counts * np.array([[factor], [times], [factor], [factor]])
        return total


def _tape_of(piece: PairedPiece) -> tuple[str, Phase]:
    """The name of a piece's tape, and what of it runs."""
    if piece.forward is not None and piece.backward is not None:
        return paired_label(piece.forward.tapes, piece.backward.tapes), "FB"
    return (piece.forward.tapes, "F") if piece.forward is not None else (piece.backward.tapes, "B")  # type: ignore[union-attr]


def _later(spans: list[ComputationFields], micro_batches: int, seconds: float) -> list[ComputationFields]:
    """Computations so much later, of other micro-batches."""
    return [(kind, c, i + micro_batches, start + seconds, end + seconds) for kind, c, i, start, end in spans]
