"""What a pipeline's computations and hand-overs wait for, in levels of what can start together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mofa.schedules import (
    SCHEDULES,
    Action,
    Exchange,
    Order,
    Program,
    Runtime,
    computation_order_of,
    program_with_exchanges,
)
from mofa.schedules.point_to_point import receive_needed_by

IntA = NDArray[np.intp]
Once = Literal["", "Megatron", "FSDP of chunks", "FSDP of pieces"]
"""What data parallelism does once a step beside computing: nothing; Megatron's gathers and reductions of chunks; FSDP's
under PyTorch's pipelines of several chunks, and of one, whose first forward gathers piece by piece."""


@dataclass(frozen=True)
class DependencyLevels:
    """A program's computations and hand-overs by level.

    A level has its nodes, and for each of them three more things: the nodes whose ends it waits for, (waits, nodes),
    those that a hand-over follows, and the computation before it on its rank. Node 0 is the start.

    ``duration_index`` says which of the durations each node takes, (N,). Duration 0 is a hand-over. Behind it come, by
    rank and chunk: each kind of computation alone; each beside a hand-over; gathers; what of these holds up a forward;
    reductions; FSDP's sums over replicas; of pairs of passes their backwards, and their forwards beside a backward of
    each chunk. In place of gathers and what holds up, FSDP of pieces has first forwards alone and beside a hand-over.
    """

    levels: tuple[tuple[slice, IntA, IntA, IntA], ...]
    duration_index: IntA
    size: int
    last_nodes: IntA
    """The last computation and the last reduction of each rank."""
    last_steady: IntA
    """The last backward of each rank's steady state."""
    round_before: IntA
    """The backward one round before it."""
    waits: tuple[IntA, IntA]
    """What of ``levels`` each node waits for: where its nodes begin in the second array, (N + 1,), and these."""
    hand_over_before: tuple[IntA, IntA]
    """The same of what a hand-over follows."""
    previous_on_rank: IntA
    """The computation before each node on its rank, (N,)."""
    rank: IntA
    """The rank whose computation a node is, -1 of all others, (N,)."""
    in_last_round: IntA
    """1 of the computations between ``round_before`` and ``last_steady``, the second included; else 0. (N,)"""

    @cached_property
    def array_addresses(self) -> tuple[int, ...]:
        """Where the arrays behind ``size`` begin in memory, in their order but for ``last_nodes`` to ``round_before``,
        which come before the last two."""
        lists = (*self.waits, *self.hand_over_before, self.previous_on_rank)
        ends = (self.last_nodes, self.last_steady, self.round_before)
        return tuple(array.ctypes.data for array in (*lists, *ends, self.rank, self.in_last_round))


@dataclass(frozen=True)
class _Computations:
    """The computations of an order as arrays; every rank has as many. ``kind`` says which of ``num_kinds`` it is.

    Arrays of shape (pp, n).
    """

    order: Order
    num_kinds: int
    kind: IntA
    stage: IntA
    micro_batch: IntA

    @classmethod
    def of(cls, order: Order, kinds: tuple[str, ...]) -> _Computations:
        columns = np.array([(kinds.index(a.kind), a.stage, a.micro_batch) for rank in order.ranks for a in rank])
        return cls(order, len(kinds), *columns.T.reshape(3, order.pp, -1))

    @property
    def backward(self) -> NDArray[np.bool_]:
        return self.kind > 0

    @property
    def chunk(self) -> IntA:
        return self.stage // self.order.pp

    def weight(self, beside: NDArray[np.bool_], *, times_first_forwards: bool) -> IntA:
        """Which duration each takes, alone or beside a hand-over; first forwards take their own
        with ``times_first_forwards``. (pp, n)"""
        pp, vpp = self.order.pp, self.order.vpp
        place = np.arange(pp)[:, None] * vpp + self.chunk
        weight = 1 + self.kind * pp * vpp + place + self.num_kinds * pp * vpp * beside
        if not times_first_forwards:
            return np.asarray(weight)
        is_first = (self.kind == 0) & (self.micro_batch == 0)
        return np.where(is_first, 1 + (2 * self.num_kinds + beside) * pp * vpp + place, weight)

    def weight_of_pairs(self, weight: IntA, in_pair: NDArray[np.bool_]) -> IntA:
        """The durations with those of pairs, whose backwards are ``in_pair``, each right in front of its forward.
        (pp, n)"""
        pp, vpp = self.order.pp, self.order.vpp
        place = np.arange(pp)[:, None] * vpp + self.chunk
        first = 1 + (2 * self.num_kinds + 3) * pp * vpp
        out = np.where(in_pair, first + place, weight)
        rank, backward = np.nonzero(in_pair)
        chunk = self.chunk[rank, backward]
        out[rank, backward + 1] = first + (1 + chunk) * pp * vpp + place[rank, backward + 1]
        return out


@dataclass
class _Graph:
    """Which duration each node takes, and pairs of a node and one whose end it waits for, itself or a hand-over behind
    it. Node 0 is the start; ``computations`` are nodes too. (N,), (pairs, 2), (pairs, 2), (pp, n)"""

    weight: IntA
    waits: IntA
    sent: IntA
    computations: IntA


@lru_cache(maxsize=256)
def dependency_levels_of(
    schedule: str, runtime: Runtime, pp: int, vpp: int, num_micro_batches: int, each: int, once: Once
) -> DependencyLevels:  # fmt: skip
    """What each computation and transfer of a schedule waits for, level by level.

    Its rounds are of ``each`` micro-batches; ``once`` says which gathers and reductions come once a step.
    """
    order = computation_order_of(schedule, runtime, pp, vpp, num_micro_batches)
    computations = _Computations.of(order, SCHEDULES[schedule].computation_kinds)
    queued = runtime == "pytorch"
    if queued:
        program = program_with_exchanges(order, schedule, runtime)
        graph = _queued(computations, program, times_first_forwards=once == "FSDP of pieces")
    else:
        graph = _beside(computations, paired=SCHEDULES[schedule].pairs_passes)
    reduced = _add_once(graph, computations, once) if once else []
    size = len(graph.weight)
    level = _level(size, np.concatenate([graph.waits, graph.sent]))
    handed = np.bincount(graph.sent[:, 0], minlength=size) > 0
    in_order = np.lexsort((handed, level))
    place = np.empty(size, dtype=np.intp)
    place[in_order] = np.arange(size)
    new = (np.diff(level[in_order]) > 0) | (handed[in_order][1:] != handed[in_order][:-1])
    firsts = 1 + np.flatnonzero(new)  # node 0 is a level of its own
    bounds = list(zip(firsts.tolist(), [*firsts[1:].tolist(), size], strict=True))
    waits_of, sent_of = (_before_each(place[pairs], size) for pairs in (graph.waits, graph.sent))
    waits, sent = (_tables(of_each, bounds) for of_each in (waits_of, sent_of))
    weight = graph.weight[in_order]
    before = np.zeros(size, dtype=np.intp)
    before[graph.computations[:, 1:]] = graph.computations[:, :-1]
    before = place[before[in_order]]
    last_steady, round_before = [], []
    rank_of, in_last_round = np.full(size, -1), np.zeros(size, dtype=np.intp)
    for rank, nodes in enumerate(graph.computations):
        ahead = 2 * (pp - 1 - rank) + (vpp - 1) * each + SCHEDULES[schedule].pairs_passes
        last = len(nodes) - 1 - min(ahead, len(nodes) // 2)
        last_steady.append(nodes[last])
        first = max(last - 2 * each * vpp, 0)
        round_before.append(nodes[first])
        rank_of[place[nodes]], in_last_round[place[nodes[first + 1 : last + 1]]] = rank, 1
    return DependencyLevels(
        tuple((slice(a, b), w, s, before[a:b]) for (a, b), w, s in zip(bounds, waits, sent, strict=True)), weight, size,
        place[[*graph.computations[:, -1], *reduced]], place[last_steady], place[round_before], waits_of, sent_of,
        before, rank_of, in_last_round,
    )  # fmt: skip


def _before_each(pairs: IntA, size: int) -> tuple[IntA, IntA]:
    """What each node waits for: where its nodes begin in the second array, (N + 1,), and these."""
    node, before = np.divmod(np.unique(pairs[:, 0] * size + pairs[:, 1]), size)
    return np.concatenate([[0], np.cumsum(np.bincount(node, minlength=size))]), before


def _tables(of_each: tuple[IntA, IntA], bounds: Sequence[tuple[int, int]]) -> list[IntA]:
    """The same by level, for fewer the last repeated; of none an empty table. (most, nodes) each"""
    first, before = of_each
    start, count = first[:-1], np.diff(first)
    most = np.maximum.reduceat(count, [a for a, _ in bounds])
    out = []
    for (a, b), width in zip(bounds, most.tolist(), strict=True):
        which = start[a:b] + np.minimum(np.arange(width)[:, None], count[a:b] - 1)
        out.append(before[which])
    return out


def _level(size: int, pairs: IntA) -> IntA:
    """How many nodes are behind each other at most before each. (N,)"""
    by_source = pairs[np.argsort(pairs[:, 1], kind="stable")]
    first = np.searchsorted(by_source[:, 1], np.arange(size + 1)).tolist()
    readers = by_source[:, 0].tolist()
    missing = np.bincount(pairs[:, 0], minlength=size).tolist()
    level = [0] * size
    ready = [0]
    for node in ready:
        behind = level[node] + 1
        for reader in readers[first[node] : first[node + 1]]:
            if level[reader] < behind:
                level[reader] = behind
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    assert len(ready) == size
    return np.array(level)


def _beside(computations: _Computations, *, paired: bool = False) -> _Graph:
    """Computations alone, each with the hand-over that it needs; ``paired`` where a backward right in front of a
    forward runs with it as one, and gives what it makes when that is through.

    Hand-overs run on a stream for each pair of ranks and do not queue, as one is shorter than a computation. Follows
    :func:`mofa.schedules.point_to_point.overlapped_exchanges`: behind every forward the next one's receive is launched,
    backwards likewise, the first backward's behind the last forward but one.
    """
    order, (pp, n) = computations.order, computations.stage.shape
    last = order.num_stages - 1
    node = 1 + np.arange(pp * n).reshape(pp, n)
    in_pair = np.zeros((pp, n), dtype=bool)
    in_pair[:, :-1] = paired & computations.backward[:, :-1] & ~computations.backward[:, 1:]
    ended = node + in_pair  # the node at whose end what each makes is there
    before = np.concatenate([np.zeros((pp, 1), dtype=np.intp), node[:, :-1]], axis=1)
    of = np.zeros((2, order.num_stages, order.num_micro_batches), dtype=np.intp)
    of[computations.backward * 1, computations.stage, computations.micro_batch] = ended
    source = computations.stage + np.where(computations.backward, 1, -1)
    receives = (source >= 0) & (source <= last)
    sends = np.where(computations.backward, computations.stage > 0, computations.stage < last)
    launched = _launched_behind(computations.backward)
    behind = np.where(launched < 0, 0, np.take_along_axis(ended, np.maximum(launched, 0), axis=1))
    beside = np.zeros((pp, n + 1), dtype=bool)
    beside[np.nonzero(receives)[0], launched[receives] + 1] = True
    beside[:, 1:] |= sends
    beside = beside[:, :n]
    made = of[computations.backward * 1, np.clip(source, 0, last), computations.micro_batch]
    sent = [np.stack([node[receives], other[receives]], axis=1) for other in (made, behind)]
    weight = computations.weight(beside, times_first_forwards=False)
    weight = computations.weight_of_pairs(weight, in_pair).ravel()
    return _Graph(
        np.concatenate([[0], weight]), np.stack([node.ravel(), before.ravel()], axis=1),
        np.concatenate(sent), node,
    )  # fmt: skip


def _launched_behind(backward: NDArray[np.bool_]) -> IntA:
    """Behind which computation of its rank each one's input is begun to be received, -1 before the first. (pp, n)"""
    position = np.arange(backward.shape[1])
    behind = np.full(backward.shape, -1)
    for which in (~backward, backward):
        latest = np.maximum.accumulate(np.where(which, position, -1), axis=1)
        earlier = np.concatenate([np.full((len(backward), 1), -1), latest[:, :-1]], axis=1)
        behind = np.where(which, np.where(earlier < 0, np.maximum(position - 2, -1), earlier), behind)
    return behind


def _queued(computations: _Computations, program: Program, *, times_first_forwards: bool) -> _Graph:
    """Computations and hand-overs where all of a rank's run one after the other on one stream: a send and its receive
    are one node, as both end at once."""
    order, (pp, n) = computations.order, computations.stage.shape
    of: dict[Action, int] = {}
    waits: list[tuple[int, int]] = []
    node, beside = np.empty((pp, n), dtype=np.intp), np.zeros((pp, n), dtype=bool)
    for rank, items in enumerate(program.ranks):
        before, queue, i, handed = 0, 0, 0, False
        for item in items:
            exchange = isinstance(item, Exchange)
            number = of.setdefault(_receive(item.ops[0]) if isinstance(item, Exchange) else item, len(of) + 1)
            waits.append((number, before))
            if exchange:
                waits.append((number, queue))
                queue, handed = number, True
                continue
            node[rank, i], beside[rank, i] = number, handed
            before, handed, i = number, False, i + 1
    for key, number in of.items():
        need = receive_needed_by(order, key) if key.kind in ("F", "B", "I") else None
        if need is not None:
            waits.append((number, of[need]))
    weight = np.zeros(len(of) + 1, dtype=np.intp)
    weight[node] = computations.weight(beside, times_first_forwards=times_first_forwards)
    return _Graph(weight, np.array(waits), np.zeros((0, 2), dtype=np.intp), node)


def _receive(op: Action) -> Action:
    """The receive that an exchange is, or that its send belongs to."""
    if op.kind == "SEND_F":
        return Action("RECV_F", op.stage + 1, op.micro_batch)
    if op.kind == "SEND_B":
        return Action("RECV_B", op.stage - 1, op.micro_batch)
    return op


def _add_once(graph: _Graph, computations: _Computations, once: Once) -> list[int]:
    """Add gathers of parameters and reductions of gradients once a step; the last reductions.

    Megatron's of chunks are launched at once on all ranks, on one stream (``param_sync_func``, ``grad_sync_func``).
    PyTorch's runtime gathers two chunks ahead, and reduces on another stream behind a chunk's last backward. On a third
    one it sums over replicas what is reduced.
    """
    pp, vpp = computations.order.pp, computations.order.vpp
    size, new, last, block = pp * vpp, len(graph.weight), [], 2 * computations.num_kinds
    is_megatron = once == "Megatron"
    weight: list[int] = []
    waits: list[tuple[int, int]] = []
    for rank, nodes in enumerate(graph.computations.tolist()):
        backward = computations.backward[rank]
        forwards, backwards = np.flatnonzero(~backward), np.flatnonzero(backward)
        chunks = np.arange(vpp)[:, None]
        first = np.argmax(computations.chunk[rank, forwards] == chunks, axis=1)
        final = len(backwards) - 1 - np.argmax(computations.chunk[rank, backwards[::-1]] == chunks, axis=1)
        stream = 0
        for c in range(vpp if once != "FSDP of pieces" else 0):
            position = 0
            if c > 1:
                position = int(forwards[max(first[c - 1] - rank, 0) if is_megatron else first[c - 2]])
            gather, blocking = new + len(weight), new + len(weight) + 1
            weight += [1 + (block + of) * size + rank * vpp + c for of in (0, 1)]
            launched = nodes[position - 1] if position else 0
            waits += [(number, before) for number in (gather, blocking) for before in (launched, stream)]
            waits.append((nodes[forwards[first[c]]], blocking))
            stream = gather
        stream, summed = stream if is_megatron else 0, 0
        for c in np.argsort(final, kind="stable").tolist():
            position = int(backwards[min(int(final[c]) + rank * is_megatron, len(backwards) - 1)])
            waits += [(new + len(weight), nodes[position]), (new + len(weight), stream)]
            stream = new + len(weight)
            weight.append(1 + (block + 2) * size + rank * vpp + c)
            if is_megatron:
                continue
            waits += [(new + len(weight), stream), (new + len(weight), summed)]
            summed = new + len(weight)
            weight.append(1 + (block + 3) * size + rank * vpp + c)
        last.append(stream if is_megatron else summed)
    graph.weight = np.concatenate([graph.weight, weight])
    graph.waits = np.concatenate([graph.waits, waits])
    return last
