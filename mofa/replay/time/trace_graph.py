"""One rank of a played step as a graph: what each op computes or sends, how long, and what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Literal, NamedTuple, cast

from mofa.blocks.work import Work
from mofa.replay.time.op_recorder import COMPUTE
from mofa.replay.time.time_replayed import Computation, ReplayedTime, StreamOp, Transfer
from mofa.schedules.order import ANSWERS, SENDS, Kind

NodeKind = Literal["op", "send", "receive"]
UNRECORDED = "whole computation"
"""Family of a computation whose ops are not recorded."""
_NAMES = {
    "SEND_F": "send forward",
    "RECV_F": "receive forward",
    "SEND_B": "send backward",
    "RECV_B": "receive backward",
}
_COMPUTED_AS = {"SEND_F": ("F",), "RECV_F": ("F",), "SEND_B": ("B", "I"), "RECV_B": ("B", "I")}
"""Kinds of computations that make, or need, what is handed over: W hands on nothing."""
_BACKWARDS = frozenset({"SEND_B", "RECV_B"})


class GraphNode(NamedTuple):
    """An op, a computation as a whole, or a hand-over between pipeline ranks. [s]"""

    kind: NodeKind
    name: str
    stream: str
    family: str
    start_s: float
    end_s: float
    works: tuple[Work, ...]
    after: tuple[int, ...]
    """Nodes that must end before it begins, by their place in the graph: all come earlier."""
    peer: int = -1
    """Of a hand-over: the other pipeline rank."""
    tag: int = -1
    """Of a hand-over: a number that it shares with its other end alone."""


def rank_graph(played: ReplayedTime, rank: int, ranks_of_stages: Sequence[int]) -> list[GraphNode]:
    """The graph of a pipeline rank, by rising start; every node comes behind those that it waits for.

    Parameters
    ----------
    played
        The step, in which some ops of the rank were watched. Other computations are one node each.
    ranks_of_stages
        The pipeline rank of each stage along the model.

    Raises
    ------
    ValueError
        If nothing of the rank was watched.

    Notes
    -----
    An op waits for the one before it on its stream and on its communicator, for those that make what it reads of other
    streams, and for those that the host had waited for when it launched it. A computation waits for its input from
    another rank, and a send for the computation that makes what is sent.
    """
    if not played.ops_of_spans or not played.ops_of_spans[rank]:
        raise ValueError(f"rank {rank}: no op of it was watched")
    draft = _Draft(played, rank, ranks_of_stages)
    draft.add_computations()
    draft.add_transfers()
    return draft.in_order()


class _Draft:
    """A graph under way: nodes by key, with the keys that each waits for."""

    def __init__(self, played: ReplayedTime, rank: int, ranks_of_stages: Sequence[int]) -> None:
        self.ranks_of_stages, self.pp = ranks_of_stages, len(played.spans)
        self.spans, self.ranges = played.spans[rank], played.ops_of_spans[rank]
        self.ops, self.transfers = played.ops[rank], played.transfers[rank] if played.transfers else ()
        self.nodes: dict[tuple[str, int], GraphNode] = {}
        self.after: dict[tuple[str, int], list[tuple[str, int]]] = {}
        self.first_and_last: dict[tuple[str, int, int], tuple[tuple[str, int], tuple[str, int]]] = {}
        """Of a computation by kind, chunk and micro-batch: the nodes with which it begins and ends computing."""

    def add(self, key: tuple[str, int], node: GraphNode, after: list[tuple[str, int]]) -> None:
        self.nodes[key], self.after[key] = node, after

    def add_computations(self) -> None:
        """Ops, and computations whose ops are not recorded, in between on the computing stream."""
        last: list[tuple[str, int]] = []
        """Of the computing stream."""
        waiting: list[Computation] = []
        """Computations without any op, which the next one plays."""
        done = 0
        for i, span in enumerate(self.spans):
            begin, end = self.ranges[i] if i < len(self.ranges) else (done, len(self.ops))
            keys = [key for n in range(begin, end) if (key := self._add_op(n, last if n == begin else []))]
            computing = [key for key in keys if self.nodes[key].stream == COMPUTE]
            if begin == end and span.end_s > span.start_s:
                computing = [self._add_unrecorded(i, span, last)]
            waiting.append(span)
            done = end
            if computing:
                for each in waiting:
                    self.first_and_last[each.kind, each.chunk, each.micro_batch] = computing[0], computing[-1]
                waiting, last = [], computing[-1:]

    def _add_op(self, n: int, last: list[tuple[str, int]]) -> tuple[str, int] | None:
        op: StreamOp = self.ops[n]
        if op.stream == "wait":
            return None
        key = ("op", n)
        node = GraphNode("op", op.name, op.stream, op.family, op.start_s, op.end_s, op.works, ())
        self.add(key, node, [*(("op", other) for other in op.after), *(last if op.stream == COMPUTE else [])])
        return key

    def _add_unrecorded(self, i: int, span: Computation, last: list[tuple[str, int]]) -> tuple[str, int]:
        name = f"{span.kind} {span.micro_batch}" + (f" chunk {span.chunk}" if span.chunk else "")
        name = "optimizer" if span.kind == "O" else name
        self.add(("span", i), GraphNode("op", name, COMPUTE, UNRECORDED, span.start_s, span.end_s, (), ()), list(last))
        return "span", i

    def add_transfers(self) -> None:
        """Sends behind what makes them, and receives in front of what needs them; those of a kind one by one."""
        last: dict[str, tuple[str, int]] = {}
        for n, transfer in enumerate(sorted(self.transfers, key=lambda t: (t.start_s, t.end_s))):
            key, sends = ("transfer", n), transfer.kind in SENDS
            after = [last[transfer.kind]] if transfer.kind in last else []
            last[transfer.kind] = key
            of = self._computation_of(transfer)
            if of is not None and sends:
                after.append(of[1])
            elif of is not None:
                self.after[of[0]].append(key)
            self.add(key, self._node_of_transfer(transfer), after)

    def _computation_of(self, transfer: Transfer) -> tuple[tuple[str, int], tuple[str, int]] | None:
        chunk = transfer.stage // self.pp
        for kind in _COMPUTED_AS[transfer.kind]:
            if (kind, chunk, transfer.micro_batch) in self.first_and_last:
                return self.first_and_last[kind, chunk, transfer.micro_batch]
        return None

    def _node_of_transfer(self, transfer: Transfer) -> GraphNode:
        _, step = ANSWERS[cast("Kind", transfer.kind)]
        other, back = transfer.stage + step, transfer.kind in _BACKWARDS
        boundary = min(transfer.stage, other)
        tag = (transfer.micro_batch * len(self.ranks_of_stages) + boundary) * 2 + back
        return GraphNode(
            "send" if transfer.kind in SENDS else "receive", f"{_NAMES[transfer.kind]} {transfer.micro_batch}",
            _NAMES[transfer.kind], "pp", transfer.start_s, transfer.end_s, (), (), self.ranks_of_stages[other], tag,
        )  # fmt: skip

    def in_order(self) -> list[GraphNode]:
        """All nodes by rising start, each behind those that it waits for."""
        order = {key: (self.nodes[key].start_s, n) for n, key in enumerate(self.nodes)}
        missing = {key: len(set(after)) for key, after in self.after.items()}
        followers: dict[tuple[str, int], list[tuple[str, int]]] = {}
        for key, after in self.after.items():
            for other in set(after):
                followers.setdefault(other, []).append(key)
        ready = [(*order[key], key) for key, number in missing.items() if not number]
        heapify(ready)
        place: dict[tuple[str, int], int] = {}
        while ready:
            key = heappop(ready)[2]
            place[key] = len(place)
            for follower in followers.get(key, ()):
                missing[follower] -= 1
                if not missing[follower]:
                    heappush(ready, (*order[follower], follower))
        assert len(place) == len(self.nodes), "ops wait for each other"
        return [self.nodes[key]._replace(after=tuple(sorted({place[other] for other in self.after[key]})))
                for key in place]  # fmt: skip
