"""A program with its sends and receives matched once, so that it can be played many times."""

from __future__ import annotations

from dataclasses import dataclass

from mofa.schedules.order import ANSWERS, Action, Exchange, Program
from mofa.schedules.order_check import OrderError, check_program

INPUTS = ("forward input", "backward input")


Wire = tuple[Action | None, int, bool, str]
"""What a rank launches: a computation (the action) that reads what the exchange of this number brings (-1: nothing), or
the exchange itself, for which it waits where it blocks; and what waiting for it is called."""


@dataclass(frozen=True)
class NumberedExchanges:
    """A program as numbers. Of each exchange: itself, its rank, its stream's place among ``num_streams``, its peers;
    the ``partner`` is a peer that has no other one either, as nearly all do, else -1."""

    program: Program
    ranks: tuple[tuple[Wire, ...], ...]
    exchanges: tuple[Exchange, ...]
    rank_of: tuple[int, ...]
    stream_of: tuple[int, ...]
    peers: tuple[tuple[int, ...], ...]
    partner: tuple[int, ...]
    num_streams: int


def match_exchanges(program: Program) -> NumberedExchanges:
    """Match every send with its receive and every computation with what brings its input.

    Raises
    ------
    OrderError
        If a send or a receive has no other side.
    """
    exchanges: list[Exchange] = []
    rank_of: list[int] = []
    stream_of: list[int] = []
    of: dict[tuple[str, int, int], int] = {}
    streams: dict[tuple[int, str], int] = {}
    for r, items in enumerate(program.ranks):
        for item in items:
            if type(item) is Exchange:
                ops, stream, _ = item
                for op in ops:
                    of[op] = len(exchanges)
                exchanges.append(item)
                rank_of.append(r)
                stream_of.append(streams.setdefault((r, stream), len(streams)))
    peers: list[tuple[int, ...]] = []
    for item in exchanges:
        ops = item.ops
        if len(ops) == 1:
            ((kind, stage, micro_batch),) = ops
            other, step = ANSWERS[kind]
            peer = of.get((other, stage + step, micro_batch))
            peers.append((peer,) if peer is not None else _peers(program, item, of))
        else:
            peers.append(_peers(program, item, of))
    partner = [own_peers[0] if len(own_peers) == 1 and len(peers[own_peers[0]]) == 1 else -1 for own_peers in peers]
    sends_to_other_rank = program.order.sends_to_other_rank
    number = 0
    ranks: list[tuple[Wire, ...]] = []
    for items in program.ranks:
        wires: list[Wire] = []
        for item in items:
            if type(item) is Exchange:
                wires.append((None, number, item.blocking, _cause(item)))
                number += 1
            elif type(item) is Action:
                kind, stage, micro_batch = item
                if kind == "F":
                    need = of["RECV_F", stage, micro_batch] if stage and sends_to_other_rank[stage - 1] else -1
                else:
                    need = of["RECV_B", stage, micro_batch] if kind != "W" and sends_to_other_rank[stage] else -1
                wires.append((item, need, True, INPUTS[kind != "F"]))
        ranks.append(tuple(wires))
    return NumberedExchanges(
        program, tuple(ranks), tuple(exchanges), tuple(rank_of), tuple(stream_of), tuple(peers), tuple(partner),
        len(streams),
    )  # fmt: skip


def _peers(program: Program, item: Exchange, of: dict[tuple[str, int, int], int]) -> tuple[int, ...]:
    out: list[int] = []
    for kind, stage, micro_batch in item.ops:
        other, step = ANSWERS[kind]
        n = of.get((other, stage + step, micro_batch))
        if n is None:
            check_program(program)
            op = Action(kind, stage, micro_batch)
            raise OrderError(f"{op} has no {Action(other, stage + step, micro_batch)}")
        if n not in out:
            out.append(n)
    return tuple(out)


def _cause(item: Exchange) -> str:
    ops = item.ops
    return _CAUSES.get(ops[0][0], "exchange") if len(ops) == 1 else "exchange"


_CAUSES = {"RECV_F": INPUTS[0], "RECV_B": INPUTS[1]}
