"""What a rank allocates before its first step: parameters, and what the framework keeps beside them."""

from __future__ import annotations

from mofa.cost.allocations.initialization import weight_init_requests
from mofa.replay.allocator.timeline import (
    BUFFERS,
    GRADIENTS,
    PARAMETERS,
    STATES,
    TEMPORARIES,
    off_tape_instruction,
)
from mofa.replay.memory import deepspeed
from mofa.replay.memory.fsdp_and_optimizer import allocate_init_requests, weights_in_step_order
from mofa.replay.memory.pass_state import Allocation, weight_name_in_layer
from mofa.replay.memory.rank_state import RankState
from mofa.replay.rank.description import WeightBytes

WHERE = "start"


def allocate_rank_start(state: RankState) -> None:
    """Allocate parameters, then what the framework keeps beside them."""
    r = state.rank
    begun = state.num_events_and_allocated_bytes()
    if r.deepspeed:
        deepspeed.allocate_flat_buffers(state)
        return
    if r.preallocated:
        allocate_init_requests(state, weight_init_requests(r.weights, r.rotary_table_bytes), WHERE)
        state.note_peak_since(begun)
        return
    params = [_parameter(state, w, n) for n, w in enumerate(r.weights)]
    for flat in r.flat_buffers:
        if flat.params:
            state.allocate(flat.params, off_tape_instruction(PARAMETERS, "buffer of the parameters", WHERE))
        state.allocate(flat.grads, off_tape_instruction(GRADIENTS, "buffer of the gradients", WHERE))
        for n in flat.weights if flat.params and not flat.keeps_tensors else ():  # copied into it, they are let go
            state.free_allocation(params[n])
    copy = off_tape_instruction(TEMPORARIES, "copy of a parameter", WHERE)
    for w in weights_in_step_order(r):
        if w.from_host_bytes:  # on its way to the host (hybrid_optimizer.py: clone().cpu())
            state.free_allocation(state.allocate(w.from_host_bytes // 2, copy))
        if w.main_copy_bytes:  # made of a copy (distrib_optimizer.py: clone().float())
            narrow = state.allocate(w.main_copy_bytes // 2, copy)
            state.allocate(
                w.main_copy_bytes, off_tape_instruction(STATES, f"fp32 copy of {weight_name_in_layer(w.name)}", WHERE)
            )
            state.free_allocation(narrow)
    state.note_peak_since(begun)


def _parameter(state: RankState, weight: WeightBytes, number: int) -> Allocation:
    """The n-th parameter of a rank, and what is built beside it.

    In fp8 it is cast from a 16-bit tensor, which goes, and has a transposed copy.
    """
    wide = (
        state.allocate(weight.init_copy_bytes, off_tape_instruction(TEMPORARIES, "draft of a first value", WHERE))
        if weight.init_copy_bytes
        else None
    )
    allocation = state.allocate(
        weight.param_bytes, off_tape_instruction(PARAMETERS, f"parameter {weight_name_in_layer(weight.name)}", WHERE)
    )
    if weight.fp8_transpose_bytes:
        state.allocate(
            weight.fp8_transpose_bytes,
            off_tape_instruction(BUFFERS, f"transposed {weight_name_in_layer(weight.name)}", WHERE),
        )
    if wide is not None:
        state.free_allocation(wide)
    for behind, nbytes in state.rank.allocated_at_build:
        if behind == number:
            state.allocate(nbytes, off_tape_instruction(BUFFERS, "buffer kept for good", WHERE))
    return allocation
