"""What computing loses beside communication: NCCL holds multiprocessors, and moves bytes as fast as its links do."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.work import CollectiveKind
from mofa.cost.kernels.between_nodes import channels_of_collectives, channels_per_peer
from mofa.cost.kernels.collectives import Fabric
from mofa.cost.kernels.topology import ProcessGroup
from mofa.specs.curves import GpuCurves

ArrayK = NDArray[np.float64]
CHANNELS_INSIDE = 24
"""Of NCCL 2.18 to 2.28 inside a node of H100s or H200s (docs/evidence/published_runs.md). [-]"""


def collective_slowdown(
    curves: GpuCurves, group: ProcessGroup, fabric: Fabric, kind: CollectiveKind = "reduce_scatter"
) -> ArrayK:
    """Seconds that computing loses per second of a collective of the group beside it. (K,) [-]

    Inside a domain it is what layers were measured to lose beside NCCL's. Between domains NCCL's channels hold a
    multiprocessor each; what they copy for a port costs nothing besides (``measurements/h200-1gpu-held``). But rings
    pass through all ranks of a domain: each sends one ring's bytes by its port, and the others' to its neighbours. What
    a ring inside the domain costs beyond its channels is cost in proportion to the rate of these. An all-to-all has no
    ring: what it sends beyond the domain passes no other rank of it, but for the one whose port it takes.
    """
    if kind == "all_to_all":
        return _slowdown(curves, group, channels_of_collectives(group.ranks_per_domain), 0.0)
    others = group.ranks_per_domain - 1
    beside_port = np.minimum(others * fabric.inter_bytes_per_s, fabric.communicator_bytes_per_s)
    channels = channels_of_collectives(group.ranks_per_domain)
    return _slowdown(curves, group, channels, np.minimum(beside_port / fabric.intra_bytes_per_s, 1.0))


def send_slowdown(curves: GpuCurves, group: ProcessGroup) -> ArrayK:
    """The same beside sends to and receives from the neighbours in the group. (K,) [-]

    A channel of NCCL sends and receives at once; between domains a peer has one or two.
    """
    return _slowdown(curves, group, channels_per_peer(group.size, group.ranks_per_domain), 0.0)


def _slowdown(
    curves: GpuCurves, group: ProcessGroup, channels: NDArray[np.int64], share_of_inside_rate: ArrayK | float
) -> ArrayK:
    inside, measured = curves.overlap_slowdown.value, curves.slowdown_by_held_multiprocessors
    if not measured or not group.crosses_domains.any():
        return np.full(np.shape(group.size), inside)
    numbers = sorted(measured)
    by_number = [measured[number].value for number in numbers]
    by_moving = max(inside - float(np.interp(CHANNELS_INSIDE, numbers, by_number)), 0.0)
    between = np.interp(channels, numbers, by_number) + by_moving * share_of_inside_rate
    return np.where(group.crosses_domains, between, inside)
