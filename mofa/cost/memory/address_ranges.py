"""Where the device puts new segments of memory."""

from __future__ import annotations

RANGE = 32 << 20
"""Ranges of addresses that the driver hands out are multiples of so much. [B]"""


class AddressRanges:
    """Ranges of addresses below ``highest``: a new segment lies in what is left of the lowest range where it fits, else
    below all of them.

    So lie the 77 segments of tests/replay/recorded/native.json.gz: what came last is what requests of equal fit are
    given first.

    Examples
    --------
    >>> ranges = AddressRanges(1 << 30)
    >>> [(1 << 30) - ranges.place_segment(size << 20) >> 20 for size in (20, 20, 12, 40)]
    [32, 64, 44, 128]
    """

    __slots__ = ("_most", "_rests", "lowest")

    def __init__(self, highest: int) -> None:
        self.lowest = highest
        self._rests: list[tuple[int, int]] = []  # none empty, the lowest first
        self._most = 0  # what is left of any

    def place_segment(self, size: int) -> int:
        """The address of a segment. [B]"""
        rests = self._rests
        for i, (start, room) in enumerate(rests) if size <= self._most else ():
            if size <= room:
                rests[i : i + 1] = [(start + size, room - size)] if size < room else []
                if room == self._most:
                    self._most = max([left for _, left in rests], default=0)
                return start
        rounded = -(-size // RANGE) * RANGE
        self.lowest -= rounded
        if rounded > size:
            rests.insert(0, (self.lowest + size, rounded - size))
            self._most = max(self._most, rounded - size)
        return self.lowest
