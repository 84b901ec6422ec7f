"""What dispatchers retain of recomputed layers of experts between a backward and the next forward, in closed form.

A chunk has it from its backward on until its next forward, which may be the next step's, or its next backward: so what
is alive follows from the schedule's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.build import layer_kind
from mofa.blocks.op import Tape
from mofa.blocks.tapes import layer_label
from mofa.cost.memory.chunk_layer_order import layers_behind_last_by_mode
from mofa.cost.memory.in_flight import WALKED_ROUNDS
from mofa.cost.rows import GatheredRows
from mofa.schedules import Runtime, computation_order_of
from mofa.schedules.interleaved import micro_batches_per_round

ArrayN = NDArray[np.float64]
FORWARD, BACKWARD = 0, 1


class _Computations(NamedTuple):
    """A rank's different computations, those of one sort one after the other: of every chunk the micro-batches in
    flight, this one counted, and whether anything lingers before it (acts, vpp); the way, the chunk and whether that
    lingers, of each sort, and where a sort begins. ``begun`` is in flight as the first backward begins. (vpp,)"""

    flying: ArrayN
    lingers: ArrayN
    sorts: list[tuple[int, int, int]]
    starts: list[int]
    begun: ArrayN


@lru_cache(maxsize=4096)
def _computations(
    schedule: str, runtime: Runtime, pp: int, vpp: int, num_micro_batches: int, rank: int
) -> _Computations:
    """Of a step behind others, at whose beginning everything lingers; without those than which another of their sort
    has no less of anything.

    Examples
    --------
    Two micro-batches on one GPU: before a backward nothing lingers.

    >>> found = _computations("1f1b", "megatron", 1, 1, 2, 0)
    >>> found.sorts
    [(0, 0, 1), (1, 0, 0)]
    """
    order = computation_order_of(schedule, runtime, pp, vpp, num_micro_batches)
    flying, lingers = [0] * vpp, [1] * vpp
    seen: dict[tuple[int, int, int], dict[tuple[int, ...], None]] = {}
    begun: list[int] = []
    for action in order.ranks[rank]:
        chunk, direction = order.chunk_of(action.stage), FORWARD if action.kind == "F" else BACKWARD
        flying[chunk] += direction == FORWARD
        if direction == BACKWARD and not begun:
            begun = list(flying)
        seen.setdefault((direction, chunk, lingers[chunk]), {})[*flying, *lingers] = None
        flying[chunk] -= direction == BACKWARD
        lingers[chunk] = int(direction == BACKWARD)
    sorts = sorted(seen)
    most = [_most(np.array(list(seen[sort]), dtype=float)) for sort in sorts]
    all_ = np.concatenate(most)
    starts = np.cumsum([0, *map(len, most[:-1])]).tolist()
    return _Computations(all_[:, :vpp], all_[:, vpp:], sorts, starts, np.array(begun, dtype=float))


def _most(much: ArrayN) -> ArrayN:
    """Of different rows those than which no other has at least as much of everything."""
    covers = np.all(much[:, None] >= much, axis=2)
    return np.asarray(much[covers.sum(axis=0) == 1])


class RetainedBytesAtPeakCandidates:
    """How much more is alive at the instants of candidates than their micro-batches in flight keep; falsy for none.

    Of those candidates alone of which anything lingers: p of n.
    """

    def __init__(self, rows: GatheredRows) -> None:
        self.rows = rows
        costs, kinds = rows.costs, rows.stage_layers.stages.kinds
        tapes = [[costs.tapes[layer_label(kind, mode)].backward for kind in kinds] for mode in costs.blocks]
        names = [[tape.retained_by_dispatcher for tape in ts] for ts in tapes]
        self.candidates = np.zeros(0, dtype=np.intp)
        if not any(name for of_mode in names for name in of_mode):
            return
        each = self._of_tapes(names, tapes)
        has = np.asarray(each.any(axis=(1, 2)))
        self.candidates = np.flatnonzero(
            has[rows.base_mode_index] * rows.stage_layers.any_base_mode
            + has[rows.full_mode_index] * rows.stage_layers.any_fully_recomputed
        )
        if not len(self.candidates):
            return
        self.choice = rows.stage_layers.recompute_choice[self.candidates]
        self.own = self._gather(each)
        self.of_chunk = self._by_chunk(*self.own) + self._of_predictions(each)
        handed = [[tuple(n for n in tape.outputs if n in tape.retained_by_dispatcher) for tape in ts] for ts in tapes]
        self.handed_on = self._gather(self._of_tapes(handed, tapes))
        """Of that what is the gradient that the block before is given."""
        self.saved = self._gather(rows.layers.saved_bytes)
        self.in_flight = self._by_chunk(*self.saved)
        self.behind = layers_behind_last_by_mode(rows)
        self.most_alive = self._over_moments()
        self.there = self._for_all(self.of_chunk.sum(axis=2) > 0.0) > 0.0
        """Which stages have any. (n, R)"""

    def __bool__(self) -> bool:
        return len(self.candidates) > 0

    def _gather(self, by_mode: ArrayN) -> tuple[ArrayN, ArrayN]:
        """Of each kind of layer, in the base and the full mode of these candidates. (p, kinds)"""
        rows, k = self.rows, self.rows.k[self.candidates]
        return by_mode[rows.base_mode_index[self.candidates], k], by_mode[rows.full_mode_index[self.candidates], k]

    def _for_all(self, some: NDArray[np.generic]) -> ArrayN:
        """Of all candidates, 0 of others. (p, R) -> (n, R)"""
        out = np.zeros((len(self.rows.k), some.shape[1]))
        out[self.candidates] = some
        return out

    def _of_tapes(self, names: Sequence[Sequence[tuple[str, ...]]], tapes: Sequence[Sequence[Tape]]) -> ArrayN:
        """The bytes of some tensors of every mode's and kind's tape. (modes, K, kinds) [B]"""
        zero = np.zeros(self.rows.costs.stage_boundary_bytes.shape)
        by_mode = [
            [zero + sum(tape.tensors[n].bytes for n in of_one) for of_one, tape in zip(of_mode, ts, strict=True)]
            for of_mode, ts in zip(names, tapes, strict=True)
        ]
        return np.ascontiguousarray(np.moveaxis(np.array(by_mode), 2, 1))

    def _by_chunk(self, plain: ArrayN, full: ArrayN) -> ArrayN:
        """Something of layers, by their mode, summed over those of each chunk. (p, kinds) each -> (p, R, vpp)"""
        lay = self.rows.stage_layers
        out = np.einsum("krc,nk->nrc", lay.stages.layer_counts[:, lay.shown.shown_stages], plain)
        for kind in range(len(lay.stages.kinds) if lay.any_fully_recomputed else 0):
            out += lay.fully_recomputed_by_chunk[:, kind][self.choice] * (full - plain)[:, kind, None, None]
        return np.asarray(out)

    def _of_predictions(self, each: ArrayN) -> ArrayN:
        """What lingers of multi-token-prediction layers, on their chunk. (p, R, vpp) [B]"""
        rows, model, stages = self.rows, self.rows.workload.model, self.rows.stage_layers.stages
        out = np.zeros((len(self.candidates), len(rows.stage_layers.shown.shown_stages), stages.vpp))
        if model.num_mtp_layers:
            kind = stages.kinds.index(layer_kind(model, model.num_layers - 1))
            of_micro_batch = (
                model.num_mtp_layers * each[rows.mtp_mode_indices[self.candidates], rows.k[self.candidates], kind]
            )
            out[:, :, -1] = of_micro_batch[:, None] * rows.is_prediction_stage
        return out

    def _over_moments(self) -> ArrayN:
        """The most alive of what is kept in flight and lingers, more than what is in flight as the first backward
        begins, in computations of either way, of every chunk, which lingers itself or not. (2, 2, p, R, vpp) [B]"""
        rows, stages = self.rows, self.rows.stage_layers.stages
        pp, vpp = stages.pp, stages.vpp
        num = rows.num_micro_batches[self.candidates]
        each = np.array([micro_batches_per_round(pp, int(m)) if vpp > 1 else pp for m in num])
        walked = np.minimum(num, WALKED_ROUNDS * each)
        out = np.full((2, 2, *self.in_flight.shape), -np.inf)
        for m in np.unique(walked).tolist():
            of_length = np.flatnonzero(walked == m)
            for r, rank in enumerate(rows.stage_layers.shown.shown_stages.tolist()):
                computations = _computations(rows.schedule, rows.framework.traits.runtime, pp, vpp, m, rank)
                in_flight = self.in_flight[of_length, r]
                alive = (
                    in_flight @ (computations.flying - computations.begun).T
                    + self.of_chunk[of_length, r] @ computations.lingers.T
                )
                most = np.maximum.reduceat(alive, computations.starts, axis=1)
                for n, (direction, chunk, lingers) in enumerate(computations.sorts):
                    out[direction, lingers, of_length, r, chunk] = most[:, n]
        return out

    @property
    def between_steps_bytes(self) -> ArrayN:
        """Bytes retained between steps. (n, R) [B]"""
        return self._for_all(self.of_chunk.sum(axis=2))

    def bytes_in_last_layer_of_kind(self, kind: int, recomputed: int, direction: int, *, first: bool = False) -> ArrayN:
        """In the last layer of a kind, recomputed whole or not, whose own goes before most is alive, with nothing kept
        by those behind it; of a backward in the ``first`` one, where the others have nothing any more. (n, R) [B]"""
        lay = self.rows.stage_layers
        recomputed_layers = lay.fully_recomputed_by_chunk[:, kind][self.choice]
        has = (
            recomputed_layers > 0
            if recomputed
            else lay.stages.layer_counts[kind][lay.shown.shown_stages] - recomputed_layers > 0
        )
        own, saved = (of[recomputed][:, kind, None, None] for of in (self.own, self.saved))
        if first:
            more = saved + self.of_chunk - own - self.in_flight - self._given(self.handed_on[recomputed][:, kind])
            return self._largest(has, direction, more, self.of_chunk)
        behind = self.behind[:, :, :, kind, recomputed][self.choice]
        more = np.zeros(self.in_flight.shape)
        for other in range(len(lay.stages.kinds)):
            for of in (0, 1):
                more -= behind[:, other, of] * self.saved[of][:, other, None, None]
        return self._largest(has, direction, more, self.of_chunk if direction == FORWARD else own)

    def _given(self, own: ArrayN) -> ArrayN:
        """The gradient that a chunk's first block is given, where that lingers of another, as does not what it hands on
        of its ``own``. (p,) -> (p, R, vpp) [B]"""
        others = self._by_chunk(*self.handed_on) > own[:, None, None]
        return np.asarray(others * self.rows.costs.stage_boundary_bytes[self.rows.k[self.candidates], None, None])

    def bytes_in_model_end(self, chunk: int, direction: int, *, ended: bool = False) -> ArrayN:
        """At the end of the model that a chunk has, in a forward, a backward or as that has ``ended``. (n, R) [B]"""
        has = np.zeros(self.of_chunk.shape, dtype=bool)
        has[:, :, chunk] = True
        if ended:
            return self._largest(
                has, direction, self.of_chunk - self.in_flight - self._given(np.zeros(1)), self.of_chunk
            )
        return self._largest(has, direction, 0.0, self.of_chunk if direction == FORWARD else 0.0)

    def _largest(
        self, has: NDArray[np.bool_], direction: int, more: ArrayN | float, gone: ArrayN | float
    ) -> ArrayN:  # fmt: skip
        """The most in computations of chunks that have what it is about, with ``more`` of the chunk at hand, of which
        what lingered before is ``gone`` by then. (p, R, vpp) each -> (n, R) [B]"""
        not_before, before = self.most_alive[direction]
        alive = np.where(has, np.maximum(not_before, before - gone) + more, -np.inf).max(axis=2)
        return self._for_all(np.where(np.isfinite(alive) & self.there[self.candidates], alive, 0.0))
