"""What a plan says of CUDA graphs."""

from __future__ import annotations

from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.units import format_seconds


def graph_notes(cluster: ClusterSpec, framework: FrameworkSpec) -> tuple[str, ...]:
    """Notes on a plan with graphs: what of it no run of ours has shown, and what its memory counts."""
    graphs = framework.graphs
    if not graphs.on:
        return ()
    host = cluster.gpu.curves.host
    facts = {"a launch": host.graph_launch_s}
    if not graphs.full_iteration:
        facts["a call's Python"] = host.graph_call_s if graphs.implementation == "te" else host.local_graph_call_s
    times = "; ".join(
        f"{name} takes the host {format_seconds(fact.value)}, {fact.provenance} ({fact.source})"
        for name, fact in facts.items()
    )
    said = f"cuda_graphs {graphs}: {times}; kernels in graphs take as long as outside, and the numerics stay"
    pool = "cuda_graphs: live tensors include those in the graphs' own pool, which PyTorch counts as reserved alone"
    return said, pool
