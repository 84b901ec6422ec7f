"""The longest path through a pipeline's own order of computations and hand-overs, for many plans at once.

The replay's clock. A computation starts when the one before it on its rank is done and its input has come. It ends no
sooner than the host's lead lets it. A hand-over takes ``hop_s`` from when both sides have launched it and their streams
are free. What can start once so many others are done forms a level, and a level is one pass over arrays. Rounds of a
steady state take equally long, so that only :data:`MOST_WALKED_ROUNDS` of them are walked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mofa.cost.block.host_clock import NEVER, ClockAdvance
from mofa.cost.step_time import compiled_path
from mofa.cost.step_time.dependency_levels import DependencyLevels, Once, dependency_levels_of
from mofa.schedules import SCHEDULES, Runtime
from mofa.schedules.interleaved import micro_batches_per_round

ArrayN = NDArray[np.float64]
IntA = NDArray[np.intp]
IntN = NDArray[np.int64]

MOST_WALKED_ROUNDS = 3
"""Rounds of micro-batches that are walked at most; those behind take as long as the last of the steady state. [-]"""
BARELY = 0.01
"""A host that issues a round in less than one takes, but by no more than this share, is taken to get ahead no further
than it is. [-]"""
ROUNDING = 1e-4
"""The same of a host that sets how long a round takes, which the walk gives with so much in doubt: it is taken to fall
behind. [-]"""
FEW_PLANS = 8
"""Plans of which all durations are gathered at once. [-]"""
_AT_ONCE = 1 << 21
"""Entries of the array of ends that are held at once, 16 MiB. [-]"""


@dataclass(frozen=True)
class DataParallelOncePerStep:
    """What data parallelism does once a step for each chunk of a rank, on a stream beside computing. (n, pp, vpp) [s]

    ``gather_s`` of parameters, ``blocking_gather_s`` what of it comes before anything of the first forward,
    ``reduce_s`` of gradients, ``sum_s`` of these over FSDP's replicas, where there are any. ``kind`` says whose it is.
    """

    gather_s: ArrayN
    blocking_gather_s: ArrayN
    reduce_s: ArrayN
    kind: Once = "Megatron"
    sum_s: ArrayN | None = None

    def select_plans(self, index: IntA) -> DataParallelOncePerStep:
        """Only the plans at ``index``."""
        parts = (self.gather_s[index], self.blocking_gather_s[index], self.reduce_s[index])
        return DataParallelOncePerStep(*parts, self.kind, None if self.sum_s is None else self.sum_s[index])

    def reduction_seconds_by_level_node(self) -> list[ArrayN]:
        """Reductions of gradients behind backwards, in the order of :class:`DependencyLevels`; n last. [s]"""
        parts = [self.reduce_s]
        if self.kind != "Megatron":
            parts.append(np.zeros_like(self.reduce_s) if self.sum_s is None else self.sum_s)
        return [part.reshape(len(part), -1).T for part in parts]


@dataclass(frozen=True)
class ComputationDurations:
    """What computations and hand-overs take.

    ``forward_s`` and ``backward_s`` are of one micro-batch on each chunk of each rank, or of those ranks that differ.
    ``weights_s`` is the part of the backward that makes weights' gradients, (n, R, vpp). ``hop_s`` is one hand-over,
    (n,); ``slowdown`` is what computing loses of its rate beside one. ``host`` are both clocks of each kind of
    computation, where the host may be late. [s]

    With ``once`` the time goes from the first gather to the last reduction. Megatron's ranks launch these at once. The
    first two chunks are gathered at the start. Each further one is when the first forward of the chunk before it begins
    on rank 0. A rank reduces a chunk as many backwards behind the chunk's last as its own number. FSDP's are in
    :mod:`mofa.cost.step_time.pipelined_fsdp`; of pieces, ``first_forward`` has both clocks of each first forward.
    """

    forward_s: ArrayN
    backward_s: ArrayN
    weights_s: ArrayN
    hop_s: ArrayN
    slowdown: ArrayN | float = 0.0
    once: DataParallelOncePerStep | None = None
    host: tuple[ClockAdvance, ...] | None = None
    first_forward: ClockAdvance | None = None
    pairs: ClockAdvance | None = None
    """Both clocks of a forward of each chunk (third axis) and a backward of each (fourth) that run as one, where a
    schedule has such pairs. (n, R, vpp, vpp) [s]"""
    lead_s: ArrayN | None = None
    """How far each host is ahead of its device as the step begins. (n, R) [s]"""

    def select_plans(self, index: IntA, host: tuple[ClockAdvance, ...], lead_s: ArrayN) -> ComputationDurations:
        """The durations of some plans, with the clocks of their hosts and how far these begin ahead."""
        once = None if self.once is None else self.once.select_plans(index)
        return ComputationDurations(
            self.forward_s[index],
            self.backward_s[index],
            self.weights_s[index],
            self.hop_s[index],
            self.slowdown if isinstance(self.slowdown, float) else self.slowdown[index],
            once,
            host,
            pairs=None
            if self.pairs is None
            else ClockAdvance(*(part[index] for part in np.broadcast_arrays(*self.pairs))),
            lead_s=lead_s,
        )

    def seconds_by_level_node(self, schedule: str) -> ArrayN:
        """All computations' durations, in the order that :class:`DependencyLevels` has them; n last. [s]"""
        kinds = [self.forward_s, self.backward_s]
        if SCHEDULES[schedule].defers_weight_gradients:
            by_weights = self.weights_s.copy()
            by_weights[:, 0, 0] = self.backward_s[:, 0, 0]  # the first stage has no input to differentiate by
            kinds = [self.forward_s, self.backward_s - by_weights, by_weights]
        alone = np.stack(kinds, axis=1).reshape(len(self.hop_s), -1).T
        parts = [self.hop_s[None], alone, self._beside(alone)]
        if self.once is not None and self.first_forward is None:
            each = (self.once.gather_s, self.once.blocking_gather_s)
            parts += [*(part.reshape(len(part), -1).T for part in each), *self.once.reduction_seconds_by_level_node()]
        elif self.once is not None and self.first_forward is not None:
            first_s = self.first_forward.device_s.reshape(len(self.hop_s), -1).T
            parts += [first_s, self._beside(first_s), *self.once.reduction_seconds_by_level_node()]
        if self.pairs is not None:  # a pair's backward takes no time of its own
            each = self.forward_s[0].size
            parts.append(np.zeros(((4 - 3 * (self.once is not None)) * each, len(self.hop_s))))
            parts.append(self._beside(_of_pairs(self.pairs.device_s)))
        return np.concatenate(parts)

    def _beside(self, alone_s: ArrayN) -> ArrayN:
        """What computations take beside a hand-over; n last. [s]"""
        return np.asarray(alone_s + self.slowdown * np.minimum(self.hop_s, alone_s))

    def host_clock_tables(self, durations: ArrayN) -> tuple[ArrayN, ArrayN, ArrayN] | None:
        """The other three of both clocks' four numbers, in the same order; nothing where the host plays no part."""
        if self.host is None:
            return None
        out: list[ArrayN] = []
        each = self.forward_s[0].size
        size = len(self.host) * each
        firsts = (None,) * 3 if self.first_forward is None else self.first_forward[1:4]
        for of_kinds, first in zip(list(zip(*self.host, strict=True))[1:4], firsts, strict=True):
            table = np.full_like(durations, NEVER)
            alone = np.stack(of_kinds, axis=1).reshape(len(self.hop_s), -1).T
            table[1 : 1 + size] = alone
            beside = durations[1 + size : 1 + 2 * size] - durations[1 : 1 + size]
            table[1 + size : 1 + 2 * size] = alone + (beside if len(out) < 2 else 0.0)
            if first is not None:
                start, alone = 1 + 2 * size, first.reshape(len(first), -1).T
                table[start : start + each] = alone
                beside = durations[start + each : start + 2 * each] - durations[start : start + each]
                table[start + each : start + 2 * each] = alone + (beside if len(out) < 2 else 0.0)
            if self.pairs is not None:
                of_clock = self.pairs.device_behind_host_s, self.pairs.host_behind_device_s, self.pairs.host_s
                alone = _of_pairs(of_clock[len(out)])
                beside = durations[-len(alone) :] - _of_pairs(self.pairs.device_s)
                table[-len(alone) :] = alone + (beside if len(out) < 2 else 0.0)
                if len(out) == 2:
                    table[-len(alone) - each : -len(alone)] = 0.0
            out.append(table)
        return out[0], out[1], out[2]


def _of_pairs(by_pair: ArrayN) -> ArrayN:
    """Something of pairs by the backward's chunk, rank and forward's chunk; n last."""
    return np.moveaxis(by_pair, 3, 1).reshape(len(by_pair), -1).T


def critical_path_s(
    plan: tuple[str, Runtime, int, int], given: ComputationDurations, num_micro_batches: IntN, *, of: IntA | None = None
) -> ArrayN:
    """Time of a schedule, from the first forward to the end of the last backward.

    Parameters
    ----------
    plan
        Schedule, of those without a closed form, runtime, pp and vpp.
    given
        Seconds of each plan's computations and hand-overs.
    num_micro_batches
        (n,) [-]
    of
        For each rank the index of the one in ``given`` whose seconds it has; absent where all are given. (pp,)

    Returns
    -------
    ArrayN
        (n,) [s]

    Notes
    -----
    Assumes that the clocks of all ranks have found their common period before the last of :data:`MOST_WALKED_ROUNDS`
    rounds.

    Examples
    --------
    Even chunks: ``m t + (pp - 1) t / vpp`` (Narayanan et al. 2021, arXiv 2104.04473, section 2.2), with m of 8 and 800:

    >>> f = np.ones((2, 4, 2))
    >>> given = ComputationDurations(f, 2 * f, f, np.zeros(2))
    >>> critical_path_s(("interleaved", "megatron", 4, 2), given, np.array([8, 800]))
    array([  57., 4809.])
    """
    return critical_path_and_host_waits_s(plan, given, num_micro_batches, of=of)[0]


def critical_path_and_host_waits_s(
    plan: tuple[str, Runtime, int, int], given: ComputationDurations, num_micro_batches: IntN, *, of: IntA | None = None
) -> tuple[ArrayN, ArrayN]:
    """As :func:`critical_path_s`, (n,), and what the device of each rank waits for its own host, (n, pp). [s]

    Where no clocks of hosts are given no device waits.
    """
    schedule, runtime, pp, vpp = plan
    shown = given.forward_s.shape[1]
    like = np.arange(shown) if of is None else of
    # where the durations of each of all ranks' chunks are among the given
    num_pairs = 1 + vpp if SCHEDULES[schedule].pairs_passes else 0
    num_once = 3 if given.once is None or given.once.kind == "Megatron" else 4
    blocks = np.arange(2 * len(SCHEDULES[schedule].computation_kinds) + num_once + num_pairs)
    place = (blocks[:, None, None] * shown + like[:, None]) * vpp + np.arange(vpp)
    rows = np.concatenate([[0], 1 + place.ravel()])
    durations = given.seconds_by_level_node(schedule)
    host = given.host_clock_tables(durations)
    total, queued = np.empty(durations.shape[1]), runtime == "pytorch"
    lead_s = np.zeros((pp, len(total))) if given.lead_s is None else given.lead_s[:, like].T
    waited_s = np.zeros((pp, len(total)))
    once: Once = given.once.kind if given.once is not None else ""
    kinds, kind_of = _orders_alike(plan, num_micro_batches)
    for which, (walked, each) in enumerate(kinds):
        plans_alike = np.flatnonzero(kind_of == which)
        walk = dependency_levels_of(*plan, walked, each, once)
        step = max(1, _AT_ONCE // walk.size)
        for start in range(0, len(plans_alike), step):
            some = plans_alike[start : start + step]
            now = np.ascontiguousarray(durations[:, some])
            hosts = None if host is None else tuple(table[:, some] for table in (*host, lead_s))
            total[some], period, (waited_s[:, some], each_waited_s) = _walk(walk, rows, now, hosts)
            behind = (num_micro_batches[some] - walked) / each
            if queued and np.any(behind):  # on one stream for all its sends and receives a rank's own rounds differ
                fewer = dependency_levels_of(*plan, walked - each, each, once)
                fewer_s, _, (fewer_waited_s, _) = _walk(fewer, rows, now, hosts)
                period, each_waited_s = total[some] - fewer_s, waited_s[:, some] - fewer_waited_s
            if given.host is not None and np.any(behind):
                each_waited_s = _steady_waits_s(given.host, like, some, each, period, each_waited_s)
            total[some] += behind * period
            waited_s[:, some] += behind * each_waited_s
    return total, waited_s.T


def _orders_alike(
    plan: tuple[str, Runtime, int, int], num_micro_batches: IntN
) -> tuple[list[tuple[int, int]], NDArray[np.intp]]:
    """Micro-batches that are walked and those of a round, of each order; and which of these each plan has, (n,).

    Plans of one order are walked together, however many rounds each leaves out.
    """
    if len(num_micro_batches) and np.all(num_micro_batches == num_micro_batches[0]):  # as nearly always
        number = num_micro_batches[:1]
        each = int(_per_round(plan, number)[0])
        return [(min(int(number[0]), MOST_WALKED_ROUNDS * each), each)], np.zeros(len(num_micro_batches), dtype=np.intp)
    nums, inverse = np.unique(num_micro_batches, return_inverse=True)
    per_round = _per_round(plan, nums)
    kinds, kind = np.unique(
        np.stack([np.minimum(nums, MOST_WALKED_ROUNDS * per_round), per_round]), axis=1, return_inverse=True
    )
    return [(int(walked), int(each)) for walked, each in kinds.T], kind.ravel()[inverse]


def _steady_waits_s(
    host: tuple[ClockAdvance, ...], like: IntA, some: IntN, each: int, period_s: ArrayN, walked_s: ArrayN
) -> ArrayN:
    """What the device of each rank waits for its own host in a round that is left out. (pp, some) [s]

    A host that waits for its device has as far a lead in every round. Another's grows until its device waits no more,
    where it issues a round in less than one takes; where that is barely less, it waits as in the round before. A host
    that takes as long as a round has no lead sooner or later, and the device waits whenever it does not compute.
    """
    parts = [ClockAdvance(*(part[some] for part in clocks[:4])) for clocks in host]
    issued_s, computed_s = (
        each * np.sum([getattr(clocks, name) for clocks in parts], axis=0).sum(axis=2)[:, like].T
        for name in ("host_s", "device_s")
    )
    waits = np.max([clocks.host_behind_device_s for clocks in parts], axis=0).max(axis=2)[:, like].T > NEVER / 2
    idle_s = np.maximum(period_s - computed_s, 0.0)
    alone_s = np.where(issued_s >= (1.0 - BARELY) * period_s, np.minimum(walked_s, idle_s), 0.0)
    alone_s = np.where(issued_s >= (1.0 - ROUNDING) * period_s, idle_s, alone_s)
    return np.where(waits, walked_s, alone_s)


def _per_round(plan: tuple[str, Runtime, int, int], num_micro_batches: IntN) -> IntN:
    """Micro-batches of a round. (n,) [-]"""
    schedule, runtime, pp, _ = plan
    in_rounds = runtime == "pytorch" and SCHEDULES[schedule].runs_in_equal_rounds
    return np.array([micro_batches_per_round(pp, num) if in_rounds else pp for num in num_micro_batches.tolist()])


def critical_path_may_be_too_low(plan: tuple[str, Runtime, int, int], num_micro_batches: IntN) -> NDArray[np.bool_]:
    """Whether :func:`critical_path_s` may be below the computing of the longest path, as it leaves rounds out. (n,)

    Sends and receives that PyTorch queues on one stream make a rank's own rounds differ, so that what a round adds to
    the whole may be less than a rank computes in one.
    """
    if plan[1] != "pytorch":
        return np.zeros(len(num_micro_batches), dtype=bool)
    nums, inverse = np.unique(num_micro_batches, return_inverse=True)
    return np.asarray((nums > MOST_WALKED_ROUNDS * _per_round(plan, nums))[inverse])


def _walk(
    walk: DependencyLevels, place: IntA, durations: ArrayN, hosts: tuple[ArrayN, ...] | None = None
) -> tuple[ArrayN, ArrayN, ArrayN]:
    """When the last computation ends and the longest of all last rounds, (n,) each; durations are at ``place``. [s]

    And what the device of each rank waits for its own host, in all and in the last round, (2, pp, n). By the compiled
    part where there is one.
    """
    rows = place.take(walk.duration_index)
    if (compiled := compiled_path.c_library()) is not None:
        return compiled_path.longest_path(compiled, walk, rows, durations, hosts)
    return _walk_by_level(walk, rows, durations, hosts)


def _walk_by_level(
    walk: DependencyLevels, rows: IntA, durations: ArrayN, hosts: tuple[ArrayN, ...] | None
) -> tuple[ArrayN, ArrayN, ArrayN]:
    """The same without the compiled part; each node's durations are in one of the ``rows``.

    Durations of many plans are gathered level by level: of all nodes together they would be written to memory and read
    back. Those of few are gathered at once, of one in arrays of one dimension: a level takes as long as its calls.
    """
    num_plans = durations.shape[1]
    if num_plans == 1:
        durations = durations[:, 0]
        hosts = None if hosts is None else tuple(table[:, 0] for table in hosts)
    done = np.empty((walk.size, *durations.shape[1:]))
    done[0] = 0.0
    issued = np.zeros_like(done) if hosts is not None else done
    waited_s = np.zeros((2, len(walk.last_steady), *durations.shape[1:]))
    hop_s = durations[0]
    at_once = num_plans <= FEW_PLANS
    if at_once:
        durations = durations.take(rows, axis=0)
        hosts = None if hosts is None else (*(table.take(rows, axis=0) for table in hosts[:3]), hosts[3])
    for nodes, waits, sent, before in walk.levels:
        latest = _latest(done, waits)
        if len(sent):
            handed = _latest(done, sent)
            handed += hop_s
            np.maximum(latest, handed, out=latest)
        ends, of_level = done[nodes], rows[nodes]
        np.add(latest, durations[nodes] if at_once else durations.take(of_level, axis=0), out=ends)
        if hosts is not None:
            held_s, woken_s, host_s = (t[nodes] if at_once else t.take(of_level, axis=0) for t in hosts[:3])
            issued_before = issued.take(before, axis=0)
            begins = (before == 0) & (walk.rank[nodes] >= 0)
            if begins.any():
                issued_before[begins] = -hosts[3][walk.rank[nodes][begins]]
            until = np.add(issued_before, held_s)
            _add_by_rank(waited_s, walk, nodes, np.maximum(until - ends, 0.0))
            np.maximum(ends, until, out=ends)
            np.add(latest, woken_s, out=latest)
            np.maximum(latest, np.add(issued_before, host_s, out=issued_before), out=issued[nodes])
    latest_end, round_s = (
        done[walk.last_nodes].max(axis=0),
        (done[walk.last_steady] - done[walk.round_before]).max(axis=0),
    )
    return np.atleast_1d(latest_end), np.atleast_1d(round_s), waited_s.reshape(*waited_s.shape[:2], num_plans)


def _add_by_rank(waited_s: ArrayN, walk: DependencyLevels, nodes: slice, later_s: ArrayN) -> None:
    """Add what hosts make nodes later to the waits of their ranks."""
    rank, is_last = walk.rank[nodes], walk.in_last_round[nodes]
    for sums, own in zip(waited_s, (rank >= 0, (rank >= 0) & (is_last > 0)), strict=True):
        np.add.at(sums, rank[own], later_s[own])


def _latest(done: ArrayN, waits: IntA) -> ArrayN:
    """The last of the ends that each node waits for."""
    latest: ArrayN = done.take(waits[0], axis=0)
    for wait in waits[1:]:
        np.maximum(latest, done.take(wait, axis=0), out=latest)
    return latest
