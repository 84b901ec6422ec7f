"""A program with its sends and receives matched once, so that it can be played many times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mofa.orders.exchange import received
from mofa.orders.order import Action, Exchange, Program
from mofa.replay.check import OrderError, check

INPUTS = ("forward input", "backward input")


class Wire(NamedTuple):
    """What a rank launches: a computation (``action``) that reads what the exchange ``number`` brings (-1: nothing), or
    the exchange ``number`` itself, for which it waits where ``blocking``. ``cause`` is what waiting for it is called.
    """

    action: Action | None
    number: int
    blocking: bool
    cause: str


@dataclass(frozen=True)
class Wiring:
    """A program as numbers. Of each exchange: itself, its rank, its stream's place among ``num_streams``, its peers."""

    program: Program
    ranks: tuple[tuple[Wire, ...], ...]
    exchanges: tuple[Exchange, ...]
    rank_of: tuple[int, ...]
    stream_of: tuple[int, ...]
    peers: tuple[tuple[int, ...], ...]
    num_streams: int


def wire(program: Program) -> Wiring:
    """Match every send with its receive and every computation with what brings its input.

    Raises
    ------
    OrderError
        If a send or a receive has no other side.
    """
    exchanges: list[Exchange] = []
    rank_of: list[int] = []
    of: dict[Action, int] = {}
    for r, items in enumerate(program.ranks):
        for item in items:
            if isinstance(item, Exchange):
                of.update(dict.fromkeys(item.ops, len(exchanges)))
                exchanges.append(item)
                rank_of.append(r)
    streams: dict[tuple[int, str], int] = {}
    stream_of = tuple(
        streams.setdefault((r, item.stream), len(streams)) for r, item in zip(rank_of, exchanges, strict=True)
    )
    peers = tuple(_peers(program, item, of) for item in exchanges)
    number = 0
    ranks: list[tuple[Wire, ...]] = []
    for items in program.ranks:
        mine: list[Wire] = []
        for item in items:
            if isinstance(item, Exchange):
                mine.append(Wire(None, number, item.blocking, _cause(item)))
                number += 1
            else:
                need = received(program.order, item)
                mine.append(Wire(item, -1 if need is None else of[need], True, INPUTS[item.kind != "F"]))
        ranks.append(tuple(mine))
    return Wiring(program, tuple(ranks), tuple(exchanges), tuple(rank_of), stream_of, peers, len(streams))


def _peers(program: Program, item: Exchange, of: dict[Action, int]) -> tuple[int, ...]:
    out: dict[int, None] = {}
    for op in item.ops:
        other = _other_side(op)
        if other not in of:
            check(program)
            raise OrderError(f"{op} has no {other}")
        out[of[other]] = None
    return tuple(out)


_OTHER = {"SEND_F": "RECV_F", "RECV_F": "SEND_F", "SEND_B": "RECV_B", "RECV_B": "SEND_B"}


def _other_side(op: Action) -> Action:
    step = 1 if op.kind in ("SEND_F", "RECV_B") else -1
    return Action(_OTHER[op.kind], op.stage + step, op.micro_batch)  # type: ignore[arg-type]


def _cause(item: Exchange) -> str:
    if len(item.ops) == 1 and item.ops[0].kind in ("RECV_F", "RECV_B"):
        return INPUTS[item.ops[0].kind == "RECV_B"]
    return "exchange"
