"""Free memory by sizes: each case by hand, and against the allocator that plays every request."""

from __future__ import annotations

import numpy as np

from mofa.cost.freelist import FreeList, rounded, segment_bytes
from mofa.replay.allocator import Allocator

MIB = 1 << 20


def test_the_smallest_block_that_fits_is_taken_and_what_is_left_of_it_is_used() -> None:
    """Of 64 and 100 MiB 60 MiB take the smaller; 30 MiB then lie in the larger, as do 60 more: 10 MiB are left."""
    pool = FreeList()
    pool.take(64 * MIB, 1)
    pool.take(100 * MIB, 1)
    pool.empty()
    for size in (60, 30, 60):
        pool.take(size * MIB, 1)
    assert pool.reserved == 164 * MIB
    assert pool.new == {}
    pool.take(11 * MIB, 1)
    assert pool.new == {12 * MIB: 1}


def test_what_fits_nowhere_comes_to_lie_in_a_larger_block_of_what_was_there_before() -> None:
    """Three of 64 MiB are cut from one segment of 224 MiB that a temporary left; 32 MiB of it are free."""
    pool = FreeList()
    pool.take(64 * MIB, 3, 224 * MIB)
    assert pool.new == {224 * MIB: 1}
    pool.take(32 * MIB, 1)
    assert pool.reserved == 224 * MIB


def test_a_copy_goes_on_while_the_first_stays() -> None:
    """What a copy took new is free once it is settled; what it took of the first's free blocks is free again."""
    pool = FreeList()
    pool.take(20 * MIB, 2)
    pool.empty()
    later = pool.copy()
    later.take(20 * MIB, 3)
    pool.settle(later)
    assert pool.reserved == later.reserved == 60 * MIB
    pool.take(20 * MIB, 3)
    assert pool.reserved == 60 * MIB


def test_small_blocks_have_segments_of_their_own() -> None:
    pool = FreeList(small=True)
    pool.take(rounded(0.75 * MIB), 3)
    assert pool.reserved == 4 * MIB
    assert segment_bytes(rounded(1.0)) == 2 * MIB


def test_holding_and_releasing_is_what_the_allocator_does() -> None:
    """Random tensors in the order of a stack: neighbours are free together, so that both reserve the same."""
    random = np.random.default_rng(3)
    pool, allocator = FreeList(), Allocator()
    stack = []
    for _ in range(400):
        if stack and random.random() < 0.45:
            held, block = stack.pop()
            pool.release(held)
            allocator.free(block)
        else:
            size = int(random.integers(2, 40)) * 8 * MIB
            stack.append((pool.hold(size), allocator.malloc(size)))
    assert abs(pool.reserved / allocator.reserved - 1) < 0.02
