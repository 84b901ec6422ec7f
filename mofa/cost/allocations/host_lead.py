"""A host's lead over its device, by which what PyTorch's pipelines sent comes back late.

NCCL's sends use their tensors on a stream of their own, which the allocator is told of (``recordStream``): memory that
is let go comes back only once the device has got that far, and the host is ahead of it by up to as many launches as
the device's queue takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from mofa.cost.allocations.block_trace import BlockTrace
from mofa.cost.allocations.watchdog import BlockPassTime
from mofa.cost.block.costs import BlockCost
from mofa.cost.block.host_clock import NEVER
from mofa.cost.kernels.launch_queue import QUEUE
from mofa.specs.hardware import ClusterSpec


def launches_by_computation_kind(chunk: Sequence[BlockTrace]) -> dict[str, float]:
    """Kernels of each kind of computation of a chunk. [-]"""
    forward, inputs, weights = (sum(trace.launches[part] for trace in chunk) for part in range(3))
    return {"F": forward, "B": inputs + weights, "I": inputs, "W": weights}


def device_over_host_time(costs: Sequence[BlockCost], combination: int = 0) -> float:
    """What the device takes for forwards and backwards by what the host does; 0 where the host waits in one. [-]"""
    clocks = [phase.clocks[:, combination] for cost in costs for phase in (cost.forward, cost.backward)]
    if not clocks or max(float(clock[2]) for clock in clocks) > NEVER / 2:
        return 0.0
    return float(sum(clock[0] for clock in clocks) / max(sum(clock[3] for clock in clocks), 1e-9))


def forward_and_backward_pass_times(cost: BlockCost, combination: int = 0) -> tuple[BlockPassTime, BlockPassTime]:
    """What device and host take for a block's forward, and for its backward."""
    forward, backward = (
        BlockPassTime(
            float(phase.clocks[0, combination]),
            float(phase.clocks[3, combination]),
            bool(phase.clocks[2, combination] > NEVER / 2),
            float(to_host_s[combination]),
        )
        for phase, to_host_s in ((cost.forward, cost.copies_to_host_s), (cost.backward, 0.0 * cost.copies_to_host_s))
    )
    return forward, backward


def pass_times_of_fastest_peer(
    times: tuple[BlockPassTime, BlockPassTime], cluster: ClusterSpec, ranks: int
) -> tuple[BlockPassTime, BlockPassTime]:
    """Times of device and host, of the fastest of so many hosts whose devices exchange tensors in each layer.

    Its device waits for its peers, and so for their hosts: a pass takes it no less than the slowest host
    (:meth:`mofa.specs.hardware.ClusterSpec.slowest_over_fastest_host`). Only at a step's end do hosts meet.
    """
    slowest_by_fastest = cluster.slowest_over_fastest_host(ranks)
    forward, backward = (
        block_time._replace(device_s=max(block_time.device_s, block_time.host_s * slowest_by_fastest))
        for block_time in times
    )
    return forward, backward


def host_lead_launches(launched: float, ratio: float) -> float:
    """Launches that the host is ahead of its device after as many of a step. [-]

    As many more as the device is slower, up to the queue's; ``ratio`` is of :func:`device_over_host_time`.
    """
    return min(launched * (ratio - 1.0), QUEUE) if ratio > 1.0 else 0.0
