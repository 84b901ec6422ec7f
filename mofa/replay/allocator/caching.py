"""PyTorch's CUDA caching allocator: which segments it takes from the device, and how it cuts and keeps them.

Follows ``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch 2.11. A request is rounded to 512 B. Up to 1 MiB it comes from
the small pool, whose segments are 2 MiB, else from the large one: segments of 20 MiB for requests under 10 MiB, and
of the request rounded to 2 MiB above. The smallest free block that fits is taken, the lowest among equals, from its
low end; what is left becomes a free block where it is at least 512 B (small) or more than 1 MiB (large). Neighbours
within a segment are joined when they are free. Every stream has pools of its own. With expandable segments a pool is
one range of addresses per stream, mapped in pages of 2 MiB (small) or 20 MiB (large), and every rest of 512 B is split
off. When the device has no room, all free segments are given back and the request is tried once more.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf

from mofa.cost.memory.address_ranges import AddressRanges
from mofa.replay.allocator.expandable_segments import extend_free_block, least_expandable_block, unmap_free_pages
from mofa.replay.allocator.pools import (
    ALLOCATED,
    FREE,
    MANY,
    MIN_BLOCK,
    SMALL_SIZE,
    UNMAPPED,
    WAITING,
    Block,
    BlockPool,
    BlockSlots,
    Order,
    OutOfDeviceMemory,
    Request,
    ReservedLimitPassed,
    Segment,
    address_of,
    page_size,
    segment_size,
)

HIGHEST = 1 << 47
"""Segments lie below, as of addresses that a process has. [B]"""


class Allocator:
    """The allocator of one device.

    Parameters
    ----------
    capacity_bytes
        What the device has for it: all but context, libraries and communicators; None is without end. [B]
    expandable
        ``expandable_segments:True``.
    collect_above
        ``garbage_collection_threshold``, the share of the capacity above which old free segments are given back before
        a new one is taken; 0 is off. [-]
    fraction
        Whether the capacity was set by ``set_per_process_memory_fraction``: it is then held against whole requests.
    limit
        Reserved memory above which :class:`~mofa.replay.allocator.pools.ReservedLimitPassed` is raised; no request is
        refused for it. [B]
    place
        Says where the device puts a segment of so many bytes; in rising order where absent. Among free blocks of equal
        size the lowest is taken, so that a recorded sequence is answered exactly only with the recorded addresses.

    Examples
    --------
    >>> a = Allocator()
    >>> x, y = a.malloc(3 << 20), a.malloc(3 << 20)
    >>> a.allocated >> 20, a.reserved >> 20
    (6, 20)
    >>> a.free(x); a.free(y); a.empty_cache()
    >>> a.reserved
    0
    """

    def __init__(
        self, capacity_bytes: int | None = None, *, expandable: bool = False, collect_above: float = 0.0,
        fraction: bool = False, limit: float = inf, place: Callable[[int], int] | None = None,
    ) -> None:  # fmt: skip
        self.capacity_bytes, self.expandable, self.collect_above = capacity_bytes, expandable, collect_above
        self.fraction, self.limit, self.place = fraction, limit, place
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.num_retries = self.num_segments = 0
        self._pools: dict[int, BlockPool] = {}
        self._ranges = AddressRanges(HIGHEST)
        self._waiting: dict[int, list[Block]] = {}
        self._searches = 0

    # -- requests
    def malloc(self, size: int, stream: int = 0) -> Block:
        """A block of at least ``size`` bytes for work of ``stream``.

        Raises
        ------
        OutOfDeviceMemory
            If the device has no room.
        """
        size = MIN_BLOCK if size <= MIN_BLOCK else (size + 511) & -512
        return self.allocate_rounded(size, stream << 1 | (size <= SMALL_SIZE))

    def allocate_rounded(self, size: int, index: int) -> Block:
        """The same of a rounded size from the pool of this ``index``: twice the stream, and one more where small.

        Most of a replay is here and in :meth:`free_and_merge`: so what a pool's methods do is written out.
        """
        pool = self._pools.get(index) or self.pool_of_index(index)
        self._searches += not pool.small
        first = bisect_left(pool.sizes, size)
        lists = pool.lists
        try:
            while not lists[first]:
                first += 1
        except IndexError:
            block = self.block_of_fresh_memory(pool, size)
        else:
            if self.expandable:
                block = least_expandable_block(pool, first)
                pool.remove(block)
            else:
                block = lists[first].pop(0)
        rest = block.size - size
        if rest > pool.most_kept:
            free = block  # the rest stays where it is, as the same free block
            block = pool.spare.pop() if pool.spare else Block(pool, 0, 0, ALLOCATED)
            address = block.address = free.address
            block.size = size
            before = block.previous = free.previous
            block.following = free
            if before is not None:
                before.following = block
            free.previous = block
            address = free.address = address + size
            free.size = rest
            free.freed_at = 0
            blocks = pool.bins.get(rest)
            if blocks is None:
                blocks = pool.open_bin(rest)
            if blocks and blocks[-1].address > address:
                insort(blocks, free, key=address_of)
            else:
                blocks.append(free)
        else:
            block.state = ALLOCATED
            size = block.size
        allocated = self.allocated = self.allocated + size
        if allocated > self.peak_allocated:
            self.peak_allocated = allocated
        return block

    def pool_of_index(self, index: int) -> BlockPool:
        """The pool of an ``index``."""
        if index not in self._pools:
            self._pools[index] = BlockPool(index >> 1, bool(index & 1), self.expandable)
        return self._pools[index]

    def prepare_requests(self, orders: Sequence[Order]) -> tuple[Request, ...] | bytes:
        """Requests that will be made again and again, in the form in which they are answered."""
        pools = {index: self.pool_of_index(index) for index in {order[2] for order in orders}}
        return tuple(
            (size, slot, pools[index].bin_of_size(size) if size > 0 and not self.expandable else [], pools[index])
            for size, slot, index in orders
        )

    def new_block_slots(self) -> BlockSlots:
        """Where the blocks of such requests will be."""
        return []

    def stop_keeping_empty_bins(self) -> None:
        """Nothing is repeated from notes any more: no bin has to stay when it is empty."""
        for pool in self._pools.values():
            pool.pinned_sizes.clear()

    def free(self, block: Block, streams: Sequence[int] = ()) -> None:
        """Give a block back; it can be used again once other ``streams`` that use it have finished."""
        assert block.state == ALLOCATED, "freed twice"
        self.allocated -= block.size
        if streams:
            for stream in streams:
                if stream != block.pool.stream:
                    self._waiting.setdefault(stream, []).append(block)
                    block.events += 1
            if block.events:
                block.state = WAITING
                return
        self.free_and_merge(block)

    def release_from_stream(self, stream: int) -> None:
        """What was freed while ``stream`` used it is not used by it any more."""
        for block in self._waiting.pop(stream, ()):
            block.events -= 1
            if not block.events:
                self.free_and_merge(block)

    def empty_cache(self) -> None:
        """Give all free segments back to the device."""
        for stream in list(self._waiting):
            self.release_from_stream(stream)
        for pool in self._pools.values():
            for block in list(pool.free_blocks_in_order()):
                if self.expandable:
                    unmap_free_pages(self, block)
                elif block.previous is None and block.following is None:
                    self._return(block)

    # -- free blocks
    def free_and_merge(self, block: Block) -> Block:
        """Make a block free; its free neighbours and it become one, which is returned."""
        pool, size = block.pool, block.size
        bins = pool.bins
        before, after = block.previous, block.following
        if after is not None and not after.state:
            blocks = bins[after.size]
            if len(blocks) < MANY:
                blocks.remove(after)
            else:
                del blocks[bisect_left(blocks, after.address, key=address_of)]
            after.state = ALLOCATED
            pool.spare.append(after)
            size += after.size
            after = block.following = after.following
            if after is not None:
                after.previous = block
        if before is not None and not before.state:
            blocks = bins[before.size]
            if len(blocks) < MANY:
                blocks.remove(before)
            else:
                del blocks[bisect_left(blocks, before.address, key=address_of)]
            size += before.size
            block.state = ALLOCATED
            pool.spare.append(block)
            block = before
            block.following = after
            if after is not None:
                after.previous = block
        block.size = size
        block.state = FREE
        block.freed_at = self._searches
        known = bins.get(size)
        if known is None:
            known = pool.open_bin(size)
        if known and known[-1].address > block.address:
            insort(known, block, key=address_of)
        else:
            known.append(block)
        return block

    # -- segments
    def block_of_fresh_memory(self, pool: BlockPool, size: int) -> Block:
        """A block of a rounded size or larger out of fresh memory, where no free one fits; it is to be cut.

        Raises
        ------
        OutOfDeviceMemory
            If the device has no room.
        """
        if self.collect_above and self.capacity_bytes is not None:
            self._collect(self.collect_above * self.capacity_bytes)
        block = self._new(pool, size)
        if block is None:
            self.empty_cache()
            self.num_retries += 1
            block = self._new(pool, size)
        if block is None:
            assert self.capacity_bytes is not None
            page = page_size(pool)
            wanted = -(-size // page) * page if self.expandable else segment_size(size)
            raise OutOfDeviceMemory(size, wanted, self.allocated, self.reserved, self.capacity_bytes)
        return block

    def _new(self, pool: BlockPool, size: int) -> Block | None:
        """A block out of fresh memory, outside the lists of free blocks; None where the device has no room."""
        segment_bytes = segment_size(size)
        if self.expandable:
            if (
                self.fraction
                and self.capacity_bytes is not None
                and self.reserved + segment_bytes > self.capacity_bytes
            ):
                return None
            return extend_free_block(self, pool, size)
        if not self.try_reserve(segment_bytes):
            return None
        self.num_segments += 1
        return Block(pool, self.address_for_new_segment(segment_bytes), segment_bytes, FREE)

    def address_for_new_segment(self, size: int) -> int:
        """Where the device puts a new segment. [B]"""
        return self._ranges.place_segment(size) if self.place is None else self.place(size)

    def try_reserve(self, size: int) -> bool:
        """Ask the device for so many bytes; whether it has them.

        Raises
        ------
        ReservedLimitPassed
            If that is more than the limit.
        """
        if self.capacity_bytes is not None and self.reserved + size > self.capacity_bytes:
            return False
        self.reserved += size
        if self.reserved > self.peak_reserved:
            self.peak_reserved = self.reserved
        if self.reserved > self.limit:
            raise ReservedLimitPassed(self.reserved)
        return True

    def _return(self, block: Block) -> None:
        """Give a segment that is one free block back."""
        block.pool.remove(block)
        self.reserved -= block.size
        self.num_segments -= 1

    def _collect(self, threshold: float) -> None:
        """Give back large free segments that were not used for longer than the average one, while above a share."""
        target = self.reserved - threshold
        if target <= 0:
            return
        pools = [pool for pool in self._pools.values() if not pool.small]
        free_segments = [
            b for p in pools for b in p.free_blocks_in_order() if b.previous is None and b.following is None
        ]
        age = float(sum(self._searches - b.freed_at for b in free_segments))
        reclaimed = 0
        while free_segments and reclaimed < target:
            mean = age / len(free_segments)
            old = [b for b in free_segments if self._searches - b.freed_at >= mean]
            if not old:
                return
            for block in old:
                reclaimed += block.size
                age -= self._searches - block.freed_at
                self._return(block)
            free_segments = [b for b in free_segments if b not in old]

    # -- what is there
    def state_fingerprint(self) -> tuple[object, ...]:
        """Equal for two states with the same live blocks in which every later request is answered alike: free blocks,
        unmapped ranges and what has been asked of the device."""
        return (
            self.reserved, self._ranges.lowest,
            tuple(
                (i, *((size, *map(address_of, free)) for size, free in zip(p.sizes, p.lists, strict=True) if free),
                 tuple(address for address, _ in p.unmapped))
                for i, p in sorted(self._pools.items())
            ),
        )  # fmt: skip

    def free_bytes_by_stream_and_size_class(self) -> dict[tuple[int, bool], int]:
        """Free bytes of the segments held, per stream and size class (small or not). [B]"""
        return {
            (p.stream, p.small): sum(size * len(blocks) for size, blocks in p.bins.items())
            for p in self._pools.values()
        }

    def segments_with_free_or_live_blocks(self, live: Iterable[Block] = ()) -> Iterator[Segment]:
        """The segments that hold free blocks or any of the ``live`` blocks, in order of address."""
        firsts: dict[int, Block] = {}
        for block in (*live, *(b for p in self._pools.values() for b in p.free_blocks_in_order())):
            while block.previous is not None:
                block = block.previous
            firsts[block.address] = block
        for address in sorted(firsts):
            pieces: list[tuple[int, int, int]] = []
            piece: Block | None = firsts[address]
            pool = firsts[address].pool
            while piece is not None:
                pieces.append((piece.address, piece.size, piece.state))
                piece = piece.following
            size = sum(size for _, size, state in pieces if state != UNMAPPED)
            yield Segment(pool.stream, pool.small, address, size, tuple(pieces))
