"""A computation played again from its recording (:mod:`mofa.replay.memory.recording`): requests, and their entries."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from functools import partial
from itertools import accumulate

import numpy as np

from mofa.replay.allocator.caching import Allocator
from mofa.replay.allocator.compiled import CompiledAllocator, NumberedBlocks
from mofa.replay.allocator.expandable_segments import least_expandable_block
from mofa.replay.allocator.pools import (
    ALLOCATED,
    FREE,
    MANY,
    Block,
    BlockPool,
    BlockSlots,
    OutOfDeviceMemory,
    address_of,
)
from mofa.replay.allocator.timeline import MANY_RESTS, Instruction, Journal
from mofa.replay.memory.recording import NEAR, NOTHING, PassBlocks, RecordedBlockEnd, Recording

Passed = Callable[[RecordedBlockEnd, BlockSlots], None]
"""Told of a piece that is through, and where the blocks of the pass are."""
Grow = Callable[[int, int, BlockPool], Block]
"""Asks the device for a slot's bytes."""
Overflow = Callable[[OutOfDeviceMemory, Instruction, int], Block]
"""Says what to do where the device is full: what did not fit, in which instruction and event."""


def repeat_recording(
    recording: Recording, recorded: PassBlocks, allocator: Allocator, journal: Journal, overflow: Overflow,
    passed: Passed | None,
) -> tuple[int, int, int]:  # fmt: skip
    """Play a computation again for another pass, and write it down; ``passed`` is told of pieces that are through, None
    where the recording has none.

    Returns
    -------
    tuple[int, int, int]
        Its first event, the bytes allocated before it, and the event after its last. Peaks are the allocator's.
    """
    start, before, reserved = journal.num_events, allocator.allocated, allocator.reserved
    rests, grown = _answered(recording, recorded, allocator, start, overflow, passed)
    end = journal.repeat_computation(recording.instructions, recording.sizes, recording.passages)
    most, changed = before + recording.peak_rise_bytes, 0
    if rests or recorded.rests:
        rests.update(recorded.rests)
        most, changed = _add_rests(recording, rests, journal, start, before, allocator.peak_allocated)
        recorded.rests = {slot: rest for slot, rest in rests.items() if slot not in recording.freed}
    recorded.last = recording
    allocator.allocated = before + recording.net_bytes + changed
    if most > allocator.peak_allocated:
        allocator.peak_allocated = most
    if grown or journal.grown[-1][1] != reserved:
        for first, after in recording.reserved_reads:
            reserved = next((size for event, size in reversed(grown) if event < after), reserved)
            if journal.grown[-1][1] != reserved:
                journal.grown.append((start + first, reserved))
    return start, before, end


def _add_rests(
    recording: Recording, rests: dict[int, int], journal: Journal, start: int, before: int, peak: int
) -> tuple[int, int]:  # fmt: skip
    """Write down that some blocks are larger than asked; the most with them, or at least that where it is no more than
    the ``peak``, and how much more is held at the end."""
    journal.larger_blocks.append((start, recording.entries, rests))
    items, held_more = rests.items(), recording.slots_gained_and_lost
    changed = sum([held_more[slot] * rest for slot, rest in items if slot in held_more])
    all_rests = sum(rests.values())
    if before + recording.peak_rise_bytes + all_rests <= peak:
        return before + recording.peak_rise_bytes + all_rests, changed
    if len(rests) >= MANY_RESTS:
        sizes_then = recording.sizes_array.copy()
        np.add.at(sizes_then, *recording.slot_events.size_changes(rests))
        return before + max(int(np.cumsum(sizes_then).max(initial=0)), 0), changed
    if all_rests >= NEAR:
        sizes = list(recording.sizes)
        for slot, rest in items:
            for event, sign in recording.entries.get(slot, ()):
                sizes[event] += sign * rest
        return max(accumulate(sizes, initial=before)), changed
    highest = max([
        level + sum([more.get(slot, 0) * rest for slot, rest in items])
        for level, more in recording.slots_gained_and_lost_near_peak
    ])  # fmt: skip
    return before + highest, changed


def _answered(
    recording: Recording, recorded: PassBlocks, allocator: Allocator, start: int, overflow: Overflow,
    passed: Passed | None,
) -> tuple[dict[int, int], list[tuple[int, int]]]:  # fmt: skip
    """Answer the requests. The rests of blocks that were not cut, by slot, and (event, bytes reserved after it) where
    memory was asked of the device; ``a.allocated`` stays as it was."""
    blocks, num_new = recorded.blocks, len(recording.allocation_events)
    num_kept = len(recording.slots) - num_new
    if isinstance(blocks, NumberedBlocks):
        blocks.resize(num_kept, num_new)
    else:
        assert isinstance(blocks, list)
        del blocks[num_kept:]
        blocks += [NOTHING] * num_new
    rests: dict[int, int] = {}
    grown: list[tuple[int, int]] = []
    begin, end = 0, len(recording.orders)
    if passed is None and isinstance(allocator, CompiledAllocator):
        begin = _fitting_requests(recording, end, blocks, allocator, rests)
        if begin == end:  # as nearly always
            return rests, grown
    grow = partial(_grow, recording, recorded, allocator, start, overflow, rests, grown)
    answer = _compiled_requests if isinstance(allocator, CompiledAllocator) else _requests
    for piece_passed in recording.block_ends:
        assert passed is not None
        answer(recording, begin, piece_passed.num_orders, blocks, allocator, rests, grow)
        passed(piece_passed, blocks)
        begin = piece_passed.num_orders
    answer(recording, begin, end, blocks, allocator, rests, grow)
    return rests, grown


def _requests(
    recording: Recording, begin: int, end: int, blocks: BlockSlots, allocator: Allocator,
    rests: dict[int, int], grow: Grow,
) -> None:  # fmt: skip
    """What :meth:`mofa.replay.allocator.caching.Allocator.allocate_rounded` and ``free`` do, written out: the innermost
    loop of a replay, in which a call takes as long as a step."""
    requests = recording.requests
    assert isinstance(blocks, list) and not isinstance(requests, bytes)
    expandable = allocator.expandable
    for size, slot, equal, pool in requests[begin:end]:
        if size > 0:
            if equal:
                block = blocks[slot] = equal.pop(0)
                block.state = ALLOCATED
                continue
            free = _expandable_fit(pool, size) if expandable else _best_fit(pool, size)
            if free is None:
                free = grow(slot, size, pool)
            rest = free.size - size
            if rest <= pool.most_kept:
                _keep_whole(blocks, rests, slot, free, rest)
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
            _make_room(allocator, grow, slot, -size, pool)
            continue
        else:
            free = blocks[slot]
            before, after = free.previous, free.following
            if before is not None and not before.state:
                free = _merged_into(before, free, after)
                size = free.size
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
                size = after.size = after.size + free.size
                free = after
            else:
                free.state = FREE
                size = free.size
        try:
            peers = pool.bins[size]
        except KeyError:
            peers = pool.open_bin(size)
        if not peers or peers[-1].address < free.address:
            peers.append(free)
        elif free.address < peers[0].address:
            peers.insert(0, free)
        else:
            insort(peers, free, key=address_of)


def _fitting_requests(
    recording: Recording, end: int, blocks: BlockSlots, allocator: CompiledAllocator, rests: dict[int, int]
) -> int:  # fmt: skip
    """Answer requests, compiled, until one fits no free block: its place, ``end`` where all fit."""
    requests = recording.requests
    assert isinstance(blocks, NumberedBlocks) and isinstance(requests, bytes)
    return allocator.serve_requests(requests, 0, end, blocks, None, rests)


def _compiled_requests(
    recording: Recording, begin: int, end: int, blocks: BlockSlots, allocator: Allocator,
    rests: dict[int, int], grow: Grow,
) -> None:  # fmt: skip
    """The same where an allocator has this loop compiled."""
    requests = recording.requests
    assert (
        isinstance(allocator, CompiledAllocator) and isinstance(blocks, NumberedBlocks) and isinstance(requests, bytes)
    )
    segment = None
    while (begin := allocator.serve_requests(requests, begin, end, blocks, segment, rests)) < end:
        size, slot, index = recording.orders[begin]
        segment = grow(slot, abs(size), allocator.pool_of_index(index))


def _best_fit(pool: BlockPool, size: int) -> Block | None:
    """Take the smallest free block above a size, the lowest of these; None where there is none. None has the size."""
    lists = pool.lists
    index = bisect_right(pool.sizes, size)
    try:
        while not lists[index]:
            index += 1
    except IndexError:
        return None
    return lists[index].pop(0)


def _expandable_fit(pool: BlockPool, size: int) -> Block | None:
    """Take the block that expandable segments prefer of those that fit."""
    index = pool.first_fitting_bin(size)
    if index == len(pool.lists):
        return None
    free = least_expandable_block(pool, index)
    pool.remove(free)
    return free


def _keep_whole(blocks: list[Block], rests: dict[int, int], slot: int, free: Block, rest: int) -> None:
    """Allocate a block of which too little would be left to cut it."""
    free.state = ALLOCATED
    blocks[slot] = free
    if rest:
        rests[slot] = rest


def _merged_into(before: Block, free: Block, after: Block | None) -> Block:
    """The free block in front of one that is let go, with that one and what is free behind it; in no bin."""
    pool, size = free.pool, free.size
    if after is not None and not after.state:
        pool.remove(after)
        after.state = ALLOCATED
        pool.spare.append(after)
        size += after.size
        after = after.following
    pool.remove(before)
    pool.spare.append(free)
    before.size += size
    before.following = after
    if after is not None:
        after.previous = before
    return before


def _make_room(allocator: Allocator, grow: Grow, slot: int, size: int, pool: BlockPool) -> None:
    """Ask the device for memory where no free block has a size."""
    if pool.first_fitting_bin(size) == len(pool.lists):
        allocator.free_and_merge(grow(slot, size, pool))


def _grow(
    recording: Recording, recorded: PassBlocks, allocator: Allocator, start: int, overflow: Overflow,
    rests: dict[int, int], grown: list[tuple[int, int]], slot: int, size: int, pool: BlockPool,
) -> Block:  # fmt: skip
    """A new block of the device's for a slot, and in ``grown`` what is reserved with it."""
    try:
        free = allocator.block_of_fresh_memory(pool, size)
    except OutOfDeviceMemory as full:
        event = recording.allocation_events[slot]
        known = {**recorded.rests, **rests}
        full.allocated += sum(recording.sizes[:event])
        full.allocated += sum(
            sign * known.get(s, 0) for s, e in recording.entries.items() for done, sign in e if done < event
        )
        allocator.allocated = full.allocated  # from which the overflow's request is counted
        free = overflow(full, recording.instructions[event], start + event)
    grown.append((recording.allocation_events[slot], allocator.reserved))
    return free
