"""What data parallelism leaves exposed outside the blocks: gradients reduced and parameters gathered once a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.elementwise import row_max
from mofa.blocks.op import CollectiveKind
from mofa.cost.collectives import collective_s
from mofa.cost.compute import stream_rate
from mofa.cost.topology import Group
from mofa.specs.framework import PYTORCH_MODULES

if TYPE_CHECKING:
    from mofa.cost.rows import Rows

ArrayN = NDArray[np.float64]


@dataclass(frozen=True)
class Outside:
    """Exposed and hidden seconds of a step, and what holds up each stage's first forward. (n,), (n,), (n, R) [s]"""

    exposed: ArrayN
    hidden: ArrayN
    before_forward: ArrayN


def column(group: Group) -> Group:
    """The group with a trailing axis, to time payloads of shape (n, R)."""
    return Group(group.size[:, None], group.ranks_per_domain[:, None], group.ranks_per_node[:, None])


def outside_blocks(rows: Rows, fwd: ArrayN, bwd: ArrayN, m: ArrayN) -> Outside:
    """Gathers and reductions outside the tapes, and how much of them computing hides.

    Parameters
    ----------
    fwd, bwd
        Of one micro-batch on each stage. (n, R) [s]
    m
        Micro-batches. (n,)
    """
    zero = np.zeros_like(m)
    none = Outside(zero, zero, np.zeros_like(fwd))
    if rows.framework.name not in PYTORCH_MODULES:
        return _megatron(rows, fwd, bwd)
    if rows.mode.precision == "autocast":
        return _ddp(rows, bwd, m, none)
    if rows.mode.precision != "mixed":
        return none
    once = _pipelined_fsdp(rows, fwd, bwd) if rows.mode.pipelined else none
    exposed, hidden = _replicas(rows, bwd, m)
    return Outside(once.exposed + exposed, once.hidden + hidden, once.before_forward)


def _over(rows: Rows, kind: CollectiveKind, bytes_per_param: float) -> ArrayN:
    """Seconds over all parameters of a stage, dense and expert ones one after the other. (g, R) [s]"""
    s = rows.shards
    dense = collective_s(kind, s.dense * bytes_per_param, column(rows.groups["fsdp"]), rows.costs.machine.fabric)
    expert = collective_s(kind, s.expert * bytes_per_param, column(rows.groups["efsdp"]), rows.costs.machine.fabric)
    return np.asarray(dense + expert)


def _slowdown(rows: Rows) -> float:
    return rows.cluster.gpu.curves.overlap_slowdown.value


def _after_last(seconds: ArrayN, chunk_s: ArrayN, drain_s: ArrayN, pp: int, vpp: int) -> ArrayN:
    """What is left of reductions when the last rank has ended: each chunk's begins behind its last backward.

    The last chunk's begins at the rank's end; the one before it ``pp`` backwards of a chunk earlier, and so on. (n, R)
    """
    late = np.maximum(seconds / vpp, seconds - (vpp - 1) * pp * chunk_s)
    return np.asarray(np.maximum(late - drain_s, 0.0))


def _megatron(rows: Rows, fwd: ArrayN, bwd: ArrayN) -> Outside:
    """Megatron's buffers, in buckets on the first rank's first chunk, whole elsewhere.

    Gradients are reduced behind a chunk's last backward, bucket by bucket inside it on the first rank (not under
    interleaving, where all ranks begin at once, ``grad_sync_func``). Parameters are gathered bucket by bucket ahead of
    the first forward there; a later stage of 1F1B begins to gather when its first input has come
    (``finish_param_sync`` in the forward's hook), chunks of interleaving at the start and a chunk ahead.
    """
    fw, s, stages = rows.framework, rows.shards, rows.layout.stages
    pp, vpp, width = stages.pp, stages.vpp, fw.reduced_bytes_per_param
    slow = _slowdown(rows)
    zero = rows.grids.zero[:, None]
    scatters = (zero >= 1) & (fw.deepspeed != "bf16")  # whose fp32 gradients are summed whole (_bf16_reduce_grads)
    reduce = np.where(scatters, _over(rows, "reduce_scatter", width), _over(rows, "all_reduce", width))[rows.grid]
    gather = np.where(zero >= 1, _over(rows, "all_gather", 2.0), 0.0)[rows.grid]
    size = np.maximum(40e6, 1e6 * s.dense_ranks[:, 0])
    buckets = np.maximum((s.dense + s.expert)[:, 0] / vpp / size, 1.0)[rows.grid]
    before_f, before_b = rows.ahead_of(fwd), rows.ahead_of(bwd)
    fwd, bwd = fwd / (1 - slow), bwd / (1 - slow)  # beside communication
    held = np.zeros_like(fwd)
    exposed, hidden = np.zeros(len(fwd)), np.zeros(len(fwd))
    worst = row_max(reduce)
    if fw.overlap_grad_reduce:
        late = _after_last(reduce, bwd / vpp, before_b / vpp, pp, vpp)
        if vpp == 1:
            late[:, 0] = np.maximum(reduce[:, 0] / buckets, reduce[:, 0] - bwd[:, 0])
        worst = row_max(late)
        beside = np.maximum(reduce[:, 0] - worst, 0.0)
        exposed, hidden = exposed + slow * beside, hidden + beside
    exposed = exposed + worst
    first = np.maximum(gather[:, 0] / vpp / buckets, gather[:, 0] / vpp - fwd[:, 0] / vpp)
    if not fw.overlap_param_gather:
        exposed = exposed + row_max(gather)
    elif vpp == 1:
        held = gather.copy()
        held[:, 0] = first
        hidden = hidden + np.maximum(gather[:, 0] - first, 0.0)
        exposed = exposed + slow * np.maximum(gather[:, 0] - first, 0.0)
    else:
        late = np.maximum(gather / vpp, gather - (vpp - 1) * pp * fwd / vpp)
        late[:, 0] = np.maximum(first, gather[:, 0] - (vpp - 1) * pp * fwd[:, 0] / vpp)
        worst = row_max(np.maximum(late - before_f / vpp, 0.0))
        beside = np.maximum(gather[:, 0] - worst, 0.0)
        exposed, hidden = exposed + worst + slow * beside, hidden + beside
    if rows.workload.model.tied_embeddings and pp > 1:
        tied = rows.workload.model.vocab * rows.workload.model.hidden * width / rows.grids.tp
        once = collective_s("all_reduce", tied, rows.groups["embd"], rows.costs.machine.fabric)
        exposed = exposed + once[rows.grid]
    return Outside(exposed, hidden, held)


def _pipelined_fsdp(rows: Rows, fwd: ArrayN, bwd: ArrayN) -> Outside:
    """FSDP under pipelines: gathered once, piece by piece ahead of the first forward; reduced behind the last backward.

    A later stage's host has the pipeline's fill to gather in; the runtime of several chunks gathers two ahead.
    """
    stages = rows.layout.stages
    pp, vpp = stages.pp, stages.vpp
    gather, reduce = (_over(rows, *what)[rows.grid] for what in (("all_gather", 2.0), ("reduce_scatter", 4.0)))
    before_f, before_b = rows.ahead_of(fwd), rows.ahead_of(bwd)
    pieces = np.maximum(rows.layout.counts.sum(axis=1) / vpp, 1.0)
    slow = _slowdown(rows)
    fwd, bwd = fwd / (1 - slow), bwd / (1 - slow)  # beside communication
    chunk_f = fwd / vpp
    late = np.maximum(gather / vpp / pieces, gather / vpp - chunk_f)
    late = np.maximum(late, gather - (vpp - 1) * pp * chunk_f - chunk_f)
    gathered = row_max(np.maximum(late - before_f / vpp, 0.0))
    reduced = row_max(_after_last(reduce, bwd / vpp, before_b / vpp, pp, vpp))
    hidden = np.maximum(row_max(gather + reduce) - gathered - reduced, 0.0)
    beside = np.maximum(gather[:, 0] - gathered, 0.0) + np.maximum(reduce[:, 0] * (vpp - 1) / vpp - reduced, 0.0)
    return Outside(gathered + reduced + slow * beside, hidden, np.zeros_like(fwd))


def _ddp(rows: Rows, bwd: ArrayN, m: ArrayN, none: Outside) -> Outside:
    """DDP, which replicas without a shard group are as well: buckets of 100 MiB behind every backward.

    The last to be reduced holds the embedding, whose gradient comes last and fills a bucket by itself. Every gradient
    is copied into its bucket and back, 16 bytes a parameter (reducer.cpp, without ``gradient_as_bucket_view``).
    """
    s, model = rows.shards, rows.workload.model
    params = s.dense + s.expert
    once = collective_s("all_reduce", params * 4.0, column(rows.groups["dp"]), rows.costs.machine.fabric)[rows.grid, 0]
    params = params[rows.grid]
    last = max(100 * 2.0**20, 4.0 * model.vocab * model.hidden)
    late = np.maximum(once * np.minimum(1.0, last / np.maximum(params[:, 0] * 4.0, 1.0)), once - bwd[:, 0])
    copies = np.where(rows.table.dp > 1, params[:, 0] * 16.0 / stream_rate(rows.cluster.gpu, "copy"), 0.0)
    exposed = m * (late + _slowdown(rows) * (once - late) + copies)
    return Outside(exposed, m * (once - late), none.before_forward)


def _replicas(rows: Rows, bwd: ArrayN, m: ArrayN) -> tuple[ArrayN, ArrayN]:
    """All-reduce of the sharded gradients over replicas of hybrid sharding, block by block behind the backward."""
    if rows.framework.dp_replicate <= 1:
        return np.zeros_like(m), np.zeros_like(m)
    payload = rows.over_all(rows.shards.sharded(rows.framework.reduced_bytes_per_param))
    once = collective_s("all_reduce", payload, rows.groups["dp_replicate"], rows.costs.machine.fabric)[rows.grid]
    late = np.maximum(once - rows.over_all(bwd), 0.0)
    times = np.ones_like(m) if rows.mode.pipelined else m
    return times * (late + _slowdown(rows) * (once - late)), times * (once - late)
