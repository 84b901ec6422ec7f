"""The clock of a pipeline: an order played with the seconds of every computation and every hand-over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from mofa.replay.check import OrderError, check
from mofa.replay.orders.exchange import received
from mofa.replay.orders.order import Action, Exchange, Order, Program

CAUSES = ("fill", "forward input", "backward input", "exchange", "drain")
"""Why a rank computes nothing: before its first computation, waiting for what a neighbour sends, for an exchange to
end, and after its last computation until the last rank's."""


@dataclass(frozen=True)
class Span:
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


@dataclass
class _Flight:
    """An exchange in flight."""

    item: Exchange
    rank: int
    ready: float
    start: float | None = None
    end: float | None = None


@dataclass
class _Clock:
    now: float = 0.0
    at: int = 0
    spans: list[Span] = field(default_factory=list)
    idle: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    waiting: str = ""

    def wait_until(self, time: float, cause: str) -> None:
        if time > self.now:
            self.idle["fill" if not self.spans else cause] += time - self.now
            self.now = time


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
    >>> from mofa.replay.orders import order_of, program_of
    >>> program = program_of(order_of("1f1b", "torchtitan", 2, 1, 4), "1f1b", "torchtitan")
    >>> played = play(program, lambda action: 1.0 if action.kind == "F" else 2.0)
    >>> played.total, played.bubble_fraction
    (15.0, 0.25)
    """
    order = program.order
    clocks = [_Clock() for _ in range(order.pp)]
    queues: dict[tuple[int, str], deque[_Flight]] = {}
    free: dict[tuple[int, str], float] = {}
    of: dict[Action, _Flight] = {}
    ended: dict[Action, float] = {}
    flights: list[_Flight] = []

    def advance(r: int) -> bool:
        clock, moved = clocks[r], False
        items = program.ranks[r]
        while clock.at < len(items):
            item = items[clock.at]
            if isinstance(item, Exchange):
                flight = of.get(item.ops[0])
                if flight is None:
                    flight = _Flight(item, r, clock.now)
                    flights.append(flight)
                    queues.setdefault((r, item.stream), deque()).append(flight)
                    of.update(dict.fromkeys(item.ops, flight))
                    moved = True
                if item.blocking:
                    if flight.end is None:
                        return moved
                    ways = {op.kind for op in item.ops}
                    clock.wait_until(flight.end, "forward input" if ways == {"RECV_F"} else
                                     "backward input" if ways == {"RECV_B"} else "exchange")  # fmt: skip
            else:
                need = received(order, item)
                if need is not None:
                    flight = of.get(need)
                    if flight is None or flight.end is None:
                        return moved
                    clock.wait_until(flight.end, "forward input" if item.kind == "F" else "backward input")
                start = clock.now
                clock.now = start + seconds(item)
                clock.spans.append(Span(r, item, start, clock.now))
                ended[item] = clock.now
            clock.at += 1
            moved = True
        return moved

    def exchange() -> bool:
        moved = False
        for key, queue in queues.items():
            while queue:
                head = queue[0]
                if head.start is None:
                    head.start = max(head.ready, free.get(key, 0.0))
                    moved = True
                sides = [of.get(_peer(op)) for op in head.item.ops]
                if any(side is None or side.start is None for side in sides):
                    break
                head.end = hop_s + max(head.start, *(s.start for s in sides if s is not None and s.start is not None))
                free[key] = head.end
                queue.popleft()
                moved = True
        return moved

    moved = True
    while moved:
        steps = [advance(r) for r in range(order.pp)]
        moved = exchange() or any(steps)
    if any(clock.at < len(program.ranks[r]) for r, clock in enumerate(clocks)) or any(queues.values()):
        check(program)
        raise OrderError("the order waits for ever")
    total = max(clock.now for clock in clocks)
    for clock in clocks:
        clock.idle["drain"] += total - clock.now
    sent: list[list[Span]] = [[] for _ in range(order.pp)]
    for flight in flights:
        assert flight.start is not None and flight.end is not None
        sent[flight.rank] += [Span(flight.rank, op, flight.start, flight.end) for op in flight.item.ops]
    return Played(
        tuple(tuple(clock.spans) for clock in clocks), tuple(tuple(spans) for spans in sent),
        tuple(clock.idle for clock in clocks), total,
    )  # fmt: skip


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
