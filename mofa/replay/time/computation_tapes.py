"""Which tapes a rank runs for each computation, with what data parallelism adds to some of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from mofa.blocks.build import BlockTapes
from mofa.blocks.combined_passes import combined_tape
from mofa.blocks.roles import WEIGHT_ROLES, Role
from mofa.blocks.tapes import layer_label
from mofa.cost.block.durations import device_seconds_of_works
from mofa.cost.rows import GatheredRows
from mofa.replay.time.kernel_runs import (
    CrossStreamTensors,
    ResolvedTape,
    Step,
    TapeSteps,
    join_kernels_to_steps,
    only_entry,
    resolve_tape,
)

Phase = Literal["F", "B", "I", "W", "FB"]
"""What of a block runs: its forward, its backward, that by inputs or by weights, or its forward beside the backward of
another."""
_BEFORE_REDUCTION: tuple[Role, ...] = ("wgrad", "accumulate", "backward", "grad_cast")
"""Roles of the ops behind which a weight's gradient may be reduced."""


class WeightOpLines(NamedTuple):
    """A weight's op: its lines in the forward and in the backward, where its gradient is made. [params]"""

    forward: int
    backward: int
    params: float
    expert: bool


@dataclass
class PlanTapes:
    """The steps of a plan's tapes: forward, backward, and the backward by inputs and by weights."""

    resolved: dict[tuple[str, Phase], ResolvedTape]
    cross_stream: CrossStreamTensors
    gathers_embedding_again: bool
    """Whether FSDP gathers the embedding for its backward: not as the root's, which stays gathered."""
    steps: dict[tuple[str, Phase, str], TapeSteps] = field(default_factory=dict)
    weights: dict[str, tuple[WeightOpLines, ...]] = field(default_factory=dict)

    @classmethod
    def from_rows(cls, rows: GatheredRows) -> PlanTapes:
        """Read every tape of a plan once."""
        tapes = (tape for block in rows.costs.tapes.values() for tape in (block.forward, block.backward))
        device_seconds_of_works((op for tape in tapes for op in tape.ops), rows.costs.machine)  # in one go
        resolved: dict[tuple[str, Phase], ResolvedTape] = {}
        for label, block in rows.costs.tapes.items():
            resolved[label, "F"] = resolve_tape(f"forward of {label}", block.forward, rows.costs.machine)
            resolved[label, "B"] = backward = resolve_tape(f"backward of {label}", block.backward, rows.costs.machine)
            if rows.schedule_record.defers_weight_gradients:
                resolved[label, "I"], resolved[label, "W"] = _halves(backward, block, rows)
        if rows.schedule_record.pairs_passes:
            resolved |= _pairs(rows)
        framework = rows.framework
        again = framework.ends_apart and not framework.flat_params
        return cls(resolved, CrossStreamTensors.from_tapes(resolved.values()), again)

    def steps_of_tape(
        self, label: str, phase: Phase, inserted: dict[int, list[Step]] | None = None, *, next_label: str = ""
    ) -> TapeSteps:
        """The steps of a tape; with others inserted behind some of its lines it is made anew. ``next_label``: what the
        backward comes to next, and gathers ahead."""
        resolved = self.resolved[label, phase]
        if phase != "B" or next_label == label:
            next_label = ""
        if next_label:
            resolved = self._gathering_ahead(resolved, next_label)
        if inserted:
            return join_kernels_to_steps(resolved, self.cross_stream, inserted)
        key = label, phase, next_label
        if key not in self.steps:
            self.steps[key] = join_kernels_to_steps(resolved, self.cross_stream)
        return self.steps[key]

    def _gathering_ahead(self, backward: ResolvedTape, label: str) -> ResolvedTape:
        """A backward whose gather ahead is that of another tape's forward; of nothing where that is not gathered
        again."""
        again = label != "embedding" or self.gathers_embedding_again
        gathers = {
            type(line.op.work): (line.op, line.seconds)
            for line in (self.resolved[label, "F"].lines if again else ())
            if line.op is not None and line.op.purpose == "gather_ahead"
        }
        played = []
        for line in backward.lines:
            op = line.op
            if op is not None and op.purpose == "gather_ahead":
                gathered, seconds = gathers.get(type(op.work), (op._replace(work=None), 0.0))
                played.append(line._replace(op=op._replace(work=gathered.work), seconds=seconds))
            else:
                played.append(line)
        return ResolvedTape(backward.name, tuple(played), backward.input_tensor, backward.output_tensor)

    def weight_op_lines(self, label: str) -> tuple[WeightOpLines, ...]:
        """The weights of a tape, in the order of its forward."""
        if label not in self.weights:
            lines = self.resolved[label, "B"].lines
            made = {(line.op.origin, line.op.role): n for n, line in enumerate(lines) if line.op}
            weights = []
            for n, line in enumerate(self.resolved[label, "F"].lines):
                if line.op is None or not (params := only_entry(line.op.weight_params)):
                    continue
                name = line.op.name
                made_at = max(
                    (made[name, role] for role in _BEFORE_REDUCTION if (name, role) in made), default=len(lines) - 1
                )
                weights.append(WeightOpLines(n, made_at, params, line.op.part == "experts"))
            self.weights[label] = tuple(weights)
        return self.weights[label]


def paired_label(forward: str, backward: str) -> str:
    """The name of a forward and a backward side by side, by the names of their tapes."""
    return f"{forward} beside {backward}"


def _pairs(rows: GatheredRows) -> dict[tuple[str, Phase], ResolvedTape]:
    """Each kind of layer forward beside each backward."""
    out: dict[tuple[str, Phase], ResolvedTape] = {}
    tapes, delays = rows.costs.tapes, rows.framework.delay_wgrad
    mode = list(rows.costs.blocks)[int(rows.base_mode_index[0])]
    labels = [layer_label(kind, mode) for kind in rows.stage_layers.stages.kinds]
    for f in labels:
        for b in labels:
            tape = combined_tape(tapes[f].forward, tapes[b].forward, tapes[b].backward, delays=delays)
            label = paired_label(f, b)
            out[label, "FB"] = resolve_tape(label, tape, rows.costs.machine)
    return out


def _halves(backward: ResolvedTape, block: BlockTapes, rows: GatheredRows) -> tuple[ResolvedTape, ResolvedTape]:
    """A backward by inputs and by weights, of the whole one's lines but for what checkpoints make again."""
    by_weights = [line.op is not None and line.op.role in WEIGHT_ROLES for line in backward.lines]
    halves = [
        tuple(line for line, of in zip(backward.lines, by_weights, strict=True) if of is by) for by in (False, True)
    ]
    weights = resolve_tape("", block.split_backward.by_weights, rows.costs.machine).lines
    return (
        ResolvedTape(f"{backward.name} by inputs", halves[0], backward.input_tensor, backward.output_tensor),
        ResolvedTape(f"{backward.name} by weights", weights, "", backward.output_tensor),
    )
