"""What the executors of a plan's ranks share: blocks' programs, and computations that one of them has recorded."""

from __future__ import annotations

from mofa.cost.allocations.block_trace import BlockTrace
from mofa.replay.memory.recording import Recording
from mofa.replay.rank.description import Rank
from mofa.replay.rank.program import BlockProgram, program_of_trace

Which = tuple[str, int, bool, tuple[bool, ...], bool]
"""A kind of computation, its chunk, whether it retains any (:mod:`mofa.replay.memory.dispatcher_retention`), and what
there is of a received input (:mod:`mofa.replay.memory.received_inputs`); and whether what rings send comes back late
(:mod:`mofa.replay.memory.stage_outputs`)."""


class SharedRecordings:
    """Recordings of one plan and one kind of allocator.

    Ranks that hold equal blocks do the same in a computation. What they own of the optimizer does not matter, nor how
    many micro-batches a step has.
    """

    def __init__(self) -> None:
        self._programs: dict[
            int, tuple[BlockTrace, BlockProgram]
        ] = {}  # traces are kept, so that no other object gets their id
        self._recordings: dict[object, tuple[tuple[str, ...], Recording]] = {}

    def block_program(self, trace: BlockTrace) -> BlockProgram:
        """The program of a block's trace, made once."""
        if id(trace) not in self._programs:
            self._programs[id(trace)] = trace, program_of_trace(trace)
        return self._programs[id(trace)][1]

    def block_programs_by_chunk(self, rank: Rank) -> list[list[BlockProgram]]:
        """The programs of a rank's blocks, per chunk."""
        return [[self.block_program(rank_block.trace) for rank_block in chunk] for chunk in rank.chunks]

    def add_recording(self, recording: Recording, rank: Rank, which: Which) -> None:
        """Remember a computation that can be repeated."""
        names = tuple(rank_block.name for rank_block in rank.chunks[which[1]])
        self._recordings[self._key(rank, which)] = names, recording

    def has_recording(self, rank: Rank, which: Which) -> bool:
        """Whether the computation was recorded, on whichever rank."""
        return self._key(rank, which) in self._recordings

    def recording(self, rank: Rank, which: Which) -> Recording:
        """The recorded computation, under the names of this rank's blocks."""
        c = which[1]
        names, recording = self._recordings[self._key(rank, which)]
        own_names = (rank_block.name for rank_block in rank.chunks[c])
        return recording.with_names(dict(zip(names, own_names, strict=True)))

    @staticmethod
    def _key(rank: Rank, which: Which) -> object:
        """Equal for computations that do the same behind the first of their kind."""
        kind, c, *finds = which
        ends = rank.receives[c], rank.sends[c], rank.feeds_own_chunk[c], c in rank.first_chunks
        return kind, *finds, ends, *(id(rank_block.trace) for rank_block in rank.chunks[c])
