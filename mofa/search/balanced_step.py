"""The step of a strategy with its routing played out: plain expert parallelism against scheduled replicas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mofa.cost.loads import RoutingLoads, Scheduled
from mofa.errors import SpecError
from mofa.routing.load import expert_shares
from mofa.routing.scheduled import scheduling_s
from mofa.search.balance import BalanceReport, Progress, StepBalance, make_report
from mofa.search.find import with_numerics
from mofa.search.plan import Candidate
from mofa.search.single import one_row
from mofa.specs.complete import complete_strategy
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.model import ModelSpec
from mofa.specs.overrides import parse_strategy
from mofa.specs.strategy import MERGED_GROUPS, StrategySpec, StrategyTable
from mofa.specs.workload import WorkloadSpec

if TYPE_CHECKING:
    from mofa.routing.balance.simulate import Played, Setup

FloatA = NDArray[np.float64]
WEIGHT_BYTES, STATE_BYTES = 2.0, 12.0
"""Of a parameter: the bf16 weight that every replica holds; the fp32 master weight and two moments that an expert's
replicas share (Megatron-Core's distributed optimizer). [B]"""


def balance_workload(
    workload: WorkloadSpec,
    setup: Setup,
    *,
    tokens: int,
    micro_batches: int | None = None,
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
        How many; by default those of a trace, or enough for the routing's samples.
    progress
        Told layers done and in all.
    """
    inputs, played = _play(workload, setup, tokens, micro_batches, progress)
    return make_report(workload.name, setup, str(workload.routing), inputs, played)


def balance_step(
    workload: WorkloadSpec,
    cluster: ClusterSpec,
    strategy: str,
    setup: Setup,
    *,
    framework: FrameworkSpec,
    micro_batches: int | None = None,
    progress: Progress | None = None,
) -> BalanceReport:
    """Balance the experts of a workload and cost its step without and with it.

    Parameters
    ----------
    workload, cluster, framework
        The job, the machines, the framework.
    strategy
        As ``mofa estimate --strategy`` takes it; ``setup`` must be of its ep and two merged groups.
    setup, micro_batches, progress
        As in :func:`balance_workload`.

    Raises
    ------
    StrategyError
        If the framework cannot run the strategy, or replicas cannot be scheduled under it.

    Notes
    -----
    Each step is costed with the loads that were played: of a layer and micro-batch the fullest rank, averaged, for time
    and, for the all-to-all, the tokens that the busiest rank exchanges; for memory the routing's quantile over layers,
    micro-batches and ranks. Placing a layer's experts anew moves, to each GPU, their weights and its part of the
    optimizer's states over the network between nodes, all layers of a stage one after the other.
    """
    row, spec = _rows(workload, cluster, framework, strategy)
    tokens = int(spec.micro_batch * workload.batch.seq_len / spec.cp / (spec.tp if spec.sp else 1))
    inputs, played = _play(workload, setup, tokens, micro_batches, progress)
    workload, framework = with_numerics(workload, cluster, framework, ())
    model, ep = workload.model, spec.ep
    assert model.moe is not None
    overhead_s = scheduling_s(model.moe.num_experts)
    ratio, quantile = played.max_over_mean, workload.routing.memory_quantile
    uniform = 1.0 - 1.0 / setup.num_gpus

    def loads(scheme: str) -> RoutingLoads:
        time = {ep: float(ratio["plain"].mean())}
        memory = {ep: _quantile(played.rank_ratios["plain"], quantile)}
        held = _quantile(played.rank_ratios["micro_moe"], quantile)
        sent = float(played.sent["micro_moe"].mean()) / uniform
        return RoutingLoads(time, memory, {ep: Scheduled(float(ratio[scheme].mean()), held, sent, overhead_s)})

    def step(balanced: StrategyTable, given: RoutingLoads) -> tuple[float, float]:
        plan = Candidate(workload, cluster, framework, balanced, given, "causal").plan(replay=False)
        return plan.step_s, plan.memory.device_bytes

    scheduled = replace(row, balancing=np.array([1]))
    before_s, before_bytes = step(row, loads("micro_moe"))
    after_s, after_bytes = step(scheduled, loads("micro_moe"))
    result = StepBalance(
        strategy=strategy, before_s=before_s, after_s=after_s, gain_fraction=before_s / after_s - 1.0,
        adaptive_s=step(scheduled, loads("micro_moe_adaptive"))[0], balanced_s=step(row, RoutingLoads({}, {}))[0],
        overhead_s=overhead_s, before_bytes=before_bytes, after_bytes=after_bytes,
    )  # fmt: skip
    return make_report(
        workload.name, setup, str(workload.routing), inputs, played, step=result,
        migration_s=_migration_s(cluster, model, setup, played, spec),
        notes=(
            ("overhead of scheduling: solving as measured on one core, the rest of the dispatch as published "
            "(MicroMoE, figure 9), not overlapped"),
            "adaptive_s leaves out migration_s, which every new placement costs once",
        ),
    )  # fmt: skip


def step_setup(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, strategy: str
) -> tuple[int, int, int]:
    """Experts, GPUs of the merged group and ep of a strategy's scheduled replicas.

    Raises
    ------
    StrategyError
        If the strategy cannot have any.
    """
    _, spec = _rows(workload, cluster, framework, strategy)
    assert workload.model.moe is not None
    return workload.model.moe.num_experts, MERGED_GROUPS * spec.ep, spec.ep


def _rows(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, strategy: str
) -> tuple[StrategyTable, StrategySpec]:
    """The plain strategy, checked as if it were balanced."""
    if workload.model.moe is None:
        raise SpecError(f"{workload.name}: has no experts to balance; name a model that has")
    given = parse_strategy(strategy)
    if "balancing" in given:
        raise SpecError("--strategy: balancing is costed both ways here; leave it out")
    fields = {**given, "balancing": "micro_moe"}
    spec = complete_strategy(fields, cluster.num_gpus, framework, moe=True)
    scheduled = one_row(workload, cluster, framework, spec)
    return replace(scheduled, balancing=np.array([0])), spec


def _play(
    workload: WorkloadSpec, setup: Setup, tokens: int, micro_batches: int | None, progress: Progress | None
) -> tuple[NDArray[np.int64], Played]:
    from mofa.routing.balance.simulate import draw_inputs, play

    moe = workload.model.moe
    if moe is None:
        raise SpecError(f"{workload.name}: has no experts to balance; name a model that has")
    if workload.routing.capacity_factor is not None:
        raise SpecError("routing.capacity_factor: dropping is a baseline here (--capacity-factor); leave it out")
    if tokens < 1:
        raise SpecError(f"tokens ({tokens}) of a GPU must be at least 1; give longer sequences or a lower cp")
    shares = expert_shares(workload.routing, workload.model, micro_batches)
    inputs = draw_inputs(shares, tokens * moe.top_k, setup.num_gpus, setup.seed)
    return inputs, play(inputs, setup, progress)


def _quantile(ratios: FloatA, quantile: float) -> float:
    return max(float(np.quantile(ratios, quantile, method="inverted_cdf")), 1.0)


def _migration_s(
    cluster: ClusterSpec, model: ModelSpec, setup: Setup, played: Played, spec: StrategySpec
) -> float | None:
    """Time of one new placement of all layers of a stage, at the busiest GPU. [s]"""
    if not played.moved:
        return None
    assert model.moe is not None
    matrices = 3 if model.mlp.activation == "swiglu" else 2
    params = matrices * model.hidden * model.moe.expert_hidden / spec.etp
    replica_bytes = params * (WEIGHT_BYTES + STATE_BYTES / setup.merged)
    inside = setup.num_gpus * spec.etp <= cluster.node.gpus_per_domain
    link = cluster.node.intra.bandwidth_bytes_per_s.value if inside else cluster.nic_bandwidth_per_gpu_bytes_per_s
    layers = -(-model.num_moe_layers // spec.pp)
    return float(np.mean(played.moved)) * replica_bytes * layers / link


def trace_workload(workload: WorkloadSpec, trace: Path) -> WorkloadSpec:
    """The workload with the routing of a trace."""
    kept = {"seed": workload.routing.seed, "memory_quantile": workload.routing.memory_quantile}
    routing = type(workload.routing).model_validate({"kind": "counts", "file": str(trace), **kept})
    return workload.model_copy(update={"routing": routing})
