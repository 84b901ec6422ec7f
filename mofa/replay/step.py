"""A training step on the clock: every rank of a pipeline computes its tapes, sends, reduces and steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mofa.cost.breakdown import HIDDEN_COMPONENTS, TIME_COMPONENTS
from mofa.cost.collectives import collective_s
from mofa.cost.compose import hop_seconds, norm_seconds, step_end_seconds
from mofa.cost.estimate import Estimator
from mofa.cost.rows import Rows
from mofa.cost.scan import EXPOSED
from mofa.cost.streams import OWN_ORDER
from mofa.orders import Action, Order, Program, order_of, program_of
from mofa.orders.exchange import overlapped
from mofa.replay.check import OrderError, check
from mofa.replay.clock import Clock, Relative
from mofa.replay.collection import no_collection
from mofa.replay.computed import Left, Result
from mofa.replay.pieces import Book, Chunk, Phase, chunks_of
from mofa.replay.pipeline import CAUSES, Flights, run
from mofa.replay.ranks import rows_of
from mofa.replay.reductions import Added, Extra, added
from mofa.replay.score import FAMILY
from mofa.replay.timed import Computation, Spot, TimeReplayed, Transfer
from mofa.replay.wiring import Wiring, wire
from mofa.specs.framework import PYTORCH_MODULES

PP, DP = FAMILY["pp"], FAMILY["dp"]
_PLAIN = Extra()


@dataclass
class _Plan:
    """What all ranks share: the tapes of every variant of a micro-batch, and what was played already."""

    rows: Rows
    order: Order
    books: tuple[Book, ...]
    hop_s: float
    slowdown: float
    """What computing loses beside a hand-over. [-]"""
    host_waits: bool
    """Whether the host waits for the device after every exchange (Megatron's ``batch_p2p_sync``)."""
    cache: dict[tuple[object, ...], dict[Relative, Result]] | None
    watched: frozenset[tuple[int, int]]
    """Ranks and micro-batches whose ops are kept."""
    jitter: float = 0.0
    seed: int = 0
    kinds: dict[tuple[str, ...], int] = field(default_factory=dict)
    """Chunks that hold the same, by number."""


@dataclass(frozen=True)
class _Way:
    """How a rank's chunk computes one kind of action: what it plays (None: nothing), and results by what precedes."""

    phase: Phase | None
    chunk: int
    variant: int
    longest: float = 0.0
    """Time after which nothing from before a computation matters to it. [s]"""
    every: Extra = field(default_factory=Extra)
    known: dict[Relative, Result] | None = None


@dataclass
class _Player:
    """One rank: its clock, what it computes, and how its time went."""

    plan: _Plan
    rank: int
    chunks: tuple[Chunk, ...]
    added: Added
    clock: Clock
    uses: dict[int, list[float]] = field(default_factory=dict)
    """Of each result how often it was used, stretched by jitter; and the result."""
    results: dict[int, Result] = field(default_factory=dict)
    ways: dict[tuple[str, int, int], _Way] = field(default_factory=dict)
    """By kind of action, stage and variant."""
    last: tuple[Left, float] = Left((), (), (), ()), 0.0
    """What the last computation left, and when it ended."""
    spans: list[Computation] = field(default_factory=list)
    ops: list[Spot] = field(default_factory=list)
    idle: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    pp_s: float = 0.0
    bubble_s: float = 0.0
    hidden_pp_s: float = 0.0
    factors: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        self.num_variants = len(self.plan.books)
        self.plain = not self.plan.jitter and not self.plan.watched
        self.kinds = [self.plan.kinds.setdefault(tuple(p.label for p in c), len(self.plan.kinds)) for c in self.chunks]
        if self.plan.jitter:
            shape = (4, len(self.chunks), self.plan.order.num_micro_batches)
            draws = np.random.default_rng([self.plan.seed, self.rank]).standard_normal(shape)
            self.factors = np.exp(self.plan.jitter * draws - self.plan.jitter**2 / 2)

    def ready(self) -> float:
        clock = self.clock
        return clock.compute if clock.compute >= clock.host else clock.host

    def compute(self, action: Action, beside: int) -> None:
        clock = self.clock
        start = clock.compute
        kind, stage, micro_batch = action
        way = self.ways.get((kind, stage, micro_batch % self.num_variants)) or self._way(action)
        if way.phase is not None:
            if self.plain and way.known is not None and action not in self.added.once:
                state = clock.settle(way.longest)
                result = way.known.get(state)
                if result is None:
                    result = way.known[state] = self._play(way, _PLAIN, False)
                self._apply(result, start, 1.0)
            else:
                first, factor = len(self.ops), self._factor(action, way.chunk)
                self._apply(self._result(action, way), start, factor)
                if factor != 1.0:
                    self._stretch(first, start, factor)
        if beside and self.plan.hop_s:
            slow = self.plan.slowdown * min(self.plan.hop_s, clock.compute - start)
            self.pp_s += slow
            self.hidden_pp_s += self.plan.hop_s
            clock.compute += slow
        self.spans.append(Computation(kind, way.chunk, micro_batch, start, clock.compute))

    def _stretch(self, first: int, start: float, factor: float) -> None:
        """Jitter stretches what the computing stream does; the others keep their times."""
        self.ops[first:] = [
            spot if spot.stream not in ("compute", "wait") else
            spot._replace(start_s=start + factor * (spot.start_s - start), end_s=start + factor * (spot.end_s - start))
            for spot in self.ops[first:]
        ]  # fmt: skip

    def _factor(self, action: Action, c: int) -> float:
        return 1.0 if self.factors is None else float(self.factors["FBIW".index(action.kind), c, action.micro_batch])

    def wait_until(self, time: float, cause: str) -> None:
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
            clock.idle_until(time)

    def exchanged(self) -> None:
        if self.plan.host_waits:
            self.clock.synchronise()

    # -- computing
    def _way(self, action: Action) -> _Way:
        c, variant = action.stage // self.plan.order.pp, action.micro_batch % self.num_variants
        phase: Phase | None = action.kind  # type: ignore[assignment]
        if action.stage == 0 and action.kind in ("I", "W"):
            phase = "B" if action.kind == "W" else None  # there is no input to differentiate by
        way = _Way(phase, c, variant)
        if phase is not None:
            book, cache = self.plan.books[variant], self.plan.cache
            every = self.added.backwards.get(c, _PLAIN) if phase != "F" else _PLAIN
            of = (self.rank, c) if every is not _PLAIN else None
            known = None if cache is None else cache.setdefault((self.kinds[c], phase, variant, of), {})
            way = _Way(phase, c, variant, sum(book.score(p.label, phase).longest for p in self.chunks[c]), every, known)
        self.ways[action.kind, action.stage, variant] = way
        return way

    def _result(self, action: Action, way: _Way) -> Result:
        """What a computation does that may be none of the plain ones, which are looked up."""
        once = self.added.once.get(action)
        watched = (self.rank, action.micro_batch) in self.plan.watched
        if once is not None:  # what data parallelism launches once may begin long before: the host's whole lead counts
            self.look_back()
        state = self.clock.settle(way.longest if once is None else np.inf)
        if once is not None or watched or way.known is None:
            return self._play(way, once or _PLAIN, watched)
        result = way.known.get(state)
        if result is None:
            result = way.known[state] = self._play(way, _PLAIN, False)
        return result

    def _play(self, way: _Way, once: Extra, watched: bool) -> Result:
        c, book, phase, every, clock = way.chunk, self.plan.books[way.variant], way.phase, way.every, self.clock
        assert phase is not None
        labels = self.chunks[c] if phase == "F" else self.chunks[c][::-1]
        start = clock.compute
        clock.exposed, clock.beside, clock.waited = ([0.0] * len(EXPOSED) for _ in range(3))
        place = ""

        def watch(stream: str, name: str, family: int, begin: float, end: float) -> None:
            self.ops.append(Spot(stream, f"{name} · {place}" if place else name, EXPOSED[family], begin, end))

        clock.watch = watch if watched else None
        clock.steps(once.before)
        clock.steps(every.before)
        for i, piece in enumerate(labels):
            place = piece.name
            inserted: dict[int, list[object]] = {}
            for extra in (once, every):
                for line, steps in extra.lines.get(i, {}).items():
                    inserted.setdefault(line, []).extend(steps)
            part = book.score(piece.label, phase, inserted)  # type: ignore[arg-type]
            follow = book.drafts[labels[i + 1].label, "F" if phase == "F" else "B"].given if i + 1 < len(labels) else ""
            clock.play(part, follow)
        clock.wait_for((part.out,))
        clock.steps(every.after)
        clock.steps(once.after)
        clock.watch = None
        clock.settle(np.inf)
        now = clock.compute
        left = Left(
            tuple((n, at - now) for n, at in clock.streams.items()),
            tuple((n, at - now, family) for n, (at, family) in clock.ready.items()),
            tuple((begin - now, end - now, family, slows) for begin, end, family, slows in clock.flying),
            tuple((begin - now, end - now) for begin, end in clock.gaps),
        )
        counts = np.array([clock.exposed, clock.beside, clock.waited])
        return Result(now - start, clock.host - now, left, left.ahead(), counts)

    def _apply(self, result: Result, start: float, factor: float) -> None:
        clock = self.clock
        now = start + result.seconds
        clock.host = now + result.host
        self.last = result.left, now
        self._leave(result.left if clock.own_order or self.factors is not None else result.ahead, now)
        clock.compute = start + factor * result.seconds
        use = self.uses.get(id(result))
        if use is None:
            self.uses[id(result)] = [factor, 1.0]
            self.results[id(result)] = result
        else:
            use[0] += factor
            use[1] += 1.0

    def _leave(self, left: Left, now: float) -> None:
        clock = self.clock
        if left.streams or clock.streams:
            clock.streams = {name: now + at for name, at in left.streams}
        if left.ready or clock.ready:
            clock.ready = {name: (now + at, family) for name, at, family in left.ready}
        if left.flying or clock.flying:
            clock.flying = [(now + begin, now + end, family, slows) for begin, end, family, slows in left.flying]
        if left.gaps or clock.gaps:
            clock.gaps = [(now + begin, now + end) for begin, end in left.gaps]

    def look_back(self) -> None:
        """What the last computation left that is over as well: for what may have been launched long ago."""
        left, now = self.last
        since = [gap for gap in self.clock.gaps if gap[1] > now]
        self._leave(left, now)
        self.clock.gaps += since

    # -- what it came to
    def counts(self) -> NDArray[np.float64]:
        """Exposed, beside and waited seconds of all computations. (3, len(EXPOSED)) [s]"""
        total = np.zeros((3, len(EXPOSED)))
        for key, (factor, times) in self.uses.items():
            total += self.results[key].counts * np.array([[factor], [times], [factor]])
        return total


def time_of(
    estimator: Estimator, *, detail: bool = True, variants: Sequence[Estimator] = (), jitter: float = 0.0,
    seed: int = 0, order: Order | None = None, watched: frozenset[tuple[int, int]] = frozenset(), cached: bool = True,
) -> TimeReplayed:  # fmt: skip
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

    Returns
    -------
    TimeReplayed
        The step, from one gradient norm, at which all ranks meet, to the next. [s]

    Notes
    -----
    The ranks of a tensor, context, expert or data parallel group are alike but for routing; the rank played is the one
    whose experts got the most tokens in every layer, for which the others wait at the next all-to-all.

    Raises
    ------
    OrderError
        If an order can't be; the message names the op that waits and for what.
    """
    rows = rows_of(estimator)
    stages, fw = rows.layout.stages, rows.framework
    num = int(rows.num_micro_batches[0])
    if order is None:
        with no_collection():
            wiring = _wiring(rows.schedule, fw.name, stages.pp, stages.vpp, num)
        order = wiring.program.order
    else:
        wiring = wire(_own(order, stages.pp, stages.vpp, num))
    books = tuple(Book.of(rows_of(e)) for e in variants) or (Book.of(rows),)
    curves = rows.cluster.gpu.curves
    plan = _Plan(
        rows, order, books, _hop_seconds(rows), curves.overlap_slowdown.value,
        rows.schedule == "1f1b" and stages.pp > 1 and fw.name not in PYTORCH_MODULES,
        {} if cached else None, watched, jitter, seed,
    )  # fmt: skip
    optimizer = _optimizer_seconds(rows)
    own_order = any(line.op is not None and line.op.stream in OWN_ORDER for b in books for d in b.drafts.values()
                    for line in d.lines) or rows.mode.pipelined  # fmt: skip
    players = []
    for r in range(stages.pp):
        chunks = chunks_of(rows, order, r)
        extra = added(rows, books[0], chunks, order, r)
        clock = Clock(curves.host.sync_s.value, own_order=own_order)
        players.append(_Player(plan, r, chunks, extra, clock))
    ends = [optimizer[r] + p.added.after_optimizer_s for r, p in enumerate(players)]
    for player, seconds in zip(players, ends, strict=True):
        player.clock.compute = player.clock.host = seconds - min(ends)
    with no_collection():
        flights = run(wiring, players, plan.hop_s)
        return _finish(plan, players, optimizer, flights if detail else None)


@lru_cache(maxsize=8)
def _wiring(schedule: str, framework: str, pp: int, vpp: int, num_micro_batches: int) -> Wiring:
    return wire(program_of(order_of(schedule, framework, pp, vpp, num_micro_batches), schedule, framework))


def _own(order: Order, pp: int, vpp: int, num_micro_batches: int) -> Program:
    """The sends and receives of an order that no framework made: beside its computations, on a stream for each way."""
    has, wants = (order.pp, order.vpp, order.num_micro_batches), (pp, vpp, num_micro_batches)
    if has != wants:
        raise OrderError(
            f"the order has {has[0]} ranks, {has[1]} chunks and {has[2]} micro-batches, the strategy "
            f"{wants[0]}, {wants[1]} and {wants[2]}; give one for the strategy"
        )
    program = overlapped(order)
    check(program)
    return program


def _finish(
    plan: _Plan, players: Sequence[_Player], optimizer: Sequence[float], flights: Flights | None
) -> TimeReplayed:  # fmt: skip
    rows = plan.rows
    begins = [optimizer[r] + p.added.after_optimizer_s for r, p in enumerate(players)]
    begins = [begin - min(begins) for begin in begins]
    ends, tails = [], []
    for player in players:
        clock = player.clock
        player.look_back()
        clock.exposed, clock.beside, clock.waited = ([0.0] * len(EXPOSED) for _ in range(3))
        clock.steps(player.added.end)
        clock.drain(DP)
        tails.append(np.array([clock.exposed, clock.beside, clock.waited]))
        ends.append(clock.compute)
    tied = _tied_seconds(rows)
    meet = max(ends)
    if tied:
        first, head = 0, rows.layout.stages.head_stage
        meet = max(meet, max(ends[first], ends[head]) + tied)
    norm = float(norm_seconds(rows)[0])
    step = (
        meet + norm + max(o + p.added.after_optimizer_s for o, p in zip(optimizer, players, strict=True)) - max(begins)
    )
    shown: list[dict[str, float]] = []
    hiddens: list[dict[str, float]] = []
    for r, player in enumerate(players):
        counts = player.counts() + tails[r]
        both = tied if tied and r in (0, rows.layout.stages.head_stage) else 0.0
        drain = meet - ends[r] - both
        player.idle["drain"] += drain
        exposed = dict(zip(EXPOSED, counts[0].tolist(), strict=True))
        exposed["pp"] += player.pp_s
        exposed["dp"] += player.added.after_optimizer_s + both
        exposed["optimizer"] += optimizer[r] + norm
        exposed["bubble"] = player.bubble_s + drain
        shown.append({name: max(exposed[name], 0.0) for name in TIME_COMPONENTS})
        hidden = {
            name: max(float(counts[1][FAMILY[name]] - counts[2][FAMILY[name]]), 0.0) for name in HIDDEN_COMPONENTS
        }
        hidden["pp"] += player.hidden_pp_s
        hiddens.append(hidden)
        for name in (*HIDDEN_COMPONENTS, "host_idle"):
            player.idle[name] = float(counts[2][FAMILY[name]])
        start = meet + norm
        player.spans.append(Computation("O", 0, 0, start, start + optimizer[r] + player.added.after_optimizer_s))
        assert abs(sum(shown[-1].values()) - step) < 1e-6 * step, (sum(shown[-1].values()), step)
    slowest = min(range(len(players)), key=lambda r: (shown[r]["bubble"], r))
    step = sum(shown[slowest].values())
    return TimeReplayed(
        step, shown[slowest], hiddens[slowest], slowest, tuple(shown), tuple(p.idle for p in players),
        tuple(tuple(p.spans) for p in players), _transfers(flights, len(players)), tuple(tuple(p.ops) for p in players),
    )  # fmt: skip


def _transfers(flights: Flights | None, pp: int) -> tuple[tuple[Transfer, ...], ...]:
    out: list[list[Transfer]] = [[] for _ in range(pp)]
    if flights is not None:
        wiring, starts, ends = flights
        for n, item in enumerate(wiring.exchanges):
            out[wiring.rank_of[n]] += [Transfer(o.kind, o.stage, o.micro_batch, starts[n], ends[n]) for o in item.ops]
    return tuple(map(tuple, out))


def _hop_seconds(rows: Rows) -> float:
    """One hand-over of activations to the next stage. [s]"""
    if rows.layout.stages.pp == 1:
        return 0.0
    return float(hop_seconds(rows)[0])


def _tied_seconds(rows: Rows) -> float:
    """Megatron's all-reduce of the gradients of an embedding that the first and the last stage share. [s]"""
    model = rows.workload.model
    if rows.framework.name in PYTORCH_MODULES or not model.tied_embeddings or rows.layout.stages.pp == 1:
        return 0.0
    tied = model.vocab * model.hidden * rows.framework.reduced_bytes_per_param / rows.table.tp
    return float(collective_s("all_reduce", tied, rows.groups["embd"], rows.cluster)[0])


def _optimizer_seconds(rows: Rows) -> list[float]:
    return [float(s) for s in np.broadcast_to(step_end_seconds(rows), (1, rows.layout.stages.pp))[0]]
