"""What one pipeline rank holds and does: its parameters, pieces, computations and buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mofa.cost.allocations.block_trace import BlockTrace
from mofa.cost.allocations.watchdog import BlockPassTime
from mofa.cost.allocations.weight_buffers import FlatBuffer, WeightBytes
from mofa.replay.rank.routing_drift import RoutingDrift
from mofa.specs.optimizers import OPTIMIZERS

__all__ = ["FlatBuffer", "Rank", "RankBlock", "WeightBytes"]


@dataclass(frozen=True)
class RankBlock:
    """A block of a rank, an embedding, a layer or a head, with its allocation trace and its times."""

    name: str
    trace: BlockTrace
    forward_and_backward_times: tuple[BlockPassTime, BlockPassTime] = BlockPassTime(), BlockPassTime()
    """Of its forward and its backward."""
    parts: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
    """Of a layer whose forward runs beside another's backward: the part of each op of its forward and of its backward,
    by name (:mod:`mofa.blocks.combined_passes`)."""


@dataclass(frozen=True)
class Rank:
    """What one rank holds and does.

    ``chunks`` are its pieces per virtual stage, ``computations`` those of a step as (kind, chunk, micro-batch).
    ``receives`` and ``sends`` say whether a chunk's input comes from and its output goes to another rank,
    ``feeds_own_chunk`` whether its output goes to another chunk of the rank, ``first_chunks`` which chunk is the
    model's first, if any. ``rotary_table_bytes`` are the table of each model part and what it is made of
    (:func:`mofa.cost.allocations.initialization.rotary_table_bytes_of_model_part`), ``first_forward_buffers`` are what
    the first forward takes. [B]
    """

    weights: tuple[WeightBytes, ...]
    chunks: tuple[tuple[RankBlock, ...], ...]
    computations: tuple[tuple[str, int, int], ...]
    num_micro_batches: int
    receives: tuple[bool, ...]
    sends: tuple[bool, ...]
    feeds_own_chunk: tuple[bool, ...]
    first_chunks: frozenset[int]
    stage_boundary_bytes: int
    rotary_table_bytes: tuple[int, ...]
    first_forward_buffers: tuple[int, ...]
    grads_always: bool
    flat_buffers: tuple[FlatBuffer, ...]
    preallocated: bool
    overlaps_host_copies: bool = False
    """Whether what hosts step comes back on a stream of its own."""
    defers_weight_gradients: bool = False
    """Whether weights' gradients are put off, as zero-bubble schedules do."""
    round_length: int = 1
    """Forwards in a round of the schedule's steady state. [-]"""
    tied: bool = False
    """Whether the embedding and the head are one weight, here: it has one gradient."""
    gathered_params: tuple[tuple[tuple[tuple[float, float], ...], ...], ...] | None = None
    """Under pipelines the weights of FSDP's groups per chunk, and this rank's share of each: gathered for the step,
    reduced at its end. [params]"""
    stored_bytes_per_param: float = 4.0
    """Of a parameter of torchtitan's, and so of its reduced gradient. [B/param]"""
    reduces_by_chunk: bool = False
    """Whether FSDP's weights are gathered and gradients reduced chunk by chunk, as torch's schedules of several do."""
    deepspeed: str = ""
    """Which of DeepSpeed's optimizers keeps gradients and states, if any."""
    optimizer_ranks: float = 1.0
    """Ranks that DeepSpeed's optimizer states are shared out over. [-]"""
    norms_gradients: bool = True
    """DeepSpeed's ZeRO 1: whether this rank takes part in the gradients' norm."""
    optimizer_rank: int = 0
    """DeepSpeed's ZeRO 1: whose part of the optimizer's states this rank has."""
    keeps_last_output: bool = False
    """Whether the schedule holds the latest output and input gradient of a stage (torch's Schedule1F1B)."""
    device_over_host_time: float = 0.0
    """What the device takes for a turn of all chunks, by what the host takes to issue it. [-]"""
    buckets: tuple[tuple[int, ...], ...] = ()
    """DDP's buckets of gradients per chunk, in the order in which they fill; one of all until the second forward. [B]
    """
    sent_bytes: int = 0
    """What DeepSpeed keeps of a stage's output until its backward. [B]"""
    launch_blocking: bool = False
    """Whether the host waits behind each launch."""
    casts_to_reduce: bool = False
    """DeepSpeed's ZeRO 1: whether gradients are copied to another type to be reduced."""
    keeps_received_inputs: bool = False
    """Whether Megatron's 1F1B holds what it received beyond a backward (:mod:`mofa.replay.memory.received_inputs`)."""
    inputs_at_end: int = 0
    """Tensors of the boundary's size that Megatron's chunks hold from a step's last backward to the next step. [-]"""
    allocated_at_build: tuple[tuple[int, int], ...] = ()
    """What is taken for good while parameters are made: behind which of them, and so much. [B]"""
    moments: tuple[str, ...] = OPTIMIZERS["adamw"].moments
    """The optimizer's tensors of each weight beside its main copy, by name."""
    late_copies_bytes: int = 0
    """Copies of gradients behind graphs that wait for the device together, as far as there is room beside the margin
    (:mod:`mofa.cost.memory.late_gradient_copies`). [B]"""
    margin_bytes: float = 0.0
    """What a plan leaves free. [B]"""
    pairs_passes: bool = False
    """Whether a backward right in front of a forward runs beside it, layer by layer."""
    routing_drift: RoutingDrift | None = None
    """What moves from step to step, where routers' counts are known."""
