"""What the executors of a plan's ranks share: blocks' programs, and computations that one of them has recorded."""

from __future__ import annotations

from mofa.cost.allocations.allocation_trace import Life
from mofa.replay.memory.recording import Routine
from mofa.replay.rank.description import Rank
from mofa.replay.rank.program import Script, script

Which = tuple[str, int, bool]
"""A kind of computation, its chunk, and whether it retains any (:mod:`mofa.replay.memory.dispatcher_retention`)."""


class Repertoire:
    """Of one plan and kind of allocator: ranks that hold equal lives do the same in a computation, whatever they own
    of the optimizer, and in steps of however many micro-batches."""

    def __init__(self) -> None:
        self._scripts: dict[int, tuple[Life, Script]] = {}  # lives stay, so that their ids do
        self._routines: dict[object, tuple[tuple[str, ...], Routine]] = {}

    def script(self, life: Life) -> Script:
        """A block's."""
        if id(life) not in self._scripts:
            self._scripts[id(life)] = life, script(life)
        return self._scripts[id(life)][1]

    def scripts(self, rank: Rank) -> list[list[Script]]:
        """Those of a rank's pieces, per chunk."""
        return [[self.script(piece.life) for piece in chunk] for chunk in rank.chunks]

    def keep(self, routine: Routine, rank: Rank, which: Which) -> None:
        """A computation that can be repeated."""
        names = tuple(piece.name for piece in rank.chunks[which[1]])
        self._routines[self._key(rank, which)] = names, routine

    def knows(self, rank: Rank, which: Which) -> bool:
        """Whether a computation was noted down, of whichever rank."""
        return self._key(rank, which) in self._routines

    def routine(self, rank: Rank, which: Which) -> Routine:
        """It, of this rank's pieces."""
        c = which[1]
        names, routine = self._routines[self._key(rank, which)]
        mine = (piece.name for piece in rank.chunks[c])
        return routine.of(dict(zip(names, mine, strict=True)))

    @staticmethod
    def _key(rank: Rank, which: Which) -> object:
        """Equal for computations that do the same behind the first of their kind."""
        kind, c, lingers = which
        ends = rank.receives[c], rank.sends[c], rank.turns[c], c in rank.first_chunks
        return kind, lingers, ends, *(id(piece.life) for piece in rank.chunks[c])
