"""A timeline of allocations: what was alive at any event, by tensor and by kind."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.op import KINDS

GROUPS = ("parameters", "gradients", "optimizer_states", "buffers", "activations", "weight_copies", "temporaries")
GROUP_OF = tuple(
    {"activation": 4, "weight_copy": 5, "grad": 1, "state": 2, "buffer": 3, "scratch": 6}[kind] for kind in KINDS
)
"""The group of each kind of tensor of a tape."""
PARAMETERS, GRADIENTS, STATES, BUFFERS, ACTIVATIONS, COPIES, TEMPORARIES = range(len(GROUPS))


class Instruction(NamedTuple):
    """What is done to a slot: ``code`` says what, ``op`` in which op, ``group`` and ``name`` with which tensor. [B]"""

    code: int
    slot: int
    size: int
    stream: int
    group: int
    name: str
    op: str
    expert: int = -1


OUTSIDE = -1
"""The code of an instruction that belongs to no tape: its ``op`` is the whole of where it happens."""


def off_tape_instruction(group: int, name: str, where: str, stream: int = 0) -> Instruction:
    """An instruction that belongs to no tape."""
    return Instruction(OUTSIDE, 0, 0, stream, group, name, where)


@dataclass(frozen=True)
class LiveTensor:
    """Tensors of one name that are alive together: how many, and their bytes in all. [B]"""

    name: str
    group: str
    count: int
    bytes: int


@dataclass(frozen=True)
class MemoryInstant:
    """An instant: what ran, and the bytes alive by group and by tensor, largest first. [B]"""

    step: int
    where: str
    allocated: int
    reserved: int
    alive: dict[str, int]
    tensors: tuple[LiveTensor, ...]


EventRun = tuple[Sequence[Instruction], Sequence[int]]
"""Events: what was done, and signed bytes. [B]"""


Passage = tuple[int, str, str]
"""An event, the phase and the piece that begin with it."""


LargerBlocks = tuple[int, dict[int, tuple[tuple[int, int], ...]], dict[int, int]]
"""The first event of a repetition, the events of each slot, counted from there, with their signs, and by how much the
blocks in some slots are larger than noted. [B]"""


MANY_RESTS = 32
"""Blocks that are larger than noted from which NumPy is quicker than one after the other. [-]"""


class SlotEvents(NamedTuple):
    """Allocations and frees of slots by their events, counted from a repetition's first, as arrays: those of slot i are
    ``first[i]`` up to ``first[i + 1]``, with their signs."""

    first: NDArray[np.int64]
    events: NDArray[np.int64]
    signs: NDArray[np.int64]

    @classmethod
    def from_entries(cls, entries: Mapping[int, Sequence[tuple[int, int]]]) -> SlotEvents:
        """Of the (event, sign) of each slot.

        Examples
        --------
        >>> SlotEvents.from_entries({0: [(3, -1)], 2: [(1, 1), (2, -1)]}).size_changes({2: 512, 7: 512})
        (array([1, 2]), array([ 512, -512]))
        """
        slots = sorted(entries)
        count = np.zeros(slots[-1] + 1 if slots else 0, dtype=np.int64)
        count[slots] = [len(entries[slot]) for slot in slots]
        pairs = np.array([pair for slot in slots for pair in entries[slot]], dtype=np.int64).reshape(-1, 2)
        return cls(np.concatenate([[0], np.cumsum(count)]), pairs[:, 0].copy(), pairs[:, 1].copy())

    def size_changes(self, rests: Mapping[int, int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The events at which more comes or goes where blocks are so much larger than noted, and how much. [B]"""
        slots = np.fromiter(rests, dtype=np.int64, count=len(rests))
        rest = np.fromiter(rests.values(), dtype=np.int64, count=len(rests))
        known = slots < len(self.first) - 1
        slots, rest = slots[known], rest[known]
        count = self.first[slots + 1] - self.first[slots]
        place = np.arange(count.sum()) + np.repeat(self.first[slots] - np.cumsum(count) + count, count)
        return self.events[place], self.signs[place] * np.repeat(rest, count)


EVENTS_AT_ONCE = 1 << 20
"""Of a long step, that are summed at once: 8 MiB an array. [-]"""


class _Events(NamedTuple):
    """All different acts in the order in which they were first done, which of them every event is, and its bytes."""

    instructions: list[Instruction]
    numbers: NDArray[np.int32]
    sizes: NDArray[np.int64]

    def pieces(self, end: int) -> Iterator[tuple[int, NDArray[np.int32], NDArray[np.int64]]]:
        """Numbers and sizes of the events before ``end``, some at a time, with the event that each piece begins at."""
        for begin in range(0, end, EVENTS_AT_ONCE):
            piece = slice(begin, min(begin + EVENTS_AT_ONCE, end))
            yield begin, self.numbers[piece], self.sizes[piece]


@dataclass
class Journal:
    """Every allocation and free: acts with their signed sizes, and marks of where they happened. [B]

    ``new_instructions`` and ``new_sizes`` are those behind the last computation that was repeated from notes; what is
    in front of them is ``closed_runs``, ``num_closed`` events: one entry for a computation however often it was
    repeated. ``larger_blocks`` says which blocks there are larger than noted. ``new_passages`` are (event, phase,
    piece) of what was not repeated, ``repetitions`` the first event of each repetition, how many of those are in front
    of it and its own passages, events counted from there; ``computations`` (event, kind, chunk, micro-batch);
    ``skipped_rounds`` are (number of computations in front, those left out, the length of what would have been
    repeated).
    """

    new_instructions: list[Instruction] = field(default_factory=list)
    new_sizes: list[int] = field(default_factory=list)
    closed_runs: list[EventRun] = field(default_factory=list)
    num_closed: int = 0
    larger_blocks: list[LargerBlocks] = field(default_factory=list)
    new_passages: list[Passage] = field(default_factory=list)
    repetitions: list[tuple[int, int, Sequence[Passage]]] = field(default_factory=list)
    computations: list[tuple[int, str, int, int]] = field(default_factory=list)
    skipped_rounds: list[tuple[int, int, int]] = field(default_factory=list)
    grown: list[tuple[int, int]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    _read: _Events | None = None

    # -- writing
    @property
    def num_events(self) -> int:
        """How many are written down."""
        return self.num_closed + len(self.new_sizes)

    def instructions_and_sizes_since(self, event: int) -> tuple[list[Instruction], list[int]]:
        """Instructions and sizes from an event on, none of which was repeated from notes."""
        assert event >= self.num_closed
        return self.new_instructions[event - self.num_closed :], self.new_sizes[event - self.num_closed :]

    def repeat_computation(
        self, instructions: Sequence[Instruction], sizes: Sequence[int], passages: Sequence[Passage]
    ) -> int:
        """A computation that was written down before; the event after its last."""
        self.repetitions.append((self.num_events, len(self.new_passages), passages))
        if self.new_instructions:
            self.closed_runs.append((self.new_instructions, self.new_sizes))
            self.num_closed += len(self.new_instructions)
            self.new_instructions, self.new_sizes = [], []
        self.closed_runs.append((instructions, sizes))
        self.num_closed += len(instructions)
        return self.num_closed

    def end_mark(self) -> tuple[int, ...]:
        """A mark of the journal's end so far, to which it can be truncated."""
        return tuple(map(len, self._growing()))

    def truncate_to(self, mark: tuple[int, ...]) -> None:
        """Forget what came behind a mark, since which nothing was repeated from notes."""
        for items, length in zip(self._growing(), mark, strict=True):
            del items[length:]
        self._read = None

    def _growing(self) -> tuple[list[Any], ...]:
        return self.new_instructions, self.new_sizes, self.new_passages, self.computations, self.grown, self.steps

    # -- reading
    @property
    def instructions(self) -> list[Instruction]:
        """What was done in every event."""
        events = self._events()
        return [events.instructions[number] for number in events.numbers.tolist()]

    @property
    def sizes(self) -> list[int]:
        """What every event allocated (negative: freed). [B]"""
        sizes: list[int] = self._events().sizes.tolist()
        return sizes

    @property
    def passages(self) -> list[Passage]:
        """(event, phase, piece) of all that was played."""
        out: list[Passage] = []
        done = 0
        for start, before, passages in self.repetitions:
            out += self.new_passages[done:before]
            out += [(start + event, phase, piece) for event, phase, piece in passages]
            done = before
        return out + self.new_passages[done:]

    def allocated_peak_and_event(self, start: int, end: int, before: int) -> tuple[int, int]:
        """The most that is allocated while events from ``start`` up to ``end`` happen, where ``before`` was in front of
        them, and the number of events in front of when that is so first. [B]"""
        sizes, most, first = self._events().sizes, before, start
        for begin in range(start, end, EVENTS_AT_ONCE):
            allocated = before + np.cumsum(sizes[begin : min(begin + EVENTS_AT_ONCE, end)])
            highest = int(allocated.argmax())
            if allocated[highest] > most:
                most, first = int(allocated[highest]), begin + highest + 1
            before = int(allocated[-1])
        return most, first

    def _events(self) -> _Events:
        """All events as arrays; an instruction is one object however often it is done."""
        if self._read is None or len(self._read.sizes) < self.num_events:
            self._read = _read((*self.closed_runs, (self.new_instructions, self.new_sizes)), self.larger_blocks)
        return self._read

    def drop_event_arrays(self) -> None:
        """Drop the arrays of all events, 12 bytes each; they are made anew where they are asked for again."""
        self._read = None

    def running_op(self, event: int, instruction: Instruction | None = None) -> str:
        """What ran when an event happened; ``instruction`` is what was to be done in one that did not."""
        if instruction is None:
            events = self._events()
            instruction = events.instructions[events.numbers[event]]
        if instruction.code == OUTSIDE:
            return instruction.op
        _, phase, piece = self._passage_of(event)
        return f"{phase} of {piece}: {instruction.op}"

    def _passage_of(self, event: int) -> Passage:
        """The last that begins no later than an event; its own event is counted from where its repetition begins."""
        i = bisect_right(self.repetitions, event, key=itemgetter(0))
        behind = self.repetitions[i][1] if i < len(self.repetitions) else len(self.new_passages)
        since = self.new_passages[self.repetitions[i - 1][1] if i else 0 : behind]
        if number := bisect_right(since, (event, "~")):
            return since[number - 1]
        if i:
            start, _, repeated = self.repetitions[i - 1]
            if number := bisect_right(repeated, (event - start, "~")):
                return repeated[number - 1]
        passages = self.passages
        return passages[bisect_right(passages, (event, "~")) - 1]

    def step_of_event(self, event: int) -> int:
        """The step that an event belongs to, 0 for the start."""
        return bisect_right(self.steps, event)

    def live_tensors_after_event(self, event: int) -> tuple[LiveTensor, ...]:
        """The tensors alive after an event, by name, largest first."""
        events = self._events()
        totals, counts = np.zeros((2, len(events.instructions)))
        for _, numbers, sizes in events.pieces(event + 1):  # sums stay far below 2**53, so that they are exact
            totals += np.bincount(numbers, weights=sizes, minlength=len(totals))
            counts += np.bincount(numbers, weights=np.where(sizes > 0, 1, -1), minlength=len(counts))
        sums: dict[tuple[int, str], list[int]] = {}
        for instruction, total, count in zip(events.instructions, totals.tolist(), counts.tolist(), strict=True):
            item = sums.setdefault((instruction.group, instruction.name), [0, 0])
            item[0] += int(total)
            item[1] += int(count)
        tensors = [LiveTensor(name, GROUPS[g], count, total) for (g, name), (total, count) in sums.items() if total]
        return tuple(sorted(tensors, key=lambda live: (-live.bytes, live.name)))

    def instant_at(self, event: int, reserved: int) -> MemoryInstant:
        """What was alive after an event, and where."""
        tensors = self.live_tensors_after_event(event)
        alive = dict.fromkeys(GROUPS, 0)
        for live in tensors:
            alive[live.group] += live.bytes
        return MemoryInstant(
            self.step_of_event(event), self.running_op(event), sum(alive.values()), reserved, alive, tensors
        )

    def allocated_bytes_from_event(self, start: int) -> NDArray[np.int64]:
        """Bytes alive after every event from ``start`` on. (events,) [B]"""
        return np.asarray(np.cumsum(self._events().sizes)[start:])

    def live_bytes_by_group(self, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes alive by group after each of some events. (chosen, groups) [B]"""
        events = self._events()
        marks, of_mark = np.unique(chosen, return_inverse=True)
        end = int(marks[-1]) + 1
        group_of = np.array([instruction.group for instruction in events.instructions], dtype=np.int64)
        added = np.zeros(len(marks) * len(GROUPS))
        for begin, numbers, sizes in events.pieces(end):  # sums stay far below 2**53, so that they are exact
            ahead, until = np.searchsorted(marks, (begin, begin + len(numbers) - 1))
            passed = np.zeros(len(numbers), dtype=np.int64)  # 1 behind each mark
            passed[marks[ahead:until] + 1 - begin] = 1
            between = ahead + np.cumsum(passed)
            added += np.bincount(between * len(GROUPS) + group_of[numbers], weights=sizes, minlength=len(added))
        alive = np.cumsum(added.reshape(len(marks), len(GROUPS)), axis=0).astype(np.int64)
        return np.asarray(alive[of_mark.reshape(-1)])

    def computation_spans(self, start: int) -> Iterator[tuple[int, int, str, int, int]]:
        """(first event, event after the last, kind, chunk, micro-batch) of each computation from an event on."""
        marks = [mark for mark in self.computations if mark[0] >= start]
        for i, (event, kind, c, m) in enumerate(marks):
            yield event, marks[i + 1][0] if i + 1 < len(marks) else self.num_events, kind, c, m


def _read(stretches: Iterable[EventRun], larger: Sequence[LargerBlocks]) -> _Events:
    instructions: list[Instruction] = []
    number_of: dict[int, int] = {}
    known: dict[int, tuple[NDArray[np.int32], NDArray[np.int64]]] = {}
    numbers_read: list[NDArray[np.int32]] = []
    sizes_read: list[NDArray[np.int64]] = []
    for some, sizes in stretches:
        if id(some) not in known:
            ids = list(map(id, some))
            for key, instruction in dict(zip(ids, some, strict=True)).items():
                if number_of.setdefault(key, len(instructions)) == len(instructions):
                    instructions.append(instruction)
            numbers = np.fromiter(map(number_of.__getitem__, ids), dtype=np.int32, count=len(some))
            known[id(some)] = numbers, np.array(sizes, dtype=np.int64)
        numbers, event_sizes = known[id(some)]
        numbers_read.append(numbers)
        sizes_read.append(event_sizes)
    all_sizes = np.concatenate(sizes_read)
    _add_larger(all_sizes, larger)
    return _Events(instructions, np.concatenate(numbers_read), all_sizes)


def _add_larger(sizes: NDArray[np.int64], larger: Sequence[LargerBlocks]) -> None:
    """Add to the sizes of events what blocks are larger than noted."""
    changed: list[int] = []
    changes: list[int] = []
    known: dict[int, SlotEvents] = {}
    for start, entries, rests in larger:
        if len(rests) >= MANY_RESTS:
            of_slots = known.get(id(entries))
            if of_slots is None:
                of_slots = known[id(entries)] = SlotEvents.from_entries(entries)
            events, more = of_slots.size_changes(rests)
            np.add.at(sizes, start + events, more)
            continue
        for slot, rest in rests.items():
            for event, sign in entries.get(slot, ()):
                changed.append(start + event)
                changes.append(sign * rest)
    np.add.at(sizes, np.array(changed, dtype=np.intp), np.array(changes, dtype=np.int64))
