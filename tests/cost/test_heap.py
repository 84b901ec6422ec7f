"""A pool block by block: by hand, and against the allocator that plays every request."""

from __future__ import annotations

import numpy as np
import pytest

from mofa.cost import heap as heaps
from mofa.cost.heap import NOTHING, Heap, rounded, segment_bytes
from mofa.replay.allocator import HIGHEST, Allocator

MIB = 1 << 20


def requests(seed: int, *, small: bool, count: int = 3000) -> list[tuple[int, int]]:
    """Random requests: sizes into slots, 0 to let a slot go; now large ones are many, now small ones.

    Of 2 to 200 MiB, or of 512 B to 1 MiB.
    """
    random = np.random.default_rng(seed)
    out: list[tuple[int, int]] = []
    live: list[int] = []
    for slot in range(count):
        if live and random.random() < 0.3 + 0.4 * (slot // 200 % 2):
            out.append((0, live.pop(int(random.integers(len(live))))))
        else:
            size = int(2 ** random.uniform(0.0, 11.0)) * 512 if small else int(2 ** random.uniform(12.0, 18.6)) * 512
            out.append((size, slot))
            live.append(slot)
    return out


@pytest.mark.parametrize("small", [False, True])
def test_every_request_is_answered_as_by_the_allocator(small: bool) -> None:
    """Not what is reserved alone: every address and every block's size."""
    for seed in range(4):
        heap, allocator = Heap(small=small), Allocator()
        slots, blocks = {}, {}
        for size, slot in requests(seed, small=small):
            if size:
                slots[slot], blocks[slot] = heap.take(size), allocator.malloc(size)
                assert slots[slot].size == blocks[slot].size
                assert heaps.HIGHEST - slots[slot].address * 512 == HIGHEST - blocks[slot].address
            else:
                heap.give(slots.pop(slot))
                allocator.free(blocks.pop(slot))
            assert heap.reserved == allocator.reserved


def test_a_list_of_requests_does_what_single_ones_do() -> None:
    asked = requests(9, small=False)
    one, other = Heap(), Heap()
    slots = {}
    for size, slot in asked:
        if size:
            slots[slot] = one.take(size)
        else:
            one.give(slots.pop(slot))
    played = [NOTHING] * len(asked)
    other.play(asked, played)
    assert other.reserved == one.reserved
    assert all((played[slot].address, played[slot].size) == (p.address, p.size) for slot, p in slots.items())


def test_segments() -> None:
    """2 MiB for what is small, 20 MiB below 10 MiB, else the next 2 MiB."""
    assert [segment_bytes(rounded(n)) // MIB for n in (1.0, MIB, MIB + 1.0, 10 * MIB, 10 * MIB + 1.0)] == [
        2,
        2,
        20,
        10,
        12,
    ]
