"""The result of replaying a plan's clock: computations, transfers, waits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from mofa.blocks.work import Work


class Computation(NamedTuple):
    """A computation of a rank: ``F``, ``B``, ``I`` or ``W`` of a chunk and micro-batch, or ``O``, the optimizer. [s]"""

    kind: str
    chunk: int
    micro_batch: int
    start_s: float
    end_s: float


ComputationFields = tuple[str, int, int, float, float]
"""The fields of a :class:`Computation`: most clocks are played for their end alone."""


class Transfer(NamedTuple):
    """A send or a receive of a rank: what, of which stage and micro-batch, from its start to its end. [s]"""

    kind: str
    stage: int
    micro_batch: int
    start_s: float
    end_s: float


class StreamOp(NamedTuple):
    """An op on a stream of a rank. [s]"""

    stream: str
    name: str
    family: str
    start_s: float
    end_s: float
    works: tuple[Work, ...] = ()
    """What it computes or sends, where that is known."""
    after: tuple[int, ...] = ()
    """Ops of its rank that must end before it begins, by their place among all."""


@dataclass(frozen=True)
class ReplayedTime:
    """A training step on the clock of every pipeline rank.

    ``exposed`` has the keys of :data:`mofa.cost.breakdown.TIME_COMPONENTS` and sums to ``step_s``, as each of ``ranks``
    does; it is that of ``slowest``, the rank that waits least for others. ``idle`` says why a rank's device computes
    nothing. ``spans`` are its computations in order, the optimizer last, ``transfers`` what it sends and receives and
    ``ops`` every op of the micro-batches that were asked for; of ranks that have any, ``ops_of_spans`` has the first op
    of each of ``spans`` but the optimizer, and the one behind its last. [s]
    """

    step_s: float
    exposed: dict[str, float]
    hidden: dict[str, float]
    slowest: int
    ranks: tuple[dict[str, float], ...]
    idle: tuple[dict[str, float], ...]
    spans: tuple[tuple[Computation, ...], ...]
    transfers: tuple[tuple[Transfer, ...], ...] = ()
    ops: tuple[tuple[StreamOp, ...], ...] = field(default=())
    ops_of_spans: tuple[tuple[tuple[int, int], ...], ...] = ()


def weighted_mean_of_steps(first: ReplayedTime, other: ReplayedTime, share: float) -> ReplayedTime:
    """The mean of two replayed steps of the same ranks, of which the other has the weight ``share``.

    Spans, transfers and ops are those of the first.

    Examples
    --------
    >>> one, other = (ReplayedTime(s, {"gemm": s}, {}, 0, ({"gemm": s},), ({},), ()) for s in (2.0, 4.0))
    >>> weighted_mean_of_steps(one, other, 0.25).step_s, weighted_mean_of_steps(one, other, 0.25).ranks
    (2.5, ({'gemm': 2.5},))
    """

    def mean(parts: dict[str, float], of_other: dict[str, float]) -> dict[str, float]:
        names = dict.fromkeys([*parts, *of_other])
        return {name: (1.0 - share) * parts.get(name, 0.0) + share * of_other.get(name, 0.0) for name in names}

    return replace(
        first, step_s=(1.0 - share) * first.step_s + share * other.step_s,
        exposed=mean(first.exposed, other.exposed),
        hidden=mean(first.hidden, other.hidden), ranks=tuple(map(mean, first.ranks, other.ranks)),
        idle=tuple(map(mean, first.idle, other.idle)),
    )  # fmt: skip


def scaled_to_runs_per_step(time: ReplayedTime, runs: float) -> ReplayedTime:
    """A step that runs so often on average; its spans, transfers and ops are those of one run.

    Examples
    --------
    >>> one = ReplayedTime(2.0, {"gemm": 2.0}, {}, 0, ({"gemm": 2.0},), ({},), ())
    >>> scaled_to_runs_per_step(one, 1.5).exposed, scaled_to_runs_per_step(one, 1.0) is one
    ({'gemm': 3.0}, True)
    """
    if runs == 1.0:
        return time

    def longer(parts: dict[str, float]) -> dict[str, float]:
        return {name: runs * seconds for name, seconds in parts.items()}

    return replace(
        time, step_s=runs * time.step_s, exposed=longer(time.exposed), hidden=longer(time.hidden),
        ranks=tuple(map(longer, time.ranks)), idle=tuple(map(longer, time.idle)),
    )  # fmt: skip
