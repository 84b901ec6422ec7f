"""What a rank holds between computations, and what is played for each piece of it."""

from __future__ import annotations

from mofa.replay.allocator.pools import Block
from mofa.replay.allocator.timeline import Instruction
from mofa.replay.memory.recording import PassBlocks

Slots = list[Block | None]
Allocation = tuple[Block, Instruction]
"""A block and the act by which it came."""


class Pass:
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

    def placed(self, numbers: dict[object, int]) -> int:
        """The number of where it lies, as ``numbers`` have it: two passes with the same one hold the same addresses."""
        if self.place < 0:
            if self.recorded is not None:
                where: object = self.recorded.places
            else:
                blocks = tuple([b.address if b is not None else -1 for slots in self.slots for b in slots])
                where = blocks, self.out.address if self.out is not None else -1
            self.place = numbers.setdefault(where, len(numbers))
        return self.place

    def unfold(self) -> None:
        """Take the slots out of ``held``, to be played op by op."""
        if self.recorded is not None:
            *self.slots, (self.out,) = self.recorded.slots()
            self.recorded = None


def short_name(name: str) -> str:
    """A weight's name without its layer's."""
    return name.rsplit(" ", 1)[-1]
