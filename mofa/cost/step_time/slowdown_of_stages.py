"""What computing loses on a stage beside the collectives of data parallelism."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.cost.block.tape_clock import EXPOSED
from mofa.cost.kernels.collectives import collective_s
from mofa.cost.kernels.computing_slowdown import collective_slowdown
from mofa.cost.kernels.topology import stacked_groups
from mofa.cost.rank_rules import reduced_bytes_per_param
from mofa.cost.rows import GatheredRows
from mofa.cost.step_time.micro_batch import HostBoundPasses

ArrayN = NDArray[np.float64]


def slowdown_of_stages(rows: GatheredRows, group: str = "fsdp", *, host_ahead: bool = False) -> ArrayN:
    """What a stage loses per second of communication of a group beside it: nothing while it waits for another's, or for
    its host if that is not ahead. (n, R) [-]"""
    computing, total_s = rows.sum_layers_by_stage(rows.layers.computing_s), rows.layers.exposed_s
    if host_ahead:
        total_s = total_s - rows.layers.exposed_by_family_s[..., EXPOSED.index("host_idle")]
    total = np.maximum(rows.sum_layers_by_stage(total_s), 1e-12)
    return np.asarray(slowdown_of_always_computing_stage(rows, group)[:, None] * computing / total)


def slowdown_of_passes(
    rows: GatheredRows, host_bound: HostBoundPasses, passes_s: ArrayN, group: str = "fsdp"
) -> ArrayN:
    """As :func:`slowdown_of_stages`, of stages whose device waits for its host only in these passes. (late rows, R)"""
    index, layers = host_bound.rows, rows.layers
    on_device_s = (host_bound.forward.device_s + host_bound.backward.device_s)[:, :, 0]
    layers_s = rows.sum_layers_by_stage(layers.forward_clocks[..., 0] + layers.backward_clocks[..., 0])[index]
    computing_s = rows.sum_layers_by_stage(layers.computing_s)[index]
    total_s = np.maximum(layers_s + passes_s - on_device_s, 1e-12)
    return np.asarray(
        slowdown_of_always_computing_stage(rows, group)[index, None] * np.minimum(computing_s / total_s, 1.0)
    )


def slowdown_of_always_computing_stage(rows: GatheredRows, group: str = "fsdp") -> ArrayN:
    """What a stage that never waits loses of computing per second of a group's communication beside it. (n,) [-]

    Of what is sharded, dense and experts' groups count by what their reductions take.
    """
    curves, fabric = rows.cluster.gpu.curves, rows.costs.machine.network_fabric
    groups = [rows.groups[name] for name in (("fsdp", "efsdp") if group == "fsdp" else (group,))]
    slow = np.array([collective_slowdown(curves, each, fabric) for each in groups])
    if len(groups) > 1:
        nbytes = rows.params.sum(axis=(2, 3)) * reduced_bytes_per_param(rows)
        seconds = collective_s("reduce_scatter", nbytes, stacked_groups(groups), fabric)
        slow = slow * seconds / np.maximum(seconds.sum(axis=0), 1e-12)
    return np.asarray(slow.sum(axis=0)[rows.grid_index])
