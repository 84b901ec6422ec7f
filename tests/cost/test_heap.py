"""A pool block by block: against the allocator that plays every request, and its inner loop against its own calls."""

from __future__ import annotations

import numpy as np

from mofa.cost.heap import Heap, Piece
from mofa.replay.allocator import Allocator

KIB = 1 << 10


def requests(seed: int, count: int = 3000) -> list[tuple[int, int]]:
    """Random acts: sizes of 2 to 200 MiB into slots, 0 to let a slot go; now large ones are many, now small ones."""
    random = np.random.default_rng(seed)
    acts: list[tuple[int, int]] = []
    live: list[int] = []
    for slot in range(count):
        if live and random.random() < 0.3 + 0.4 * (slot // 200 % 2):
            acts.append((0, live.pop(int(random.integers(len(live))))))
        else:
            size = int(2 ** random.uniform(1.0, 7.6) * 2 * KIB) * 512
            acts.append((size, slot))
            live.append(slot)
    return acts


def test_every_request_is_answered_as_by_the_allocator() -> None:
    """Not what is reserved alone: every address and every block's size."""
    for seed in range(4):
        heap, allocator = Heap(), Allocator()
        slots, blocks = {}, {}
        for size, slot in requests(seed):
            if size:
                slots[slot], blocks[slot] = heap.take(size), allocator.malloc(size)
                assert slots[slot].size == blocks[slot].size
            else:
                heap.give(slots.pop(slot))
                allocator.free(blocks.pop(slot))
            assert heap.reserved == allocator.reserved
        first = min(block.address for block in blocks.values()) - min(piece.address for piece in slots.values())
        assert all(blocks[slot].address - piece.address == first for slot, piece in slots.items())


def test_acts_do_what_single_calls_do() -> None:
    """``play`` is ``take`` and ``give`` written out; acts that are neither are handed on, in their order."""
    acts = requests(9)
    one, other = Heap(), Heap()
    slots: dict[int, Piece] = {}
    for size, slot in acts:
        if size:
            slots[slot] = one.take(size)
        else:
            one.give(slots.pop(slot))
    played: dict[int, Piece] = {}
    seen: list[tuple[int, int]] = []
    half = len(acts) // 2
    mixed = [*acts[:half], (-3, 7), (0, 99_999), *acts[half:], (-1, 8)]
    other.play(mixed, played, lambda act, slot: seen.append((act, slot)))
    assert other.reserved == one.reserved
    assert {slot: (p.address, p.size) for slot, p in played.items()} == {
        slot: (p.address, p.size) for slot, p in slots.items()
    }
    assert seen == [(-3, 7), (-1, 8)]


def test_a_block_of_another_pool_goes_back_to_that_one() -> None:
    compute, gather = Heap(), Heap()
    slots = {0: gather.take(32 << 20)}
    compute.play([(0, 0), (32 << 20, 1)], slots, lambda act, slot: None)
    assert list(slots) == [1]
    gather.take(32 << 20)
    assert (compute.reserved, gather.reserved) == (32 << 20, 32 << 20)
