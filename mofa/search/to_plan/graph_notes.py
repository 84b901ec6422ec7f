"""What a plan says of CUDA graphs."""

from __future__ import annotations

from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.units import format_seconds


def graph_notes(cluster: ClusterSpec, framework: FrameworkSpec) -> tuple[str, ...]:
    """Notes on a plan with graphs: what of it no run of ours has shown, and what its memory counts."""
    graphs = framework.graphs
    if not graphs.captures_any:
        return ()
    launch = cluster.gpu.curves.host.graph_launch_s
    said = (
        f"cuda_graphs {graphs}: a graph's launch takes the host {format_seconds(launch.value)}, {launch.provenance} "
        f"({launch.source}); kernels in graphs take as long as outside, and the numerics stay"
    )
    pool = "cuda_graphs: live tensors include those in the graphs' own pool, which PyTorch counts as reserved alone"
    return said, pool
