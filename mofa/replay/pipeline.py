"""The clock of a pipeline: an order played with the seconds of every computation and every hand-over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from mofa.orders.exchange import received
from mofa.orders.order import Action, Exchange, Order, Program
from mofa.replay.check import OrderError, check

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
class Played:
    """What a clock said: computations and hand-overs in the order of each rank, and its idle seconds by cause. [s]"""

    compute: tuple[tuple[Span, ...], ...]
    exchange: tuple[tuple[Span, ...], ...]
    idle: tuple[dict[str, float], ...]
    total: float

    def busy(self, rank: int) -> float:
        """Seconds that a rank computes. [s]"""
        return sum(span.end - span.start for span in self.compute[rank])

    @property
    def bubble_fraction(self) -> float:
        """Idle over busy seconds of the busiest rank, as publications count it. [-]"""
        most = max(self.busy(r) for r in range(len(self.compute)))
        return self.total / most - 1.0


class Player(Protocol):
    """What computes on a rank: ``now`` is when its device is free, ``issued`` when its host has issued all. [s]"""

    @property
    def now(self) -> float: ...
    @property
    def issued(self) -> float: ...
    def compute(self, action: Action, beside: int) -> None:
        """Compute, with so many exchanges launched beside it since the last computation."""

    def wait_until(self, time: float, cause: str) -> None:
        """Compute nothing until then."""

    def exchanged(self) -> None:
        """An exchange that the rank waited for is over."""


class Flight:
    """An exchange in flight: of its peers' exchanges ``missing`` have not started."""

    __slots__ = ("end", "item", "missing", "peers", "rank", "ready", "start", "waiting")

    def __init__(self, item: Exchange, rank: int) -> None:
        self.item, self.rank = item, rank
        self.ready = 0.0
        self.start: float | None = None
        self.end: float | None = None
        self.peers: list[Flight] = []
        self.missing = 0
        self.waiting = False


def run(program: Program, players: Sequence[Player], hop_s: float = 0.0) -> list[Flight]:
    """Play an order on what computes on each rank; returns every exchange, with its start and end.

    Raises
    ------
    OrderError
        If the order waits for ever.
    """
    order = program.order
    flights, of = _flights(program)
    queues: dict[tuple[int, str], deque[Flight]] = {}
    free: dict[tuple[int, str], float] = {}
    at = [0] * order.pp
    launched = [0] * order.pp
    beside = [0] * order.pp
    ready = deque(range(order.pp))
    queued = [True] * order.pp

    def wake(rank: int) -> None:
        if not queued[rank]:
            queued[rank] = True
            ready.append(rank)

    def start_head(key: tuple[int, str]) -> None:
        """Start what is first on a stream, and end what that was the last thing missing for."""
        keys = [key]
        while keys:
            key = keys.pop()
            queue = queues[key]
            if not queue or queue[0].start is not None:
                continue
            head = queue[0]
            head.start = max(head.ready, free.get(key, 0.0))
            for peer in head.peers:
                peer.missing -= 1
            for flight in (head, *head.peers):
                if flight.missing <= 0 and flight.start is not None and flight.end is None:
                    flight.end = hop_s + max([flight.start, *(p.start for p in flight.peers if p.start is not None)])
                    place = (flight.rank, flight.item.stream)
                    free[place] = flight.end
                    queues[place].popleft()
                    keys.append(place)
                    if flight.waiting:
                        wake(flight.rank)

    def advance(r: int) -> None:
        player, items = players[r], program.ranks[r]
        mine = flights[r]
        while at[r] < len(items):
            item = items[at[r]]
            if isinstance(item, Exchange):
                if launched[r] <= at[r]:
                    flight = mine[at[r]]
                    assert flight is not None
                    launched[r] = at[r] + 1
                    flight.ready = max(player.now, player.issued)
                    key = (r, item.stream)
                    queues.setdefault(key, deque()).append(flight)
                    start_head(key)
                if item.blocking:
                    flight = mine[at[r]]
                    assert flight is not None
                    if flight.end is None:
                        flight.waiting = True
                        return
                    player.wait_until(flight.end, _cause(item))
                    player.exchanged()
                else:
                    beside[r] += 1
            else:
                need = received(order, item)
                if need is not None:
                    came = of[need]
                    if came.end is None:
                        came.waiting = True
                        return
                    player.wait_until(came.end, "forward input" if item.kind == "F" else "backward input")
                player.compute(item, beside[r])
                beside[r] = 0
            at[r] += 1

    while ready:
        r = ready.popleft()
        queued[r] = False
        advance(r)
    if any(at[r] < len(program.ranks[r]) for r in range(order.pp)) or any(queues.values()):
        check(program)
        raise OrderError("the order waits for ever")
    return [flight for rank in flights for flight in rank if flight is not None]


def _flights(program: Program) -> tuple[list[list[Flight | None]], dict[Action, Flight]]:
    """Every exchange of a program, with those of its peers."""
    of: dict[Action, Flight] = {}
    flights: list[list[Flight | None]] = []
    for r, items in enumerate(program.ranks):
        mine: list[Flight | None] = []
        for item in items:
            flight = Flight(item, r) if isinstance(item, Exchange) else None
            if flight is not None:
                of.update(dict.fromkeys(flight.item.ops, flight))
            mine.append(flight)
        flights.append(mine)
    for rank in flights:
        for flight in rank:
            if flight is None:
                continue
            for op in flight.item.ops:
                peer = of.get(_peer(op))
                if peer is None:
                    check(program)
                    raise OrderError(f"{op} has no {_peer(op)}")
                if peer not in flight.peers:
                    flight.peers.append(peer)
            flight.missing = len(flight.peers)
    return flights, of


def _cause(item: Exchange) -> str:
    if len(item.ops) == 1 and item.ops[0].kind in ("RECV_F", "RECV_B"):
        return "forward input" if item.ops[0].kind == "RECV_F" else "backward input"
    return "exchange"


@dataclass
class _Clock:
    """Computations of known seconds, without a host."""

    rank: int
    seconds: Callable[[Action], float]
    now: float = 0.0
    issued: float = 0.0
    spans: list[Span] = field(default_factory=list)
    idle: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))

    def compute(self, action: Action, beside: int) -> None:
        start = self.now
        self.now = start + self.seconds(action)
        self.spans.append(Span(self.rank, action, start, self.now))

    def wait_until(self, time: float, cause: str) -> None:
        if time > self.now:
            self.idle["fill" if not self.spans else cause] += time - self.now
            self.now = time

    def exchanged(self) -> None:
        """There is no host to wait."""


def play(program: Program, seconds: Callable[[Action], float], hop_s: float = 0.0) -> Played:
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
    >>> from mofa.orders import order_of, program_of
    >>> program = program_of(order_of("1f1b", "torchtitan", 2, 1, 4), "1f1b", "torchtitan")
    >>> played = play(program, lambda action: 1.0 if action.kind == "F" else 2.0)
    >>> played.total, played.bubble_fraction
    (15.0, 0.25)
    """
    clocks = [_Clock(r, seconds) for r in range(program.order.pp)]
    flights = run(program, clocks, hop_s)
    total = max(clock.now for clock in clocks)
    for clock in clocks:
        clock.idle["drain"] += total - clock.now
    return Played(
        tuple(tuple(clock.spans) for clock in clocks), sent_spans(flights, program.order.pp),
        tuple(clock.idle for clock in clocks), total,
    )  # fmt: skip


def sent_spans(flights: Sequence[Flight], pp: int) -> tuple[tuple[Span, ...], ...]:
    """Sends and receives per rank, from start to end."""
    out: list[list[Span]] = [[] for _ in range(pp)]
    for flight in flights:
        assert flight.start is not None and flight.end is not None
        out[flight.rank] += [Span(flight.rank, op, flight.start, flight.end) for op in flight.item.ops]
    return tuple(map(tuple, out))


def in_flight(order: Order) -> list[list[int]]:
    """Most micro-batches whose activations a rank holds, per chunk, at the moment at which it holds most. [-]

    From the start of a forward to the end of its backward, by weights where that runs apart.
    """
    out = []
    for acts in order.ranks:
        now = [0] * order.vpp
        most = list(now)
        for act in acts:
            if act.kind == "F":
                now[order.chunk_of(act.stage)] += 1
                if sum(now) > sum(most):
                    most = list(now)
            elif act.kind in ("B", "W"):
                now[order.chunk_of(act.stage)] -= 1
        out.append(most)
    return out


def _peer(op: Action) -> Action:
    kind = {"SEND_F": "RECV_F", "RECV_F": "SEND_F", "SEND_B": "RECV_B", "RECV_B": "SEND_B"}[op.kind]
    return Action(kind, op.stage + (1 if op.kind in ("SEND_F", "RECV_B") else -1), op.micro_batch)  # type: ignore[arg-type]
