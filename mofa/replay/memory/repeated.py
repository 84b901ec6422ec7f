"""A computation played again from its recording (:mod:`mofa.replay.memory.recording`): requests, and their entries."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from itertools import accumulate

from mofa.replay.allocator.caching import Allocator
from mofa.replay.allocator.expandable_segments import least_expandable
from mofa.replay.allocator.pools import ALLOCATED, FREE, MANY, Block, OutOfDeviceMemory, Pool, address_of
from mofa.replay.allocator.timeline import Act, Journal
from mofa.replay.memory.recording import NEAR, NOTHING, Held, Routine

Overflow = Callable[[OutOfDeviceMemory, Act, int], Block]
"""Says what to do where the device is full: what did not fit, in which act and event."""


def repeat(routine: Routine, held: Held, a: Allocator, journal: Journal, overflow: Overflow) -> tuple[int, int, int]:
    """Play a computation again for another pass, and write it down.

    Returns
    -------
    tuple[int, int, int]
        Its first event, the bytes allocated before it, and the event after its last. Peaks are the allocator's.
    """
    start, before, reserved = journal.num_events, a.allocated, a.reserved
    rests, grown = _requests(routine, held, a, start, overflow)
    end = journal.repeated(routine.acts, routine.sizes, routine.passages)
    most, changed = before + routine.rise, 0
    if rests or held.rests:
        rests.update(held.rests)
        most, changed = _add_rests(routine, rests, journal, start, before)
        held.rests = {slot: rest for slot, rest in rests.items() if slot not in routine.freed}
    held.last = routine
    a.allocated = before + routine.net + changed
    if most > a.peak_allocated:
        a.peak_allocated = most
    if grown or journal.grown[-1][1] != reserved:
        for first, after in routine.looks:
            reserved = next((size for at, size in reversed(grown) if at < after), reserved)
            if journal.grown[-1][1] != reserved:
                journal.grown.append((start + first, reserved))
    return start, before, end


def _add_rests(
    routine: Routine, rests: dict[int, int], journal: Journal, start: int, before: int
) -> tuple[int, int]:  # fmt: skip
    """Write down that some blocks are larger than asked; the peak with them, and how much more is held at the end."""
    more: dict[int, int] = {}
    for slot, rest in rests.items():
        for at, sign in routine.entries.get(slot, ()):
            more[at] = more.get(at, 0) + sign * rest
    journal.larger.update({start + at: size for at, size in more.items()})
    if sum(rests.values()) >= NEAR:
        sizes = list(routine.sizes)
        for at, size in more.items():
            sizes[at] += size
        return max(accumulate(sizes, initial=before)), sum(more.values())
    highest = max(level + sum([size for at, size in more.items() if at < done]) for done, level in routine.tops)
    return before + highest, sum(more.values())


def _requests(
    routine: Routine, held: Held, a: Allocator, start: int, overflow: Overflow
) -> tuple[dict[int, int], list[tuple[int, int]]]:  # fmt: skip
    """What :meth:`mofa.replay.allocator.caching.Allocator.take` and ``free`` do, written out: the innermost loop of a
    replay.

    Returns the rests of blocks that were not cut, by slot, and (event, bytes reserved after it) where memory was asked
    of the device. ``a.allocated`` stays as it was.
    """
    blocks = held.blocks
    del blocks[len(routine.slots) - len(routine.taken) :]
    blocks += [NOTHING] * len(routine.taken)
    rests: dict[int, int] = {}
    grown: list[tuple[int, int]] = []
    expandable = a.expandable
    for size, slot, equal, pool in routine.requests:
        if size > 0:
            if equal:
                block = blocks[slot] = equal.pop(0)
                block.state = ALLOCATED
                continue
            lists = pool.lists
            at = bisect_left(pool.sizes, size)
            try:
                while not lists[at]:
                    at += 1
            except IndexError:
                free = _grow(routine, held, a, start, overflow, slot, size, pool, rests)
                grown.append((routine.taken[slot], a.reserved))
            else:
                if expandable:
                    free = least_expandable(pool, at)
                    pool.take(free)
                else:
                    free = lists[at].pop(0)
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
                a.join(_grow(routine, held, a, start, overflow, slot, -size, pool, rests))
                grown.append((routine.taken[slot], a.reserved))
            continue
        else:
            free = blocks[slot]
            size = free.size
            before, after = free.previous, free.following
            if before is not None and not before.state:
                bins = pool.bins
                if after is not None and not after.state:
                    one = bins[after.size]
                    if len(one) < MANY:
                        one.remove(after)
                    else:
                        del one[bisect_left(one, after.address, key=address_of)]
                    after.state = ALLOCATED
                    pool.spare.append(after)
                    size += after.size
                    after = after.following
                one = bins[before.size]
                if len(one) < MANY:
                    one.remove(before)
                else:
                    del one[bisect_left(one, before.address, key=address_of)]
                pool.spare.append(free)
                free = before
                size += free.size
                free.size = size
                free.following = after
                if after is not None:
                    after.previous = free
            elif after is not None and not after.state:
                one = pool.bins[after.size]
                if len(one) < MANY:
                    one.remove(after)
                else:
                    del one[bisect_left(one, after.address, key=address_of)]
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
            one = pool.bins[size]
        except KeyError:
            one = pool.open(size)
        if not one or one[-1].address < free.address:
            one.append(free)
        elif free.address < one[0].address:
            one.insert(0, free)
        else:
            insort(one, free, key=address_of)
    return rests, grown


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
