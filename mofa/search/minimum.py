"""The smallest number of GPUs, over whole nodes, on which some strategy fits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mofa.cost.estimate import estimate_table
from mofa.cost.loads import BALANCED, RoutingLoads
from mofa.routing.load import routing_loads
from mofa.search.feasible import Job, check
from mofa.search.plan import Candidate, margin_bytes
from mofa.search.space import Space, default_space, product
from mofa.specs.params import num_mtp_params, num_params

MOST_GPUS = 131_072
PLAYED = 8
"""Strategies of a number of GPUs that are played out to see whether one fits, those of the least memory. [-]"""


def smallest_number_of_gpus(job: Job, space: Space, *, replay: bool = False) -> tuple[int | None, str]:
    """The fewest GPUs, in whole nodes, on which a strategy of this space fits, and what that means.

    The search space is narrowed to what needs the least memory: micro_batch 1 and full recomputation where the space
    has them, without interleaving. Numbers are tried from the bound that parameters alone set: first doubling, then
    every whole number of nodes up to the first that fits. With ``replay`` a strategy fits only where its memory, played
    out, does.
    """
    node = job.cluster.node.gpus_per_node
    limit = job.cluster.gpu.usable_memory_bytes.value - margin_bytes(job.cluster)
    params = num_params(job.workload.model) + num_mtp_params(job.workload.model)
    least = max(int(params * 2.0 / max(limit, 1.0) / node), 0) + 1
    nodes = least
    while nodes * node <= MOST_GPUS and not fits_on(job, space, nodes * node, replay=replay):
        nodes *= 2
    if nodes * node > MOST_GPUS:
        most = MOST_GPUS // node
        if most < least or not fits_on(job, space, most * node, replay=replay):
            return None, f"no number of GPUs up to {MOST_GPUS:,} would do"
        nodes = most
    for fewer in range(max(nodes // 2 + 1, least), nodes):
        if fits_on(job, space, fewer * node, replay=replay):
            nodes = fewer
            break
    return nodes * node, f"the fewest whole nodes of {node} GPUs on which a strategy fits"


def fits_on(job: Job, space: Space, num_gpus: int, *, replay: bool = False) -> bool:
    """Whether some strategy of the narrowed space fits on this number of GPUs."""
    if num_gpus > job.cluster.node.gpus_per_node and num_gpus % job.cluster.node.gpus_per_node:
        return False
    cluster = job.cluster.model_copy(update={"num_gpus": num_gpus})
    here = replace(job, cluster=cluster)
    wide = default_space(job.workload, cluster, job.framework)

    def narrowed(asked: tuple[int, ...], default: tuple[int, ...], offered: tuple[int, ...]) -> tuple[int, ...]:
        """What the user fixed stays; what was the default of that number of GPUs is that of this one."""
        return offered if asked == default else asked

    before = default_space(job.workload, job.cluster, job.framework)
    # of full recomputation the one in the most token chunks, which comes last
    modes = tuple((m, n) for m, n in space.recompute if m.kind == "full" and n == -1)[-1:] or space.recompute[-1:]
    small = replace(
        space,
        tp=narrowed(space.tp, before.tp, wide.tp), cp=narrowed(space.cp, before.cp, wide.cp),
        pp=narrowed(space.pp, before.pp, wide.pp), ep=narrowed(space.ep, before.ep, wide.ep),
        vpp=space.vpp[:1], micro_batch=space.micro_batch[:1], recompute=modes, schedule=space.schedule[:1],
    )  # fmt: skip
    table = product(small, job.workload, cluster, job.framework)
    if len(table) == 0:
        return False
    legal = np.flatnonzero(check(here, table).reason < 0)
    if len(legal) == 0:
        return False
    table = table.take(legal)
    loads: RoutingLoads = BALANCED
    if job.workload.model.moe is not None:
        degrees = sorted({int(e) for e in np.unique(table.ep)})
        loads = routing_loads(job.workload.routing, job.workload.model, degrees)
    costed = estimate_table(job.workload, cluster, job.framework, table, loads)
    limit = cluster.gpu.usable_memory_bytes.value - margin_bytes(cluster)
    lean = np.argsort(costed.device_bytes, kind="stable")
    fitting = lean[costed.device_bytes[lean] <= limit]
    if not replay or len(fitting) == 0:
        return len(fitting) > 0
    return any(
        Candidate(job.workload, cluster, job.framework, table.take(fitting[i : i + 1]), loads, "causal").lacks() <= 0
        for i in range(min(PLAYED, len(fitting)))
    )
