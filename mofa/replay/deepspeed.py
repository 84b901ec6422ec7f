"""What DeepSpeed's optimizers allocate around a rank's computations, in the order in which they do.

Read in deepspeed/runtime: ``zero/stage_1_and_2.py``, ``bf16_optimizer.py``, ``fp16/fused_optimizer.py``,
``pipe/engine.py``, as of early 2022. States are there before the first step (``initialize_optimizer_states``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mofa.replay.journal import ACTIVATIONS, BUFFERS, GRADIENTS, PARAMETERS, STATES, TEMPORARIES, outside
from mofa.replay.script import GRADIENT, INPUT

if TYPE_CHECKING:
    from mofa.replay.passes import Kept
    from mofa.replay.player import Player

BUCKET = 2 * 500_000_000
"""ZeRO's contiguous buffer of 16-bit gradients (``reduce_bucket_size`` 5e8 elements). [B]"""


def partition_bytes(player: Player) -> int:
    """One 16-bit copy of the part of the parameters that a rank optimizes. [B]"""
    return int(sum(w.param for w in player.rank.weights) / player.rank.optimizer_ranks)


def start(player: Player) -> None:
    """Parameters into one flat buffer, then the optimizer's states.

    The parameters' old blocks are left to the allocator. ZeRO 1 moves the parameters to the host meanwhile, but empties
    the cache only since DeepSpeed's pull request 2620 of December 2022. Without ZeRO the buffer is made of copies of
    the parameters (``FP16_Optimizer``).
    """
    r, where, begun = player.rank, "start", player.note()
    params = [player.new(w.param, outside(PARAMETERS, "parameter", where)) for w in r.weights]
    total, part = sum(w.param for w in r.weights), partition_bytes(player)
    if r.deepspeed == "zero1":
        _drop_all(player, params)
    elif r.deepspeed == "zero0":
        params += [player.new(w.param, outside(TEMPORARIES, "copy of a parameter", where)) for w in r.weights]
    player.new(total, outside(PARAMETERS, "buffer of the parameters", where))
    if r.deepspeed != "zero1":
        _drop_all(player, params)
    clone = player.new(part, outside(STATES, "16-bit copy of the partition", where))
    player.new(2 * part, outside(STATES, "fp32 copy of the partition", where))
    player.drop(clone)
    if r.deepspeed == "bf16":
        player.new(2 * total, outside(GRADIENTS, "fp32 buffer of the gradients", where))
        zeros = None
    else:
        zeros = player.new(2 * part, outside(GRADIENTS, "fp32 zeros of the partition", where))
    for name in ("first", "second"):
        player.new(2 * part, outside(STATES, f"Adam's {name} moments", where))
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
        act = outside(TEMPORARIES, "fp32 copy of a gradient", "update of the gradients")
        for w in player.rank.weights:
            player.drop(player.new(2 * w.param, act))
        player.look(begun)


def sent(player: Player, output: Kept) -> Kept:
    """What stays of a stage's output until its backward: a rank's part (``PartitionedTensor``); all of one rank's."""
    if not player.rank.sent_bytes:
        return output
    part = player.new(player.rank.sent_bytes, outside(ACTIVATIONS, INPUT, "send of an output"))
    player.drop(output)
    return part


def gathered(player: Player, name: str, where: str) -> Kept:
    """A tensor whose parts the tensor-parallel ranks hold, put together (``PartitionedTensor.full``).

    It is gathered into the flat output of torch's all-gather, copied into a flat tensor and cloned. One rank receives
    it as it is.
    """
    act = outside(ACTIVATIONS, name, where)
    size = player.rank.boundary_bytes
    if not player.rank.sent_bytes:
        return player.new(size, act)
    flat = player.new(size, act)
    player.drop(player.new(size, outside(BUFFERS, "all-gather output", where)))
    whole = player.new(size, act)
    player.drop(flat)
    return whole


def restored(player: Player) -> list[Kept]:
    """What a backward holds to its end: the output, whole again, and its gradient (``_exec_backward_pass``).

    The gradient is received into a buffer that stays; the ranks' part of it where there are several.
    """
    r, where = player.rank, "receive of a gradient"
    if "gradient" not in player.threads:
        player.threads.add("gradient")
        player.new(r.sent_bytes or r.boundary_bytes, outside(BUFFERS, "buffer of a received gradient", where))
    return [gathered(player, name, where) for name in (INPUT, GRADIENT)] if r.sent_bytes else []


def optimize(player: Player) -> None:
    """Gradients reduced bucket by bucket, the part's checked, normed in fp64 and made fp32, then the gather.

    The BF16 optimizer's fp32 gradients are reduced in bf16, all in one copy: ``allreduce_bucket`` casts what is not of
    the engine's ``communication_data_type``, which bf16 without a stage of ZeRO makes bf16 (runtime/engine.py).
    """
    r, where = player.rank, "optimizer step"
    scratch = outside(TEMPORARIES, "temporaries of the optimizer", where)
    if r.deepspeed == "bf16":  # norm and update read the buffer in place
        player.drop(
            player.new(sum(w.param for w in r.weights), outside(TEMPORARIES, "16-bit gradients to reduce", where))
        )
        for piece in gathers(partition_bytes(player), r.optimizer_ranks):
            player.drop(player.new(piece, scratch))
        return
    for bucket in buckets([w.param for w in r.weights]):
        player.drop(player.new(bucket, scratch))
    if r.deepspeed == "zero1":
        part = partition_bytes(player)
        mine = _partition_grads(player, part)
        for width in (2, 4) if r.norms_gradients else (2,):  # in fp32 for what is not finite, then the norm in fp64
            for size in mine:
                player.drop(player.new(width * size, scratch))
        flat = player.new(part, scratch)
        wide = player.new(2 * part, scratch)
        player.drop(flat)
        _drop_grads(player)
        player.drop(wide)
        for piece in gathers(part, r.optimizer_ranks):
            player.drop(player.new(piece, scratch))
        return
    for w in r.weights:  # looked through in fp32 for what is not finite
        player.drop(player.new(2 * w.param, scratch))
    each = [player.new(2 * w.param, scratch) for w in r.weights]
    wide = player.new(2 * partition_bytes(player), scratch)
    _drop_all(player, each)
    _drop_grads(player)
    player.drop(wide)


def buckets(grads: list[int]) -> list[int]:
    """Flat copies in which 16-bit gradients are reduced; one that fills a bucket alone is reduced where it is. [B]

    Examples
    --------
    >>> buckets([600_000_000, 300_000_000, 200_000_000, 1_200_000_000])
    [900000000]
    """
    out: list[int] = []
    held: list[int] = []
    for size in grads:
        if held and sum(held) + size > BUCKET:
            out += [sum(held)] * (len(held) > 1)
            held = []
        held.append(size)
    return out + [sum(held)] * (len(held) > 1)


def gathers(part: int, ranks: float) -> list[int]:
    """The flat outputs of the all-gathers of parameters, in pieces of at most a bucket. [B]"""
    pieces = max(1, int(part * ranks / BUCKET))
    return [int(part * ranks / pieces)] * pieces if ranks > 1 else []


def _partition_grads(player: Player, part: int) -> list[int]:
    """Lets all 16-bit gradients go but those that the rank's partition reaches into; bytes of it in each. [B]

    ``p.grad`` of all parameters is dropped; the list of the partition's gradients holds views. They are in the order of
    the parameters: the embedding, which is the largest, comes first.
    """
    first = player.rank.optimizer_rank * part
    kept_grads, mine, seen = [], [], 0
    for kept in player.grads[::-1]:
        size = kept[0].size
        inside = min(seen + size, first + part) - max(seen, first)
        seen += size
        if inside > 0:
            mine.append(inside)
            kept_grads.append(kept)
        else:
            player.drop(kept)
    player.grads = kept_grads
    return mine


def _drop_grads(player: Player) -> None:
    _drop_all(player, player.grads)
    player.grads = []


def _drop_all(player: Player, many: list[Kept]) -> None:
    for kept in many:
        player.drop(kept)
