"""What a rank's step allocates around its computations: FSDP's gathers and reductions of a pipeline, the optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mofa.cost.start import BROADCAST, DRAFT, TABLE, Want, broadcast
from mofa.cost.unshard import AHEAD
from mofa.cost.weights import stepped
from mofa.replay import deepspeed
from mofa.replay.journal import ACTIVATIONS, BUFFERS, GRADIENTS, PARAMETERS, STATES, TEMPORARIES, outside
from mofa.replay.passes import short_name

if TYPE_CHECKING:
    from mofa.replay.passes import Kept, Slots
    from mofa.replay.player import Player
    from mofa.replay.rank import Rank, Weight

GATHER, REDUCE = 1, 2
"""FSDP's streams."""


def wanted(player: Player, wants: Iterable[Want], where: str) -> None:
    """What is allocated and freed before there is a computation."""
    kept: dict[int, Kept] = {}
    for slot, nbytes, name in wants:
        if not nbytes:
            player.drop(kept.pop(slot))
            continue
        lasts = PARAMETERS if name not in (TABLE, DRAFT, BROADCAST) else BUFFERS if name == TABLE else TEMPORARIES
        shown = f"parameter {short_name(name)}" if lasts == PARAMETERS else name
        kept[slot] = player.new(nbytes, outside(lasts, shown, where))


def gather(player: Player, c: int, g: int) -> None:
    """A group's weights in front of its first forward of a step, and they stay; what was gathered before it goes when
    this is copied (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, ``wait_for_unshard``)."""
    groups = player.rank.gathered_params
    if groups is None:
        return
    start = player.note()
    whole = _gathered(player, groups[c][g], GATHER)
    _let_go(player)
    player.unsharded.setdefault(c, []).append(_copied(player, groups[c][g]))
    player.gathered = whole
    player.look(start)


def gather_ends(player: Player) -> None:
    """Behind a chunk's forward the last group's goes as well."""
    _let_go(player)


def prepare(player: Player) -> None:
    """Before its first step a pipeline runs each chunk forward on zeros, to know what it hands on, and makes the
    buffers that it receives inputs in; then those for gradients (torch/distributed/pipelining/stage.py,
    ``_shape_inference``)."""
    r = player.rank
    if not any((*r.receives, *r.sends)):
        return
    act = outside(BUFFERS, "pipeline's receive buffers", "start of the step")
    for c, pieces in enumerate(r.chunks):
        zeros = None if c in r.first_chunks else player.new(r.boundary_bytes, act)
        player.lasting()
        x = zeros[0] if zeros is not None else None
        for g, (piece, code) in enumerate(zip(pieces, player.scripts[c], strict=True)):
            gather(player, c, g)
            slots: Slots = [None] * code.num_slots
            if zeros is None or x is not zeros[0]:
                slots[code.x] = x
            player.run(code, code.dry, slots, "trial forward", piece)
            out = code.logits if code.logits >= 0 else code.out
            after, slots[out] = slots[out], None
            player.clear(code.rest, slots)
            x = after
        gather_ends(player)
        for kept in player.held.values():
            player.drop(kept)
        player.held = {}
        if x is not None:
            player.drop((x, outside(ACTIVATIONS, player.sends.name(c), "end of a trial forward")))
        if zeros is not None:
            player.drop(zeros)
        start = player.note()
        for _ in range(r.num_micro_batches if r.receives[c] else 0):
            player.new(r.boundary_bytes, act)
        player.look(start)
    start = player.note()
    for c in range(len(r.chunks)):
        for _ in range(r.num_micro_batches if r.sends[c] else 0):
            player.new(r.boundary_bytes, act)
    player.look(start)


def fetch(player: Player) -> None:
    """torch's schedules of several chunks begin a step by gathering all groups of each (``UNSHARD``,
    torch/distributed/pipelining/schedules.py), up to three: on the stream that computes."""
    groups = player.rank.gathered_params
    if groups is None or not player.rank.unshards:
        return
    start = player.note()
    for c in list(dict.fromkeys(c for _, c, _ in player.rank.computations))[:AHEAD]:
        player.fetched[c] = [_gathered(player, weights, 0) for weights in groups[c]]
    player.look(start)


def awaited(player: Player, c: int) -> None:
    """In front of a chunk's first forward what was fetched for it is copied, group by group."""
    groups = player.rank.gathered_params
    if groups is None or c in player.unsharded:
        return
    start = player.note()
    fetched = player.fetched.pop(c, None) or [_gathered(player, weights, 0) for weights in groups[c]]
    for weights, whole in zip(groups[c], fetched, strict=True):
        player.unsharded.setdefault(c, []).append(_copied(player, weights))
        player.drop(whole)
    player.look(start)


def _gathered(player: Player, weights: tuple[tuple[float, float], ...], stream: int) -> Kept:
    where = "gather of parameters"
    source = player.new(
        int(2 * sum(share for _, share in weights)), outside(BUFFERS, "all-gather input", where, stream)
    )
    whole = player.new(int(2 * sum(n for n, _ in weights)), outside(BUFFERS, "all-gather output", where, stream))
    player.drop(source)
    return whole


def _copied(player: Player, weights: tuple[tuple[float, float], ...]) -> list[Kept]:
    copy = outside(PARAMETERS, "gathered weights", "gather of parameters")
    return [player.new(int(2 * n), copy) for n, _ in weights]


def _let_go(player: Player) -> None:
    if player.gathered is not None:
        player.drop(player.gathered)
        player.gathered = None


def buckets(player: Player) -> None:
    """DDP's buckets: made at the first forward, all gradients in one; made anew at the first behind a backward.

    ``bucket_cap_mb`` holds from then on, for the order in which gradients became ready
    (torch/nn/parallel/distributed.py, ``_ddp_init_helper``; csrc/distributed/c10d/reducer.cpp, ``rebuild_buckets``).
    """
    act = outside(GRADIENTS, "bucket of gradients", "DDP's buckets")
    start = player.note()
    if not player.whole_buckets and "backward" not in player.threads:
        wanted(player, broadcast(player.rank.weights), "DDP's beginning")
        player.whole_buckets = [player.new(sum(sizes), act) for sizes in player.rank.buckets]
    elif player.whole_buckets and "backward" in player.threads:
        for kept, sizes in zip(player.whole_buckets, player.rank.buckets, strict=True):
            player.drop(kept)
            for size in sizes:
                player.new(size, act)
        player.whole_buckets = []
    player.look(start)


def reduce(player: Player, c: int) -> None:
    """Behind a chunk's last backward FSDP reduces its unsharded gradients group by group.

    The weights go first, then what was sent before, then there is what is sent (_fsdp_param_group.py,
    ``post_backward``; _fsdp_collectives.py, ``foreach_reduce``).
    """
    groups = player.rank.gathered_params
    assert groups is not None
    where = "reduction of gradients"
    sent = outside(BUFFERS, "fp32 reduce-scatter input", f"{where}: fp32 reduce-scatter input")
    sharded = outside(GRADIENTS, "sharded gradients", where, REDUCE)
    previous: Kept | None = None
    start = player.note()
    for g, (weights, copies) in enumerate(zip(groups[c], player.unsharded.pop(c), strict=True)):
        for kept in copies:
            player.drop(kept)
        if previous is not None:
            player.drop(previous)
        previous = player.new(int(4 * sum(n for n, _ in weights)), sent)
        for kept in player.accumulators.pop(c * 10_000 + g, ()):
            player.drop(kept)
        shares = sum(share for _, share in weights)
        summed = player.new(int(4 * shares), sharded)
        if player.rank.stored_bytes < 4.0:  # cast to the parameters' format
            wide, summed = summed, player.new(int(player.rank.stored_bytes * shares), sharded)
            player.drop(wide)
        player.grads.append(summed)
    if previous is not None:
        player.drop(previous)
    player.look(start)


def in_optimizers(rank: Rank) -> tuple[tuple[Weight, ...], ...]:
    """The weights of each optimizer, in its order."""
    return stepped(rank.weights, rank.flat_buffers)


def in_optimizer(rank: Rank) -> tuple[Weight, ...]:
    """All weights in the order of the optimizers."""
    return tuple(w for of_one in in_optimizers(rank) for w in of_one)


def optimize(player: Player) -> None:
    """The optimizer's step; its states appear in the first, and fp32 copies of 16-bit gradients stay to the next."""
    where = "optimizer step"
    if player.rank.deepspeed:
        deepspeed.optimize(player)
        return
    inputs = outside(ACTIVATIONS, "last input of a chunk, with its gradient", where)
    player.grads += [player.new(player.rank.boundary_bytes, inputs) for _ in range(player.rank.inputs_at_end)]
    widened = outside(TEMPORARIES, "fp32 copies of gradients", where)
    player.grads += [player.new(w.widened, widened) for w in in_optimizer(player.rank) if w.widened]
    scratch = outside(TEMPORARIES, "temporaries of the optimizer", where)
    moments = [outside(STATES, f"Adam's {name} moments", where) for name in ("first", "second")]
    for w in in_optimizer(player.rank) if player.rank.flat_buffers else ():
        if w.temporary:  # clipping scales each gradient into a temporary (utils.py:1212)
            player.drop(player.new(w.state, scratch))
    for weights in in_optimizers(player.rank):
        if player.step == 1:
            for w in weights:
                for moment in moments if w.state else ():
                    player.new(w.state, moment)
        temporaries = [player.new(w.temporary, scratch) for w in weights if w.temporary]
        for kept in temporaries:
            player.drop(kept)
