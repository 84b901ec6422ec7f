"""What a pipeline rank holds from computation to computation where its gradients appear one chunk after the other.

PyTorch's FSDP under pipelines makes a chunk's unsharded gradients in its first backward. With few micro-batches most is
in flight before they are there; with many both meet. The moments at which most can be alive are those of the schedule's
own order at which no other of the same chunk has more of every chunk in flight and as many chunks' gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.tapes import label
from mofa.cost.put_off import PutOff
from mofa.cost.rows import Rows
from mofa.orders import Action, order_of
from mofa.orders.interleaved import rounds
from mofa.specs.strategy import ZERO_BUBBLE

ArrayN = NDArray[np.float64]
ROUNDS = 4
"""Rounds of micro-batches after which a rank holds nothing new. [-]"""


@dataclass(frozen=True)
class RankMoments:
    """Moments of each rank, padded by its last: the chunk that computes (ranks, moments), micro-batches in flight,
    which chunks have gradients and micro-batches whose weights' gradients are put off (ranks, moments, vpp), whether
    the chunk's own gradients come now, and whether its backward puts them off (ranks, moments)."""

    chunk: NDArray[np.intp]
    flying: ArrayN
    begun: ArrayN
    waiting: ArrayN
    first: NDArray[np.bool_]
    split: NDArray[np.bool_]


@lru_cache(maxsize=256)
def rank_moments(
    schedule: str, framework: str, pp: int, vpp: int, num_micro_batches: int, way: str
) -> RankMoments:  # fmt: skip
    """The moments of forwards (``way`` F), of backwards (B), whole or by inputs, or of backwards by weights (W).

    Examples
    --------
    Rank 0 of two in 1F1B: of the second forward on two are in flight, first without gradients, later with them.

    >>> backward = rank_moments("1f1b", "torchtitan", 2, 1, 4, "B")
    >>> backward.flying[0, :, 0], backward.begun[0, :, 0]
    (array([2., 2.]), array([0., 1.]))
    """
    order = order_of(schedule, framework, pp, vpp, num_micro_batches)
    found = [_of_rank(tuple((_done(a), order.chunk_of(a.stage)) for a in acts), vpp, way) for acts in order.ranks]
    most = max(len(rank) for rank in found)
    full = [rank + rank[-1:] * (most - len(rank)) for rank in found]
    chunk, flying, begun, waiting, first, split = (
        np.array([[moment[i] for moment in rank] for rank in full], dtype=float) for i in range(6)
    )
    return RankMoments(chunk.astype(np.intp), flying, begun, waiting, first > 0, split > 0)


_Moment = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...], bool, bool]
"""Chunk, in flight, gradients begun, put off, whether the chunk's own come now, whether they are put off."""


def _done(act: Action) -> str:
    """What a computation is in terms of memory: the first stage has no input to differentiate by, W does it all."""
    if act.stage == 0 and act.kind in ("I", "W"):
        return "B" if act.kind == "W" else ""
    return act.kind


def _of_rank(acts: tuple[tuple[str, int], ...], vpp: int, way: str) -> list[_Moment]:
    flying, begun, waiting = [0] * vpp, [0] * vpp, [0] * vpp
    seen: dict[_Moment, None] = {}
    for kind, chunk in acts:
        flying[chunk] += kind == "F"
        if kind and ("B" if kind == "I" else kind) == way:
            own = kind in ("B", "W") and not begun[chunk]
            seen[chunk, tuple(flying), tuple(begun), tuple(waiting), own, kind == "I"] = None
        waiting[chunk] += (kind == "I") - (kind == "W")
        if kind in ("B", "W"):
            flying[chunk] -= 1
            begun[chunk] = 1
    alike: dict[tuple[int, bool, bool], list[_Moment]] = {}
    for one in seen:
        alike.setdefault((one[0], *one[4:]), []).append(one)
    covered = {one for ones in alike.values() for one in _covered(ones)}
    return [one for one in seen if one not in covered]


def _covered(ones: list[_Moment]) -> Iterator[_Moment]:
    """Those of different moments of a chunk of which another has at least as much of everything."""
    much = np.array([sum(one[1:4], ()) for one in ones])
    for i, one in enumerate(ones):
        if np.all(much >= much[i], axis=1).sum() > 1:
            yield one


def _behind(rows: Rows) -> ArrayN:
    """Layers of each kind (second axis), recomputed whole or not (third), behind the last of each kind (fourth) that is
    recomputed or not (fifth), in each chunk. (choices, kinds, 2, kinds, 2, R, vpp)"""
    lay, table = rows.layout, rows.table
    stages, shown = lay.stages, lay.shown.stage
    _, given = np.unique(lay.choice, return_index=True)
    kinds = len(stages.kinds)
    out = np.zeros((len(lay.full_by_chunk), kinds, 2, kinds, 2, len(shown), stages.vpp))
    for at in given.tolist():
        spec, layers = table.recompute_modes[int(table.recompute[at])], int(table.recompute_layers[at])
        for r, stage in enumerate(shown.tolist()):
            seen = 0
            for c, chunk in enumerate(stages.layers[stage]):
                held: list[tuple[int, int]] = []
                for j, kind in enumerate(chunk):
                    seen += 1
                    whole = spec.kind == "full" and (layers < 0 or j < layers)
                    whole = whole or (spec.kind == "every" and seen % (spec.layers or 1) == 0)
                    held.append((kind, int(whole)))
                for each in set(held):
                    last = len(held) - 1 - held[::-1].index(each)
                    for other in held[last + 1 :]:
                        out[(int(lay.choice[at]), *other, *each, r, c)] += 1
    return out


class Moments:
    """The moments of candidates of one pp x vpp, and what is alive at them."""

    def __init__(self, rows: Rows, grads: ArrayN) -> None:
        lay, stages = rows.layout, rows.layout.stages
        self.rows, self.grads = rows, grads
        plain, full = rows.gather(rows.layers.saved)
        kept = np.einsum("krc,nk->nrc", stages.counts[:, lay.shown.stage], plain)
        for kind in range(len(stages.kinds) if lay.any_full else 0):
            whole = lay.full_by_chunk[:, kind][lay.choice]
            kept = kept + whole * (full - plain)[:, kind, None, None]
        # a chunk's input is in the buffer that it was received in, its output stays until its backward
        one = rows.costs.boundary[rows.k]
        kept[:, 0, 0] += one
        kept[:, lay.shown.of[stages.head_stage], -1] -= one
        self.kept = kept
        self.saved = plain, full
        self.puts_off = rows.schedule in ZERO_BUBBLE
        self.held = self._put_off() if self.puts_off else np.zeros_like(kept)
        # the first stage has no input to differentiate by, W does it all
        self.split = self.puts_off & ((lay.shown.stage > 0)[:, None] | (np.arange(stages.vpp) > 0))
        self.layers_behind = _behind(rows)
        params = rows.params.sum(axis=0)
        self.share = (params / params.sum(axis=2, keepdims=True))[rows.grid]
        in_rounds = stages.vpp > 1 and rows.schedule != "zbv"
        each = np.array([rounds(stages.pp, int(m)) if in_rounds else stages.pp for m in rows.num_micro_batches])
        self.walked = rows.num_micro_batches
        if rows.schedule != "gpipe":
            self.walked = np.minimum(self.walked, ROUNDS * each)

    def _put_off(self) -> ArrayN:
        """What a micro-batch whose weights' gradients are put off holds more than in flight. (n, R, vpp) [B]"""
        rows, lay, stages = self.rows, self.rows.layout, self.rows.layout.stages
        plain, full = rows.gather(self.of_layers(lambda one: one.held))
        held = np.einsum("krc,nk->nrc", stages.counts[:, lay.shown.stage], plain)
        for kind in range(len(stages.kinds) if lay.any_full else 0):
            held = held + lay.full_by_chunk[:, kind][lay.choice] * (full - plain)[:, kind, None, None]
        last = lay.shown.of[stages.head_stage]
        head = rows.costs.head.memory  # what is above its weight goes with the loss, which is detached
        held[:, last, -1] += (rows.costs.put_off["head"].held + head.saved - head.above)[rows.k]
        # the output goes with the backward by inputs, as the head has none
        held -= rows.costs.boundary[rows.k, None, None]
        held[:, last, -1] += rows.costs.boundary[rows.k]
        return np.asarray(held)

    def of_layers(self, pick: Callable[[PutOff], ArrayN]) -> ArrayN:
        """Something of layers whose weights' gradients are put off. (modes, K, kinds) [B]"""
        c, kinds = self.rows.costs, self.rows.layout.stages.kinds
        found = np.array([[pick(c.put_off[label(kind, mode)]) for kind in kinds] for mode in c.blocks])
        return np.ascontiguousarray(np.moveaxis(found, 2, 1))

    def apart(self, kind: int, recomputed: int, backward: ArrayN) -> tuple[ArrayN, ArrayN]:
        """What is alive in the backward by inputs of a kind of layer more than in a whole one, of ``backward`` by mode,
        combination and kind, as what weights need stays and all that was saved; and what the layer has at its end, in
        each chunk. (n, R, vpp) [B]"""
        if not self.puts_off:
            nothing = np.zeros((1, 1, 1))
            return nothing, nothing
        before, held = (self.rows.gather(grid)[recomputed][:, kind] for grid in (
            self.of_layers(lambda one: one.before) - backward, self.of_layers(lambda one: one.held),
        ))  # fmt: skip
        alone = held + self.saved[recomputed][:, kind]
        return before[:, None, None] * self.split, alone[:, None, None] * self.split

    def by_weights(
        self, kind: int, recomputed: int, there: NDArray[np.bool_], own_grads: ArrayN
    ) -> Iterator[tuple[tuple[ArrayN, ArrayN], NDArray[np.bool_], ArrayN, ArrayN]]:
        """Inside the last layer of a kind, recomputed or not, whose weights' gradients are put off: what layers before
        it leave stays, such as all that was made again there.

        Parameters
        ----------
        there
            Which chunks have such a layer. (n, R, vpp)
        own_grads
            The layer's share of a stage's gradients, as for :meth:`most`.

        Yields
        ------
        The layer's peaks by mode, combination and kind, and of what; which stages have one, what is kept beside and the
        part of the gradients, as :meth:`most` has both. Nothing where no chunk puts them off.
        """
        there = there & self.split
        if not np.any(there):
            return
        peak, of_last, left, kinds = (self.of_layers(pick) for pick in (
            lambda one: one.peak, lambda one: one.peak_of_last, lambda one: one.left, lambda one: one.kinds.T,
        ))  # fmt: skip
        held, before_last = (
            self.rows.gather(grid)[recomputed][:, kind, None, None]
            for grid in (self.of_layers(lambda one: one.held), peak - of_last)
        )
        alone = self.saved[recomputed][:, kind, None, None] + held - self._more_left(left, kind, recomputed)
        gone = alone + np.where(self._ends(kind, recomputed), before_last, 0.0)
        yield (
            (peak, kinds),
            np.asarray(there.any(axis=2)),
            *self.most("W", np.where(there, gone, np.inf), own_grads=own_grads),
        )

    def _more_left(self, left: ArrayN, kind: int, recomputed: int) -> ArrayN:
        """What layers before the last one of a kind leave of their backward by weights more than they held
        before it, in each chunk; ``left`` by mode, combination and kind. (n, R, vpp) [B]"""
        rows, lay, stages = self.rows, self.rows.layout, self.rows.layout.stages
        held = self.of_layers(lambda one: one.held)
        counts = stages.counts[:, lay.shown.stage]
        whole = lay.full_by_chunk[lay.choice]
        behind = self.layers_behind[:, :, :, kind, recomputed][lay.choice]
        of = np.stack([counts - whole, whole], axis=2) - behind
        of[:, kind, recomputed] -= 1
        more = [a - b - c for a, b, c in zip(rows.gather(left), rows.gather(held), self.saved, strict=True)]
        return np.asarray(np.einsum("nkorc,nko->nrc", np.maximum(of, 0.0), np.stack(more, axis=2)))

    def _ends(self, kind: int, recomputed: int) -> NDArray[np.bool_]:
        """Whether the last layer of a kind is its chunk's last and has no head behind it. (n, R, vpp)"""
        lay = self.rows.layout
        behind = self.layers_behind[:, :, :, kind, recomputed][lay.choice].sum(axis=(1, 2)) == 0
        head = np.zeros(behind.shape[1:], dtype=bool)
        head[lay.shown.of[lay.stages.head_stage], -1] = True
        return np.asarray(behind & ~head)

    def behind(self, kind: int, recomputed: int) -> ArrayN:
        """What layers behind the last one of a kind keep, in each chunk. (n, R, vpp) [B]"""
        layers = self.layers_behind[:, :, :, kind, recomputed][self.rows.layout.choice]
        plain, full = self.saved
        return np.asarray(np.einsum("nkrc,nk->nrc", layers[:, :, 0], plain) + np.einsum(
            "nkrc,nk->nrc", layers[:, :, 1], full))  # fmt: skip

    def most(
        self, way: str, gone: ArrayN, *, ended: bool = False, own_grads: ArrayN | float = 0.0
    ) -> tuple[ArrayN, ArrayN]:
        """What is kept, and the part of the gradients, at the moment at which most is alive. (n, R) each [B, -]

        Parameters
        ----------
        way
            Of forwards, backwards or backwards by weights, as :func:`rank_moments` has it.
        gone
            What of the chunk at hand is not kept then; infinite where a chunk has no such op. (n, R, vpp) [B]
        ended
            Whether the chunk's backward has come to its first layer: what it kept is gone, its gradients are there,
            but for ``own_grads``, that layer's share, where they come for the first time. (n, R)
        """
        rows, lay = self.rows, self.rows.layout
        kept, grads = np.zeros(self.grads.shape), np.zeros(self.grads.shape)
        for m in np.unique(self.walked).tolist():
            mine = np.flatnonzero(self.walked == m)
            at = rank_moments(rows.schedule, rows.framework.name, lay.stages.pp, lay.stages.vpp, m, way)
            stage = lay.shown.stage
            chunk, flying, begun, first = at.chunk[stage], at.flying[stage], at.begun[stage], at.first[stage]
            own, waiting, split = np.eye(lay.stages.vpp)[chunk], at.waiting[stage], at.split[stage][:, :, None]
            if ended:
                flying, begun = flying - own * ~split, np.maximum(begun, own * ~split)
                waiting = waiting + own * split
            elif way == "W":
                begun = np.maximum(begun, own)
            alive = np.einsum("rsc,nrc->nrs", flying, self.kept[mine])
            if waiting.any():
                alive = alive + np.einsum("rsc,nrc->nrs", waiting, self.held[mine])
            there = np.einsum("rsc,nrc->nrs", begun, self.share[mine])
            if ended or way == "W":
                there = there - first * np.broadcast_to(own_grads, self.grads.shape)[mine][:, :, None]
            left = alive - np.take_along_axis(gone[mine], np.broadcast_to(chunk, alive.shape), axis=2)
            best = (left + there * self.grads[mine][:, :, None]).argmax(axis=2)[:, :, None]
            kept[mine] = np.take_along_axis(left, best, axis=2)[:, :, 0]
            grads[mine] = np.take_along_axis(there, best, axis=2)[:, :, 0]
        return kept, np.clip(grads, 0.0, 1.0)
