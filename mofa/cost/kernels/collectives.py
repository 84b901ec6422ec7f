"""Time of collectives and of hops between stages, by message size and by where the group lies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Self

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.op import FloatK
from mofa.blocks.work import CollectiveKind
from mofa.cost.kernels import fitted_forms
from mofa.cost.kernels.between_nodes import (
    GroupSpan,
    NcclTimeConstants,
    channels_per_peer,
    nvls_tree_all_reduce_s,
    ring_collective_s,
    ring_sends_over_tree_sends,
    tree_all_reduce_s,
)
from mofa.cost.kernels.shared_links import (
    Bridge,
    SharedLink,
    all_to_all_s_on_shared_links,
    bridge_of_node,
    hop_s_on_shared_links,
    mesh_link_share,
    ring_s_on_bridges,
    ring_s_on_shared_links,
    shared_links_in_node,
    shared_links_of_tiers,
)
from mofa.cost.kernels.token_spread import TokenSpread
from mofa.cost.kernels.topology import ProcessGroup
from mofa.specs.curves import CollectiveForm
from mofa.specs.hardware import ClusterSpec
from mofa.specs.nccl import load_nccl_facts

ArrayK = NDArray[np.float64]
MOST_WITHOUT_NVLS = 2
"""Ranks of a communicator in one domain up to which NCCL does not use NVLS (src/transport/nvls.cc). [-]"""


@dataclass(frozen=True, slots=True)
class Fabric:
    """The cluster's network as one GPU sees it: rates per GPU and direction, after efficiency and blocking."""

    intra_bytes_per_s: float
    """Ring collectives and single hops inside a fast domain. [B/s]"""
    intra_all_to_all_bytes_per_s: float
    inter_bytes_per_s: float
    """A GPU's share of its node's NICs. [B/s]"""
    inter_all_to_all_bytes_per_s: float
    intra_latency_s: float = 0.0
    """Per step of a ring or per message. [s]"""
    inter_latency_s: float = 0.0
    startup_s: float = 0.0
    """Of every collective, whatever its size. [s]"""
    communicator_bytes_per_s: float = math.inf
    """The most that one communicator's rings, or one message, carry out of a domain. [B/s]"""
    nvls_factor: float = 1.0
    """How much in-switch reduction speeds up all-reduce inside a domain. [-]"""
    intra_deepep_bytes_per_s: float | None = None
    """DeepEP's kernels inside a fast domain; as NCCL's all-to-all where it is not known. [B/s]"""
    in_node: tuple[SharedLink, ...] = ()
    """Links that blocks of a node's GPUs share."""
    above: tuple[SharedLink, ...] = ()
    """Tiers of the network."""
    bridge: Bridge | None = None
    mesh_gpus: int = 0
    """GPUs of a domain whose every two have a link of their own; 0 where a switch joins them."""
    relays: bool = False
    """Whether messages to GPUs of another number are relayed inside the domain first."""
    between: NcclTimeConstants = field(default_factory=NcclTimeConstants)
    """What NCCL's steps take where a group spans several domains."""
    measured: Mapping[str, Mapping[int, CollectiveForm]] = field(default_factory=dict)
    """Fitted forms of collectives inside a domain, by group size, measured without in-switch reduction."""

    @classmethod
    def from_cluster(cls, cluster: ClusterSpec) -> Self:
        """Read the facts of a cluster."""
        intra, nic = cluster.node.intra, cluster.node.nic
        deepep = intra.deepep_efficiency or intra.all_to_all_efficiency
        share = cluster.nic_bandwidth_per_gpu_bytes_per_s / nic.oversubscription.value
        return cls(
            intra_bytes_per_s=intra.bandwidth_bytes_per_s.value * intra.efficiency.value,
            intra_all_to_all_bytes_per_s=intra.bandwidth_bytes_per_s.value * intra.all_to_all_efficiency.value,
            inter_bytes_per_s=share * nic.efficiency.value,
            inter_all_to_all_bytes_per_s=share * nic.all_to_all_efficiency.value,
            intra_latency_s=intra.latency_s.value,
            inter_latency_s=nic.latency_s.value,
            communicator_bytes_per_s=limit.value if (limit := nic.communicator_bytes_per_s) else math.inf,
            startup_s=cluster.node.collective_startup_s.value,
            nvls_factor=cluster.node.nvls_factor.value,
            intra_deepep_bytes_per_s=intra.bandwidth_bytes_per_s.value * deepep.value,
            in_node=shared_links_in_node(cluster.node),
            above=shared_links_of_tiers(cluster.node, share),
            bridge=bridge_of_node(cluster.node),
            mesh_gpus=cluster.node.gpus_per_domain if intra.is_mesh else 0,
            relays=bool(nic.rail_optimised) and intra.relays,
            between=NcclTimeConstants.from_facts(load_nccl_facts()),
            measured=_measured_forms(cluster),
        )


def _measured_forms(cluster: ClusterSpec) -> dict[str, dict[int, CollectiveForm]]:
    forms: dict[str, dict[int, CollectiveForm]] = {}
    for key, curve in cluster.node.collectives.items():
        forms.setdefault(key.split()[0], {})[curve.form.group] = curve.form
    return forms


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """One collective under K strategies. ``intra_s`` and ``inter_s`` are how long its bytes keep a GPU's link to the
    fast domain and its share of the NICs busy; both happen at once, so ``total_s`` is no less than either. (K,) [s]"""

    total_s: ArrayK
    intra_s: ArrayK
    inter_s: ArrayK


def collective_s(
    kind: CollectiveKind,
    payload_bytes: FloatK,
    group: ProcessGroup,
    cluster: ClusterSpec | Fabric,
    *,
    imbalance: FloatK = 1.0,
    spread: TokenSpread | None = None,
) -> ArrayK:
    """Time of one collective over one kind of process group, from its start on the device to its end.

    Parameters
    ----------
    kind
        What it does.
    payload_bytes
        ``all_gather``, ``reduce_scatter``, ``all_reduce``: the whole tensor before it is sharded. ``all_to_all``: what
        one rank sends in all, the part to itself included. ``send_recv``: the one message. ``deepep``: one copy of
        every token that a rank holds. Nothing to send is no call. [B]
    group
        Sizes and places of the groups.
    cluster
        The network: of a cluster, or as :meth:`Fabric.from_cluster` has read it.
    imbalance
        Bytes of the busiest rank over the mean, for ``all_to_all`` and ``deepep``. [-]
    spread
        Where copies of a token go; needed by ``deepep``, see :func:`token_spread`.

    Returns
    -------
    ArrayK
        Time of one call; 0 in a group of one rank. [s]

    Notes
    -----
    See :func:`ring_gather_or_scatter_time`, :func:`all_reduce_time`, :func:`all_to_all_time`, :func:`hop_time` and
    :func:`deepep_time`.
    All groups of a kind are assumed to be active at once, so that each GPU has its own share of the node's NICs, and k
    ranks of a group in one node drive k shares.
    """
    fabric = cluster if isinstance(cluster, Fabric) else Fabric.from_cluster(cluster)
    return collective_time(kind, payload_bytes, group, fabric, imbalance=imbalance, spread=spread).total_s


def collective_time(
    kind: CollectiveKind,
    payload_bytes: FloatK,
    group: ProcessGroup,
    fabric: Fabric,
    *,
    imbalance: FloatK = 1.0,
    spread: TokenSpread | None = None,
) -> CollectiveTime:
    """As :func:`collective_s`, with the seconds that each level of the network is busy.

    Inside a domain a collective that was measured takes its fitted form's time, of the group size that is nearest from
    below; a larger group than any measured one is an extrapolation: same bus bandwidth, more steps to start. A ring
    over several domains takes no less than one of the ranks in a domain.
    """
    time = _modelled_time(kind, payload_bytes, group, fabric, imbalance, spread)
    sizes = fabric.measured.get(kind)
    if not sizes:
        return time
    crosses = np.asarray(group.crosses_domains) & np.ones_like(np.asarray(time.total_s), dtype=bool)
    used = (np.asarray(group.ranks_per_domain) > 1) & (~crosses if kind in ("all_to_all", "send_recv") else True)
    if not np.any(used):
        return time
    payload = np.asarray(payload_bytes, dtype=np.float64) * (imbalance if kind == "all_to_all" else 1.0)
    if kind == "all_reduce":
        payload = payload / _in_switch(group, fabric)
    total = time.total_s
    for k in sorted(set(np.asarray(group.ranks_per_domain)[np.asarray(used)].tolist())):
        near = reduce(lambda best, g: g if g <= k else best, sorted(sizes))
        of_size = used & (group.ranks_per_domain == k) & (payload > 0)
        size = 2 if kind == "send_recv" else int(k)
        inside_s = fitted_forms.collective_s(payload, kind, sizes[near], group=size)
        total = np.where(of_size, np.where(crosses, np.maximum(total, inside_s), inside_s), total)
    return replace(time, total_s=total)


def _modelled_time(
    kind: CollectiveKind, payload_bytes: FloatK, group: ProcessGroup, fabric: Fabric, imbalance: FloatK,
    spread: TokenSpread | None,
) -> CollectiveTime:  # fmt: skip
    """The time by the rates and latencies of the links."""
    if kind in ("all_gather", "reduce_scatter"):
        return ring_gather_or_scatter_time(payload_bytes, group, fabric)
    if kind == "all_reduce":
        return all_reduce_time(payload_bytes, group, fabric)
    if kind == "all_to_all":
        return all_to_all_time(payload_bytes, group, fabric, imbalance)
    if kind == "send_recv":
        return hop_time(payload_bytes, group, fabric)
    if spread is None:
        raise ValueError("deepep: needs spread, the places that copies of a token go to; give token_spread(...)")
    return deepep_time(payload_bytes, group, fabric, spread, imbalance)


def ring_gather_or_scatter_time(payload_bytes: FloatK, group: ProcessGroup, fabric: Fabric) -> CollectiveTime:
    """One all-gather or reduce-scatter in NCCL's rings.

    Notes
    -----
    With p ranks, k of them in each of g = p/k domains, every rank receives ``(p-1)/p * payload``. NCCL lays k rings
    through all domains, one per NIC, and splits the payload over them; of a ring's hops in a domain k-1 are inside and
    one leaves it, so that a GPU's NIC share carries ``(p-1)/p * payload / k`` and its link ``(k-1)/k`` of what it
    sends. Both are pipelined: ``startup + (g-1) * latency_inter + (p-g) * latency_intra + max(intra, inter)``, with
    ``g = 1`` in one domain. Assumes the ring order follows the domains and that the slowest domain's k ranks count for
    all; where NCCL finds no path from a domain to several NICs, all rings together carry no more than
    ``communicator_bytes_per_s`` out of it. In-switch reduction is not credited: published points (H100, 8 GPUs) show
    all-gather and reduce-scatter at ring rates.

    References
    ----------
    Thakur, Rabenseifner, Gropp (2005), doi:10.1177/1094342005051521, section 4.1; NCCL, ``src/graph/tuning.cc``.

    Examples
    --------
    8 GB over 8 ranks at 400 GB/s: 7/8 of 20 ms. Over 2 such nodes with 50 GB/s a GPU: 15/16 * 8 GB / (8 * 50 GB/s).

    >>> fabric = Fabric(400e9, 400e9, 50e9, 50e9)
    >>> inside = np.array([1, 8, 8])
    >>> group = ProcessGroup(size=np.array([1, 8, 16]), ranks_per_domain=inside, ranks_per_node=inside)
    >>> ring_gather_or_scatter_time(8e9, group, fabric).total_s
    array([0.     , 0.0175 , 0.01875])
    """
    p, k = group.size, group.ranks_per_domain
    sent = np.asarray(payload_bytes) * (p - 1) / p
    intra, inter = _ring_loads(sent, group, fabric.intra_bytes_per_s * mesh_link_share(group, fabric.mesh_gpus), fabric)
    step_s = _step_s(group, fabric)
    inside_s = fabric.startup_s + (p - 1) * step_s + intra
    across_s = ring_collective_s(np.maximum(intra, inter), 1, _span(group, fabric), fabric.between)
    across_s = np.maximum(across_s, _in_domain_s(payload_bytes, group, fabric, 1.0, k - 1, step_s))
    return _called(payload_bytes, group, np.where(group.crosses_domains, across_s, inside_s), intra, inter)


def _in_domain_s(
    payload_bytes: FloatK,
    group: ProcessGroup,
    fabric: Fabric,
    speedup: FloatK,
    steps: FloatK | NDArray[np.int64],
    step_s: FloatK,
) -> ArrayK:
    """What the ranks of one domain alone would take, which those of several never beat. (K,) [s]"""
    k = np.asarray(group.ranks_per_domain)
    rate = fabric.intra_bytes_per_s * speedup * mesh_link_share(group, fabric.mesh_gpus)
    return fabric.startup_s + steps * step_s + np.asarray(payload_bytes) * (k - 1) / k / rate


def _step_s(group: ProcessGroup, fabric: Fabric) -> FloatK:
    """What a hop inside a domain takes to start. [s]"""
    return (
        fabric.intra_latency_s if fabric.bridge is None else fabric.bridge.step_latency_s(group, fabric.intra_latency_s)
    )


def _span(group: ProcessGroup, fabric: Fabric) -> GroupSpan:
    return GroupSpan(group.size, group.num_domains, _step_s(group, fabric), fabric.inter_latency_s)


def all_reduce_time(payload_bytes: FloatK, group: ProcessGroup, fabric: Fabric) -> CollectiveTime:
    """One all-reduce: a reduce-scatter and an all-gather, trees, or trees over switches that reduce.

    Notes
    -----
    Bytes as two passes of :func:`ring_gather_or_scatter_time`. In one domain they are divided by the in-switch factor,
    and latency is the
    lesser of two rings' and of a tree's, ``2 * ceil(log2 k) * latency_intra``. Over several it is the fastest of
    :mod:`mofa.cost.kernels.between_nodes`: rings, double binary trees and, where switches reduce inside domains, trees
    over them.

    References
    ----------
    Sanders, Speck, Träff (2009), "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
    doi:10.1016/j.parco.2009.09.001.

    Examples
    --------
    >>> fabric = Fabric(400e9, 400e9, 50e9, 50e9)
    >>> group = ProcessGroup(size=np.array([8, 16]), ranks_per_domain=np.array([8, 8]), ranks_per_node=np.array([8, 8]))
    >>> all_reduce_time(8e9, group, fabric).total_s
    array([0.035 , 0.0375])
    """
    p, k = group.size, group.ranks_per_domain
    sent = 2.0 * np.asarray(payload_bytes) * (p - 1) / p
    rate = fabric.intra_bytes_per_s * mesh_link_share(group, fabric.mesh_gpus)
    in_switch = _in_switch(group, fabric)
    intra, inter = _ring_loads(sent, group, rate, fabric)
    reduced, _ = _ring_loads(sent, group, rate * in_switch, fabric)
    steps = 2.0 * np.minimum(k - 1, np.ceil(np.log2(k)))
    inside_s = fabric.startup_s + steps * fabric.intra_latency_s + reduced
    span, busy = _span(group, fabric), np.maximum(intra, inter)
    across_s = np.minimum(
        ring_collective_s(busy, 2, span, fabric.between), tree_all_reduce_s(busy, span, fabric.between)
    )
    by_switch, halved = (
        nvls_tree_all_reduce_s(reduced, inter, span, fabric.between),
        inter / ring_sends_over_tree_sends(span),
    )
    reduces = (in_switch > 1.0) & (by_switch < across_s)
    alone_s = _in_domain_s(2.0 * np.asarray(payload_bytes), group, fabric, in_switch, steps, fabric.intra_latency_s)
    across_s = np.maximum(np.where(reduces, by_switch, across_s), alone_s)
    intra, inter = np.where(group.crosses_domains & ~reduces, intra, reduced), np.where(reduces, halved, inter)
    return _called(payload_bytes, group, np.where(group.crosses_domains, across_s, inside_s), intra, inter)


def _in_switch(group: ProcessGroup, fabric: Fabric) -> ArrayK:
    """How much in-switch reduction speeds up all-reduce: not at all where a communicator has two ranks or fewer in a
    domain, since NCCL leaves NVLS out there (``ncclNvlsInit``). (K,) [-]"""
    return np.where(np.asarray(group.ranks_per_domain) > MOST_WITHOUT_NVLS, fabric.nvls_factor, 1.0)


def all_to_all_time(
    payload_bytes: FloatK, group: ProcessGroup, fabric: Fabric, imbalance: FloatK = 1.0
) -> CollectiveTime:
    """One all-to-all as NCCL makes it, of grouped sends and receives.

    Notes
    -----
    Of the ``payload`` that a rank sends, ``1/p`` stays, ``(k-1)/p`` goes to its domain and ``(p-k)/p`` through its NIC
    share, at once: ``startup + max((k-1) * latency_intra + intra, (p-k) * peer + inter)``, across domains with start
    and time for each peer of :class:`mofa.cost.kernels.between_nodes.NcclTimeConstants`. The busiest rank's
    bytes are ``imbalance`` times the mean, on both paths. Assumes uniform destinations otherwise, and no relay through
    the domain (NCCL's PXN), which would join messages but send the same bytes; on a rail-optimised fabric what goes to
    GPUs of another number, ``(k-1)/k`` of what leaves, is relayed over the domain's link besides.

    Examples
    --------
    8 GB a rank: 7/8 at 400 GB/s inside 8 ranks; over two nodes half of it leaves at 50 GB/s.

    >>> fabric = Fabric(400e9, 400e9, 50e9, 50e9)
    >>> group = ProcessGroup(size=np.array([8, 16]), ranks_per_domain=np.array([8, 8]), ranks_per_node=np.array([8, 8]))
    >>> all_to_all_time(8e9, group, fabric).total_s
    array([0.0175, 0.08  ])
    """
    p, k = group.size, group.ranks_per_domain
    part = np.asarray(payload_bytes) * imbalance / p
    relayed = part * (p - k) * (k - 1) / k if fabric.relays else 0.0
    intra = (part * (k - 1) + relayed) / (
        fabric.intra_all_to_all_bytes_per_s * mesh_link_share(group, fabric.mesh_gpus)
    )
    inter = part * (p - k) / fabric.inter_all_to_all_bytes_per_s
    intra = all_to_all_s_on_shared_links(intra, part, group, fabric.in_node, fabric.bridge)
    inter = all_to_all_s_on_shared_links(inter, part, group, fabric.above)
    between = fabric.between
    near, far = (k - 1) * fabric.intra_latency_s + intra, (p - k) * between.peer_s + inter
    start_s = np.where(group.crosses_domains, between.start_s + fabric.inter_latency_s, fabric.startup_s)
    return _called(payload_bytes, group, start_s + np.maximum(near, far), intra, inter)


def hop_time(payload_bytes: FloatK, group: ProcessGroup, fabric: Fabric) -> CollectiveTime:
    """One message to the next rank of the group: a pipeline stage, a step of ring attention.

    Notes
    -----
    ``startup + latency + payload / bandwidth``, through the NIC where any hop of the group leaves its domain: the
    slowest hop sets the pace of a pipeline or a ring. Both directions of a link are used at once without slowing.
    Between nodes a message has the channels that NCCL gives a peer
    (:func:`mofa.cost.kernels.between_nodes.channels_per_peer`).

    Examples
    --------
    >>> fabric = Fabric(400e9, 400e9, 50e9, 50e9)
    >>> group = ProcessGroup(size=np.array([2, 2]), ranks_per_domain=np.array([2, 1]), ranks_per_node=np.array([2, 1]))
    >>> hop_time(1e9, group, fabric).total_s
    array([0.0025, 0.02  ])
    """
    payload = np.asarray(payload_bytes, dtype=np.float64)
    inside, spans = (group.size > 1) & ~group.crosses_domains, group.crosses_domains
    one_link = fabric.intra_bytes_per_s / max(fabric.mesh_gpus - 1, 1)
    intra = np.where(inside, payload / one_link, 0.0)
    one_nic = min(fabric.inter_bytes_per_s, fabric.communicator_bytes_per_s)
    channels = channels_per_peer(group.size, group.ranks_per_domain)
    inter = np.where(spans, payload / np.minimum(one_nic, channels * fabric.between.channel_bytes_per_s), 0.0)
    intra, inter = (
        hop_s_on_shared_links(intra, payload, group, fabric.in_node),
        hop_s_on_shared_links(inter, payload, group, fabric.above),
    )
    if fabric.bridge is not None:
        intra = np.where(fabric.bridge.joins_whole_group(group), payload / fabric.bridge.bytes_per_s, intra)
    start_s = np.where(
        spans, fabric.between.start_s + fabric.inter_latency_s, fabric.startup_s + _step_s(group, fabric)
    )
    return _called(payload, group, start_s + np.maximum(intra, inter), intra, inter)


def deepep_time(
    payload_bytes: FloatK, group: ProcessGroup, fabric: Fabric, spread: TokenSpread, imbalance: FloatK = 1.0
) -> CollectiveTime:
    """One dispatch or combine of DeepEP's normal kernels: a token crosses to a domain once, then fans out inside.

    Notes
    -----
    A GPU's NIC share carries ``payload * remote_domains``, to the GPU of its own index in each domain, which forwards
    inside: with tokens from everywhere, a GPU's link carries ``payload * ranks * (k-1)/k`` (a forwarder keeps its own
    copy). The two are pipelined: ``startup + latency_inter + latency_intra + max(intra, inter)``. The notification
    before a dispatch and its wait on the host are ops of their own. Combine moves the same bytes the other way.

    References
    ----------
    github.com/deepseek-ai/DeepEP, README, "Normal kernels".

    Examples
    --------
    DeepEP's own test, 4096 tokens of 7168 fp8 bytes, 16 ranks on 2 nodes of H800 (154 GB/s inside, 44 GB/s out), top-8
    of 256: the fan-out inside the nodes is what limits, 29.4 MB * 6.5 ranks * 7/8 / 154 GB/s.

    >>> from mofa.cost.kernels.token_spread import token_spread
    >>> group = ProcessGroup(size=np.array(16), ranks_per_domain=np.array(8), ranks_per_node=np.array(8))
    >>> spread = token_spread(group, num_experts=256, top_k=8)
    >>> time = deepep_time(4096 * 7168.0, group, Fabric(154e9, 154e9, 44e9, 44e9), spread)
    >>> print(f"{time.intra_s:.4f} {time.inter_s:.4f}")
    0.0011 0.0007
    """
    k = group.ranks_per_domain
    payload = np.asarray(payload_bytes) * imbalance
    rate = fabric.intra_deepep_bytes_per_s or fabric.intra_all_to_all_bytes_per_s
    intra = payload * spread.ranks * (k - 1) / k / rate
    inter = np.where(group.crosses_domains, payload * spread.remote_domains / fabric.inter_all_to_all_bytes_per_s, 0.0)
    each = payload * spread.remote_domains / np.maximum(group.size - k, 1)  # what a rank beyond the domain gets
    inter = all_to_all_s_on_shared_links(inter, each, group, fabric.above)
    latency = fabric.intra_latency_s + np.where(group.crosses_domains, fabric.inter_latency_s, 0.0)
    total_s = fabric.startup_s + latency + np.maximum(intra, inter)
    return _called(payload_bytes, group, total_s, intra, inter)


def _ring_loads(
    sent_bytes: ArrayK, group: ProcessGroup, intra_bytes_per_s: FloatK, fabric: Fabric
) -> tuple[ArrayK, ArrayK]:
    """Seconds that a GPU's link and its NIC share are busy when rings carry ``sent_bytes`` out of every rank, which is
    what they carry out of a domain as well."""
    k = group.ranks_per_domain
    inside = np.where(group.crosses_domains, (k - 1) / k, 1.0)
    intra = sent_bytes * inside / intra_bytes_per_s
    rate = np.minimum(k * fabric.inter_bytes_per_s, fabric.communicator_bytes_per_s)
    inter = np.where(group.crosses_domains, sent_bytes / rate, 0.0)
    if fabric.bridge is not None:
        intra = ring_s_on_bridges(intra, sent_bytes, group, fabric.bridge)
    return ring_s_on_shared_links(intra, sent_bytes, group, fabric.in_node), ring_s_on_shared_links(
        inter, sent_bytes, group, fabric.above
    )


def _called(
    payload_bytes: FloatK, group: ProcessGroup, total_s: ArrayK, intra_s: ArrayK, inter_s: ArrayK
) -> CollectiveTime:
    """The time where there is anyone to send to and anything to send; else there are no bytes."""
    called = (group.size > 1) & (np.asarray(payload_bytes) > 0)
    return CollectiveTime(np.where(called, total_s, 0.0), intra_s, inter_s)
