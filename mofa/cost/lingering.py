"""What lingers of recomputed layers of experts between their backward and their next forward, in closed form.

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
from mofa.blocks.tapes import label
from mofa.cost.moments import ROUNDS, layers_behind
from mofa.cost.rows import Rows
from mofa.orders import order_of
from mofa.orders.interleaved import rounds

ArrayN = NDArray[np.float64]


class _Acts(NamedTuple):
    """Different computations of each rank, padded by its last: whether forward and which chunk (ranks, acts), and of
    every chunk the micro-batches in flight, this one counted, and whether anything lingers before it. (ranks, acts,
    vpp)"""

    forward: NDArray[np.bool_]
    chunk: NDArray[np.intp]
    flying: ArrayN
    lingers: ArrayN


@lru_cache(maxsize=256)
def _acts(schedule: str, framework: str, pp: int, vpp: int, num_micro_batches: int) -> _Acts:
    """Of a step behind others: everything lingers at its beginning.

    Examples
    --------
    Two micro-batches on one GPU: both forwards and both backwards find the same.

    >>> found = _acts("1f1b", "megatron", 1, 1, 2)
    >>> found.forward[0], found.lingers[0, :, 0]
    (array([ True, False]), array([1., 0.]))
    """
    order = order_of(schedule, framework, pp, vpp, num_micro_batches)
    ranks: list[list[tuple[bool, int, tuple[int, ...], tuple[bool, ...]]]] = []
    for acts in order.ranks:
        flying, lingers = [0] * vpp, [True] * vpp
        seen: dict[tuple[bool, int, tuple[int, ...], tuple[bool, ...]], None] = {}
        for act in acts:
            chunk, forward = order.chunk_of(act.stage), act.kind == "F"
            flying[chunk] += forward
            seen[forward, chunk, tuple(flying), tuple(lingers)] = None
            flying[chunk] -= not forward
            lingers[chunk] = not forward
        ranks.append(list(seen))
    most = max(map(len, ranks))
    full = [rank + rank[-1:] * (most - len(rank)) for rank in ranks]
    forward_, chunk_, flying_, lingers_ = (np.array([[act[i] for act in rank] for rank in full]) for i in range(4))
    return _Acts(forward_, chunk_, flying_.astype(float), lingers_.astype(float))


class Lingering:
    """How much more is alive at the instants of candidates than their micro-batches in flight keep; falsy for none."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        costs, kinds = rows.costs, rows.layout.stages.kinds
        tapes = [[costs.tapes[label(kind, mode)].backward for kind in kinds] for mode in costs.blocks]
        self._any = any(tape.lingers for of_mode in tapes for tape in of_mode)
        if not self._any:
            return
        each = self._of_tapes([[tape.lingers for tape in ts] for ts in tapes], tapes)
        self.own = rows.gather(each)
        self.of_chunk = self._by_chunk(*self.own) + self._of_predictions(each)
        self.there = self.at_rest > 0.0
        """Which stages have any. (n, R)"""
        handed = [[tuple(n for n in tape.outputs if n in tape.lingers) for tape in ts] for ts in tapes]
        self.handed_on = rows.gather(self._of_tapes(handed, tapes))
        """Of that what is the gradient that the block before is given."""
        self.saved = rows.gather(rows.layers.saved)
        self.kept = self._by_chunk(*self.saved)
        self.behind = layers_behind(rows)
        pp, vpp = rows.layout.stages.pp, rows.layout.stages.vpp
        size = np.array([rounds(pp, int(m)) if vpp > 1 else pp for m in rows.num_micro_batches])
        self.walked = np.minimum(rows.num_micro_batches, ROUNDS * size)

    def __bool__(self) -> bool:
        return self._any

    def _of_tapes(self, names: Sequence[Sequence[tuple[str, ...]]], tapes: Sequence[Sequence[Tape]]) -> ArrayN:
        """The bytes of some tensors of every mode's and kind's tape. (modes, K, kinds) [B]"""
        zero = np.zeros(self.rows.costs.boundary.shape)
        found = [
            [zero + sum(tape.tensors[n].bytes for n in of_one) for of_one, tape in zip(of_mode, ts, strict=True)]
            for of_mode, ts in zip(names, tapes, strict=True)
        ]
        return np.ascontiguousarray(np.moveaxis(np.array(found), 2, 1))

    def _by_chunk(self, plain: ArrayN, full: ArrayN) -> ArrayN:
        """Something of layers, by their mode, summed over those of each chunk. (n, kinds) each -> (n, R, vpp)"""
        lay = self.rows.layout
        out = np.einsum("krc,nk->nrc", lay.stages.counts[:, lay.shown.stage], plain)
        if lay.any_full:
            out = out + np.einsum("nkrc,nk->nrc", lay.full_by_chunk[lay.choice], full - plain)
        return np.asarray(out)

    def _of_predictions(self, each: ArrayN) -> ArrayN:
        """What lingers of multi-token-prediction layers, on the last chunk. (n, R, vpp) [B]"""
        rows, model, stages = self.rows, self.rows.workload.model, self.rows.layout.stages
        out = np.zeros((len(rows.k), len(rows.layout.shown.stage), stages.vpp))
        if model.num_mtp_layers:
            kind = stages.kinds.index(layer_kind(model, model.num_layers - 1))
            one = model.num_mtp_layers * each[rows.mtp_mode, rows.k, kind]
            out[:, :, -1] = one[:, None] * rows.is_head
        return out

    @property
    def at_rest(self) -> ArrayN:
        """Between steps. (n, R) [B]"""
        return np.asarray(self.of_chunk.sum(axis=2))

    def inside(self, kind: int, recomputed: int, *, forward: bool, first: bool = False) -> ArrayN:
        """In the last layer of a kind, recomputed whole or not, whose own goes before most is alive, with nothing kept
        by those behind it; of a backward in the ``first`` one, where the others have nothing any more. (n, R) [B]"""
        lay = self.rows.layout
        whole = lay.full_by_chunk[:, kind][lay.choice]
        has = whole > 0 if recomputed else lay.stages.counts[kind][lay.shown.stage] - whole > 0
        own, saved = (of[recomputed][:, kind, None, None] for of in (self.own, self.saved))
        if first:
            more = saved + self.of_chunk - own - self.kept - self._given(self.handed_on[recomputed][:, kind])
            return self._most(has, forward=False, more=more, own=self.of_chunk)
        behind = self.behind[:, :, :, kind, recomputed][lay.choice]
        more = -sum(np.einsum("nkrc,nk->nrc", behind[:, :, of], self.saved[of]) for of in (0, 1))
        return self._most(has, forward=forward, more=more, own=self.of_chunk if forward else own)

    def _given(self, own: ArrayN) -> ArrayN:
        """The gradient that a chunk's first block is given, where that lingers of another, as does not what it hands on
        of its ``own``. (n,) -> (n, R, vpp) [B]"""
        others = self._by_chunk(*self.handed_on) > own[:, None, None]
        return np.asarray(others * self.rows.costs.boundary[self.rows.k, None, None])

    def at_end(self, chunk: int, *, forward: bool, ended: bool = False) -> ArrayN:
        """At the end of the model that a chunk has, in a forward, a backward or as that has ``ended``. (n, R) [B]"""
        has = np.zeros(self.of_chunk.shape, dtype=bool)
        has[:, :, chunk] = True
        more = self.of_chunk - self.kept - self._given(np.zeros(len(has))) if ended else np.zeros((1, 1, 1))
        return self._most(has, forward=forward, more=more, own=self.of_chunk if forward or ended else more)

    def _most(self, has: NDArray[np.bool_], *, forward: bool, more: ArrayN, own: ArrayN) -> ArrayN:
        """How much more than what is in flight as the first backward begins: in computations of chunks that have what
        it is about, with ``more`` of the chunk at hand, of which ``own`` does not linger then. (n, R) [B]"""
        rows, lay = self.rows, self.rows.layout
        stages, shape = lay.stages, self.kept.shape
        out = np.zeros(shape[:2])
        has, more, own = np.broadcast_to(has, shape), np.broadcast_to(more, shape), np.broadcast_to(own, shape)
        for m in np.unique(self.walked).tolist():
            mine = np.flatnonzero(self.walked == m)
            found = _acts(rows.schedule, rows.framework.name, stages.pp, stages.vpp, m)
            stage = lay.shown.stage
            ways, flying, lingers = found.forward[stage], found.flying[stage], found.lingers[stage]
            kept = np.einsum("rac,nrc->nra", flying, self.kept[mine])
            at = np.broadcast_to(found.chunk[stage], kept.shape)
            come, gone = (np.take_along_axis(a[mine], at, axis=2) for a in (more, own))
            here = np.take_along_axis(has[mine], at, axis=2)
            left = np.take_along_axis(lingers, found.chunk[stage][:, :, None], axis=2)[:, :, 0]
            alive = kept + np.einsum("rac,nrc->nra", lingers, self.of_chunk[mine]) - left * gone + come
            alive = np.where((ways == forward) & here, alive, -np.inf).max(axis=2)
            begun = (~ways).argmax(axis=1)  # what is in flight is counted as the first backward begins
            out[mine] = alive - kept[:, np.arange(len(stage)), begun]
        return np.where(self.there & np.isfinite(out), out, 0.0)
