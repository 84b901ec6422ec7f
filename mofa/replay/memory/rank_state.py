"""State that all modules share which play a rank's steps: its memory, its timeline, and what it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from mofa.replay.allocator.caching import Allocator
from mofa.replay.allocator.pools import MIN_BLOCK, SMALL_SIZE, Block, OutOfDeviceMemory
from mofa.replay.allocator.timeline import Instruction, Journal
from mofa.replay.memory.pass_state import Allocation, ChunkPass
from mofa.replay.memory.recording import Recorder
from mofa.replay.rank.description import Rank


class RankState:
    """A rank's memory on an allocator, and what its steps hold between computations.

    ``allocate_rounded`` and ``free`` are the allocator's, or those of the ``notes`` that are taken of a computation.
    ``first_failure`` is where the device was full first. ``highest`` are, per step, its peak, the first event and its
    bytes, and the event after. [B]
    """

    def __init__(self, rank: Rank, allocator: Allocator) -> None:
        self.rank, self.a = rank, allocator
        self.allocate_rounded: Callable[[int, int], Block] = allocator.allocate_rounded
        self.free: Callable[[Block], None] = allocator.free
        self.journal = Journal()
        self.notes: Recorder | None = None
        self.first_failure: tuple[int, OutOfDeviceMemory, Instruction] | None = None
        self.step = 0
        self.highest: list[tuple[int, int, int, int]] = []
        self.grads: list[Allocation] = []
        self.passes: dict[tuple[int, int], ChunkPass] = {}
        self.accumulators: dict[int, list[Allocation]] = {}
        self.gathered: Allocation | None = None
        self.fetched: dict[int, list[Allocation]] = {}
        self.unsharded: dict[int, list[list[Allocation]]] = {}
        self.begun: set[int] = set()
        """Chunks of which a backward of this step has begun."""
        self.threads: set[str] = set()
        self.turned: dict[tuple[int, int], Block] = {}
        self.input_grads: dict[tuple[int, int], Block] = {}
        self.whole_buckets: list[Allocation] = []

    def allocate(self, nbytes: int, instruction: Instruction) -> Allocation:
        """Allocate memory that belongs to no slot."""
        try:
            size = MIN_BLOCK if nbytes <= MIN_BLOCK else (nbytes + 511) & -512
            block = self.allocate_rounded(size, instruction.stream << 1 | (size <= SMALL_SIZE))
        except OutOfDeviceMemory as full:
            block = self.note_out_of_memory(full, instruction, self.journal.num_events)
        self.journal.new_instructions.append(instruction)
        self.journal.new_sizes.append(block.size)
        return block, instruction

    def note_out_of_memory(self, full: OutOfDeviceMemory, instruction: Instruction, event: int) -> Block:
        """Remember where the device was full first, and play on without end."""
        if self.first_failure is None:
            # its traceback would keep every frame, and these all that was played
            self.first_failure = (event, full.with_traceback(None), instruction)
        self.a.capacity_bytes = None
        return self.allocate_rounded(full.size, instruction.stream << 1 | (full.size <= SMALL_SIZE))

    def free_allocation(self, allocation: Allocation) -> None:
        """Free an allocation, and write that into the journal."""
        block, instruction = allocation
        self.journal.new_instructions.append(instruction)
        self.journal.new_sizes.append(-block.size)
        self.free(block)

    def free_allocations(self, allocations: Iterable[Allocation]) -> None:
        """Free allocations one after the other, as :meth:`free_allocation`."""
        for allocation in allocations:
            self.free_allocation(allocation)

    def rename_allocation(self, allocation: Allocation, instruction: Instruction) -> Allocation:
        """Give memory another name."""
        block, old = allocation
        self.journal.new_instructions += (old, instruction)
        self.journal.new_sizes += (-block.size, block.size)
        if self.notes is not None:
            self.notes.note_renamed(block)
        return block, instruction

    def num_events_and_allocated_bytes(self) -> tuple[int, int]:
        """The number of events so far and the allocated bytes, before something is done."""
        return self.journal.num_events, self.a.allocated

    @contextmanager
    def recording_into(self, notes: Recorder) -> Iterator[None]:
        """Record every allocation and free inside the context."""
        self.notes, self.allocate_rounded, self.free = notes, notes.allocate_rounded, notes.free
        try:
            yield
        finally:
            self.notes, self.allocate_rounded, self.free = None, self.a.allocate_rounded, self.a.free

    def note_peak_since(self, start: tuple[int, int]) -> None:
        """Note the peak of what was done since ``start``, if it is the step's highest."""
        peak = self.a.peak_allocated
        if peak > self.highest[-1][0]:
            self.highest[-1] = (peak, *start, self.journal.num_events)
        grown = self.journal.grown
        if not grown or grown[-1][1] != self.a.reserved:
            grown.append((start[0], self.a.reserved))
        if self.notes is not None:
            self.notes.note_reserved_read(start[0])
