"""What a rank holds of a forward until its backward."""

from __future__ import annotations

from mofa.replay.allocator.pools import Block
from mofa.replay.allocator.timeline import Instruction
from mofa.replay.memory.recording import PassBlocks

Slots = list[Block | None]
Allocation = tuple[Block, Instruction]
"""A block of memory, and the instruction that allocated it."""


class ChunkPass:
    """A chunk's forward of one micro-batch that waits for its backward: the slots of its pieces, and its output.

    Where it is played from notes, ``recorded`` has them instead (:mod:`mofa.replay.memory.recording`). ``place`` is the
    number of where they lie, -1 as long as none was asked for.
    """

    __slots__ = ("out", "place", "recorded", "slots")

    def __init__(self) -> None:
        self.slots: list[Slots] = []
        self.out: Block | None = None
        self.recorded: PassBlocks | None = None
        self.place = -1

    def identity_number_of_addresses(self, numbers: dict[object, int]) -> int:
        """A number for the addresses that the pass holds: equal for two passes that hold the same."""
        if self.place < 0:
            if self.recorded is not None:
                where: object = self.recorded.block_addresses
            else:
                blocks = tuple([b.address if b is not None else -1 for slots in self.slots for b in slots])
                where = blocks, self.out.address if self.out is not None else -1
            self.place = numbers.setdefault(where, len(numbers))
        return self.place

    def restore_slots(self) -> None:
        """Put the recorded blocks back into slots, so that the pass can be played op by op."""
        if self.recorded is not None:
            *self.slots, (self.out,) = self.recorded.slots_of_each_piece()
            self.recorded = None


def weight_name_in_layer(name: str) -> str:
    """A weight's name without its layer's."""
    return name.rsplit(" ", 1)[-1]
