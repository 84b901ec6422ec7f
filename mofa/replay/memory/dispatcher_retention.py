"""What lingers of recomputed layers of experts from their backward until their dispatchers are renewed.

It belongs to a chunk, not to one of its passes: the next forward of the chunk lets it go, or the next backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from mofa.replay.allocator.pools import Block
from mofa.replay.memory.pass_state import Allocation, Slots
from mofa.replay.memory.recording import RetainedBlock
from mofa.replay.rank.program import BlockProgram

BLOCKS = 10_000
"""Numbers of a chunk's blocks: that of the n-th of chunk c is ``c * BLOCKS + n``."""


class DispatcherRetention:
    """Blocks by the number of the layer that they linger of; ``programs`` gives those of all chunks."""

    def __init__(self, programs: Callable[[], Sequence[Sequence[BlockProgram]]]) -> None:
        self._programs = programs
        self._allocations: dict[int, list[Allocation]] = {}

    @cached_property
    def retaining_layers(self) -> list[list[tuple[int, BlockProgram]]]:
        """The layers of each chunk whose dispatchers may retain tensors, with their numbers."""
        return [
            [(c * BLOCKS + n, code) for n, code in enumerate(codes) if code.retained_by_dispatcher]
            for c, codes in enumerate(self._programs())
        ]

    @cached_property
    def may_retain(self) -> bool:
        """Whether any dispatcher of the rank may retain tensors."""
        return any(self.retaining_layers)

    def retain_from_pass(self, index: int, code: BlockProgram, slots: Slots) -> None:
        """Move what the dispatcher retains out of the pass, whose layer's backward is through."""
        left: list[Allocation] = []
        for instruction, _ in code.retained_by_dispatcher:
            block, slots[instruction.slot] = slots[instruction.slot], None
            assert block is not None, instruction
            left.append((block, instruction))
        self._allocations[index] = left

    def release_retained_of_layer(self, index: int) -> list[Allocation]:
        """Give up and return what a layer's dispatcher retained."""
        return self._allocations.pop(index, [])

    def chunk_retains_tensors(self, chunk: int) -> bool:
        """Whether a chunk's dispatchers retain tensors: between computations all of them do, or none."""
        return any(index in self._allocations for index, _ in self.retaining_layers[chunk][:1])

    def retained_blocks(self, chunk: int) -> list[RetainedBlock]:
        """The retained blocks of a chunk, None where there is none now; always as many, in one order."""
        out: list[RetainedBlock] = []
        for index, code in self.retaining_layers[chunk]:
            allocations = self._allocations.get(index)
            blocks = [block for block, _ in allocations] if allocations else [None] * len(code.retained_by_dispatcher)
            out += [(block, size) for block, (_, size) in zip(blocks, code.retained_by_dispatcher, strict=True)]
        return out

    def present_blocks(self, chunk: int) -> list[Block]:
        """The retained blocks of a chunk that are there, in the same order."""
        return [block for block, _ in self.retained_blocks(chunk) if block is not None]

    def replace_retained_blocks(self, chunk: int, blocks: Sequence[Block]) -> None:
        """Put the retained blocks of a chunk in place: none, or those of every layer, in the same order."""
        rest = iter(blocks)
        for index, code in self.retaining_layers[chunk]:
            self._allocations.pop(index, None)
            if blocks:
                self._allocations[index] = [(next(rest), instruction) for instruction, _ in code.retained_by_dispatcher]

    def retained_addresses(self) -> tuple[tuple[int, ...], ...]:
        """The addresses of all retained blocks: equal for states from which all goes alike."""
        if not self._allocations:
            return ()
        return tuple([
            (index, *[block.address for block, _ in allocations])
            for index, allocations in sorted(self._allocations.items())
        ])  # fmt: skip
