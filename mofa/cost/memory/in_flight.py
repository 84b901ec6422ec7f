"""Bytes of in-flight micro-batches and gradients of a pipeline rank under PyTorch, chunk by chunk.

PyTorch's FSDP under pipelines makes a chunk's unsharded gradients in its first backward. With few micro-batches, most
activations are in flight before these gradients are there; with many, both are alive at once. Candidates for the peak
are moments of the schedule's order. One drops out if another of the same chunk has as much in flight of every chunk,
and as many chunks' gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.tapes import layer_label
from mofa.cost.block.deferred_weight_gradients import SplitBackwardMemory
from mofa.cost.memory.chunk_layer_order import (
    layers_ahead_of_first_by_mode,
    layers_behind_last_by_mode,
    sum_over_modes,
)
from mofa.cost.memory.fsdp_unsharded import CHUNKS_AHEAD, gathered_bytes_and_unreduced_share
from mofa.cost.rank_rules import reduces_gradients_by_chunk
from mofa.cost.rows import GatheredRows
from mofa.schedules import Runtime, computation_order_of
from mofa.schedules.interleaved import micro_batches_per_round

ArrayN = NDArray[np.float64]
WALKED_ROUNDS = 4
"""Rounds of micro-batches after which a rank holds nothing new. [-]"""
AT_ONCE = 64
"""Moments that are compared with all others in one call. [-]"""
MOST_ORDERS = 1024
"""Orders of computations whose moments are kept: a search of 512 GPUs under FSDP passes through 600. [-]"""
KINDS = ("F", "B", "W", "R")
"""What moments are of: forwards, backwards whole or by inputs, backwards by weights, reductions."""


@dataclass(frozen=True)
class InFlightAtComputations:
    """What each rank has in flight at its computations, padded by the last: the chunk that computes (ranks, moments),
    micro-batches in flight, which chunks have gradients, micro-batches whose weights' gradients are put off, which
    chunks' weights are away and whose gradients are reduced (ranks, moments, vpp), whether the chunk's own gradients
    come now, and whether its backward puts them off (ranks, moments)."""

    chunk: NDArray[np.intp]
    in_flight: ArrayN
    has_gradients: ArrayN
    deferred: ArrayN
    weights_freed: ArrayN
    reduced: ArrayN
    gradients_come_now: NDArray[np.bool_]
    defers_now: NDArray[np.bool_]


@lru_cache(maxsize=MOST_ORDERS)
def in_flight_at_computations(
    schedule: str, runtime: Runtime, pp: int, vpp: int, num_micro_batches: int, kind: str, unshards: bool = False,
    ranks: tuple[int, ...] | None = None,
) -> InFlightAtComputations:  # fmt: skip
    """What ranks have in flight at forwards (``kind`` F), at backwards (B), whole or by inputs, at backwards by weights
    (W), or at reductions (R), which FSDP does behind each chunk's last backward where it ``unshards`` them one by one;
    on some ``ranks``, all where absent.

    Examples
    --------
    Rank 0 of two in 1F1B: of the second forward on two are in flight, first without gradients, later with them.

    >>> backward = in_flight_at_computations("1f1b", "pytorch", 2, 1, 4, "B")
    >>> backward.in_flight[0, :, 0], backward.has_gradients[0, :, 0]
    (array([2., 2.]), array([0., 1.]))
    """
    known = _known_states(schedule, runtime, pp, vpp, num_micro_batches, unshards)
    asked = range(pp) if ranks is None else ranks
    if not known.keys() >= set(asked):
        order = computation_order_of(schedule, runtime, pp, vpp, num_micro_batches)
        for r in asked:
            if r not in known:
                computations = [(a.effective_kind or "", order.chunk_of(a.stage)) for a in order.ranks[r]]
                known[r] = _states_of_rank(computations, vpp, unshards)
    of_ranks = [known[r][kind] for r in asked]
    most = max(len(rank) for rank in of_ranks)
    full = np.array([
        [(chunk, *flying, *begun, *waiting, *away, *reduced, first, split)
         for chunk, flying, begun, waiting, away, reduced, first, split in rank + rank[-1:] * (most - len(rank))]
        for rank in of_ranks
    ], dtype=float)  # fmt: skip
    flying, begun, waiting, away, reduced = (full[:, :, 1 + i * vpp : 1 + (i + 1) * vpp] for i in range(5))
    chunk, first, split = full[:, :, 0].astype(np.intp), full[:, :, -2] > 0, full[:, :, -1] > 0
    return InFlightAtComputations(chunk, flying, begun, waiting, away, reduced, first, split)


_Each = tuple[int, ...]
_State = tuple[int, _Each, _Each, _Each, _Each, _Each, bool, bool]
"""Chunk, in flight, gradients begun, put off, weights away, gradients reduced, whether the chunk's own come now, and
are put off."""


@lru_cache(maxsize=MOST_ORDERS)
def _known_states(*order: object) -> dict[int, dict[str, list[_State]]]:
    """The moments of an order's ranks that were asked for so far, by the kinds of :func:`in_flight_at_computations`."""
    return {}


def _states_of_rank(computations: Sequence[tuple[str, int]], vpp: int, unshards: bool) -> dict[str, list[_State]]:
    """The moments of a rank, by kind."""
    flying, begun, waiting, reduced = [0] * vpp, [0] * vpp, [0] * vpp, [0] * vpp
    ahead = list(dict.fromkeys(chunk for _, chunk in computations))[:CHUNKS_AHEAD]
    away = [int(unshards and chunk not in ahead) for chunk in range(vpp)]
    lasts = {chunk: n for n, (_, chunk) in enumerate(computations)} if unshards else {}
    seen: dict[str, dict[_State, None]] = {kind: {} for kind in KINDS}

    def add_state(of_kind: str, chunk: int, own: bool, split: bool) -> None:
        of_each = tuple(flying), tuple(begun), tuple(waiting), tuple(away), tuple(reduced)
        seen[of_kind][chunk, *of_each, own, split] = None

    for n, (kind, chunk) in enumerate(computations):
        flying[chunk] += kind == "F"
        away[chunk] = 0
        if kind:
            add_state("B" if kind == "I" else kind, chunk, kind in ("B", "W") and not begun[chunk], kind == "I")
        waiting[chunk] += (kind == "I") - (kind == "W")
        if kind in ("B", "W"):
            flying[chunk] -= 1
            begun[chunk] = 1
        if lasts.get(chunk) == n:
            add_state("R", chunk, False, False)
            begun[chunk], away[chunk], reduced[chunk] = 0, 1, 1
    return {kind: _uncovered(states) for kind, states in seen.items()}


def _uncovered(seen: dict[_State, None]) -> list[_State]:
    """The moments that no other one of the same chunk covers."""
    alike: dict[tuple[int, bool, bool], list[_State]] = {}
    for state in seen:
        alike.setdefault((state[0], state[6], state[7]), []).append(state)
    covered = {state for states in alike.values() if len(states) > 1 for state in _covered(states)}
    return [state for state in seen if state not in covered]


def _covered(states: list[_State]) -> Iterator[_State]:
    """Those of different moments of a chunk of which another has at least as much of everything: of a chunk's weights
    and gradients there is more before they are reduced than behind it."""
    much = np.array([(*state[1], *state[2], *state[3], *(-n for n in state[4])) for state in states])
    for start in range(0, len(states), AT_ONCE):
        as_much = np.all(much[None] >= much[start : start + AT_ONCE, None], axis=2).sum(axis=1)
        yield from (states[start + i] for i in np.flatnonzero(as_much > 1).tolist())


class InFlightPeak(NamedTuple):
    """What is alive at the moment at which most is, of each stage. (n, R) each

    Bytes that are kept of micro-batches, the part of the gradients, and the bytes of weights that are gathered less
    than all, or more, where something else is beside them.
    """

    kept_bytes: ArrayN
    grads: ArrayN
    copies: ArrayN


class _Moments(NamedTuple):
    """What candidates have at some moments of their ranks, whatever the op is that runs then.

    ``place`` is the chunk that computes, among all of a rank's (R, moments); ``alive`` what is in flight or put off
    [B], ``begun`` the part of the gradients of chunks that have some, ``first`` whether the chunk's own come now, where
    that matters (R, moments); ``reduced`` and ``away`` the part of gradients and the bytes of weights that FSDP's
    reductions take, where chunks have their own. (n, R, moments)
    """

    place: NDArray[np.intp]
    alive: ArrayN
    begun: ArrayN
    first: NDArray[np.bool_] | None
    reduced: ArrayN | None
    away: ArrayN | None

    def of_chunk(self, by_chunk: ArrayN) -> ArrayN:
        """Of the chunk that computes, what is said of each. (n, R, vpp) -> (n, R, moments)"""
        return by_chunk.reshape(len(by_chunk), -1).take(self.place, axis=1)


class PipelinePeakMoments:
    """When in a pipeline of PyTorch in-flight micro-batches and gradients together hold most, and what is alive then.

    Of candidates of one pp x vpp.
    """

    def __init__(self, rows: GatheredRows, grads: ArrayN, whole_table: ArrayN) -> None:
        """``grads`` are all gradients of a stage, ``whole_table`` what of them the embedding's has over its parameter.
        (n, R) each [B]"""
        lay, stages = rows.stage_layers, rows.stage_layers.stages
        self.rows, self.grads = rows, grads
        self.reduces_by_chunk = reduces_gradients_by_chunk(rows)
        self.copies, self.reduced = gathered_bytes_and_unreduced_share(rows, grads)
        plain, full = rows.in_base_and_full_mode(rows.layers.saved_bytes)
        per_micro_batch = np.einsum("krc,nk->nrc", stages.layer_counts[:, lay.shown.shown_stages], plain)
        for kind in range(len(stages.kinds) if lay.any_fully_recomputed else 0):
            recomputed = lay.fully_recomputed_by_chunk[:, kind][lay.recompute_choice]
            per_micro_batch = per_micro_batch + recomputed * (full - plain)[:, kind, None, None]
        # a chunk's input is in the buffer that it was received in, its output stays until its backward
        boundary = rows.costs.stage_boundary_bytes[rows.k]
        per_micro_batch[:, 0, 0] += boundary
        per_micro_batch[:, lay.head_stage_index, -1] -= boundary
        self.loss = np.zeros_like(per_micro_batch)
        """What the head keeps of a micro-batch until its backward: several wait where all forwards come first, and the
        one that computes has it in its own op. (n, R, vpp) [B]"""
        if rows.schedule_record.forwards_first:
            self.loss[:, lay.head_stage_index, -1] = rows.costs.head.memory.saved[rows.k]
        self.per_micro_batch = per_micro_batch + self.loss
        self.output = np.zeros_like(per_micro_batch)
        """What the last stage's output holds until its micro-batch's backward is through. (n, R, vpp) [B]"""
        self.output[:, lay.head_stage_index, -1] = rows.costs.logits_bytes[rows.k]
        self.saved = plain, full
        self.layers_behind, self.layers_ahead = (
            of_choices(rows)[lay.recompute_choice]
            for of_choices in (layers_behind_last_by_mode, layers_ahead_of_first_by_mode)
        )
        self.defers_weight_gradients = rows.schedule_record.defers_weight_gradients
        self.detached = self._detached()
        """What the end of a backward by inputs lets go of what a chunk's last layer, or the head, saved: its graph
        above its last weight, which is detached (torch.distributed.pipelining, ``stage_backward_input``).
        (n, R, vpp) [B]"""
        self.deferred = self._deferred() if self.defers_weight_gradients else np.zeros_like(per_micro_batch)
        # the first stage has no input to differentiate by, W does it all
        self.split = self.defers_weight_gradients & (
            (lay.shown.shown_stages > 0)[:, None] | (np.arange(stages.vpp) > 0)
        )
        params = rows.params.sum(axis=0)
        self.params_share = (params / params.sum(axis=2, keepdims=True))[rows.grid_index]
        of_table = (whole_table / np.maximum(grads, 1.0))[:, :, None]
        self.grads_share = self.params_share * (1.0 - of_table)
        self.grads_share[:, :, 0] += of_table[:, :, 0]
        in_rounds = stages.vpp > 1 and rows.schedule_record.runs_in_equal_rounds
        each = np.array(
            [micro_batches_per_round(stages.pp, int(m)) if in_rounds else stages.pp for m in rows.num_micro_batches]
        )
        self.walked = rows.num_micro_batches
        if not rows.schedule_record.forwards_first:
            self.walked = np.minimum(self.walked, WALKED_ROUNDS * each)
        self.lengths = [(m, np.flatnonzero(self.walked == m)) for m in np.unique(self.walked).tolist()]
        """Numbers of micro-batches whose orders are walked, and the candidates that have so many."""
        self.moments: dict[tuple[str, bool], list[_Moments]] = {}
        """What is alive at the moments of a kind, and whether behind a chunk's backward; of each of these lengths."""

    def _detached(self) -> ArrayN:
        """Of layers without a checkpoint around: others keep their input alone, which stays. (n, R, vpp) [B]"""
        rows, lay, stages = self.rows, self.rows.stage_layers, self.rows.stage_layers.stages
        above, _ = rows.in_base_and_full_mode(rows.layers.stack_of_blocks(lambda c: c.memory.freed_before_last_weight))
        counts = stages.layer_counts[:, lay.shown.shown_stages]
        detached = np.zeros_like(self.loss)
        for kind in range(len(stages.kinds)):
            has = counts[kind] > lay.fully_recomputed_by_chunk[:, kind][lay.recompute_choice]
            detached += np.where(has & self.is_last_of_chunk_without_head(kind, 0), above[:, kind, None, None], 0.0)
        head = rows.costs.head.memory  # what is above its weight goes with the loss
        detached[:, lay.head_stage_index, -1] = head.freed_before_last_weight[rows.k]
        return np.asarray(detached * self.defers_weight_gradients)

    def _deferred(self) -> ArrayN:
        """What a micro-batch whose weights' gradients are put off holds more than in flight. (n, R, vpp) [B]"""
        rows, lay, stages = self.rows, self.rows.stage_layers, self.rows.stage_layers.stages
        plain, full = rows.in_base_and_full_mode(
            self.split_backward_bytes_by_layer_kind(lambda costs: costs.between_halves)
        )
        deferred = np.einsum("krc,nk->nrc", stages.layer_counts[:, lay.shown.shown_stages], plain)
        for kind in range(len(stages.kinds) if lay.any_fully_recomputed else 0):
            deferred = (
                deferred
                + lay.fully_recomputed_by_chunk[:, kind][lay.recompute_choice] * (full - plain)[:, kind, None, None]
            )
        last = lay.head_stage_index
        head_bytes = rows.costs.split_backward_memories["head"].between_halves + rows.costs.head.memory.saved
        deferred[:, last, -1] += head_bytes[rows.k]
        deferred -= self.detached
        # the output goes with the backward by inputs, as the head has none
        deferred -= rows.costs.stage_boundary_bytes[rows.k, None, None]
        deferred[:, last, -1] += rows.costs.stage_boundary_bytes[rows.k]
        return np.asarray(deferred)

    def split_backward_bytes_by_layer_kind(self, pick: Callable[[SplitBackwardMemory], ArrayN]) -> ArrayN:
        """What ``pick`` takes of the memory of layers whose weights' gradients are deferred. (modes, K, kinds) [B]"""
        c, kinds = self.rows.costs, self.rows.stage_layers.stages.kinds
        by_mode = np.array(
            [[pick(c.split_backward_memories[layer_label(kind, mode)]) for kind in kinds] for mode in c.blocks]
        )
        return np.ascontiguousarray(np.moveaxis(by_mode, 2, 1))

    def live_bytes_in_backward_by_inputs(self, kind: int, recomputed: int, backward: ArrayN) -> tuple[ArrayN, ArrayN]:
        """What is alive in the backward by inputs of a kind of layer more than in its block, of ``backward`` by mode,
        combination and kind: the last stage's output, and of a backward that is split what weights need and all that
        was saved; and what the layer has at its end, less what that end is yet to let go, in each chunk.
        (n, R, vpp) [B]"""
        if not self.defers_weight_gradients:
            return self.output, np.zeros((1, 1, 1))
        before, between_halves = (self.rows.in_base_and_full_mode(grid)[recomputed][:, kind] for grid in (
            self.split_backward_bytes_by_layer_kind(lambda costs: costs.peak_by_inputs) - backward,
            self.split_backward_bytes_by_layer_kind(lambda costs: costs.between_halves),
        ))  # fmt: skip
        of_layer = (between_halves + self.saved[recomputed][:, kind])[:, None, None]
        alone = of_layer - (self.detached - self.output)  # the output is among what the head saved
        return before[:, None, None] * self.split + self.output, alone * self.split

    def is_last_of_chunk_without_head(self, kind: int, recomputed: int) -> NDArray[np.bool_]:
        """Whether the last layer of a kind is its chunk's last and has no head behind it. (n, R, vpp)"""
        behind = self.layers_behind[:, :, :, kind, recomputed].sum(axis=(1, 2)) == 0
        head = np.zeros(behind.shape[1:], dtype=bool)
        head[self.rows.stage_layers.head_stage_index, -1] = True
        return np.asarray(behind & ~head)

    def saved_bytes_of_layers_behind(self, kind: int, recomputed: int) -> ArrayN:
        """What layers behind the last one of a kind keep, in each chunk. (n, R, vpp) [B]"""
        return sum_over_modes(self.layers_behind[:, :, :, kind, recomputed], *self.saved)

    def kept_bytes_of_layers_ahead(self, kind: int, recomputed: int) -> ArrayN:
        """What layers ahead of the first one of a kind, whose backward is yet to come, keep more than behind it: less
        where it only leaves what weights need. In each chunk. (n, R, vpp) [B]"""
        ahead = self.layers_ahead[:, :, :, kind, recomputed]
        saved = sum_over_modes(ahead, *self.saved)
        if not self.defers_weight_gradients:
            return saved
        between = self.split_backward_bytes_by_layer_kind(lambda costs: costs.between_halves)
        return np.where(self.split, -sum_over_modes(ahead, *self.rows.in_base_and_full_mode(between)), saved)

    def in_flight_peak(
        self, kind: str, gone: ArrayN, *, ended: bool = False, own_grads: ArrayN | float = 0.0,
        behind_grads: ArrayN | float = 0.0, beside: ArrayN | float = 0.0,
    ) -> InFlightPeak:  # fmt: skip
        """What is alive at the moment at which most is.

        Parameters
        ----------
        kind
            Of forwards, backwards, backwards by weights or reductions, as :func:`in_flight_at_computations` has it.
        gone
            What of the chunk at hand is not kept then; infinite where a chunk has no such op. (n, R, vpp) [B]
        ended
            Whether the chunk's backward has come to its first layer: what it kept is gone, its gradients are there,
            but for ``own_grads``, those of that layer and of what is ahead of it, where they come for the first time.
            (n, R, vpp)
        behind_grads
            The share of a stage's gradients that is made behind the op in its chunk, which its first backward has made
            by then; below 0 where they count as there and come later. (n, R, vpp)
        beside
            What the op has of weights beside. (n, R, vpp) [B]
        """
        kept_bytes, grads, copies = (np.zeros(self.grads.shape) for _ in range(3))
        for (_, of_length), moments in zip(self.lengths, self._moments_of(kind, ended), strict=True):
            there, left = moments.begun, moments.alive - moments.of_chunk(gone[of_length])
            if kind in ("F", "B") and not ended:
                left = left - moments.of_chunk(self.loss[of_length])
            if moments.first is not None:
                made = np.broadcast_to(behind_grads - own_grads, self.per_micro_batch.shape)[of_length]
                there = there + moments.first * moments.of_chunk(made)
            more = np.zeros(left.shape)
            if moments.reduced is not None and moments.away is not None:
                there = there + moments.reduced
                more -= moments.away
            if np.any(beside):
                more += moments.of_chunk(np.broadcast_to(beside, self.per_micro_batch.shape)[of_length])
            best = (left + there * self.grads[of_length][:, :, None] + more).argmax(axis=2)
            place = np.arange(best.size) * left.shape[2] + best.reshape(-1)
            for out, of in ((kept_bytes, left), (grads, there), (copies, more)):
                out[of_length] = of.reshape(-1)[place].reshape(best.shape)
        return InFlightPeak(kept_bytes, np.clip(grads, 0.0, 1.0), copies)

    def _moments_of(self, kind: str, ended: bool) -> list[_Moments]:
        """The moments of each length, made when they are first asked for."""
        if (kind, ended) not in self.moments:
            self.moments[kind, ended] = [self._moments(kind, ended, *length) for length in self.lengths]
        return self.moments[kind, ended]

    def _moments(self, kind: str, ended: bool, num_micro_batches: int, of_length: NDArray[np.intp]) -> _Moments:
        rows, lay = self.rows, self.rows.stage_layers
        vpp, ranks = lay.stages.vpp, tuple(lay.shown.shown_stages.tolist())
        states = in_flight_at_computations(
            rows.schedule, rows.framework.traits.runtime, lay.stages.pp, vpp, num_micro_batches, kind,
            self.reduces_by_chunk,
            ranks,
        )  # fmt: skip
        chunk, flying, begun = states.chunk, states.in_flight, states.has_gradients
        own, waiting, split = np.eye(vpp)[chunk], states.deferred, states.defers_now[:, :, None]
        if ended:
            flying, begun = flying - own * ~split, np.maximum(begun, own * ~split)
            waiting = waiting + own * split
        elif kind == "W":
            begun = np.maximum(begun, own)
        alive = np.einsum("rsc,nrc->nrs", flying, self.per_micro_batch[of_length])
        if waiting.any():
            alive = alive + np.einsum("rsc,nrc->nrs", waiting, self.deferred[of_length])
        grads_share, share = self.grads_share[of_length], self.params_share[of_length]
        reduced, away = None, None
        if self.reduces_by_chunk:
            reduced = np.einsum("rsc,nrc->nrs", states.reduced, share) * self.reduced[of_length][:, :, None]
            away = np.einsum("rsc,nrc->nrs", states.weights_freed, share) * self.copies[of_length][:, :, None]
        return _Moments(
            np.arange(len(ranks))[:, None] * vpp + chunk, alive, np.einsum("rsc,nrc->nrs", begun, grads_share),
            states.gradients_come_now if ended or kind in ("B", "W") else None, reduced, away,
        )  # fmt: skip
