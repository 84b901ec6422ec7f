"""Which tapes a rank runs for each computation, with what data parallelism adds to some of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from mofa.blocks.build import BlockTapes
from mofa.blocks.roles import WEIGHT_ROLES, Role
from mofa.cost.block.durations import time_works
from mofa.cost.rows import Rows
from mofa.replay.time.kernel_runs import CrossStreamTensors, Draft, Score, Step, draft, score, value

Phase = Literal["F", "B", "I", "W"]
_BEFORE_REDUCTION: tuple[Role, ...] = ("wgrad", "accumulate", "backward", "grad_cast")
"""Roles of the ops behind which a weight's gradient may be reduced."""


class Placed(NamedTuple):
    """A weight's op: its lines in the forward and in the backward, where its gradient is made. [params]"""

    forward: int
    backward: int
    params: float
    expert: bool


@dataclass
class Book:
    """The scores of a plan's tapes: forward, backward, and the backward by inputs and by weights."""

    drafts: dict[tuple[str, Phase], Draft]
    cross_stream: CrossStreamTensors
    scores: dict[tuple[str, Phase], Score] = field(default_factory=dict)
    weights: dict[str, tuple[Placed, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Rows) -> Book:
        """Read every tape of a plan once."""
        tapes = (tape for block in rows.costs.tapes.values() for tape in (block.forward, block.backward))
        time_works((op for tape in tapes for op in tape.ops), rows.costs.machine)  # in one go
        drafts: dict[tuple[str, Phase], Draft] = {}
        for label, block in rows.costs.tapes.items():
            drafts[label, "F"] = draft(f"forward of {label}", block.forward, rows.costs.machine)
            drafts[label, "B"] = backward = draft(f"backward of {label}", block.backward, rows.costs.machine)
            if rows.schedule_record.defers_weight_gradients:
                drafts[label, "I"], drafts[label, "W"] = _halves(backward, block, rows)
        return cls(drafts, CrossStreamTensors.of(drafts.values()))

    def score(self, label: str, phase: Phase, inserted: dict[int, list[Step]] | None = None) -> Score:
        """The score of a tape; with steps inserted behind some of its lines it is made anew."""
        if inserted:
            return score(self.drafts[label, phase], self.cross_stream, inserted)
        if (label, phase) not in self.scores:
            self.scores[label, phase] = score(self.drafts[label, phase], self.cross_stream)
        return self.scores[label, phase]

    def placed(self, label: str) -> tuple[Placed, ...]:
        """The weights of a tape, in the order of its forward."""
        if label not in self.weights:
            lines = self.drafts[label, "B"].lines
            made = {(line.op.origin, line.op.role): n for n, line in enumerate(lines) if line.op}
            weights = []
            for n, line in enumerate(self.drafts[label, "F"].lines):
                if line.op is None or not (params := value(line.op.weight_params)):
                    continue
                name = line.op.name
                made_at = max(
                    (made[name, role] for role in _BEFORE_REDUCTION if (name, role) in made), default=len(lines) - 1
                )
                weights.append(Placed(n, made_at, params, line.op.part == "experts"))
            self.weights[label] = tuple(weights)
        return self.weights[label]


def _halves(backward: Draft, block: BlockTapes, rows: Rows) -> tuple[Draft, Draft]:
    """A backward by inputs and by weights, of the whole one's lines but for what checkpoints make again."""
    by_weights = [line.op is not None and line.op.role in WEIGHT_ROLES for line in backward.lines]
    halves = [
        tuple(line for line, of in zip(backward.lines, by_weights, strict=True) if of is by) for by in (False, True)
    ]
    weights = draft("", block.split_backward.weights, rows.costs.machine).lines
    return (
        Draft(f"{backward.name} by inputs", halves[0], backward.given, backward.out),
        Draft(f"{backward.name} by weights", weights, "", backward.out),
    )
