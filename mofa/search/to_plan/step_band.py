"""The band of a step: where 8 of 10 would lie, by residuals of similar runs and the spread of hosts."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, expm1
from typing import NamedTuple

from mofa.cost.model_flops import routed_flops_share
from mofa.plan.step_band import Band
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.residuals import ALL, Circumstances, load_residuals
from mofa.specs.workload import WorkloadSpec

HOST_BOUND = 0.02
"""Share of a step that a device waits for its host, from which the step counts as host-bound. [-]"""
MOST_EXPERTS = 0.5
"""Share of a model's FLOPs in routed experts from which it counts as mostly experts. [-]"""


def step_circumstances(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, host_idle_fraction: float
) -> Circumstances:
    """Circumstances of a step on which its residual depends.

    Parameters
    ----------
    host_idle_fraction
        Share of the step that the device waits for its host. [-]
    """
    share = routed_flops_share(workload.model, workload.batch.seq_len)
    mostly = "experts half or more" if share >= MOST_EXPERTS else "experts below half"
    return Circumstances(
        nodes="one node" if num_cluster_nodes(cluster) == 1 else "several nodes",
        layers=framework.owner_of_layer_modules,
        products="bf16" if workload.precision.gemm == "bf16" else "fp8",
        experts=mostly if share > 0 else "dense",
        pace="host-bound" if host_idle_fraction > HOST_BOUND else "device-bound",
    )


def num_cluster_nodes(cluster: ClusterSpec) -> int:
    """Number of nodes of a cluster, the last one perhaps in part. [-]"""
    return -(-cluster.num_gpus // cluster.node.gpus_per_node)


def step_band(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, step_s: float, host_idle_s: float,
    on_host: Callable[[ClusterSpec], float],
) -> Band:  # fmt: skip
    """The band of a step.

    It comes from the residuals of the narrowest group of runs to which the step belongs (:mod:`mofa.validate.bands`).
    For an unknown host, the lower end starts from the step on a fast host, the upper from that on a slow one
    (``curves.hosts``). A step with unmeasured parts has the smallest and the largest residual of all runs.

    Parameters
    ----------
    step_s, host_idle_s
        The predicted step, and the time in it that the device waits for its host. [s]
    on_host
        Gives the step in closed form on a cluster with another host. [s]
    """
    circumstances = step_circumstances(workload, cluster, framework, host_idle_s / step_s)
    known = load_residuals().step
    unmeasured = known.unmeasured_text(
        circumstances, gpu=cluster.gpu.name, framework=framework.name, nodes=num_cluster_nodes(cluster)
    )
    group = known.narrowest_group_of_circumstances(circumstances)
    low, high = group.low.value, group.high.value
    if unmeasured:
        group, low, high = known.narrowest_group_of_path(ALL), known.unmeasured_low.value, known.unmeasured_high.value
    hosts_s = _hosts_s(cluster, step_s, on_host)
    fast_s, slow_s = hosts_s or (step_s, step_s)
    difference = known.pair_difference.get(circumstances.pace)
    return Band(
        low_s=fast_s * exp(low), high_s=slow_s * exp(high), circumstances=circumstances, group=group.path,
        runs=group.runs, families=group.families, few=group.few and not unmeasured, unmeasured=unmeasured,
        tie_margin=None if difference is None else expm1(difference.value), hosts_s=hosts_s,
    )  # fmt: skip


def _hosts_s(
    cluster: ClusterSpec, step_s: float, on_host: Callable[[ClusterSpec], float]
) -> tuple[float, float] | None:
    """The step on a fast and on a slow host, scaled as in closed form; None where the host is known. [s]"""
    others = cluster_with_fast_and_slow_host(cluster)
    if others is None:
        return None
    typical_s = on_host(cluster)
    fast_s, slow_s = map(on_host, others)
    return step_s * min(fast_s / typical_s, 1.0), step_s * max(slow_s / typical_s, 1.0)


class _OtherHosts(NamedTuple):
    """A cluster, and the same with fast and with slow hosts; None where its host is known."""

    cluster: ClusterSpec
    fast_and_slow: tuple[ClusterSpec, ClusterSpec] | None


_last: list[_OtherHosts] = []
"""Those of the last cluster asked for: all plans of a search have one."""


def cluster_with_fast_and_slow_host(cluster: ClusterSpec) -> tuple[ClusterSpec, ClusterSpec] | None:
    """The cluster with fast and with slow hosts; None where its host is known."""
    if not _last or _last[0].cluster is not cluster:
        hosts, own_s = cluster.gpu.curves.hosts, cluster.gpu.curves.host.eager_op_s.value
        fast_and_slow = None
        if hosts is not None:
            fast_and_slow = (
                cluster.with_host_speed(hosts.fast.value * own_s),
                cluster.with_host_speed(hosts.slow.value * own_s),
            )
        _last[:] = [_OtherHosts(cluster, fast_and_slow)]
    return _last[0].fast_and_slow
