"""The longest path through an interleaved pipeline's own order of computations and hand-overs, for many plans at once.

The replay's clock, without a host: a computation starts when the one before it on its rank is done and its input has
come; a hand-over takes ``hop_s`` from when both sides have launched it and their streams are free. What can start
once so many others are done forms a level, and a level is one pass over arrays. Rounds of a steady state take equally
long, so that only :data:`ROUNDS` of them are walked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from mofa.orders import Action, Exchange, Program, order_of, program_of
from mofa.orders.exchange import received
from mofa.orders.interleaved import rounds
from mofa.specs.framework import PYTORCH_MODULES

ArrayN = NDArray[np.float64]
IntA = NDArray[np.intp]
IntN = NDArray[np.int64]

ROUNDS = 3
"""Rounds of micro-batches that are walked at most; those behind take as long as the last of the steady state. [-]"""
_AT_ONCE = 1 << 20
"""Entries of the array of ends that are held at once: what stays in the cache. [-]"""


@dataclass(frozen=True)
class Levels:
    """A program's computations and hand-overs by level.

    Each level is the first of its nodes, the nodes whose ends they wait for (waits, nodes), those that a hand-over
    follows, and which of the durations each takes: 0 is a hand-over, then by rank and chunk those of forwards and
    backwards alone, the same beside a hand-over, and gathers, what of them holds up a forward, and reductions. Node 0
    is the start.
    """

    levels: tuple[tuple[int, IntA, IntA, IntA], ...]
    size: int
    ends: IntA
    """The last computation and the last reduction of each rank."""
    late: IntA
    """The last backward of each rank's steady state; ``early`` the one a round before it."""
    early: IntA


@dataclass(frozen=True)
class OncePerStep:
    """What data parallelism does once a step for each chunk of a rank, on a stream beside computing. (n, pp, vpp) [s]

    ``gather_s`` of parameters, ``held_s`` what of it comes before anything of the first forward, ``reduce_s`` of
    gradients.
    """

    gather_s: ArrayN
    held_s: ArrayN
    reduce_s: ArrayN


def critical_path_s(
    framework: str, forward_s: ArrayN, backward_s: ArrayN, num_micro_batches: IntN, hop_s: ArrayN, slowdown: float,
    once: OncePerStep | None = None, of: IntA | None = None,
) -> ArrayN:  # fmt: skip
    """Time of an interleaved schedule, from the first forward to the end of the last backward.

    Parameters
    ----------
    forward_s, backward_s
        Of one micro-batch on each chunk of each rank, or of those that differ. (n, R, vpp) [s]
    num_micro_batches
        (n,) [-]
    hop_s
        One hand-over. (n,) [s]
    slowdown
        What computing loses of its rate beside a hand-over. [-]
    once
        Gathers and reductions: the time then goes from the first gather to the last reduction. Megatron's, which all
        ranks launch at once: a chunk's gather when the first forward of the chunk before begins on rank 0, the first
        two at the start; a reduction as many backwards behind the chunk's last as the rank counts.
    of
        Which of the ranks that are given each one is like; all are given where absent. (pp,)

    Returns
    -------
    ArrayN
        (n,) [s]

    Notes
    -----
    Assumes that the clocks of all ranks have found their common period before the last of :data:`ROUNDS` rounds.

    Examples
    --------
    Even chunks: ``m t + (pp - 1) t / vpp`` (Narayanan et al. 2021, arXiv 2104.04473, section 2.2), with m of 8 and 800:

    >>> f = np.ones((2, 4, 2))
    >>> critical_path_s("megatron", f, 2 * f, np.array([8, 800]), np.zeros(2), 0.0)
    array([  57., 4809.])
    """
    shown, vpp = forward_s.shape[1:]
    like = np.arange(shown) if of is None else of
    pp = len(like)
    # where the durations of each of all ranks' chunks are among the given
    place = (np.arange(7)[:, None, None] * shown + like[:, None]) * vpp + np.arange(vpp)
    rows = np.concatenate([[0], 1 + place.ravel()])
    both = np.stack([forward_s, backward_s], axis=1).reshape(len(forward_s), -1).T
    parts = [hop_s[None], both, both + slowdown * np.minimum(hop_s, both)]
    if once is not None:
        parts += [part.reshape(len(part), -1).T for part in (once.gather_s, once.held_s, once.reduce_s)]
    durations = np.concatenate(parts)
    total, runtime = np.empty(len(forward_s)), framework in PYTORCH_MODULES
    nums, inverse = np.unique(num_micro_batches, return_inverse=True)
    per_round = np.array([rounds(pp, num) if runtime else pp for num in nums.tolist()])
    # plans of one order are walked together, however many rounds each leaves out
    kinds, kind = np.unique(np.stack([np.minimum(nums, ROUNDS * per_round), per_round]), axis=1, return_inverse=True)
    kind_of = kind.ravel()[inverse]
    for which, (walked, each) in enumerate(kinds.T.tolist()):
        mine = np.flatnonzero(kind_of == which)
        walk = _levels(framework, pp, vpp, walked, each, once is not None)
        step = max(1, _AT_ONCE // walk.size)
        for start in range(0, len(mine), step):
            some = mine[start : start + step]
            given = np.ascontiguousarray(durations[:, some])
            total[some], period = _walk(walk, rows, given)
            behind = (num_micro_batches[some] - walked) / each
            if runtime and np.any(behind):  # on one stream for all its sends and receives a rank's own rounds differ
                fewer = _levels(framework, pp, vpp, walked - each, each, once is not None)
                period = total[some] - _walk(fewer, rows, given)[0]
            total[some] += behind * period
    return total


def _walk(walk: Levels, place: IntA, durations: ArrayN) -> tuple[ArrayN, ArrayN]:
    """When the last computation ends, and the longest of all last rounds; durations are at ``place``. (n,) each [s]"""
    done = np.empty((walk.size, durations.shape[1]))
    done[0] = 0.0
    for first, waits, sent, which in walk.levels:
        latest = _latest(done, waits)
        if len(sent):
            handed = _latest(done, sent)
            handed += durations[0]
            np.maximum(latest, handed, out=latest)
        np.add(latest, durations[place[which]], out=done[first : first + len(which)])
    return done[walk.ends].max(axis=0), (done[walk.late] - done[walk.early]).max(axis=0)


def _latest(done: ArrayN, waits: IntA) -> ArrayN:
    """The last of the ends that each node waits for."""
    latest: ArrayN = done[waits[0]]
    for wait in waits[1:]:
        np.maximum(latest, done[wait], out=latest)
    return latest


@dataclass
class _Node:
    """What a computation or a hand-over waits for: ends of nodes, and those a hand-over behind which is its input's."""

    weight: int = 0
    waits: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)


@lru_cache(maxsize=256)
def _levels(framework: str, pp: int, vpp: int, num_micro_batches: int, each: int, once: bool) -> Levels:
    """The levels of an interleaved program, whose rounds are of ``each`` micro-batches."""
    program = program_of(order_of("interleaved", framework, pp, vpp, num_micro_batches), "interleaved", framework)
    nodes, acts = _graph(program)
    reduced = _add_once(nodes, acts, program) if once else []
    level = _level(nodes)

    def group(at: int) -> tuple[int, bool]:
        return level[at], bool(nodes[at].sent)

    in_order = sorted(range(len(nodes)), key=group)
    place = {node: at for at, node in enumerate(in_order)}
    levels: list[tuple[int, IntA, IntA, IntA]] = []
    first = 1
    for _, some in groupby(in_order[1:], key=group):
        level_nodes = [nodes[at] for at in some]
        waits = _table([[place[n] for n in one.waits] for one in level_nodes])
        sent = _table([[place[n] for n in one.sent] for one in level_nodes])
        levels.append((first, waits, sent, np.array([one.weight for one in level_nodes])))
        first += len(level_nodes)
    late, early = [], []
    for rank, mine in enumerate(acts):
        last = len(mine) - 1 - min(2 * (pp - 1 - rank) + (vpp - 1) * each, len(mine) // 2)
        late.append(place[mine[last]])
        early.append(place[mine[max(last - 2 * each * vpp, 0)]])
    ends = [place[at] for at in (*(mine[-1] for mine in acts), *reduced)]
    return Levels(tuple(levels), len(nodes), np.array(ends), np.array(late), np.array(early))


def _table(lists: list[list[int]]) -> IntA:
    """Lists of different lengths as one array, their last repeated. (longest, lists)"""
    most = max(map(len, lists))
    return np.array([[one[min(i, len(one) - 1)] for one in lists] for i in range(most)], dtype=np.intp)


def _graph(program: Program) -> tuple[list[_Node], list[list[int]]]:
    """Computations and hand-overs, and the computations of each rank; node 0 is the start.

    On streams of their own for each pair of ranks hand-overs do not queue: one is shorter than a computation. It is
    then a part of the computation that needs it. Else a send and its receive are one node: both end at once.
    """
    order = program.order
    nodes = [_Node()]
    of: dict[Action, int] = {}
    acts: list[list[int]] = []

    def node(key: Action) -> int:
        if key not in of:
            of[key] = len(nodes)
            nodes.append(_Node())
        return of[key]

    launched: dict[Action, list[int]] = {}
    for rank, items in enumerate(program.ranks):
        before, beside, mine = 0, False, []
        queue = 0
        for item in items:
            if isinstance(item, Exchange):
                received_by = _receive(item.ops[0])
                if item.stream == "p2p":
                    one = node(received_by)
                    nodes[one].waits += [before, queue]
                    queue = one
                else:
                    launched.setdefault(received_by, []).append(before)
                beside = True
                continue
            one = node(item)
            nodes[one].waits.append(before)
            stage = item.stage // order.pp
            nodes[one].weight = 1 + ((item.kind != "F") * order.pp + rank) * order.vpp + stage
            nodes[one].weight += 2 * order.pp * order.vpp * beside
            before, beside = one, False
            mine.append(one)
        acts.append(mine)
    for key, one in list(of.items()):
        need = received(order, key) if key.kind in ("F", "B") else None
        if need in launched:
            nodes[one].sent += launched[need]
        elif need is not None:
            nodes[one].waits.append(of[need])
    return nodes, acts


def _add_once(nodes: list[_Node], acts: list[list[int]], program: Program) -> list[int]:
    """Add Megatron's gathers and reductions (``param_sync_func``, ``grad_sync_func``); the last reductions."""
    order = program.order
    pp, vpp = order.pp, order.vpp
    size, last = pp * vpp, []
    for rank, (mine, actions) in enumerate(zip(acts, order.ranks, strict=True)):
        forwards = [i for i, action in enumerate(actions) if action.kind == "F"]
        backwards = [i for i, action in enumerate(actions) if action.kind != "F"]
        chunk_of = [action.stage // pp for action in actions]
        first = [next(n for n, i in enumerate(forwards) if chunk_of[i] == c) for c in range(vpp)]
        final = [max(n for n, i in enumerate(backwards) if chunk_of[i] == c) for c in range(vpp)]
        stream = 0
        for c in range(vpp):
            at = forwards[max(first[c - 1] - rank, 0) if c > 1 else 0]
            place = 1 + 4 * size + rank * vpp + c
            for weight in (place, place + size):
                nodes.append(_Node(weight, [mine[at - 1] if at else 0, stream]))
            stream = len(nodes) - 2
            nodes[mine[forwards[first[c]]]].waits.append(len(nodes) - 1)
        for c in sorted(range(vpp), key=lambda c: final[c]):
            at = mine[backwards[min(final[c] + rank, len(backwards) - 1)]]
            nodes.append(_Node(1 + 6 * size + rank * vpp + c, [at, stream]))
            stream = len(nodes) - 1
        last.append(stream)
    return last


def _receive(op: Action) -> Action:
    """The receive that an exchange is, or that its send belongs to."""
    if op.kind == "SEND_F":
        return Action("RECV_F", op.stage + 1, op.micro_batch)
    if op.kind == "SEND_B":
        return Action("RECV_B", op.stage - 1, op.micro_batch)
    return op


def _level(nodes: list[_Node]) -> list[int]:
    """How many nodes are behind each other at most before each."""
    waits = [{*one.waits, *one.sent} for one in nodes]
    missing = [len(wait) for wait in waits]
    readers: list[list[int]] = [[] for _ in nodes]
    for at, wait in enumerate(waits):
        for before in wait:
            readers[before].append(at)
    level = [0] * len(nodes)
    ready = [at for at, count in enumerate(missing) if not count]
    for at in ready:
        for reader in readers[at]:
            level[reader] = max(level[reader], level[at] + 1)
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    assert len(ready) == len(nodes)
    return level
