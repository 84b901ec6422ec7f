"""Links that blocks of GPUs share: bridges, PCIe switches and sockets within a node, tiers of the network above it.

Ranks are numbered one after the other, so that a block is an aligned run of them (:mod:`mofa.cost.kernels.topology`).
A group crosses a block's link where it has ranks beyond the block. All groups of a kind are active at once, so that
each GPU of a block has an even share of what the block carries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.op import FloatK
from mofa.cost.kernels.topology import ProcessGroup
from mofa.specs.hardware import NodeSpec

ArrayK = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SharedLink:
    """A link that a block of GPUs shares towards all others: rates of a GPU's share, per direction."""

    gpus: int
    """GPUs of a block."""
    bytes_per_s: float
    all_to_all_bytes_per_s: float
    hop_bytes_per_s: float
    """The most that one message takes of it, whoever else sends. [B/s]"""
    in_node: bool
    """Whether only what stays in a node crosses it: what leaves the node has NICs beside its GPUs."""
    crossed_by_rails: bool = False
    """Whether messages to GPUs of another number cross it from within the block: leaves that hold a rail each."""

    def ranks_in_block(self, group: ProcessGroup) -> NDArray[np.int64]:
        """Fewest ranks of the group in a block. (K,)"""
        return group.ranks_per_block.get(self.gpus, group.size)

    def ranks_beyond_block(self, group: ProcessGroup) -> ArrayK:
        """Ranks outside of a rank's block to which it sends over this link. (K,)"""
        reached = group.ranks_per_node if self.in_node else group.size
        beyond: ArrayK = np.maximum(reached - self.ranks_in_block(group), 0).astype(np.float64)
        return beyond


@dataclass(frozen=True, slots=True)
class Bridge:
    """A faster link over blocks of a few GPUs; beyond them the node's own link carries the traffic."""

    gpus: int
    bytes_per_s: float
    all_to_all_bytes_per_s: float
    latency_s: float
    outside_bytes_per_s: float
    """What a GPU's own link to the rest of the node carries, of rings. [B/s]"""
    outside_all_to_all_bytes_per_s: float

    def ranks_in_block(self, group: ProcessGroup) -> NDArray[np.int64]:
        """Fewest ranks of the group that a bridge joins. (K,)"""
        return group.ranks_per_block.get(self.gpus, np.ones_like(group.size))

    def joins_whole_group(self, group: ProcessGroup) -> NDArray[np.bool_]:
        """Whether a bridge joins all ranks of the group. (K,)"""
        return (self.ranks_in_block(group) >= group.size) & (group.size > 1)

    def step_latency_s(self, group: ProcessGroup, outside_s: FloatK) -> ArrayK:
        """Latency of a step between two ranks of the group inside a node. (K,) [s]"""
        return np.where(self.joins_whole_group(group), self.latency_s, outside_s)


def shared_links_in_node(node: NodeSpec) -> tuple[SharedLink, ...]:
    """PCIe switches and sockets: what they share, after the efficiency of the node's link."""
    intra = node.intra
    levels = []
    for link in node.shared:
        share = link.bandwidth_bytes_per_s.value / link.gpus
        reached = link.bandwidth_bytes_per_s.value * intra.efficiency.value
        rings, all_to_all = share * intra.efficiency.value, share * intra.all_to_all_efficiency.value
        levels.append(SharedLink(link.gpus, rings, all_to_all, reached, in_node=True))
    return tuple(levels)


def shared_links_of_tiers(node: NodeSpec, nic_share_bytes_per_s: float) -> tuple[SharedLink, ...]:
    """Tiers of the network: what leaves them of a GPU's NIC share, after the NICs' efficiency.

    Without a link that relays messages to their rail, those to other numbers cross the first tier of a rail-optimised
    network.
    """
    nic = node.nic
    return tuple(
        SharedLink(
            gpus,
            share * nic_share_bytes_per_s * nic.efficiency.value,
            share * nic_share_bytes_per_s * nic.all_to_all_efficiency.value,
            nic_share_bytes_per_s * nic.efficiency.value,
            in_node=False,
            crossed_by_rails=i == 0 and bool(nic.rail_optimised) and not node.intra.relays,
        )
        for i, (gpus, share) in enumerate(nic.bandwidth_shares_above_tiers())
    )


def bridge_of_node(node: NodeSpec) -> Bridge | None:
    """The node's bridges, after their efficiency."""
    bridge, intra = node.bridge, node.intra
    if bridge is None:
        return None
    rate, outside = bridge.bandwidth_bytes_per_s.value, intra.bandwidth_bytes_per_s.value
    return Bridge(
        bridge.gpus, rate * bridge.efficiency.value, rate * bridge.all_to_all_efficiency.value,
        bridge.latency_s.value, outside * intra.efficiency.value, outside * intra.all_to_all_efficiency.value,
    )  # fmt: skip


def mesh_link_share(group: ProcessGroup, mesh_gpus: int) -> FloatK:
    """Share of its links that a GPU of a mesh uses in a group: those to the members in its domain. (K,) [-]

    Examples
    --------
    >>> a = np.array
    >>> mesh_link_share(ProcessGroup(a([2, 8]), a([2, 8]), a([2, 8])), 8) * 7
    array([1., 7.])
    >>> mesh_link_share(ProcessGroup(a([2]), a([2]), a([2])), 0)
    1.0
    """
    if not mesh_gpus:
        return 1.0
    return np.maximum(group.ranks_per_domain - 1, 1) / max(mesh_gpus - 1, 1)


def ring_s_on_shared_links(
    busy_s: ArrayK, sent_bytes: FloatK, group: ProcessGroup, levels: tuple[SharedLink, ...]
) -> ArrayK:
    """Seconds that rings keep a path busy that has shared links in it: at least those of each link. (K,) [s]

    Notes
    -----
    Rings through a block carry ``sent_bytes`` out of it in all, and a block of S GPUs with k ranks of each group has
    S / k groups: ``sent / (k * share)``, as NICs have it
    (:func:`mofa.cost.kernels.collectives.ring_gather_or_scatter_time`).

    Examples
    --------
    Four GPUs share 40 GB/s; one group of 8 sends 8 GB out of each four, in 8 / 40 s; four groups of two over the
    border share it.

    >>> level = SharedLink(4, 10e9, 10e9, 40e9, in_node=True)
    >>> a = np.array
    >>> group = ProcessGroup(a([8, 2]), a([8, 2]), a([8, 2]), {4: a([4, 1])})
    >>> ring_s_on_shared_links(a([0.0, 0.0]), 8e9, group, (level,))
    array([0.2, 0.8])
    """
    for level in levels:
        crossing = level.ranks_beyond_block(group) > 0
        busy_s = np.maximum(
            busy_s, np.where(crossing, sent_bytes / (level.ranks_in_block(group) * level.bytes_per_s), 0.0)
        )
    return busy_s


def ring_s_on_bridges(busy_s: ArrayK, sent_bytes: FloatK, group: ProcessGroup, bridge: Bridge) -> ArrayK:
    """Seconds that rings keep bridges and the links beyond them busy, whichever takes longer. (K,) [s]

    Of k ranks that a bridge joins, rings pass k - 1 times over it and once out of it, by another rank's link each.

    Examples
    --------
    >>> a = np.array
    >>> group = ProcessGroup(a([2, 4]), a([2, 4]), a([2, 4]), {2: a([2, 2])})
    >>> ring_s_on_bridges(a([9.0, 9.0]), 8e9, group, Bridge(2, 100e9, 100e9, 0.0, 20e9, 20e9))
    array([0.08, 0.2 ])
    """
    k = bridge.ranks_in_block(group)
    joined = np.where(bridge.joins_whole_group(group), 1.0, (k - 1) / k) * sent_bytes / bridge.bytes_per_s
    leaving = np.where(bridge.joins_whole_group(group), 0.0, sent_bytes / (k * bridge.outside_bytes_per_s))
    return np.where(group.ranks_per_node > 1, np.maximum(joined, leaving), busy_s)


def all_to_all_s_on_shared_links(
    busy_s: ArrayK,
    part_bytes: FloatK,
    group: ProcessGroup,
    levels: tuple[SharedLink, ...],
    bridge: Bridge | None = None,
) -> ArrayK:
    """Seconds that an all-to-all keeps shared links busy, in which each rank sends ``part_bytes`` to every other. (K,)
    [s]

    Examples
    --------
    >>> level = SharedLink(4, 10e9, 10e9, 40e9, in_node=True)
    >>> a = np.array
    >>> all_to_all_s_on_shared_links(a([0.0]), 1e9, ProcessGroup(a([8]), a([8]), a([8]), {4: a([4])}), (level,))
    array([0.4])
    """
    if bridge is not None:
        k = bridge.ranks_in_block(group)
        beyond = np.maximum(group.ranks_per_node - k, 0)
        own = part_bytes * (k - 1) / bridge.all_to_all_bytes_per_s
        outside = part_bytes * beyond / bridge.outside_all_to_all_bytes_per_s
        busy_s = np.where(group.ranks_per_node > 1, np.maximum(own, outside), busy_s)
    for level in levels:
        beyond_ranks = level.ranks_beyond_block(group)
        if level.crossed_by_rails:
            k = group.ranks_per_node
            inside = np.maximum(level.ranks_in_block(group) - k, 0)
            beyond_ranks = beyond_ranks + inside * (k - 1) / k
        busy_s = np.maximum(busy_s, part_bytes * beyond_ranks / level.all_to_all_bytes_per_s)
    return busy_s


def hop_s_on_shared_links(
    busy_s: ArrayK, payload_bytes: FloatK, group: ProcessGroup, levels: tuple[SharedLink, ...]
) -> ArrayK:
    """Seconds that one message to the next rank keeps shared links busy. (K,) [s]

    A block's k ranks of a group are neighbours, of which one sends out: it has k shares, at most what one message
    takes.

    Examples
    --------
    >>> level = SharedLink(4, 10e9, 10e9, 20e9, in_node=True)
    >>> a = np.array
    >>> group = ProcessGroup(a([8, 2]), a([8, 2]), a([8, 2]), {4: a([4, 1])})
    >>> hop_s_on_shared_links(a([0.0, 0.0]), 1e9, group, (level,))
    array([0.05, 0.1 ])
    """
    for level in levels:
        rate = np.minimum(level.ranks_in_block(group) * level.bytes_per_s, level.hop_bytes_per_s)
        busy_s = np.maximum(busy_s, np.where(level.ranks_beyond_block(group) > 0, payload_bytes / rate, 0.0))
    return busy_s
