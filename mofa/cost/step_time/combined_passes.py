"""What steps save whose forwards run beside backwards of other micro-batches, layer by layer.

In a pair of passes the i-th layer of the forward's chunk runs beside the i-th last of the backward's, as far as both
have one; layers that are left over, and the ends of the model, run alone (megatron_core 0.16.1,
models/common/model_chunk_schedule_plan.py, ``TransformerModelChunkSchedulePlan.run``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.build import layer_kind
from mofa.cost.rows import Rows
from mofa.schedules import order_of
from mofa.schedules.combined import pairs_of

ArrayN = NDArray[np.float64]


@dataclass(frozen=True)
class PairedPasses:
    """A forward of each chunk (third axis) beside a backward of each chunk (fourth), of ranks that are shown.

    ``saved_s`` (n, R, vpp, vpp) is what both take less together than one behind the other; ``exposed_s`` and
    ``hidden_s`` (n, R, vpp, vpp, parts) how much less is exposed and more is hidden, by ``EXPOSED`` and ``HIDDEN``.
    ``num_pairs`` (n, R, vpp, vpp) says how many a step has. [s, s, s, -]
    """

    saved_s: ArrayN
    exposed_s: ArrayN
    hidden_s: ArrayN
    num_pairs: ArrayN

    def of_step(self, by_pair: ArrayN, position: NDArray[np.intp]) -> ArrayN:
        """Something of pairs summed over the step of the rank at ``position`` of each row. (n, parts)"""
        rows = np.arange(len(position))
        return np.asarray(np.einsum("nfb,nfbp->np", self.num_pairs[rows, position], by_pair[rows, position]))

    @property
    def saved_by_rank_s(self) -> ArrayN:
        """What a step of each rank takes less. (n, R) [s]"""
        return np.asarray((self.num_pairs * self.saved_s).sum(axis=(2, 3)))


def paired_passes(rows: Rows) -> PairedPasses | None:
    """The pairs of rows; None where their schedule runs none."""
    if not rows.schedule_record.pairs_passes:
        return None
    costs = rows.costs
    exposed, hidden = (
        np.array([
            [
                [sign * (getattr(pair, name) - getattr(f.forward, name) - getattr(b.backward, name))
                 for pair, b in zip(pairs, blocks, strict=True)]
                for pairs, f in zip(costs.combined_layers[mode], blocks, strict=True)
            ]
            for mode, blocks in costs.blocks.items()
        ])
        for name, sign in (("exposed", -1.0), ("hidden", 1.0))
    )  # fmt: skip
    exposed, hidden = (by[rows.base_mode_index, ..., rows.k] for by in (exposed, hidden))  # n, kinds, kinds, parts
    counts = _layer_pairs(rows)
    exposed_s, hidden_s = (np.einsum("rfbij,nijp->nrfbp", counts, by) for by in (exposed, hidden))
    stages, shown = rows.stage_layers.stages, rows.stage_layers.shown.shown_stages
    num_pairs = np.zeros((len(rows.k), len(shown), stages.vpp, stages.vpp))
    for num in np.unique(rows.num_micro_batches).tolist():
        of_rank = _pairs_of_ranks(rows.schedule, stages.pp, stages.vpp, num)
        num_pairs[rows.num_micro_batches == num] = of_rank[shown]
    return PairedPasses(exposed_s.sum(axis=-1), exposed_s, hidden_s, num_pairs)


def _layer_pairs(rows: Rows) -> ArrayN:
    """How many layers of each kind run beside such of each kind, in a pair of chunks. (R, vpp, vpp, kinds, kinds)"""
    stages, model = rows.stage_layers.stages, rows.workload.model
    last = stages.kinds.index(layer_kind(model, model.num_layers - 1))
    shown = rows.stage_layers.shown.shown_stages.tolist()
    out = np.zeros((len(shown), stages.vpp, stages.vpp, len(stages.kinds), len(stages.kinds)))
    for r, stage in enumerate(shown):
        chunks: list[Sequence[int]] = list(stages.layers[stage])
        if rows.is_prediction[r]:
            chunks[-1] = (*chunks[-1], *(last,) * model.num_mtp_layers)
        for f, forward in enumerate(chunks):
            for b, backward in enumerate(chunks):
                for pair in zip(forward, reversed(backward), strict=False):
                    out[(r, f, b, *pair)] += 1
    return out


@lru_cache(maxsize=256)
def _pairs_of_ranks(schedule: str, pp: int, vpp: int, num_micro_batches: int) -> ArrayN:
    """How many forwards of each chunk run beside a backward of each chunk, on each rank. (pp, vpp, vpp) [-]"""
    out = np.zeros((pp, vpp, vpp))
    if pp == 1:
        out[0, 0, 0] = num_micro_batches - 1
        return out
    order = order_of(schedule, "megatron", pp, vpp, num_micro_batches)
    for r, actions in enumerate(order.ranks):
        for forward, backward in pairs_of(actions).items():
            out[r, order.chunk_of(forward.stage), order.chunk_of(backward.stage)] += 1
    return out
