"""What a rank's step allocates around its computations: FSDP's gathers and reductions of a pipeline, the optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mofa.cost.start import broadcast
from mofa.cost.weights import stepped
from mofa.replay import deepspeed
from mofa.replay.journal import BUFFERS, COPIES, GRADIENTS, STATES, TEMPORARIES, outside

if TYPE_CHECKING:
    from mofa.replay.passes import Kept
    from mofa.replay.player import Player
    from mofa.replay.rank import Rank, Weight

GATHER, REDUCE = 1, 2
"""FSDP's streams."""


def gather(player: Player) -> list[list[list[Kept]]]:
    """Under pipelines FSDP gathers each group once a step, and the weights stay."""
    groups = player.rank.gathered_params
    if groups is None:
        return []
    where = "gather of parameters"
    shard = outside(BUFFERS, "all-gather input", where, GATHER)
    gathered = outside(BUFFERS, "all-gather output", where, GATHER)
    copy = outside(COPIES, "gathered weights", where)
    out: list[list[list[Kept]]] = []
    before: Kept | None = None
    for chunk in groups:
        mine = []
        for weights in chunk:
            source = player.new(int(2 * sum(share for _, share in weights)), shard)
            whole = player.new(int(2 * sum(n for n, _ in weights)), gathered)
            player.drop(source)
            mine.append([player.new(int(2 * n), copy) for n, _ in weights])
            if before is not None:
                player.drop(before)
            before = whole
        out.append(mine)
    if before is not None:
        player.drop(before)
    return out


def buckets(player: Player) -> None:
    """DDP's buckets: made at the first forward, all gradients in one; made anew at the first behind a backward.

    ``bucket_cap_mb`` holds from then on, for the order in which gradients became ready
    (torch/nn/parallel/distributed.py, ``_ddp_init_helper``; csrc/distributed/c10d/reducer.cpp, ``rebuild_buckets``).
    """
    act = outside(GRADIENTS, "bucket of gradients", "DDP's buckets")
    start = player.note()
    if not player.whole_buckets and "backward" not in player.threads:
        player.wanted(broadcast(player.rank.weights), "DDP's beginning")
        player.whole_buckets = [player.new(sum(sizes), act) for sizes in player.rank.buckets]
    elif player.whole_buckets and "backward" in player.threads:
        for kept, sizes in zip(player.whole_buckets, player.rank.buckets, strict=True):
            player.drop(kept)
            for size in sizes:
                player.new(size, act)
        player.whole_buckets = []
    player.look(start)


def reduce(player: Player, gathered: list[list[list[Kept]]]) -> None:
    """At the end of a pipeline FSDP reduces the unsharded gradients group by group."""
    groups = player.rank.gathered_params
    assert groups is not None
    where = "reduction of gradients"
    sent = outside(BUFFERS, "fp32 reduce-scatter input", f"{where}: fp32 reduce-scatter input")
    sharded = outside(GRADIENTS, "sharded gradients", where, REDUCE)
    previous: Kept | None = None
    for c, chunk in enumerate(groups):
        for g, weights in enumerate(chunk):
            for kept in gathered[c][g]:
                player.drop(kept)
            buffer = player.new(int(4 * sum(n for n, _ in weights)), sent)
            if previous is not None:
                player.drop(previous)
            previous = buffer
            player.grads.append(player.new(int(4 * sum(share for _, share in weights)), sharded))
            for kept in player.accumulators.pop(c * 10_000 + g, ()):
                player.drop(kept)
    if previous is not None:
        player.drop(previous)


def in_optimizers(rank: Rank) -> tuple[tuple[Weight, ...], ...]:
    """The weights of each optimizer, in its order."""
    return stepped(rank.weights, rank.flat_buffers)


def in_optimizer(rank: Rank) -> tuple[Weight, ...]:
    """All weights in the order of the optimizers."""
    return tuple(w for of_one in in_optimizers(rank) for w in of_one)


def optimize(player: Player) -> None:
    """The optimizer's step; its states appear in the first."""
    where = "optimizer step"
    if player.rank.deepspeed:
        deepspeed.optimize(player)
        return
    scratch = outside(TEMPORARIES, "temporaries of the optimizer", where)
    for w in in_optimizer(player.rank) if player.rank.flat_buffers else ():
        if w.temporary:  # clipping scales each gradient into a temporary (utils.py:1212)
            player.drop(player.new(w.state, scratch))
    for weights in in_optimizers(player.rank):
        if player.step == 1:
            for w in weights:
                if not w.state:
                    continue
                player.new(w.state, outside(STATES, "Adam's first moments", where))
                player.new(w.state, outside(STATES, "Adam's second moments", where))
        temporaries = [player.new(w.temporary, scratch) for w in weights if w.temporary]
        for kept in temporaries:
            player.drop(kept)
