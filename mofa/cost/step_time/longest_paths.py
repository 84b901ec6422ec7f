"""The longest paths of one pipeline, as numbers of the computations and hand-overs that lie on them.

A path takes the sum of what lies on it, in every pipeline that computes in the same order. So a path that is longest
with some durations bounds the step from below with any others, and the bound is linear in them.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from mofa.cost.step_time.critical_path import MOST_WALKED_ROUNDS, ComputationDurations, critical_path_s
from mofa.cost.step_time.dependency_levels import DependencyLevels, dependency_levels_of
from mofa.schedules import SCHEDULES, Runtime, computation_order_of
from mofa.schedules.interleaved import micro_batches_per_round

ArrayN = NDArray[np.float64]


@dataclass(frozen=True)
class ComputationPath:
    """How often each computation lies on a path. (kinds, pp, vpp)

    ``beside_hops`` are those of them that run beside a hand-over, (pp, vpp); ``hops`` the hand-overs that it waits for.
    """

    counts: ArrayN
    beside_hops: ArrayN
    hops: float

    def plus_multiple_of(self, other: ComputationPath, times: float) -> ComputationPath:
        """This path with another's parts so many times more."""
        return ComputationPath(
            self.counts + times * other.counts,
            self.beside_hops + times * other.beside_hops,
            self.hops + times * other.hops,
        )


class LongestPaths:
    """A schedule whose critical path is walked: its steps, and the paths that say so.

    Parameters
    ----------
    schedule, runtime, pp, vpp, num_micro_batches
        The pipeline. Rounds behind the first :data:`mofa.cost.step_time.critical_path.MOST_WALKED_ROUNDS` repeat the
        last of these.
    hop_s, slowdown
        One hand-over, and what computing loses of its rate beside one. [s], [-]
    """

    fills_with_stages = False

    def __init__(
        self, schedule: str, runtime: Runtime, pp: int, vpp: int, num_micro_batches: int, hop_s: float, slowdown: float
    ) -> None:
        self.plan = schedule, runtime, pp, vpp
        self.shape = (len(SCHEDULES[schedule].computation_kinds), pp, vpp)
        self.num_micro_batches, self.num_computations = num_micro_batches, self.shape[0]
        self.hop_s, self.slowdown = hop_s, slowdown
        in_rounds = runtime == "pytorch" and SCHEDULES[schedule].runs_in_equal_rounds
        self.each = micro_batches_per_round(pp, num_micro_batches) if in_rounds else pp
        self.walked = min(num_micro_batches, MOST_WALKED_ROUNDS * self.each)
        self.rounds_behind = (num_micro_batches - self.walked) / self.each
        self.walk: DependencyLevels = dependency_levels_of(schedule, runtime, pp, vpp, self.walked, self.each, "")
        self._firsts = [nodes.start for nodes, *_ in self.walk.levels]

    def steps_s(self, seconds: ArrayN) -> ArrayN:
        """From the first computation to the last, given what each takes. (n, kinds, pp, vpp) -> (n,) [s]"""
        number = np.full(len(seconds), self.num_micro_batches)
        hops = np.full(len(seconds), self.hop_s)
        given = ComputationDurations(seconds[:, 0], seconds[:, 1:].sum(axis=1), seconds[:, -1], hops, self.slowdown)
        return critical_path_s(self.plan, given, number)

    def paths_along_ranks(self) -> list[ComputationPath]:
        """Paths along each rank: the first micro-batch's way to a chunk of it, all that the rank computes from there to
        the last backward of one of its chunks, and that one's way back.

        Notes
        -----
        Their longest is the lower bound ``max_r [m T_r + sum_(r' < r) C_r']``, with C one chunk of each rank ahead, for
        every chunk that the rank may begin and end with.
        """
        order = computation_order_of(*self.plan, self.walked)
        out = []
        for rank, computations in enumerate(order.ranks):
            chunks = [order.chunk_of(each.stage) for each in computations]
            kinds = [max("FBIW".index(each.kind) - (self.shape[0] == 3), 0) for each in computations]
            before = np.zeros((len(computations) + 1, *self.shape))
            before[np.arange(1, len(computations) + 1), kinds, rank, chunks] = 1.0
            before = np.cumsum(before, axis=0)
            enters = [(i, each) for i, each in enumerate(computations) if each.kind == "F" and each.micro_batch == 0]
            last = self.walked - 1
            leaves = [
                (i, each) for i, each in enumerate(computations) if each.kind in "BI" and each.micro_batch == last
            ]
            for (start, entered), (end, left) in product(enters, leaves):
                counts = before[end + 1] - before[start] if end >= start else np.zeros(self.shape)
                for kind, stages in ((0, entered.stage), (1, left.stage)):
                    for stage in range(stages):
                        counts[kind, order.rank_of(stage), order.chunk_of(stage)] += 1.0
                counts[:, rank] += self.rounds_behind * self.each
                handed = sum(order.sends_to_other_rank[: entered.stage]) + sum(order.sends_to_other_rank[: left.stage])
                out.append(ComputationPath(counts, np.zeros(self.shape[1:]), handed))
        return out

    def candidate_longest_paths(self, seconds: ArrayN) -> list[ComputationPath]:
        """The longest path with these durations, and one through the rank that sets the steady state's period."""
        done, durations = self._walked(seconds)
        ends = self.walk.last_nodes
        longest = self._nodes(int(ends[np.argmax(done[ends])]), done, durations)
        periods = done[self.walk.last_steady] - done[self.walk.round_before]
        slowest = int(np.argmax(periods))
        last = int(self.walk.last_steady[slowest])
        steady = self._nodes(last, done, durations) + self._rest_of_rank(slowest, last)
        return [self._extended(nodes, durations) for nodes in (longest, steady)]

    def _walked(self, seconds: ArrayN) -> tuple[ArrayN, ArrayN]:
        """When each node is done, and the durations of nodes."""
        alone = seconds.ravel()
        beside = alone + self.slowdown * np.minimum(self.hop_s, alone)
        durations = np.concatenate([[self.hop_s], alone, beside])[self.walk.duration_index]
        durations[0] = 0.0
        done = np.zeros(self.walk.size)
        for nodes, waits, sent, _ in self.walk.levels:
            latest = done[waits].max(axis=0)
            if len(sent):
                np.maximum(latest, done[sent].max(axis=0) + self.hop_s, out=latest)
            done[nodes] = latest + durations[nodes]
        return done, durations

    def _nodes(self, node: int, done: ArrayN, durations: ArrayN) -> list[tuple[int, bool]]:
        """Nodes of the longest path that ends with a node, from its first; of each whether a hand-over is before it."""
        out: list[tuple[int, bool]] = []
        while node:
            nodes, waits, sent, _ = self.walk.levels[bisect_right(self._firsts, node) - 1]
            before = waits[:, node - nodes.start]
            latest = int(before[np.argmax(done[before])])
            handed = False
            if len(sent):
                others = sent[:, node - nodes.start]
                other = int(others[np.argmax(done[others])])
                handed = done[other] + self.hop_s > done[latest]
                latest = other if handed else latest
            out.append((node, handed))
            node = latest
        return out[::-1]

    @cached_property
    def _places(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Of each node which computation it is, -1 for hand-overs, and which of its micro-batches. (N,) each"""
        number = int(np.prod(self.shape))
        which = np.where(self.walk.duration_index == 0, -1, (self.walk.duration_index - 1) % number)
        which[0] = -1
        micro_batch = np.zeros(self.walk.size, dtype=np.intp)
        for computation in range(number):
            nodes = np.flatnonzero(which == computation)
            micro_batch[nodes] = np.arange(len(nodes))
        return which, micro_batch

    def _rest_of_rank(self, rank: int, last: int) -> list[tuple[int, bool]]:
        """The computations of a rank behind one of its nodes."""
        which = self._places[0]
        ranks = (which // self.shape[2]) % self.shape[1]
        behind = np.flatnonzero((which >= 0) & (ranks == rank))
        return [(node, False) for node in behind[behind > last].tolist()]

    def _extended(self, nodes: list[tuple[int, bool]], durations: ArrayN) -> ComputationPath:
        """A path, with its longest part from a computation to itself one round later again for each round behind."""
        path = self._path(nodes)
        if not self.rounds_behind:
            return path
        which, micro_batch = (of[[node for node, _ in nodes]].tolist() for of in self._places)
        takes = np.cumsum([durations[node] + self.hop_s * handed for node, handed in nodes])
        place = {key: i for i, key in enumerate(zip(which, micro_batch, strict=True)) if key[0] >= 0}
        longest, part = -1.0, (0, 0)
        for (computation, number), end in place.items():
            start = place.get((computation, number - self.each))
            if start is not None and takes[end] - takes[start] > longest:
                longest, part = takes[end] - takes[start], (start, end)
        return path.plus_multiple_of(self._path(nodes[part[0] + 1 : part[1] + 1]), self.rounds_behind)

    def _path(self, nodes: list[tuple[int, bool]]) -> ComputationPath:
        number = int(np.prod(self.shape))
        which = self.walk.duration_index[[node for node, _ in nodes]]
        counts = np.bincount(which, minlength=1 + 2 * number).astype(float)
        alone, beside = counts[1 : 1 + number].reshape(self.shape), counts[1 + number :].reshape(self.shape)
        return ComputationPath(alone + beside, beside.sum(axis=0), counts[0] + sum(handed for _, handed in nodes))


class FormulaPaths:
    """1F1B and GPipe, whose steps are the longest of few paths (:mod:`mofa.cost.step_time.bubble`).

    Kinds of computations are forwards, backwards, and both of a stage that had to wait for others.
    """

    num_computations, hop_s, slowdown = 2, 0.0, 0.0
    fills_with_stages = True

    def __init__(self, pp: int, num_micro_batches: int, *, forwards_first: bool) -> None:
        self.pp, self.num_micro_batches, self.forwards_first = pp, num_micro_batches, forwards_first

    def steps_s(self, seconds: ArrayN) -> ArrayN:
        """From the first computation to the last, given what each takes. (n, 3, pp, 1) -> (n,) [s]"""
        counts = np.stack([path.counts for path in self.paths_along_ranks()])
        return np.asarray(np.einsum("jkrc,nkrc->nj", counts, seconds).max(axis=1))

    def candidate_longest_paths(self, seconds: ArrayN) -> list[ComputationPath]:
        """The longest path with these durations. (3, pp, 1) [s]"""
        every = self.paths_along_ranks()
        return [every[int(np.argmax([np.sum(path.counts * seconds) for path in every]))]]

    def paths_along_ranks(self) -> list[ComputationPath]:
        """All paths: four of each stage in 1F1B (:func:`mofa.cost.step_time.bubble.one_f_one_b_s`); in GPipe the way
        there and back with the other micro-batches at the stage with the slowest forward and the slowest backward."""
        pp, m = self.pp, self.num_micro_batches
        forward, backward, both = np.eye(3)[:, :, None]
        out = []
        if self.forwards_first:
            every = (forward + backward) * np.ones(pp)
            for first, second in product(range(pp), repeat=2):
                out.append(
                    every + (m - 1) * (forward * (np.arange(pp) == first) + backward * (np.arange(pp) == second))
                )
            return [self._path(counts) for counts in out]
        for stage in range(pp):
            own = (np.arange(pp) == stage).astype(float)
            before, behind = both * (np.arange(pp) < stage), both * (np.arange(pp) > stage)
            ahead = min(pp - 1 - stage, m - 1)
            own_passes = m * (forward + backward) * own
            out += [
                before + own_passes,
                before + behind + own_passes - ahead * forward * own,
                before + behind + own_passes - ahead * backward * own,
            ]
            if m > ahead + 1:
                out.append(before + 2 * behind + (m - ahead) * (forward + backward) * own)
        return [self._path(counts) for counts in out]

    def _path(self, counts: ArrayN) -> ComputationPath:
        return ComputationPath(counts[:, :, None], np.zeros((self.pp, 1)), 0.0)
