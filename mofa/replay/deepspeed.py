"""What DeepSpeed's optimizers allocate around a rank's computations, in the order in which they do.

Read in deepspeed/runtime: ``zero/stage_1_and_2.py``, ``bf16_optimizer.py``, ``fp16/fused_optimizer.py``,
``pipe/engine.py``, as of early 2022. States are there before the first step (``initialize_optimizer_states``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mofa.replay.journal import ACTIVATIONS, BUFFERS, GRADIENTS, OUTSIDE, PARAMETERS, STATES, TEMPORARIES, Act
from mofa.replay.script import INPUT

if TYPE_CHECKING:
    from mofa.replay.passes import Kept
    from mofa.replay.player import Player

BUCKET = 2 * 500_000_000
"""ZeRO's contiguous buffer of 16-bit gradients (``reduce_bucket_size`` 5e8 elements). [B]"""


def _act(group: int, name: str, where: str) -> Act:
    return Act(OUTSIDE, 0, 0, 0, group, name, where)


def partition_bytes(player: Player) -> int:
    """One 16-bit copy of the part of the parameters that a rank optimizes. [B]"""
    return int(sum(w.param for w in player.rank.weights) / player.rank.optimizer_ranks)


def start(player: Player) -> None:
    """Parameters into one flat buffer, then the optimizer's states.

    ZeRO 1 moves the parameters to the host meanwhile and empties the cache; the others join them on the device and
    leave their old blocks to the allocator, which the 16-bit gradients fit in later.
    """
    r, where, begun = player.rank, "start", player.note()
    params = [player.new(w.param, _act(PARAMETERS, "parameter", where)) for w in r.weights]
    total, part = sum(w.param for w in r.weights), partition_bytes(player)
    if r.deepspeed == "zero1":
        for kept in params:
            player.drop(kept)
        player.a.empty_cache()
    player.new(total, _act(PARAMETERS, "buffer of the parameters", where))
    if r.deepspeed != "zero1":
        for kept in params:
            player.drop(kept)
    clone = player.new(part, _act(STATES, "16-bit copy of the partition", where))
    player.new(2 * part, _act(STATES, "fp32 copy of the partition", where))
    player.drop(clone)
    if r.deepspeed == "bf16":
        player.new(2 * total, _act(GRADIENTS, "fp32 buffer of the gradients", where))
        zeros = None
    else:
        zeros = player.new(2 * part, _act(GRADIENTS, "fp32 zeros of the partition", where))
    for name in ("first", "second"):
        player.new(2 * part, _act(STATES, f"Adam's {name} moments", where))
    if zeros is not None:
        player.drop(zeros)
    player.look(begun)


def before_backward(player: Player) -> None:
    """The BF16 optimizer lets the 16-bit gradients of the backward before go (``clear_lp_grads``)."""
    if player.rank.deepspeed == "bf16":
        _drop_grads(player)


def after_backward(player: Player) -> None:
    """It adds each 16-bit gradient, cast to fp32, to the buffer, and keeps it (``update_hp_grads``)."""
    if player.rank.deepspeed == "bf16":
        begun = player.note()
        act = _act(TEMPORARIES, "fp32 copy of a gradient", "update of the gradients")
        for w in player.rank.weights:
            player.drop(player.new(2 * w.param, act))
        player.look(begun)


def sent(player: Player) -> Kept:
    """A rank's part of a stage's output, kept until its backward (``PartitionedTensor``)."""
    return player.new(player.rank.sent_bytes, _act(ACTIVATIONS, INPUT, "send of an output"))


def optimize(player: Player) -> None:
    """Gradients reduced into the rank's part, the norm in fp64, the part's fp32 copy, then the gather."""
    r, where = player.rank, "optimizer step"
    if r.deepspeed == "bf16":
        return  # norm and update read the buffer in place; the gather's pieces are smaller than what is free by then
    part = partition_bytes(player)
    scratch = _act(TEMPORARIES, "temporaries of the optimizer", where)
    if r.deepspeed == "zero1":
        bucket = player.new(BUCKET, _act(BUFFERS, "bucket of gradients", where))
        mine = player.new(part, _act(GRADIENTS, "gradients of the partition", where))
        player.drop(bucket)
        _drop_grads(player)
        largest = min(max(w.param for w in r.weights), part)
        player.drop(player.new(4 * largest, scratch))  # the norm, in fp64
        flat = player.new(part, scratch)
        wide = player.new(2 * part, scratch)
        player.drop(flat)
        player.drop(mine)
        player.drop(wide)
        player.drop(player.new(min(BUCKET, sum(w.param for w in r.weights)), scratch))  # the gather's flat output
        return
    each = [player.new(2 * w.param, scratch) for w in r.weights]
    wide = player.new(2 * part, scratch)
    for kept in each:
        player.drop(kept)
    _drop_grads(player)
    player.drop(wide)


def _drop_grads(player: Player) -> None:
    for kept in player.grads:
        player.drop(kept)
    player.grads = []
