"""Instants of a step at which the memory of a pipeline stage may be largest, collected; and what is read of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.op import KINDS
from mofa.cost.breakdown import LIVE_COMPONENTS
from mofa.cost.memory.persistent_buffers import persistent_buffer_bytes
from mofa.cost.memory.reserved import LivePeaks
from mofa.cost.memory.saved_in_flight import saved_bytes_in_flight_by_kind, saved_bytes_outside_layers
from mofa.cost.memory.stage_inputs import freed_input_bytes, pipeline_buffer_bytes
from mofa.cost.memory.unsplit_remainders import UnsplitRemainders
from mofa.cost.memory.watchdog_held import watchdog_held_bytes
from mofa.cost.rows import GatheredRows

ArrayN = NDArray[np.float64]

# where a kind of tensor of the tape shows in the report
KIND_COMPONENT = {
    "activation": "activations", "weight_copy": "weight_copies", "grad": "gradients", "state": "optimizer_states",
    "buffer": "buffers", "scratch": "temporaries",
}  # fmt: skip
SHORTFALL_COMPONENTS = {True: ("parameters", "buffers"), False: ("buffers", "weight_copies", "parameters")}
"""With and without a pipeline: components that count more gathered weights or reduced gradients than an instant has."""
_ROW = np.array([LIVE_COMPONENTS.index(KIND_COMPONENT[kind]) for kind in KINDS])


@dataclass(frozen=True)
class PeakInstant:
    """One instant: bytes alive per stage, -inf where it does not occur, and what they are made of. (n, R) [B]

    ``freed_bytes`` of the kept activations is gone by then, all where None; ``grads`` is the part of the gradients that
    is there, ``copies`` are weight copies besides, ``leftover_bytes`` what earlier computations left;
    ``sums`` of it are reduced gradients that wait for their sum over replicas. ``transient`` gives the kinds that the
    op holds for the candidates at these positions. (len(KINDS), len(at))
    ``inside`` says where it is: a layer's forward or backward, or the loss.
    """

    name: str
    inside: str
    total: ArrayN
    freed_bytes: ArrayN | float | None
    grads: ArrayN | float
    copies: ArrayN | float
    leftover_bytes: ArrayN | float
    sums: ArrayN | float
    transient: Callable[[NDArray[np.intp]], ArrayN]


class PeakCandidateMemory:
    """Peak candidates of all stages, as they were added, and how to take each apart."""

    def __init__(self, rows: GatheredRows) -> None:
        self.rows = rows
        lay, static = rows.stage_layers, rows.static
        self.grads = static.grads[rows.grid_index]
        self.buffers = static.buffers[rows.grid_index] + pipeline_buffer_bytes(rows) + persistent_buffer_bytes(rows)
        self.fixed = (static.params + static.states)[rows.grid_index] + self.buffers
        self.ends_saved = saved_bytes_outside_layers(rows)
        of_layers = rows.sum_over_layers(
            rows.layers.saved_bytes, lay.base_mode_in_flight, lay.fully_recomputed_in_flight, "nkr,nk->nr"
        )
        self.activations = of_layers + self.ends_saved
        self.shelved, self.let_go = watchdog_held_bytes(rows), freed_input_bytes(rows)
        self.all: list[PeakInstant] = []
        self.rests: UnsplitRemainders | None = None

    def add_candidate(
        self, name: str, where: NDArray[np.bool_], transient: ArrayN, kinds: Callable[[NDArray[np.intp]], ArrayN],
        freed_bytes: ArrayN | float | None, *, grads: ArrayN | float, copies: ArrayN | float = 0.0, inside: str = "",
        leftover_bytes: ArrayN | float = 0.0, sums: ArrayN | float = 0.0, direction: str = "",
    ) -> None:  # fmt: skip
        """An instant that occurs ``where`` (n, R), at which an op holds ``transient`` (n,), of such ``kinds``.

        Inside of layers, at the loss, is behind a forward; outside of all is behind a backward. ``direction`` is of the
        computation that it is in, empty outside of all.
        """
        leftover_bytes = leftover_bytes + self.shelved[not inside] + sums
        if direction:
            leftover_bytes = leftover_bytes - self.let_go[direction == "backward"]
        alive = self.fixed + grads * self.grads + transient[:, None] + copies + leftover_bytes
        if freed_bytes is not None:
            alive += self.activations - freed_bytes
        total = np.where(where, alive, -np.inf)
        self.all.append(PeakInstant(name, inside, total, freed_bytes, grads, copies, leftover_bytes, sums, kinds))

    def largest_bytes_and_instant(self) -> tuple[ArrayN, NDArray[np.int64]]:
        """The largest of all instants and which it is: of those that only rounding tells apart, the first. (n, R)"""
        largest = self.all[0].total
        for candidate in self.all[1:]:
            largest = np.maximum(largest, candidate.total)
        enough = largest - 1e-12 * np.abs(largest)
        which = np.zeros(largest.shape, dtype=np.int64)
        for i in reversed(range(len(self.all))):
            which[self.all[i].total >= enough] = i
        return largest, which

    def freed_bytes_by_step_end(self) -> ArrayN:
        """What a step has freed by its end of what was alive at most, its gradients not among it. (n, R) [B]"""
        most = np.maximum.reduce([candidate.total for candidate in self.all[:-1]])
        at_end = self.all[-1].total - self.rows.static.step_scratch[self.rows.grid_index]
        return np.asarray(np.maximum(most - at_end, 0.0))

    def add_unsplit_remainders(self, rests: UnsplitRemainders) -> None:
        """Add to all instants what the allocator left whole."""
        self.rests = rests
        for candidate in self.all:
            candidate.total[:] += rests.params + rests.states
        self.all[-1].total[:] += rests.step_scratch

    def largest_bytes_without_gradients(self) -> ArrayN:
        """The most alive that is no gradient, nor waits for its sum over replicas. (n, R) [B]"""
        return np.asarray(np.maximum.reduce([self._without_gradients(candidate) for candidate in self.all]))

    def _without_gradients(self, candidate: PeakInstant) -> ArrayN:
        return np.asarray(candidate.total - candidate.grads * self.grads - candidate.sums)

    def live_peaks(self, most: ArrayN, *, without_gradients: bool = False) -> LivePeaks:
        """The most alive at each kind of instant, where ``most`` is what is alive at all. (n, R) [B]

        ``without_gradients``: all without gradients, which have a pool of their own; ``most`` has none either.
        """

        def of(inside: tuple[str, ...], grads: bool) -> ArrayN:
            totals = [
                self._without_gradients(candidate) if without_gradients or not grads else candidate.total
                for candidate in self.all
                if candidate.inside in inside
            ]
            most_of = np.maximum.reduce(totals)
            if "forward" not in inside or np.all(has_layers):
                return np.asarray(most_of)
            return np.where(has_layers, most_of, self.fixed)  # an end alone has what lasts

        has_layers = self.rows.stage_layers.layer_counts.sum(axis=1) > 0
        forward, piped = ("forward",), self.rows.mode.pipelined
        return LivePeaks(
            of(forward, True), of(("forward", "backward"), True), of(("loss",), True), most,
            of(forward, False) if piped else most, of(("forward", "backward", "loss", ""), False) if piped else most,
            self.grads, self.buffers,
        )  # fmt: skip

    def live_components_at_peaks(
        self, rows_at: NDArray[np.intp], instant: NDArray[np.int64], stage: NDArray[np.intp]
    ) -> ArrayN:
        """Live components of candidates ``rows_at``, each at one instant of one stage. (len(LIVE_COMPONENTS),
        len(at))"""
        rows = self.rows
        out = np.zeros((len(LIVE_COMPONENTS), len(rows_at)))
        place = {name: i for i, name in enumerate(LIVE_COMPONENTS)}
        of = rows.grid_index[rows_at]
        out[place["parameters"]] = rows.static.params[of, stage]
        out[place["gradients"]] = self.grads[rows_at, stage]
        out[place["optimizer_states"]] = rows.static.states[of, stage]
        out[place["buffers"]] = self.buffers[rows_at, stage]
        if self.rests is not None:
            out[place["parameters"]] += self.rests.params[rows_at, stage]
            out[place["optimizer_states"]] += self.rests.states[rows_at, stage]
        activations, in_flight = self.activations[rows_at, stage], saved_bytes_in_flight_by_kind(rows, rows_at, stage)
        for i in sorted(set(instant.tolist())):
            candidate, chosen = self.all[i], np.flatnonzero(instant == i)
            where = rows_at[chosen], stage[chosen]
            out[place["gradients"], chosen] *= _entries(candidate.grads, where)
            live = candidate.transient(rows_at[chosen])
            if candidate.freed_bytes is not None:
                some = activations[chosen]
                left = np.clip(
                    (some - _entries(candidate.freed_bytes, where)) / np.where(some > 0, some, 1.0), 0.0, 1.0
                )
                live = live + in_flight[:, chosen] * np.where(some > 0, left, 0.0)
            out[_ROW[:, None], chosen] += live
            out[place["activations"], chosen] += _entries(candidate.leftover_bytes, where)
            copies = _entries(candidate.copies, where)
            out[place["weight_copies"], chosen] += np.maximum(copies, 0.0)
            # less than none where a pipeline's weights are not gathered, or an end of the model is less than a block
            shortfall_bytes = -np.minimum(copies, 0.0) * np.ones(len(chosen))
            for name in SHORTFALL_COMPONENTS[rows.mode.pipelined]:
                taken_bytes = np.minimum(shortfall_bytes, out[place[name], chosen])
                out[place[name], chosen] -= taken_bytes
                shortfall_bytes = shortfall_bytes - taken_bytes
            if i == len(self.all) - 1:
                out[place["temporaries"], chosen] += rows.static.step_scratch[of[chosen], stage[chosen]]
                out[place["temporaries"], chosen] += 0.0 if self.rests is None else self.rests.step_scratch[where]
        if rows.mode.amp:  # DDP's buckets, which hold gradients that are reduced
            out[place["gradients"]] += rows.static.buffers[of, stage]
            out[place["buffers"]] -= rows.static.buffers[of, stage]
        return out


def _entries(quantity: ArrayN | float, where: tuple[NDArray[np.intp], NDArray[np.intp]]) -> ArrayN | float:
    """Entries of something of candidates and stages; (n, R), (n, 1) or a number."""
    if isinstance(quantity, float):
        return quantity
    return np.asarray(quantity[where[0], where[1] if quantity.shape[1] > 1 else 0])
