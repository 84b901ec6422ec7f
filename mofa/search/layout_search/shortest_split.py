"""The split with the shortest step: programs that make the heaviest rank lightest, then the step shortest.

The program of the step knows some of the pipeline's paths. It gives a split and a lower bound of the steps of all
splits that were not seen. The clock gives that split's own step and its longest path, which the program learns. Once
the bound passes the shortest step, no split is better. Before, a descent from what the heaviest rank and the heaviest
chunks allow finds a step that is hard to beat.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from mofa.search.layout_search.layer_moves import MOST_TRIED, LayerMoves
from mofa.search.layout_search.layout_program import LayoutIntegerProgram, LayoutProgramSolution
from mofa.search.layout_search.split_problem import ChunkLayers, FloatA, LayerSplitProblem
from mofa.specs.shared_facts import load_shared_facts

MOST_PROGRAMS = 40
"""Programs of the step that are solved at most. [-]"""
WORK = 0.2
"""Of the solver in all, in its deterministic seconds, of which each takes some of a core's. [s]"""
PROGRAM_WORK = 0.05
"""The most of it for one program. [s]"""
CLOSE_ENOUGH = 0.005
"""Share of a step by which the solver may leave the pipelines of a search's plans above their bound: closed forms are
no closer to replays (docs/factors.md, what it does not say). [-]"""
OverBytes = Callable[[ChunkLayers], FloatA]
"""By how much each rank of a split passes its memory; negative where it fits. (pp,) [B]"""


@dataclass(frozen=True)
class ShortestSplit:
    """Splits that fit, the shortest step first, and a lower bound of all that fit.

    ``steps_s`` are the pipelines' own: computations and hand-overs. [s]
    """

    splits: tuple[ChunkLayers, ...]
    steps_s: tuple[float, ...]
    bound_s: float
    work: float = field(compare=False)
    """Of the solver, in its deterministic seconds, whose last bit may differ between two runs. [s]"""
    num_tried: int = 0
    """Chunks of the splits that moves of one layer led to. [-]"""

    @property
    def gap_fraction(self) -> float:
        """By how much the shortest step passes the bound, as a share of it. [-]"""
        return max(1.0 - self.bound_s / self.steps_s[0], 0.0) if self.splits else 0.0


class _Search:
    """What is known of the splits of a problem, and what the solver has spent."""

    def __init__(
        self, moves: LayerMoves, start: ChunkLayers, over: OverBytes, over_limit: float, most_tried: int
    ) -> None:
        self.problem, self.moves = moves.problem, moves
        self.start, self.over, self.over_limit, self.most_tried = start, over, over_limit, most_tried
        self.steps_s: dict[ChunkLayers, float] = {}
        """Of splits that fit; infinite of others. [s]"""
        self.refused: list[tuple[int, ChunkLayers]] = []
        """Ranks that do not fit, and with which splits."""
        self.bound_s, self.spent, self.num_tried = 0.0, 0.0, 0

    def descend(self, split: ChunkLayers) -> ChunkLayers:
        """The split that moves of one layer lead to, counted."""
        split, tried = self.moves.improved_split_and_num_tried(split, self.most_tried)
        self.num_tried += tried
        return split

    def learn(self, split: ChunkLayers, program: LayoutIntegerProgram | None = None) -> bool:
        """Find out whether a split fits and what its step is; whether it was new."""
        if split in self.steps_s:
            return False
        lacking = [(rank, split) for rank in np.flatnonzero(self.over(split) > 0).tolist()]
        self.refused += lacking
        if program is not None:
            for refusal in lacking:
                program.forbid_rank_contents(*refusal)
        self.steps_s[split] = math.inf if lacking else self.problem.pipeline_step_s(split)
        return True

    @property
    def best(self) -> ChunkLayers:
        """The split with the shortest step that fits; where none does, the one to begin with."""
        best = min(self.steps_s, key=lambda split: (self.steps_s[split], split.layers))
        return best if self.steps_s[best] < math.inf else self.start

    def program(self) -> LayoutIntegerProgram:
        """A program that knows what was refused."""
        program = LayoutIntegerProgram(
            self.problem, 2.0 * self.problem.pipeline_step_s(self.best), over_limit=self.over_limit
        )
        for refusal in self.refused:
            program.forbid_rank_contents(*refusal)
        return program

    def lightest_ranks(self, seed: int, work: float) -> LayoutProgramSolution | None:
        """A split whose heaviest rank is lightest, which bounds the steps of all."""
        heaviest, took = self.program().solve("heaviest rank", self.best, seed, work)
        self.spent += took
        if heaviest is not None:
            self.bound_s = heaviest.bound_s * self.problem.schedule_clock.num_micro_batches
        return heaviest

    def balance(self, heaviest: LayoutProgramSolution, seed: int, work: float) -> None:
        """Make the heaviest chunks that take turns lightest, no rank heavier than the heaviest has to be, and descend
        from there."""
        program = self.program()
        program.add_upper_bound("heaviest rank", heaviest.value_s)
        even, took = program.solve("heaviest chunks", heaviest.split, seed, work)
        self.spent += took
        for solution in (heaviest, even):
            if solution is not None:
                self.learn(self.descend(solution.split))

    def close(self, seed: int, work: float, gap_fraction: float) -> None:
        """Solve programs of the step of splits whose step is not known, until their bound passes the best one's, or is
        as close to it as asked for."""
        program = self.program()
        for path in self.problem.schedule_clock.paths_along_ranks():
            program.add_path_constraint(path)
        for split in self.steps_s:
            self._teach(program, split)
        for _ in range(MOST_PROGRAMS):
            shortest_s = self.steps_s[self.best]
            if shortest_s * (1.0 - gap_fraction) <= self.bound_s or self.spent >= work:
                break
            solution, took = program.solve("step", self.best, seed, min(PROGRAM_WORK, work - self.spent))
            self.spent += took
            if solution is None:
                self.bound_s = shortest_s if program.is_exhausted else self.bound_s
                break
            self.bound_s = max(self.bound_s, solution.bound_s)
            for split in dict.fromkeys((solution.split, self.descend(solution.split))):
                if self.learn(split, program):
                    self._teach(program, split)

    def _teach(self, program: LayoutIntegerProgram, split: ChunkLayers) -> None:
        """Let a program know the longest paths of a split, and leave that out from now on."""
        for path in self.problem.schedule_clock.candidate_longest_paths(self.problem.computation_seconds([split])[0]):
            program.add_path_constraint(path)
        program.exclude_split(split)


def shortest_split(
    problem: LayerSplitProblem, start: ChunkLayers, *, over_bytes: OverBytes | None = None, work: float = WORK,
    seed: int = 0, also: ChunkLayers | None = None, closes: bool = True, most_tried: int = MOST_TRIED,
    moves: LayerMoves | None = None, beaten_from_s: float = math.inf,
    gap_fraction: float = 0.0,
) -> ShortestSplit:  # fmt: skip
    """Search for the split with the shortest step.

    Parameters
    ----------
    start
        Where to begin; it need not fit.
    over_bytes
        Memory as it really is; the problem's own, linear in layers, where absent.
    work, seed
        Limit of the solver's deterministic seconds, and its seed. [s]
    also
        Another split to begin with, such as that of an earlier search.
    closes
        Whether programs of the step are solved, behind those that make the heaviest rank lightest.
    most_tried
        Chunks that one descent by moves of a layer tries at most. [-]
    moves
        The moves of a layer of this problem that an earlier search knows.
    beaten_from_s
        Steps from this on are of no use: where the heaviest rank leaves no shorter one, the search ends with what it
        began with. [s]
    gap_fraction
        By how much the shortest step may pass its bound where the search ends, as a share of it. [-]

    Returns
    -------
    ShortestSplit
        What fits, and the bound.

    Notes
    -----
    Where ``over_bytes`` says that a rank of a split does not fit, the program learns that this rank must have less in
    one of its chunks: more layers are taken to need more memory.
    """
    linear = over_bytes or (lambda split: problem.bytes_by_rank([split])[0] - problem.limit_bytes)
    tolerance = load_shared_facts().tolerances.linear_memory.value
    search = _Search(
        moves or LayerMoves(problem), start, linear, tolerance if over_bytes is not None else 0.0, most_tried
    )
    begun = (start,) if also is None else (start, also)
    for split in begun:
        search.learn(split)
    heaviest = search.lightest_ranks(seed, 0.125 * work)
    if search.bound_s < beaten_from_s:
        for split in begun:
            search.learn(search.descend(split))
        if heaviest is not None:
            search.balance(heaviest, seed, 0.125 * work)
        if closes:
            search.close(seed, work, gap_fraction)
    fitting = sorted(
        (each for each in search.steps_s.items() if each[1] < math.inf), key=lambda each: (each[1], each[0].layers)
    )
    bound_s = min(search.bound_s, fitting[0][1]) if fitting else 0.0
    return ShortestSplit(
        tuple(split for split, _ in fitting), tuple(step_s for _, step_s in fitting), bound_s, search.spent,
        search.num_tried,
    )  # fmt: skip
