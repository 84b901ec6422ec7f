"""What the clock says of a step: seconds by part, idle by cause, and when every computation runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Computation:
    """A computation of a rank, ``kind`` F, B, I, W or O (optimizer), from ``start_s`` to ``end_s`` of the step. [s]"""

    kind: str
    chunk: int
    micro_batch: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class TimeReplayed:
    """A step of the slowest rank: ``exposed`` sums to ``step_s``; ``idle`` and ``spans`` per pipeline rank. [s]"""

    step_s: float
    exposed: dict[str, float]
    hidden: dict[str, float]
    idle: tuple[dict[str, float], ...]
    spans: tuple[tuple[Computation, ...], ...]
