"""What the caching allocator is made of: blocks of segments, pools of free blocks, and the sizes of both."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

MIN_BLOCK = 512
SMALL_SIZE = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
MIN_LARGE_SEGMENT = 10 << 20
ROUND_LARGE = 2 << 20

SHIFT = 38
"""A key is a size over an address, both in units of 512 B: small enough an integer to be compared quickly."""
FREE, ALLOCATED, WAITING, UNMAPPED = range(4)


class OutOfDeviceMemory(Exception):
    """No room for a request although every free segment was given back; it asks the device for ``wanted``. [B]"""

    def __init__(self, size: int, wanted: int, allocated: int, reserved: int, capacity: int) -> None:
        self.size, self.wanted = size, wanted
        self.allocated, self.reserved, self.capacity = allocated, reserved, capacity
        super().__init__(f"{size} B do not fit: {allocated} B are allocated and {reserved} B reserved of {capacity} B")


class Block:
    """A piece of a segment; what :meth:`Allocator.malloc` returns. ``size`` is what it takes, rounding included. [B]"""

    __slots__ = ("address", "events", "following", "freed_at", "key", "pool", "previous", "size", "state")

    def __init__(self, pool: Pool, address: int, size: int, state: int) -> None:
        self.pool, self.address, self.size, self.state = pool, address, size, state
        self.previous: Block | None = None
        self.following: Block | None = None
        self.events = 0
        self.freed_at = 0
        self.key = 0  # while free


class Pool:
    """Free blocks of one stream and size class, and their keys, in order; unmapped ranges sorted by address.

    ``spare`` are blocks that neighbours took in, to be used again and so ``ALLOCATED``; a rest larger than
    ``most_kept`` is split off. [B]
    """

    __slots__ = ("blocks", "keys", "most_kept", "small", "spare", "stream", "unmapped")

    def __init__(self, stream: int, small: bool, expandable: bool = False) -> None:
        self.stream, self.small = stream, small
        self.most_kept = 0 if small or expandable else SMALL_SIZE
        self.keys: list[int] = []
        self.blocks: list[Block] = []
        self.spare: list[Block] = []
        self.unmapped: list[tuple[int, Block]] = []

    def put(self, block: Block) -> None:
        """One more free block."""
        key = block.key = block.size << SHIFT - 9 | block.address >> 9
        at = bisect_left(self.keys, key)
        self.keys.insert(at, key)
        self.blocks.insert(at, block)

    def take(self, block: Block) -> None:
        """One that is free no more."""
        at = bisect_left(self.keys, block.key)
        del self.keys[at]
        del self.blocks[at]

    def grown(self, at: int, block: Block) -> None:
        """The free block at a position is larger than its key says."""
        keys = self.keys
        key = block.key = block.size << SHIFT - 9 | block.address >> 9
        if at + 1 < len(keys) and keys[at + 1] < key:
            del keys[at]
            del self.blocks[at]
            at = bisect_left(keys, key, at)
            keys.insert(at, key)
            self.blocks.insert(at, block)
        else:
            keys[at] = key

    def cut(self, at: int, block: Block) -> None:
        """The free block at a position is smaller than its key says."""
        keys = self.keys
        key = block.key = block.size << SHIFT - 9 | block.address >> 9
        if at and keys[at - 1] > key:
            del keys[at]
            del self.blocks[at]
            at = bisect_left(keys, key, 0, at)
            keys.insert(at, key)
            self.blocks.insert(at, block)
        else:
            keys[at] = key


@dataclass(frozen=True)
class Segment:
    """A contiguous range that the allocator holds; ``blocks`` are (address, bytes, state) in order. [B]"""

    stream: int
    small: bool
    address: int
    size: int
    blocks: tuple[tuple[int, int, int], ...]


def round_size(size: int) -> int:
    """What a request takes from a segment at least. [B]

    Examples
    --------
    >>> round_size(1), round_size(513)
    (512, 1024)
    """
    return max(MIN_BLOCK, (size + MIN_BLOCK - 1) & -MIN_BLOCK)


def segment_size(size: int) -> int:
    """The segment that is asked of the device for a rounded request. [B]

    Examples
    --------
    >>> [segment_size(s) >> 20 for s in (512, 2 << 20, 10 << 20, (10 << 20) + 512)]
    [2, 20, 10, 12]
    """
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    if size < MIN_LARGE_SEGMENT:
        return LARGE_SEGMENT
    return -(-size // ROUND_LARGE) * ROUND_LARGE


def page_size(pool: Pool) -> int:
    """Bytes that expandable segments map at once. [B]"""
    return SMALL_SEGMENT if pool.small else LARGE_SEGMENT


def reach(block: Block) -> int:
    """What a free block has with the unmapped range behind it. [B]"""
    after = block.following
    return block.size + (after.size if after is not None and after.state == UNMAPPED else 0)
