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
from mofa.cost.kernels.shared_links import (
    Bridge,
    SharedLevel,
    all_to_all_shared_s,
    bridge_of,
    bridged_ring_s,
    hop_shared_s,
    mesh_share,
    node_levels,
    ring_shared_s,
    tier_levels,
)
from mofa.cost.kernels.topology import Group
from mofa.specs.curves import CollectiveForm
from mofa.specs.hardware import ClusterSpec

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
    in_node: tuple[SharedLevel, ...] = ()
    """Links that blocks of a node's GPUs share."""
    above: tuple[SharedLevel, ...] = ()
    """Tiers of the network."""
    bridge: Bridge | None = None
    mesh_gpus: int = 0
    """GPUs of a domain whose every two have a link of their own; 0 where a switch joins them."""
    relays: bool = False
    """Whether messages to GPUs of another number are relayed inside the domain first."""
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
            in_node=node_levels(cluster.node),
            above=tier_levels(cluster.node, share),
            bridge=bridge_of(cluster.node),
            mesh_gpus=cluster.node.gpus_per_domain if intra.is_mesh else 0,
            relays=bool(nic.rail_optimised) and intra.relays,
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


@dataclass(frozen=True, slots=True)
class TokenSpread:
    """Where the copies of a token go, on average over tokens. (K,)"""

    remote_domains: FloatK
    """Distinct fast domains other than the token's own. [-]"""
    ranks: FloatK
    """Distinct ranks, the token's own included where it is one. [-]"""


def collective_s(
    kind: CollectiveKind,
    payload_bytes: FloatK,
    group: Group,
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
    See :func:`ring_time`, :func:`all_reduce_time`, :func:`all_to_all_time`, :func:`hop_time` and :func:`deepep_time`.
    All groups of a kind are assumed to be active at once, so that each GPU has its own share of the node's NICs, and k
    ranks of a group in one node drive k shares.
    """
    fabric = cluster if isinstance(cluster, Fabric) else Fabric.from_cluster(cluster)
    return collective_time(kind, payload_bytes, group, fabric, imbalance=imbalance, spread=spread).total_s


def collective_time(
    kind: CollectiveKind,
    payload_bytes: FloatK,
    group: Group,
    fabric: Fabric,
    *,
    imbalance: FloatK = 1.0,
    spread: TokenSpread | None = None,
) -> CollectiveTime:
    """As :func:`collective_s`, with the seconds that each level of the network is busy.

    Inside a domain a collective that was measured takes its fitted form's time, of the group size that is nearest from
    below; a larger group than any measured one is an extrapolation: same bus bandwidth, more steps to start.
    """
    time = _modelled_time(kind, payload_bytes, group, fabric, imbalance, spread)
    sizes = fabric.measured.get(kind)
    if not sizes:
        return time
    inside = ~np.asarray(group.crosses_domains) & (np.asarray(group.size) > 1)
    if not np.any(inside):
        return time
    payload = np.asarray(payload_bytes, dtype=np.float64) * (imbalance if kind == "all_to_all" else 1.0)
    if kind == "all_reduce":
        payload = payload / _in_switch(group, fabric)
    total = time.total_s
    for p in sorted(set(np.asarray(group.size)[inside].tolist())):
        near = reduce(lambda best, g: g if g <= p else best, sorted(sizes))
        at_size = inside & (group.size == p) & (payload > 0)
        size = 2 if kind == "send_recv" else int(p)
        total = np.where(at_size, fitted_forms.collective_s(payload, kind, sizes[near], group=size), total)
    return replace(time, total_s=total)


def _modelled_time(
    kind: CollectiveKind, payload_bytes: FloatK, group: Group, fabric: Fabric, imbalance: FloatK,
    spread: TokenSpread | None,
) -> CollectiveTime:  # fmt: skip
    """The time by the rates and latencies of the links."""
    if kind in ("all_gather", "reduce_scatter"):
        return ring_time(payload_bytes, group, fabric)
    if kind == "all_reduce":
        return all_reduce_time(payload_bytes, group, fabric)
    if kind == "all_to_all":
        return all_to_all_time(payload_bytes, group, fabric, imbalance)
    if kind == "send_recv":
        return hop_time(payload_bytes, group, fabric)
    if spread is None:
        raise ValueError("deepep: needs spread, the places that copies of a token go to; give token_spread(...)")
    return deepep_time(payload_bytes, group, fabric, spread, imbalance)


def ring_time(payload_bytes: FloatK, group: Group, fabric: Fabric) -> CollectiveTime:
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
    >>> group = Group(size=np.array([1, 8, 16]), ranks_per_domain=inside, ranks_per_node=inside)
    >>> ring_time(8e9, group, fabric).total_s
    array([0.     , 0.0175 , 0.01875])
    """
    p = group.size
    sent = np.asarray(payload_bytes) * (p - 1) / p
    intra, inter = _ring_loads(sent, group, fabric.intra_bytes_per_s * mesh_share(group, fabric.mesh_gpus), fabric)
    crossings = group.num_domains - 1
    step_s: FloatK = fabric.intra_latency_s
    if fabric.bridge is not None:
        step_s = fabric.bridge.step_s(group, step_s)
    latency = crossings * fabric.inter_latency_s + (p - 1 - crossings) * step_s
    return _called(payload_bytes, group, fabric.startup_s + latency, intra, inter)


def all_reduce_time(payload_bytes: FloatK, group: Group, fabric: Fabric) -> CollectiveTime:
    """One all-reduce: a reduce-scatter and an all-gather, or trees where the message is small.

    Notes
    -----
    Bytes as two passes of :func:`ring_time`, those inside one domain divided by the in-switch factor. Latency is the
    lesser of two rings' and of a double binary tree's, ``2 * (ceil(log2 g) * latency_inter + ceil(log2 k) *
    latency_intra)``: NCCL chooses trees (or NVLS) for small messages, and its trees keep the ring's bandwidth. Across
    domains the in-switch factor is credited to the part inside them only.

    References
    ----------
    Sanders, Speck, Träff (2009), "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
    doi:10.1016/j.parco.2009.09.001.

    Examples
    --------
    >>> fabric = Fabric(400e9, 400e9, 50e9, 50e9)
    >>> group = Group(size=np.array([8, 16]), ranks_per_domain=np.array([8, 8]), ranks_per_node=np.array([8, 8]))
    >>> all_reduce_time(8e9, group, fabric).total_s
    array([0.035 , 0.0375])
    """
    p, k, g = group.size, group.ranks_per_domain, group.num_domains
    sent = 2.0 * np.asarray(payload_bytes) * (p - 1) / p
    rate = fabric.intra_bytes_per_s * _in_switch(group, fabric) * mesh_share(group, fabric.mesh_gpus)
    intra, inter = _ring_loads(sent, group, rate, fabric)
    ring = 2 * ((g - 1) * fabric.inter_latency_s + (p - g) * fabric.intra_latency_s)
    tree = 2 * (np.ceil(np.log2(g)) * fabric.inter_latency_s + np.ceil(np.log2(k)) * fabric.intra_latency_s)
    return _called(payload_bytes, group, fabric.startup_s + np.minimum(ring, tree), intra, inter)


def _in_switch(group: Group, fabric: Fabric) -> ArrayK:
    """How much in-switch reduction speeds up all-reduce: not at all where a communicator has two ranks or fewer in a
    domain, since NCCL leaves NVLS out there (``ncclNvlsInit``). (K,) [-]"""
    return np.where(np.asarray(group.ranks_per_domain) > MOST_WITHOUT_NVLS, fabric.nvls_factor, 1.0)


def all_to_all_time(payload_bytes: FloatK, group: Group, fabric: Fabric, imbalance: FloatK = 1.0) -> CollectiveTime:
    """One all-to-all as NCCL makes it, of grouped sends and receives.

    Notes
    -----
    Of the ``payload`` that a rank sends, ``1/p`` stays, ``(k-1)/p`` goes to its domain and ``(p-k)/p`` through its NIC
    share, at once: ``startup + max((k-1) * latency_intra + intra, (p-k) * latency_inter + inter)``. The busiest rank's
    bytes are ``imbalance`` times the mean, on both paths. Assumes uniform destinations otherwise, and no relay through
    the domain (NCCL's PXN), which would join messages but send the same bytes; on a rail-optimised fabric what goes to
    GPUs of another number, ``(k-1)/k`` of what leaves, is relayed over the domain's link besides.

    Examples
    --------
    8 GB a rank: 7/8 at 400 GB/s inside 8 ranks; over two nodes half of it leaves at 50 GB/s.

    >>> fabric = Fabric(400e9, 400e9, 50e9, 50e9)
    >>> group = Group(size=np.array([8, 16]), ranks_per_domain=np.array([8, 8]), ranks_per_node=np.array([8, 8]))
    >>> all_to_all_time(8e9, group, fabric).total_s
    array([0.0175, 0.08  ])
    """
    p, k = group.size, group.ranks_per_domain
    part = np.asarray(payload_bytes) * imbalance / p
    relayed = part * (p - k) * (k - 1) / k if fabric.relays else 0.0
    intra = (part * (k - 1) + relayed) / (fabric.intra_all_to_all_bytes_per_s * mesh_share(group, fabric.mesh_gpus))
    inter = part * (p - k) / fabric.inter_all_to_all_bytes_per_s
    intra = all_to_all_shared_s(intra, part, group, fabric.in_node, fabric.bridge)
    inter = all_to_all_shared_s(inter, part, group, fabric.above)
    near, far = (k - 1) * fabric.intra_latency_s + intra, (p - k) * fabric.inter_latency_s + inter
    latency = np.maximum(near, far) - np.maximum(intra, inter)
    return _called(payload_bytes, group, fabric.startup_s + latency, intra, inter)


def hop_time(payload_bytes: FloatK, group: Group, fabric: Fabric) -> CollectiveTime:
    """One message to the next rank of the group: a pipeline stage, a step of ring attention.

    Notes
    -----
    ``startup + latency + payload / bandwidth``, through the NIC where any hop of the group leaves its domain: the
    slowest hop sets the pace of a pipeline or a ring. Both directions of a link are used at once without slowing.

    Examples
    --------
    >>> fabric = Fabric(400e9, 400e9, 50e9, 50e9)
    >>> group = Group(size=np.array([2, 2]), ranks_per_domain=np.array([2, 1]), ranks_per_node=np.array([2, 1]))
    >>> hop_time(1e9, group, fabric).total_s
    array([0.0025, 0.02  ])
    """
    payload = np.asarray(payload_bytes, dtype=np.float64)
    inside, spans = (group.size > 1) & ~group.crosses_domains, group.crosses_domains
    one_link = fabric.intra_bytes_per_s / max(fabric.mesh_gpus - 1, 1)
    intra = np.where(inside, payload / one_link, 0.0)
    inter = np.where(spans, payload / min(fabric.inter_bytes_per_s, fabric.communicator_bytes_per_s), 0.0)
    intra, inter = (
        hop_shared_s(intra, payload, group, fabric.in_node),
        hop_shared_s(inter, payload, group, fabric.above),
    )
    near_s: FloatK = fabric.intra_latency_s
    if fabric.bridge is not None:
        intra = np.where(fabric.bridge.holds(group), payload / fabric.bridge.bytes_per_s, intra)
        near_s = fabric.bridge.step_s(group, fabric.intra_latency_s)
    latency = np.where(spans, fabric.inter_latency_s, near_s)
    return _called(payload, group, fabric.startup_s + latency, intra, inter)


def deepep_time(
    payload_bytes: FloatK, group: Group, fabric: Fabric, spread: TokenSpread, imbalance: FloatK = 1.0
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

    >>> group = Group(size=np.array(16), ranks_per_domain=np.array(8), ranks_per_node=np.array(8))
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
    inter = all_to_all_shared_s(inter, each, group, fabric.above)
    latency = fabric.intra_latency_s + np.where(group.crosses_domains, fabric.inter_latency_s, 0.0)
    return _called(payload_bytes, group, fabric.startup_s + latency, intra, inter)


def token_spread(
    group: Group, *, num_experts: int, top_k: int, num_groups: int = 1, top_groups: int = 1
) -> TokenSpread:
    """Distinct places that a token's copies go to, under uniform routing.

    Parameters
    ----------
    group
        The expert-parallel group; it holds the experts in order, the same number on every rank.
    num_experts, top_k
        Routed experts, and how many of them a token takes.
    num_groups, top_groups
        Node-limited routing: experts lie in ``num_groups`` equal groups, a token takes experts of ``top_groups`` only.

    Notes
    -----
    A place with e experts is missed with the hypergeometric probability of drawing none of its experts: of
    ``n = num_experts * top_groups / num_groups`` eligible ones, ``prod_{i<top_k} (n - e - i) / (n - i)``. How many of
    the place's own expert groups are eligible is hypergeometric in turn; a place smaller than an expert group is
    eligible with probability ``top_groups / num_groups``. Places that cut an expert group are counted by the whole
    groups they hold. The expected number of distinct places is their number times the chance to be hit. Real routers
    are less even, which hits fewer places.

    References
    ----------
    DeepSeek-V3, arXiv 2412.19437, section 2.1.2: at most 4 nodes a token.

    Examples
    --------
    DeepSeek-V3 over 8 nodes: each holds one expert group, 4 of 8 are eligible, its 8 experts fall into 3.64 of them.

    >>> group = Group(size=np.array(64), ranks_per_domain=np.array(8), ranks_per_node=np.array(8))
    >>> spread = token_spread(group, num_experts=256, top_k=8, num_groups=8, top_groups=4)
    >>> print(f"{spread.remote_domains:.2f} {spread.ranks:.2f}")
    3.18 7.36
    """
    per_rank = num_experts / group.size
    rank_hit = _hit_probability(per_rank, num_experts, top_k, num_groups, top_groups)
    domain_hit = _hit_probability(
        np.minimum(per_rank * group.ranks_per_domain, num_experts), num_experts, top_k, num_groups, top_groups
    )
    return TokenSpread(remote_domains=(group.num_domains - 1) * domain_hit, ranks=group.size * rank_hit)


def _hit_probability(num_held: ArrayK, num_experts: int, top_k: int, num_groups: int, top_groups: int) -> ArrayK:
    """Chance that any of a token's experts is among the ``num_held`` ones of a place."""
    per_group = num_experts / num_groups
    eligible = per_group * top_groups
    whole_groups = np.maximum(np.floor(num_held / per_group + 1e-9), 1.0)
    in_each = np.minimum(num_held, per_group)
    hit = np.zeros_like(np.asarray(num_held, dtype=np.float64))
    for chosen in range(1, top_groups + 1):
        missed = np.ones_like(hit)
        for i in range(top_k):
            missed = missed * np.maximum(eligible - chosen * in_each - i, 0.0) / max(eligible - i, 1.0)
        hit = hit + _hypergeometric(chosen, num_groups, whole_groups, top_groups) * (1.0 - missed)
    return hit


def _hypergeometric(chosen: int, total: int, marked: ArrayK, draws: int) -> ArrayK:
    """Chance that ``draws`` of ``total`` things, without replacement, hold exactly ``chosen`` of the ``marked``."""
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, total + 1)))])

    def log_choose(n: NDArray[np.int64], k: int) -> ArrayK:
        m = np.clip(n, k, total)
        return np.asarray(log_factorial[m] - log_factorial[k] - log_factorial[m - k])

    m = np.asarray(marked).astype(np.int64)
    rest = draws - chosen
    possible = (m >= chosen) & (total - m >= rest)
    log_draws = log_factorial[total] - log_factorial[draws] - log_factorial[total - draws]
    return np.where(possible, np.exp(log_choose(m, chosen) + log_choose(total - m, rest) - log_draws), 0.0)


def _ring_loads(sent_bytes: ArrayK, group: Group, intra_bytes_per_s: FloatK, fabric: Fabric) -> tuple[ArrayK, ArrayK]:
    """Seconds that a GPU's link and its NIC share are busy when rings carry ``sent_bytes`` out of every rank, which is
    what they carry out of a domain as well."""
    k = group.ranks_per_domain
    inside = np.where(group.crosses_domains, (k - 1) / k, 1.0)
    intra = sent_bytes * inside / intra_bytes_per_s
    rate = np.minimum(k * fabric.inter_bytes_per_s, fabric.communicator_bytes_per_s)
    inter = np.where(group.crosses_domains, sent_bytes / rate, 0.0)
    if fabric.bridge is not None:
        intra = bridged_ring_s(intra, sent_bytes, group, fabric.bridge)
    return ring_shared_s(intra, sent_bytes, group, fabric.in_node), ring_shared_s(
        inter, sent_bytes, group, fabric.above
    )


def _called(payload_bytes: FloatK, group: Group, start_s: ArrayK, intra_s: ArrayK, inter_s: ArrayK) -> CollectiveTime:
    """Start and bytes together, where there is anyone to send to and anything to send; else there are no bytes."""
    called = (group.size > 1) & (np.asarray(payload_bytes) > 0)
    return CollectiveTime(np.where(called, start_s + np.maximum(intra_s, inter_s), 0.0), intra_s, inter_s)
