"""Which strategies Megatron-Core runs with forwards beside backwards (``overlap_moe_expert_parallel_comm``).

Conditions are the assertions of Megatron-Core 0.16.1, transformer/transformer_config.py, with their lines. Two are not
asserted there: the callables of a layer never run the recomputation of a whole layer of experts
(models/gpt/fine_grained_callables.py), and token chunks and scheduled replicas are other programs' (MemFine, MicroMoE).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mofa.search.legality.named_check import BoolN, FloatN, degrees_text
from mofa.search.legality.named_check import JobAndMachines as JobAndMachines
from mofa.specs.strategy import StrategyTable

OFFERED_DISPATCHERS = ("alltoall", "deepep")
"""Those that exchange tokens as callables: ``alltoall`` and ``flex`` (lines 1866 to 1869), of which DeepEP is one."""


class OverlapCondition(NamedTuple):
    """What rows must hold, the lines of Megatron-Core's assertion, and what to do."""

    lines: tuple[int, int] | None
    holds: Callable[[JobAndMachines, StrategyTable], BoolN | bool]
    message: Callable[[JobAndMachines, StrategyTable], str]


def _kinds(t: StrategyTable, *kinds: str) -> BoolN:
    return np.array([spec.kind in kinds for spec in t.recompute_modes])[t.recompute]


def _modules(t: StrategyTable, module: str) -> BoolN:
    return np.array([module in spec.modules for spec in t.recompute_modes])[t.recompute]


CONDITIONS: tuple[OverlapCondition, ...] = (
    OverlapCondition((1857, 1861), lambda j, t: (t.pp == 1) | (t.vpp > 1), lambda j, t: (
        f"{degrees_text(t, 'pp')} needs vpp above 1; raise vpp or set pp=1")),
    OverlapCondition((1863, 1865), lambda j, t: (t.ep > 1) & (j.workload.model.moe is not None), lambda j, t: (
        f"{degrees_text(t, 'ep')} must be above 1, of a model with experts; raise ep")),
    OverlapCondition((1866, 1869), lambda j, t: j.framework.dispatcher in OFFERED_DISPATCHERS, lambda j, t: (
        f"dispatcher ({j.framework.dispatcher}) must be {' or '.join(OFFERED_DISPATCHERS)}; change it")),
    OverlapCondition((1871, 1879), lambda j, t: ~_kinds(t, "full", "every"), lambda j, t: (
        f"recompute ({t.recompute_modes[int(t.recompute[0])].text}) recomputes layers whole; use none or selective")),
    OverlapCondition((1882, 1884), lambda j, t: j.workload.precision.params != "fp32", lambda j, t: (
        f"precision.params ({j.workload.precision.params}) must be 16-bit; use bf16")),
    OverlapCondition((1889, 1891), lambda j, t: j.workload.model.num_mtp_layers <= 1, lambda j, t: (
        f"the model has {j.workload.model.num_mtp_layers} multi-token-prediction layers, one at most runs so; set "
        "workload.model.num_mtp_layers=1")),
    OverlapCondition((1892, 1896), lambda j, t: (j.workload.model.num_mtp_layers == 0) | (t.pp > 1), lambda j, t: (
        f"a multi-token-prediction layer needs pp above 1, not {degrees_text(t, 'pp')}; raise pp")),
    OverlapCondition(None, lambda j, t: ~_modules(t, "moe"), lambda j, t: (
        "recompute of the module moe never runs with it; leave the module out")),
    OverlapCondition(None, lambda j, t: (t.token_chunks == 1) & (t.balancing == 0), lambda j, t: (
        "token_chunks and balancing are not modelled with it; leave them out")),
    OverlapCondition(None, lambda j, t: j.framework.routed_copies == "materialised", lambda j, t: (
        f"routed_copies ({j.framework.routed_copies}) exchanges no rows; leave it out")),
)  # fmt: skip


SHARED_CONDITIONS: tuple[OverlapCondition, ...] = (
    OverlapCondition(None, lambda j, t: j.workload.model.moe is not None and j.workload.model.moe.shared_hidden > 0,
              lambda j, t: f"{j.workload.model.name} has no shared experts; leave it out"),
    OverlapCondition((1090, 1095), lambda j, t: j.framework.dispatcher == "alltoall", lambda j, t: (
        f"dispatcher ({j.framework.dispatcher}) must be alltoall; change it")),
    OverlapCondition((1232, 1239), lambda j, t: ~_modules(t, "shared_experts"), lambda j, t: (
        "recompute of the module shared_experts cannot work; leave the module out")),
    OverlapCondition(
        None, lambda j, t: ~_kinds(t, "full") & ~_modules(t, "moe") & (t.token_chunks == 1) & (t.balancing == 0),
        lambda j, t: "recomputing layers of experts whole, token_chunks and balancing are not modelled with it"),
)  # fmt: skip
"""The same of shared experts beside exchanges (``moe_shared_expert_overlap``)."""


def _asked(job: JobAndMachines) -> tuple[str, tuple[OverlapCondition, ...]]:
    """The option that a framework has, in words, and its conditions; both at once cannot be."""
    if job.framework.shared_expert_overlap:
        return "shared_expert_overlap", SHARED_CONDITIONS
    overlap = job.framework.expert_overlap
    return f"expert_overlap {overlap}", () if overlap == "none" else CONDITIONS


def expert_overlap_shortfall(job: JobAndMachines, t: StrategyTable) -> FloatN:
    """How many of the conditions rows miss. (n,) [-]"""
    missed = np.zeros(len(t))
    for condition in _asked(job)[1]:
        missed += ~np.broadcast_to(np.asarray(condition.holds(job, t), dtype=bool), (len(t),))
    return missed


def expert_overlap_message(job: JobAndMachines, t: StrategyTable) -> str:
    """The first condition that a row misses, and what to do."""
    option, conditions = _asked(job)
    missed = [each.message(job, t) for each in conditions if not np.all(each.holds(job, t))]
    return f"{job.framework.name}: with {option}, {'; '.join(missed[:1])}"
