"""Check that an order can run: every forward before its backward, weight gradients after it, and no deadlock.

It reads a :class:`~mofa.schedules.Program` alone, independent of how orders are made.
"""

from __future__ import annotations

from collections import Counter

from mofa.schedules.order import ANSWERS, SENDS, Action, Exchange, Item, Kind, Order, Program


class OrderError(ValueError):
    """An order that cannot run; the message names the op that waits and for what."""


def check_program(program: Program) -> None:
    """Check an order and its sends and receives.

    - Every stage runs each micro-batch forward once, then backward once: whole, or by inputs and then by weights.
    - A computation comes after those that make its input.
    - Sends and receives pair up. Launched in order on their streams, all end: a send once its receive is launched, and
      the other way round.

    Raises
    ------
    OrderError
        With the op that waits and for what.
    """
    _complete(program.order)
    _sequence(program.order)
    _paired(program)
    _no_deadlock(program)


def _complete(order: Order) -> None:
    seen = Counter(action for actions in order.ranks for action in actions)
    for action, count in seen.items():
        if count > 1:
            raise OrderError(f"{action} runs {count} times")
        if not (0 <= action.stage < order.num_stages and 0 <= action.micro_batch < order.num_micro_batches):
            raise OrderError(
                f"{action}: there are {order.num_stages} stages and {order.num_micro_batches} micro-batches"
            )
    for stage in range(order.num_stages):
        for i in range(order.num_micro_batches):
            split = [Action(kind, stage, i) in seen for kind in ("I", "W")]
            if Action("F", stage, i) not in seen:
                raise OrderError(f"{Action('F', stage, i)} never runs")
            if (Action("B", stage, i) in seen) == any(split) or any(split) != all(split):
                raise OrderError(f"{Action('B', stage, i)}: it runs whole or as I and W, each once")
    for r, actions in enumerate(order.ranks):
        for action in actions:
            if order.rank_of(action.stage) != r:
                raise OrderError(f"{action} runs on rank {r}, but the stage is on rank {order.rank_of(action.stage)}")


def _sequence(order: Order) -> None:
    """On one rank: F before B or I, I before W."""
    for r, actions in enumerate(order.ranks):
        position = {act: n for n, act in enumerate(actions)}
        for act, n in position.items():
            needs = {"B": "F", "I": "F", "W": "I"}.get(act.kind)
            if needs and position[act._replace(kind=needs)] > n:  # type: ignore[arg-type]
                raise OrderError(f"rank {r}: {act} waits for {act._replace(kind=needs)}, which comes later")  # type: ignore[arg-type]


def _crosses(order: Order, act: Action) -> tuple[Action, Action] | None:
    step = {"F": 1, "B": -1, "I": -1}.get(act.kind, 0)
    to = act.stage + step
    if not step or not 0 <= to < order.num_stages or order.rank_of(to) == order.rank_of(act.stage):
        return None
    kind = "F" if step > 0 else "B"
    return Action(f"SEND_{kind}", act.stage, act.micro_batch), Action(f"RECV_{kind}", to, act.micro_batch)  # type: ignore[arg-type]


def _paired(program: Program) -> None:
    order = program.order
    want = Counter(op for actions in order.ranks for act in actions for op in _crosses(order, act) or ())
    have = Counter(op for items in program.ranks for item in items if isinstance(item, Exchange) for op in item.ops)
    for op in (want - have) + (have - want):
        raise OrderError(f"{op} is launched {have[op]} times, not {want[op]}")
    for r, items in enumerate(program.ranks):
        made: set[Action] = set()
        for item in items:
            if not isinstance(item, Exchange):
                made.add(item)
                continue
            for op in item.ops:
                kinds: tuple[Kind, ...] = ("F",) if op.kind == "SEND_F" else ("B", "I")
                if op.kind in SENDS and not any(Action(k, op.stage, op.micro_batch) in made for k in kinds):
                    raise OrderError(f"rank {r}: {op} comes before what it sends is computed")


def _peer(op: Action) -> Action:
    kind, step = ANSWERS[op.kind]
    return Action(kind, op.stage + step, op.micro_batch)


def _inputs_of(order: Order, act: Action) -> list[Action]:
    """What a computation waits for: a receive, or one of the computations on its own rank that can make its input."""
    step = {"F": -1, "B": 1, "I": 1}.get(act.kind, 0)
    source = act.stage + step
    if not step or not 0 <= source < order.num_stages:
        return []
    if order.rank_of(source) != order.rank_of(act.stage):
        return [Action("RECV_F" if act.kind == "F" else "RECV_B", act.stage, act.micro_batch)]
    kinds = ("F",) if act.kind == "F" else ("B", "I")
    return [Action(k, source, act.micro_batch) for k in kinds]  # type: ignore[arg-type]


def _advance(queue: list[Exchange], started: set[Action], ended: set[Action]) -> bool:
    """Start the first exchange of a stream, and end those whose peers have started. True if anything changed."""
    moved = False
    while queue:
        head = queue[0]
        fresh = [op for op in head.ops if op not in started]
        started.update(fresh)
        moved = moved or bool(fresh)
        if not all(_peer(op) in started for op in head.ops):
            break
        ended.update(head.ops)
        queue.pop(0)
        moved = True
    return moved


def _no_deadlock(program: Program) -> None:
    """Raise if launching everything in order gets stuck. An exchange starts when the one before it on its stream
    ended."""
    order = program.order
    position = [0] * order.pp
    computed: set[Action] = set()
    started: set[Action] = set()
    ended: set[Action] = set()
    queues: dict[tuple[int, str], list[Exchange]] = {}
    launched: list[set[int]] = [set() for _ in range(order.pp)]

    def missing(item: Item) -> Action | None:
        if isinstance(item, Exchange):
            return next((op for op in item.ops if op not in ended), None) if item.blocking else None
        wants = _inputs_of(order, item)
        return wants[0] if wants and not any(w in computed or w in ended for w in wants) else None

    moved = True
    while moved:
        moved = False
        for r, items in enumerate(program.ranks):
            while position[r] < len(items):
                item = items[position[r]]
                if isinstance(item, Exchange) and position[r] not in launched[r]:
                    launched[r].add(position[r])
                    queues.setdefault((r, item.stream), []).append(item)
                    moved = True
                if missing(item) is not None:
                    break
                if not isinstance(item, Exchange):
                    computed.add(item)
                position[r] += 1
                moved = True
        for queue in queues.values():
            moved = _advance(queue, started, ended) or moved
    for r, items in enumerate(program.ranks):
        if position[r] < len(items):
            raise OrderError(
                f"rank {r} waits at {_name(items[position[r]])} for ever: {_why(program, r, position, started)}"
            )
    for (r, stream), queue in queues.items():
        if queue:
            raise OrderError(f"rank {r}, stream {stream}: {_name(queue[0])} never ends")


def _name(item: Item) -> str:
    return " and ".join(str(op) for op in item.ops) if isinstance(item, Exchange) else str(item)


def _why(program: Program, rank: int, position: list[int], started: set[Action]) -> str:
    """What a waiting item lacks: the op that its peer has not launched, and the item at which the peer is."""
    order = program.order
    for item in program.ranks[rank][: position[rank] + 1]:
        if not isinstance(item, Exchange):
            continue
        for op in item.ops:
            peer = _peer(op)
            if op in started and peer not in started:
                other = order.rank_of(peer.stage)
                awaited = program.ranks[other][position[other]] if position[other] < len(program.ranks[other]) else None
                return f"{op} lacks {peer}, while rank {other} is at {_name(awaited) if awaited else 'its end'}"
    return "an earlier exchange of its stream has not ended"
