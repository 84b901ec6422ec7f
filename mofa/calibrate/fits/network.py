"""A cluster's own network out of nccl-tests over several nodes: latency and the shares of the ports that are reached.

What NCCL does whatever the network (protocols, trees, channels) stays as public measurements have it
(hardware_profiles/nccl.yaml); docs/evidence/collectives_between_nodes.md says how far both hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mofa.cost.kernels.collectives import Fabric, collective_time
from mofa.cost.kernels.topology import ProcessGroup
from mofa.specs.hardware import ClusterSpec

if TYPE_CHECKING:
    from mofa.blocks.work import CollectiveKind

FloatN = NDArray[np.float64]
LEAST_BYTES = 16 * 1024
"""Smaller messages take what their launch takes. [B]"""
DRAW = 0.02
"""Weight of a factor of e away from the profile's facts, over that of an error of as much in one run: sizes that say
nothing of a fact leave it as it was. [-]"""
NOT_SQUARED = 0.05
"""Errors above it count by their size and not by its square: single outliers are common. [-]"""
LEAST_LATENCY_S, MOST_LATENCY_S = 1e-7, 1e-3
LEAST_SHARE, MOST_SHARE = 0.02, 1.5
"""Of the ports' rate; a share above 1 says that the profile's ports are slower than the cluster's. [-]"""


@dataclass(frozen=True)
class NetworkRun:
    """One collective over several nodes: payloads and times. (n,) [B, s]"""

    name: str
    kind: CollectiveKind
    group: ProcessGroup
    payload_bytes: FloatN
    time_s: FloatN


@dataclass(frozen=True)
class NetworkFacts:
    """Latency of a hop between nodes, and shares of the ports' rate in rings and in all-to-alls. [s], [-]"""

    latency_s: float
    efficiency: float
    all_to_all_efficiency: float


@dataclass(frozen=True)
class NetworkRunErrors:
    """Median absolute errors of one run: by the facts before, by those fitted, and by a fit of the other runs. [-]"""

    name: str
    before: float
    fitted: float
    by_others: float | None
    """None where there is no other run of this kind (rings, all-to-alls)."""


def network_facts_of_cluster(cluster: ClusterSpec) -> NetworkFacts:
    """The facts of the network that a cluster's profile says."""
    nic = cluster.node.nic
    return NetworkFacts(nic.latency_s.value, nic.efficiency.value, nic.all_to_all_efficiency.value)


def fit_network_facts(runs: Sequence[NetworkRun], cluster: ClusterSpec) -> NetworkFacts:
    """Fit the facts of the network with the least squares of logarithmic errors; each run weighs as much, whatever its
    number of sizes.

    Parameters
    ----------
    runs
        Over several fast domains.
    cluster
        Whose other facts hold.
    """
    from scipy.optimize import least_squares

    before = network_facts_of_cluster(cluster)
    first = np.log([before.latency_s, before.efficiency, before.all_to_all_efficiency])
    least = np.log([LEAST_LATENCY_S, LEAST_SHARE, LEAST_SHARE])
    most = np.log([MOST_LATENCY_S, MOST_SHARE, MOST_SHARE])

    def errors(x: FloatN) -> FloatN:
        fabric = _fabric(cluster, NetworkFacts(*np.exp(x).tolist()))
        each = [_log_errors(run, fabric) / np.sqrt(len(run.time_s)) for run in runs]
        return np.concatenate([*each, (x - first) * DRAW])

    solution = least_squares(
        errors, np.clip(first, least + 1e-6, most - 1e-6), loss="soft_l1", f_scale=NOT_SQUARED, bounds=(least, most)
    )
    return NetworkFacts(*np.exp(solution.x).tolist())


def network_run_errors(
    runs: Sequence[NetworkRun], cluster: ClusterSpec, fitted: NetworkFacts
) -> tuple[NetworkRunErrors, ...]:
    """How far each run is from its prediction, and how far it is without it in the fit."""
    scored = []
    for run in runs:
        others = [other for other in runs if other is not run]
        alike = any((other.kind == "all_to_all") == (run.kind == "all_to_all") for other in others)
        by_others = _median_error(run, cluster, fit_network_facts(others, cluster)) if alike else None
        before = _median_error(run, cluster, network_facts_of_cluster(cluster))
        scored.append(NetworkRunErrors(run.name, before, _median_error(run, cluster, fitted), by_others))
    return tuple(scored)


def _median_error(run: NetworkRun, cluster: ClusterSpec, facts: NetworkFacts) -> float:
    return float(np.median(np.abs(np.expm1(_log_errors(run, _fabric(cluster, facts))))))


def _log_errors(run: NetworkRun, fabric: Fabric) -> FloatN:
    """Of every size: the logarithm of predicted over measured. (n,) [-]"""
    predicted_s = collective_time(run.kind, run.payload_bytes, run.group, fabric).total_s
    return np.log(np.asarray(predicted_s) / run.time_s)


def _fabric(cluster: ClusterSpec, facts: NetworkFacts) -> Fabric:
    nic = cluster.node.nic
    changed = {
        name: getattr(nic, name).model_copy(update={"value": getattr(facts, name)})
        for name in ("latency_s", "efficiency", "all_to_all_efficiency")
    }
    node = cluster.node.model_copy(update={"nic": nic.model_copy(update=changed)})
    return Fabric.from_cluster(cluster.model_copy(update={"node": node}))
