"""The slow twin of the closed forms: many runs at once, failure by failure, with every second accounted for.

One iteration of the loop takes every run that is still under way through one restart and one stretch of computing, to
its next failure or its end. Nothing here uses the closed forms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mofa.errors import SpecError
from mofa.faults.checks import check_above_zero, check_at_least_zero
from mofa.faults.closed_forms.renewal import check_checkpoint_levels
from mofa.faults.failures.clocks import FailureClock, FailureTimes
from mofa.faults.ledger import PARTS, Ledger

FloatN = NDArray[np.float64]
IntN = NDArray[np.int64]
MAX_SPACING = 65_536
"""Most segments from one checkpoint of the highest level to the next. [-]"""
MAX_FAILURES = 200_000
"""Of one run: a run that fails more often all but stands still, and would be simulated for hours. [-]"""


@dataclass(frozen=True)
class SimulatedCheckpointLevel:
    """One level of checkpoints: written behind every ``every``-th segment, restorable ``persist_s`` later. [s]"""

    block_s: float
    every: int = 1
    persist_s: float = 0.0


@dataclass(frozen=True)
class SimulatedFailureKind:
    """A kind of failure: its share, its restart time [s], the lowest level that survives it, whether a node goes."""

    share: float
    restart_s: float
    level: int = 0
    takes_node: bool = False


@dataclass(frozen=True)
class LongRunToSimulate:
    """A long run to simulate: its work, checkpoints at several levels, kinds of failures, and spare nodes.

    Parameters
    ----------
    work_s
        Productive time that the run needs. [s]
    interval_s
        Compute time between checkpoints; where it does not divide the work, the last segment is shorter. [s]
    levels
        Levels of checkpoints, the most frequent first.
    kinds
        Kinds of failures, whose shares sum to 1.
    clock
        When failures strike.
    num_spares
        Nodes that stand by; None where a replacement always comes within the kind's restart time. [-]
    repair_s
        Mean time until a node is back, exponential. [s]
    """

    work_s: float
    interval_s: float
    levels: tuple[SimulatedCheckpointLevel, ...]
    kinds: tuple[SimulatedFailureKind, ...]
    clock: FailureClock
    num_spares: int | None = None
    repair_s: float = 0.0

    def __post_init__(self) -> None:
        check_above_zero("work_s", self.work_s)
        check_above_zero("interval_s", self.interval_s)
        check_at_least_zero("repair_s", self.repair_s)
        steps = [level.every for level in self.levels]
        filler = [0.0] * len(steps)
        check_checkpoint_levels(steps, [x.block_s for x in self.levels], [1.0, *filler[1:]], filler, MAX_SPACING)
        for level in self.levels:
            check_at_least_zero("persist_s", level.persist_s)
        kinds = len(self.kinds)
        check_checkpoint_levels(
            [1] * kinds, [0.0] * kinds, [k.share for k in self.kinds], [k.restart_s for k in self.kinds]
        )
        if any(not 0 <= kind.level < len(self.levels) for kind in self.kinds):
            raise SpecError(f"kinds: name a level outside of the {len(steps)} there are; count them from 0")
        if self.num_spares is not None and self.num_spares < 0:
            raise SpecError(f"num_spares: is {self.num_spares}; give at least 0 nodes")

    @property
    def num_segments(self) -> int:
        """Segments of the run, the last of which may be shorter. [-]"""
        return max(math.ceil(self.work_s / self.interval_s * (1 - 1e-12)), 1)


@dataclass(frozen=True)
class SimulatedRuns:
    """What simulated runs took: ``wall_s`` and ``seconds`` per part of the ledger [s], ``failures`` [-]. (runs,)"""

    work_s: float
    wall_s: FloatN
    seconds: dict[str, FloatN]
    failures: IntN

    @property
    def ettr(self) -> float:
        """All productive time over all wall-clock time. [-]"""
        return float(self.seconds["productive"].sum() / self.wall_s.sum())

    @property
    def standard_error(self) -> float:
        """Standard error of :attr:`ettr`, by the delta method: every run has the same productive time. [-]"""
        if len(self.wall_s) < 2:
            return float("nan")
        return float(self.ettr * self.wall_s.std(ddof=1) / self.wall_s.mean() / np.sqrt(len(self.wall_s)))

    def ledger(self) -> Ledger:
        """Where the time of all runs together went."""
        seconds = {part: float(self.seconds[part].sum()) for part in PARTS}
        return Ledger.of_seconds(seconds, float(self.wall_s.sum()))


class _Pattern:
    """Uptime at which segments end: the pattern of levels repeats every ``n`` segments."""

    def __init__(self, run: LongRunToSimulate) -> None:
        self.n = run.levels[-1].every
        self.every = [level.every for level in run.levels]
        top = [max(j for j, e in enumerate(self.every) if (i + 1) % e == 0) for i in range(self.n)]
        self.interval = run.interval_s
        self.ends = np.concatenate([[0.0], np.cumsum([self.interval + run.levels[j].block_s for j in top])])

    def time_of(self, segments: IntN) -> FloatN:
        if self.n == 1:
            return np.asarray(segments * self.ends[-1])
        return np.asarray(segments // self.n * self.ends[-1] + self.ends[segments % self.n])

    def segments_at(self, uptime: FloatN) -> IntN:
        uptime = np.maximum(uptime, 0.0)
        patterns = np.floor(uptime / self.ends[-1])
        if self.n == 1:
            return np.asarray(patterns.astype(np.int64))
        rest = uptime - patterns * self.ends[-1]
        inside = np.minimum(np.searchsorted(self.ends, rest, side="right") - 1, self.n - 1)
        return np.asarray(patterns.astype(np.int64) * self.n + np.maximum(inside, 0))


def simulate_long_runs(run: LongRunToSimulate, num_runs: int = 10_000, seed: int = 0) -> SimulatedRuns:
    """Simulate a long run many times over.

    Parameters
    ----------
    run
        The run, its checkpoints and its failures.
    num_runs
        Independent repetitions. [-]
    seed
        Of the random numbers.

    Raises
    ------
    SpecError
        If a run fails more than :data:`MAX_FAILURES` times before it is done.

    Notes
    -----
    A failure during a restart begins a restart of its own kind. A checkpoint that was not yet restorable is lost with
    the failure. Clocks of failures stand still while the job waits for a node.

    Examples
    --------
    >>> level, kind = SimulatedCheckpointLevel(60.0), SimulatedFailureKind(1.0, 600.0)
    >>> run = LongRunToSimulate(86400.0 * 20, 1140.0, (level,), (kind,), FailureClock(11136.0))
    >>> found = simulate_long_runs(run, 2000)
    >>> abs(found.ettr - 0.8525) < 4 * found.standard_error
    True
    """
    if num_runs < 1:
        raise SpecError(f"num_runs: is {num_runs}; give at least 1")
    rng = np.random.default_rng(seed)
    size = run.clock.num_runs_at_once(num_runs)
    parts = [_some(run, min(size, num_runs - start), rng) for start in range(0, num_runs, size)]
    return SimulatedRuns(
        run.work_s,
        np.concatenate([p.wall_s for p in parts]),
        {name: np.concatenate([p.seconds[name] for p in parts]) for name in PARTS},
        np.concatenate([p.failures for p in parts]),
    )


def _some(run: LongRunToSimulate, num_runs: int, rng: np.random.Generator) -> SimulatedRuns:
    pattern, levels = _Pattern(run), run.levels
    tau, total = pattern.interval, run.num_segments
    end = float(pattern.time_of(np.array([total]))[0]) - (total * tau - run.work_s)
    cumulative = np.cumsum([kind.share for kind in run.kinds])
    restart_of = np.array([kind.restart_s for kind in run.kinds])
    level_of = np.array([kind.level for kind in run.kinds])
    node_of = np.array([kind.takes_node for kind in run.kinds])
    seconds = {name: np.zeros(num_runs) for name in PARTS}
    failures = np.zeros(num_runs, dtype=np.int64)
    times = FailureTimes(run.clock, num_runs, rng)
    repairs = _Repairs(run, num_runs, rng)
    # from here on of the runs that go on, in the order of their numbers
    running = np.arange(num_runs)
    spent = {name: np.zeros(num_runs) for name in ("restart", "checkpoint", "lost", "waiting")}
    done = np.zeros(num_runs, dtype=np.int64)  # segments that the run resumes from
    floors = np.zeros((len(levels), num_runs), dtype=np.int64)  # the last checkpoint of each level or a safer one
    restart = np.zeros(num_runs)
    for num_failures in range(MAX_FAILURES):
        gap = times.next_gap_s(running) if run.clock.strikes_restarts else times.next_gap_s(running) + restart
        begun = pattern.time_of(done)
        reached = begun + np.maximum(gap - restart, 0.0)
        finished = reached >= end
        reached = np.minimum(reached, end)
        ended = pattern.segments_at(reached)
        inside = np.minimum(ended, total - 1)
        # the work of the run bounds that of its last segment
        last_s = run.work_s - inside * tau
        within = np.minimum(np.minimum(reached - pattern.time_of(inside), tau), last_s)
        partial = np.where(finished, last_s, within)
        computed = (inside - done) * tau + partial
        spent["restart"] += np.where(finished, restart, np.minimum(gap, restart))
        spent["checkpoint"] += np.maximum(reached - begun - computed, 0.0)
        if np.count_nonzero(finished):
            ends, goes = running[finished], ~finished
            failures[ends] = num_failures
            for name, of_runs in spent.items():
                seconds[name][ends], spent[name] = of_runs[finished], of_runs[goes]
            if len(ends) == len(running):
                break
            running, done, floors = running[goes], done[goes], floors[:, goes]
            reached, ended, inside, partial = reached[goes], ended[goes], inside[goes], partial[goes]
        kind = np.minimum(np.searchsorted(cumulative, rng.random(len(running)), side="right"), len(run.kinds) - 1)
        for j in reversed(range(len(levels))):
            persist_s, every = levels[j].persist_s, levels[j].every
            stored = (pattern.segments_at(reached - persist_s) if persist_s else ended) // every * every
            floors[j] = np.maximum(floors[j], np.where(stored > done, np.minimum(stored, inside), floors[j]))
            if j + 1 < len(levels):
                floors[j] = np.maximum(floors[j], floors[j + 1])
        done = floors[level_of[kind], np.arange(len(running))]
        floors = np.minimum(floors, done)
        spent["lost"] += (inside - done) * tau + partial
        restart = restart_of[kind]
        if run.num_spares is not None:
            now_s = np.asarray(sum(spent.values()) + done * tau)
            spent["waiting"] += repairs.wait_s(running, now_s, node_of[kind])
    else:
        raise SpecError(f"run: fails more than {MAX_FAILURES} times and hardly gets on; shorten it or its interval")
    seconds["productive"] += run.work_s
    wall = np.sum([seconds[name] for name in PARTS], axis=0)
    return SimulatedRuns(run.work_s, wall, seconds, failures)


class _Repairs:
    """When the nodes of each run come back; a job with S spares has at most S + 1 away."""

    def __init__(self, run: LongRunToSimulate, num_runs: int, rng: np.random.Generator) -> None:
        self.mean_s, self.rng = run.repair_s, rng
        self.back = np.full((num_runs, (run.num_spares or 0) + 1), -np.inf)

    def wait_s(self, runs: IntN, now: FloatN, node: NDArray[np.bool_]) -> FloatN:
        """Send the failed nodes to repair; how long each run waits until it has its nodes again. [s]"""
        wait = np.zeros(len(runs))
        rows = runs[node]
        if len(rows) == 0:
            return wait
        slot = self.back[rows].argmin(axis=1)
        self.back[rows, slot] = now[node] + self.rng.exponential(self.mean_s, len(rows))
        wait[node] = np.maximum(self.back[rows].min(axis=1) - now[node], 0.0)
        return wait
