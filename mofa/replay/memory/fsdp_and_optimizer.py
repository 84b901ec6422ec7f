"""What a rank's step allocates around its computations: FSDP's gathers and reductions of a pipeline, the optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mofa.cost.allocations.initialization import BROADCAST, DRAFT, TABLE, SlotRequest, ddp_broadcast_requests
from mofa.cost.allocations.weight_buffers import weights_by_optimizer
from mofa.cost.memory.fsdp_unsharded import CHUNKS_AHEAD
from mofa.replay.allocator.timeline import (
    ACTIVATIONS,
    BUFFERS,
    GRADIENTS,
    PARAMETERS,
    STATES,
    TEMPORARIES,
    off_tape_instruction,
)
from mofa.replay.memory import deepspeed
from mofa.replay.memory.pass_state import weight_name_in_layer

if TYPE_CHECKING:
    from mofa.replay.memory.pass_state import Allocation
    from mofa.replay.memory.rank_state import RankState
    from mofa.replay.rank.description import Rank, WeightBytes

GATHER, REDUCE = 1, 2
"""FSDP's streams."""
FROM_HOST = 3
"""The stream of the hybrid optimizer's copies from the host, where it has one."""


def allocate_init_requests(state: RankState, wants: Iterable[SlotRequest], where: str) -> None:
    """Allocate and free what is asked for before there is a computation: parameters as they are made."""
    allocations: dict[int, Allocation] = {}
    for slot, nbytes, name in wants:
        if not nbytes:
            state.free_allocation(allocations.pop(slot))
            continue
        lasts = PARAMETERS if name not in (TABLE, DRAFT, BROADCAST) else BUFFERS if name == TABLE else TEMPORARIES
        shown = f"parameter {weight_name_in_layer(name)}" if lasts == PARAMETERS else name
        allocations[slot] = state.allocate(nbytes, off_tape_instruction(lasts, shown, where))


def gather_group_weights(state: RankState, chunk: int, group: int) -> None:
    """A group's weights in front of its first forward of a step, and they stay; what was gathered before it goes when
    this is copied (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, ``wait_for_unshard``)."""
    groups = state.rank.gathered_params
    if groups is None:
        return
    start = state.num_events_and_allocated_bytes()
    gathered = _gathered(state, groups[chunk][group], GATHER)
    _let_go(state)
    state.unsharded.setdefault(chunk, []).append(_copied(state, groups[chunk][group]))
    state.gathered = gathered
    state.note_peak_since(start)


def free_last_gathered_buffer(state: RankState) -> None:
    """Free the gathered buffer of a chunk's last group, behind its forward."""
    _let_go(state)


def gather_all_groups(state: RankState) -> None:
    """torch's schedules of several chunks begin a step by gathering all groups of each (``UNSHARD``,
    torch/distributed/pipelining/schedules.py), up to three: on the stream that computes."""
    groups = state.rank.gathered_params
    if groups is None or not state.rank.reduces_by_chunk:
        return
    start = state.num_events_and_allocated_bytes()
    for c in list(dict.fromkeys(c for _, c, _ in state.rank.computations))[:CHUNKS_AHEAD]:
        state.fetched[c] = [_gathered(state, weights, 0) for weights in groups[c]]
    state.note_peak_since(start)


def copy_out_gathered_groups(state: RankState, chunk: int) -> None:
    """In front of a chunk's first forward what was fetched for it is copied, group by group."""
    groups = state.rank.gathered_params
    if groups is None or chunk in state.unsharded:
        return
    start = state.num_events_and_allocated_bytes()
    fetched = state.fetched.pop(chunk, None) or [_gathered(state, weights, 0) for weights in groups[chunk]]
    for weights, gathered in zip(groups[chunk], fetched, strict=True):
        state.unsharded.setdefault(chunk, []).append(_copied(state, weights))
        state.free_allocation(gathered)
    state.note_peak_since(start)


def _gathered(state: RankState, weights: tuple[tuple[float, float], ...], stream: int) -> Allocation:
    where = "gather of parameters"
    source = state.allocate(
        int(2 * sum(share for _, share in weights)),
        off_tape_instruction(BUFFERS, "all-gather input", where, stream),
    )
    full = state.allocate(
        int(2 * sum(n for n, _ in weights)), off_tape_instruction(BUFFERS, "all-gather output", where, stream)
    )
    state.free_allocation(source)
    return full


def _copied(state: RankState, weights: tuple[tuple[float, float], ...]) -> list[Allocation]:
    copy = off_tape_instruction(PARAMETERS, "gathered weights", "gather of parameters")
    return [state.allocate(int(2 * n), copy) for n, _ in weights]


def _let_go(state: RankState) -> None:
    if state.gathered is not None:
        state.free_allocation(state.gathered)
        state.gathered = None


def allocate_ddp_buckets(state: RankState) -> None:
    """Allocate DDP's gradient buckets: one for all gradients at the first forward, the final ones after a backward.

    The final buckets follow ``bucket_cap_mb`` and the order in which gradients became ready
    (torch/nn/parallel/distributed.py, ``_ddp_init_helper``; csrc/distributed/c10d/reducer.cpp, ``rebuild_buckets``).
    """
    instruction = off_tape_instruction(GRADIENTS, "bucket of gradients", "DDP's buckets")
    start = state.num_events_and_allocated_bytes()
    if not state.whole_buckets and "backward" not in state.threads:
        allocate_init_requests(state, ddp_broadcast_requests(state.rank.weights), "DDP's beginning")
        state.whole_buckets = [state.allocate(sum(sizes), instruction) for sizes in state.rank.buckets]
    elif state.whole_buckets and "backward" in state.threads:
        for bucket, sizes in zip(state.whole_buckets, state.rank.buckets, strict=True):
            state.free_allocation(bucket)
            for size in sizes:
                state.allocate(size, instruction)
        state.whole_buckets = []
    state.note_peak_since(start)


def reduce_chunk_gradients(state: RankState, chunk: int) -> None:
    """Behind a chunk's last backward FSDP reduces its unsharded gradients group by group.

    The weights go first, then what was sent before, then there is what is sent (_fsdp_param_group.py,
    ``post_backward``; _fsdp_collectives.py, ``foreach_reduce``).
    """
    groups = state.rank.gathered_params
    assert groups is not None
    where = "reduction of gradients"
    sent = off_tape_instruction(BUFFERS, "fp32 reduce-scatter input", f"{where}: fp32 reduce-scatter input")
    sharded = off_tape_instruction(GRADIENTS, "sharded gradients", where, REDUCE)
    previous: Allocation | None = None
    start = state.num_events_and_allocated_bytes()
    for g, (weights, copies) in enumerate(zip(groups[chunk], state.unsharded.pop(chunk), strict=True)):
        for copy in copies:
            state.free_allocation(copy)
        if previous is not None:
            state.free_allocation(previous)
        previous = state.allocate(int(4 * sum(n for n, _ in weights)), sent)
        for copy in state.accumulators.pop(chunk * 10_000 + g, ()):
            state.free_allocation(copy)
        shares = sum(share for _, share in weights)
        summed = state.allocate(int(4 * shares), sharded)
        if state.rank.stored_bytes_per_param < 4.0:  # cast to the parameters' format
            wide, summed = summed, state.allocate(int(state.rank.stored_bytes_per_param * shares), sharded)
            state.free_allocation(wide)
        state.grads.append(summed)
    if previous is not None:
        state.free_allocation(previous)
    state.note_peak_since(start)


def weights_of_each_optimizer(rank: Rank) -> tuple[tuple[WeightBytes, ...], ...]:
    """The weights of each optimizer, in its order."""
    return weights_by_optimizer(rank.weights, rank.flat_buffers)


def weights_in_step_order(rank: Rank) -> tuple[WeightBytes, ...]:
    """All weights in the order of the optimizers."""
    return tuple(w for of_one in weights_of_each_optimizer(rank) for w in of_one)


def step_optimizer(state: RankState) -> None:
    """The optimizer's step; its states appear in the first, and fp32 copies of 16-bit gradients stay to the next."""
    where = "optimizer step"
    if state.rank.deepspeed:
        deepspeed.step_optimizer(state)
        return
    inputs = off_tape_instruction(ACTIVATIONS, "last input of a chunk, with its gradient", where)
    state.grads += [state.allocate(state.rank.stage_boundary_bytes, inputs) for _ in range(state.rank.inputs_at_end)]
    widened = off_tape_instruction(TEMPORARIES, "fp32 copies of gradients", where)
    state.grads += [
        state.allocate(w.fp32_gradient_copy_bytes, widened)
        for w in weights_in_step_order(state.rank)
        if w.fp32_gradient_copy_bytes
    ]
    scratch = off_tape_instruction(TEMPORARIES, "temporaries of the optimizer", where)
    state_kinds = [off_tape_instruction(STATES, name, where) for name in state.rank.moments]
    for w in weights_in_step_order(state.rank) if state.rank.flat_buffers else ():
        if w.temporary_bytes:  # clipping scales each gradient into a temporary (utils.py:1212)
            state.free_allocation(state.allocate(w.state_bytes, scratch))
    for weights in weights_of_each_optimizer(state.rank):
        if state.step == 1:
            for w in weights:
                for moment in state_kinds if w.state_bytes else ():
                    state.allocate(w.state_bytes, moment)
        temporaries = [state.allocate(w.temporary_bytes, scratch) for w in weights if w.temporary_bytes]
        for temporary in temporaries:
            state.free_allocation(temporary)
        _copy_from_host(state, weights)


def _copy_from_host(state: RankState, weights: Iterable[WeightBytes]) -> None:
    """Values of weights that hosts stepped come as fp32 and are cast on the device, one behind the other
    (aten/src/ATen/native/cuda/Copy.cu, ``copy_kernel_cuda``: conversions of copies that nobody waits for)."""
    stream = FROM_HOST if state.rank.overlaps_host_copies else 0
    wide = off_tape_instruction(TEMPORARIES, "fp32 values from the host", "optimizer step", stream)
    for w in weights:
        if w.from_host_bytes:
            state.free_allocation(state.allocate(w.from_host_bytes, wide))
