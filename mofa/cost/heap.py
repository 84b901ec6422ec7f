"""A large pool of the caching allocator, block by block: what some thousand requests in their order leave of it.

Follows the rules of :mod:`mofa.replay.allocator`, which has small blocks, expandable segments, other streams and full
devices besides: the smallest free block that fits is taken, the lowest among equals, from its low end; what is left of
it is a block again where it is more than 1 MiB; neighbours of a segment that are both free are joined.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from operator import attrgetter

from mofa.cost.freelist import SMALL, segment_bytes

MOST_EMPTY = 64
"""New sizes of free blocks after which those that none has any more are forgotten. [-]"""


_address = attrgetter("address")


class Piece:
    """A piece of a segment. [B]"""

    __slots__ = ("address", "after", "before", "free", "heap", "size")

    def __init__(self, heap: Heap, address: int, size: int, before: Piece | None, after: Piece | None) -> None:
        self.heap, self.address, self.size, self.before, self.after = heap, address, size, before, after
        self.free = False


class Heap:
    """The large pool of one stream.

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

    __slots__ = ("_bins", "_lists", "_new", "_sizes", "_top", "reserved")

    def __init__(self) -> None:
        self.reserved = self._top = self._new = 0
        self._sizes: list[int] = []
        self._lists: list[list[Piece]] = []
        self._bins: dict[int, list[Piece]] = {}

    def take(self, size: int) -> Piece:
        """A block of a rounded size of more than 1 MiB. [B]"""
        one = self._bins.get(size)
        if one:
            piece = one.pop(0)
            piece.free = False
            return piece
        lists = self._lists
        at = bisect_left(self._sizes, size)
        while at < len(lists) and not lists[at]:
            at += 1
        piece = lists[at].pop(0) if at < len(lists) else self._segment(size)
        rest = piece.size - size
        if rest <= SMALL:
            piece.free = False
            return piece
        before = piece.before
        low = Piece(self, piece.address, size, before, piece)
        if before is not None:
            before.after = low
        piece.before = low
        piece.address += size
        piece.size = rest
        self._put(piece)
        return low

    def give(self, piece: Piece) -> None:
        """Let a block go."""
        after, before = piece.after, piece.before
        if after is not None and after.free:
            self._drop(after)
            piece.size += after.size
            piece.after = after = after.after
            if after is not None:
                after.before = piece
        if before is not None and before.free:
            self._drop(before)
            before.size += piece.size
            before.after = after
            if after is not None:
                after.before = before
            piece = before
        self._put(piece)

    def play(
        self, acts: Iterable[tuple[int, int]], slots: dict[int, Piece], other: Callable[[int, int], None]
    ) -> None:  # fmt: skip
        """Take positive numbers of bytes into slots, let go what is in slots for 0, if anything is; the ``other`` acts
        are somebody else's. This is :meth:`take` and :meth:`give` written out: the innermost loop."""
        bins, sizes, lists = self._bins, self._sizes, self._lists
        for size, slot in acts:
            if size > 0:
                one = bins.get(size)
                if one:
                    piece = one.pop(0)
                    piece.free = False
                    slots[slot] = piece
                    continue
                at, num = bisect_left(sizes, size), len(lists)
                while at < num and not lists[at]:
                    at += 1
                piece = lists[at].pop(0) if at < num else self._segment(size)
                rest = piece.size - size
                if rest <= SMALL:
                    piece.free = False
                    slots[slot] = piece
                    continue
                before = piece.before
                low = slots[slot] = Piece(self, piece.address, size, before, piece)
                if before is not None:
                    before.after = low
                piece.before = low
                piece.address += size
                size = piece.size = rest
            elif size:
                other(size, slot)
                continue
            else:
                if slot not in slots:
                    continue
                piece = slots.pop(slot)
                if piece.heap is not self:
                    piece.heap.give(piece)
                    continue
                after, before = piece.after, piece.before
                size = piece.size
                if after is not None and after.free:
                    one = bins[after.size]
                    if len(one) == 1:
                        one.clear()
                    else:
                        del one[bisect_left(one, after.address, key=_address)]
                    size += after.size
                    piece.after = after = after.after
                    if after is not None:
                        after.before = piece
                if before is not None and before.free:
                    one = bins[before.size]
                    if len(one) == 1:
                        one.clear()
                    else:
                        del one[bisect_left(one, before.address, key=_address)]
                    size += before.size
                    before.after = after
                    if after is not None:
                        after.before = before
                    piece = before
                piece.size = size
                piece.free = True
            one = bins.get(size)
            if one is None:
                one = self._open(size)
            if not one or one[-1].address < piece.address:
                one.append(piece)
            else:
                insort(one, piece, key=_address)

    def _segment(self, size: int) -> Piece:
        whole = segment_bytes(size)
        self.reserved += whole
        self._top += whole
        piece = Piece(self, self._top - whole, whole, None, None)
        piece.free = True
        return piece

    def _put(self, piece: Piece) -> None:
        piece.free = True
        one = self._bins.get(piece.size)
        if one is None:
            one = self._open(piece.size)
        if not one or one[-1].address < piece.address:
            one.append(piece)
        else:
            insort(one, piece, key=_address)

    def _open(self, size: int) -> list[Piece]:
        self._new += 1
        if self._new > MOST_EMPTY:
            self._new = 0
            for found in [found for found, one in self._bins.items() if not one]:
                del self._bins[found]
            self._sizes[:] = sorted(self._bins)
            self._lists[:] = [self._bins[found] for found in self._sizes]
        one: list[Piece] = []
        self._bins[size] = one
        at = bisect_left(self._sizes, size)
        self._sizes.insert(at, size)
        self._lists.insert(at, one)
        return one

    def _drop(self, piece: Piece) -> None:
        one = self._bins[piece.size]
        if len(one) == 1:
            one.clear()
        else:
            del one[bisect_left(one, piece.address, key=_address)]
