"""A cluster of which one resource is so many times as fast, for what-if questions about a costed plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, TypeVar

from mofa.specs.base import Fact
from mofa.specs.curves import CollectiveCurve, CollectiveForm, GpuCurves
from mofa.specs.fitted import FittedCurve
from mofa.specs.hardware import ClusterSpec
from mofa.specs.scaling import scaled_curve

CurveT = TypeVar("CurveT", bound=FittedCurve)
WORDS = "changed by a what-if question"


def _times(fact: Fact, factor: float) -> Fact:
    return fact.model_copy(update={"value": fact.value * factor})


def _as_written(name: str, value: Any, form: Any) -> Any:
    """A scaled field in the type that the form has."""
    return tuple(map(tuple, value)) if name == "tiles" else type(getattr(form, name))(value)


def _scaled(curves: Mapping[Any, CurveT], rate: float, bandwidth: float) -> dict[Any, CurveT]:
    """Curves that compute ``rate`` times as fast and move bytes ``bandwidth`` times as fast."""

    def scaled(curve: Any) -> Any:
        before = {"form": asdict(curve.form)}
        if getattr(curve, "full_load_flops", None) is not None:
            before["full_load_flops"] = curve.full_load_flops
        made = scaled_curve(before, rate, bandwidth, 1.0)
        fields = {
            name: _as_written(name, value, curve.form)
            for name, value in made["form"].items()
            if value != before["form"][name]
        }
        update: dict[str, Any] = {"form": replace(curve.form, **fields)}
        if "full_load_flops" in made:
            update["full_load_flops"] = made["full_load_flops"]
        return curve.model_copy(update=update)

    return {name: scaled(curve) for name, curve in curves.items()}


def _with_curves(cluster: ClusterSpec, rate: float, bandwidth: float) -> ClusterSpec:
    gpu, curves = cluster.gpu, cluster.gpu.curves
    compute = {name: _scaled(getattr(curves, name), rate, bandwidth) for name in ("gemm", "grouped_gemm", "attention")}
    update: dict[str, Any] = {**compute, "stream": _scaled(curves.stream, 1.0, bandwidth)}
    if curves.multi_stream:
        update["multi_stream"] = _scaled(curves.multi_stream, rate, bandwidth)
    changed = GpuCurves.model_construct(
        _fields_set=curves.model_fields_set,
        **{**{name: getattr(curves, name) for name in GpuCurves.model_fields}, **update},
    )
    peaks = {name: _times(fact, rate) for name, fact in gpu.peak_flops_per_s.items()}
    memory = _times(gpu.memory_bandwidth_bytes_per_s, bandwidth)
    facts = {"curves": changed, "peak_flops_per_s": peaks, "memory_bandwidth_bytes_per_s": memory}
    return cluster.model_copy(update={"gpu": gpu.model_copy(update=facts)})


def _with_products(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    return _with_curves(cluster, factor, 1.0)


def _with_memory_bandwidth(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    return _with_curves(cluster, 1.0, factor)


def _with_fast_link(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """The link inside a fast domain, with what was measured over it."""
    node = cluster.node

    def faster(curve: CollectiveCurve) -> CollectiveCurve:
        protocols = tuple((start_s, rate * factor) for start_s, rate in curve.form.protocols)
        return curve.model_copy(update={"form": CollectiveForm(protocols=protocols, group=curve.form.group)})

    intra = node.intra.model_copy(update={"bandwidth_bytes_per_s": _times(node.intra.bandwidth_bytes_per_s, factor)})
    collectives = {name: faster(curve) for name, curve in node.collectives.items()}
    return cluster.model_copy(update={"node": node.model_copy(update={"intra": intra, "collectives": collectives})})


def _with_network(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    nic = cluster.node.nic
    update = {"bandwidth_bytes_per_s": _times(nic.bandwidth_bytes_per_s, factor)}
    if nic.communicator_bytes_per_s is not None:
        update["communicator_bytes_per_s"] = _times(nic.communicator_bytes_per_s, factor)
    node = cluster.node.model_copy(update={"nic": nic.model_copy(update=update)})
    return cluster.model_copy(update={"node": node})


def _with_host(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """A host that issues every op in a ``factor``-th of the time; how hosts are spread stays."""
    gpu, curves = cluster.gpu, cluster.gpu.curves
    host = curves.host.scaled_to_speed(curves.host.eager_op_s.value / factor, WORDS)
    return cluster.model_copy(
        update={"gpu": gpu.model_copy(update={"curves": curves.model_copy(update={"host": host})})}
    )


RESOURCES: Mapping[str, Callable[[ClusterSpec, float], ClusterSpec]] = {
    "matrix products and attention": _with_products,
    "memory bandwidth": _with_memory_bandwidth,
    "link inside a fast domain": _with_fast_link,
    "network between nodes": _with_network,
    "host": _with_host,
}
"""What makes a cluster with so many times of each resource, by its name."""


def cluster_with_resource(cluster: ClusterSpec, resource: str, factor: float) -> ClusterSpec:
    """The cluster with ``factor`` times of one of :data:`RESOURCES`, all else as it is.

    Parameters
    ----------
    cluster
        The machines.
    resource
        Which of them.
    factor
        How much of it there is over what there was. [-]

    Notes
    -----
    Kernels keep their launches and floors, links their latencies. The power limit stays as it was measured: kernels
    that are faster are taken to draw no more.

    Examples
    --------
    >>> import mofa
    >>> machines = mofa.load_cluster("h100-hgx", 16)
    >>> more = cluster_with_resource(machines, "network between nodes", 1.1)
    >>> round(more.nic_bandwidth_per_gpu_bytes_per_s / machines.nic_bandwidth_per_gpu_bytes_per_s, 9)
    1.1
    """
    return RESOURCES[resource](cluster, factor)
