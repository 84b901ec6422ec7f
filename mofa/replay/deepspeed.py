"""What DeepSpeed's optimizers allocate around a rank's computations, in the order in which they do.

Read in deepspeed/runtime: ``zero/stage_1_and_2.py``, ``bf16_optimizer.py``, ``fp16/fused_optimizer.py``,
``pipe/engine.py``, as of early 2022. States are there before the first step (``initialize_optimizer_states``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mofa.replay.journal import ACTIVATIONS, BUFFERS, GRADIENTS, PARAMETERS, STATES, TEMPORARIES, outside
from mofa.replay.script import GRADIENT, INPUT

if TYPE_CHECKING:
    from mofa.replay.journal import Act
    from mofa.replay.passes import Kept
    from mofa.replay.player import Player
    from mofa.replay.pools import Block
    from mofa.replay.rank import Weight
    from mofa.replay.routine import Waiting

BUCKET = 2 * 500_000_000
"""ZeRO's contiguous buffer of 16-bit gradients (``reduce_bucket_size`` 5e8 elements). [B]"""


def groups_of(weights: Sequence[Weight]) -> tuple[tuple[int, ...], ...]:
    """Which parameters each group of the optimizer has, which DeepSpeed flattens one by one.

    Those that decay in two halves, then norms and biases: Apex's FusedAdam crashes on tensors of more than 2^31
    elements, which "we hit at 200B over 80 A100" (bigscience-workshop/Megatron-DeepSpeed, pull request 249 of 18
    February 2022, megatron/optimizer/__init__.py, ``_get_params_for_weight_decay_optimization``).

    Examples
    --------
    >>> from mofa.replay.rank import Weight
    >>> groups_of([Weight(name, 2, 0, 0, 0, flat=name == "norm") for name in ("embedding", "norm", "up", "down")])
    ((0,), (2, 3), (1,))
    """
    decayed = [n for n, w in enumerate(weights) if not w.flat]
    half = len(decayed) // 2
    rest = (n for n, w in enumerate(weights) if w.flat)
    return tuple(members for members in (tuple(decayed[:half]), tuple(decayed[half:]), tuple(rest)) if members)


def totals(player: Player) -> list[int]:
    """16-bit bytes of the parameters of each group. [B]"""
    weights = player.rank.weights
    return [sum(weights[n].param for n in members) for members in groups_of(weights)]


def start(player: Player) -> None:
    """Parameters group by group into a flat buffer, and their fp32 copy; then the optimizer's states.

    The parameters' old blocks are left to the allocator: DeepSpeed empties the cache only since its pull request 2620
    of December 2022, and ZeRO 1 left them on the device meanwhile (``move_params_to_cpu_during_init: false`` in
    tr11-200B-ml.slurm). Without ZeRO the buffer is made of copies of the parameters (``FP16_Optimizer``).
    """
    r, where, begun = player.rank, "start", player.note()
    params = [player.new(w.param, outside(PARAMETERS, "parameter", where)) for w in r.weights]
    parts = [int(total / r.optimizer_ranks) for total in totals(player)]
    for members, total, part in zip(groups_of(r.weights), totals(player), parts, strict=True):
        copies = outside(TEMPORARIES, "copy of a parameter", where)
        copied = [player.new(r.weights[n].param, copies) for n in members] if r.deepspeed == "zero0" else []
        player.new(total, outside(PARAMETERS, "buffer of the parameters", where))
        _drop_all(player, [*(params[n] for n in members), *copied])
        clone = player.new(part, outside(STATES, "16-bit copy of the partition", where))
        player.new(2 * part, outside(STATES, "fp32 copy of the partition", where))
        player.drop(clone)
        if r.deepspeed == "bf16":
            player.new(2 * total, outside(GRADIENTS, "fp32 buffer of the gradients", where))
    zeros = outside(GRADIENTS, "fp32 zeros of the partition", where)
    steps = [player.new(2 * part, zeros) for part in parts] if r.deepspeed != "bf16" else []
    for part in parts:
        for name in ("first", "second"):
            player.new(2 * part, outside(STATES, f"Adam's {name} moments", where))
    _drop_all(player, steps)
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


def waiting(player: Player) -> list[Waiting]:
    """The 16-bit gradients that a backward of the BF16 optimizer's finds, and what was asked for each. [B]"""
    return [(block, act.size) for block, act in player.grads] if player.rank.deepspeed == "bf16" else []


def replace(player: Player, blocks: Sequence[Block]) -> None:
    """They are in these blocks now."""
    player.grads = [(block, act) for block, (_, act) in zip(blocks, player.grads, strict=True)]


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
    it as it is. The host waits for the device first, which has its parts' sizes (``from_meta``).
    """
    act = outside(ACTIVATIONS, name, where)
    size = player.rank.boundary_bytes
    if not player.rank.sent_bytes:
        return player.new(size, act)
    player.sends.synchronized()
    flat = player.new(size, act)
    output = player.new(size, outside(BUFFERS, "all-gather output", where))
    player.sends.issued(3 + size // player.rank.sent_bytes)  # zeros, the gather, a copy for each part, the clone
    player.sends.drop_late(output)
    whole = player.new(size, act)
    player.sends.drop_late(flat)
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

    The BF16 optimizer's fp32 gradients are reduced in bf16, each group's in one copy: ``allreduce_bucket`` casts what
    is not of the engine's ``communication_data_type``, which bf16 without a stage of ZeRO makes bf16
    (runtime/engine.py).
    """
    r, where = player.rank, "optimizer step"
    scratch = outside(TEMPORARIES, "temporaries of the optimizer", where)
    if r.deepspeed == "bf16":  # norm and update read the buffer in place
        _communicate(player, totals(player), outside(TEMPORARIES, "16-bit gradients to reduce", where))
        _gather(player, scratch)
        return
    _reduce(player, buckets([r.weights[n].param for members in groups_of(r.weights) for n in members]), scratch)
    if r.deepspeed == "zero1":
        _step_in_parts(player, scratch)
        _gather(player, scratch)
        return
    for w in r.weights:  # looked through in fp32 for what is not finite
        player.drop(player.new(2 * w.param, scratch))
    wide = []
    grads = _by_group(player)
    for members, total, mine in zip(groups_of(r.weights), totals(player), grads, strict=True):
        each = [player.new(2 * r.weights[n].param, scratch) for n in members]
        wide.append(player.new(2 * total, scratch))
        _drop_all(player, each)
        _drop_all(player, mine)
    player.grads = []
    _drop_all(player, wide)


def _step_in_parts(player: Player, scratch: Act) -> None:
    """ZeRO 1's step: the parts of all groups looked through in fp32 for what is not finite; then of one group after the
    other normed, flattened and cast, whose gradients then go; the fp32 ones of all groups stay for Adam."""
    ranks = player.rank.optimizer_ranks
    parts = [int(total / ranks) for total in totals(player)]
    found = [_part_of(player, grads, part) for grads, part in zip(_by_group(player), parts, strict=True)]
    for _, mine in found:
        for size in mine:
            player.drop(player.new(2 * size, scratch))
    wide = []
    for part, (kept, mine) in zip(parts, found, strict=True):
        for size in mine if player.rank.norms_gradients else ():
            player.drop(player.new(4 * size, scratch))
        flat = player.new(part, scratch)
        wide.append(player.new(2 * part, scratch))
        player.drop(flat)
        _drop_all(player, kept)
    player.grads = []
    _drop_all(player, wide)


def _gather(player: Player, scratch: Act) -> None:
    ranks = player.rank.optimizer_ranks
    _communicate(player, [size for total in totals(player) for size in gathers(int(total / ranks), ranks)], scratch)


def _reduce(player: Player, filled: list[list[int]], scratch: Act) -> None:
    """Each bucket flat, copied to fp16 where gradients are bf16 (ZeRO's ``communication_data_type``), and reduced."""
    if not player.rank.casts_to_reduce:
        _communicate(player, [sum(bucket) for bucket in filled if len(bucket) > 1], scratch)
        return
    pending = []
    for bucket in filled:
        flat = [player.new(sum(bucket), scratch)] if len(bucket) > 1 else []
        pending.append(player.new(sum(bucket), scratch))
        if player.rank.launch_blocking:
            player.drop(pending.pop())
        _drop_all(player, flat)  # which no collective has seen
    _drop_all(player, pending)


def _communicate(player: Player, sizes: Sequence[int], act: Act) -> None:
    """Flat tensors of collectives one after the other, each let go behind its launch.

    A collective runs on a stream of its own, which the allocator is told of (``recordStream``, PyTorch's
    ProcessGroupNCCL.cpp): what is let go is free once that stream has passed. The host launches all of them before the
    device has come to the first, and finds none of the earlier ones free; where launches block it finds the last one.
    """
    flats = []
    for size in sizes:
        flats.append(player.new(size, act))
        if player.rank.launch_blocking:
            player.drop(flats.pop())
    _drop_all(player, flats)


def _by_group(player: Player) -> list[list[Kept]]:
    """The 16-bit gradients of each group in the order of the parameters, the embedding's first: of a tied one the
    head's, which a backward makes first. Norms and biases have none of their own here."""
    first = player.grads[:1] if player.rank.tied else []
    ordered = [*first, *player.grads[len(first) :][::-1]]
    out = []
    for members in groups_of(player.rank.weights):
        flat = player.rank.weights[members[0]].flat
        out.append([] if flat else ordered[: len(members)])
        ordered = ordered[len(out[-1]) :]
    return out


def buckets(grads: list[int]) -> list[list[int]]:
    """The 16-bit gradients of each bucket, reduced as one flat copy; one alone is reduced where it is. [B]

    Examples
    --------
    >>> buckets([600_000_000, 300_000_000, 200_000_000, 1_200_000_000])
    [[600000000, 300000000], [200000000], [1200000000]]
    """
    out: list[list[int]] = []
    held: list[int] = []
    for size in grads:
        if held and sum(held) + size > BUCKET:
            out.append(held)
            held = []
        held.append(size)
    return [*out, held] if held else out


def gathers(part: int, ranks: float) -> list[int]:
    """The flat outputs of the all-gathers of parameters, in pieces of at most a bucket. [B]"""
    pieces = max(1, int(part * ranks / BUCKET))
    return [int(part * ranks / pieces)] * pieces


def _part_of(player: Player, grads: list[Kept], part: int) -> tuple[list[Kept], list[int]]:
    """Lets the 16-bit gradients of a group go but those that the rank's part reaches into; they, and its bytes in each.

    ``p.grad`` of all parameters is dropped; the list of the part's gradients holds views.
    """
    first = player.rank.optimizer_rank * part
    held: list[Kept] = []
    mine: list[int] = []
    seen = 0
    for kept in grads:
        size = kept[0].size
        inside = min(seen + size, first + part) - max(seen, first)
        seen += size
        if inside > 0:
            mine.append(inside)
            held.append(kept)
        else:
            player.drop(kept)
    return held, mine


def _drop_grads(player: Player) -> None:
    _drop_all(player, player.grads)
    player.grads = []


def _drop_all(player: Player, many: list[Kept]) -> None:
    for kept in many:
        player.drop(kept)
