"""How experts may be spread over ranks, dispatched to and balanced."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mofa.search.legality.named_check import FloatN, degrees_text, shortfall_to_multiple
from mofa.search.legality.named_check import JobAndMachines as JobAndMachines
from mofa.specs.strategy import MERGED_GROUPS, StrategyTable


def experts_shortfall(job: JobAndMachines, table: StrategyTable) -> FloatN:
    """Experts by which a number of expert-parallel ranks misses; without experts there must be one. (n,)"""
    moe = job.workload.model.moe
    if moe is None:
        return np.asarray((table.ep - 1) + (table.etp - 1) * (table.etp != table.tp), dtype=float)
    return np.where(
        table.ep > moe.num_experts, table.ep - moe.num_experts, shortfall_to_multiple(moe.num_experts, table.ep)
    )


def expert_sharding_ranks(job: JobAndMachines, table: StrategyTable) -> NDArray[np.int64]:
    """The part of dp over which experts may be spread: each replica of torchtitan's holds all experts."""
    if not job.framework.traits.has_pytorch_modules:
        return table.dp
    if job.framework.data_parallel == "ddp":
        return np.ones_like(table.dp)
    return np.asarray(table.dp // np.maximum(np.minimum(job.framework.dp_replicate, table.dp), 1))


def expert_grid_shortfall(job: JobAndMachines, table: StrategyTable) -> FloatN:
    """GPUs by which ranks over which experts are spread miss a multiple of ep x etp. (n,)"""
    if job.workload.model.moe is None:
        return np.zeros(len(table))
    ranks = table.tp * table.cp * expert_sharding_ranks(job, table)
    wanted = table.ep * table.etp
    return np.asarray(np.where(wanted > ranks, wanted - ranks, shortfall_to_multiple(ranks, wanted)))


def rank_order_shortfall(job: JobAndMachines, table: StrategyTable) -> FloatN:
    """Ranks by which tp x cp misses ep x etp where a pipeline is numbered before data parallelism. (n,)

    Megatron-Core asks for the same pipeline groups and as many data-parallel ranks of experts as of all else
    (parallel_state.py, ``initialize_model_parallel``); without experts ep is 1 and etp tp.
    """
    if job.framework.rank_order.endswith("pp"):
        return np.zeros(len(table))
    of_experts = table.tp if job.workload.model.moe is None else table.ep * table.etp
    return np.asarray(np.where(table.pp > 1, np.abs(table.tp * table.cp - of_experts), 0), dtype=float)


def etp_shortfall(job: JobAndMachines, table: StrategyTable) -> FloatN:
    """Ranks by which the tensor parallelism of experts misses what the framework runs. (n,)"""
    moe = job.workload.model.moe
    if moe is None:
        return np.zeros(len(table))
    if (
        not job.framework.traits.has_pytorch_modules
    ):  # transformer_config.py: "Bias in Moe is only supported when ETP==1"
        return np.asarray((table.etp - 1) * moe.expert_bias, dtype=float)
    ok = (table.etp == 1) | (table.etp == table.tp)
    # without expert parallelism torchtitan splits experts over tp; with it experts need a sharded grid
    ok &= (table.ep > 1) | (table.etp == table.tp)
    return np.where(ok, 0.0, np.abs(table.etp - table.tp) + 0.0)


def dispatcher_shortfall(job: JobAndMachines, table: StrategyTable) -> FloatN:
    """How far a row is from what its dispatcher needs. (n,)

    DeepEP: Megatron's etp x ep above 1 (token_dispatcher.py), torchtitan's ep above 1 and etp 1. Padded to a capacity,
    experts are modelled under the all-to-all dispatcher alone.
    """
    if job.workload.model.moe is None or job.framework.dispatcher == "alltoall":
        return np.zeros(len(table))
    if _pads_rows_in_megatron(job):
        return np.ones(len(table))
    if job.framework.dispatcher != "deepep":
        return np.zeros(len(table))
    if job.framework.traits.has_pytorch_modules:
        return np.asarray((table.ep == 1) + (table.etp - 1), dtype=float)
    return np.asarray(table.ep * table.etp == 1, dtype=float)


def dispatcher_message(job: JobAndMachines, table: StrategyTable) -> str:
    """Why a row's dispatcher does not run, and what to do."""
    framework = job.framework
    said = f"{framework.name}: dispatcher {framework.dispatcher}"
    if _pads_rows_in_megatron(job):
        refused = "Megatron-Core refuses it" if framework.dispatcher == "deepep" else "it is not modelled"
        return f"{said} with routing.pad_to_capacity: {refused}; use alltoall or leave pad_to_capacity out"
    do = "it needs ep above 1 and etp 1" if framework.traits.has_pytorch_modules else "raise ep"
    return f"{said} does not run with {degrees_text(table, 'ep', 'etp')}; {do}"


def _pads_rows_in_megatron(job: JobAndMachines) -> bool:
    """DeepEP with padded experts: transformer_config.py, 1074; the all-gather dispatcher pads nothing."""
    return job.workload.routing.pad_to_capacity and not job.framework.traits.has_pytorch_modules


def routed_copies_shortfall(job: JobAndMachines, table: StrategyTable) -> FloatN:
    """Ranks above one over which experts are spread, where they gather rows by index: a rank has its own tokens
    alone."""
    if job.framework.routed_copies != "index" or job.workload.model.moe is None:
        return np.zeros(len(table))
    return np.asarray((table.ep - 1) + (table.etp - 1), dtype=float)


def token_scheduling_shortfall(job: JobAndMachines, table: StrategyTable) -> FloatN:
    """How far a row is from what token scheduling (MicroMoE) needs: replicas need an even number of EP groups to merge,
    and two experts a GPU (section 3)."""
    moe, fw = job.workload.model.moe, job.framework
    if moe is None or not fw.traits.schedules_replicas or fw.dispatcher != "alltoall" or not np.any(table.balancing):
        return np.asarray(table.balancing > 0, dtype=float)
    groups = table.tp * table.cp * table.dp // np.maximum(table.ep * table.etp, 1)
    shortfall = np.maximum(
        shortfall_to_multiple(groups, np.full_like(groups, MERGED_GROUPS)), 2 * table.ep - moe.num_experts
    )
    shortfall = np.where(table.ep < 2, np.maximum(shortfall, 1.0), shortfall)
    return np.asarray(np.where(table.balancing > 0, np.maximum(shortfall, 0.0), 0.0))


def why_replicas_cannot_be_scheduled(job: JobAndMachines, table: StrategyTable) -> str | None:
    """Why replicas of a row's experts cannot be scheduled, with values and what to change; None where they can.

    The row itself is without balancing; the words suit a user who did not ask for it by name.
    """
    moe, fw = job.workload.model.moe, job.framework
    if not token_scheduling_shortfall(job, replace(table, balancing=np.ones_like(table.balancing)))[0]:
        return None
    if moe is None or not fw.traits.schedules_replicas or fw.dispatcher != "alltoall":
        return (
            f"framework is {fw.name} with dispatcher {fw.dispatcher}, replicas are scheduled in megatron with "
            "dispatcher alltoall; change the framework"
        )
    ep = int(table.ep[0])
    if ep < 2 or 2 * ep > moe.num_experts:
        return f"ep is {ep}, it takes at least 2 and at most half of the {moe.num_experts} experts; change ep"
    groups = int(table.tp[0] * table.cp[0] * table.dp[0]) // (ep * int(table.etp[0]))
    return (
        f"{degrees_text(table, 'tp', 'cp', 'dp')} over {degrees_text(table, 'ep', 'etp')} makes {groups} "
        f"expert-parallel group{'' if groups == 1 else 's'}, it takes a multiple of {MERGED_GROUPS}; change ep, etp or "
        "pp, or add GPUs"
    )
