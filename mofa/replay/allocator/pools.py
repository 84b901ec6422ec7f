"""What the caching allocator is made of: blocks of segments, pools of free blocks, and the sizes of both."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

MIN_BLOCK = 512
SMALL_SIZE = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
MIN_LARGE_SEGMENT = 10 << 20
ROUND_LARGE = 2 << 20

MANY = 32
"""Blocks of a size from which one is searched for by its address. [-]"""
MOST_EMPTY = 64
"""New sizes of free blocks after which sizes that none has any more are forgotten. [-]"""
FREE, ALLOCATED, WAITING, UNMAPPED = range(4)


class OutOfDeviceMemory(Exception):
    """No room for a request although every free segment was given back; it asks the device for ``wanted``. [B]"""

    def __init__(self, size: int, wanted: int, allocated: int, reserved: int, capacity_bytes: int) -> None:
        self.size, self.wanted = size, wanted
        self.allocated, self.reserved, self.capacity_bytes = allocated, reserved, capacity_bytes
        super().__init__(
            f"{size} B do not fit: {allocated} B are allocated and {reserved} B reserved of {capacity_bytes} B"
        )


class ReservedLimitPassed(Exception):
    """More is ``reserved`` than a limit that is not the device's: whoever set it wants to know no more. [B]"""

    def __init__(self, reserved: int) -> None:
        self.reserved = reserved
        super().__init__(f"{reserved} B are reserved")


class Block:
    """A piece of a segment; what :meth:`Allocator.malloc` returns. ``size`` is what it takes, rounding included. [B]"""

    __slots__ = ("address", "events", "following", "freed_at", "pool", "previous", "size", "state")

    def __init__(self, pool: BlockPool, address: int, size: int, state: int) -> None:
        self.pool, self.address, self.size, self.state = pool, address, size, state
        self.previous: Block | None = None
        self.following: Block | None = None
        self.events = 0
        self.freed_at = 0


class BlockPool:
    """Free blocks of one stream and size class; unmapped ranges sorted by address.

    Blocks of one size are a bin, the lowest address first. ``bins`` has them by size, ``sizes`` and ``lists`` the sizes
    in order and their bins; some are empty. Those of the sizes ``pinned_sizes`` stay, as requests know them. ``spare``
    are blocks that neighbours took in, to be used again and so ``ALLOCATED``; a rest larger than ``most_kept`` is split
    off. [B]
    """

    __slots__ = ("bins", "lists", "most_kept", "new", "pinned_sizes", "sizes", "small", "spare", "stream", "unmapped")

    def __init__(self, stream: int, small: bool, expandable: bool = False) -> None:
        self.stream, self.small = stream, small
        self.most_kept = 0 if small or expandable else SMALL_SIZE
        self.bins: dict[int, list[Block]] = {}
        self.sizes: list[int] = []
        self.lists: list[list[Block]] = []
        self.pinned_sizes: set[int] = set()
        self.new = 0
        self.spare: list[Block] = []
        self.unmapped: list[tuple[int, Block]] = []

    def free_blocks_in_order(self) -> Iterator[Block]:
        """All free blocks, in the order in which they are looked through: by size, then by address."""
        return (block for blocks in self.lists for block in blocks)

    def add(self, block: Block) -> None:
        """One more free block."""
        blocks = self.bins.get(block.size)
        if blocks is None:
            blocks = self.open_bin(block.size)
        if blocks and blocks[-1].address > block.address:
            insort(blocks, block, key=address_of)
        else:
            blocks.append(block)

    def remove(self, block: Block) -> None:
        """One that is free no more."""
        blocks = self.bins[block.size]
        if len(blocks) < MANY:
            blocks.remove(block)
        else:
            del blocks[bisect_left(blocks, block.address, key=address_of)]

    def first_fitting_bin(self, size: int) -> int:
        """The place of the first bin that holds a block of a size or larger; past the last bin where there is none."""
        lists = self.lists
        index = bisect_left(self.sizes, size)
        try:  # the end is rarely reached, and asking for the length each time took a twentieth of a play
            while not lists[index]:
                index += 1
        except IndexError:
            pass
        return index

    def bin_of_size(self, size: int) -> list[Block]:
        """The bin of a size, which stays the same list for good."""
        self.pinned_sizes.add(size)
        return self.bins[size] if size in self.bins else self.open_bin(size)

    def open_bin(self, size: int) -> list[Block]:
        """Open a bin for free blocks of a size; after so many new ones, empty bins are closed."""
        self.new += 1
        if self.new > MOST_EMPTY:
            self.new = 0
            pinned = self.pinned_sizes
            self.bins = {size: blocks for size, blocks in self.bins.items() if blocks or size in pinned}
            self.sizes = sorted(self.bins)
            self.lists = [self.bins[size] for size in self.sizes]
        blocks = self.bins[size] = []
        index = bisect_left(self.sizes, size)
        self.sizes.insert(index, size)
        self.lists.insert(index, blocks)
        return blocks


class BlockSlots(Protocol):
    """Slots with blocks: a list, or what stands for one where blocks have numbers."""

    def __len__(self) -> int:
        """How many there are."""

    def __getitem__(self, slot: int, /) -> Block:
        """The block in one."""

    def append(self, block: Block, /) -> None:
        """One more."""


address_of = attrgetter("address")

Request = tuple[int, int, list[Block], BlockPool]
"""Bytes (0: a free; negative: what is freed at once), a slot, the free blocks of that size, of which the first is taken
if there is one, and the pool."""
Order = tuple[int, int, int]
"""A request: bytes, slot, and the pool's index (:meth:`mofa.replay.allocator.caching.Allocator.allocate_rounded`)."""


@dataclass(frozen=True)
class Segment:
    """A contiguous range that the allocator holds; ``blocks`` are (address, bytes, state) in order. [B]"""

    stream: int
    small: bool
    address: int
    size: int
    blocks: tuple[tuple[int, int, int], ...]


def round_size(size: int) -> int:
    """The rounded size of a request: what it takes from a segment at least. [B]

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


def page_size(pool: BlockPool) -> int:
    """Bytes that expandable segments map at once. [B]"""
    return SMALL_SEGMENT if pool.small else LARGE_SEGMENT


def size_with_unmapped_range(block: Block) -> int:
    """What a free block has with the unmapped range behind it. [B]"""
    after = block.following
    return block.size + (after.size if after is not None and after.state == UNMAPPED else 0)
