"""Time of NCCL's rings, trees and sends over several fast domains, protocol by protocol.

NCCL has three protocols (LL, LL128, Simple): the faster a step starts, the less of the rate it reaches. Collectives run
in rings, all-reduce also in double binary trees, and where switches reduce (NVLS) in trees of nodes. Its tuning takes
the one that it thinks is fastest (src/graph/tuning.cc); here the fastest is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mofa.specs.nccl import NcclBetweenNodes

ArrayK = NDArray[np.float64]
CHANNELS_PER_RANK, MOST_CHANNELS = 4, 16
"""Channels for messages of a communicator: for each rank of a domain, and at most. [-]"""
FEW_DOMAINS = 2
"""Domains between which a tree's root sends what it gets: each direction carries the tensor once. [-]"""


class NcclProtocolConstants(NamedTuple):
    """Seconds of a step inside a domain, of a hop between domains in rings and trees, and shares of the rate."""

    step_s: float
    hop_s: float
    tree_hop_s: float
    ring_share: float
    tree_share: float


@dataclass(frozen=True, slots=True)
class NcclTimeConstants:
    """What :class:`mofa.specs.nccl.NcclBetweenNodes` says, as numbers. [s]

    By default steps take no time and every rate is reached.
    """

    start_s: float = 0.0
    protocols: Sequence[NcclProtocolConstants] = (NcclProtocolConstants(0.0, 0.0, 0.0, 1.0, 1.0),)
    nvls_start_s: float = 0.0
    nvls_hop_s: float = 0.0
    peer_s: float = 0.0
    channel_bytes_per_s: float = np.inf

    @classmethod
    def from_facts(cls, facts: NcclBetweenNodes) -> NcclTimeConstants:
        """Read the facts."""
        return cls(
            facts.start_s.value,
            tuple(
                NcclProtocolConstants(
                    p.step_s.value, p.hop_s.value, p.tree_hop_s.value, p.ring_share.value, p.tree_share.value
                )
                for p in facts.protocols
            ),
            facts.nvls_tree_start_s.value, facts.nvls_tree_hop_s.value, facts.peer_s.value,
            facts.channel_bytes_per_s.value,
        )  # fmt: skip


class GroupSpan(NamedTuple):
    """Where groups lie: ranks and domains, and what a message takes inside a domain and between two. (K,)"""

    ranks: NDArray[np.int64]
    domains: NDArray[np.int64]
    step_s: ArrayK | float
    latency_s: ArrayK | float


def ring_collective_s(load_s: ArrayK, passes: int, span: GroupSpan, times: NcclTimeConstants) -> ArrayK:
    """A ring that goes round once (all-gather, reduce-scatter) or twice (all-reduce). (K,) [s]

    Parameters
    ----------
    load_s
        What the busiest link takes for all bytes at the rate that large messages reach. (K,) [s]
    passes
        1 or 2.

    Notes
    -----
    ``start + passes * (intra hops * step + inter hops * (latency + hop)) + load / share``, the least over protocols: of
    a ring over g domains of k ranks each, g - 1 hops of the longest path leave a domain and g k - g do not.

    Examples
    --------
    Ten hops of 1 us and one of 5 us, and 1 ms of bytes at half the rate:

    >>> times = NcclTimeConstants(10e-6, (NcclProtocolConstants(1e-6, 2e-6, 0.0, 0.5, 0.5),))
    >>> span = GroupSpan(np.array([12]), np.array([2]), 0.0, 3e-6)
    >>> ring_collective_s(np.array([1e-3]), 1, span, times) * 1e6
    array([2025.])
    """
    between = span.domains - 1.0
    inside = span.ranks - span.domains
    fastest: ArrayK = np.min(
        [
            times.start_s
            + passes
            * (inside * np.maximum(protocol.step_s, span.step_s) + between * (span.latency_s + protocol.hop_s))
            + load_s / protocol.ring_share
            for protocol in times.protocols
        ],
        axis=0,
    )  # fmt: skip
    return fastest


def tree_all_reduce_s(load_s: ArrayK, span: GroupSpan, times: NcclTimeConstants) -> ArrayK:
    """An all-reduce in double binary trees over the domains, chains inside them; as :func:`ring_collective_s`. (K,) [s]

    ``start + 2 * ((k - 1) * step + ceil(log2 g) * (latency + hop)) + load / share``.

    Examples
    --------
    >>> times = NcclTimeConstants(0.0, (NcclProtocolConstants(1e-6, 0.0, 2e-6, 1.0, 0.5),))
    >>> tree_all_reduce_s(np.array([0.0, 1e-3]), GroupSpan(np.array([8, 8]), np.array([4, 4]), 0.0, 3e-6), times) * 1e6
    array([  22., 2022.])
    """
    levels = np.ceil(np.log2(span.domains))
    chain = span.ranks / span.domains - 1.0
    fastest: ArrayK = np.min(
        [
            times.start_s
            + 2.0 * (chain * np.maximum(protocol.step_s, span.step_s) + levels * (span.latency_s + protocol.tree_hop_s))
            + load_s / protocol.tree_share
            for protocol in times.protocols
        ],
        axis=0,
    )  # fmt: skip
    return fastest


def nvls_tree_all_reduce_s(in_switch_s: ArrayK, network_s: ArrayK, span: GroupSpan, times: NcclTimeConstants) -> ArrayK:
    """An all-reduce that switches reduce inside domains and trees over them. (K,) [s]

    Parameters
    ----------
    in_switch_s
        What a GPU's link takes for its bytes where the switch reduces. (K,) [s]
    network_s
        What a domain's share of the network takes for a ring's bytes. Between two domains a tree sends each byte once
        in each direction, where a ring sends it twice: half of that. (K,) [s]
    """
    network = network_s / ring_sends_over_tree_sends(span)
    levels = np.ceil(np.log2(span.domains))
    start_s = times.start_s + times.nvls_start_s
    return start_s + 2.0 * levels * (span.latency_s + times.nvls_hop_s) + np.maximum(in_switch_s, network)


def ring_sends_over_tree_sends(span: GroupSpan) -> ArrayK:
    """How many times as much a ring sends out of a domain as a tree does: twice between two. (K,) [-]"""
    return np.where(span.domains <= FEW_DOMAINS, 2.0, 1.0)


def channels_of_collectives(per_domain: NDArray[np.int64]) -> NDArray[np.int64]:
    """Channels of a collective whose group has so many ranks in a domain and leaves it. (K,) [-]

    One for each of a domain's ports, twice, and twice again on Hopper, up to 16 (NCCL 2.28, src/graph/connect.cc,
    ``ncclTopoPostset``): an H100 node's eight have 16, as its log says (NCCL's issue 1453).
    """
    return np.asarray(np.minimum(CHANNELS_PER_RANK * per_domain, MOST_CHANNELS))


def channels_per_peer(ranks: NDArray[np.int64], per_domain: NDArray[np.int64]) -> NDArray[np.int64]:
    """Channels that NCCL gives a message to a rank beyond the domain. (K,) [-]

    Notes
    -----
    Two, or one where twice the communicator's ranks exceed four times its channels for messages (NCCL 2.28,
    src/graph/paths.cc, ``ncclTopoGetNchannels``). Those are four for each rank of a domain, 16 at most: so do
    measured sends on Hopper go over from two channels to one.

    Examples
    --------
    Stages of a pipeline, one rank a node: eight have two channels, sixteen one.

    >>> channels_per_peer(np.array([8, 16, 16]), np.array([1, 1, 8]))
    array([2, 1, 2])
    """
    channels = channels_of_collectives(per_domain)
    return np.where(ranks <= 2 * channels, 2, 1)
