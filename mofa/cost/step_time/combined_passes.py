"""What steps save whose forwards run beside backwards of other micro-batches, layer by layer.

In a pair of passes the i-th layer of the forward's chunk runs beside the i-th last of the backward's, as far as both
have one; layers that are left over, and the ends of the model, run alone (megatron_core 0.16.1,
models/common/model_chunk_schedule_plan.py, ``TransformerModelChunkSchedulePlan.run``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.build import layer_kind
from mofa.cost.block.host_clock import ClockAdvance
from mofa.cost.block.tape_clock import EXPOSED, TapeTime
from mofa.cost.rows import GatheredRows
from mofa.cost.step_time.micro_batch import HostBoundPasses
from mofa.schedules import computation_order_of
from mofa.schedules.combined import backward_beside_each_forward

ArrayN = NDArray[np.float64]
_HOST = EXPOSED.index("host_idle")


@dataclass(frozen=True)
class PairedPasses:
    """A forward of each chunk (third axis) beside a backward of each chunk (fourth), of ranks that are shown.

    All are under a host that begins far ahead. ``saved_s`` (n, R, vpp, vpp) is what both take less together than one
    behind the other; ``exposed_s`` and ``hidden_s`` (n, R, vpp, vpp, parts) are how much less is exposed and more is
    hidden, by ``EXPOSED`` and ``HIDDEN``. ``clocks`` (n, R, vpp, vpp) are both clocks of a pair. ``num_pairs``
    (n, R, vpp, vpp) says how many a step has. [s, s, s, s, -]
    """

    saved_s: ArrayN
    exposed_s: ArrayN
    hidden_s: ArrayN
    clocks: ClockAdvance
    num_pairs: ArrayN

    def sum_over_step(self, by_pair: ArrayN, position: NDArray[np.intp]) -> ArrayN:
        """Something of pairs summed over the step of the rank at ``position`` of each row. (n, parts)"""
        rows = np.arange(len(position))
        return np.asarray(np.einsum("nfb,nfbp->np", self.num_pairs[rows, position], by_pair[rows, position]))

    @property
    def step_savings_by_rank_s(self) -> ArrayN:
        """What a step of each rank takes less. (n, R) [s]"""
        return np.asarray((self.num_pairs * self.saved_s).sum(axis=(2, 3)))

    def single_stage_passes_s(self, passes: HostBoundPasses, num_micro_batches: ArrayN, lead_s: ArrayN) -> ArrayN:
        """A step's passes on a single stage, whose host begins ahead by ``lead_s``: a forward, pairs, a backward. (n,)
        [s]"""
        pair = ClockAdvance(*(part[:, 0, 0, 0] for part in np.broadcast_arrays(*self.clocks)))
        forward, backward = (
            ClockAdvance(*(part[:, 0, 0] for part in np.broadcast_arrays(*clocks))) for clocks in passes.with_full_queue
        )
        step = forward.followed_by(pair.repeated(num_micro_batches - 1.0)).followed_by(backward)
        return np.maximum(step.device_s, step.device_behind_host_s - lead_s)


def paired_passes(rows: GatheredRows, passes: HostBoundPasses | None) -> PairedPasses | None:
    """The pairs of rows, whose passes by themselves are given for all; None where their schedule runs none."""
    if not rows.schedule_record.pairs_passes or passes is None:
        return None
    stages, shown = rows.stage_layers.stages, rows.stage_layers.shown.shown_stages
    layers = _LayersOfPairs.of(rows)
    exposed_s, hidden_s = (np.einsum("rfbij,nijp->nrfbp", layers.paired, by) for by in _less_exposed(rows))
    clocks = _clocks(rows, layers)
    forward_s, backward_s = passes.forward.device_s, passes.backward.device_s
    saved_s = forward_s[..., None] + backward_s[:, :, None] - clocks.device_s
    exposed_s[..., _HOST] += saved_s - exposed_s.sum(axis=-1)
    num_pairs = np.zeros((len(rows.k), len(shown), stages.vpp, stages.vpp))
    for num in np.unique(rows.num_micro_batches).tolist():
        of_rank = _pairs_of_ranks(rows.schedule, stages.pp, stages.vpp, num)
        num_pairs[rows.num_micro_batches == num] = of_rank[shown]
    return PairedPasses(saved_s, exposed_s, hidden_s, clocks, num_pairs)


def _less_exposed(rows: GatheredRows) -> tuple[ArrayN, ArrayN]:
    """How much less is exposed of a layer of each kind forward beside one of each kind backward, and more is hidden.
    (n, kinds, kinds, parts) each [s]"""
    costs = rows.costs

    def of_modes(name: str, sign: float) -> ArrayN:
        by_mode = [
            [
                [sign * (getattr(pair, name) - getattr(f.forward, name) - getattr(b.backward, name))
                 for pair, b in zip(pairs, blocks, strict=True)]
                for pairs, f in zip(costs.combined_layer_times[mode], blocks, strict=True)
            ]
            for mode, blocks in costs.blocks.items()
        ]  # fmt: skip
        return np.asarray(np.array(by_mode)[rows.base_mode_index, ..., rows.k])

    return of_modes("exposed_with_host_far_ahead_s", -1.0), of_modes("hidden", 1.0)


@dataclass(frozen=True)
class _LayersOfPairs:
    """Layers of a forward's chunk (second axis) and of a backward's (third) on each rank that is shown: side by side by
    both kinds, (R, vpp, vpp, kinds, kinds), and alone, forward and backward, (R, vpp, vpp, kinds)."""

    paired: ArrayN
    forward: ArrayN
    backward: ArrayN

    @classmethod
    def of(cls, rows: GatheredRows) -> _LayersOfPairs:
        stages, model = rows.stage_layers.stages, rows.workload.model
        last = stages.kinds.index(layer_kind(model, model.num_layers - 1))
        shown = rows.stage_layers.shown.shown_stages.tolist()
        num = len(stages.kinds)
        paired = np.zeros((len(shown), stages.vpp, stages.vpp, num, num))
        forward, backward = np.zeros((2, *paired.shape[:4]))
        for r, stage in enumerate(shown):
            chunks: list[Sequence[int]] = list(stages.layers[stage])
            if rows.is_prediction_stage[r]:
                chunks[-1] = (*chunks[-1], *(last,) * model.num_mtp_layers)
            for f, ahead in enumerate(chunks):
                for b, back in enumerate(chunks):
                    both = min(len(ahead), len(back))
                    for pair in zip(ahead, reversed(back), strict=False):
                        paired[(r, f, b, *pair)] += 1
                    np.add.at(forward[r, f, b], list(ahead[both:]), 1)
                    np.add.at(backward[r, f, b], list(back[: len(back) - both]), 1)
        return cls(paired, forward, backward)


def _clocks(rows: GatheredRows, layers: _LayersOfPairs) -> ClockAdvance:
    """Both clocks of a forward of each chunk beside a backward of each. (n, R, vpp, vpp)"""
    passed = [
        ClockAdvance(*(part[rows.k][:, None, None, None] for part in phase)).repeated(count)
        for phase, count in _ends(rows, layers, ahead=True)
    ]
    costs, mode = rows.costs, rows.base_mode_index
    pairs = np.array([
        [[pair.clocks for pair in of_forward] for of_forward in costs.combined_layer_times[spec]] for spec
        in costs.blocks
    ])[mode, ..., rows.k]  # fmt: skip
    for f, of_forward in enumerate(np.moveaxis(pairs, 1, 0)):
        for b, of_pair in enumerate(np.moveaxis(of_forward, 1, 0)):
            passed.append(_repeated(of_pair, layers.paired[..., f, b]))
    for grid, counts in ((rows.layers.backward_clocks, layers.backward), (rows.layers.forward_clocks, layers.forward)):
        alone = grid[mode, rows.k]
        passed += [_repeated(alone[:, kind], counts[..., kind]) for kind in range(counts.shape[-1])]
    passed += [
        ClockAdvance(*(part[rows.k][:, None, None, None] for part in phase)).repeated(count)
        for phase, count in _ends(rows, layers, ahead=False)
    ]
    return reduce(ClockAdvance.followed_by, [piece.limited_by_launch_queue() for piece in passed])


def _repeated(clocks: ArrayN, count: ArrayN) -> ClockAdvance:
    """Something of rows as often as there are layers of it in each pair. (n, 5), (R, vpp, vpp)"""
    return ClockAdvance(*clocks.T[:, :, None, None, None]).repeated(count)


def _ends(rows: GatheredRows, layers: _LayersOfPairs, *, ahead: bool) -> Iterator[tuple[ArrayN, ArrayN]]:
    """The clocks of the model's ends that run alone in a pair, ahead of its layers or behind, and how often each does.
    (5, K), (R, vpp, vpp)"""
    costs, depth, lay = rows.costs, rows.workload.model.num_mtp_layers, rows.stage_layers
    first, last, entry = np.zeros((3, *layers.paired.shape[:2]))
    first[0, 0], last[lay.head_stage_index, -1], entry[lay.prediction_stage_index, -1] = 1.0, 1.0 + depth, depth
    shape = layers.paired.shape[:3]

    def times(phase: TapeTime, count: ArrayN, *, of_backward: bool) -> tuple[ArrayN, ArrayN]:
        return phase.clocks, np.broadcast_to(count[:, None] if of_backward else count[:, :, None], shape)

    if ahead:
        yield times(costs.embedding.forward, first, of_backward=False)
        yield times(costs.head.backward, last, of_backward=True)
        if costs.mtp is not None:
            block = next(iter(costs.mtp.values()))
            alone = block.phases.forward_time(block.blocks[:1]), block.phases.backward_time(block.blocks[:1])
            yield times(alone[0], entry, of_backward=False)
            yield times(alone[1], entry, of_backward=True)
    else:
        yield times(costs.head.forward, last, of_backward=False)
        yield times(costs.embedding.backward, first, of_backward=True)


@lru_cache(maxsize=256)
def _pairs_of_ranks(schedule: str, pp: int, vpp: int, num_micro_batches: int) -> ArrayN:
    """How many forwards of each chunk run beside a backward of each chunk, on each rank. (pp, vpp, vpp) [-]"""
    out = np.zeros((pp, vpp, vpp))
    if pp == 1:
        out[0, 0, 0] = num_micro_batches - 1
        return out
    order = computation_order_of(schedule, "megatron", pp, vpp, num_micro_batches)
    for r, actions in enumerate(order.ranks):
        for forward, backward in backward_beside_each_forward(actions).items():
            out[r, order.chunk_of(forward.stage), order.chunk_of(backward.stage)] += 1
    return out
