"""Facts of the hardware: a GPU and its efficiency curves, a node of GPUs, a cluster of nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mofa.specs.base import (
    BytesFact,
    BytesPerSFact,
    CountFact,
    FlopsPerSFact,
    InSwitchFact,
    SecondsFact,
    ShareFact,
    SizeFact,
    SlowdownFact,
    Spec,
    WattsFact,
)
from mofa.specs.curves import CollectiveCurve, GemmFormat, GpuCurves, expected_max_normal, expected_max_uniform
from mofa.specs.host import HostIssueTimes, SmallLayerTime
from mofa.specs.links import BridgeSpec, NicSpec, SharedLinkSpec
from mofa.specs.links import LinkSpec as LinkSpec
from mofa.specs.peak_check import (
    CurveAgainstPeak,
    collectives_against_link,
    curves_far_below_peak,
    gpu_curves_against_peak,
    why_above_peak,
)
from mofa.specs.ranges import MAX_GPUS, Degree
from mofa.units import GIGA, TERA, format_bytes


class GpuSpec(Spec):
    """One GPU; for a dual-die package the package."""

    name: str
    peak_flops_per_s: dict[GemmFormat, FlopsPerSFact]
    """Dense peak rates per format."""
    memory_bytes: SizeFact
    """What the datasheet says."""
    capacity_bytes: SizeFact
    """What the driver leaves of it: the total that CUDA reports."""
    memory_bandwidth_bytes_per_s: BytesPerSFact
    num_sms: CountFact
    l2_bytes: BytesFact
    host_link_bytes_per_s: BytesPerSFact
    """Host to device, per GPU and per direction."""
    tdp_w: WattsFact
    context_bytes: BytesFact
    """Device memory of the CUDA context and the loaded kernels."""
    fp8_transposes: bool = True
    """Whether fp8 products want the summed dimension innermost in both operands, for which Transformer Engine makes
    transposed copies; from compute capability 10.0 on they take any layout (its pytorch/csrc/extensions/util.cpp,
    ``non_tn_fp8_gemm_supported``)."""
    fp8_recipes: tuple[Literal["delayed", "tensorwise", "blockwise", "mxfp8"], ...] = (
        "delayed", "tensorwise", "blockwise",
    )  # fmt: skip
    """How Transformer Engine can scale fp8 products on it: by blocks from compute capability 9.0 on
    (nvidia.github.io/TransformerEngine, support_matrix), by MXFP8's on 10.0 to 11.0 (its pytorch/quantization.py,
    ``_compute_mxfp8_support``)."""
    software: Literal["cuda", "rocm"] = "cuda"
    """What frameworks run on: ROCm of AMD's GPUs, with RCCL in NCCL's place."""
    curves: GpuCurves

    @model_validator(mode="after")
    def _check(self) -> Self:
        capacity, memory = self.capacity_bytes.value, self.memory_bytes.value
        if capacity > memory:
            raise ValueError(
                f"capacity_bytes ({format_bytes(capacity)}) must be at most memory_bytes ({format_bytes(memory)}); "
                "correct one of them (the GB of a datasheet's memory are GiB)"
            )
        passed = why_above_peak(self.curves_against_peak())
        if passed is not None:
            raise ValueError(
                f"{passed}; correct the fact, or write `like:` in place of curves, which rescales them (mofa new gpu)"
            )
        return self

    def curves_against_peak(self) -> Iterator[CurveAgainstPeak]:
        """What each curve reaches, beside its peak."""
        peaks: dict[str, float] = {format_: fact.value for format_, fact in self.peak_flops_per_s.items()}
        return gpu_curves_against_peak(self.curves, peaks, self.memory_bandwidth_bytes_per_s.value)

    @property
    def slow_curve_notes(self) -> tuple[str, ...]:
        """Curves that reach less than a tenth of their peak, a sentence each."""
        return tuple(
            f"{share.reached_peak_text('less than a tenth of')}: check that both are of {self.name}"
            for share in curves_far_below_peak(self.curves_against_peak())
        )


class CommunicatorMemorySpec(Spec):
    """Device memory that communicators hold."""

    library_bytes: BytesFact | None = None
    """Added once where a process makes a communicator at all; nothing where absent."""
    first_bytes: BytesFact
    """Added once where a process talks to another one at all."""
    first_send_bytes: BytesFact | None = None
    """Added once where a process sends directly; nothing where absent."""
    per_group_bytes: BytesFact
    """Every communicator of several ranks that runs collectives."""
    per_lone_group_bytes: BytesFact | None = None
    """One of a single rank; as one whose ranks are each in a fast domain of their own where absent."""
    per_sending_group_bytes: BytesFact | None = None
    """One that runs nothing but direct sends, besides its peers'; nothing where absent."""
    per_spanning_group_bytes: BytesFact | None = None
    """One whose ranks are in several fast domains, and several in each; as any other where absent."""
    per_remote_group_bytes: BytesFact | None = None
    """One whose ranks are each in a fast domain of their own; as any other where absent."""
    per_peer_bytes: BytesFact
    """Every peer inside the fast domain that a rank sends to directly (all-to-all, ring attention, pipelines)."""
    per_remote_peer_bytes: BytesFact
    """Every such peer outside it."""


class SlowNodesSpec(Spec):
    """Nodes that are slower than the others for as long as a job runs: throttled, mis-set or about to fail."""

    share: ShareFact
    """Of all nodes, each by itself. [-]"""
    slowdown: SlowdownFact
    """How much longer all kernels take on such a node. [-]"""


HostSharing = Literal["own", "shared", "slowest-shared"]


class NodeSpec(Spec):
    """A node and the fast domain that it belongs to."""

    name: str
    gpu: str
    gpus_per_node: Degree
    gpus_per_domain: Degree
    """GPUs that reach each other without the network between nodes: the node's own, or 72 for an NVL72 rack."""
    intra: LinkSpec
    """The link between them: NVLink, xGMI, or PCIe where a node has no fast domain."""
    bridge: BridgeSpec | None = None
    """A faster link over pairs or fours of them, where ``intra`` is not it."""
    shared: tuple[SharedLinkSpec, ...] = ()
    """PCIe switches and sockets whose GPUs share a way to the others, from the smallest."""
    nic: NicSpec
    host_memory_bytes: BytesFact
    communicators: CommunicatorMemorySpec
    nvls_factor: InSwitchFact
    """Speed-up of all-reduce inside a domain by in-switch reduction: 1 without. [-]"""
    hosts: HostSharing = "own"
    """Whether a job has its nodes' processors to itself, or they run other tenants' machines as well. Shared hosts are
    the profile's typical one and spread about it, as those that were measured; where the slowest of them is known, the
    profile's is that one. One's own has the pace that those reach while nobody disturbs them (``curves.hosts.fast``),
    and all of them alike."""
    slow_nodes: SlowNodesSpec | None = None
    """Slow ones among the nodes that a job gets; none where nobody has counted them."""
    collective_startup_s: SecondsFact
    """Start of every collective, whatever its size and group; the host's time to issue it is counted apart. [s]"""
    collectives: dict[
        Annotated[str, Field(pattern=r"^(all_gather|reduce_scatter|all_reduce|all_to_all|send_recv) \d+$")],
        CollectiveCurve,
    ] = {}
    """Measured inside a fast domain, keyed by the collective and its group size; what is not here follows the link."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.gpus_per_domain % self.gpus_per_node:
            raise ValueError(
                f"gpus_per_domain ({self.gpus_per_domain}) must be a multiple of gpus_per_node ({self.gpus_per_node})"
            )
        passed = why_above_peak(collectives_against_link(self.collectives, self.intra.bandwidth_bytes_per_s.value))
        if passed is not None:
            raise ValueError(f"{passed}; correct one of them")
        inside = [(f"shared[{i}].gpus", link.gpus) for i, link in enumerate(self.shared)]
        _check_nested([*inside, ("gpus_per_node", self.gpus_per_node)])
        if self.bridge is not None:
            _check_nested([("bridge.gpus", self.bridge.gpus), ("gpus_per_node", self.gpus_per_node)])
        above = [(f"nic.tiers[{i}].gpus", tier.gpus) for i, tier in enumerate(self.nic.tiers)]
        _check_nested([("gpus_per_domain", self.gpus_per_domain), *above])
        return self

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """GPUs of all blocks that share a link: bridges, switches, sockets, tiers."""
        bridges = () if self.bridge is None else (self.bridge.gpus,)
        sizes = (*bridges, *(link.gpus for link in self.shared), *(tier.gpus for tier in self.nic.tiers))
        return tuple(sorted(set(sizes)))


def _check_nested(blocks: Sequence[tuple[str, int]]) -> None:
    """Refuse blocks of which one is not whole ones of the block before."""
    for (inner, few), (outer, many) in pairwise(blocks):
        if many % few or (many == few and outer != "gpus_per_node"):
            raise ValueError(f"{outer} ({many}) must be a multiple of {inner} ({few}), so that they nest; correct one")


class ClusterSpec(Spec):
    """A number of GPUs in nodes of one type."""

    name: str
    gpu: GpuSpec
    node: NodeSpec
    num_gpus: Annotated[int, Field(ge=1, le=MAX_GPUS, strict=True)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        n = self.node.gpus_per_node
        if self.num_gpus > n and self.num_gpus % n:
            raise ValueError(
                f"gpus ({self.num_gpus}) is more than one node of {n} GPUs but not whole nodes; "
                f"use {self.num_gpus // n * n} or {(self.num_gpus // n + 1) * n}"
            )
        return self

    def __repr__(self) -> str:
        return f"ClusterSpec({self.num_gpus:,} x {self.gpu.name} in {self.name})"

    def __str__(self) -> str:
        gpu, links_s = self.gpu, (self.node.intra.bandwidth_bytes_per_s.value, self.nic_bandwidth_per_gpu_bytes_per_s)
        inside, between = (f"{bytes_per_s / GIGA:,.4g} GB/s" for bytes_per_s in links_s)
        peaks = ", ".join(f"{peak.value / TERA:,.4g} TFLOP/s {name}" for name, peak in gpu.peak_flops_per_s.items())
        bandwidth = f"{gpu.memory_bandwidth_bytes_per_s.value / TERA:.4g} TB/s"
        return "\n".join([
            f"cluster   {self.name}: {self.num_gpus:,} x {gpu.name}, {self.node.gpus_per_node} a node",
            f"peaks     {peaks} a GPU",
            f"memory    {format_bytes(gpu.memory_bytes.value)} a GPU, {bandwidth}",
            f"links     {inside} a GPU inside a node, {between} between nodes, one way",
        ])  # fmt: skip

    def with_host_speed(
        self, op_s: float | HostIssueTimes | None, source: str = "the run's host", layer: SmallLayerTime | None = None
    ) -> Self:
        """The same GPUs under a host that issues one small eager op in ``op_s``, or a host's own profile; None leaves
        that of the GPU. [s]

        Modules of Transformer Engine go by what a ``layer`` of it takes there, where that was timed.
        """
        if op_s is None:
            return self
        curves = self.gpu.curves
        host = op_s if isinstance(op_s, HostIssueTimes) else curves.host.scaled_to_speed(op_s, source, layer)
        slower = curves.model_copy(update={"host": host, "hosts": None})
        return self.model_copy(update={"gpu": self.gpu.model_copy(update={"curves": slower})})

    def on_hosts(self, hosts: HostSharing) -> Self:
        """The same GPUs in nodes whose processors are a job's own or not."""
        return self.model_copy(update={"node": self.node.model_copy(update={"hosts": hosts})})

    def with_pytorch_release_kernels(self, release: str) -> Self:
        """The same GPUs under the kernels of a release of PyTorch, where they were measured; empty leaves them."""
        curves = self.gpu.curves.with_pytorch_release_kernels(release)
        if curves is self.gpu.curves:
            return self
        return self.model_copy(update={"gpu": self.gpu.model_copy(update={"curves": curves})})

    @property
    def slowest_host_factor(self) -> float:
        """How much longer the slowest of all ranks' hosts takes than the profile's: the others wait for it. [-]

        Hosts of one's own are equally fast. Of shared ones the slowest counts: ranks meet in collectives and, once a
        step at least, at the gradients' norm. Which host is slow changes from run to run, and within a step little:
        from one pass to the other, as each has a thread of its own. Hosts are taken to be spread evenly between a
        fastest and a slowest, so that of thousands none is much slower than of tens:
        ``1 + spread * sqrt(3) * (n - 1) / (n + 1)``.
        """
        if self.node.hosts == "own":
            return 1.0 if self.gpu.curves.hosts is None else self.gpu.curves.hosts.fast.value
        spread = self.gpu.curves.host_spread if self.node.hosts == "shared" else None
        return 1.0 if spread is None else 1.0 + spread.value * expected_max_uniform(self.num_gpus)

    def meeting_hosts_factor(self, num: int) -> float:
        """How much longer hosts take whose ranks meet at reads within every layer, over the slowest of them. [-]

        Which host is slow changes from one read to the next, and all wait there for whichever is. Hosts of one's own
        are alike at any time.
        """
        swing = None if self.node.hosts == "own" else self.gpu.curves.host_swing
        return 1.0 if swing is None else 1.0 + swing.value * expected_max_normal(num)

    def slowest_over_fastest_host(self, num: int) -> float:
        """How much longer the slowest of ``num`` hosts takes than the fastest, as :attr:`slowest_host_factor` has them
        spread; 1 where they are a job's own. Three times at most: beyond half the mean to either side the normal tail
        that the spread is of says nothing (assumed). [-]"""
        spread = self.gpu.curves.host_spread
        if self.node.hosts == "own" or spread is None or num < 2:
            return 1.0
        spread_share = min(spread.value * expected_max_uniform(num), 0.5)
        return (1.0 + spread_share) / (1.0 - spread_share)

    @property
    def sync_s(self) -> float:
        """A host synchronisation, from the device's end to the host's next issue, on the slowest host. [s]"""
        return self.slowest_host_factor * self.gpu.curves.host.sync_s.value

    @property
    def nic_bandwidth_per_gpu_bytes_per_s(self) -> float:
        """A GPU's share of its node's NICs. [B/s]"""
        nic = self.node.nic
        return nic.num_per_node * nic.bandwidth_bytes_per_s.value / self.node.gpus_per_node
