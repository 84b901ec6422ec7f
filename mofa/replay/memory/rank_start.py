"""What a rank allocates before its first step: parameters, and what the framework keeps beside them."""

from __future__ import annotations

from mofa.cost.allocations.initialization import build_requests
from mofa.replay.allocator.timeline import (
    BUFFERS,
    GRADIENTS,
    PARAMETERS,
    STATES,
    TEMPORARIES,
    off_tape_act,
)
from mofa.replay.memory import deepspeed
from mofa.replay.memory.fsdp_and_optimizer import play_requests, weights_in_step_order
from mofa.replay.memory.pass_state import Allocation, name_in_layer
from mofa.replay.memory.rank_state import RankState
from mofa.replay.rank.description import Weight

WHERE = "start"


def allocate_start(state: RankState) -> None:
    """Allocate parameters, then what the framework keeps beside them."""
    r = state.rank
    begun = state.events_and_allocated()
    if r.deepspeed:
        deepspeed.allocate_flat_buffers(state)
        return
    if r.preallocated:
        play_requests(state, build_requests(r.weights, r.rotations), WHERE)
        state.note_peak_since(begun)
        return
    params = [_parameter(state, w, n) for n, w in enumerate(r.weights)]
    for flat in r.flat_buffers:
        if flat.params:
            state.new(flat.params, off_tape_act(PARAMETERS, "buffer of the parameters", WHERE))
        state.new(flat.grads, off_tape_act(GRADIENTS, "buffer of the gradients", WHERE))
        for n in flat.weights if flat.params else ():  # copied into it, the tensors are let go
            state.drop(params[n])
    copy = off_tape_act(TEMPORARIES, "copy of a parameter", WHERE)
    for w in weights_in_step_order(r):
        if w.main:  # made of a copy (distrib_optimizer.py: clone().float())
            narrow = state.new(w.main // 2, copy)
            state.new(w.main, off_tape_act(STATES, f"fp32 copy of {name_in_layer(w.name)}", WHERE))
            state.drop(narrow)
    state.note_peak_since(begun)


def _parameter(state: RankState, w: Weight, n: int) -> Allocation:
    """The n-th parameter of a rank, and what is built beside it.

    In fp8 it is cast from a 16-bit tensor, which goes, and has a transposed copy.
    """
    wide = state.new(w.draft, off_tape_act(TEMPORARIES, "draft of a first value", WHERE)) if w.draft else None
    allocation = state.new(w.param, off_tape_act(PARAMETERS, f"parameter {name_in_layer(w.name)}", WHERE))
    if w.transposed:
        state.new(w.transposed, off_tape_act(BUFFERS, f"transposed {name_in_layer(w.name)}", WHERE))
    if wide is not None:
        state.drop(wide)
    for behind, nbytes in state.rank.taken_at_build:
        if behind == n:
            state.new(nbytes, off_tape_act(BUFFERS, "buffer kept for good", WHERE))
    return allocation
