"""What a pipeline rank holds and does, described once: the closed form and the replay both read it.

The closed form reads arrays over all candidates: of :class:`mofa.cost.stages.Stages`, of
:class:`mofa.cost.stage_layers.StageLayers` and of :mod:`mofa.cost.rank_rules`. The replay plays one strategy, and reads
a :class:`RankSpec` of each rank. Its fields are entries of the same arrays, so that no rule is written twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from mofa.blocks.build import layer_kind
from mofa.blocks.tapes import kept_layer_label, layer_label
from mofa.cost.block.costs import BlockCost
from mofa.cost.rank_rules import (
    HeldInputCounts,
    Sharing,
    ddp_gradient_bytes_per_param,
    first_reduced_bucket_params,
    framework_buffer_bytes,
    gathered_bytes_per_param,
    gradient_reducer,
    has_flat_gradient_buffers,
    head_gradient_waits_for_embedding,
    held_input_counts_of_stages,
    host_waits_at_exchanges,
    keeps_last_output,
    keeps_params_gathered,
    reduce_scatters_gradients,
    reduced_bytes_per_param,
    reduces_gradients_by_chunk,
    rotary_tables_of_stages,
    shards_optimizer_states,
    shards_params,
    ties_embedding_to_head,
)
from mofa.cost.rows import GatheredRows
from mofa.schedules import Order, Runtime, computation_order_of
from mofa.specs.strategy import RecomputeSpec

# -- what a rank is made of: its place, its chunks of blocks


@dataclass(frozen=True)
class RankPlace:
    """Where a rank is in the grid of ranks, and which ends of the model it has."""

    pipeline_rank: int
    pp: int
    vpp: int
    has_embedding: bool
    has_head: bool
    """The head; multi-token-prediction layers are ahead of it, or where a layout puts them."""
    tensor_ranks: int
    context_ranks: int
    data_ranks: int
    """Ranks of data parallelism alone, context parallelism not counted. [-]"""
    dense_ranks: int
    """Ranks that dense parameters' gradients and states are shared out over. [-]"""
    expert_ranks: int
    """The same of experts' parameters. [-]"""
    splits_experts: bool
    """Whether expert parallelism gives ranks different experts."""

    @property
    def has_model_end(self) -> bool:
        """Whether the embedding or the head is on this rank."""
        return self.has_embedding or self.has_head


BlockRole = Literal["embedding", "layer", "prediction", "prediction layer", "prediction head", "head"]
"""What a block is in the model. A multi-token prediction has an entry, a layer like the last and a pass through the
head."""
_NAMES: dict[BlockRole, str] = {
    "embedding": "embedding", "layer": "block {}", "prediction": "prediction {}",
    "prediction layer": "layer of prediction {}", "prediction head": "head of prediction {}", "head": "head",
}  # fmt: skip


class BlockSpec(NamedTuple):
    """Something of a model that runs as one on a rank: an embedding, a layer, a head."""

    role: BlockRole
    tapes: str
    """Its name in :attr:`mofa.cost.block.costs.BlockCosts.tapes`."""
    number: int = 0
    """Of the layer in the model, or of the prediction. [-]"""
    kind: int = 0
    """Of a layer its kind, by its place in :attr:`mofa.cost.stages.Stages.kinds`."""
    mode: RecomputeSpec = RecomputeSpec()
    """How a layer is recomputed."""

    @property
    def name(self) -> str:
        """The name of the block.

        Examples
        --------
        >>> BlockSpec("layer", "dense recompute=none", 3).name, BlockSpec("prediction head", "head").name
        ('block 3', 'head of prediction 0')
        """
        return _NAMES[self.role].format(self.number)

    @property
    def is_layer(self) -> bool:
        """Whether it is a layer, of the model or of a prediction."""
        return self.role in ("layer", "prediction layer")

    @property
    def name_with_article(self) -> str:
        """Its name in a sentence, with an article where the name is none of its own.

        Examples
        --------
        >>> BlockSpec("layer", "dense recompute=none", 3).name_with_article, BlockSpec("head", "head").name_with_article
        ('block 3', 'the head')
        """
        return self.name if self.role in ("layer", "prediction") else f"the {self.name}"


class ChunkSpec(NamedTuple):
    """One of a rank's chunks of the model: its blocks in forward order, and where its input and output are."""

    position: int
    """Along the model, from 0."""
    blocks: tuple[BlockSpec, ...]
    receives: bool
    """Whether its input comes from another rank."""
    sends: bool
    """Whether its output goes to another rank."""
    feeds_own_chunk: bool
    """Whether its output goes to another chunk of the rank, where other ranks have chunks too."""

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """Numbers of its layers in the model; those of predictions are not counted."""
        return tuple(block.number for block in self.blocks if block.role == "layer")


# -- what a rank does


@dataclass(frozen=True)
class RankSchedule:
    """In which order a rank computes, and what its pipeline holds and waits for."""

    name: str
    """Of the schedule in ``mofa.schedules.SCHEDULES``."""
    runtime: Runtime
    pp: int
    vpp: int
    num_micro_batches: int
    defers_weight_gradients: bool
    """Whether backwards are split, weights' gradients made later than inputs'."""
    waits_at_exchanges: bool
    """Whether the host waits for the device behind every exchange
    (:func:`mofa.cost.rank_rules.host_waits_at_exchanges`)."""
    keeps_last_output: bool
    """Whether the latest output and input gradient stay (torch's Schedule1F1B)."""

    @property
    def order(self) -> Order:
        """The computations of all ranks; made when they are asked for."""
        return computation_order_of(self.name, self.runtime, self.pp, self.vpp, self.num_micro_batches)


# -- what a rank holds all the time


@dataclass(frozen=True)
class RankParameters:
    """Parameters of a rank, and bytes that it holds of them and of their states."""

    dense: float
    expert: float
    """Before data parallelism. [params]"""
    total: float
    """Both of these. [params]"""
    sharded: float
    """What of both is left where data parallelism shares them out. [params]"""
    params_bytes: float
    states_bytes: float
    step_scratch_bytes: float
    """Temporaries of the optimizer's step. [B]"""


@dataclass(frozen=True)
class PersistentBuffers:
    """What a rank allocates once and keeps beside parameters, gradients and states. [B]"""

    framework_buffer_bytes: float
    """Of the framework, outside of all tapes: workspaces, dummy gradients. With a library these are
    Transformer Engine's."""
    num_rotary_tables: int
    """Tables of rotations that Transformer Engine's models keep from the first forward on. [-]"""
    rotary_table_bytes: float
    """Of each."""
    rotary_tables_from_start: tuple[int, ...]
    """Bytes of each that is there from the start."""
    ddp_bucket_or_fp8_copy_bytes: float
    """DDP's buckets of gradients, or fp8 copies of weights."""
    stage_boundary_bytes: float
    """The residual stream of a micro-batch: what one chunk hands on."""
    held_inputs: HeldInputCounts


@dataclass(frozen=True)
class GradientSharing:
    """How a rank holds gradients, and shares them and the optimizer's states with the ranks that hold the same.

    Where each comes from is in the functions of :mod:`mofa.cost.rank_rules`.
    """

    sharing: Sharing
    gathered_bytes_per_param: float
    """Of parameters that are gathered once a step. [B/param]"""
    reduced_bytes_per_param: float
    """Of gradients that are reduced once a step. [B/param]"""
    has_flat_buffers: bool
    """Whether Megatron's buffers hold all gradients from the start."""
    shards_params: bool
    """Whether FSDP shares parameters out."""
    keeps_params_gathered: bool
    """Whether FSDP keeps parameters gathered and gradients whole for a step."""
    reduces_by_chunk: bool
    """Whether each chunk's gradients are reduced behind its last backward."""
    shards_states: bool
    """Whether optimizer states are shared out: ZeRO 1 and above."""
    scatters_gradients: bool
    """Whether Megatron reduces gradients to each rank's part, not whole on all."""
    bucket_params: float
    """What Megatron's first rank reduces at once. [params]"""
    bytes_in_bucket: float
    """Of a gradient in DDP's buckets. [B/param]"""
    head_gradient_waits_for_embedding: bool
    """Whether the head's weight gradient stays until the embedding's is there."""
    ties_ends: bool
    """Whether the rank's embedding and head are one weight, which has one gradient."""


@dataclass(frozen=True)
class RankSpec:
    """What one pipeline rank of a strategy holds and does. Ranks of one stage differ by routing alone, and by the part
    of the optimizer's states that each owns."""

    place: RankPlace
    chunks: tuple[ChunkSpec, ...]
    schedule: RankSchedule
    parameters: RankParameters
    buffers: PersistentBuffers
    gradients: GradientSharing

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """Numbers of its layers in the model, chunk by chunk."""
        return tuple(layer for chunk in self.chunks for layer in chunk.layer_numbers)

    @property
    def computations(self) -> tuple[tuple[str, int, int], ...]:
        """The rank's computations in a step, as (kind, chunk, micro-batch)."""
        return self.schedule.order.computations_of(self.place.pipeline_rank)


# -- the ranks of one strategy


def rank_specs(rows: GatheredRows) -> tuple[RankSpec, ...]:
    """Every pipeline rank of one strategy, whose ``rows`` have one candidate and every stage. (pp,)"""
    schedule = _schedule(rows)
    parts = (_places(rows), _chunks(rows), _parameters(rows), _buffers(rows), _gradients(rows))
    return tuple(
        RankSpec(place, chunks, schedule, parameters, buffers, gradients)
        for place, chunks, parameters, buffers, gradients in zip(*parts, strict=True)
    )


def _places(rows: GatheredRows) -> list[RankPlace]:
    lay, table, shards = rows.stage_layers, rows.table, rows.shards
    dense, expert = int(shards.dense_ranks[0, 0]), int(shards.expert_ranks[0, 0])
    tp, cp, dp, splits_experts = int(table.tp[0]), int(table.cp[0]), int(table.dp[0]), int(table.ep[0]) > 1
    return [
        RankPlace(r, lay.stages.pp, lay.stages.vpp, *ends, tp, cp, dp, dense, expert, splits_experts)
        for r, ends in enumerate(zip(lay.stages_with_embedding.tolist(), lay.stages_with_head.tolist(), strict=True))
    ]


def _chunks(rows: GatheredRows) -> list[tuple[ChunkSpec, ...]]:
    lay, stages = rows.stage_layers, rows.stage_layers.stages
    links = stages.position_of_each_chunk, lay.chunks_that_receive, lay.chunks_that_send, lay.chunks_that_feed_own_rank
    return [
        tuple(
            ChunkSpec(position, tuple(_blocks(rows, r, c)), receives, sends, feeds_own_chunk)
            for c, (position, receives, sends, feeds_own_chunk) in enumerate(zip(*of_rank, strict=True))
        )
        for r, of_rank in enumerate(zip(*(array.tolist() for array in links), strict=True))
    ]


def _blocks(rows: GatheredRows, rank: int, chunk: int) -> Iterator[BlockSpec]:
    """The blocks of a chunk in forward order."""
    stages, model, table = rows.stage_layers.stages, rows.workload.model, rows.table
    modes, position = tuple(rows.costs.blocks), int(stages.position_of_each_chunk[rank, chunk])
    if position == 0:
        yield BlockSpec("embedding", "embedding")
    recomputed = stages.recomputed_layers(
        table.recompute_modes[int(table.recompute[0])], int(table.recompute_layers[0])
    )
    for j, (kind, is_recomputed) in enumerate(zip(stages.layers[rank][chunk], recomputed[rank][chunk], strict=True)):
        mode = modes[int((rows.full_mode_index if is_recomputed else rows.base_mode_index)[0])]
        label, number = layer_label(stages.kinds[kind], mode), stages.first_layers[rank][chunk] + j
        keeps = rows.framework.offloaded_activations.offloads_any and number == model.num_layers - 1
        yield BlockSpec("layer", kept_layer_label(label) if keeps else label, number, kind, mode)
    is_last, last = position == stages.num_chunks - 1, layer_kind(model, model.num_layers - 1)
    for n in range(model.num_mtp_layers):
        if position == stages.split.layout.prediction_chunk:
            mode = modes[int(rows.mtp_mode_indices[0])]
            yield BlockSpec("prediction", "mtp", n)
            yield BlockSpec("prediction layer", layer_label(last, mode), n, stages.kinds.index(last), mode)
        if is_last:
            yield BlockSpec("prediction head", "head", n)
    if is_last:
        yield BlockSpec("head", "head")


def _schedule(rows: GatheredRows) -> RankSchedule:
    stages = rows.stage_layers.stages
    return RankSchedule(
        rows.schedule, rows.framework.traits.runtime, stages.pp, stages.vpp, int(rows.num_micro_batches[0]),
        rows.schedule_record.defers_weight_gradients, host_waits_at_exchanges(rows), keeps_last_output(rows),
    )  # fmt: skip


def _parameters(rows: GatheredRows) -> list[RankParameters]:
    shards, static = rows.shards, rows.static
    arrays = (
        shards.dense, shards.expert, shards.unsharded_bytes(1.0), shards.sharded_bytes(1.0), static.params,
        static.states,
        static.step_scratch,
    )  # fmt: skip
    of_stages = (np.broadcast_to(array, shards.dense.shape)[0].tolist() for array in arrays)
    return [RankParameters(*numbers) for numbers in zip(*of_stages, strict=True)]


def _buffers(rows: GatheredRows) -> list[PersistentBuffers]:
    tables, static = rotary_tables_of_stages(rows), rows.static
    stage_boundary_bytes = float(rows.costs.stage_boundary_bytes[rows.k[0]])
    copies = np.broadcast_to(static.buffers, rows.shards.dense.shape)[0].tolist()
    of_stages = (
        framework_buffer_bytes(rows)[0].tolist(),
        tables.number[0].tolist(),
        copies,
        held_input_counts_of_stages(rows),
    )
    return [
        PersistentBuffers(
            of_framework,
            int(number),
            float(tables.nbytes[0]),
            tables.from_start,
            copies_bytes,
            stage_boundary_bytes,
            inputs,
        )
        for of_framework, number, copies_bytes, inputs in zip(*of_stages, strict=True)
    ]


def _gradients(rows: GatheredRows) -> list[GradientSharing]:
    shares = (
        gradient_reducer(rows), gathered_bytes_per_param(rows), reduced_bytes_per_param(rows),
        has_flat_gradient_buffers(rows),
        shards_params(rows), keeps_params_gathered(rows), reduces_gradients_by_chunk(rows),
        bool(shards_optimizer_states(rows)[0]), bool(reduce_scatters_gradients(rows)[0]),
        float(first_reduced_bucket_params(rows)[0]), ddp_gradient_bytes_per_param(rows),
        head_gradient_waits_for_embedding(rows),
    )  # fmt: skip
    return [GradientSharing(*shares, ties) for ties in ties_embedding_to_head(rows).tolist()]


def cost_of_block_spec(rows: GatheredRows, block: BlockSpec) -> BlockCost | None:
    """What a block costs; None of what predictions have of their own."""
    ends = {"embedding": rows.costs.embedding, "head": rows.costs.head}
    return rows.costs.blocks[block.mode][block.kind] if block.role == "layer" else ends.get(block.role)
