"""The instants at which the memory of a pipeline stage may be largest, and what is alive at each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.op import KINDS
from mofa.cost.memory.alternating_layers import AlternatingLayers
from mofa.cost.memory.candidate_memory import PeakCandidateMemory
from mofa.cost.memory.chunk_layer_order import layers_ahead_of_first_by_mode, sum_over_modes
from mofa.cost.memory.dispatcher_retention import BACKWARD, FORWARD, RetainedBytesAtPeakCandidates
from mofa.cost.memory.fsdp_neighbours import (
    first_block_gathered_bytes_beyond_middle_block,
    last_block_gradient_bytes_beyond_middle_block,
)
from mofa.cost.memory.fsdp_root import (
    gathers_model_ends_separately,
    tied_head_gradient_bytes,
    waiting_head_gradient_bytes,
)
from mofa.cost.memory.fsdp_unsharded import chunk_reduction_bytes, gathered_bytes_and_unreduced_share
from mofa.cost.memory.in_flight import InFlightPeak, PipelinePeakMoments
from mofa.cost.memory.pinned import kept_layer_bytes
from mofa.cost.memory.replica_sums import waiting_replica_sums_bytes
from mofa.cost.memory.stage_inputs import held_input_bytes, kept_output_part_bytes
from mofa.cost.memory.unequal_chunks import UnequalChunks
from mofa.cost.memory.weight_backwards import LayerGradients, WeightBackwards
from mofa.cost.optimizer import embedding_gradient_extra_bytes
from mofa.cost.rank_rules import keeps_params_gathered
from mofa.cost.rows import GatheredRows
from mofa.schedules.interleaved import micro_batches_per_round
from mofa.specs.model import ModelSpec
from mofa.specs.params import embedding_params, head_params, layer_params

ArrayN = NDArray[np.float64]


class PeakCandidates(PeakCandidateMemory):
    """Builds the peak candidates of all stages."""

    def __init__(self, rows: GatheredRows) -> None:
        super().__init__(rows)
        self.n, self.num_shown = len(rows.table), len(rows.stage_layers.shown.shown_stages)
        self.whole_table = embedding_gradient_extra_bytes(
            rows.workload,
            rows.framework,
            rows.mode.precision,
            rows.mode.pipelined,
            rows.grids.tp,
            rows.is_embedding_stage,
        )[rows.grid_index]
        self.saved_plain, self.saved_full = rows.in_base_and_full_mode(rows.layers.saved_bytes)
        self.retention = RetainedBytesAtPeakCandidates(rows)
        self.sums = waiting_replica_sums_bytes(rows)

    def _layer_grads(self, kind: int) -> ArrayN:
        """Share of a stage's gradients that a layer of a kind and the embedding, or the stage's last work, make.

        When the first layer's backward runs, neither its own gradients nor the embedding's exist yet.
        """
        p, t = layer_params(self.rows.workload.model, self.rows.stage_layers.stages.kinds[kind].moe), self.rows.grids
        dense = ((p.matrices_tp + p.shared) / t.tp + p.replicated)[:, None]
        dense = dense + self._end_params(embedding_params)
        return self._share_of_grads(dense, (p.routed / (t.ep * t.etp))[:, None], embedding=True)

    @property
    def _embedding_share(self) -> ArrayN:
        """Share of a stage's gradients that is the embedding's. (n, R) [-]"""
        return self._share_of_grads(self._end_params(embedding_params), embedding=True)

    def _end_params(self, count: Callable[[ModelSpec], int]) -> ArrayN:
        """Parameters of the embedding, on its stage. (grids, R)"""
        return np.asarray(
            (count(self.rows.workload.model) / self.rows.grids.tp)[:, None] * self.rows.is_embedding_stage
        )

    def _share_of_grads(self, dense: ArrayN, expert: ArrayN | float = 0.0, *, embedding: bool = False) -> ArrayN:
        """The share of a stage's gradients that some parameters make. (n, R) [-]

        The ``embedding`` is among them or not: its gradient may be larger than it is.
        """
        rows, s = self.rows, self.rows.shards
        sharded = rows.mode.precision == "mixed" and not rows.mode.pipelined
        dense_ranks, expert_ranks = (s.dense_ranks, s.expert_ranks) if sharded else (1.0, 1.0)
        all_grads = s.dense / dense_ranks + s.expert / expert_ranks
        share = np.clip((dense / dense_ranks + expert / expert_ranks) / all_grads, 0.0, 1.0)[rows.grid_index]
        of_table = self.whole_table / np.maximum(self.grads, 1.0)
        return np.asarray(share * (1.0 - of_table) + of_table * embedding)

    def add_instant_in_layer(
        self, direction: str, name: str, kind: int, peaks: tuple[ArrayN, ArrayN], mode: NDArray[np.intp],
        where: NDArray[np.bool_], freed_bytes: ArrayN, *, grads: ArrayN | float, copies: ArrayN | float = 0.0,
        leftover_bytes: ArrayN | float = 0.0, sums: ArrayN | float = 0.0,
    ) -> None:  # fmt: skip
        """Add an instant inside a kind of layer; ``peaks`` are by mode, combination and kind."""
        k, (peak, kinds) = self.rows.k, peaks
        self.add_candidate(
            f"{direction} {name}", where, peak[mode, k, kind],
            lambda positions: kinds[mode[positions], k[positions], kind].T, freed_bytes, grads=grads,
            copies=copies, leftover_bytes=leftover_bytes, sums=sums, inside=direction, direction=direction,
        )  # fmt: skip

    def add_all_candidates(self) -> None:
        """All instants, in the order of a step."""
        rows = self.rows
        # no backward has run when all activations are there, where so many are in flight as a step has
        several = (rows.num_micro_batches[:, None] > rows.stage_layers.last_in_flight).astype(float)
        mid = 1.0 if rows.static.grads_always else several
        # autocast's cache holds the weight copies of recomputed layers until the loss is there
        cached: ArrayN | float = 0.0
        if np.any(rows.layers.autocast_cached_bytes):
            cached = rows.sum_layers_by_stage(rows.layers.autocast_cached_bytes)
        if rows.framework.traits.has_pytorch_modules and rows.stage_layers.stages.pp > 1:
            in_flight = PipelinePeakMoments(rows, self.grads, self.whole_table)
            self._pipelined_layers(in_flight)
            self._pipelined_ends(in_flight)
        else:
            self._layers(mid, several, cached)
            self._ends(mid, cached)
        self._optimizer()

    def _layers(self, mid: ArrayN | float, several: ArrayN, cached: ArrayN | float) -> None:
        """Inside the last layer of each kind, and the first where gradients appear only with it."""
        rows, lay = self.rows, self.rows.stage_layers
        always, piped = rows.static.grads_always, lay.stages.pp > 1
        # DeepSpeed makes output and gradient whole for a backward, where ranks keep and send parts of them
        tp = np.where(rows.table.tp > 1, rows.table.tp, 0.0)[:, None]
        received = 2.0 * kept_output_part_bytes(rows) * tp * bool(rows.framework.deepspeed)
        forward = rows.layers.forward_peak_bytes, rows.layers.forward_peak_bytes_by_kind
        backward = rows.layers.backward_peak_bytes, rows.layers.backward_peak_bytes_by_kind
        waiting = waiting_head_gradient_bytes(rows)
        chunks = UnequalChunks(rows) if UnequalChunks.any_rank_has_unequal_chunks(rows) else None
        alternating = AlternatingLayers(rows, (self.saved_plain, self.saved_full))
        layers_ahead = None if always else layers_ahead_of_first_by_mode(rows)[lay.recompute_choice][..., :1]
        for i, kind in enumerate(kind.name for kind in lay.stages.kinds):
            behind, own_plain = self._behind(i)
            for label, mode, saved, has, more in (
                ("", rows.base_mode_index, self.saved_plain, lay.base_mode[:, i] > 0, 0.0),
                (" recomputed", rows.full_mode_index, self.saved_full, lay.fully_recomputed[:, i] > 0, own_plain),
            ):
                if not np.any(has):
                    continue
                own, layers = saved[:, i][:, None], (lay.fully_recomputed if label else lay.base_mode)[:, i]
                alone = alternating.is_last_layer(layers == lay.layer_counts[:, i], i, label)
                gone = alternating.freed_in_last_backward(behind + own + more, i, label)
                name = f"of the last {kind} block{label}"
                ahead, later, first = self._lingers(i, int(bool(label)), gone - own)
                freed = gone
                if chunks is not None:  # what is gone is of the moment at which most is kept
                    kept_bytes = chunks.most_kept_bytes_in_backward(i, int(bool(label)))
                    freed = self.activations - self.ends_saved - kept_bytes
                    later = later - (gone - own) * self.retention.there if self.retention else later
                self.add_instant_in_layer(
                    "forward", name, i, forward, mode, has, gone, grads=mid, copies=cached, leftover_bytes=ahead
                )
                sums = self.sums * self._share_of_grads(self._end_params(head_params))
                reduced = waiting + np.where(alone, last_block_gradient_bytes_beyond_middle_block(rows, i), 0.0)
                self.add_instant_in_layer(
                    "backward", name, i, backward, mode, has, freed - received, grads=mid, copies=reduced,
                    leftover_bytes=later, sums=sums,
                )  # fmt: skip
                if rows.schedule_record.pairs_passes and not label:
                    self.add_instant_in_layer(
                        "backward", f"{name} beside a forward", i, rows.costs.combined_peak_bytes, mode,
                        has & (rows.num_micro_batches[:, None] > 1), own, grads=mid, copies=reduced,
                    )  # fmt: skip
                if self.retention:
                    name = f"of the first {kind} block{label}"
                    some = has & self.retention.there
                    self.add_instant_in_layer(
                        "backward", name, i, backward, mode, some, own, grads=mid, leftover_bytes=first
                    )
                if not always and piped:  # of the second micro-batch, with the first one's gradients
                    second = has & (rows.num_micro_batches[:, None] > 1)
                    gone = gone - received + self._one_micro_batch()
                    self.add_instant_in_layer("backward", name, i, backward, mode, second, gone, grads=1.0)
                if layers_ahead is not None:
                    ahead = layers_ahead[:, :, :, i, int(bool(label))]
                    kept_ahead = sum_over_modes(ahead, self.saved_plain, self.saved_full)[:, :, 0]
                    done = self._one_micro_batch() - own - received - kept_ahead
                    unmade = self._layer_grads(i) + self._grads_of_layers(ahead)[:, :, 0]
                    first = np.where(several > 0, 1.0, np.maximum(1.0 - unmade, 0.0))
                    name = f"of the first {kind} block{label}"
                    swap = alternating.at_first_layer(first_block_gathered_bytes_beyond_middle_block(rows, i), label)
                    swap = swap + waiting
                    sums = self.sums * (1.0 - unmade)
                    self.add_instant_in_layer(
                        "backward", name, i, backward, mode, has, done + own, grads=first, copies=swap,
                        sums=sums,
                    )  # fmt: skip
                    if gathers_model_ends_separately(rows):
                        inner = backward, mode, has & (layers > 1)
                        between = alternating.kept_bytes_between_last_two(i, label)
                        more_unmade = unmade + self._layer_grads(i) - self._embedding_share
                        self._add_inner_blocks(i, label, inner, gone + own + between, (done, more_unmade), waiting)

    def _add_inner_blocks(
        self, kind: int, label: str, of_block: tuple[tuple[ArrayN, ArrayN], NDArray[np.intp], NDArray[np.bool_]],
        gone: ArrayN, second: tuple[ArrayN, ArrayN], waiting: ArrayN | float,
    ) -> None:  # fmt: skip
        """The backwards of a kind's last block but one and of its second, whose neighbours are blocks: larger than an
        end of the model may be. What is ``gone`` by the one, and by the ``second``, with the share of gradients that a
        first backward has not made by then."""
        peaks, mode, has = of_block
        several = self.rows.num_micro_batches[:, None] > self.rows.stage_layers.last_in_flight
        kind_name = self.rows.stage_layers.stages.kinds[kind].name
        done, unmade = second
        for name, minus, made in (("last", gone, np.zeros((1, 1))), ("first", done, np.maximum(1.0 - unmade, 0.0))):
            grads = np.where(several, 1.0, made)
            self.add_instant_in_layer(
                "backward", f"beside the {name} {kind_name} block{label}", kind, peaks,
                mode, has, minus, grads=grads, copies=waiting, sums=self.sums * made,
            )  # fmt: skip

    def _lingers(self, kind: int, recomputed: int, gone: ArrayN) -> tuple[ArrayN | float, ...]:
        """What is left of earlier computations in a kind's last forward, last backward and first
        backward, and what is not ``gone`` at the moment at which that is most."""
        if not self.retention:
            return 0.0, 0.0, 0.0
        inside, gone = self.retention.bytes_in_last_layer_of_kind, gone * self.retention.there
        return (
            inside(kind, recomputed, FORWARD) + gone, inside(kind, recomputed, BACKWARD) + gone,
            inside(kind, recomputed, BACKWARD, first=True),
        )  # fmt: skip

    def _behind(self, kind: int) -> tuple[ArrayN, ArrayN | float]:
        """What layers behind the last of a kind keep, and layers of it behind its last recomputed one. (n, R) [B]

        Where the first layers are recomputed, those behind run plainly, and their backward is over first. Of every nth
        the least that they can be.
        """
        lay, least = self.rows.stage_layers, self.saved_plain[:, :, None]
        after = lay.layers_behind[kind]
        if not lay.any_fully_recomputed:
            return np.asarray(np.einsum("or,no->nr", after, self.saved_plain)), 0.0
        table = self.rows.table
        first = np.array([spec.kind == "full" for spec in table.recompute_modes])[table.recompute][:, None, None]
        in_last_chunk = (
            lay.stages.layer_counts[:, lay.shown.shown_stages, -1]
            - lay.fully_recomputed_by_chunk[..., -1][lay.recompute_choice]
        )
        plain = np.where(first, np.minimum(after, in_last_chunk), np.where(lay.fully_recomputed > 0, 0.0, after))
        recomputed = np.minimum(self.saved_full[:, :, None], least)
        behind = (plain * least + (after - plain) * recomputed).sum(axis=1)
        return behind, np.where(first[:, 0], in_last_chunk[:, kind] * self.saved_plain[:, kind, None], 0.0)

    def _pipelined_layers(self, in_flight: PipelinePeakMoments) -> None:
        """Inside the last layer of each kind, and the first, at whichever of a schedule's moments most is alive."""
        rows, lay = self.rows, self.rows.stage_layers
        counts, weight_backwards = lay.stages.layer_counts[:, lay.shown.shown_stages], WeightBackwards(in_flight)
        forward = rows.layers.forward_peak_bytes, rows.layers.forward_peak_bytes_by_kind
        backward = rows.layers.backward_peak_bytes, rows.layers.backward_peak_bytes_by_kind
        for i, kind in enumerate(kind.name for kind in lay.stages.kinds):
            recomputed_layers = lay.fully_recomputed_by_chunk[:, i][lay.recompute_choice]
            for recomputed, mode, saved, there in (
                (0, rows.base_mode_index, self.saved_plain, counts[i] - recomputed_layers > 0),
                (1, rows.full_mode_index, self.saved_full, recomputed_layers > 0),
            ):  # fmt: skip
                has, label = np.asarray(there.any(axis=2)), " recomputed" * recomputed
                if not np.any(has):
                    continue
                more, alone = in_flight.live_bytes_in_backward_by_inputs(i, recomputed, backward[0])
                gone = np.where(
                    there, in_flight.saved_bytes_of_layers_behind(i, recomputed) + saved[:, i][:, None, None], np.inf
                )
                name = f"of the last {kind} block{label}"
                made = self._grads_behind(in_flight.layers_behind[:, :, :, i, recomputed])
                ahead = self._grads_of_layers(in_flight.layers_ahead[:, :, :, i, recomputed])
                own = (self._layer_grads(i) - self._embedding_share)[:, :, None]
                for direction, peaks, most in (
                    ("forward", forward, in_flight.in_flight_peak("F", gone)),
                    ("backward", backward, in_flight.in_flight_peak("B", gone - more, behind_grads=made)),
                ):
                    self.add_instant_in_layer(direction, name, i, peaks, mode, has, **self._alive_at(most))
                self._add_with_own_gradients(in_flight, name, i, (mode, has), gone - more, made)
                gradients = LayerGradients(own, made, ahead)
                for peak in weight_backwards.peaks_in_layers(i, recomputed, there, gradients):
                    name = f"by weights of the {peak.place} {kind} block{label}"
                    self.add_instant_in_layer(
                        "backward", name, i, peak.live_bytes, mode, peak.where, **self._alive_at(peak.beside)
                    )
                kept_ahead = in_flight.kept_bytes_of_layers_ahead(i, recomputed)
                done = np.where(there, alone - more - kept_ahead, np.inf)
                unmade = ahead + own
                unmade[:, :, 0] += self._embedding_share
                most = in_flight.in_flight_peak("B", done, ended=True, own_grads=unmade)
                name = f"of the first {kind} block{label}"
                self.add_instant_in_layer("backward", name, i, backward, mode, has, **self._alive_at(most))
                self._add_with_own_gradients(in_flight, name, i, (mode, has), done, -unmade, ended=True)

    def _grads_behind(self, layers: ArrayN) -> ArrayN:
        """Share of a stage's gradients that so many layers in each chunk, (n, kinds, 2, R, vpp), and the head behind
        them make. (n, R, vpp)"""
        made = self._grads_of_layers(layers)
        head = (head_params(self.rows.workload.model) / self.rows.grids.tp)[:, None] * self.rows.is_head_stage
        made[:, :, -1] += self._share_of_grads(head)
        return made

    def _grads_of_layers(self, layers: ArrayN) -> ArrayN:
        """Share of a stage's gradients that so many layers in each chunk, (n, kinds, 2, R, vpp), make. (n, R, vpp)"""
        of_layer = [self._layer_grads(kind) - self._embedding_share for kind in range(layers.shape[1])]
        return np.asarray(np.einsum("nkorc,nkr->nrc", layers, np.stack(of_layer, axis=1)))

    def _own_gradients(self, kind: int) -> list[tuple[str, ArrayN, ArrayN, NDArray[np.bool_]]]:
        """The fp32 gradients that a first backward makes of a block of a kind before it is through.

        Those of experts that are a group of their own come midway, and attention's backward runs beside them. The
        others come at its end.

        Returns
        -------
        list
            Whose they are, and their share of a stage's, (n, R) [-]. What the block has alive at most from there on, by
            mode, combination, kind of layer and kind of tensor [B]. For which candidates that is. (n, 1)
        """
        rows, always = self.rows, np.ones((self.n, 1), dtype=bool)
        if rows.mode.precision != "mixed":
            return []
        whole_layer = self._layer_grads(kind) - self._embedding_share
        kinds = rows.layers.stack_of_blocks(lambda cost: cost.peak_bytes_from_block_gradients)
        made = [("its", whole_layer, kinds, always)]
        if moe := rows.stage_layers.stages.kinds[kind].moe:
            p, t = layer_params(rows.workload.model, moe), rows.grids
            experts = self._share_of_grads(np.zeros((1, 1)), (p.routed / (t.ep * t.etp))[:, None])
            are_group = (rows.table.ep > 1)[:, None]
            kinds = rows.layers.stack_of_blocks(lambda cost: cost.peak_bytes_from_expert_gradients)
            made.append(("experts'", experts, kinds, are_group))
        return made

    def _add_with_own_gradients(
        self, in_flight: PipelinePeakMoments, block: str, kind: int, where: tuple[NDArray[np.intp], NDArray[np.bool_]],
        gone: ArrayN, made: ArrayN, *, ended: bool = False,
    ) -> None:  # fmt: skip
        """In the first backward of a block, where its own fp32 gradients are there. ``made`` is the share of gradients
        that was there before them of its chunk; where that counts as ``ended``, less all. (n, R, vpp)"""
        mode, has = where
        for name, own, kinds, there in self._own_gradients(kind):
            if not np.any(has & there):
                continue
            most = in_flight.in_flight_peak("B", gone, ended=ended, behind_grads=made + own[:, :, None])
            self.add_instant_in_layer(
                "backward", f"with {name} gradients {block}", kind, (kinds.sum(axis=3), kinds), mode, has & there,
                **self._alive_at(most),
            )  # fmt: skip

    def _alive_at(self, most: InFlightPeak) -> dict[str, ArrayN]:
        """What an instant is made of at such a moment."""
        return {"freed_bytes": self.activations - most.kept_bytes, "grads": most.grads, "copies": most.copies}

    def _pipelined_ends(self, in_flight: PipelinePeakMoments) -> None:
        """The loss, the embedding's gradient, and the reduction, which frees what is gathered of a group first."""
        rows, stages = self.rows, self.rows.stage_layers.stages
        head, embedding = rows.costs.head.memory, rows.costs.embedding.memory
        on_head, on_first = (np.full((self.n, self.num_shown, stages.vpp), np.inf) for _ in range(2))
        on_head[:, rows.stage_layers.head_stage_index, -1] = 0.0
        on_first[:, 0, 0] = 0.0
        for direction, kinds in (("forward", head.forward_kinds), ("backward", head.backward_kinds)):
            most = in_flight.in_flight_peak("F" if direction == "forward" else "B", on_head)
            self._add_end("loss", direction, rows.is_head_stage, kinds, **self._alive_at(most))
        # the first micro-batch's gradient becomes the parameter's, but for FSDP's, which is copied into fp32
        own = 0.0 if rows.mode.precision == "mixed" else self._embedding_share[:, :, None]
        most = in_flight.in_flight_peak("B", on_first, ended=True, own_grads=own)
        self._add_end(
            "embedding", "backward", rows.is_embedding_stage, embedding.backward_kinds, **self._alive_at(most)
        )
        if rows.mode.precision != "mixed":
            return
        if in_flight.reduces_by_chunk:
            most = in_flight.in_flight_peak("R", np.zeros(on_first.shape), beside=chunk_reduction_bytes(rows))
            self._add_nothing("reduction of gradients", **self._alive_at(most))
            return
        self._add_nothing(
            "reduction of gradients", freed_bytes=None, grads=1.0, copies=chunk_reduction_bytes(rows)[:, :, 0]
        )

    def _add_nothing(
        self, name: str, *, freed_bytes: ArrayN | None, grads: ArrayN | float, copies: ArrayN | float,
        leftover_bytes: ArrayN | float = 0.0,
    ) -> None:  # fmt: skip
        """An instant outside of all layers."""
        nothing = np.zeros((len(KINDS), self.n))
        everywhere = np.ones((1, self.num_shown), dtype=bool)
        self.add_candidate(
            name, everywhere, nothing[0], lambda positions: nothing[:, positions], freed_bytes, grads=grads,
            copies=copies,
            leftover_bytes=leftover_bytes
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
            leftover_bytes = self.retention.bytes_in_model_end(-1, pass_of) if self.retention else 0.0
            leftover_bytes = leftover_bytes + kept_layer_bytes(rows)
            self._add_end(
                "loss",
                direction,
                rows.is_head_stage,
                kinds,
                0.0,
                grads=mid,
                copies=copies,
                leftover_bytes=leftover_bytes,
            )
        gone = np.minimum(self._one_micro_batch() + self._drained_before_first_chunk(), self.activations)
        leftover_bytes = 0.0
        if self.retention:
            leftover_bytes = self.retention.bytes_in_model_end(0, BACKWARD, ended=True) + self.retention.there * gone
        self._add_end(
            "embedding", "backward", rows.is_embedding_stage, embedding.backward_kinds, gone, grads=1.0,
            copies=tied_head_gradient_bytes(rows), leftover_bytes=leftover_bytes,
            sums=self.sums * (1.0 - self._embedding_share),
        )  # fmt: skip

    def _optimizer(self) -> None:
        """The optimizer's step, of reduced gradients where FSDP held whole ones."""
        rows = self.rows
        grads: ArrayN | float = 1.0
        copies: ArrayN | float = 0.0
        if keeps_params_gathered(rows):
            gathered, grads = gathered_bytes_and_unreduced_share(rows, self.grads)
            copies = -gathered
        leftover_bytes = self.retention.between_steps_bytes if self.retention else 0.0
        leftover_bytes = leftover_bytes + held_input_bytes(rows)[1]
        self._add_nothing(
            "optimizer step",
            freed_bytes=None,
            grads=grads,
            copies=copies,
            leftover_bytes=leftover_bytes,
        )
        self.all[-1].total[:] += rows.static.step_scratch[rows.grid_index]

    def _add_end(
        self, end: str, direction: str, stage: ArrayN, kinds: ArrayN, freed_bytes: ArrayN | float, *,
        grads: ArrayN | float, copies: ArrayN | float = 0.0, leftover_bytes: ArrayN | float = 0.0,
        sums: ArrayN | float = 0.0,
    ) -> None:  # fmt: skip
        """An instant of the embedding or the head, ``kinds`` by combination. (len(KINDS), K)"""
        k = self.rows.k
        self.add_candidate(
            f"{end} {direction}", stage[None] > 0, kinds.sum(axis=0)[k], lambda positions: kinds[:, k[positions]],
            freed_bytes, grads=grads, copies=copies, leftover_bytes=leftover_bytes, sums=sums,
            inside="loss" if end == "loss" else "",
            direction=direction,
        )  # fmt: skip

    def _drained_before_first_chunk(self) -> ArrayN | float:
        """What interleaved chunks have let go when the first one's first backward comes, of what is in flight at most.
        (n, R) [B]

        ``a`` passes are in flight from then on that the first backward finds. In a step of m micro-batches, ``e`` a
        round, ``e (vpp - 1)`` backwards of other chunks come first: no more than the rest of the ``m vpp`` passes is
        left (:func:`mofa.schedules.interleaved.interleaved_in_flight_micro_batches`).
        """
        rows, stages = self.rows, self.rows.stage_layers.stages
        if stages.vpp == 1 or not rows.schedule_record.runs_in_equal_rounds:
            return 0.0
        m = rows.num_micro_batches
        each = np.array([micro_batches_per_round(stages.pp, int(number)) for number in m])
        ahead = 2 * (stages.pp - 1) + (stages.vpp - 1) * each + 1
        drained = np.minimum(ahead, m * stages.vpp) - np.minimum(ahead, m * stages.vpp - (stages.vpp - 1) * each)
        return np.asarray(drained[:, None] * rows.sum_layers_by_stage(rows.layers.saved_bytes) / stages.vpp)

    def _one_micro_batch(self) -> ArrayN:
        """What the layers of the chunk whose backward ends keep for one micro-batch. (n, R)"""
        lay = self.rows.stage_layers
        vpp = lay.stages.vpp
        of_layers = self.rows.sum_layers_by_stage(self.rows.layers.saved_bytes)
        ends = self.ends_saved / np.maximum(lay.last_in_flight, 1.0)
        return np.asarray(np.minimum(of_layers / vpp + ends, self.activations))
