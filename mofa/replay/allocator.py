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

from mofa.replay.pools import (
    ALLOCATED,
    FREE,
    MIN_BLOCK,
    ROUND_LARGE,
    SHIFT,
    SMALL_SIZE,
    UNMAPPED,
    WAITING,
    Block,
    OutOfDeviceMemory,
    Pool,
    Segment,
    page_size,
    reach,
    segment_size,
)


class Allocator:
    """The allocator of one device.

    Parameters
    ----------
    capacity
        What the device has for it: all but context, libraries and communicators; None is without end. [B]
    expandable
        ``expandable_segments:True``.
    collect_above
        ``garbage_collection_threshold``, the share of the capacity above which old free segments are given back before
        a new one is taken; 0 is off. [-]
    fraction
        Whether the capacity was set by ``set_per_process_memory_fraction``: it is then held against whole requests.
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
        self, capacity: int | None = None, *, expandable: bool = False, collect_above: float = 0.0,
        fraction: bool = False, place: Callable[[int], int] | None = None,
    ) -> None:  # fmt: skip
        self.capacity, self.expandable, self.collect_above = capacity, expandable, collect_above
        self.fraction, self.place = fraction, place
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.num_retries = self.num_segments = 0
        self._pools: dict[int, Pool] = {}
        self._next_address = ROUND_LARGE
        self._waiting: dict[int, list[Block]] = {}
        self._searches = 0

    def reset_peaks(self) -> None:
        """Peaks count from here."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    # -- requests
    def malloc(self, size: int, stream: int = 0) -> Block:
        """A block of at least ``size`` bytes for work of ``stream``.

        Raises
        ------
        OutOfDeviceMemory
            If the device has no room.
        """
        size = MIN_BLOCK if size <= MIN_BLOCK else (size + 511) & -512
        return self.take(size, stream << 1 | (size <= SMALL_SIZE))

    def take(self, size: int, index: int) -> Block:
        """The same of a rounded size from the pool of this ``index``: twice the stream, and one more where small."""
        pool = self._pools.get(index) or self.pool(index)
        self._searches += not pool.small
        keys = pool.keys
        at = bisect_left(keys, size << SHIFT - 9)
        if at == len(keys):
            block = self.grow(pool, size)
        else:
            if self.expandable:
                at = self.least_expandable(pool, at)
            free = pool.blocks[at]
            if free.size - size > pool.most_kept:  # the rest stays where it is, as the same free block
                block = self._low_end(free, size)
                pool.cut(at, free)
            else:
                block = free
                block.state = ALLOCATED
                del keys[at]
                del pool.blocks[at]
        allocated = self.allocated = self.allocated + block.size
        if allocated > self.peak_allocated:
            self.peak_allocated = allocated
        return block

    def pool(self, index: int) -> Pool:
        """The pool of an ``index``."""
        if index not in self._pools:
            self._pools[index] = Pool(index >> 1, bool(index & 1), self.expandable)
        return self._pools[index]

    @staticmethod
    def _low_end(free: Block, size: int) -> Block:
        """Cut the low end of a free block off, to be used."""
        spare = free.pool.spare
        block = spare.pop() if spare else Block(free.pool, 0, 0, FREE)
        before = free.previous
        block.address, block.size, block.state, block.previous, block.following = (
            free.address, size, ALLOCATED, before, free,
        )  # fmt: skip
        if before is not None:
            before.following = block
        free.previous = block
        free.address += size
        free.size -= size
        free.freed_at = 0
        return block

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
        self._join(block)

    def finish(self, stream: int) -> None:
        """What was freed while ``stream`` used it is not used by it any more."""
        for block in self._waiting.pop(stream, ()):
            block.events -= 1
            if not block.events:
                self._join(block)

    def empty_cache(self) -> None:
        """Give all free segments back to the device."""
        for stream in list(self._waiting):
            self.finish(stream)
        for pool in self._pools.values():
            for block in list(pool.blocks):
                if self.expandable:
                    self._unmap(block)
                elif block.previous is None and block.following is None:
                    self._return(block)

    # -- free blocks
    def _join(self, block: Block) -> Block:
        """Make a block free; its free neighbours and it become one, which is returned."""
        pool = block.pool
        before, after = block.previous, block.following
        left, right = before is not None and before.state == FREE, after is not None and after.state == FREE
        block.state = FREE
        free = block
        if left:
            assert before is not None
            free = before
            free.size += block.size
            last = after
            if right:
                assert after is not None
                pool.take(after)
                after.state = ALLOCATED
                pool.spare.append(after)
                free.size += after.size
                last = after.following
            free.following = last
            if last is not None:
                last.previous = free
        elif right:
            assert after is not None
            free = after
            free.address = block.address
            free.size += block.size
            free.previous = before
            if before is not None:
                before.following = free
        else:
            pool.put(free)
        if free is not block:
            block.state = ALLOCATED
            pool.spare.append(block)
            pool.grown(bisect_left(pool.keys, free.key), free)
        free.freed_at = self._searches
        return free

    def least_expandable(self, pool: Pool, at: int) -> int:
        """Of free blocks that fit, one that can't grow much is preferred: its size counts with the range behind it."""
        blocks = pool.blocks
        while at + 1 < len(blocks) and reach(blocks[at + 1]) < reach(blocks[at]):
            at += 1
        return at

    # -- segments
    def grow(self, pool: Pool, size: int) -> Block:
        """A block of a rounded size out of fresh memory, where no free one fits; it is not counted yet as allocated.

        Raises
        ------
        OutOfDeviceMemory
            If the device has no room.
        """
        if self.collect_above and self.capacity is not None:
            self._collect(self.collect_above * self.capacity)
        block = self._new(pool, size)
        if block is None:
            self.empty_cache()
            self.num_retries += 1
            block = self._new(pool, size)
        if block is None:
            assert self.capacity is not None
            page = page_size(pool)
            wanted = -(-size // page) * page if self.expandable else segment_size(size)
            raise OutOfDeviceMemory(size, wanted, self.allocated, self.reserved, self.capacity)
        if block.size - size <= pool.most_kept:
            block.state = ALLOCATED
            return block
        low = self._low_end(block, size)
        pool.put(block)
        return low

    def _new(self, pool: Pool, size: int) -> Block | None:
        """A block out of fresh memory, outside the lists of free blocks; None where the device has no room."""
        whole = segment_size(size)
        if self.expandable:
            if self.fraction and self.capacity is not None and self.reserved + whole > self.capacity:
                return None
            return self._extend(pool, size)
        if not self._reserve(whole):
            return None
        self.num_segments += 1
        return Block(pool, self._address(whole), whole, FREE)

    def _address(self, size: int) -> int:
        if self.place is not None:
            return self.place(size)
        address = self._next_address
        self._next_address += -(-size // ROUND_LARGE) * ROUND_LARGE
        return address

    def _reserve(self, size: int) -> bool:
        if self.capacity is not None and self.reserved + size > self.capacity:
            return False
        self.reserved += size
        if self.reserved > self.peak_reserved:
            self.peak_reserved = self.reserved
        return True

    def _return(self, block: Block) -> None:
        """Give a segment that is one free block back."""
        block.pool.take(block)
        self.reserved -= block.size
        self.num_segments -= 1

    def _collect(self, threshold: float) -> None:
        """Give back large free segments that were not used for longer than the average one, while above a share."""
        target = self.reserved - threshold
        if target <= 0:
            return
        pools = [pool for pool in self._pools.values() if not pool.small]
        whole = [b for p in pools for b in p.blocks if b.previous is None and b.following is None]
        age = float(sum(self._searches - b.freed_at for b in whole))
        reclaimed = 0
        while whole and reclaimed < target:
            mean = age / len(whole)
            old = [b for b in whole if self._searches - b.freed_at >= mean]
            if not old:
                return
            for block in old:
                reclaimed += block.size
                age -= self._searches - block.freed_at
                self._return(block)
            whole = [b for b in whole if b not in old]

    # -- expandable segments
    def _extend(self, pool: Pool, size: int) -> Block | None:
        block = self._range(pool, size)
        free = self._map(block, min(block.size, size)) if block.state == UNMAPPED else block
        while free is not None and free.size < size:
            behind = free.following
            assert behind is not None and behind.state == UNMAPPED
            free = self._map(behind, min(size - free.size, behind.size))
        if free is not None:
            pool.take(free)
        return free

    def _range(self, pool: Pool, size: int) -> Block:
        """The lowest range of addresses with room, from the free block before it on; a new one where there is none."""
        for _, unmapped in pool.unmapped:
            first = unmapped
            if first.previous is not None and first.previous.state == FREE:
                first = first.previous
            room, piece = 0, first
            while True:
                room += piece.size
                if room >= size:
                    return first
                if piece.following is None or piece.following.state not in (FREE, UNMAPPED):
                    break
                piece = piece.following
        page = page_size(pool)
        space = 1 << 40 if self.capacity is None else -(-self.capacity * 9 // 8 // page) * page
        block = Block(pool, self._address(space), space, UNMAPPED)
        insort(pool.unmapped, (block.address, block), key=lambda item: item[0])
        return block

    def _map(self, block: Block, size: int) -> Block | None:
        """Map at least the first ``size`` bytes of an unmapped range, in pages; it joins its free neighbours."""
        pool = block.pool
        page = page_size(pool)
        mapped = min(-(-size // page) * page, block.size)
        if not self._reserve(mapped):
            return None
        del pool.unmapped[bisect_left(pool.unmapped, block.address, key=lambda item: item[0])]
        if mapped < block.size:
            rest = Block(pool, block.address + mapped, block.size - mapped, UNMAPPED)
            rest.previous, rest.following = block, block.following
            if rest.following is not None:
                rest.following.previous = rest
            block.following = rest
            block.size = mapped
            insort(pool.unmapped, (rest.address, rest), key=lambda item: item[0])
        return self._join(block)

    def _unmap(self, block: Block) -> None:
        """Unmap the whole pages inside a free block."""
        pool = block.pool
        page = page_size(pool)
        start = self._base(block)
        low = start + -(-(block.address - start) // page) * page
        high = start + (block.address + block.size - start) // page * page
        if high <= low:
            return
        pool.take(block)
        if block.address < low:
            front = Block(pool, block.address, low - block.address, FREE)
            front.previous, front.following = block.previous, block
            if front.previous is not None:
                front.previous.following = front
            block.previous = front
            pool.put(front)
        if high < block.address + block.size:
            back = Block(pool, high, block.address + block.size - high, FREE)
            back.previous, back.following = block, block.following
            if back.following is not None:
                back.following.previous = back
            block.following = back
            pool.put(back)
        block.address, block.size, block.state = low, high - low, UNMAPPED
        self.reserved -= block.size
        for near in (block.previous, block.following):
            if near is not None and near.state == UNMAPPED:
                del pool.unmapped[bisect_left(pool.unmapped, near.address, key=lambda item: item[0])]
                block.size += near.size
                if near is block.previous:
                    block.address, block.previous = near.address, near.previous
                    if near.previous is not None:
                        near.previous.following = block
                else:
                    block.following = near.following
                    if near.following is not None:
                        near.following.previous = block
        insort(pool.unmapped, (block.address, block), key=lambda item: item[0])

    def _base(self, block: Block) -> int:
        while block.previous is not None:
            block = block.previous
        return block.address

    # -- what is there
    def fingerprint(self) -> tuple[object, ...]:
        """Equal for two states with the same live blocks in which every later request is answered alike: free blocks,
        unmapped ranges and what has been asked of the device."""
        return (
            self.reserved, self._next_address,
            tuple((i, tuple(p.keys), tuple(at for at, _ in p.unmapped)) for i, p in sorted(self._pools.items())),
        )  # fmt: skip

    def free_bytes(self) -> dict[tuple[int, bool], int]:
        """Free bytes of the segments held, per stream and size class (small or not). [B]"""
        return {(p.stream, p.small): sum(k >> SHIFT << 9 for k in p.keys) for p in self._pools.values()}

    def segments(self, live: Iterable[Block] = ()) -> Iterator[Segment]:
        """The segments that hold free blocks or any of the ``live`` blocks, in order of address."""
        firsts: dict[int, Block] = {}
        for block in (*live, *(b for p in self._pools.values() for b in p.blocks)):
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
