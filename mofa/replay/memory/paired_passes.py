"""A forward of one micro-batch beside the backward of another: which instructions of two blocks take turns.

The host issues the parts of a layer in turns (:mod:`mofa.blocks.combined_passes`), which is what the allocator sees.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import NamedTuple

from mofa.blocks.combined_passes import ISSUED
from mofa.replay.allocator.timeline import Instruction
from mofa.replay.memory.pass_state import Slots
from mofa.replay.rank.description import RankBlock
from mofa.replay.rank.program import BlockProgram, Packed


class BlockRun(NamedTuple):
    """Something of a block that is to run, as :meth:`mofa.replay.memory.block_executor.BlockExecutor.run_block` takes
    it."""

    code: BlockProgram
    instructions: Packed
    slots: Slots
    phase: str
    rank_block: RankBlock
    number: int = 0

    @property
    def is_layer(self) -> bool:
        """Whether it is a layer, whose parts take turns with another's."""
        return bool(self.rank_block.parts[0])


def alternate_pass_parts(forward: BlockRun, backward: BlockRun) -> Iterator[BlockRun]:
    """The parts of a layer's forward and of a layer's backward, as the host issues them."""
    cut = {
        "F": _cut(forward.instructions, forward.rank_block.parts[0]),
        "B": _cut(backward.instructions, backward.rank_block.parts[1]),
    }
    for of, part in ISSUED:
        if instructions := cut[of].get(part, ()):
            yield (forward if of == "F" else backward)._replace(instructions=instructions)


def _cut(instructions: Packed, part_of: Mapping[str, str]) -> dict[str, Packed]:
    """Instructions by the part of their op; those of no op of the tape are of the part before them."""
    out: dict[str, list[tuple[Instruction, int, int, int, int]]] = {}
    part = next(iter(part_of.values()))
    for item in instructions:
        part = part_of.get(item[0].op, part)
        out.setdefault(part, []).append(item)
    return {name: tuple(items) for name, items in out.items()}


def block_runs_of_pair(forward: Iterator[BlockRun], backward: Iterator[BlockRun]) -> Iterator[BlockRun]:
    """What is to run of a forward and of a backward that run as a pair, in order.

    Layers take turns as far as both have one; ends of the model and layers that are left over run alone.
    """
    while True:
        ahead = yield from _up_to_layer(forward)
        back = yield from _up_to_layer(backward)
        if ahead is not None and back is not None:
            yield from alternate_pass_parts(ahead, back)
        elif ahead is not None or back is not None:
            yield ahead or back  # type: ignore[misc]
        else:
            return


def _up_to_layer(runs: Iterator[BlockRun]) -> Generator[BlockRun, None, BlockRun | None]:
    """Run what is ahead of the next layer, and return that; None where there is none."""
    for run in runs:
        if run.is_layer:
            return run
        yield run
    return None
