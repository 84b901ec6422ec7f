"""How experts may be spread over ranks, dispatched to and balanced."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mofa.search.legality.named_check import FloatN, degrees_text, remainder
from mofa.search.legality.named_check import Job as Job
from mofa.specs.strategy import MERGED_GROUPS, StrategyTable


def experts_shortfall(job: Job, t: StrategyTable) -> FloatN:
    """Experts by which a number of expert-parallel ranks misses; without experts there must be one. (n,)"""
    moe = job.workload.model.moe
    if moe is None:
        return np.asarray((t.ep - 1) + (t.etp - 1) * (t.etp != t.tp), dtype=float)
    return np.where(t.ep > moe.num_experts, t.ep - moe.num_experts, remainder(moe.num_experts, t.ep))


def sharding_ranks(job: Job, t: StrategyTable) -> NDArray[np.int64]:
    """The part of dp over which experts may be spread: each replica of torchtitan's holds all experts."""
    if not job.framework.traits.has_pytorch_modules:
        return t.dp
    if job.framework.data_parallel == "ddp":
        return np.ones_like(t.dp)
    return np.asarray(t.dp // np.maximum(np.minimum(job.framework.dp_replicate, t.dp), 1))


def expert_grid_shortfall(job: Job, t: StrategyTable) -> FloatN:
    """GPUs by which ranks over which experts are spread miss a multiple of ep x etp. (n,)"""
    if job.workload.model.moe is None:
        return np.zeros(len(t))
    ranks = t.tp * t.cp * sharding_ranks(job, t)
    wanted = t.ep * t.etp
    return np.asarray(np.where(wanted > ranks, wanted - ranks, remainder(ranks, wanted)))


def rank_order_shortfall(job: Job, t: StrategyTable) -> FloatN:
    """Ranks by which tp x cp misses ep x etp where a pipeline is numbered before data parallelism. (n,)

    Megatron-Core asks for the same pipeline groups and as many data-parallel ranks of experts as of all else
    (parallel_state.py, ``initialize_model_parallel``); without experts ep is 1 and etp tp.
    """
    if job.framework.rank_order.endswith("pp"):
        return np.zeros(len(t))
    of_experts = t.tp if job.workload.model.moe is None else t.ep * t.etp
    return np.asarray(np.where(t.pp > 1, np.abs(t.tp * t.cp - of_experts), 0), dtype=float)


def etp_shortfall(job: Job, t: StrategyTable) -> FloatN:
    """Ranks by which the tensor parallelism of experts misses what the framework runs. (n,)"""
    moe = job.workload.model.moe
    if moe is None:
        return np.zeros(len(t))
    if (
        not job.framework.traits.has_pytorch_modules
    ):  # transformer_config.py: "Bias in Moe is only supported when ETP==1"
        return np.asarray((t.etp - 1) * moe.expert_bias, dtype=float)
    ok = (t.etp == 1) | (t.etp == t.tp)
    # without expert parallelism torchtitan splits experts over tp; with it experts need a sharded grid
    ok &= (t.ep > 1) | (t.etp == t.tp)
    return np.where(ok, 0.0, np.abs(t.etp - t.tp) + 0.0)


def dispatcher_shortfall(job: Job, t: StrategyTable) -> FloatN:
    """DeepEP: Megatron's needs etp x ep above 1 (token_dispatcher.py), torchtitan's ep above 1 and etp 1."""
    if job.framework.dispatcher != "deepep" or job.workload.model.moe is None:
        return np.zeros(len(t))
    if job.framework.traits.has_pytorch_modules:
        return np.asarray((t.ep == 1) + (t.etp - 1), dtype=float)
    return np.asarray(t.ep * t.etp == 1, dtype=float)


def routed_copies_shortfall(job: Job, t: StrategyTable) -> FloatN:
    """Experts gather rows by index from the rank's own tokens alone."""
    if job.framework.routed_copies != "index" or job.workload.model.moe is None:
        return np.zeros(len(t))
    return np.asarray((t.ep - 1) + (t.etp - 1), dtype=float)


def balancing_shortfall(job: Job, t: StrategyTable) -> FloatN:
    """MicroMoE: replicas need an even number of EP groups to merge, and two experts a GPU (section 3)."""
    moe, fw = job.workload.model.moe, job.framework
    if moe is None or not fw.traits.schedules_replicas or fw.dispatcher != "alltoall" or not np.any(t.balancing):
        return np.asarray(t.balancing > 0, dtype=float)
    groups = t.tp * t.cp * t.dp // np.maximum(t.ep * t.etp, 1)
    shortfall = np.maximum(remainder(groups, np.full_like(groups, MERGED_GROUPS)), 2 * t.ep - moe.num_experts)
    shortfall = np.where(t.ep < 2, np.maximum(shortfall, 1.0), shortfall)
    return np.asarray(np.where(t.balancing > 0, np.maximum(shortfall, 0.0), 0.0))


def balancing_lacks(job: Job, t: StrategyTable) -> str | None:
    """Why replicas of a row's experts cannot be scheduled, with values and what to change; None where they can.

    The row itself is without balancing; the words suit a user who did not ask for it by name.
    """
    moe, fw = job.workload.model.moe, job.framework
    if not balancing_shortfall(job, replace(t, balancing=np.ones_like(t.balancing)))[0]:
        return None
    if moe is None or not fw.traits.schedules_replicas or fw.dispatcher != "alltoall":
        return (
            f"framework is {fw.name} with dispatcher {fw.dispatcher}, replicas are scheduled in megatron with "
            "dispatcher alltoall; change the framework"
        )
    ep = int(t.ep[0])
    if ep < 2 or 2 * ep > moe.num_experts:
        return f"ep is {ep}, it takes at least 2 and at most half of the {moe.num_experts} experts; change ep"
    groups = int(t.tp[0] * t.cp[0] * t.dp[0]) // (ep * int(t.etp[0]))
    return (
        f"{degrees_text(t, 'tp', 'cp', 'dp')} over {degrees_text(t, 'ep', 'etp')} makes {groups} "
        f"expert-parallel group{'' if groups == 1 else 's'}, it takes a multiple of {MERGED_GROUPS}; change ep, etp or "
        "pp, or add GPUs"
    )
