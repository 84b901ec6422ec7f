"""What computing loses beside communication: a collective holds multiprocessors, and inside a domain bandwidth too."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.cost.kernels.between_nodes import channels_of_collectives, channels_per_peer
from mofa.cost.kernels.topology import ProcessGroup
from mofa.specs.curves import GpuCurves

ArrayK = NDArray[np.float64]


def collective_slowdown(curves: GpuCurves, group: ProcessGroup) -> ArrayK:
    """Seconds that computing loses per second of a collective of the group beside it. (K,) [-]

    Inside a domain it is what layers were measured to lose beside NCCL's. Between domains the network sets the pace:
    NCCL's channels hold a multiprocessor each and wait, so that computing loses what it does beside so many held ones.
    """
    return _slowdown(curves, group, channels_of_collectives(group.ranks_per_domain))


def send_slowdown(curves: GpuCurves, group: ProcessGroup) -> ArrayK:
    """The same beside sends to and receives from the neighbours in the group. (K,) [-]

    A channel of NCCL sends and receives at once; between domains a peer has one or two.
    """
    return _slowdown(curves, group, channels_per_peer(group.size, group.ranks_per_domain))


def _slowdown(curves: GpuCurves, group: ProcessGroup, channels: NDArray[np.int64]) -> ArrayK:
    inside, by_number = curves.overlap_slowdown.value, curves.slowdown_by_held_multiprocessors
    if not by_number:
        return np.full(np.shape(group.size), inside)
    numbers = sorted(by_number)
    between = np.interp(channels, numbers, [by_number[number].value for number in numbers])
    return np.where(group.crosses_domains, between, inside)
