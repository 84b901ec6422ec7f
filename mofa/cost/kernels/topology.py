"""Which ranks of each process group share a fast domain and a node: the grids of ranks laid over the cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mofa.specs.framework_names import RankOrder

IntK = NDArray[np.int64]


class HasNodeSizes(Protocol):
    """What the topology needs of a node: a :class:`~mofa.specs.hardware.NodeSpec`, or a :class:`NodeSizes`."""

    @property
    def gpus_per_node(self) -> int:
        """GPUs of a node."""
        ...

    @property
    def gpus_per_domain(self) -> int:
        """GPUs that the fastest links join."""
        ...

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """GPUs of each kind of block that shares a link."""
        ...


class NodeSizes(NamedTuple):
    """GPUs of a node and of its fast domain, and of blocks that share a link: a bridge, a switch, a tier."""

    gpus_per_node: int
    gpus_per_domain: int
    block_sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """One kind of process group under K strategies; every array has shape (K,).

    ``ranks_per_domain`` and ``ranks_per_node`` are the fewest ranks that the group has in a fast domain, or a node,
    that it touches at all, over all groups of this kind: the slowest group is what a step waits for.
    """

    size: IntK
    ranks_per_domain: IntK
    ranks_per_node: IntK
    ranks_per_block: Mapping[int, IntK] = field(default_factory=dict)
    """The same of blocks of other sizes that share a link, by their GPUs; empty where the cluster has none."""

    @property
    def key_of_first_strategy(self) -> tuple[object, ...]:
        """The numbers of the first strategy: equal for groups that are alike under it."""
        blocks = [(gpus, int(ranks[0])) for gpus, ranks in sorted(self.ranks_per_block.items())]
        return int(self.size[0]), int(self.ranks_per_domain[0]), int(self.ranks_per_node[0]), *blocks

    def select_strategies(self, rows: NDArray[np.intp]) -> ProcessGroup:
        """The group under these of the strategies."""
        return self.with_indexed_arrays(rows)

    def with_indexed_arrays(self, index: Any) -> ProcessGroup:
        """The group with every array indexed, to choose rows or to add axes."""
        blocks = {gpus: ranks[index] for gpus, ranks in self.ranks_per_block.items()}
        return ProcessGroup(self.size[index], self.ranks_per_domain[index], self.ranks_per_node[index], blocks)

    @property
    def num_domains(self) -> IntK:
        """Fast domains that the group spans, each with ``ranks_per_domain`` ranks."""
        return -(-self.size // self.ranks_per_domain)

    @property
    def crosses_domains(self) -> NDArray[np.bool_]:
        """Whether the group leaves its fast domain."""
        return self.ranks_per_domain < self.size


def stacked_groups(groups: Sequence[ProcessGroup]) -> ProcessGroup:
    """Several kinds of process group as one, along a new first axis."""
    return ProcessGroup(
        np.array([group.size for group in groups]), np.array([group.ranks_per_domain for group in groups]),
        np.array([group.ranks_per_node for group in groups]),
        {
            gpus: np.array([group.ranks_per_block[gpus] for group in groups])
            for gpus in groups[0].ranks_per_block
            if all(gpus in group.ranks_per_block for group in groups)
        },
    )  # fmt: skip


def fewest_ranks_per_node_or_domain(size: IntK, stride: IntK, block: IntK, world: IntK) -> IntK:
    """Fewest ranks of a strided group in any aligned block of ranks that it touches.

    Parameters
    ----------
    size, stride
        The group is ``base + i * stride`` for ``i < size``, and such groups tile the ranks. [ranks], shape (K,)
    block
        Ranks of a node or of a fast domain, numbered one after the other. [ranks], shape (K,)
    world
        All ranks. [ranks], shape (K,)

    Returns
    -------
    IntK
        Between 1 and ``size``. [ranks]

    Notes
    -----
    Together the groups of one base cover aligned runs of ``size * stride`` ranks; the smallest piece that a block's
    edge cuts off such a run has ``gcd(size * stride, block)`` ranks, of which every stride-th is in the group. Exact
    where the stride divides the block or is no smaller; else a lower bound (a group of stride 3 on nodes of 8).
    A world that fits into one block is never cut.

    Examples
    --------
    Two nodes of 8: tp 4 stays inside, dp 4 over tp 4 has 2 ranks a node, tp 6 is cut into 6 | 2 + 4 | ... .

    >>> a = np.array
    >>> fewest_ranks_per_node_or_domain(a([4, 4, 6]), a([1, 4, 1]), a([8, 8, 8]), a([16, 16, 48]))
    array([4, 2, 2])
    """
    piece = np.gcd(size * stride, block) // stride
    return np.where(world <= block, np.minimum(size, block), np.minimum(np.maximum(piece, 1), size))


def gpus_of_domain_used_by_job(world: IntK, node: HasNodeSizes) -> IntK:
    """GPUs of one fast domain that a job of ``world`` ranks uses.

    A domain of one node is used whole. Of a larger one (NVL72: 18 nodes of 4) the largest number of whole nodes is
    used that divides the job evenly, as schedulers place jobs in segments (Slurm's ``--segment``): 64 of 72 for a
    power of two. Assumes that such a placement is granted; where no number over half a domain divides the job, the
    domains are filled whole.

    Examples
    --------
    >>> gpus_of_domain_used_by_job(np.array([64, 144, 1024]), NodeSizes(4, 72))
    array([72, 72, 64])
    """
    domain = np.full(world.shape, node.gpus_per_domain, dtype=np.int64)
    fits = world <= node.gpus_per_domain
    for gpus in range(max(node.gpus_per_domain // 2, 1), node.gpus_per_domain + 1):
        if gpus % node.gpus_per_node == 0:
            domain = np.where(~fits & (world % gpus == 0), gpus, domain)
    return domain


def process_groups(
    tp: ArrayLike,
    cp: ArrayLike,
    pp: ArrayLike,
    dp: ArrayLike,
    ep: ArrayLike,
    etp: ArrayLike,
    node: HasNodeSizes,
    dp_shard: ArrayLike | None = None,
    rank_order: RankOrder = "tp-cp-ep-dp-pp",
) -> dict[str, ProcessGroup]:
    """All process groups of K strategies on nodes of one type.

    Parameters
    ----------
    tp, cp, pp, dp, ep, etp
        Degrees; dp includes replicas. [ranks], shape (K,) or scalar
    node
        Gives the ranks of a node and of a fast domain.
    dp_shard
        The part of dp that shards under hybrid sharding, varying faster than the replicas; dp when not given. [ranks]
    rank_order
        What varies fastest first: data parallelism before the pipeline, or the pipeline before it.

    Returns
    -------
    dict[str, ProcessGroup]
        By name: ``tp cp dp pp``, joined ``tp_cp dp_cp tp_dp_cp``, ``dp_shard_cp`` and ``dp_replicate`` (torchtitan's
        mesh), ``mp`` (tp and pp: Megatron's gradient norm), ``embd`` (first and last stage); the experts' ``ep etp
        edp etp_ep`` with ``edp_shard`` and ``edp_replicate``; ``world``.

    Notes
    -----
    Ranks count tp fastest, then cp, dp, pp (Megatron's default order "tp-cp-ep-dp-pp", torchtitan's mesh pp, dp, cp,
    tp); the experts' grid counts etp fastest, then ep, edp, pp, with ``edp = tp * cp * dp / (etp * ep)``. In the order
    "tp-cp-ep-pp-dp" (Megatron-LM's ``--use-tp-pp-dp-mapping``) both count pp before dp and edp. Node i holds ranks
    ``i * gpus_per_node`` and on. Degrees that do not divide are floored; masks reject those rows elsewhere.

    References
    ----------
    Megatron-Core 0.16, ``megatron/core/parallel_state.py``, ``RankGenerator``; torchtitan 0.2,
    ``torchtitan/distributed/parallel_dims.py``.

    Examples
    --------
    DeepSeek-V3 on nodes of 8: tp 1, pp 16, dp 128, ep 64: the expert group spans 8 nodes.

    >>> groups = process_groups(1, 1, 16, 128, 64, 1, NodeSizes(8, 8))
    >>> ep = groups["ep"]
    >>> int(ep.size), int(ep.ranks_per_domain), int(ep.num_domains), int(groups["edp"].size)
    (64, 8, 8, 2)
    """
    columns = [np.asarray(x).astype(np.int64) for x in (tp, cp, pp, dp, ep, etp, dp if dp_shard is None else dp_shard)]
    if len({x.shape for x in columns}) > 1:
        columns = list(np.broadcast_arrays(*columns))
    tp_, cp_, pp_, dp_, ep_, etp_, shard = (np.maximum(x, 1) for x in columns)
    adjacent = np.ones_like(tp_)
    stage = tp_ * cp_ * dp_
    replicas = np.maximum(dp_ // shard, 1)
    edp = np.maximum(stage // (etp_ * ep_), 1)
    eshard = np.maximum(edp // replicas, 1)
    pipeline_first = rank_order == "tp-cp-ep-pp-dp"
    near_pp = pp_ if pipeline_first else adjacent  # pipeline ranks between two that share parameters
    replica, expert_replica = tp_ * cp_ * near_pp, etp_ * ep_ * near_pp
    pp_stride = tp_ * cp_ if pipeline_first else stage
    ranges: Mapping[str, tuple[IntK, IntK]] = {
        "tp": (tp_, adjacent),
        "cp": (cp_, tp_),
        "dp": (dp_, replica),
        "pp": (pp_, pp_stride),
        "tp_cp": (tp_ * cp_, adjacent),
        "dp_cp": (dp_ * cp_, tp_),
        "tp_dp_cp": (stage, adjacent),
        "dp_shard": (shard, replica),
        "dp_shard_cp": (shard * cp_, tp_),
        "dp_replicate": (replicas, replica * shard),
        "embd": (np.minimum(pp_, 2), pp_stride * np.maximum(pp_ - 1, 1)),
        "etp": (etp_, adjacent),
        "ep": (ep_, etp_),
        "edp": (edp, expert_replica),
        "etp_ep": (etp_ * ep_, adjacent),
        "edp_shard": (eshard, expert_replica),
        "edp_replicate": (replicas, expert_replica * eshard),
        "world": (stage * pp_, adjacent),
    }
    world = stage * pp_
    domain, own_node = gpus_of_domain_used_by_job(world, node), np.full_like(world, node.gpus_per_node)
    sizes, strides = (np.array([pair[i] for pair in ranges.values()]) for i in (0, 1))
    near, own = (fewest_ranks_per_node_or_domain(sizes, strides, block, world) for block in (domain, own_node))
    blocks = {
        gpus: fewest_ranks_per_node_or_domain(sizes, strides, np.full_like(world, gpus), world)
        for gpus in node.block_sizes
    }
    groups = {
        name: ProcessGroup(size, in_domain, in_node, {gpus: ranks[i] for gpus, ranks in blocks.items()})
        for i, (name, size, in_domain, in_node) in enumerate(zip(ranges, sizes, near, own, strict=True))
    }
    groups["mp"] = group_of_inner_and_outer_ranks(groups["tp"], groups["pp"])
    shards = groups.pop("dp_shard")
    if pipeline_first:  # other stages' ranks lie in between
        groups["dp_cp"] = group_of_inner_and_outer_ranks(groups["cp"], groups["dp"])
        groups["tp_dp_cp"] = group_of_inner_and_outer_ranks(groups["tp_cp"], groups["dp"])
        groups["dp_shard_cp"] = group_of_inner_and_outer_ranks(groups["cp"], shards)
    return groups


def group_of_inner_and_outer_ranks(inner: ProcessGroup, outer: ProcessGroup) -> ProcessGroup:
    """The group of every inner rank at every outer step.

    Outer steps share a domain or a node only if it holds the whole inner group.
    """

    def joined(inner_ranks: IntK, outer_ranks: IntK) -> IntK:
        return np.where(inner_ranks == inner.size, inner_ranks * outer_ranks, inner_ranks)

    return ProcessGroup(
        inner.size * outer.size,
        joined(inner.ranks_per_domain, outer.ranks_per_domain),
        joined(inner.ranks_per_node, outer.ranks_per_node),
        {gpus: joined(ranks, outer.ranks_per_block[gpus]) for gpus, ranks in inner.ranks_per_block.items()},
    )
