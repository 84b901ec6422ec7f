"""What NCCL's collectives take between nodes, whatever the network: fitted to public measurements."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated

from pydantic import Field

from mofa.specs.base import BytesPerSFact, SecondsFact, ShareFact, Spec
from mofa.specs.files import data_dir, load_yaml
from mofa.specs.from_mapping import spec_from_mapping

FILE = "nccl.yaml"


class NcclProtocol(Spec):
    """One of NCCL's protocols (LL, LL128, Simple): what a step takes, and the share of the rates that it reaches."""

    name: str
    step_s: SecondsFact
    """Of a ring's or a chain's hop inside a fast domain. [s]"""
    hop_s: SecondsFact
    """Of a ring's hop between domains, beyond the network's latency. [s]"""
    tree_hop_s: SecondsFact
    """The same of a tree's level. [s]"""
    ring_share: ShareFact
    """Of the rate that large messages reach. [-]"""
    tree_share: ShareFact


class NcclNetwork(Spec):
    """What a kind of network was measured to be: of a cluster's own, ``mofa calibrate nccl`` tells."""

    latency_s: SecondsFact
    """Of a message of the LL protocol from a node to another. [s]"""
    efficiency: ShareFact
    """Share of the ports' rates that large collectives reach. [-]"""
    all_to_all_efficiency: ShareFact | None = None


class NcclBetweenNodes(Spec):
    """NCCL's collectives over several fast domains.

    ``nccl_version`` are those that the measured points name; :mod:`mofa.cost.kernels.between_nodes` has the model.
    """

    nccl_version: str
    start_s: SecondsFact
    """Of every collective, whatever its size. [s]"""
    protocols: Annotated[tuple[NcclProtocol, ...], Field(min_length=1, max_length=8)]
    nvls_tree_start_s: SecondsFact
    """What reducing in the switch adds to the start of an all-reduce in trees over nodes. [s]"""
    nvls_tree_hop_s: SecondsFact
    peer_s: SecondsFact
    """Of an all-to-all, for each rank beyond the domain, beyond the network's share. [s]"""
    channel_bytes_per_s: BytesPerSFact
    """What one channel of a send carries between nodes. [B/s]"""
    networks: dict[str, NcclNetwork]


@lru_cache(maxsize=1)
def load_nccl_facts() -> NcclBetweenNodes:
    """The bundled facts of NCCL's protocols and of its collectives between nodes.

    Examples
    --------
    >>> [protocol.name for protocol in load_nccl_facts().protocols]
    ['LL', 'LL128', 'Simple']
    """
    return spec_from_mapping(NcclBetweenNodes, load_yaml(data_dir("hardware_profiles") / FILE, FILE), FILE)
