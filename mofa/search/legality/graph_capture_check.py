"""Which rows' CUDA graphs a framework cannot capture."""

from __future__ import annotations

import numpy as np

from mofa.blocks.frameworks.megatron.graph_legality import why_not_captured
from mofa.search.legality.named_check import FloatN
from mofa.search.legality.named_check import JobAndMachines as JobAndMachines
from mofa.specs.strategy import BALANCING, RecomputeSpec, StrategyTable


def _why(job: JobAndMachines, spec: RecomputeSpec, pp: int) -> str | None:
    return why_not_captured(job.framework, job.workload.model, job.workload.routing, spec, pp=pp)


def graph_capture_shortfall(job: JobAndMachines, t: StrategyTable) -> FloatN:
    """1 for rows whose layers, recomputation, pipeline or balancing graphs cannot hold, else 0. (n,)"""
    if not job.framework.graphs.captures_any:
        return np.zeros(len(t))
    by_mode = np.array([[_why(job, spec, pp) is not None for pp in (1, 2)] for spec in t.recompute_modes])
    bad = by_mode[t.recompute, (t.pp > 1).astype(np.int64)]
    return np.asarray(bad | (t.balancing > 0), dtype=float)


def graph_capture_message(job: JobAndMachines, t: StrategyTable) -> str:
    """Why a row's graphs cannot be captured, and what to do."""
    spec = t.recompute_modes[int(t.recompute[0])].of_layers(int(t.recompute_layers[0]))
    why = _why(job, spec, int(t.pp[0]))
    if why is not None:
        return why
    balancing = BALANCING[int(t.balancing[0])]
    return f"cuda_graphs ({job.framework.graphs}): the host schedules tokens with balancing {balancing}; leave it out"
