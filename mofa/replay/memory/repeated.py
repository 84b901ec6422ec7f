"""A computation played again from its recording (:mod:`mofa.replay.memory.recording`): requests, and their entries."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from itertools import accumulate

from mofa.replay.allocator.caching import Allocator
from mofa.replay.allocator.expandable_segments import least_expandable
from mofa.replay.allocator.pools import ALLOCATED, FREE, MANY, Block, OutOfDeviceMemory, Pool, address_of
from mofa.replay.allocator.timeline import Instruction, Journal
from mofa.replay.memory.recording import NEAR, NOTHING, PassBlocks, Recording

Overflow = Callable[[OutOfDeviceMemory, Instruction, int], Block]
"""Says what to do where the device is full: what did not fit, in which act and event."""


def repeat(
    recording: Recording, recorded: PassBlocks, a: Allocator, journal: Journal, overflow: Overflow
) -> tuple[int, int, int]:
    """Play a computation again for another pass, and write it down.

    Returns
    -------
    tuple[int, int, int]
        Its first event, the bytes allocated before it, and the event after its last. Peaks are the allocator's.
    """
    start, before, reserved = journal.num_events, a.allocated, a.reserved
    rests, grown = _requests(recording, recorded, a, start, overflow)
    end = journal.repeated(recording.instructions, recording.sizes, recording.passages)
    most, changed = before + recording.rise, 0
    if rests or recorded.rests:
        rests.update(recorded.rests)
        most, changed = _add_rests(recording, rests, journal, start, before)
        recorded.rests = {slot: rest for slot, rest in rests.items() if slot not in recording.freed}
    recorded.last = recording
    a.allocated = before + recording.net + changed
    if most > a.peak_allocated:
        a.peak_allocated = most
    if grown or journal.grown[-1][1] != reserved:
        for first, after in recording.looks:
            reserved = next((size for event, size in reversed(grown) if event < after), reserved)
            if journal.grown[-1][1] != reserved:
                journal.grown.append((start + first, reserved))
    return start, before, end


def _add_rests(
    recording: Recording, rests: dict[int, int], journal: Journal, start: int, before: int
) -> tuple[int, int]:  # fmt: skip
    """Write down that some blocks are larger than asked; the peak with them, and how much more is held at the end."""
    more: dict[int, int] = {}
    for slot, rest in rests.items():
        for event, sign in recording.entries.get(slot, ()):
            more[event] = more.get(event, 0) + sign * rest
    journal.larger.update({start + event: size for event, size in more.items()})
    if sum(rests.values()) >= NEAR:
        sizes = list(recording.sizes)
        for event, size in more.items():
            sizes[event] += size
        return max(accumulate(sizes, initial=before)), sum(more.values())
    highest = max(level + sum([size for event, size in more.items() if event < done]) for done, level in recording.tops)
    return before + highest, sum(more.values())


def _requests(
    recording: Recording, recorded: PassBlocks, a: Allocator, start: int, overflow: Overflow
) -> tuple[dict[int, int], list[tuple[int, int]]]:  # fmt: skip
    """What :meth:`mofa.replay.allocator.caching.Allocator.take` and ``free`` do, written out: the innermost loop of a
    replay.

    Returns the rests of blocks that were not cut, by slot, and (event, bytes reserved after it) where memory was asked
    of the device. ``a.allocated`` stays as it was.
    """
    blocks = recorded.blocks
    del blocks[len(recording.slots) - len(recording.taken) :]
    blocks += [NOTHING] * len(recording.taken)
    rests: dict[int, int] = {}
    grown: list[tuple[int, int]] = []
    expandable = a.expandable
    for size, slot, equal, pool in recording.requests:
        if size > 0:
            if equal:
                block = blocks[slot] = equal.pop(0)
                block.state = ALLOCATED
                continue
            lists = pool.lists
            index = bisect_left(pool.sizes, size)
            try:
                while not lists[index]:
                    index += 1
            except IndexError:
                free = _grow(recording, recorded, a, start, overflow, slot, size, pool, rests)
                grown.append((recording.taken[slot], a.reserved))
            else:
                if expandable:
                    free = least_expandable(pool, index)
                    pool.take(free)
                else:
                    free = lists[index].pop(0)
            rest = free.size - size
            if rest <= pool.most_kept:
                free.state = ALLOCATED
                blocks[slot] = free
                if rest:
                    rests[slot] = rest
                continue
            spare = pool.spare
            block = blocks[slot] = spare.pop() if spare else Block(pool, 0, 0, ALLOCATED)
            block.size = size
            block.address = free.address
            before = block.previous = free.previous
            if before is not None:
                before.following = block
            block.following = free
            free.previous = block
            free.address += size
            size = free.size = rest
        elif size:
            if pool.first(-size) == len(pool.lists):
                a.join(_grow(recording, recorded, a, start, overflow, slot, -size, pool, rests))
                grown.append((recording.taken[slot], a.reserved))
            continue
        else:
            free = blocks[slot]
            size = free.size
            before, after = free.previous, free.following
            if before is not None and not before.state:
                bins = pool.bins
                if after is not None and not after.state:
                    peers = bins[after.size]
                    if len(peers) < MANY:
                        peers.remove(after)
                    else:
                        del peers[bisect_left(peers, after.address, key=address_of)]
                    after.state = ALLOCATED
                    pool.spare.append(after)
                    size += after.size
                    after = after.following
                peers = bins[before.size]
                if len(peers) < MANY:
                    peers.remove(before)
                else:
                    del peers[bisect_left(peers, before.address, key=address_of)]
                pool.spare.append(free)
                free = before
                size += free.size
                free.size = size
                free.following = after
                if after is not None:
                    after.previous = free
            elif after is not None and not after.state:
                peers = pool.bins[after.size]
                if len(peers) < MANY:
                    peers.remove(after)
                else:
                    del peers[bisect_left(peers, after.address, key=address_of)]
                pool.spare.append(free)
                after.address = free.address
                after.previous = before
                if before is not None:
                    before.following = after
                free = after
                size += free.size
                free.size = size
            else:
                free.state = FREE
        try:
            peers = pool.bins[size]
        except KeyError:
            peers = pool.open(size)
        if not peers or peers[-1].address < free.address:
            peers.append(free)
        elif free.address < peers[0].address:
            peers.insert(0, free)
        else:
            insort(peers, free, key=address_of)
    return rests, grown


def _grow(
    recording: Recording, recorded: PassBlocks, a: Allocator, start: int, overflow: Overflow, slot: int, size: int,
    pool: Pool,
    rests: dict[int, int],
) -> Block:  # fmt: skip
    try:
        return a.grow(pool, size)
    except OutOfDeviceMemory as full:
        event = recording.taken[slot]
        known = {**recorded.rests, **rests}
        full.allocated += sum(recording.sizes[:event])
        full.allocated += sum(
            sign * known.get(s, 0) for s, e in recording.entries.items() for done, sign in e if done < event
        )
        a.allocated = full.allocated  # from which the overflow's request is counted
        return overflow(full, recording.instructions[event], start + event)
