"""Links of a cluster: within a node, out of it, and what several GPUs share of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator

from mofa.specs.base import BytesPerSFact, CountFact, SecondsFact, ShareFact, Spec
from mofa.specs.ranges import Degree

ALSO_CALLED = {"ib": "infiniband", "rocev2": "roce", "roce v2": "roce", "roce-v2": "roce"}
"""What people also write for a protocol, in small letters."""


def _protocol(value: object) -> object:
    """A protocol as it is compared: ``RoCE`` and ``InfiniBand`` are how their makers write them.

    >>> _protocol("InfiniBand"), _protocol("RoCE v2"), _protocol("token ring")
    ('infiniband', 'roce', 'token ring')
    """
    return ALSO_CALLED.get(value.lower(), value.lower()) if isinstance(value, str) else value


class LinkSpec(Spec):
    """One level of the network, as one GPU sees it, in one direction."""

    name: str
    bandwidth_bytes_per_s: BytesPerSFact
    efficiency: ShareFact
    """Share of the bandwidth that large collectives reach (nccl-tests' bus bandwidth over the link's)."""
    all_to_all_efficiency: ShareFact
    """The same of NCCL's all-to-all."""
    latency_s: SecondsFact
    """Added per step of a ring or per message. [s]"""
    deepep_efficiency: ShareFact | None = None
    """The same of DeepEP's kernels, which run on a part of the multiprocessors; NCCL's all-to-all where absent."""
    relays: bool = True
    """Whether NCCL relays messages for another rail over it (PXN): over NVLink it does, over PCIe not."""
    is_mesh: bool = False
    """Whether the bandwidth is that of single links to each other GPU together, as xGMI's, and not a switch's: a group
    has those links alone that join its members."""


class BridgeSpec(LinkSpec):
    """A faster link that joins a few GPUs of a node, such as NVLink bridges over pairs of PCIe cards."""

    gpus: Degree
    """GPUs that a bridge joins, numbered one after the other: 2 of a pair."""


class SharedLinkSpec(Spec):
    """What the GPUs of a part of a node share on their way to its other GPUs: a PCIe switch's uplink, a socket's link
    to the other (NUMA)."""

    name: str
    gpus: Degree
    """GPUs that share it, numbered one after the other."""
    bandwidth_bytes_per_s: BytesPerSFact
    """Of all of them together, per direction."""


class SwitchTierSpec(Spec):
    """A level of the network's switches."""

    name: str
    gpus: Degree
    """GPUs that reach each other without leaving it: below a leaf, or of a rail-optimised group of leaves, or a pod."""
    oversubscription: CountFact
    """Bandwidth that comes into it from below over what leaves it upwards: 1 is non-blocking. That of the tiers below
    it comes on top. [-]"""


class NicSpec(Spec):
    """The node's network interfaces; a GPU's share follows from how many there are."""

    name: str
    num_per_node: Degree
    bandwidth_bytes_per_s: BytesPerSFact
    """Of one NIC, per direction."""
    efficiency: ShareFact
    all_to_all_efficiency: ShareFact
    latency_s: SecondsFact
    oversubscription: CountFact
    """Of the fabric above the NIC: 1 is non-blocking. All traffic between nodes has it; what leaves a tier see
    ``tiers``."""
    protocol: Annotated[Literal["infiniband", "roce", "ethernet"] | None, BeforeValidator(_protocol)] = None
    """What the network speaks, in any case; ``efficiency`` and ``latency_s`` say how well it does."""
    rail_optimised: bool | None = None
    """Whether GPUs of one number in their nodes share a leaf, so that messages to other numbers are relayed over the
    fast link first (NCCL's PXN) or, without one, cross the leaves' tier. None: not said, and nothing is relayed."""
    tiers: tuple[SwitchTierSpec, ...] = ()
    """Leaves, spines, pods, from below; a group's traffic crosses those that its ranks span."""
    communicator_bytes_per_s: BytesPerSFact | None = None
    """The most that the rings of one communicator carry out of a fast domain, per direction: where NCCL finds no path
    to several NICs and lays one ring. As many NICs as it has ranks there where absent."""

    def bandwidth_shares_above_tiers(self) -> Iterator[tuple[int, float]]:
        """GPUs of each tier, and what of their NICs' bandwidth leaves it. [GPUs, -]

        Examples
        --------
        >>> fact = {"provenance": "assumed", "source": "an example"}
        >>> tiers = [{"name": name, "gpus": gpus, "oversubscription": {"value": 2, **fact}}
        ...          for name, gpus in (("leaf", 256), ("spine", 2048))]
        >>> share, rate = {"value": 0.9, **fact}, {"value": "50 GB/s", **fact}
        >>> nic = NicSpec(name="x", num_per_node=8, bandwidth_bytes_per_s=rate, efficiency=share, tiers=tiers,
        ...               all_to_all_efficiency=share, latency_s={"value": "6 us", **fact},
        ...               oversubscription={"value": 1, **fact})
        >>> list(nic.bandwidth_shares_above_tiers())
        [(256, 0.5), (2048, 0.25)]
        """
        share = 1.0
        for tier in self.tiers:
            share /= tier.oversubscription.value
            yield tier.gpus, share
