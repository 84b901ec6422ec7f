"""How fast the slowest host of a run was, where every rank timed small additions within its steps.

A core whose neighbour is busy with another tenant's work issues 1.4 to 1.9 times as slowly as one whose neighbour is
quiet. Which it is changes at random from pass to pass, for each of a rank's two issuing threads by itself.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mofa.measure.records import RunRecord
from mofa.specs.host import SmallLayerTime

QUIET_AND_BUSY, QUIET_AND_BUSY_BACK = (1.2, 2.1), (1.1, 1.95)
"""An addition within steps over the fastest between them, where the core's neighbour is quiet and where it is busy, on
the way forward and back. Of 1,408 means over steps of each way a tenth is below 2.6 and 2.4 us and a tenth above 4.4
and 4.1; of 1,574 readings between steps 17 % are at 1.9 us and 60 % at 3.3, and hardly any in the middle. [-]"""


def has_pace_samples(record: RunRecord) -> bool:
    """Whether every rank timed small additions within its steps, and what it issues beside some.

    Then the slowest host is known, and no spread between ranks comes on top.
    """
    ranks = record.measured.ranks
    return bool(ranks) and all(r.step_ops_s and r.layer_ops_s and r.cpu_ops_at_issues_s for r in ranks)


@dataclass(frozen=True)
class PassTimesOfRanks:
    """What the ranks of a run timed on one way, each on the thread that goes it."""

    read_ops_s: Sequence[float]
    """The addition beside the work, between steps, of all ranks. [s]"""
    read_s: Sequence[float]
    """The work. [s]"""
    steps_ops_s: Sequence[Sequence[float]]
    """The addition within each step, in the mean, by rank. [s]"""
    levels: tuple[float, float] = QUIET_AND_BUSY

    def work_s_of_steps_by_rank(self) -> list[list[float]]:
        """What the work takes in each step of each rank. [s]"""
        return [work_seconds_at_pace(self.read_ops_s, self.read_s, ops_s) for ops_s in self.steps_ops_s]

    def work_s_of_steps_waiting_for_slowest(self) -> list[float]:
        """Seconds of the work in each step, if every pass waits for its slowest rank. [s]

        A core's neighbour is quiet or busy for a whole pass (layers of one pass differ by 8 %, passes of a rank by
        half: te4-ep4-qwen30b-12l-traced). A step's mean says in what share of its passes it was busy; in those in which
        any rank's was, all wait.

        Examples
        --------
        Half of the passes of either rank are busy: in three of four at least one rank is.

        >>> times = PassTimesOfRanks([1.0, 2.0], [10.0, 20.0], [[1.5], [1.5]], levels=(1.0, 2.0))
        >>> times.work_s_of_steps_waiting_for_slowest()
        [17.5]
        """
        quiet, busy = (level * min(self.read_ops_s) for level in self.levels)
        slowest = []
        for paces in zip(*self.steps_ops_s, strict=True):
            all_quiet = math.prod(1.0 - min(max((pace - quiet) / (busy - quiet), 0.0), 1.0) for pace in paces)
            slowest.append(max(max(paces), busy + (min(quiet, max(paces)) - busy) * all_quiet))
        return work_seconds_at_pace(self.read_ops_s, self.read_s, slowest)


def small_layer_time_of_slowest_host(record: RunRecord) -> SmallLayerTime:
    """A small layer of Transformer Engine on a paced run's slowest host, each way, in the median step.

    Ranks with experts of one layer wait for each other in every pass: the host that waits for the counts of its tokens
    waits for all hosts. Others catch up until the step ends, so that the rank counts that is the slowest in both ways
    together.
    """
    ranks = record.measured.ranks
    ahead = PassTimesOfRanks(
        [op_s for rank in ranks for op_s in rank.layer_ops_s], [s for rank in ranks for s in rank.layer_issues_s],
        [rank.step_ops_s for rank in ranks],
    )  # fmt: skip
    back = PassTimesOfRanks(
        [op_s for rank in ranks for op_s in rank.layer_back_ops_s], [s for rank in ranks for s in rank.layer_backs_s],
        [rank.step_back_ops_s for rank in ranks], QUIET_AND_BUSY_BACK,
    )  # fmt: skip
    if record.run.strategy.get("ep", 1) > 1:
        return SmallLayerTime(
            statistics.median(ahead.work_s_of_steps_waiting_for_slowest()),
            statistics.median(back.work_s_of_steps_waiting_for_slowest()),
        )
    by_step = zip(
        zip(*ahead.work_s_of_steps_by_rank(), strict=True),
        zip(*back.work_s_of_steps_by_rank(), strict=True),
        strict=True,
    )
    slowest = [max(zip(*step, strict=True), key=sum) for step in by_step]
    return SmallLayerTime(*map(statistics.median, zip(*slowest, strict=True)))


QUIET = 1.25
"""An addition between steps over the fastest of a run, up to which the core's neighbour is quiet. [-]"""


def layer_time_over_small_op(records: Iterable[RunRecord], parts: Iterable[Collection[str]] = ()) -> SmallLayerTime:
    """A small layer of Transformer Engine, each way, over a small op, on cores whose neighbours are quiet: the median
    machine's, of each the medians of all readings of its runs. [-]

    ``parts`` are marks of one machine each, of whose GPUs several runs had some at a time: a mark names GPUs too.

    Raises
    ------
    ValueError
        If no rank read either there.
    """
    machine_of_part = {mark: marks for marks in map(tuple, parts) for mark in marks}
    by_machine: dict[Collection[str], list[RunRecord]] = defaultdict(list)
    for record in records:
        mark = record.environment.host or ""
        by_machine[machine_of_part.get(mark, (mark,))].append(record)
    ratios = [ratio for of in by_machine.values() if (ratio := _of_machine(of)) is not None]
    if not ratios:
        raise ValueError("no run has readings on quiet cores")
    return SmallLayerTime(*map(statistics.median, zip(*ratios, strict=True)))


def _of_machine(records: Iterable[RunRecord]) -> SmallLayerTime | None:
    """The same of one machine's runs; None where not all was read on quiet cores. [-]"""
    read: dict[str, list[float]] = {"issue": [], "back": [], "op": []}
    for record in records:
        ranks = [rank for rank in record.measured.ranks if rank.layer_ops_s and rank.cpu_ops_at_issues_s]
        for rank in ranks:
            timed = {
                "issue": (rank.layer_ops_s, rank.layer_issues_s), "back": (rank.layer_back_ops_s, rank.layer_backs_s),
                "op": (rank.cpu_ops_at_issues_s, rank.host_issues_s),
            }  # fmt: skip
            fastest = min(op_s for other in ranks for op_s in other.layer_ops_s)
            for name, (ops_s, seconds) in timed.items():
                read[name] += [s for op_s, s in zip(ops_s, seconds, strict=True) if op_s <= QUIET * fastest]
    if not all(read.values()):
        return None
    op_s = statistics.median(read["op"])
    return SmallLayerTime(statistics.median(read["issue"]) / op_s, statistics.median(read["back"]) / op_s)


def small_op_s_of_slowest_host(record: RunRecord) -> float:
    """Issue of one small op on a paced run's slowest host, in the median step. [s]"""
    ranks = record.measured.ranks
    ops = PassTimesOfRanks(
        [op_s for rank in ranks for op_s in rank.cpu_ops_at_issues_s],
        [s for rank in ranks for s in rank.host_issues_s],
        [rank.step_ops_s for rank in ranks],
    )
    slowest: list[float] = [max(step) for step in zip(*ops.work_s_of_steps_by_rank(), strict=True)]
    return statistics.median(slowest)


def work_seconds_at_pace(read_ops_s: Sequence[float], read_s: Sequence[float], ops_s: Sequence[float]) -> list[float]:
    """What work takes at other moments, at which only a small addition was timed. [s]

    Parameters
    ----------
    read_ops_s, read_s
        The addition and the work, timed together. [s]
    ops_s
        The addition at each of the other moments. [s]

    Returns
    -------
    list[float]
        By the line through the readings whose slope is the median of all pairs' (Theil and Sen): an addition is slowed
        by 1.9 where a core's neighbour is busy, a layer's Python by 1.4 to 1.7. By their ratio where the line falls, as
        it may where all readings were alike.

    Examples
    --------
    >>> work_seconds_at_pace([1e-6, 2e-6], [1e-3, 1.5e-3], [3e-6])
    [0.002]
    """
    ratio = statistics.median(s / op_s for op_s, s in zip(read_ops_s, read_s, strict=True))
    if max(read_ops_s) == min(read_ops_s):
        return [ratio * op_s for op_s in ops_s]
    slope, start = theil_sen_line(read_ops_s, read_s)
    if not 0 < slope <= 1.5 * ratio:
        slope, start = ratio, 0.0
    return [start + slope * op_s for op_s in ops_s]


def theil_sen_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Slope and intercept of the line by the medians of all pairs' slopes and of what it leaves.

    Source: Sen 1968, J. Am. Stat. Assoc. 63, 1379; as scipy's ``theilslopes``, without its band, which takes ten times
    as long.

    Parameters
    ----------
    x, y
        Equally many; those of ``x`` are not all equal.

    Examples
    --------
    One reading of five is off:

    >>> theil_sen_line([0.0, 1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 5.0, 7.0, 90.0])
    (2.0, 1.0)
    """
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    run = xs[:, None] - xs
    rises = run > 0
    slope = np.median((ys[:, None] - ys)[rises] / run[rises])
    return float(slope), float(np.median(ys) - slope * np.median(xs))
