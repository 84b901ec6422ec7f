"""A computation's allocations and frees, recorded when it is played and repeated from the recording.

Micro-batches allocate and free the same sizes in the same order; only the places differ, and how much larger than asked
a block is. So from the second on a computation is a list of requests, and what is written down of it a copy of the
first one's but for those rests. What comes out is what :class:`mofa.replay.memory.executor.StepExecutor` would have
done.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mofa.replay.allocator.caching import Allocator
from mofa.replay.allocator.compiled import NumberedBlocks
from mofa.replay.allocator.pools import FREE, Block, BlockPool, BlockSlots, Order, Request
from mofa.replay.allocator.timeline import Instruction, Journal, SlotEvents

NEAR = 32 << 20
"""What blocks that are larger than asked take more, together, is less than this. [B]"""
Places = tuple[tuple[int, ...], ...]
"""The slot of a routine behind each slot of a pass's pieces, and last behind its output; -1 for none."""
RetainedBlock = tuple[Block | None, int]
"""A block that lingers of a chunk, or None, and its rounded size as it was asked for. [B]"""
OF_SLOTS = ("packed_live_slots", "slots_gained_and_lost", "slots_gained_and_lost_near_peak")
"""What follows from a recording's slots."""
NOTHING = Block(BlockPool(0, False), 0, 0, FREE)
"""In slots that nothing was taken for yet."""


class RecordedBlockEnd(NamedTuple):
    """The end of a piece in a ``phase``, behind so many orders; the blocks in the slots ``sent`` come back late."""

    num_orders: int
    phase: str
    name: str
    sent: tuple[int, ...]


@dataclass(frozen=True)
class Recording:
    """A computation of a chunk, to be repeated.

    ``slots`` are the bytes asked for by every slot up to its end, those of the pass's earlier computations first, and
    ``live_slots`` those that the pass holds then. ``allocation_events`` is the event at which a slot is, ``entries``
    where a slot's bytes are in ``sizes``, with their sign. Events are counted from the computation's first.
    ``peak_rise_bytes`` is how far the sizes go up, ``near_peak_events`` the numbers of events after which they are less
    than :data:`NEAR` lower, with how far they are up then, ``net_bytes`` what they come to. ``passages`` are (event,
    phase, piece), ``reserved_reads`` (first event, event after the last) between looks at what is reserved.
    ``requests`` are the ``orders`` to one allocator, none before :meth:`for_allocator` says to which: many are noted
    down that nothing repeats, and a pool keeps the bins that requests know. ``retained_slots`` are the slots of what
    lingers of the chunk then (:mod:`mofa.replay.memory.dispatcher_retention`), and of what it received
    (:mod:`mofa.replay.memory.received_inputs`), -1 for nothing. ``block_ends`` are its pieces where rings send what
    comes back late (:mod:`mofa.replay.memory.stage_outputs`). [B]
    """

    orders: tuple[Order, ...]
    requests: tuple[Request, ...] | bytes
    instructions: tuple[Instruction, ...]
    sizes: tuple[int, ...]
    slots: tuple[int, ...]
    live_slots: tuple[int, ...]
    freed: frozenset[int]
    allocation_events: dict[int, int]
    entries: dict[int, tuple[tuple[int, int], ...]]
    peak_rise_bytes: int
    near_peak_events: tuple[tuple[int, int], ...]
    net_bytes: int
    passages: tuple[tuple[int, str, str], ...]
    reserved_reads: tuple[tuple[int, int], ...]
    places: Places
    retained_slots: tuple[int, ...]
    block_ends: tuple[RecordedBlockEnd, ...]

    def for_allocator(self, allocator: Allocator) -> Recording:
        """The recording with its requests to an allocator."""
        return self._replaced(requests=allocator.prepare_requests(self.orders))

    def _replaced(self, **changes: object) -> Recording:
        """A copy that knows what follows from the slots, which are the same: it is worked out once for all copies."""
        copy = replace(self, **changes)  # type: ignore[arg-type]
        vars(copy).update({name: getattr(self, name) for name in OF_SLOTS})
        return copy

    @cached_property
    def packed_live_slots(self) -> array[int]:
        """The ``live_slots``, packed."""
        return array("i", self.live_slots)

    @cached_property
    def slot_events(self) -> SlotEvents:
        """The ``entries`` as arrays."""
        return SlotEvents.from_entries(self.entries)

    @cached_property
    def sizes_array(self) -> NDArray[np.int64]:
        """The ``sizes`` as an array. [B]"""
        return np.array(self.sizes, dtype=np.int64)

    @cached_property
    def slots_gained_and_lost(self) -> dict[int, int]:
        """Of which slots blocks are held at the end and were not before: 1; the other way round: -1."""
        return self._held_more(len(self.sizes))

    @cached_property
    def slots_gained_and_lost_near_peak(self) -> tuple[tuple[int, dict[int, int]], ...]:
        """The levels of ``near_peak_events``, and the same as of the end there."""
        return tuple((level, self._held_more(done)) for done, level in self.near_peak_events)

    def _held_more(self, num_events: int) -> dict[int, int]:
        signs = {
            slot: sum([sign for event, sign in entries if event < num_events]) for slot, entries in self.entries.items()
        }
        return {slot: sign for slot, sign in signs.items() if sign}

    def with_names(self, names: dict[str, str]) -> Recording:
        """The recording of pieces of other ``names``."""
        return self._replaced(
            passages=tuple((event, phase, names[name]) for event, phase, name in self.passages),
            block_ends=tuple(piece._replace(name=names[piece.name]) for piece in self.block_ends),
        )


class PassBlocks:
    """What a pass holds, by the slots of its routines; ``rests`` are how much larger than asked some blocks are. [B]"""

    __slots__ = ("blocks", "last", "rests")

    def __init__(self, blocks: BlockSlots) -> None:
        self.blocks = blocks
        self.rests: dict[int, int] = {}
        self.last: Recording | None = None
        """The last computation of the pass."""

    def append_retained(self, waiting: Sequence[RetainedBlock]) -> None:
        """Put what is retained of the chunk into the next slots."""
        for block, size in waiting:
            if block is not None and block.size > size:
                self.rests[len(self.blocks)] = block.size - size
            self.blocks.append(block or NOTHING)

    @property
    def block_addresses(self) -> tuple[int, ...] | bytes:
        """The addresses of the blocks that the pass holds."""
        assert self.last is not None
        blocks = self.blocks
        if isinstance(blocks, NumberedBlocks):
            return blocks.packed_addresses(self.last.packed_live_slots)
        return tuple([blocks[slot].address for slot in self.last.live_slots])

    def slots_of_each_piece(self) -> Iterator[list[Block | None]]:
        """The blocks of each piece's slots, and last the output."""
        assert self.last is not None
        for piece in self.last.places:
            yield [self.blocks[slot] if slot >= 0 else None for slot in piece]


class Recorder:
    """Watches a computation being played: :meth:`allocate_rounded` and ``free`` stand for the allocator's."""

    def __init__(
        self, allocator: Allocator, journal: Journal, recorded: PassBlocks | None, waiting: Sequence[RetainedBlock]
    ) -> None:  # fmt: skip
        self.a, self.journal = allocator, journal
        self.start, self.passages = journal.num_events, len(journal.new_passages)
        self.recorded = recorded or PassBlocks(allocator.new_block_slots())
        last = self.recorded.last
        self.asked = list(last.slots) if last else []
        self.live = {self.recorded.blocks[slot].address: slot for slot in last.live_slots} if last else {}
        self.recorded.append_retained(waiting)
        for block, size in waiting:
            if block is not None:
                self.live[block.address] = len(self.asked)
            self.asked.append(size)
        self.num_before = len(self.asked)
        self.orders: list[Order] = []
        self.entries: dict[int, list[tuple[int, int]]] = {}
        self.looks: list[tuple[int, int]] = []
        self.passed: list[RecordedBlockEnd] = []
        self.sent: list[int] = []
        """Slots that the piece under way has sent."""
        self.clean = True
        """Whether nothing but the pass's own was touched, and what lingers of its chunk."""

    def allocate_rounded(self, size: int, index: int) -> Block:
        """Allocate a rounded size from the pool of an index, and record it."""
        block = self.a.allocate_rounded(size, index)
        slot = len(self.asked)
        self.asked.append(size)
        self.clean &= block.address not in self.live  # else one went that is not written down
        self.live[block.address] = slot
        self.recorded.blocks.append(block)
        self.recorded.rests[slot] = block.size - size
        self.entries.setdefault(slot, []).append((self.journal.num_events - self.start, 1))
        self.orders.append((size, slot, index))
        return block

    def free(self, block: Block) -> None:
        """Free a block; the journal has it already."""
        slot = self.live.pop(block.address, -1)
        if slot < 0:
            self.clean = False
        else:
            self.entries.setdefault(slot, []).append((self.journal.num_events - self.start - 1, -1))
            self.orders.append((0, slot, block.pool.stream << 1 | block.pool.small))
        self.a.free(block)

    def note_block_freed_after_send(self, block: Block) -> None:
        """A block is let go that comes back late; the journal has it already."""
        slot = self.live.pop(block.address, -1)
        if slot < 0:
            self.clean = False
        else:
            self.entries.setdefault(slot, []).append((self.journal.num_events - self.start - 1, -1))
            self.sent.append(slot)

    def note_block_end(self, phase: str, name: str) -> None:
        """A piece is through: here comes back what was sent."""
        self.passed.append(RecordedBlockEnd(len(self.orders), phase, name, tuple(self.sent)))
        self.sent.clear()

    def note_renamed(self, block: Block) -> None:
        """Note that a block's bytes went from one name to another."""
        slot = self.live.get(block.address, -1)
        if slot < 0:
            self.clean = False
        else:
            event = self.journal.num_events - self.start
            self.entries.setdefault(slot, []).extend([(event - 2, -1), (event - 1, 1)])

    def note_reserved_read(self, start: int) -> None:
        """Note that reserved memory was read, for what was done since an event."""
        self.looks.append((start - self.start, self.journal.num_events - self.start))

    def finished_recording(
        self, pieces: Sequence[Sequence[Block | None]], retained: Sequence[Block | None]
    ) -> Recording | None:
        """The computation as it was played; None where it cannot be repeated.

        ``pieces`` are what the pass holds now: that, what is ``retained`` and nothing else must be what is left of it.
        """
        left = tuple(-1 if block is None else self.live.get(block.address, -2) for block in retained)
        places = tuple(tuple(-1 if b is None else self.live.get(b.address, -2) for b in piece) for piece in pieces)
        in_slots = [slot for piece in (left, *places) for slot in piece if slot != -1]
        live_slots = tuple(sorted(self.live.values()))
        if not self.clean or tuple(sorted(in_slots)) != live_slots:
            return None
        start = self.start
        instructions, sizes = self.journal.instructions_and_sizes_since(start)
        freed = []
        for slot, entries in self.entries.items():
            for event, sign in entries:
                sizes[event] = sign * self.asked[slot]
            if entries[-1][1] < 0:
                freed.append(slot)
        self.recorded.rests = {slot: rest for slot, rest in self.recorded.rests.items() if rest and slot not in freed}
        levels = list(accumulate(sizes, initial=0))
        rise = max(levels)
        orders, passed = self._short()
        self.recorded.last = Recording(
            orders, (), tuple(instructions), tuple(sizes), tuple(self.asked),
            tuple(slot for slot in live_slots if slot not in left),
            frozenset(freed), {slot: self.entries[slot][0][0] for slot in range(self.num_before, len(self.asked))},
            {slot: tuple(entries) for slot, entries in self.entries.items()},
            rise, tuple((done, level) for done, level in enumerate(levels) if level > rise - NEAR), levels[-1],
            tuple((event - start, phase, name) for event, phase, name in self.journal.new_passages[self.passages :]),
            tuple(self.looks), places, left, passed,
        )  # fmt: skip
        return self.recorded.last

    def _short(self) -> tuple[tuple[Order, ...], tuple[RecordedBlockEnd, ...]]:
        """The requests, what is freed before its pool is asked for more having become a look for room.

        Where rests are split off, such a pair changes nothing unless memory has to be asked of the device, or something
        comes back between the two.
        """
        out: list[Order | None] = list(self.orders)
        before: dict[int, int] = {}
        ends = {piece.num_orders for piece in self.passed}
        for i, (size, slot, index) in enumerate(self.orders):
            if i in ends:
                before.clear()
            last = before.get(index, -1)
            if not size and last >= 0:
                asked, of, _ = self.orders[last]
                if asked and of == slot and not self.a.pool_of_index(index).most_kept and not self.a.expandable:
                    out[last], out[i] = (-asked, slot, index), None
            before[index] = i
        orders = tuple(order for order in out if order is not None)
        num_orders = list(accumulate((order is not None for order in out), initial=0))
        return orders, tuple(piece._replace(num_orders=num_orders[piece.num_orders]) for piece in self.passed)
