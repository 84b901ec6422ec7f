"""Expandable segments: ranges of addresses whose pages are mapped when needed (``expandable_segments:True``)."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import chain, islice
from typing import Protocol

from mofa.replay.allocator.pools import FREE, UNMAPPED, Block, BlockPool, page_size, size_with_unmapped_range


class DeviceMemory(Protocol):
    """What an allocator has of its device; see :class:`mofa.replay.allocator.caching.Allocator`. [B]"""

    capacity_bytes: int | None
    reserved: int

    def address_for_new_segment(self, size: int) -> int:
        """Where a new range of addresses lies."""

    def try_reserve(self, size: int) -> bool:
        """Ask for so many bytes; whether it has them."""

    def free_and_merge(self, block: Block) -> Block:
        """Make a block free, and merge it with free neighbours."""


def least_expandable_block(pool: BlockPool, address: int) -> Block:
    """Of free blocks that fit, the one that can grow least: its size counts with the unmapped range behind it."""
    fitting = chain.from_iterable(islice(pool.lists, address, None))
    block = next(fitting)
    for larger in fitting:
        if size_with_unmapped_range(larger) >= size_with_unmapped_range(block):
            break
        block = larger
    return block


def extend_free_block(device: DeviceMemory, pool: BlockPool, size: int) -> Block | None:
    """A free block of at least ``size`` bytes out of unmapped ranges; None where the device has no room."""
    block = _range(device, pool, size)
    free = _map(device, block, min(block.size, size)) if block.state == UNMAPPED else block
    while free is not None and free.size < size:
        behind = free.following
        assert behind is not None and behind.state == UNMAPPED
        free = _map(device, behind, min(size - free.size, behind.size))
    if free is not None:
        pool.remove(free)
    return free


def _range(device: DeviceMemory, pool: BlockPool, size: int) -> Block:
    """The lowest range of addresses with room, from the free block before it on; a new one where there is none."""
    for _, unmapped in pool.unmapped:
        first = unmapped
        if first.previous is not None and first.previous.state == FREE:
            first = first.previous
        free_bytes, piece = 0, first
        while True:
            free_bytes += piece.size
            if free_bytes >= size:
                return first
            if piece.following is None or piece.following.state not in (FREE, UNMAPPED):
                break
            piece = piece.following
    page = page_size(pool)
    space = 1 << 40 if device.capacity_bytes is None else -(-device.capacity_bytes * 9 // 8 // page) * page
    block = Block(pool, device.address_for_new_segment(space), space, UNMAPPED)
    insort(pool.unmapped, (block.address, block), key=lambda item: item[0])
    return block


def _map(device: DeviceMemory, block: Block, size: int) -> Block | None:
    """Map at least the first ``size`` bytes of an unmapped range, in pages; it joins its free neighbours."""
    pool = block.pool
    page = page_size(pool)
    mapped = min(-(-size // page) * page, block.size)
    if not device.try_reserve(mapped):
        return None
    del pool.unmapped[bisect_left(pool.unmapped, block.address, key=lambda item: item[0])]
    if mapped < block.size:
        rest = Block(pool, block.address + mapped, block.size - mapped, UNMAPPED)
        rest.previous, rest.following = block, block.following
        if rest.following is not None:
            rest.following.previous = rest
        block.following = rest
        block.size = mapped
        insort(pool.unmapped, (rest.address, rest), key=lambda item: item[0])
    return device.free_and_merge(block)


def unmap_free_pages(device: DeviceMemory, block: Block) -> None:
    """Unmap the whole pages inside a free block."""
    pool = block.pool
    page = page_size(pool)
    start = _base(block)
    low = start + -(-(block.address - start) // page) * page
    high = start + (block.address + block.size - start) // page * page
    if high <= low:
        return
    pool.remove(block)
    if block.address < low:
        front = Block(pool, block.address, low - block.address, FREE)
        front.previous, front.following = block.previous, block
        if front.previous is not None:
            front.previous.following = front
        block.previous = front
        pool.add(front)
    if high < block.address + block.size:
        back = Block(pool, high, block.address + block.size - high, FREE)
        back.previous, back.following = block, block.following
        if back.following is not None:
            back.following.previous = back
        block.following = back
        pool.add(back)
    block.address, block.size, block.state = low, high - low, UNMAPPED
    device.reserved -= block.size
    for near in (block.previous, block.following):
        if near is not None and near.state == UNMAPPED:
            del pool.unmapped[bisect_left(pool.unmapped, near.address, key=lambda item: item[0])]
            block.size += near.size
            if near is block.previous:
                block.address, block.previous = near.address, near.previous
                if near.previous is not None:
                    near.previous.following = block
            else:
                block.following = near.following
                if near.following is not None:
                    near.following.previous = block
    insort(pool.unmapped, (block.address, block), key=lambda item: item[0])


def _base(block: Block) -> int:
    while block.previous is not None:
        block = block.previous
    return block.address
