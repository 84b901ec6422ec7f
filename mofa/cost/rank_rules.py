"""Rules of what pipeline ranks hold and do, for all candidates of :class:`mofa.cost.rows.GatheredRows` at once.

The closed form reads what they return; :mod:`mofa.cost.rank_spec` has the entries of one strategy's ranks. What follows
from the layers alone is in :class:`mofa.cost.stages.Stages` and :class:`mofa.cost.stage_layers.StageLayers`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.elementwise import broadcast_to_combinations
from mofa.blocks.fp8 import FP8_RECIPES, transformer_engine_recipe
from mofa.blocks.frameworks.megatron.persistent import rotary_table_bytes
from mofa.cost.block.block_cost import PrecisionMode
from mofa.cost.rows import GatheredRows
from mofa.schedules import Schedule
from mofa.specs.framework import FrameworkSpec

ArrayN = NDArray[np.float64]
BoolN = NDArray[np.bool_]

DDP_BUCKET_BYTES = 100 * 2**20
"""Gradients in one of DDP's buckets (torchtitan: ``bucket_cap_mb=100``). [B]"""
SMALLEST_BUCKET, BUCKET_PER_RANK = 40_000_000, 1_000_000
"""Parameters of Megatron's buckets where reductions overlap (distributed_data_parallel.py): at least the one, the other
for each data-parallel rank. [params]"""

Sharing = Literal["Megatron", "DDP", "FSDP by step", "FSDP by block", "none"]
"""Who reduces gradients: Megatron's buffers, DDP's buckets, FSDP once a step as it does under pipelines, or FSDP inside
each block's backward."""


def host_waits_at_exchanges(rows: GatheredRows) -> bool:
    """Whether Megatron's host waits for the device behind every exchange (p2p_communication.py, ``batch_p2p_sync``)."""
    return _exchanges_together(rows) and not rows.framework.traits.has_pytorch_modules


def keeps_last_output(rows: GatheredRows) -> bool:
    """Whether PyTorch's schedule holds the latest output and input gradient of a stage (Schedule1F1B)."""
    return _exchanges_together(rows) and rows.framework.traits.has_pytorch_pipelines


def _exchanges_together(rows: GatheredRows) -> bool:
    return rows.schedule_record.joins_send_and_receive and rows.stage_layers.stages.pp > 1


def has_flat_gradient_buffers(rows: GatheredRows) -> bool:
    """Whether buffers of Megatron's hold all gradients from the start; DeepSpeed makes them of its own."""
    return rows.static.grads_always and not rows.framework.deepspeed


def keeps_params_gathered(rows: GatheredRows) -> bool:
    """Whether FSDP keeps parameters gathered and gradients whole for a step, as it does under pipelines."""
    return shards_params(rows) and rows.mode.pipelined


def shards_params(rows: GatheredRows) -> bool:
    """Whether FSDP shares parameters out over ranks."""
    return rows.framework.shards_params and rows.mode.precision == "mixed"


def reduces_gradients_by_chunk(rows: GatheredRows) -> bool:
    """Whether each chunk's gradients are reduced behind its last backward, not at a step's end, and its weights go."""
    return keeps_params_gathered(rows) and rows.schedule_record.gathers_by_chunk


def gradient_reducer(rows: GatheredRows) -> Sharing:
    """Who reduces gradients: Megatron, DDP, FSDP a block or a step at a time, or nobody."""
    return gradient_reducer_of_precision_mode(rows.framework, rows.mode)


def gradient_reducer_of_precision_mode(framework: FrameworkSpec, mode: PrecisionMode) -> Sharing:
    """Who reduces gradients in rows of a precision mode: Megatron, DDP, FSDP a block or a step at a time, or nobody."""
    if not framework.traits.has_pytorch_modules:
        return "Megatron"
    if mode.amp:
        return "DDP"
    if mode.precision != "mixed":
        return "none"
    return "FSDP by step" if mode.pipelined else "FSDP by block"


def gathered_bytes_per_param(rows: GatheredRows) -> float:
    """Bytes of a parameter that is gathered once a step: FSDP's in bf16. [B]"""
    recipe = FP8_RECIPES.get(transformer_engine_recipe(rows.workload, rows.framework))
    if gradient_reducer(rows) == "FSDP by step" or (recipe is not None and recipe.gathers_params_in_bf16):
        return 2.0
    return rows.framework.gathered_bytes_per_param(rows.workload.precision.gemm)


def reduced_bytes_per_param(rows: GatheredRows) -> float:
    """Bytes of a gradient that is reduced once a step: FSDP's in fp32. [B]"""
    return 4.0 if gradient_reducer(rows) == "FSDP by step" else rows.framework.reduced_bytes_per_param


def shards_optimizer_states(rows: GatheredRows) -> BoolN:
    """Whether optimizer states are shared out, of each grid of ranks. (g,)"""
    return np.asarray(rows.grids.zero >= 1)


def reduce_scatters_gradients(rows: GatheredRows) -> BoolN:
    """Whether Megatron reduces gradients to each rank's part, of each grid of ranks. (g,)

    DeepSpeed's BF16 optimizer sums fp32 gradients whole (``_bf16_reduce_grads``).
    """
    return np.asarray(shards_optimizer_states(rows) & (rows.framework.deepspeed != "bf16"))


def first_reduced_bucket_params(rows: GatheredRows) -> ArrayN:
    """What Megatron's first rank reduces at once in its first chunk, the only one that it cuts, of each grid of ranks.
    (g,) [params]

    By the ranks of data parallelism without those of context parallelism (distributed_data_parallel.py, ``dp_group``).
    All where reductions do not overlap the backward (the same file: ``bucket_size = None``).
    """
    if not rows.framework.overlap_grad_reduce:
        return np.full(len(rows.grids), np.inf)
    return np.asarray(np.maximum(float(SMALLEST_BUCKET), float(BUCKET_PER_RANK) * rows.grids.dp))


def ddp_gradient_bytes_per_param(rows: GatheredRows) -> float:
    """Bytes of a gradient in DDP's buckets: those of the parameters. [B]"""
    return 4.0 if rows.mode.precision == "autocast" else 2.0


def ties_embedding_to_head(rows: GatheredRows) -> BoolN:
    """Whether a stage has the embedding and a head that is the same weight. (R,)"""
    lay = rows.stage_layers
    return np.asarray(lay.stages_with_embedding & lay.stages_with_head & rows.workload.model.tied_embeddings)


def head_gradient_waits_for_embedding(rows: GatheredRows) -> bool:
    """Whether the head's weight gradient stays until the embedding's is there, on a rank that has both.

    A weight that two functions use has one node that takes its gradients (AccumulateGrad); autograd's engine keeps the
    first in the node's buffer and adds the second in place, and the node runs, with Megatron's hook, only behind both
    (torch/csrc/autograd/engine.cpp, ``evaluate_function``). A product that adds to the main gradient by itself leaves
    nothing that waits but the dummy
    (:func:`mofa.blocks.frameworks.megatron.transformer_engine.head_persistent_buffer_bytes`).
    """
    fw = rows.framework
    return (
        rows.workload.model.tied_embeddings and rows.stage_layers.stages.pp == 1
        and not fw.traits.has_pytorch_modules and not fw.fuses_wgrad_accumulation
    )  # fmt: skip


class HeldInputCounts(NamedTuple):
    """Stage inputs that a rank holds beside all passes: all the time, and more between two steps. [-]"""

    throughout: int = 0
    at_end: int = 0


def held_input_counts(framework: FrameworkSpec, schedule: Schedule, pp: int, receiving: int) -> HeldInputCounts:
    """Stage inputs that a rank holds beside its passes, whose ``receiving`` chunks get theirs from another rank.

    A chunk keeps the last input that it was set (``set_input_tensor``), whose gradient hangs on it, until its next
    forward: two a chunk at the end of a step, when both are of a micro-batch that is through (megatron_core 0.16.1,
    pipeline_parallel/schedules.py and transformer/transformer_block.py). Megatron of 2022 has the same loop and the
    same ``set_input_tensor`` (megatron/schedules.py). DeepSpeed's pipeline has its own.

    Examples
    --------
    Two ranks of two chunks each: three tensors on both while they compute; the last one ends a step with four.

    >>> from mofa.schedules.interleaved import INTERLEAVED
    >>> from mofa.schedules.one_f_one_b import ONE_F_ONE_B
    >>> from mofa.specs.load import load_framework
    >>> megatron = load_framework("megatron")
    >>> [held_input_counts(megatron, INTERLEAVED, 2, chunks) for chunks in (1, 2)]
    [HeldInputCounts(throughout=3, at_end=0), HeldInputCounts(throughout=3, at_end=1)]
    >>> [held_input_counts(megatron, ONE_F_ONE_B, 2, chunks) for chunks in (0, 1)]
    [HeldInputCounts(throughout=0, at_end=0), HeldInputCounts(throughout=2, at_end=0)]
    """
    if framework.traits.has_pytorch_modules or framework.deepspeed or pp == 1:
        return HeldInputCounts()
    steady = schedule.num_held_stage_inputs if receiving else 0
    return HeldInputCounts(steady, max(2 * receiving - steady, 0))


def held_input_counts_of_stages(rows: GatheredRows) -> list[HeldInputCounts]:
    """:func:`held_input_counts` of each stage that is shown. (R,)"""
    pp, receiving = rows.stage_layers.stages.pp, rows.stage_layers.chunks_that_receive.sum(axis=1).tolist()
    return [held_input_counts(rows.framework, rows.schedule_record, pp, chunks) for chunks in receiving]


def framework_buffer_bytes(rows: GatheredRows) -> ArrayN:
    """What the framework allocates once for a stage's own blocks and keeps outside of all tapes. (n, R) [B]

    A dummy gradient of a dense layer's weight is not there on a stage of experts alone.
    """
    lay = rows.stage_layers
    predicts = lay.stages_with_predictions & bool(rows.workload.model.num_mtp_layers)
    has_kind = lay.stages.layer_counts[:, lay.shown.shown_stages].sum(axis=2) > 0
    has_kind[rows.last_layer_kind] |= predicts
    ends = zip(predicts.tolist(), lay.stages_with_head.tolist(), strict=True)
    of_stages = [
        rows.costs.persistent_bytes(
            frozenset(np.flatnonzero(kinds).tolist()), has_predictions=predictions, has_head=head
        )
        for kinds, (predictions, head) in zip(has_kind.T, ends, strict=True)
    ]
    return np.stack(of_stages, axis=1)[rows.k]


class RotaryTables(NamedTuple):
    """Tables of rotations that Megatron keeps with a library; of latent attention each layer's."""

    number: ArrayN
    """Tables from the first forward on. (n, R) [-]"""
    nbytes: ArrayN
    """Of one. (n,) [B]"""
    from_start: tuple[int, ...]
    """Of each of a layer that is there from the start. [B]"""


def rotary_tables_of_stages(rows: GatheredRows) -> RotaryTables:
    """Rotary tables of each stage; of a framework that has no library none."""
    n = len(rows.table)
    layers = rows.stage_layers.layer_counts.sum(axis=1)
    if not rows.framework.library:
        return RotaryTables(np.zeros_like(layers), np.zeros(n), ())
    tables = rotary_table_bytes(rows.costs.context)
    nbytes = broadcast_to_combinations(tables.table, rows.costs.machine.num_k)[rows.k]
    if not tables.of_layers:
        return RotaryTables(np.full(layers.shape, float(rows.stage_layers.stages.vpp)), nbytes, ())
    return RotaryTables(layers, nbytes, tables.from_start)
