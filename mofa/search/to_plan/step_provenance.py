"""What a plan's step rests on: shares of it by the provenance of curves and facts."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from mofa.blocks.fp8 import formats_of_layer_products
from mofa.cost.kernels.topology import NodeSizes, process_groups
from mofa.cost.provenance import Seen, component_provenance
from mofa.specs.base import Provenance
from mofa.specs.framework import FrameworkSpec
from mofa.specs.framework_names import RankOrder
from mofa.specs.hardware import ClusterSpec
from mofa.specs.strategy import StrategyTable
from mofa.specs.workload import WorkloadSpec


def provenance_of_exposed(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, row: StrategyTable,
    exposed: dict[str, float], seen: Seen,
) -> dict[Provenance, float]:  # fmt: skip
    """Share of a step by the provenance of what it rests on; of each exposed component the weakest. [-]

    Parameters
    ----------
    row
        The one strategy.
    exposed
        Seconds of the step by component. [s]
    seen
        Sizes of products and streams that the step has.
    """
    tp, cp, pp, dp, ep, etp = (int(getattr(row, name)[0]) for name in ("tp", "cp", "pp", "dp", "ep", "etp"))
    node = NodeSizes(cluster.node.gpus_per_node, cluster.node.gpus_per_domain)
    crosses = _crossing((tp, cp, pp, dp, ep, etp), node, framework.rank_order)
    ranks = {"tp": tp, "cp": cp, "ep": ep, "dp": dp * cp}
    sizes, streams = seen
    formats = formats_of_layer_products(workload.precision.fp8_recipe)
    kinds = component_provenance(
        cluster, formats, crosses, sizes=sizes, streams=streams, ranks=ranks,
        grouped_kernel=framework.grouped_kernel,
    )  # fmt: skip
    total = sum(exposed.values())
    out: dict[Provenance, float] = {}
    for name, seconds in exposed.items():
        if seconds > 0:
            out[kinds[name]] = out.get(kinds[name], 0.0) + seconds / total
    return out


@lru_cache(maxsize=1024)
def _crossing(degrees: tuple[int, int, int, int, int, int], node: NodeSizes, rank_order: RankOrder) -> dict[str, bool]:
    """Kinds of communication that leave the fast domain."""
    groups = process_groups(*degrees, node, rank_order=rank_order)
    names = {"tp": "tp", "cp": "cp", "ep": "ep", "pp": "pp", "dp": "dp_cp"}
    return {name: bool(np.any(groups[group].crosses_domains)) for name, group in names.items()}
