"""The caching allocator's free memory as numbers of segments that are alike: what is allocated many times is one step.

Follows the rules of :mod:`mofa.replay.allocator`, which plays every request: the smallest free block that fits is
taken, and what is left of it is a block again where it is more than 1 MiB (512 B in the small pool). Where in a segment
tensors lie is not known here: all that is free of one counts as a single block.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

_MIB = 1 << 20
SMALL, SMALL_SEGMENT, LARGE_SEGMENT, MIN_OWN, ROUND, UNIT = _MIB, 2 * _MIB, 20 * _MIB, 10 * _MIB, 2 * _MIB, 512
"""PyTorch 2.11, CUDACachingAllocator.cpp: kSmallSize, kSmallBuffer, kLargeBuffer, kMinLargeAlloc, kRoundLarge,
kMinBlockSize. [B]"""


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


@dataclass(slots=True)
class Segments:
    """``number`` segments of ``whole`` bytes, of which ``free`` are. [B]"""

    free: int
    whole: int
    number: int
    held: bool = False
    """Whether what is held of it will be let go: it is itself then, like no other."""


class FreeList:
    """The large pool of one stream, or the small one.

    Examples
    --------
    Three of 6 MiB fill a segment of 20 MiB, so that four take two. 15 MiB lie in none of them, and take one of 16:

    >>> pool = FreeList()
    >>> pool.take(6 << 20, 4)
    >>> pool.take(15 << 20, 1)
    >>> pool.reserved >> 20
    56
    """

    __slots__ = ("_keys", "_segments", "least", "new", "reserved")

    def __init__(self, *, small: bool = False) -> None:
        self.least = UNIT if small else SMALL + 1
        self.reserved = 0
        self.new: dict[int, int] = {}
        """Segments taken from the device since the last :meth:`copy` or :meth:`settle`, by size."""
        self._keys: list[int] = []
        self._segments: list[Segments] = []

    def copy(self) -> FreeList:
        """The same to go on with, while this one stays."""
        other = FreeList()
        other.least, other.reserved, other._keys = self.least, self.reserved, self._keys.copy()
        other._segments = [Segments(s.free, s.whole, s.number) for s in self._segments]
        return other

    def settle(self, later: FreeList) -> None:
        """All that a copy took has been let go: its new segments are free here."""
        self.reserved = later.reserved
        for whole, number in later.new.items():
            self.put(Segments(whole, whole, number))

    def empty(self) -> None:
        """Let everything go that was taken; of this, what :attr:`new` says is all there is."""
        self._keys, self._segments = [], []
        for whole, number in self.new.items():
            self.put(Segments(whole, whole, number))
        self.new = {}

    def put(self, segments: Segments) -> None:
        """More segments, with those that are like them as one."""
        free = segments.free
        if free < self.least:
            segments.free = 0
            return
        at = bisect_left(self._keys, free)
        if at < len(self._keys) and self._keys[at] == free and not segments.held:
            like = self._segments[at]
            if like.whole == segments.whole and not like.held:
                like.number += segments.number
                return
        self._keys.insert(at, free)
        self._segments.insert(at, segments)

    def take(self, size: int, number: int, fresh: int = 0) -> None:
        """Allocate ``number`` blocks of a rounded ``size`` for good; where none fits, a segment for ``fresh`` [B]."""
        keys = self._keys
        while number > 0:
            at = bisect_left(keys, size)
            if at == len(keys):
                whole = segment_bytes(max(size, fresh))
                self._grow(whole, -(-number // max(whole // size, 1)))
                continue
            found = self._segments[at]
            each = min(found.free // size, number)
            some = min(found.number, number // each)
            if some == found.number:
                del keys[at]
                del self._segments[at]
                found.free -= each * size
            else:
                found.number -= some
                found = Segments(found.free - each * size, found.whole, some)
            self.put(found)
            number -= each * some

    def hold(self, size: int) -> tuple[Segments, int]:
        """Allocate one block of a rounded size; what :meth:`release` takes."""
        at = bisect_left(self._keys, size)
        if at == len(self._keys):
            self._grow(segment_bytes(size), 1)
            at = bisect_left(self._keys, size)
        found = self._segments[at]
        if found.number > 1:
            found.number -= 1
            found = Segments(found.free, found.whole, 1)
        else:
            del self._keys[at]
            del self._segments[at]
        found.free -= size
        found.held = True
        if found.free < self.least:
            size += found.free
        self.put(found)
        return found, size

    def release(self, held: tuple[Segments, int]) -> None:
        """Let go what was held."""
        segment, size = held
        at = bisect_left(self._keys, segment.free)
        while at < len(self._keys) and self._keys[at] == segment.free:
            if self._segments[at] is segment:
                del self._keys[at]
                del self._segments[at]
                break
            at += 1
        segment.free += size
        self.put(segment)

    def _grow(self, whole: int, number: int) -> None:
        self.reserved += whole * number
        self.new[whole] = self.new.get(whole, 0) + number
        self.put(Segments(whole, whole, number))
