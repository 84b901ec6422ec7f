"""A cluster with so many times of one resource, for what-if questions about a costed plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from math import log, sqrt
from typing import Any, TypeVar

from mofa.specs.base import Fact
from mofa.specs.curve_ratios import POWERED, curve_at_power_ratio
from mofa.specs.curves import CollectiveCurve, CollectiveForm, GpuCurves, MemoryBoundCurve
from mofa.specs.fitted import FittedCurve, PowerLimitedCurve
from mofa.specs.hardware import ClusterSpec
from mofa.specs.scaling import scaled_curve

CurveT = TypeVar("CurveT", bound=FittedCurve)
WORDS = "changed by a what-if question"


def _times(fact: Fact, factor: float) -> Fact:
    return fact.model_copy(update={"value": fact.value * factor})


def _as_written(name: str, value: Any, form: Any) -> Any:
    """A scaled field in the type that the form has."""
    return tuple(map(tuple, value)) if name == "tiles" else type(getattr(form, name))(value)


def _scaled(curve: CurveT, rate: float, bandwidth: float) -> CurveT:
    """A curve that computes ``rate`` times as fast and moves bytes ``bandwidth`` times as fast."""
    any_curve: Any = curve
    form = any_curve.form
    before = {"form": asdict(form)}
    if getattr(curve, "full_load_flops", None) is not None:
        before["full_load_flops"] = any_curve.full_load_flops
    made = scaled_curve(before, rate, bandwidth, 1.0)
    fields = {
        name: _as_written(name, value, form) for name, value in made["form"].items() if value != before["form"][name]
    }
    update: dict[str, Any] = {"form": replace(form, **fields)}
    if "full_load_flops" in made:
        update["full_load_flops"] = made["full_load_flops"]
    return curve.model_copy(update=update)


def _with_each_curve(
    curves: GpuCurves, of_products: Callable[[Any], Any], of_streams: Callable[[MemoryBoundCurve], MemoryBoundCurve],
    **facts: object,
) -> GpuCurves:  # fmt: skip
    """Curves with those of products and attention, and of memory-bound kernels, changed in every release of PyTorch.

    They were checked before.
    """

    def each(family: Mapping[Any, CurveT], change: Callable[[CurveT], CurveT]) -> dict[Any, CurveT]:
        return {name: change(curve) for name, curve in family.items()}

    releases = {
        number: own.model_copy(update={"gemm": each(own.gemm, of_products), "stream": each(own.stream, of_streams)})
        for number, own in curves.releases.items()
    }
    changed = {
        **{name: each(getattr(curves, name), of_products) for name in (*POWERED, "attention")},
        "stream": each(curves.stream, of_streams), "releases": releases, **facts,
    }  # fmt: skip
    return GpuCurves.model_construct(
        _fields_set=curves.model_fields_set,
        **{**{name: getattr(curves, name) for name in GpuCurves.model_fields}, **changed},
    )


def _with_curves(cluster: ClusterSpec, rate: float, bandwidth: float) -> ClusterSpec:
    gpu = cluster.gpu
    changed = _with_each_curve(
        gpu.curves, lambda curve: _scaled(curve, rate, bandwidth), lambda curve: _scaled(curve, 1.0, bandwidth)
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


def _with_memory_capacity(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """GPUs with as much more memory, of which the driver leaves the same share."""
    gpu = cluster.gpu
    facts = {name: _times(getattr(gpu, name), factor) for name in ("memory_bytes", "capacity_bytes")}
    return cluster.model_copy(update={"gpu": gpu.model_copy(update=facts)})


def _with_power_limit(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """GPUs that may draw ``factor`` times the power: every draw over the limit is a ``factor``-th.

    A kernel that keeps the clock ``c`` at the limit draws ``c^-2`` of it at full clock, so that its clock goes with the
    root of the limit, at most to the full one (:func:`mofa.specs.curve_ratios.curve_at_power_ratio`).
    """
    gpu, curves = cluster.gpu, cluster.gpu.curves

    def limited(curve: PowerLimitedCurve) -> PowerLimitedCurve:
        states = {name: getattr(curve, name) for name in ("sustained", "alone", "clock", "clock_power")}
        if curve.clock_power is None and curve.clock < 1.0:  # said by the two states, which may reach the full clock
            states["clock_power"] = log(curve.alone) / log(curve.clock)
        return curve.model_copy(update=curve_at_power_ratio(states, factor))

    def drawing(curve: MemoryBoundCurve) -> MemoryBoundCurve:
        return curve if curve.draw is None else curve.model_copy(update={"draw": curve.draw / factor})

    others: dict[str, object] = {}
    if curves.stream_clock is not None:
        others["stream_clock"] = _times(curves.stream_clock, sqrt(factor))
    if curves.power_limit is not None:
        idle = _times(curves.power_limit.idle_draw, 1.0 / factor)
        others["power_limit"] = curves.power_limit.model_copy(update={"idle_draw": idle})
    facts = {"curves": _with_each_curve(curves, limited, drawing, **others), "tdp_w": _times(gpu.tdp_w, factor)}
    return cluster.model_copy(update={"gpu": gpu.model_copy(update=facts)})


MEMORY_CAPACITY, POWER_LIMIT = "memory capacity", "power limit"
RESOURCES: Mapping[str, Callable[[ClusterSpec, float], ClusterSpec]] = {
    "matrix products and attention": _with_products,
    "memory bandwidth": _with_memory_bandwidth,
    "link inside a fast domain": _with_fast_link,
    "network between nodes": _with_network,
    "host": _with_host,
    MEMORY_CAPACITY: _with_memory_capacity,
    POWER_LIMIT: _with_power_limit,
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
    Kernels keep their launches and floors, links their latencies. The power limit stays as it was measured where
    something else changes: kernels that are faster are taken to draw no more. Another power limit moves the clocks of
    kernels that were measured below the full clock; where none were, it changes nothing. Energy by a share of the limit
    goes with it, that of waiting included.

    Examples
    --------
    >>> import mofa
    >>> machines = mofa.load_cluster("h100-hgx", 16)
    >>> more = cluster_with_resource(machines, "network between nodes", 1.1)
    >>> round(more.nic_bandwidth_per_gpu_bytes_per_s / machines.nic_bandwidth_per_gpu_bytes_per_s, 9)
    1.1
    """
    return RESOURCES[resource](cluster, factor)
