"""The clock of a pipeline: an order played with the seconds of every computation and every hand-over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from mofa.replay.time.send_recv import NumberedExchanges, match_exchanges
from mofa.schedules.order import Action, Order, Program
from mofa.schedules.order_check import OrderError, check_program

CAUSES = ("fill", "forward input", "backward input", "exchange", "drain")
"""Why a rank computes nothing: before its first computation, waiting for what a neighbour sends, for an exchange to
end, and after its last computation until the last rank's."""


class Span(NamedTuple):
    """A computation or an exchange of a rank, from ``start`` to ``end``. [s]"""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class PlayedProgram:
    """What a clock said: computations and hand-overs in the order of each rank, and its idle seconds by cause. [s]"""

    compute: tuple[tuple[Span, ...], ...]
    exchange: tuple[tuple[Span, ...], ...]
    idle: tuple[dict[str, float], ...]
    total: float

    def busy_s(self, rank: int) -> float:
        """Seconds that a rank computes. [s]"""
        return sum(span.end - span.start for span in self.compute[rank])

    @property
    def bubble_fraction(self) -> float:
        """Idle over busy seconds of the busiest rank, as publications count it. [-]"""
        most = max(self.busy_s(r) for r in range(len(self.compute)))
        return self.total / most - 1.0


class PipelineRank(Protocol):
    """A pipeline rank as an order is played on it: it computes, waits, and says when it is free."""

    def free_at_s(self) -> float:
        """When its device is free and its host has issued all. [s]"""

    def compute(self, action: Action, beside: int) -> None:
        """Compute, with so many exchanges launched beside it since the last computation."""

    def wait_until(self, time: float, cause: str) -> None:
        """Compute nothing until then."""

    def end_awaited_exchange(self) -> None:
        """An exchange that the rank waited for is over."""


class ExchangeSpans(NamedTuple):
    """Start and end of every exchange of a program. [s]"""

    wiring: NumberedExchanges
    starts: list[float]
    ends: list[float]


_NEVER = -1.0
"""In place of a time that is not known yet."""


class _State(NamedTuple):
    """How far an order is played: by exchange, by stream of exchanges, by rank."""

    ready: list[float]
    """When its rank could begin each exchange. [s]"""
    starts: list[float]
    ends: list[float]
    missing: list[int]
    """Peers of an exchange that have not started. [-]"""
    waited: list[bool]
    """Whether an exchange's rank waits for its end."""
    queues: list[deque[int]]
    """Exchanges that are launched and not over, by stream."""
    free: list[float]
    """When each stream is free. [s]"""
    position: list[int]
    """The next item of each rank's program."""
    launched_beside: list[int]
    """Exchanges that a rank launched since its last computation. [-]"""
    launched: list[bool]
    """Whether the exchange at a rank's position is launched."""
    waiting: deque[int]
    """Ranks that can go on."""
    queued: list[bool]
    """Whether a rank is among these."""


def _begin(wiring: NumberedExchanges) -> _State:
    """Nothing is played, and every rank can begin."""
    num, num_streams, num_ranks = len(wiring.exchanges), wiring.num_streams, len(wiring.ranks)
    return _State(
        ready=[0.0] * num, starts=[_NEVER] * num, ends=[_NEVER] * num, missing=list(map(len, wiring.peers)),
        waited=[False] * num, queues=[deque() for _ in range(num_streams)], free=[0.0] * num_streams,
        position=[0] * num_ranks, launched_beside=[0] * num_ranks, launched=[False] * num_ranks,
        waiting=deque(range(num_ranks)), queued=[True] * num_ranks,
    )  # fmt: skip


def play_on_ranks(wiring: NumberedExchanges, players: Sequence[PipelineRank], hop_s: float = 0.0) -> ExchangeSpans:
    """Play an order on what computes on each rank; returns every exchange, with its start and end.

    Raises
    ------
    OrderError
        If the order waits for ever.
    """
    state = _begin(wiring)
    advance = _advancing(wiring, players, state, _starting(wiring, state, hop_s))
    waiting, queued = state.waiting, state.queued
    while waiting:
        r = waiting.popleft()
        queued[r] = False
        advance(r)
    stuck = any(position < len(items) for position, items in zip(state.position, wiring.ranks, strict=True))
    if stuck or any(state.queues):
        check_program(wiring.program)
        raise OrderError("the order waits for ever")
    return ExchangeSpans(wiring, state.starts, state.ends)


def _starting(wiring: NumberedExchanges, state: _State, hop_s: float) -> Callable[[int], None]:
    """What starts the exchange that is first on its stream, and ends and starts all that follow from it."""
    peers, partner, rank_of, stream_of = wiring.peers, wiring.partner, wiring.rank_of, wiring.stream_of
    ready, starts, ends, missing, waited, queues, free, *_, waiting, queued = state

    def end(exchange: int, begun: float, heads: list[int]) -> None:
        """End what began then, and add what is first on its stream now to ``heads``."""
        stream = stream_of[exchange]
        ends[exchange] = free[stream] = hop_s + begun
        queue = queues[stream]
        queue.popleft()
        if waited[exchange] and not queued[rank_of[exchange]]:
            queued[rank_of[exchange]] = True
            waiting.append(rank_of[exchange])
        if queue:
            heads.append(queue[0])

    def start(head: int) -> None:
        """Start what is first on its stream, end what that was the last thing missing for, start what comes next."""
        heads = [head]
        while heads:
            head = heads.pop()
            begun, at_once = ready[head], free[stream_of[head]]
            if at_once > begun:
                begun = at_once
            starts[head] = begun
            other = partner[head]
            if other >= 0:  # both end, or neither does
                since = starts[other]
                if since != _NEVER:
                    if since > begun:
                        begun = since
                    end(head, begun, heads)
                    end(other, begun, heads)
                continue
            end_group(head, heads)

    def end_group(head: int, heads: list[int]) -> None:
        """End what started with more than one peer, where none of them is missing."""
        own_peers = peers[head]
        for n in own_peers:
            missing[n] -= 1
        for n in (head, *own_peers):
            if missing[n] <= 0 and starts[n] != _NEVER and ends[n] == _NEVER:
                end(n, max(starts[n], *[starts[peer] for peer in peers[n]]), heads)

    return start


def _advancing(
    wiring: NumberedExchanges, players: Sequence[PipelineRank], state: _State, start: Callable[[int], None]
) -> Callable[[int], None]:
    """What plays a rank on, until it waits for the end of an exchange that is not known."""
    partner, stream_of = wiring.partner, wiring.stream_of
    ready, starts, ends, _, waited, queues, free, position, launched_beside, launched, *_ = state

    def launch(rank: int, exchange: int, now: float) -> None:
        """Put a rank's exchange on its stream; start it where it is the first."""
        launched[rank] = True
        ready[exchange] = now
        queue = queues[stream_of[exchange]]
        queue.append(exchange)
        if queue[0] == exchange:
            if (other := partner[exchange]) >= 0 and starts[other] == _NEVER:  # it only waits for the other side
                since = free[stream_of[exchange]]
                starts[exchange] = since if since > now else now
            else:
                start(exchange)

    def advance(rank: int) -> None:
        player, items = players[rank], wiring.ranks[rank]
        compute, wait_until, is_ready, end_awaited_exchange = (
            player.compute,
            player.wait_until,
            player.free_at_s,
            player.end_awaited_exchange,
        )
        i, beside = position[rank], launched_beside[rank]
        for i in range(i, len(items)):  # noqa: B020
            action, n, blocking, cause = items[i]
            if action is not None:
                if n >= 0:
                    at_end = ends[n]
                    if at_end == _NEVER:
                        waited[n] = True
                        break
                    wait_until(at_end, cause)
                compute(action, beside)
                beside = 0
                continue
            if not launched[rank]:
                launch(rank, n, is_ready())
            if blocking:
                at_end = ends[n]
                if at_end == _NEVER:
                    waited[n] = True
                    break
                wait_until(at_end, cause)
                end_awaited_exchange()
            else:
                beside += 1
            launched[rank] = False
        else:
            i = len(items)
        position[rank], launched_beside[rank] = i, beside

    return advance


@dataclass
class _FixedTimes:
    """Computations of known seconds, without a host."""

    rank: int
    seconds: Callable[[Action], float]
    now: float = 0.0
    spans: list[Span] = field(default_factory=list)
    idle: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))

    def free_at_s(self) -> float:
        return self.now

    def compute(self, action: Action, beside: int) -> None:
        start = self.now
        self.now = start + self.seconds(action)
        self.spans.append(Span(self.rank, action, start, self.now))

    def wait_until(self, time: float, cause: str) -> None:
        if time > self.now:
            self.idle["fill" if not self.spans else cause] += time - self.now
            self.now = time

    def end_awaited_exchange(self) -> None:
        """There is no host to wait."""


def play_program(program: Program, seconds: Callable[[Action], float], hop_s: float = 0.0) -> PlayedProgram:
    """Play an order on a clock per rank.

    Parameters
    ----------
    seconds
        How long each computation takes: by stage and micro-batch. [s]
    hop_s
        How long a send takes once both sides have launched it. [s]

    Returns
    -------
    Played
        Start and end of everything, and idle seconds by cause.

    Notes
    -----
    A computation starts when the rank is free, its input has come and the exchanges before it that block have ended. An
    exchange starts when what was launched before it on the rank is done and its stream is free; it ends ``hop_s`` after
    both sides of all its sends and receives have started.

    Raises
    ------
    OrderError
        If the order waits for ever.

    Examples
    --------
    >>> from mofa.schedules import computation_order_of, program_with_exchanges
    >>> program = program_with_exchanges(computation_order_of("1f1b", "pytorch", 2, 1, 4), "1f1b", "pytorch")
    >>> played = play_program(program, lambda action: 1.0 if action.kind == "F" else 2.0)
    >>> played.total, played.bubble_fraction
    (15.0, 0.25)
    """
    clocks = [_FixedTimes(r, seconds) for r in range(program.order.pp)]
    flights = play_on_ranks(match_exchanges(program), clocks, hop_s)
    total = max(clock.now for clock in clocks)
    for clock in clocks:
        clock.idle["drain"] += total - clock.now
    return PlayedProgram(
        tuple(tuple(clock.spans) for clock in clocks), exchange_spans_by_rank(flights, program.order.pp),
        tuple(clock.idle for clock in clocks), total,
    )  # fmt: skip


def exchange_spans_by_rank(flights: ExchangeSpans, pp: int) -> tuple[tuple[Span, ...], ...]:
    """Sends and receives per rank, from start to end."""
    out: list[list[Span]] = [[] for _ in range(pp)]
    wiring, starts, ends = flights
    for n, item in enumerate(wiring.exchanges):
        out[wiring.rank_of[n]] += [Span(wiring.rank_of[n], op, starts[n], ends[n]) for op in item.ops]
    return tuple(map(tuple, out))


def most_micro_batches_in_flight(order: Order) -> list[list[int]]:
    """Most micro-batches whose activations a rank holds, per chunk, at the moment at which it holds most. [-]

    From the start of a forward to the end of its backward, by weights where that runs apart.
    """
    out = []
    for actions in order.ranks:
        now = [0] * order.vpp
        most = list(now)
        for action in actions:
            if action.kind == "F":
                now[order.chunk_of(action.stage)] += 1
                if sum(now) > sum(most):
                    most = list(now)
            elif action.kind in ("B", "W"):
                now[order.chunk_of(action.stage)] -= 1
        out.append(most)
    return out
