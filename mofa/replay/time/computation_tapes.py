"""Which tapes a rank runs for each computation, with what data parallelism adds to some of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from mofa.blocks.build import BlockTapes, layer_kind
from mofa.blocks.roles import WEIGHT_ROLES, Role
from mofa.cost.block.block_cost import base_mode, full_mode
from mofa.cost.block.durations import time_works
from mofa.cost.rows import Rows
from mofa.replay.time.kernel_runs import Draft, Names, Score, Step, draft, score, value
from mofa.schedules import Order

Phase = Literal["F", "B", "I", "W"]
_BEFORE_REDUCTION: tuple[Role, ...] = ("wgrad", "accumulate", "backward", "grad_cast")
"""Roles of the ops behind which a weight's gradient may be reduced."""


class PieceName(NamedTuple):
    """Something of a model that runs as one: what it is called and which tapes it has."""

    name: str
    label: str


Chunk = tuple[PieceName, ...]


def chunks_of(rows: Rows, order: Order, rank: int) -> tuple[Chunk, ...]:
    """What a rank's chunks hold, in forward order: the embedding, layers as they are recomputed, the head."""
    stages, table, model = rows.layout.stages, rows.table, rows.workload.model
    pp, vpp = stages.pp, stages.vpp
    spec = table.recompute_modes[int(table.recompute[0])]
    base, layers = base_mode(spec), int(table.recompute_layers[0])
    starts = _first_layers(rows, order)
    out: list[Chunk] = []
    seen = 0
    for c in range(vpp):
        stage = next(s for s in range(c * pp, (c + 1) * pp) if order.rank_of(s) == rank)
        pieces = [PieceName("embedding", "embedding")] if stage == 0 else []
        for j, kind in enumerate(stages.layers[rank][c]):
            seen += 1
            full = spec.kind == "full" and (layers < 0 or j < layers)
            full = full or (spec.kind == "every" and seen % (spec.layers or 1) == 0)
            label = f"{stages.kinds[kind].name} recompute={full_mode(spec) if full else base}"
            pieces.append(PieceName(f"block {starts[stage] + j}", label))
        if stage == pp * vpp - 1:
            for n in range(model.num_mtp_layers):
                # its entry, a layer like the last and a pass through the head; recomputed only with all layers
                again = full_mode(spec) if spec.kind == "full" and layers < 0 else base
                last = layer_kind(model, model.num_layers - 1)
                pieces.append(PieceName(f"prediction {n}", "mtp"))
                pieces.append(PieceName(f"layer of prediction {n}", f"{last.name} recompute={again}"))
                pieces.append(PieceName(f"head of prediction {n}", "head"))
            pieces.append(PieceName("head", "head"))
        out.append(tuple(pieces))
    return tuple(out)


def _first_layers(rows: Rows, order: Order) -> list[int]:
    """The first layer of every stage."""
    stages = rows.layout.stages
    starts, next_layer = [], 0
    for s in range(stages.pp * stages.vpp):
        starts.append(next_layer)
        next_layer += len(stages.layers[order.rank_of(s)][s // stages.pp])
    return starts


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
    names: Names
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
        return cls(drafts, Names.of(drafts.values()))

    def score(self, label: str, phase: Phase, inserted: dict[int, list[Step]] | None = None) -> Score:
        """The score of a tape; with steps inserted behind some of its lines it is made anew."""
        if inserted:
            return score(self.drafts[label, phase], self.names, inserted)
        if (label, phase) not in self.scores:
            self.scores[label, phase] = score(self.drafts[label, phase], self.names)
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
