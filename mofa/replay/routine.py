"""A computation's allocations and frees, noted down when it is played and repeated from the notes.

Micro-batches allocate and free the same sizes in the same order; only the places differ, and how much larger than asked
a block is. So from the second on a computation is a list of requests, and what is written down of it a copy of the
first one's but for those rests. What comes out is what :class:`mofa.replay.player.Player` would have done.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from mofa.replay.allocator import Allocator
from mofa.replay.journal import Act, Journal
from mofa.replay.pools import ALLOCATED, FREE, SHIFT, Block, OutOfDeviceMemory, Pool

Request = tuple[int, int, int, int, int, list[int], list[Block], Pool]
"""Bytes (0: a free; negative: what is freed at once), the least key that fits, what the key of a free block loses with
them, a slot, and of the pool the largest rest that stays, keys and blocks."""
Places = tuple[tuple[int, ...], ...]
"""The slot of a routine behind each slot of a pass's pieces, and last behind its output; -1 for none."""


@dataclass(frozen=True)
class Routine:
    """A computation of a chunk, to be repeated.

    ``slots`` are the bytes asked for by every slot up to its end, those of the pass's earlier computations first, and
    ``kept`` those that hold something then. ``taken`` is the event at which a slot is, ``entries`` where a slot's bytes
    are in ``sizes``, with their sign. Events are counted from the computation's first. ``rise`` is how far the sizes go
    up, ``net`` what they come to. ``passages`` are (event, phase, piece), ``looks`` (first event, event after the last)
    between looks at what is reserved. [B]
    """

    requests: tuple[Request, ...]
    acts: tuple[Act, ...]
    sizes: tuple[int, ...]
    slots: tuple[int, ...]
    kept: tuple[int, ...]
    freed: frozenset[int]
    taken: dict[int, int]
    entries: dict[int, tuple[tuple[int, int], ...]]
    rise: int
    net: int
    passages: tuple[tuple[int, str, str], ...]
    looks: tuple[tuple[int, int], ...]
    places: Places


class Held:
    """What a pass holds, by the slots of its routines; ``rests`` are how much larger than asked some blocks are. [B]"""

    __slots__ = ("blocks", "last", "rests")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.rests: dict[int, int] = {}
        self.last: Routine | None = None
        """The last computation of the pass."""

    @property
    def places(self) -> tuple[int, ...]:
        """Where it lies."""
        assert self.last is not None
        return tuple([self.blocks[slot].address for slot in self.last.kept])

    def slots(self) -> Iterator[list[Block | None]]:
        """The blocks of each piece's slots, and last the output."""
        assert self.last is not None
        for piece in self.last.places:
            yield [self.blocks[slot] if slot >= 0 else None for slot in piece]


class Notes:
    """Watches a computation being played: ``take`` and ``free`` stand for the allocator's."""

    def __init__(self, allocator: Allocator, journal: Journal, held: Held | None) -> None:
        self.a, self.journal = allocator, journal
        self.start, self.passages = len(journal.sizes), len(journal.passages)
        self.held = held or Held()
        last = self.held.last
        self.asked = list(last.slots) if last else []
        self.num_before = len(self.asked)
        self.live = {id(self.held.blocks[slot]): slot for slot in last.kept} if last else {}
        self.requests: list[Request] = []
        self.entries: dict[int, list[tuple[int, int]]] = {}
        self.looks: list[tuple[int, int]] = []
        self.clean = True
        """Whether nothing but the pass's own was touched."""

    def take(self, size: int, index: int) -> Block:
        """Allocate."""
        block = self.a.take(size, index)
        slot = len(self.asked)
        self.asked.append(size)
        self.live[id(block)] = slot
        self.held.blocks.append(block)
        self.held.rests[slot] = block.size - size
        self.entries.setdefault(slot, []).append((len(self.journal.sizes) - self.start, 1))
        pool = self.a.pool(index)
        least = size << SHIFT - 9
        self.requests.append((size, least, least - (size >> 9), slot, pool.most_kept, pool.keys, pool.blocks, pool))
        return block

    def free(self, block: Block) -> None:
        """Free; what is written down of it has been."""
        slot = self.live.pop(id(block), -1)
        if slot < 0:
            self.clean = False
        else:
            self.entries.setdefault(slot, []).append((len(self.journal.sizes) - self.start - 1, -1))
            pool = block.pool
            self.requests.append((0, 0, 0, slot, 0, pool.keys, pool.blocks, pool))
        self.a.free(block)

    def renamed(self, block: Block) -> None:
        """Its bytes were taken from one name and given to another."""
        slot = self.live.get(id(block), -1)
        if slot < 0:
            self.clean = False
        else:
            at = len(self.journal.sizes) - self.start
            self.entries.setdefault(slot, []).extend([(at - 2, -1), (at - 1, 1)])

    def looked(self, start: int) -> None:
        """What is reserved was looked at, for what was done since an event."""
        self.looks.append((start - self.start, len(self.journal.sizes) - self.start))

    def routine(self, pieces: Sequence[Sequence[Block | None]]) -> Routine | None:
        """The computation as it was played; None where it cannot be repeated.

        ``pieces`` are what the pass holds now: that and nothing else must be what is left of it.
        """
        places = tuple(tuple(-1 if b is None else self.live.get(id(b), -2) for b in piece) for piece in pieces)
        found = [slot for piece in places for slot in piece if slot != -1]
        kept = tuple(sorted(self.live.values()))
        if not self.clean or tuple(sorted(found)) != kept:
            return None
        start = self.start
        sizes = list(self.journal.sizes[start:])
        freed = []
        for slot, entries in self.entries.items():
            for at, sign in entries:
                sizes[at] = sign * self.asked[slot]
            if entries[-1][1] < 0:
                freed.append(slot)
        self.held.rests = {slot: rest for slot, rest in self.held.rests.items() if rest and slot not in freed}
        self.held.last = Routine(
            self._short(), tuple(self.journal.acts[start:]), tuple(sizes), tuple(self.asked), kept,
            frozenset(freed), {slot: self.entries[slot][0][0] for slot in range(self.num_before, len(self.asked))},
            {slot: tuple(entries) for slot, entries in self.entries.items()},
            max(accumulate(sizes, initial=0)), sum(sizes),
            tuple((at - start, phase, name) for at, phase, name in self.journal.passages[self.passages :]),
            tuple(self.looks), places,
        )  # fmt: skip
        return self.held.last

    def _short(self) -> tuple[Request, ...]:
        """The requests, what is freed before its pool is asked for more having become a look for room.

        Where rests are split off, such a pair changes nothing unless memory has to be asked of the device.
        """
        out: list[Request | None] = list(self.requests)
        before: dict[int, int] = {}
        for i, (size, _, _, slot, *_, pool) in enumerate(self.requests):
            last = before.get(id(pool), -1)
            if not size and last >= 0:
                asked, *of, most_kept, _, _, _ = self.requests[last]
                if asked and of[2] == slot and not most_kept and not self.a.expandable:
                    out[last], out[i] = (-asked, *self.requests[last][1:]), None
            before[id(pool)] = i
        return tuple(request for request in out if request is not None)


Overflow = Callable[[OutOfDeviceMemory, Act, int], Block]
"""Says what to do where the device is full: what did not fit, in which act and event."""


def repeat(routine: Routine, held: Held, a: Allocator, journal: Journal, overflow: Overflow) -> tuple[int, int, int]:
    """Play a computation again for another pass, and write it down.

    Returns
    -------
    tuple[int, int, int]
        Its first event, the bytes allocated before it, and the event after its last. Peaks are the allocator's.
    """
    start, before, reserved = len(journal.sizes), a.allocated, a.reserved
    rests, grown = _requests(routine, held, a, start, overflow)
    journal.acts += routine.acts
    sizes = journal.sizes
    sizes += routine.sizes
    end = len(sizes)
    changed = 0
    most = before + routine.rise + sum(rests.values())
    if rests or held.rests:
        rests.update(held.rests)
        for slot, rest in rests.items():
            for at, sign in routine.entries.get(slot, ()):
                sizes[start + at] += sign * rest
                changed += sign * rest
        held.rests = {slot: rest for slot, rest in rests.items() if slot not in routine.freed}
    held.last = routine
    a.allocated = before + routine.net + changed
    if most > a.peak_allocated:
        a.peak_allocated = max(a.peak_allocated, max(accumulate(sizes[start:end], initial=before)))
    journal.passages += [(start + at, phase, name) for at, phase, name in routine.passages]
    if grown or journal.grown[-1][1] != reserved:
        for first, after in routine.looks:
            reserved = next((size for at, size in reversed(grown) if at < after), reserved)
            if journal.grown[-1][1] != reserved:
                journal.grown.append((start + first, reserved))
    return start, before, end


def _requests(
    routine: Routine, held: Held, a: Allocator, start: int, overflow: Overflow
) -> tuple[dict[int, int], list[tuple[int, int]]]:  # fmt: skip
    """What :meth:`mofa.replay.allocator.Allocator.take` and ``free`` do, written out: the innermost loop of a replay.

    Returns the rests of blocks that were not cut, by slot, and (event, bytes reserved after it) where memory was asked
    of the device. ``a.allocated`` stays as it was.
    """
    blocks = held.blocks
    del blocks[len(routine.slots) - len(routine.taken) :]
    blocks += [_NONE] * len(routine.taken)
    rests: dict[int, int] = {}
    grown: list[tuple[int, int]] = []
    expandable = a.expandable
    for size, least, step, slot, most_kept, keys, frees, pool in routine.requests:
        if size > 0:
            at = bisect_left(keys, least)
            if expandable and at < len(keys):
                at = a.least_expandable(pool, at)
            try:
                free = frees[at]
            except IndexError:
                block = blocks[slot] = _grow(routine, held, a, start, overflow, slot, size, pool, rests)
                grown.append((routine.taken[slot], a.reserved))
                if block.size != size:
                    rests[slot] = block.size - size
                continue
            rest = free.size - size
            if rest <= most_kept:
                free.state = ALLOCATED
                blocks[slot] = free
                del keys[at]
                del frees[at]
                if rest:
                    rests[slot] = rest
                continue
            spare = pool.spare
            block = blocks[slot] = spare.pop() if spare else Block(pool, 0, 0, ALLOCATED)
            block.size = size
            address = block.address = free.address
            before = block.previous = free.previous
            if before is not None:
                before.following = block
            block.following = free
            free.previous = block
            free.address = address + size
            free.size = rest
            key = free.key = keys[at] - step
            if at and keys[at - 1] > key:
                del keys[at]
                del frees[at]
                at = bisect_left(keys, key, 0, at)
                keys.insert(at, key)
                frees.insert(at, free)
            else:
                keys[at] = key
            continue
        if size:
            if bisect_left(keys, least) == len(keys):
                block = _grow(routine, held, a, start, overflow, slot, -size, pool, rests)
                grown.append((routine.taken[slot], a.reserved))
                a.free(block)
                a.allocated += block.size  # which had not been counted
            continue
        block = blocks[slot]
        size = block.size
        before, after = block.previous, block.following
        if before is not None and not before.state:
            free = before
            if after is not None and not after.state:
                at = bisect_left(keys, after.key)
                del keys[at]
                del frees[at]
                after.state = ALLOCATED
                pool.spare.append(after)
                size += after.size
                after = after.following
            free.size += size
            free.following = after
            if after is not None:
                after.previous = free
            old = free.key
            key = free.key = old + (size << 29)
        elif after is not None and not after.state:
            free = after
            free.address = block.address
            free.size += size
            free.previous = before
            if before is not None:
                before.following = free
            old = free.key
            key = free.key = old + (size << 29) - (size >> 9)
        else:
            block.state = FREE
            key = block.key = size << 29 | block.address >> 9
            at = bisect_left(keys, key)
            keys.insert(at, key)
            frees.insert(at, block)
            continue
        pool.spare.append(block)
        at = bisect_left(keys, old)
        if at + 1 < len(keys) and keys[at + 1] < key:
            del keys[at]
            del frees[at]
            at = bisect_left(keys, key, at)
            keys.insert(at, key)
            frees.insert(at, free)
        else:
            keys[at] = key
    return rests, grown


_NONE = Block(Pool(0, False), 0, 0, FREE)
"""In slots that nothing was taken for yet."""


def _grow(
    routine: Routine, held: Held, a: Allocator, start: int, overflow: Overflow, slot: int, size: int, pool: Pool,
    rests: dict[int, int],
) -> Block:  # fmt: skip
    try:
        return a.grow(pool, size)
    except OutOfDeviceMemory as full:
        event = routine.taken[slot]
        known = {**held.rests, **rests}
        full.allocated += sum(routine.sizes[:event])
        full.allocated += sum(
            sign * known.get(s, 0) for s, e in routine.entries.items() for at, sign in e if at < event
        )
        a.allocated = full.allocated  # from which the overflow's request is counted
        return overflow(full, routine.acts[event], start + event)
