"""The step of a strategy under simulated routing: plain expert parallelism against scheduled replicas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mofa.cost.block.routing_loads import LoadsWithTokenScheduling, RoutingLoads
from mofa.errors import SpecError, StrategyError
from mofa.plan.result import Plan
from mofa.routing.counts import read_counts
from mofa.routing.rank_load import cap_and_redistribute_shares, expert_shares
from mofa.routing.scheduled import token_scheduling_host_s
from mofa.search.experts.balance import BalancedStepComparison, BalanceReport, Progress, balance_report_of_played
from mofa.search.job_setup import with_numerics
from mofa.search.legality.expert_parallel import why_replicas_cannot_be_scheduled
from mofa.search.legality.masks import JobAndMachines
from mofa.search.one_strategy import checked_strategy_row
from mofa.search.to_plan.builder import CandidatePlan
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.layer_kind_params import refuse_unmodelled_layer_kinds
from mofa.specs.model import ModelSpec
from mofa.specs.overrides import parse_strategy
from mofa.specs.routing import RoutingSpec
from mofa.specs.strategy import MERGED_GROUPS, StrategySpec, StrategyTable
from mofa.specs.strategy_defaults import complete_strategy
from mofa.specs.workload import WorkloadSpec

if TYPE_CHECKING:
    from mofa.routing.balance.setup import BalanceSetup
    from mofa.routing.balance.token_scheduling import PlayedMicroBatches

FloatA = NDArray[np.float64]
MICRO_BATCHES = 20
"""Default number of simulated micro-batches: adaptive placements are checked twice in these. [-]"""
OVERHEAD_NOTE = (
    "steps by the closed form; overhead of scheduling: solving as measured on one core, the rest of the dispatch as "
    "published (MicroMoE, figure 9), not overlapped; the time of new placements is not in the steps"
)
WEIGHT_BYTES = 2.0
"""Of a parameter: the bf16 weight that every replica holds. The optimizer's fp32 copy and moments are shared by an
expert's replicas (Megatron-Core's distributed optimizer). [B]"""


def balance_report_of_workload(
    workload: WorkloadSpec,
    setup: BalanceSetup,
    *,
    tokens: int,
    micro_batches: int | None = None,
    redraw: bool = False,
    progress: Progress | None = None,
) -> BalanceReport:
    """Balance the experts of a workload, layer by layer, without a cluster.

    Parameters
    ----------
    workload
        The job; its routing says how tokens fall on experts.
    setup
        The group.
    tokens
        Tokens of one micro-batch on one GPU, before routing. [tokens]
    micro_batches
        How many; by default those of a trace, or :data:`MICRO_BATCHES`.
    redraw
        Whether other experts are popular in every micro-batch; otherwise a layer's stay, as they do in a training run
        over many steps, and its tokens alone are drawn anew.
    progress
        Told layers done and in all.
    """
    from mofa.routing.balance.token_scheduling import play_micro_batches

    inputs, notes = _inputs(workload, setup, tokens, micro_batches, redraw)
    return balance_report_of_played(
        workload.name, setup, str(workload.routing), inputs, play_micro_batches(inputs, setup, progress), notes=notes
    )  # fmt: skip


def balance_report_with_step(
    workload: WorkloadSpec,
    cluster: ClusterSpec,
    strategy: str,
    setup: BalanceSetup,
    *,
    framework: FrameworkSpec,
    micro_batches: int | None = None,
    redraw: bool = False,
    progress: Progress | None = None,
) -> BalanceReport:
    """Balance the experts of a workload and cost its step without and with it.

    Parameters
    ----------
    workload, cluster, framework
        The job, the machines, the framework.
    strategy
        As ``mofa estimate --strategy`` takes it; ``setup`` must be of its ep and two merged groups.
    setup, micro_batches, redraw, progress
        As in :func:`balance_report_of_workload`.

    Raises
    ------
    StrategyError
        If the framework cannot run the strategy, or replicas cannot be scheduled under it.

    Notes
    -----
    Each step is costed with the simulated loads. Compute time takes the load of the fullest rank, averaged over layers
    and micro-batches. The all-to-all takes the tokens that the busiest rank exchanges. Memory takes the routing's
    quantile over layers, micro-batches and ranks.

    A new placement of a layer's experts sends each GPU their weights, and its part of the optimizer's states, over the
    network between nodes. The layers of a stage move one after the other.
    """
    from mofa.routing.balance.token_scheduling import play_micro_batches

    row, spec = _rows(workload, cluster, framework, strategy)
    tokens = int(spec.micro_batch * workload.batch.seq_len / spec.cp / (spec.tp if spec.sp else 1))
    inputs, notes = _inputs(workload, setup, tokens, micro_batches, redraw)
    played = play_micro_batches(inputs, setup, progress)
    workload, cluster, framework = with_numerics(workload, cluster, framework, ())
    assert workload.model.moe is not None
    report = balance_report_of_played(workload.name, setup, str(workload.routing), inputs, played)
    ratio, ep, quantile = report.max_over_mean, spec.ep, workload.routing.memory_quantile
    overhead_s = token_scheduling_host_s(workload.model.moe.num_experts)
    memory_ratios = {
        scheme: _quantile(rows, quantile)
        for scheme, rows in played.values_without_first_micro_batch(played.rank_ratios).items()
    }
    sent, uniform = report.sent_over_mean.model_dump(), 1.0 - 1.0 / setup.num_gpus

    def step(scheme: str) -> Plan:
        """The plan under one scheme's load: scheduled in the merged group, or plain expert parallelism."""
        if scheme.startswith("micro_moe"):
            given = LoadsWithTokenScheduling(ratio[scheme], memory_ratios[scheme], sent[scheme] / uniform, overhead_s)
            loads, table = RoutingLoads({}, {}, {ep: given}), replace(row, balancing=np.array([1]))
        else:
            loads, table = RoutingLoads({ep: ratio[scheme]}, {ep: memory_ratios["plain"]}), row
        return CandidatePlan(workload, cluster, framework, table, loads, "causal").plan_in_closed_form(banded=False)

    before, after, adaptive = step("plain"), step("micro_moe"), step("micro_moe_adaptive")
    balanced = CandidatePlan(workload, cluster, framework, row, RoutingLoads({}, {}), "causal").plan_in_closed_form(
        banded=False
    )
    migration_s, gained_s = _migration_s(cluster, workload, setup, played, spec), after.step_s - adaptive.step_s
    result = BalancedStepComparison(
        strategy=strategy, before_s=before.step_s, after_s=after.step_s,
        gain_fraction=before.step_s / after.step_s - 1.0, adaptive_s=adaptive.step_s,
        payback_steps=None if migration_s is None or gained_s <= 0 else migration_s / gained_s,
        eplb_s=step("eplb").step_s, capacity_s=step("capacity").step_s, balanced_s=balanced.step_s,
        overhead_s=overhead_s, before_bytes=before.memory.device_bytes, after_bytes=after.memory.device_bytes,
        limit_bytes=before.memory.limit_bytes, fits_before=before.memory.fits,
        fits_after=after.memory.fits, adaptive_bytes=adaptive.memory.device_bytes, fits_adaptive=adaptive.memory.fits,
    )  # fmt: skip
    adapted = report.adaptive.model_copy(update={"migration_s": migration_s})
    notes = (*report.notes, *notes, OVERHEAD_NOTE)
    return report.model_copy(update={"step": result, "adaptive": adapted, "notes": notes})


def scheduled_replica_setup(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, strategy: str
) -> tuple[int, int, int]:
    """Experts, GPUs of the merged group and ep of a strategy's scheduled replicas.

    Raises
    ------
    StrategyError
        If the strategy cannot have scheduled replicas.
    """
    _, spec = _rows(workload, cluster, framework, strategy)
    assert workload.model.moe is not None
    return workload.model.moe.num_experts, MERGED_GROUPS * spec.ep, spec.ep


def _rows(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, strategy: str
) -> tuple[StrategyTable, StrategySpec]:
    """The strategy without replicas, checked that it could have them."""
    refuse_unmodelled_layer_kinds(workload.model)
    if workload.model.moe is None:
        raise SpecError(f"{workload.name}: has no experts to balance; name a model that has")
    given = parse_strategy(strategy)
    if "balancing" in given:
        raise SpecError("--strategy: balancing is costed both ways here; leave it out")
    plain = checked_strategy_row(workload, cluster, framework, given)
    lacks = why_replicas_cannot_be_scheduled(JobAndMachines(workload, cluster, framework), plain)
    if lacks is not None:
        raise StrategyError(f"--strategy {strategy!r}: its experts cannot be balanced: {lacks}")
    return plain, complete_strategy({**given, "balancing": "micro_moe"}, cluster.num_gpus, framework, moe=True)


def _inputs(
    workload: WorkloadSpec, setup: BalanceSetup, tokens: int, micro_batches: int | None, redraw: bool
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Tokens of every GPU for every expert, (I, L, E, G), and notes for the report."""
    from mofa.routing.balance.inputs import draw_tokens_per_gpu

    moe, routing = workload.model.moe, workload.routing
    if moe is None:
        raise SpecError(f"{workload.name}: has no experts to balance; name a model that has")
    if routing.rank_capacity_factor is not None:
        raise SpecError("routing.rank_capacity_factor: rows of replicas are not padded; leave it out")
    if routing.capacity_factor is not None:
        raise SpecError("routing.capacity_factor: dropping is a baseline here (--capacity-factor); leave it out")
    if tokens < 1:
        raise SpecError(f"tokens ({tokens}) of a GPU must be at least 1; give longer sequences or a lower cp")
    if micro_batches is not None and micro_batches < 1:
        raise SpecError(f"micro-batches ({micro_batches}) must be at least 1")
    if routing.kind == "counts":
        shares, note = _traced_shares(routing, workload.model, setup.num_gpus, micro_batches)
    elif redraw:
        shares = expert_shares(routing, workload.model, micro_batches)
        note = "popular experts are drawn anew for every micro-batch, which no placement by past loads can follow"
    else:
        one_share = expert_shares(routing, workload.model, 1)
        shares = np.broadcast_to(one_share, (micro_batches or MICRO_BATCHES, *one_share.shape[1:]))
        note = "popular experts stay, a layer's tokens are drawn anew (--redraw: other experts in every micro-batch)"
    return draw_tokens_per_gpu(shares, tokens * moe.top_k, setup.num_gpus, setup.seed), (note,)


def _traced_shares(
    routing: RoutingSpec, model: ModelSpec, num_gpus: int, micro_batches: int | None
) -> tuple[FloatA, str]:
    """Shares of a trace, of each GPU where the trace says where tokens come from. (I, L, E) or (I, L, E, G)"""
    from mofa.routing.balance.inputs import token_shares_of_source_counts

    assert routing.file is not None and model.moe is not None
    counts = read_counts(routing.file, model, sources=True)
    num_iterations = len(counts.iterations)
    if micro_batches is not None and micro_batches > num_iterations:
        raise SpecError(f"micro-batches ({micro_batches}): the trace holds {num_iterations} iterations; ask for fewer")
    cap = 1.0 / model.moe.top_k
    if counts.by_source is None:
        shares = counts.tokens[:micro_batches]
        shares = shares / shares.sum(axis=-1, keepdims=True)
        return cap_and_redistribute_shares(shares, cap), "the trace has no source_rank: all GPUs route alike"
    of_gpu = np.moveaxis(token_shares_of_source_counts(counts.by_source[:micro_batches], num_gpus), 2, 3)
    return np.moveaxis(cap_and_redistribute_shares(of_gpu, cap), 3, 2), (
        f"tokens of each GPU by source rank, of which the trace has {counts.by_source.shape[3]}"
    )


def _quantile(ratios: FloatA, quantile: float) -> float:
    return max(float(np.quantile(ratios, quantile, method="inverted_cdf")), 1.0)


def _migration_s(
    cluster: ClusterSpec, workload: WorkloadSpec, setup: BalanceSetup, played: PlayedMicroBatches, spec: StrategySpec
) -> float | None:
    """Time of one new placement of all layers of a stage, at the busiest GPU. [s]"""
    model = workload.model
    if not played.moved:
        return None
    assert model.moe is not None
    matrices = 3 if model.mlp.gated else 2
    params = matrices * model.hidden * model.moe.expert_hidden / spec.etp
    moment_bytes = 2.0 if workload.precision.moments == "bf16" else 4.0
    states_bytes = workload.optimizer.traits.main_and_moments_bytes_per_param(moment_bytes)
    replica_bytes = params * (WEIGHT_BYTES + states_bytes / setup.num_merged_ep_groups)
    inside = setup.num_gpus * spec.etp <= cluster.node.gpus_per_domain
    link = cluster.node.intra.bandwidth_bytes_per_s.value if inside else cluster.nic_bandwidth_per_gpu_bytes_per_s
    layers = -(-model.num_moe_layers // spec.pp)
    return float(np.mean(played.moved)) * replica_bytes * layers / link


def workload_with_trace_routing(workload: WorkloadSpec, trace: Path) -> WorkloadSpec:
    """The workload with the routing of a trace."""
    settings = {"seed": workload.routing.seed, "memory_quantile": workload.routing.memory_quantile}
    routing = type(workload.routing).model_validate({"kind": "counts", "file": str(trace), **settings})
    return workload.model_copy(update={"routing": routing})
