"""A pool of the caching allocator, block by block: what some thousand requests in their order leave of it.

Follows the rules of :mod:`mofa.replay.allocator`, which has expandable segments, other streams and full devices
besides: the smallest free block that fits is taken, the lowest among equals, from its low end; what is left of it is a
block again where it is more than 1 MiB (512 B in the small pool); neighbours of a segment that are both free are
joined.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from mofa.cost.ranges import Ranges

_MIB = 1 << 20
SMALL, SMALL_SEGMENT, LARGE_SEGMENT, MIN_OWN, ROUND, UNIT = _MIB, 2 * _MIB, 20 * _MIB, 10 * _MIB, 2 * _MIB, 512
"""PyTorch 2.11, CUDACachingAllocator.cpp: kSmallSize, kSmallBuffer, kLargeBuffer, kMinLargeAlloc, kRoundLarge,
kMinBlockSize. [B]"""
HIGHEST = 4 << 40
"""Segments lie below, and above 0; only which is lower matters. [B]"""
SHIFT = 24
"""Keys have a size in bytes above an address in units of 512 B: of up to 4 TiB, as the lowest 9 bits of sizes are 0."""


def rounded(nbytes: float) -> int:
    """What a request takes at least. [B]

    Examples
    --------
    >>> rounded(1.0), rounded(513.0)
    (512, 1024)
    """
    return max(-int(-nbytes // UNIT) * UNIT, UNIT)


def segment_bytes(size: int) -> int:
    """The segment that is asked of the device for a rounded request. [B]"""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < MIN_OWN else -(-size // ROUND) * ROUND


class Piece:
    """A piece of a segment. [B]

    ``address`` is counted in units of 512 B. ``key`` is 0 where it is taken, else what free pieces are sorted by: the
    size, of equal ones the address.
    """

    __slots__ = ("address", "after", "before", "key", "size")

    def __init__(self, address: int, size: int, before: Piece | None, after: Piece | None) -> None:
        self.address, self.size, self.before, self.after = address, size, before, after
        self.key = 0


class Heap:
    """The large pool of one stream, or the small one.

    Examples
    --------
    Of two of 40 MiB one is let go and taken again for 30: what is left of it is too small for 11 MiB.

    >>> heap = Heap()
    >>> first, second = heap.take(40 << 20), heap.take(40 << 20)
    >>> heap.give(first)
    >>> third, fourth = heap.take(30 << 20), heap.take(11 << 20)
    >>> heap.reserved >> 20
    92
    """

    __slots__ = ("_free", "_keys", "_most_kept", "_ranges", "reserved")

    def __init__(self, *, small: bool = False) -> None:
        self.reserved = 0
        self._most_kept = 0 if small else SMALL
        self._keys: list[int] = []
        self._free: list[Piece] = []
        self._ranges = Ranges(HIGHEST)

    def take(self, size: int) -> Piece:
        """A block of a rounded size. [B]"""
        slots = [NOTHING]
        self.play(((size, 0),), slots)
        return slots[0]

    def give(self, piece: Piece) -> None:
        """Let a block go."""
        self.play(((0, 0),), [piece])

    def play(self, requests: Iterable[tuple[int, int]], slots: list[Piece]) -> None:
        """Take numbers of bytes into slots, and let go what is in them for 0: the innermost loop."""
        keys, free, most_kept = self._keys, self._free, self._most_kept
        for size, slot in requests:
            if size:
                at = bisect_left(keys, size << SHIFT)
                if at < len(keys):
                    piece = free.pop(at)
                    del keys[at]
                else:
                    whole = segment_bytes(size)
                    piece = Piece(self._ranges.place(whole) // UNIT, whole, None, None)
                    self.reserved += whole
                rest = piece.size - size
                if rest <= most_kept:
                    piece.key = 0
                    slots[slot] = piece
                    continue
                before = piece.before
                low = slots[slot] = Piece(piece.address, size, before, piece)
                if before is not None:
                    before.after = low
                piece.before = low
                piece.address += size // UNIT
                size = rest
            else:
                piece = slots[slot]
                size, after, before = piece.size, piece.after, piece.before
                if after is not None and after.key:
                    at = bisect_left(keys, after.key)
                    del keys[at], free[at]
                    size += after.size
                    piece.after = after = after.after
                    if after is not None:
                        after.before = piece
                if before is not None and before.key:
                    at = bisect_left(keys, before.key)
                    del keys[at], free[at]
                    size += before.size
                    before.after = after
                    if after is not None:
                        after.before = before
                    piece = before
            piece.size = size
            key = piece.key = size << SHIFT | piece.address
            at = bisect_left(keys, key)
            keys.insert(at, key)
            free.insert(at, piece)


NOTHING = Piece(0, 0, None, None)
"""What is in slots that nothing was taken for yet."""
