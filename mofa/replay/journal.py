"""A diary of allocations: what was alive at any event, by tensor and by kind."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.op import KINDS

GROUPS = ("parameters", "gradients", "optimizer_states", "buffers", "activations", "weight_copies", "temporaries")
GROUP_OF = tuple(
    {"activation": 4, "weight_copy": 5, "grad": 1, "state": 2, "buffer": 3, "scratch": 6}[kind] for kind in KINDS
)
"""The group of each kind of tensor of a tape."""
PARAMETERS, GRADIENTS, STATES, BUFFERS, ACTIVATIONS, COPIES, TEMPORARIES = range(len(GROUPS))


class Act(NamedTuple):
    """What is done to a slot: ``code`` says what, ``op`` in which op, ``group`` and ``name`` with which tensor. [B]"""

    code: int
    slot: int
    size: int
    stream: int
    group: int
    name: str
    op: str


OUTSIDE = -1
"""The code of an act that belongs to no tape: its ``op`` is the whole of where it happens."""


def outside(group: int, name: str, where: str, stream: int = 0) -> Act:
    """An act that belongs to no tape."""
    return Act(OUTSIDE, 0, 0, stream, group, name, where)


@dataclass(frozen=True)
class Live:
    """Tensors of one name that are alive together: how many, and their bytes in all. [B]"""

    name: str
    group: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Moment:
    """An instant: what ran, and the bytes alive by group and by tensor, largest first. [B]"""

    step: int
    where: str
    allocated: int
    reserved: int
    alive: dict[str, int]
    tensors: tuple[Live, ...]


@dataclass
class Journal:
    """Every allocation and free: ``acts`` with their signed ``sizes``, and marks of where they happened. [B]

    ``passages`` are (event, phase, piece), ``computations`` (event, kind, chunk, micro-batch); ``left_out`` are
    (number of computations in front, those left out, the length of what would have been repeated).
    """

    acts: list[Act] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    passages: list[tuple[int, str, str]] = field(default_factory=list)
    computations: list[tuple[int, str, int, int]] = field(default_factory=list)
    left_out: list[tuple[int, int, int]] = field(default_factory=list)
    grown: list[tuple[int, int]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def where(self, event: int) -> str:
        """What ran when an event happened."""
        act = self.acts[event]
        if act.code == OUTSIDE:
            return act.op
        _, phase, piece = self.passages[bisect_right(self.passages, (event, "~")) - 1]
        return f"{phase} of {piece}: {act.op}"

    def step_of(self, event: int) -> int:
        """The step that an event belongs to, 0 for the start."""
        return bisect_right(self.steps, event)

    def live(self, event: int) -> tuple[Live, ...]:
        """The tensors alive after an event, by name, largest first."""
        acts = self.acts[: event + 1]
        sizes = np.array(self.sizes[: event + 1], dtype=np.int64)
        # an act is one object however often it is done
        ids = np.fromiter(map(id, acts), dtype=np.int64, count=len(acts))
        _, firsts, of = np.unique(ids, return_index=True, return_inverse=True)
        totals, counts = (np.zeros(len(firsts), dtype=np.int64) for _ in range(2))
        np.add.at(totals, of, sizes)
        np.add.at(counts, of, np.where(sizes > 0, 1, -1))
        sums: dict[tuple[int, str], list[int]] = {}
        for n in np.argsort(firsts):
            act = acts[firsts[n]]
            item = sums.setdefault((act.group, act.name), [0, 0])
            item[0] += int(totals[n])
            item[1] += int(counts[n])
        found = [Live(name, GROUPS[g], count, total) for (g, name), (total, count) in sums.items() if total]
        return tuple(sorted(found, key=lambda live: (-live.bytes, live.name)))

    def moment(self, event: int, reserved: int) -> Moment:
        """What was alive after an event, and where."""
        tensors = self.live(event)
        alive = dict.fromkeys(GROUPS, 0)
        for live in tensors:
            alive[live.group] += live.bytes
        return Moment(self.step_of(event), self.where(event), sum(alive.values()), reserved, alive, tensors)

    def by_group(self, start: int) -> NDArray[np.int64]:
        """Bytes alive by group after every event from ``start`` on. (events, groups) [B]"""
        sizes = np.array(self.sizes, dtype=np.int64)
        groups = np.fromiter(map(attrgetter("group"), self.acts), dtype=np.int64, count=len(sizes))
        deltas = np.zeros((len(sizes), len(GROUPS)), dtype=np.int64)
        deltas[np.arange(len(sizes)), groups] = sizes
        return np.asarray(np.cumsum(deltas, axis=0)[start:])

    def spans(self, start: int) -> Iterator[tuple[int, int, str, int, int]]:
        """(first event, event after the last, kind, chunk, micro-batch) of each computation from an event on."""
        marks = [mark for mark in self.computations if mark[0] >= start]
        for i, (event, kind, c, m) in enumerate(marks):
            yield event, marks[i + 1][0] if i + 1 < len(marks) else len(self.sizes), kind, c, m
