"""What DeepSpeed's optimizers allocate around a rank's computations, in the order in which they do.

Read in deepspeed/runtime: ``zero/stage_1_and_2.py``, ``bf16_optimizer.py``, ``fp16/fused_optimizer.py``,
``pipe/engine.py``, as of early 2022. States are there before the first step (``initialize_optimizer_states``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mofa.replay.allocator.timeline import (
    ACTIVATIONS,
    BUFFERS,
    GRADIENTS,
    PARAMETERS,
    STATES,
    TEMPORARIES,
    off_tape_instruction,
)
from mofa.replay.rank.program import GRADIENT, INPUT

if TYPE_CHECKING:
    from mofa.replay.allocator.pools import Block
    from mofa.replay.allocator.timeline import Instruction
    from mofa.replay.memory.pass_state import Allocation
    from mofa.replay.memory.rank_state import RankState
    from mofa.replay.memory.recording import RetainedBlock
    from mofa.replay.memory.stage_outputs import DeferredFrees
    from mofa.replay.rank.description import WeightBytes

BUCKET = 2 * 500_000_000
"""ZeRO's contiguous buffer of 16-bit gradients (``reduce_bucket_size`` 5e8 elements). [B]"""


def optimizer_groups_of(weights: Sequence[WeightBytes]) -> tuple[tuple[int, ...], ...]:
    """Which parameters each group of the optimizer has, which DeepSpeed flattens one by one.

    Those that decay in two halves, then norms and biases: Apex's FusedAdam crashes on tensors of more than 2^31
    elements, which "we hit at 200B over 80 A100" (bigscience-workshop/Megatron-DeepSpeed, pull request 249 of 18
    February 2022, megatron/optimizer/__init__.py, ``_get_params_for_weight_decay_optimization``).

    Examples
    --------
    >>> from mofa.replay.rank.description import WeightBytes
    >>> names = ("embedding", "norm", "up", "down")
    >>> optimizer_groups_of([WeightBytes(name, 2, 0, 0, 0, is_1d=name == "norm") for name in names])
    ((0,), (2, 3), (1,))
    """
    decayed = [n for n, w in enumerate(weights) if not w.is_1d]
    half = len(decayed) // 2
    rest = (n for n, w in enumerate(weights) if w.is_1d)
    return tuple(members for members in (tuple(decayed[:half]), tuple(decayed[half:]), tuple(rest)) if members)


def bf16_bytes_of_groups(state: RankState) -> list[int]:
    """16-bit bytes of the parameters of each group. [B]"""
    weights = state.rank.weights
    return [sum(weights[n].param_bytes for n in members) for members in optimizer_groups_of(weights)]


def allocate_flat_buffers(state: RankState) -> None:
    """Parameters group by group into a flat buffer, and their fp32 copy; then the optimizer's states.

    The parameters' old blocks are left to the allocator: DeepSpeed empties the cache only since its pull request 2620
    of December 2022, and ZeRO 1 left them on the device meanwhile (``move_params_to_cpu_during_init: false`` in
    tr11-200B-ml.slurm). Without ZeRO the buffer is made of copies of the parameters (``FP16_Optimizer``).
    """
    r, where, begun = state.rank, "start", state.num_events_and_allocated_bytes()
    params = [state.allocate(w.param_bytes, off_tape_instruction(PARAMETERS, "parameter", where)) for w in r.weights]
    parts = [int(total / r.optimizer_ranks) for total in bf16_bytes_of_groups(state)]
    for members, total, part in zip(optimizer_groups_of(r.weights), bf16_bytes_of_groups(state), parts, strict=True):
        copies = off_tape_instruction(TEMPORARIES, "copy of a parameter", where)
        copied = [state.allocate(r.weights[n].param_bytes, copies) for n in members] if r.deepspeed == "zero0" else []
        state.allocate(total, off_tape_instruction(PARAMETERS, "buffer of the parameters", where))
        state.free_allocations([*(params[n] for n in members), *copied])
        clone = state.allocate(part, off_tape_instruction(STATES, "16-bit copy of the partition", where))
        state.allocate(2 * part, off_tape_instruction(STATES, "fp32 copy of the partition", where))
        state.free_allocation(clone)
        if r.deepspeed == "bf16":
            state.allocate(2 * total, off_tape_instruction(GRADIENTS, "fp32 buffer of the gradients", where))
    zeros = off_tape_instruction(GRADIENTS, "fp32 zeros of the partition", where)
    steps = [state.allocate(2 * part, zeros) for part in parts] if r.deepspeed != "bf16" else []
    for part in parts:
        for moments in r.moments:
            state.allocate(2 * part, off_tape_instruction(STATES, moments, where))
    state.free_allocations(steps)
    state.note_peak_since(begun)


def free_bf16_gradients(state: RankState) -> None:
    """The BF16 optimizer lets the 16-bit gradients of the backward before go (``clear_lp_grads``)."""
    if state.rank.deepspeed == "bf16":
        _drop_grads(state)


def add_to_fp32_gradients(state: RankState) -> None:
    """Add each 16-bit gradient, cast to fp32, to the BF16 optimizer's buffer, and keep it (``update_hp_grads``)."""
    if state.rank.deepspeed == "bf16":
        begun = state.num_events_and_allocated_bytes()
        instruction = off_tape_instruction(TEMPORARIES, "fp32 copy of a gradient", "update of the gradients")
        for w in state.rank.weights:
            state.free_allocation(state.allocate(2 * w.param_bytes, instruction))
        state.note_peak_since(begun)


def live_bf16_gradients(state: RankState) -> list[RetainedBlock]:
    """The 16-bit gradients that a backward of the BF16 optimizer's finds, and what was asked for each. [B]"""
    return [(block, instruction.size) for block, instruction in state.grads] if state.rank.deepspeed == "bf16" else []


def replace_gradient_blocks(state: RankState, blocks: Sequence[Block]) -> None:
    """Put the gradients into other blocks: they are in these now."""
    state.grads = [(block, instruction) for block, (_, instruction) in zip(blocks, state.grads, strict=True)]


def keep_rank_part_of_output(state: RankState, output: Allocation) -> Allocation:
    """What stays of a stage's output until its backward: a rank's part (``PartitionedTensor``); all of one rank's."""
    if not state.rank.sent_bytes:
        return output
    part = state.allocate(state.rank.sent_bytes, off_tape_instruction(ACTIVATIONS, INPUT, "send of an output"))
    state.free_allocation(output)
    return part


def gather_received_activation_over_tp(state: RankState, sends: DeferredFrees, name: str, where: str) -> Allocation:
    """A tensor whose parts the tensor-parallel ranks hold, put together (``PartitionedTensor.full``).

    It is gathered into the flat output of torch's all-gather, copied into a flat tensor and cloned. One rank receives
    it as it is. The host waits for the device first, which has its parts' sizes (``from_meta``).
    """
    instruction = off_tape_instruction(ACTIVATIONS, name, where)
    size = state.rank.stage_boundary_bytes
    if not state.rank.sent_bytes:
        return state.allocate(size, instruction)
    sends.synchronize_deepspeed()
    flat = state.allocate(size, instruction)
    output = state.allocate(size, off_tape_instruction(BUFFERS, "all-gather output", where))
    sends.count_deepspeed_launches(
        3 + size // state.rank.sent_bytes
    )  # zeros, the gather, a copy for each part, the clone
    sends.free_allocation_once_device_passed(output)
    full = state.allocate(size, instruction)
    sends.free_allocation_once_device_passed(flat)
    return full


def regather_output_for_backward(state: RankState, sends: DeferredFrees) -> list[Allocation]:
    """What a backward holds to its end: the output, whole again, and its gradient (``_exec_backward_pass``).

    The gradient is received into a buffer that stays; the ranks' part of it where there are several.
    """
    r, where = state.rank, "receive of a gradient"
    if "gradient" not in state.threads:
        state.threads.add("gradient")
        state.allocate(
            r.sent_bytes or r.stage_boundary_bytes,
            off_tape_instruction(BUFFERS, "buffer of a received gradient", where),
        )
    return (
        [gather_received_activation_over_tp(state, sends, name, where) for name in (INPUT, GRADIENT)]
        if r.sent_bytes
        else []
    )


def step_optimizer(state: RankState) -> None:
    """Gradients reduced bucket by bucket, the part's checked, normed in fp64 and made fp32, then the gather.

    The BF16 optimizer's fp32 gradients are reduced in bf16, each group's in one copy: ``allreduce_bucket`` casts what
    is not of the engine's ``communication_data_type``, which bf16 without a stage of ZeRO makes bf16
    (runtime/engine.py).
    """
    r, where = state.rank, "optimizer step"
    scratch = off_tape_instruction(TEMPORARIES, "temporaries of the optimizer", where)
    if r.deepspeed == "bf16":  # norm and update read the buffer in place
        _communicate(
            state, bf16_bytes_of_groups(state), off_tape_instruction(TEMPORARIES, "16-bit gradients to reduce", where)
        )
        _gather(state, scratch)
        return
    _reduce(
        state,
        gradient_bytes_by_bucket(
            [r.weights[n].param_bytes for members in optimizer_groups_of(r.weights) for n in members]
        ),
        scratch,
    )
    if r.deepspeed == "zero1":
        _step_in_parts(state, scratch)
        _gather(state, scratch)
        return
    for w in r.weights:  # looked through in fp32 for what is not finite
        state.free_allocation(state.allocate(2 * w.param_bytes, scratch))
    wide = []
    grads = _by_group(state)
    for members, total, group_grads in zip(
        optimizer_groups_of(r.weights), bf16_bytes_of_groups(state), grads, strict=True
    ):
        each = [state.allocate(2 * r.weights[n].param_bytes, scratch) for n in members]
        wide.append(state.allocate(2 * total, scratch))
        state.free_allocations(each)
        state.free_allocations(group_grads)
    state.grads = []
    state.free_allocations(wide)


def _step_in_parts(state: RankState, scratch: Instruction) -> None:
    """ZeRO 1's step: the parts of all groups looked through in fp32 for what is not finite; then of one group after the
    other normed, flattened and cast, whose gradients then go; the fp32 ones of all groups stay for the optimizer."""
    ranks = state.rank.optimizer_ranks
    parts = [int(total / ranks) for total in bf16_bytes_of_groups(state)]
    by_group = [_part_of(state, grads, part) for grads, part in zip(_by_group(state), parts, strict=True)]
    for _, part_sizes in by_group:
        for size in part_sizes:
            state.free_allocation(state.allocate(2 * size, scratch))
    wide = []
    for part, (part_grads, part_sizes) in zip(parts, by_group, strict=True):
        for size in part_sizes if state.rank.norms_gradients else ():
            state.free_allocation(state.allocate(4 * size, scratch))
        flat = state.allocate(part, scratch)
        wide.append(state.allocate(2 * part, scratch))
        state.free_allocation(flat)
        state.free_allocations(part_grads)
    state.grads = []
    state.free_allocations(wide)


def _gather(state: RankState, scratch: Instruction) -> None:
    ranks = state.rank.optimizer_ranks
    _communicate(
        state,
        [size for total in bf16_bytes_of_groups(state) for size in all_gather_output_bytes(int(total / ranks), ranks)],
        scratch,
    )


def _reduce(state: RankState, filled: list[list[int]], scratch: Instruction) -> None:
    """Each bucket flat, copied to fp16 where gradients are bf16 (ZeRO's ``communication_data_type``), and reduced."""
    if not state.rank.casts_to_reduce:
        _communicate(state, [sum(bucket) for bucket in filled if len(bucket) > 1], scratch)
        return
    pending = []
    for bucket in filled:
        flat = [state.allocate(sum(bucket), scratch)] if len(bucket) > 1 else []
        pending.append(state.allocate(sum(bucket), scratch))
        if state.rank.launch_blocking:
            state.free_allocation(pending.pop())
        state.free_allocations(flat)  # which no collective has seen
    state.free_allocations(pending)


def _communicate(state: RankState, sizes: Sequence[int], instruction: Instruction) -> None:
    """Flat tensors of collectives one after the other, each let go behind its launch.

    A collective runs on a stream of its own, which the allocator is told of (``recordStream``, PyTorch's
    ProcessGroupNCCL.cpp): what is let go is free once that stream has passed. The host launches all of them before the
    device has come to the first, and finds none of the earlier ones free; where launches block it finds the last one.
    """
    flats = []
    for size in sizes:
        flats.append(state.allocate(size, instruction))
        if state.rank.launch_blocking:
            state.free_allocation(flats.pop())
    state.free_allocations(flats)


def _by_group(state: RankState) -> list[list[Allocation]]:
    """The 16-bit gradients of each group in the order of the parameters, the embedding's first: of a tied one the
    head's, which a backward makes first. Norms and biases have none of their own here."""
    first = state.grads[:1] if state.rank.tied else []
    ordered = [*first, *state.grads[len(first) :][::-1]]
    out = []
    for members in optimizer_groups_of(state.rank.weights):
        flat = state.rank.weights[members[0]].is_1d
        out.append([] if flat else ordered[: len(members)])
        ordered = ordered[len(out[-1]) :]
    return out


def gradient_bytes_by_bucket(grads: list[int]) -> list[list[int]]:
    """The 16-bit gradients of each bucket, reduced as one flat copy; one alone is reduced where it is. [B]

    Examples
    --------
    >>> gradient_bytes_by_bucket([600_000_000, 300_000_000, 200_000_000, 1_200_000_000])
    [[600000000, 300000000], [200000000], [1200000000]]
    """
    out: list[list[int]] = []
    bucket: list[int] = []
    for size in grads:
        if bucket and sum(bucket) + size > BUCKET:
            out.append(bucket)
            bucket = []
        bucket.append(size)
    return [*out, bucket] if bucket else out


def all_gather_output_bytes(part: int, ranks: float) -> list[int]:
    """The flat outputs of the all-gathers of parameters, in pieces of at most a bucket. [B]"""
    pieces = max(1, int(part * ranks / BUCKET))
    return [int(part * ranks / pieces)] * pieces


def _part_of(state: RankState, grads: list[Allocation], part: int) -> tuple[list[Allocation], list[int]]:
    """Lets the 16-bit gradients of a group go but those that the rank's part reaches into; they, and its bytes in each.

    ``p.grad`` of all parameters is dropped; the list of the part's gradients holds views.
    """
    first = state.rank.optimizer_rank * part
    part_grads: list[Allocation] = []
    part_sizes: list[int] = []
    seen = 0
    for grad in grads:
        size = grad[0].size
        inside = min(seen + size, first + part) - max(seen, first)
        seen += size
        if inside > 0:
            part_sizes.append(inside)
            part_grads.append(grad)
        else:
            state.free_allocation(grad)
    return part_grads, part_sizes


def _drop_grads(state: RankState) -> None:
    state.free_allocations(state.grads)
    state.grads = []
