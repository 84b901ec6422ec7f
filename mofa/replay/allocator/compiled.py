"""The allocator with its inner loop compiled from ``native_segments.c``, where that was done; with the same answers.

Sizes and addresses are in bytes. Blocks have numbers in the compiled part, and are objects here only when a replay asks
for one. What is rare is the reference's (:mod:`mofa.replay.allocator.caching`): segments of the device, and what to do
when it is full. So is all of expandable segments, garbage collection and use by several streams.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Callable, Sequence
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from functools import lru_cache
from math import inf
from pathlib import Path

import numpy as np

from mofa.compiled_parts import load_compiled_part
from mofa.replay.allocator.caching import Allocator
from mofa.replay.allocator.pools import ALLOCATED, Block, BlockPool, Order

SOURCE = Path(__file__).with_name("native_segments.c")
LIBRARY = SOURCE.with_suffix(".so")
NONE = -1
REQUEST = np.dtype([("size", np.int64), ("slot", np.int32), ("pool", np.int32)])
"""As ``Request`` in the compiled part."""
SIZE, ADDRESS, NUM_FREED = range(3)
"""Places in what an allocator and its compiled part share; behind them blocks that were let go. As ``Shared`` there."""
MANY_FREED = 64
"""Blocks that are made free together at most. [-]"""
ARGUMENTS: dict[str, tuple[type | None, list[type] | None]] = {
    "source": (c_char_p, []),
    "segments_new": (c_void_p, [c_void_p]),
    "segments_delete": (None, [c_void_p]),
    "open_pool": (None, [c_void_p, c_int32]),
    "new_block": (c_int32, [c_void_p, c_int32, c_int64, c_int64]),
    "take": (c_int32, None),
    "settle": (None, None),
    "look": (c_int32, None),
    "prepare": (None, [c_void_p, c_void_p, c_int32]),
    "answer": (c_int32, [c_void_p, c_void_p, c_int32, c_int32, c_int32, c_void_p, c_void_p, c_void_p]),
    "give_back": (c_int32, [c_void_p, c_int32, c_void_p]),
    "num_free": (c_int32, [c_void_p, c_int32]),
    "free_blocks": (None, [c_void_p, c_int32, c_void_p]),
    "places": (None, [c_void_p, c_void_p, c_void_p, c_int32, c_void_p]),
}
"""What each function gives and takes; None for a handle and small numbers, which are not looked at: that is quicker."""


@lru_cache(maxsize=1)
def c_library() -> ctypes.PyDLL | None:
    """The compiled part in C; None where there is none of this source, for this machine."""
    return load_compiled_part(SOURCE, LIBRARY, ARGUMENTS)


def fastest_allocator(capacity_bytes: int | None = None, *, expandable: bool = False, limit: float = inf) -> Allocator:
    """The fastest allocator there is; arguments as of :class:`~mofa.replay.allocator.caching.Allocator`.

    Examples
    --------
    >>> fastest_allocator(expandable=True).expandable
    True
    """
    if expandable or c_library() is None:
        return Allocator(capacity_bytes, expandable=expandable, limit=limit)
    return CompiledAllocator(capacity_bytes, limit=limit)


class NumberedBlock(Block):
    """An allocated block with its number in the compiled part; that one knows its neighbours."""

    __slots__ = ("number",)

    def __init__(self, pool: BlockPool, address: int, size: int, number: int) -> None:
        self.pool, self.address, self.size, self.number = pool, address, size, number
        self.state = ALLOCATED


class NumberedBlocks:
    """Blocks in slots, as numbers: a list of blocks to who reads it."""

    __slots__ = ("a", "numbers")

    def __init__(self, allocator: CompiledAllocator) -> None:
        self.a, self.numbers = allocator, array("i")

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, slot: int) -> Block:
        return self.a.block_of_number(self.numbers[slot])

    def append(self, block: Block) -> None:
        """One more; one of no allocator has no number."""
        self.numbers.append(block.number if isinstance(block, NumberedBlock) else NONE)

    def resize(self, num_kept: int, num_new: int) -> None:
        """Keep the first slots, with so many new ones behind them."""
        del self.numbers[num_kept:]
        self.numbers.frombytes(b"\xff" * (self.numbers.itemsize * num_new))  # NONE

    def packed_addresses(self, slots: array[int]) -> bytes:
        """The addresses of the blocks in these slots, as packed bytes."""
        return self.a.packed_addresses(self.numbers, slots)


class CompiledAllocator(Allocator):
    """As :class:`~mofa.replay.allocator.caching.Allocator`, with native segments; a block is used by its own stream.

    Raises
    ------
    RuntimeError
        If nothing was compiled (:func:`c_library`).

    Examples
    --------
    >>> if c_library() is not None:
    ...     a = CompiledAllocator()
    ...     x, y = a.malloc(3 << 20), a.malloc(3 << 20)
    ...     assert (a.allocated >> 20, a.reserved >> 20) == (6, 20)
    """

    def __init__(
        self, capacity_bytes: int | None = None, *, fraction: bool = False, limit: float = inf,
        place: Callable[[int], int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(capacity_bytes, fraction=fraction, limit=limit, place=place)
        compiled = c_library()
        if compiled is None:
            raise RuntimeError(f"{LIBRARY.name} is not compiled; use Allocator")
        self._compiled = compiled
        self._take, self._look, self._settle = compiled.take, compiled.look, compiled.settle
        self._shared = array("q", bytes(8 * (NUM_FREED + 1 + MANY_FREED)))
        self._segments: int = compiled.segments_new(self._shared.buffer_info()[0])
        self._handle = c_void_p(self._segments)
        weakref.finalize(self, compiled.segments_delete, self._segments)
        self._two = array("q", (0, 0))
        self._at_two = self._two.buffer_info()[0]
        self._larger, self._num_larger = array("q"), array("i", (0,))
        self._at_num_larger = self._num_larger.buffer_info()[0]

    # -- requests
    def allocate_rounded(self, size: int, index: int) -> Block:
        """A block of a rounded size from a pool."""
        pool = self._pools.get(index) or self.pool_of_index(index)
        shared = self._shared
        shared[SIZE] = size
        number = self._take(self._handle, index, NONE)
        if number == NONE:
            given = self.block_of_fresh_memory(pool, size)
            assert isinstance(given, NumberedBlock)
            number = self._take(self._handle, index, given.number)
        size = shared[SIZE]
        allocated = self.allocated = self.allocated + size
        if allocated > self.peak_allocated:
            self.peak_allocated = allocated
        return NumberedBlock(pool, shared[ADDRESS], size, number)

    def pool_of_index(self, index: int) -> BlockPool:
        """The pool of an index; its free blocks are in the compiled part."""
        if index not in self._pools:
            self._compiled.open_pool(self._segments, index)
        return super().pool_of_index(index)

    def stop_keeping_empty_bins(self) -> None:
        """There are none."""

    def free(self, block: Block, streams: Sequence[int] = ()) -> None:
        """Give a block back."""
        assert not streams, "no other stream is waited for"
        self.allocated -= block.size
        self.free_and_merge(block)

    def free_and_merge(self, block: Block) -> Block:
        """Make a block free, before anything else is asked for; it stands for the one that it is part of then."""
        assert type(block) is NumberedBlock
        shared = self._shared
        shared[NUM_FREED] = number = shared[NUM_FREED] + 1
        shared[NUM_FREED + number] = block.number
        if number == MANY_FREED:
            self._settle(self._handle)
        return block

    def empty_cache(self) -> None:
        """Give all free segments back to the device."""
        for index in self._pools:
            self.num_segments -= self._compiled.give_back(self._segments, index, self._at_two)
            self.reserved -= self._two[0]

    def _new(self, pool: BlockPool, size: int) -> Block | None:
        block = super()._new(pool, size)
        if block is None:
            return None
        index = pool.stream << 1 | pool.small
        number = self._compiled.new_block(self._segments, index, block.address, block.size)
        return NumberedBlock(pool, block.address, block.size, number)

    # -- requests that are known beforehand
    def prepare_requests(self, orders: Sequence[Order]) -> bytes:
        """Requests as the compiled part reads them."""
        for index in {order[2] for order in orders}:
            self.pool_of_index(index)
        requests = np.array([*orders], dtype=REQUEST)
        self._compiled.prepare(self._segments, requests.ctypes.data, len(requests))
        return requests.tobytes()

    def new_block_slots(self) -> NumberedBlocks:
        """Where their blocks will be."""
        return NumberedBlocks(self)

    def serve_requests(
        self, requests: bytes, begin: int, end: int, slots: NumberedBlocks, given: Block | None, rests: dict[int, int]
    ) -> int:
        """Answer requests until memory must be asked of the device.

        Parameters
        ----------
        begin, end, given
            The request to begin with and that behind the last; a new segment for the first, where one was asked for.
        rests
            Gets how much larger than asked for the blocks of some slots are. [B]

        Returns
        -------
        int
            The request that nothing fits; ``end`` where all are answered.
        """
        larger, num_larger = self._larger, self._num_larger
        num_larger[0] = 0
        if len(larger) < 2 * (end - begin):
            larger.frombytes(bytes(16 * (end - begin)))
        number = given.number if isinstance(given, NumberedBlock) else NONE
        done: int = self._compiled.answer(
            self._segments, requests, end, begin, number, slots.numbers.buffer_info()[0], larger.buffer_info()[0],
            self._at_num_larger,
        )  # fmt: skip
        for i in range(0, 2 * num_larger[0], 2):
            rests[larger[i]] = larger[i + 1]
        return done

    # -- what is there
    def block_of_number(self, number: int) -> NumberedBlock:
        """An allocated block."""
        index = self._look(self._handle, number)
        return NumberedBlock(self._pools[index], self._shared[ADDRESS], self._shared[SIZE], number)

    def packed_addresses(self, numbers: array[int], slots: array[int]) -> bytes:
        """The addresses of the blocks in some slots, packed."""
        addresses = array("q", bytes(8 * len(slots)))
        places = numbers.buffer_info()[0], slots.buffer_info()[0], len(slots), addresses.buffer_info()[0]
        self._compiled.places(self._segments, *places)
        return addresses.tobytes()

    def free_bytes_by_stream_and_size_class(self) -> dict[tuple[int, bool], int]:
        """Free bytes of the segments held, per stream and size class (small or not). [B]"""
        return {
            (pool.stream, pool.small): sum(array("q", self._free_blocks(index))[::2])
            for index, pool in self._pools.items()
        }

    def state_fingerprint(self) -> tuple[object, ...]:
        """As the reference's: equal for two states in which every later request is answered alike."""
        pools = tuple((index, self._free_blocks(index)) for index in sorted(self._pools))
        return self.reserved, self._ranges.lowest, pools

    def _free_blocks(self, index: int) -> bytes:
        """Sizes and addresses of a pool's free blocks, packed."""
        blocks = array("q", bytes(16 * self._compiled.num_free(self._segments, index)))
        self._compiled.free_blocks(self._segments, index, blocks.buffer_info()[0])
        return blocks.tobytes()
