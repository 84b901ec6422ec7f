"""A program with its sends and receives matched once, so that it can be played many times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mofa.orders.order import Action, Exchange, Kind, Program
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
    of: dict[tuple[str, int, int], int] = {}
    for r, items in enumerate(program.ranks):
        for item in items:
            if type(item) is Exchange:
                for op in item.ops:
                    of[op] = len(exchanges)
                exchanges.append(item)
                rank_of.append(r)
    streams: dict[tuple[int, str], int] = {}
    stream_of = tuple(
        streams.setdefault((r, item.stream), len(streams)) for r, item in zip(rank_of, exchanges, strict=True)
    )
    peers = tuple([_peers(program, item, of) for item in exchanges])
    hands_over = program.order.hands_over
    number = 0
    ranks: list[tuple[Wire, ...]] = []
    for items in program.ranks:
        mine: list[Wire] = []
        for item in items:
            if type(item) is Exchange:
                mine.append(Wire(None, number, item.blocking, _cause(item)))
                number += 1
            elif type(item) is Action:
                kind, stage, micro_batch = item
                if kind == "F":
                    need = of["RECV_F", stage, micro_batch] if stage and hands_over[stage - 1] else -1
                else:
                    need = of["RECV_B", stage, micro_batch] if kind != "W" and hands_over[stage] else -1
                mine.append(Wire(item, need, True, INPUTS[kind != "F"]))
        ranks.append(tuple(mine))
    return Wiring(program, tuple(ranks), tuple(exchanges), tuple(rank_of), stream_of, peers, len(streams))


def _peers(program: Program, item: Exchange, of: dict[tuple[str, int, int], int]) -> tuple[int, ...]:
    out: list[int] = []
    for op in item.ops:
        kind, stage, micro_batch = op
        other, step = _OTHER[kind]
        n = of.get((other, stage + step, micro_batch))
        if n is None:
            check(program)
            raise OrderError(f"{op} has no {Action(other, stage + step, micro_batch)}")
        if n not in out:
            out.append(n)
    return tuple(out)


_OTHER: dict[str, tuple[Kind, int]] = {
    "SEND_F": ("RECV_F", 1), "RECV_F": ("SEND_F", -1), "SEND_B": ("RECV_B", -1), "RECV_B": ("SEND_B", 1),
}  # fmt: skip
"""The other side of an op, and by how many stages it is further on."""


def _cause(item: Exchange) -> str:
    if len(item.ops) == 1 and item.ops[0].kind in ("RECV_F", "RECV_B"):
        return INPUTS[item.ops[0].kind == "RECV_B"]
    return "exchange"
