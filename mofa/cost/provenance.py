"""What a prediction rests on: the provenance of the facts behind each component of the step."""

from __future__ import annotations

from mofa.cost.breakdown import TIME_COMPONENTS
from mofa.specs.base import PROVENANCES, Fact, Provenance
from mofa.specs.hardware import ClusterSpec, GemmFormat

_WEAKEST: dict[Provenance, int] = {p: i for i, p in enumerate(PROVENANCES)}


def weakest(*facts: Fact) -> Provenance:
    """The least certain provenance of several facts."""
    return max((fact.provenance for fact in facts), key=lambda p: _WEAKEST[p])


def component_provenance(
    cluster: ClusterSpec, gemm_format: GemmFormat, crosses: dict[str, bool]
) -> dict[str, Provenance]:
    """The provenance of each time component; ``crosses`` says which groups leave their fast domain."""
    curves, node = cluster.gpu.curves, cluster.node
    inside = weakest(node.intra.efficiency, node.intra.latency_s)
    inside_a2a = weakest(node.intra.all_to_all_efficiency, node.intra.latency_s)
    outside = weakest(node.nic.efficiency, node.nic.latency_s)
    outside_a2a = weakest(node.nic.all_to_all_efficiency, node.nic.latency_s)
    gemm, grouped = curves.gemm[gemm_format], curves.grouped_gemm[gemm_format]
    stream = weakest(curves.stream.fraction, curves.stream.floor_s)
    out: dict[str, Provenance] = {
        "gemm": weakest(gemm.fraction, gemm.k_overhead, gemm.floor_s),
        "grouped_gemm": weakest(grouped.fraction, grouped.k_overhead, grouped.floor_s),
        "attention": weakest(curves.attention.forward_fraction, curves.attention.backward_fraction),
        "memory_bound": stream,
        "host_idle": weakest(curves.host.eager_op_s, curves.host.sync_s),
        "optimizer": stream,
    }
    out["recompute"] = max((out["gemm"], out["grouped_gemm"], out["attention"], stream), key=lambda p: _WEAKEST[p])
    for name in ("tp", "cp", "pp", "dp"):
        out[name] = outside if crosses.get(name, False) else inside
    out["ep"] = outside_a2a if crosses.get("ep", False) else inside_a2a
    out["bubble"] = out["recompute"]
    assert set(out) == set(TIME_COMPONENTS)
    return out
