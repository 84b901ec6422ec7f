"""When failures strike: exponential, Weibull as one clock of the job or one per node, lemons among them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mofa.errors import SpecError
from mofa.faults.checks import check_above_zero, checked_share
from mofa.faults.failures.rates import lemon_rate_factor, weibull_scale_s

FloatN = NDArray[np.float64]
IntN = NDArray[np.int64]
MAX_CELLS = 2**22
"""Node clocks held at once. [-]"""


@dataclass(frozen=True)
class FailureClock:
    """When failures of a job strike: their mean time between, Weibull shape and lemons.

    Parameters
    ----------
    mtbf_s
        Mean time between failures of the whole job, of all its nodes, lemons included. [s]
    shape
        Weibull shape; 1 is exponential. [-]
    num_nodes
        Nodes that each have a clock, which restarts when its node fails; None: the job has one clock, which restarts at
        every failure. [-]
    lemon_fraction, lemon_multiple
        Share of nodes that fail so many times as often as the others; drawn anew for every run. [-]
    new_nodes
        Whether node clocks are at zero when the run begins; else they have run for ever, and the rate is steady.
    strikes_restarts
        Whether a restart can fail; else clocks stand still until it is over.
    counted_failures
        Failures behind the rate, where it was estimated: every run draws its true rate given that count
        (:func:`mofa.faults.failures.rates.true_over_estimated_rate`). None: the rate is known. [-]
    """

    mtbf_s: float
    shape: float = 1.0
    num_nodes: int | None = None
    lemon_fraction: float = 0.0
    lemon_multiple: float = 1.0
    new_nodes: bool = False
    strikes_restarts: bool = True
    counted_failures: float | None = None

    def __post_init__(self) -> None:
        check_above_zero("mtbf_s", self.mtbf_s, finite=False)
        if not 0.1 <= self.shape <= 10:
            raise SpecError(f"shape: is {self.shape:g}; give a Weibull shape from 0.1 to 10, 1 for exponential")
        checked_share("lemon_fraction", self.lemon_fraction)
        check_above_zero("lemon_multiple", self.lemon_multiple, "")
        if self.num_nodes is not None and self.num_nodes < 1:
            raise SpecError(f"num_nodes: is {self.num_nodes}; give at least 1")
        if self.lemon_fraction and self.num_nodes is None:
            raise SpecError(f"lemon_fraction: is {self.lemon_fraction:g} of unknown nodes; give num_nodes")
        if self.counted_failures is not None:
            check_above_zero("counted_failures", self.counted_failures, "")

    @property
    def needs_clock_per_node(self) -> bool:
        """Whether every node needs a clock of its own: exponential ones are as good as one."""
        return self.num_nodes is not None and self.shape != 1 and np.isfinite(self.mtbf_s)

    def num_runs_at_once(self, num_runs: int) -> int:
        """Runs whose clocks fit into memory together. [-]"""
        if not self.needs_clock_per_node:
            return num_runs
        return int(min(max(MAX_CELLS // (self.num_nodes or 1), 1), num_runs))


class FailureTimes:
    """The failures of ``num_runs`` runs, one after the other."""

    def __init__(self, clock: FailureClock, num_runs: int, rng: np.random.Generator) -> None:
        self.clock, self.rng = clock, rng
        self.mean_s = np.full(num_runs, clock.mtbf_s)
        slower = np.ones(num_runs)
        if clock.counted_failures is not None:
            slower = clock.counted_failures / rng.gamma(clock.counted_failures + 0.5, size=num_runs)
        nodes = clock.num_nodes
        if nodes is not None and clock.lemon_fraction and not clock.needs_clock_per_node:
            lemons = rng.binomial(nodes, clock.lemon_fraction, num_runs)
            expected = nodes * float(lemon_rate_factor(clock.lemon_fraction, clock.lemon_multiple))
            self.mean_s = clock.mtbf_s * expected / (nodes + lemons * (clock.lemon_multiple - 1))
        self.mean_s = self.mean_s * slower
        self.queue = _NodeClocks(clock, num_runs, rng, slower) if clock.needs_clock_per_node else None
        weibull = self.queue is None and clock.shape != 1 and not np.isinf(clock.mtbf_s)
        self.scale_s = weibull_scale_s(self.mean_s, clock.shape) if weibull else self.mean_s

    def next_gap_s(self, rows: IntN) -> FloatN:
        """Time from the last failure of these runs to their next. [s]"""
        if self.queue is not None:
            return self.queue.next_gap(rows)
        if np.isinf(self.clock.mtbf_s):
            return np.full(len(rows), np.inf)
        if self.clock.shape == 1:
            return np.asarray(self.rng.exponential(self.mean_s[rows]))
        return np.asarray(self.rng.weibull(self.clock.shape, len(rows)) * self.scale_s[rows])


class _NodeClocks:
    """Weibull clocks of all nodes of ``num_runs`` runs; failures come out in windows of time, sorted."""

    def __init__(self, clock: FailureClock, num_runs: int, rng: np.random.Generator, slower: FloatN) -> None:
        self.clock, self.rng = clock, rng
        nodes = clock.num_nodes or 1
        lemon = rng.random((num_runs, nodes)) < clock.lemon_fraction
        factor = float(lemon_rate_factor(clock.lemon_fraction, clock.lemon_multiple))
        mean_s = clock.mtbf_s * nodes * factor
        scale = float(weibull_scale_s(mean_s, clock.shape))
        self.scale = np.where(lemon, scale / clock.lemon_multiple, scale) * slower[:, None]
        if clock.new_nodes:
            first = rng.weibull(clock.shape, (num_runs, nodes))
        else:  # what is left of a gap that a random instant meets: gaps weighted by their length, cut evenly
            first = rng.gamma(1 + 1 / clock.shape, size=(num_runs, nodes)) ** (1 / clock.shape) * rng.random(
                (num_runs, nodes)
            )
        self.next = first * self.scale
        self.window_s, self.end_s = 24 * clock.mtbf_s, 0.0
        self.events = np.empty((num_runs, 0))
        self.read = np.zeros(num_runs, dtype=np.int64)
        self.last = np.zeros(num_runs)

    def next_gap(self, rows: IntN) -> FloatN:
        while np.any(self.read[rows] >= np.isfinite(self.events[rows]).sum(axis=1)):
            self._refill()
        event_s = self.events[rows, self.read[rows]]
        self.read[rows] += 1
        gap = event_s - self.last[rows]
        self.last[rows] = event_s
        return np.asarray(gap)

    def _refill(self) -> None:
        """Failures of the next window of time behind those that were not read yet."""
        self.end_s += self.window_s
        rows: list[IntN] = []
        times: list[FloatN] = []
        while len((hit := np.nonzero(self.next < self.end_s))[0]):
            rows.append(hit[0])
            times.append(self.next[hit])
            self.next[hit] += self.rng.weibull(self.clock.shape, len(hit[0])) * self.scale[hit]
        left = [(np.full(len(e), i), e) for i, e in enumerate(self._unread())]
        row = np.concatenate([*(r for r, _ in left), *rows]).astype(np.int64)
        time = np.concatenate([*(t for _, t in left), *times])
        order = np.lexsort((time, row))
        row, time = row[order], time[order]
        counts = np.bincount(row, minlength=len(self.read))
        place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.events = np.full((len(self.read), int(counts.max(initial=0)) + 1), np.inf)
        self.events[row, place] = time
        self.read[:] = 0

    def _unread(self) -> list[FloatN]:
        return [events[read:][np.isfinite(events[read:])] for events, read in zip(self.events, self.read, strict=True)]
