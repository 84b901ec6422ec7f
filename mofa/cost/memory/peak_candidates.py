"""The instants at which the memory of a pipeline stage may be largest, and what is alive at each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.op import KINDS
from mofa.cost.breakdown import LIVE_COMPONENTS
from mofa.cost.memory.dispatcher_retention import BACKWARD, FORWARD, Retention
from mofa.cost.memory.fsdp_neighbours import gathered_embedding_swap_bytes, reduced_head_swap_bytes
from mofa.cost.memory.fsdp_root import gathers_ends, tied_head_gradient_bytes, waiting_head_gradient_bytes
from mofa.cost.memory.fsdp_unsharded import reduction_bytes, unsharded
from mofa.cost.memory.in_flight import InFlight, InFlightPeak
from mofa.cost.memory.persistent_buffers import persistent_buffer_bytes
from mofa.cost.memory.replica_sums import waiting_sums_bytes
from mofa.cost.memory.reserved import LivePeaks
from mofa.cost.memory.saved_in_flight import ends_saved_bytes, saved_by_kind
from mofa.cost.memory.stage_inputs import held_input_bytes, let_go_input_bytes, pipeline_buffer_bytes, sent_part_bytes
from mofa.cost.memory.unsplit_rests import UnsplitRests
from mofa.cost.memory.watchdog_held import shelved_bytes
from mofa.cost.optimizer import whole_embedding_gradient
from mofa.cost.rank_rules import gathers_whole
from mofa.cost.rows import Rows
from mofa.specs.model import ModelSpec
from mofa.specs.params import embedding_params, head_params, layer_params

ArrayN = NDArray[np.float64]

# where a kind of tensor of the tape shows in the report
KIND_COMPONENT = {
    "activation": "activations", "weight_copy": "weight_copies", "grad": "gradients", "state": "optimizer_states",
    "buffer": "buffers", "scratch": "temporaries",
}  # fmt: skip
_ROW = np.array([LIVE_COMPONENTS.index(KIND_COMPONENT[kind]) for kind in KINDS])


@dataclass(frozen=True)
class _Instant:
    """One instant: bytes alive per stage, -inf where it does not occur, and what they are made of. (n, R) [B]

    ``minus`` of the kept activations is gone by then, all where None; ``grads`` is the part of the gradients that is
    there, ``copies`` are weight copies besides, ``lingers`` what earlier computations left; ``transient`` gives the
    kinds that the op holds for the candidates at these positions. (len(KINDS), len(at)) ``inside`` says where it is: a
    layer's forward or backward, or the loss.
    """

    name: str
    inside: str
    total: ArrayN
    minus: ArrayN | float | None
    grads: ArrayN | float
    copies: ArrayN | float
    lingers: ArrayN | float
    transient: Callable[[NDArray[np.intp]], ArrayN]


class PeakCandidates:
    """Builds the instants of all stages and remembers how to take each apart."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        lay, static = rows.layout, rows.static
        self.n, self.num_shown = len(rows.table), len(lay.shown.stage)
        self.grads = static.grads[rows.grid]
        self.whole_table = whole_embedding_gradient(
            rows.workload, rows.framework, rows.mode.precision, rows.mode.pipelined, rows.grids.tp, rows.is_first
        )[rows.grid]
        self.buffers = static.buffers[rows.grid] + pipeline_buffer_bytes(rows) + persistent_buffer_bytes(rows)
        self.fixed = (static.params + static.states)[rows.grid] + self.buffers
        self.saved_plain, self.saved_full = rows.of_base_and_full(rows.layers.saved)
        self.ends_saved = ends_saved_bytes(rows)
        of_layers = rows.sum_over_layers(rows.layers.saved, lay.plain_in_flight, lay.full_in_flight, "nkr,nk->nr")
        self.activations = of_layers + self.ends_saved
        self.retention = Retention(rows)
        self.shelved, self.let_go = shelved_bytes(rows), let_go_input_bytes(rows)
        self.sums = waiting_sums_bytes(rows)
        self.all: list[_Instant] = []
        self.rests: UnsplitRests | None = None

    def _layer_grads(self, kind: int, num_layers: float = 1.0) -> ArrayN:
        """Share of a stage's gradients that layers of a kind and the embedding, or the stage's last work, make.

        When the first layer's backward runs, neither its own gradients nor the embedding's exist yet.
        """
        p, t = layer_params(self.rows.workload.model, self.rows.layout.stages.kinds[kind].moe), self.rows.grids
        dense = num_layers * ((p.matrices_tp + p.shared) / t.tp + p.replicated)[:, None]
        dense = dense + self._end_params(embedding_params)
        return self._share_of_grads(dense, num_layers * (p.routed / (t.ep * t.etp))[:, None], embedding=True)

    @property
    def _embedding_share(self) -> ArrayN:
        """Share of a stage's gradients that is the embedding's. (n, R) [-]"""
        return self._share_of_grads(self._end_params(embedding_params), embedding=True)

    def _end_params(self, count: Callable[[ModelSpec], int]) -> ArrayN:
        """Parameters of the embedding, on its stage. (grids, R)"""
        return np.asarray((count(self.rows.workload.model) / self.rows.grids.tp)[:, None] * self.rows.is_first)

    def _share_of_grads(self, dense: ArrayN, expert: ArrayN | float = 0.0, *, embedding: bool = False) -> ArrayN:
        """The share of a stage's gradients that some parameters make. (n, R) [-]

        The ``embedding`` is among them or not: its gradient may be larger than it is.
        """
        rows, s = self.rows, self.rows.shards
        sharded = rows.mode.precision == "mixed" and not rows.mode.pipelined
        dense_ranks, expert_ranks = (s.dense_ranks, s.expert_ranks) if sharded else (1.0, 1.0)
        all_grads = s.dense / dense_ranks + s.expert / expert_ranks
        share = np.clip((dense / dense_ranks + expert / expert_ranks) / all_grads, 0.0, 1.0)[rows.grid]
        of_table = self.whole_table / np.maximum(self.grads, 1.0)
        return np.asarray(share * (1.0 - of_table) + of_table * embedding)

    def add(
        self, name: str, where: NDArray[np.bool_], transient: ArrayN, kinds: Callable[[NDArray[np.intp]], ArrayN],
        minus: ArrayN | float | None, *, grads: ArrayN | float, copies: ArrayN | float = 0.0, inside: str = "",
        lingers: ArrayN | float = 0.0, direction: str = "",
    ) -> None:  # fmt: skip
        """An instant that occurs ``where`` (n, R), at which an op holds ``transient`` (n,), of such ``kinds``.

        Inside of layers, at the loss, is behind a forward; outside of all is behind a backward. ``direction`` is of the
        computation that it is in, empty outside of all.
        """
        lingers = lingers + self.shelved[not inside]
        if direction:
            lingers = lingers - self.let_go[direction == "backward"]
        alive = self.fixed + grads * self.grads + transient[:, None] + copies + lingers
        if minus is not None:
            alive += self.activations - minus
        total = np.where(where, alive, -np.inf)
        self.all.append(_Instant(name, inside, total, minus, grads, copies, lingers, kinds))

    def add_block(
        self, direction: str, name: str, kind: int, peaks: tuple[ArrayN, ArrayN], mode: NDArray[np.intp],
        where: NDArray[np.bool_], minus: ArrayN, *, grads: ArrayN | float, copies: ArrayN | float = 0.0,
        lingers: ArrayN | float = 0.0,
    ) -> None:  # fmt: skip
        """Add an instant inside a kind of layer; ``peaks`` are by mode, combination and kind."""
        k, (peak, kinds) = self.rows.k, peaks
        self.add(
            f"{direction} {name}", where, peak[mode, k, kind],
            lambda positions: kinds[mode[positions], k[positions], kind].T, minus, grads=grads,
            copies=copies, lingers=lingers, inside=direction, direction=direction,
        )  # fmt: skip

    def build(self) -> None:
        """All instants, in the order of a step."""
        rows = self.rows
        # no backward has run when all activations are there, where so many are in flight as a step has
        several = (rows.num_micro_batches[:, None] > rows.layout.last_in_flight).astype(float)
        mid = 1.0 if rows.static.grads_always else several
        # autocast's cache holds the weight copies of recomputed layers until the loss is there
        cached: ArrayN | float = 0.0
        if np.any(rows.layers.autocast_cached_bytes):
            cached = rows.sum_layers_by_stage(rows.layers.autocast_cached_bytes)
        if rows.framework.traits.has_pytorch_modules and rows.layout.stages.pp > 1:
            in_flight = InFlight(rows, self.grads, self.whole_table)
            self._pipelined_layers(in_flight)
            self._pipelined_ends(in_flight)
        else:
            self._layers(mid, several, cached)
            self._ends(mid, cached)
        self._optimizer()

    def _layers(self, mid: ArrayN | float, several: ArrayN, cached: ArrayN | float) -> None:
        """Inside the last layer of each kind, and the first where gradients appear only with it."""
        rows, lay = self.rows, self.rows.layout
        always, piped = rows.static.grads_always, lay.stages.pp > 1
        # DeepSpeed makes output and gradient whole for a backward, where ranks keep and send parts of them
        tp = np.where(rows.table.tp > 1, rows.table.tp, 0.0)[:, None]
        received = 2.0 * sent_part_bytes(rows) * tp * bool(rows.framework.deepspeed)
        forward = rows.layers.forward_peak, rows.layers.forward_kinds
        backward = rows.layers.backward_peak, rows.layers.backward_kinds
        waiting = waiting_head_gradient_bytes(rows)
        for i, kind in enumerate(kind.name for kind in lay.stages.kinds):
            behind, own_plain = self._behind(i)
            for label, mode, saved, has, more in (
                ("", rows.base, self.saved_plain, lay.plain[:, i] > 0, 0.0),
                (" recomputed", rows.full, self.saved_full, lay.full[:, i] > 0, own_plain),
            ):
                if not np.any(has):
                    continue
                own, layers = saved[:, i][:, None], (lay.full if label else lay.plain)[:, i]
                alone = layers == lay.layer_counts[:, i]
                gone = behind + own + more
                name = f"of the last {kind} block{label}"
                ahead, later, first = self._lingers(i, int(bool(label)), gone - own)
                self.add_block("forward", name, i, forward, mode, has, gone, grads=mid, copies=cached, lingers=ahead)
                later = later + self.sums * self._share_of_grads(self._end_params(head_params))
                reduced = waiting + np.where(alone, reduced_head_swap_bytes(rows, i), 0.0)
                self.add_block(
                    "backward", name, i, backward, mode, has, gone - received, grads=mid, copies=reduced, lingers=later
                )  # fmt: skip
                if self.retention:
                    name = f"of the first {kind} block{label}"
                    some = has & self.retention.there
                    self.add_block("backward", name, i, backward, mode, some, own, grads=mid, lingers=first)
                if not always and piped:  # of the second micro-batch, with the first one's gradients
                    second = has & (rows.num_micro_batches[:, None] > 1)
                    gone = gone - received + self._one_micro_batch()
                    self.add_block("backward", name, i, backward, mode, second, gone, grads=1.0)
                if not always:
                    done = self._one_micro_batch() - own - received
                    first = np.where(several > 0, 1.0, 1.0 - self._layer_grads(i))
                    name = f"of the first {kind} block{label}"
                    swap = gathered_embedding_swap_bytes(rows, i) + waiting
                    sums = self.sums * (1.0 - self._layer_grads(i))
                    self.add_block(
                        "backward", name, i, backward, mode, has, done + own, grads=first, copies=swap, lingers=sums
                    )  # fmt: skip
                    if gathers_ends(rows):
                        inner = backward, mode, has & (layers > 1)
                        self._add_inner_blocks(i, label, inner, gone + own, done, waiting)

    def _add_inner_blocks(
        self, kind: int, label: str, of_block: tuple[tuple[ArrayN, ArrayN], NDArray[np.intp], NDArray[np.bool_]],
        gone: ArrayN, done: ArrayN, waiting: ArrayN | float,
    ) -> None:  # fmt: skip
        """The backwards of a kind's last block but one and of its second, whose neighbours are blocks: larger than an
        end of the model may be. What is ``gone`` by the one, and ``done`` by the other."""
        peaks, mode, has = of_block
        several = self.rows.num_micro_batches[:, None] > self.rows.layout.last_in_flight
        for name, minus, num_layers in (("last", gone, None), ("first", done, 2.0)):
            ahead = 1.0 - self._layer_grads(kind, num_layers) if num_layers else np.zeros((1, 1))
            grads = np.where(several, 1.0, ahead)
            self.add_block(
                "backward", f"beside the {name} {self.rows.layout.stages.kinds[kind].name} block{label}", kind, peaks,
                mode, has, minus, grads=grads, copies=waiting, lingers=self.sums * ahead,
            )  # fmt: skip

    def _lingers(self, kind: int, recomputed: int, gone: ArrayN) -> tuple[ArrayN | float, ...]:
        """What lingers of earlier computations in a kind's last forward, last backward and first backward, and what is
        not ``gone`` at the moment at which that is most."""
        if not self.retention:
            return 0.0, 0.0, 0.0
        inside, gone = self.retention.inside, gone * self.retention.there
        return (
            inside(kind, recomputed, FORWARD) + gone, inside(kind, recomputed, BACKWARD) + gone,
            inside(kind, recomputed, BACKWARD, first=True),
        )  # fmt: skip

    def _behind(self, kind: int) -> tuple[ArrayN, ArrayN | float]:
        """What layers behind the last of a kind keep, and layers of it behind its last recomputed one. (n, R) [B]

        Where the first layers are recomputed, those behind run plainly, and their backward is over first. Of every nth
        the least that they can be.
        """
        lay, least = self.rows.layout, self.saved_plain[:, :, None]
        after = lay.after[kind]
        if not lay.any_full:
            return np.asarray(np.einsum("or,no->nr", after, self.saved_plain)), 0.0
        table = self.rows.table
        first = np.array([spec.kind == "full" for spec in table.recompute_modes])[table.recompute][:, None, None]
        in_last_chunk = lay.stages.counts[:, lay.shown.stage, -1] - lay.full_by_chunk[..., -1][lay.choice]
        plain = np.where(first, np.minimum(after, in_last_chunk), np.where(lay.full > 0, 0.0, after))
        recomputed = np.minimum(self.saved_full[:, :, None], least)
        behind = (plain * least + (after - plain) * recomputed).sum(axis=1)
        return behind, np.where(first[:, 0], in_last_chunk[:, kind] * self.saved_plain[:, kind, None], 0.0)

    def _pipelined_layers(self, in_flight: InFlight) -> None:
        """Inside the last layer of each kind, and the first, at whichever of a schedule's moments most is alive."""
        rows, lay = self.rows, self.rows.layout
        counts = lay.stages.counts[:, lay.shown.stage]
        forward = rows.layers.forward_peak, rows.layers.forward_kinds
        backward = rows.layers.backward_peak, rows.layers.backward_kinds
        for i, kind in enumerate(kind.name for kind in lay.stages.kinds):
            recomputed_layers = lay.full_by_chunk[:, i][lay.choice]
            for recomputed, mode, saved, there in (
                (0, rows.base, self.saved_plain, counts[i] - recomputed_layers > 0),
                (1, rows.full, self.saved_full, recomputed_layers > 0),
            ):  # fmt: skip
                has, label = np.asarray(there.any(axis=2)), " recomputed" * recomputed
                if not np.any(has):
                    continue
                more, alone = in_flight.alive_in_backward_by_inputs(i, recomputed, backward[0])
                gone = np.where(there, in_flight.saved_behind(i, recomputed) + saved[:, i][:, None, None], np.inf)
                name = f"of the last {kind} block{label}"
                for direction, peaks in (("forward", forward), ("backward", backward)):
                    most = in_flight.most(
                        "F" if direction == "forward" else "B", gone - more * (direction == "backward")
                    )
                    self.add_block(direction, name, i, peaks, mode, has, **self._alive_at(most))
                for peaks, on, most in in_flight.alive_in_backward_by_weights(
                    i, recomputed, there, self._layer_grads(i)
                ):
                    self.add_block("backward", f"by weights {name}", i, peaks, mode, on, **self._alive_at(most))
                done = np.where(there, alone - more, np.inf)
                most = in_flight.most("B", done, ended=True, own_grads=self._layer_grads(i))
                name = f"of the first {kind} block{label}"
                self.add_block("backward", name, i, backward, mode, has, **self._alive_at(most))

    def _alive_at(self, most: InFlightPeak) -> dict[str, ArrayN]:
        """What an instant is made of at such a moment."""
        return {"minus": self.activations - most.kept_bytes, "grads": most.grads, "copies": most.copies}

    def _pipelined_ends(self, in_flight: InFlight) -> None:
        """The loss, the embedding's gradient, and the reduction, which frees what is gathered of a group first."""
        rows, stages = self.rows, self.rows.layout.stages
        head, embedding = rows.costs.head.memory, rows.costs.embedding.memory
        on_head, on_first = (np.full((self.n, self.num_shown, stages.vpp), np.inf) for _ in range(2))
        on_head[:, rows.layout.head_position, -1] = 0.0
        on_first[:, 0, 0] = 0.0
        for direction, kinds in (("forward", head.forward_kinds), ("backward", head.backward_kinds)):
            most = in_flight.most("F" if direction == "forward" else "B", on_head)
            self._add_end("loss", direction, rows.is_head, kinds, **self._alive_at(most))
        # the first micro-batch's gradient becomes the parameter's, but for FSDP's, which is copied into fp32
        own = 0.0 if rows.mode.precision == "mixed" else self._embedding_share
        most = in_flight.most("B", on_first, ended=True, own_grads=own)
        self._add_end("embedding", "backward", rows.is_first, embedding.backward_kinds, **self._alive_at(most))
        if rows.mode.precision != "mixed":
            return
        if in_flight.unshards:
            most = in_flight.most("R", np.zeros(on_first.shape), beside=reduction_bytes(rows))
            self._add_nothing("reduction of gradients", **self._alive_at(most))
            return
        self._add_nothing("reduction of gradients", minus=None, grads=1.0, copies=reduction_bytes(rows)[:, :, 0])

    def _add_nothing(
        self, name: str, *, minus: ArrayN | None, grads: ArrayN | float, copies: ArrayN | float,
        lingers: ArrayN | float = 0.0,
    ) -> None:  # fmt: skip
        """An instant outside of all layers."""
        nothing = np.zeros((len(KINDS), self.n))
        everywhere = np.ones((1, self.num_shown), dtype=bool)
        self.add(
            name, everywhere, nothing[0], lambda positions: nothing[:, positions], minus, grads=grads, copies=copies,
            lingers=lingers
        )  # fmt: skip

    def _ends(self, mid: ArrayN | float, cached: ArrayN | float) -> None:
        """The loss, the embedding's gradient and the optimizer's step."""
        rows = self.rows
        head, embedding = rows.costs.head.memory, rows.costs.embedding.memory
        others = rows.workload.model.num_mtp_layers * head.saved_kinds
        for direction, kinds, copies in (
            ("forward", head.forward_kinds + others, cached), ("backward", head.backward_kinds + others, 0.0),
        ):  # fmt: skip
            pass_of = FORWARD if direction == "forward" else BACKWARD
            lingers = self.retention.at_end(-1, pass_of) if self.retention else 0.0
            self._add_end("loss", direction, rows.is_head, kinds, 0.0, grads=mid, copies=copies, lingers=lingers)
        gone, lingers = self._one_micro_batch(), 0.0
        if self.retention:
            lingers = self.retention.at_end(0, BACKWARD, ended=True) + self.retention.there * gone
        lingers = lingers + self.sums * (1.0 - self._embedding_share)
        self._add_end(
            "embedding", "backward", rows.is_first, embedding.backward_kinds, gone, grads=1.0,
            copies=tied_head_gradient_bytes(rows), lingers=lingers,
        )  # fmt: skip

    def _optimizer(self) -> None:
        """The optimizer's step, of reduced gradients where FSDP held whole ones."""
        rows = self.rows
        grads: ArrayN | float = 1.0
        copies: ArrayN | float = 0.0
        if gathers_whole(rows):
            gathered, grads = unsharded(rows, self.grads)
            copies = -gathered
        lingers = self.retention.at_rest if self.retention else 0.0
        lingers = lingers + held_input_bytes(rows)[1]
        self._add_nothing("optimizer step", minus=None, grads=grads, copies=copies, lingers=lingers)
        self.all[-1].total[:] += rows.static.step_scratch[rows.grid]

    def _add_end(
        self, end: str, direction: str, stage: ArrayN, kinds: ArrayN, minus: ArrayN | float, *,
        grads: ArrayN | float, copies: ArrayN | float = 0.0, lingers: ArrayN | float = 0.0,
    ) -> None:  # fmt: skip
        """An instant of the embedding or the head, ``kinds`` by combination. (len(KINDS), K)"""
        k = self.rows.k
        self.add(
            f"{end} {direction}", stage[None] > 0, kinds.sum(axis=0)[k], lambda positions: kinds[:, k[positions]],
            minus, grads=grads, copies=copies, lingers=lingers, inside="loss" if end == "loss" else "",
            direction=direction,
        )  # fmt: skip

    def _one_micro_batch(self) -> ArrayN:
        """What the layers of the chunk whose backward ends keep for one micro-batch. (n, R)"""
        lay = self.rows.layout
        vpp = lay.stages.vpp
        of_layers = self.rows.sum_layers_by_stage(self.rows.layers.saved)
        ends = self.ends_saved / np.maximum(lay.last_in_flight, 1.0)
        return np.asarray(np.minimum(of_layers / vpp + ends, self.activations))

    def largest(self) -> tuple[ArrayN, NDArray[np.int64]]:
        """The largest of all instants and which it is: of those that only rounding tells apart, the first. (n, R)"""
        largest = self.all[0].total
        for candidate in self.all[1:]:
            largest = np.maximum(largest, candidate.total)
        enough = largest - 1e-12 * np.abs(largest)
        which = np.zeros(largest.shape, dtype=np.int64)
        for i in reversed(range(len(self.all))):
            which[self.all[i].total >= enough] = i
        return largest, which

    def freed_at_step(self) -> ArrayN:
        """What a step has freed by its end of what was alive at most, its gradients not among it. (n, R) [B]"""
        most = np.maximum.reduce([candidate.total for candidate in self.all[:-1]])
        at_end = self.all[-1].total - self.rows.static.step_scratch[self.rows.grid]
        return np.asarray(np.maximum(most - at_end, 0.0))

    def hold_rests(self, rests: UnsplitRests) -> None:
        """Add to all instants what the allocator left whole."""
        self.rests = rests
        for candidate in self.all:
            candidate.total[:] += rests.params + rests.states
        self.all[-1].total[:] += rests.step_scratch

    def alive(self, most: ArrayN) -> LivePeaks:
        """The most alive at each kind of instant, where ``most`` is what is alive at all. (n, R) [B]"""

        def of(inside: tuple[str, ...], grads: bool) -> ArrayN:
            totals = [
                candidate.total - (0.0 if grads else candidate.grads * self.grads)
                for candidate in self.all
                if candidate.inside in inside
            ]
            most_of = np.maximum.reduce(totals)
            if "forward" not in inside or np.all(has_layers):
                return np.asarray(most_of)
            return np.where(has_layers, most_of, self.fixed)  # an end alone has what lasts

        has_layers = self.rows.layout.layer_counts.sum(axis=1) > 0
        forward, piped = ("forward",), self.rows.mode.pipelined
        return LivePeaks(
            of(forward, True), of(("forward", "backward"), True), of(("loss",), True), most,
            of(forward, False) if piped else most, of(("forward", "backward", "loss", ""), False) if piped else most,
            self.grads, self.buffers,
        )  # fmt: skip

    def grads_at(self, which: NDArray[np.int64]) -> ArrayN:
        """The part of the gradients that is there at each stage's instant. (n, R)"""
        out = np.empty(which.shape)
        for i, candidate in enumerate(self.all):
            np.copyto(out, candidate.grads, where=which == i)
        return out

    def parts(self, rows_at: NDArray[np.intp], instant: NDArray[np.int64], stage: NDArray[np.intp]) -> ArrayN:
        """Live components of candidates ``rows_at``, each at one instant of one stage. (len(LIVE_COMPONENTS),
        len(at))"""
        rows = self.rows
        out = np.zeros((len(LIVE_COMPONENTS), len(rows_at)))
        place = {name: i for i, name in enumerate(LIVE_COMPONENTS)}
        of = rows.grid[rows_at]
        out[place["parameters"]] = rows.static.params[of, stage]
        out[place["gradients"]] = self.grads[rows_at, stage]
        out[place["optimizer_states"]] = rows.static.states[of, stage]
        out[place["buffers"]] = self.buffers[rows_at, stage]
        if self.rests is not None:
            out[place["parameters"]] += self.rests.params[rows_at, stage]
            out[place["optimizer_states"]] += self.rests.states[rows_at, stage]
        activations, in_flight = self.activations[rows_at, stage], saved_by_kind(rows, rows_at, stage)
        for i in sorted(set(instant.tolist())):
            candidate, chosen = self.all[i], np.flatnonzero(instant == i)
            where = rows_at[chosen], stage[chosen]
            out[place["gradients"], chosen] *= _entries(candidate.grads, where)
            live = candidate.transient(rows_at[chosen])
            if candidate.minus is not None:
                some = activations[chosen]
                left = np.clip((some - _entries(candidate.minus, where)) / np.where(some > 0, some, 1.0), 0.0, 1.0)
                live = live + in_flight[:, chosen] * np.where(some > 0, left, 0.0)
            out[_ROW[:, None], chosen] += live
            out[place["activations"], chosen] += _entries(candidate.lingers, where)
            copies = _entries(candidate.copies, where)
            out[place["weight_copies"], chosen] += np.maximum(copies, 0.0)
            # less than none where a pipeline's weights are not gathered, or an end of the model is less than a block
            out[place["parameters" if rows.mode.pipelined else "buffers"], chosen] += np.minimum(copies, 0.0)
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
