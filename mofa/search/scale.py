"""Goodput against scale: one plan replicated, or planned anew, under several ways to keep checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Self

import numpy as np
from pydantic import Field, model_validator

from mofa.errors import NothingFits, SpecError, StrategyError
from mofa.faults.ledger import PARTS, Ledger
from mofa.search.feasible import Job, check
from mofa.search.find import estimate, find_plans
from mofa.search.goodput import LongRuns
from mofa.search.key_factors import Sensitivity, sensitivities
from mofa.search.result import SCHEMA_VERSION, FrameworkSummary, Plan, WorkloadSummary
from mofa.specs.base import Spec
from mofa.specs.faults import CheckpointMode, FaultSpec
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.strategy import StrategySpec
from mofa.specs.workload import WorkloadSpec

VARIANTS: tuple[tuple[str, CheckpointMode, bool], ...] = (
    ("blocking", "blocking", False), ("async", "async", False), ("async, spares", "async", True),
    ("peer replicas", "peer", False), ("peer replicas, spares", "peer", True),
)  # fmt: skip
"""Name, mode of the checkpoints, and whether nodes stand by: as many as the profile says, or pay most."""
Progress = Callable[[int, int], None]


class VariantPoint(Spec):
    """A long run at one scale with one way to keep checkpoints."""

    mode: CheckpointMode = Field(description="How checkpoints are kept.")
    spares: int = Field(ge=0, description="Nodes of the point's GPUs that stand by. [nodes]")
    num_gpus: int = Field(gt=0, description="GPUs that compute; the rest of the point's stands by. [-]")
    global_batch: int = Field(gt=0, description="Sequences per step: whole micro-batches of the ranks left. [-]")
    step_s: float = Field(gt=0, description="Time of a step. [s]")
    ettr: float = Field(ge=0, le=1, description="Productive over wall-clock time. [-]")
    checkpoint_interval_s: float | None = Field(description="Compute time between checkpoints; null if never. [s]")
    effective_tokens_per_s_per_gpu: float = Field(ge=0, description="Over all GPUs, spares included. [tokens/s]")
    host_memory_fits: bool = Field(description="Whether the nodes' memory holds what the mode keeps there.")
    ledger: Ledger = Field(description="Shares of the wall-clock time; they sum to 1.")


class ScalePoint(Spec):
    """A plan at one number of GPUs."""

    num_gpus: int = Field(gt=0, description="GPUs of the cluster, spares included. [-]")
    global_batch: int = Field(gt=0, description="Sequences per optimizer step. [-]")
    strategy: StrategySpec | None = Field(description="The plan on all GPUs; null where there is none.")
    step_s: float | None = Field(description="Time of a step on all GPUs; null without a plan. [s]")
    tokens_per_s_per_gpu: float | None = Field(description="Without failures; null without a plan. [tokens/s]")
    mtbf_s: float | None = Field(description="Mean time between failures on all GPUs; null where none fails. [s]")
    why: str | None = Field(description="Why there is no plan, or none that spares nodes; null where there is.")
    variants: dict[str, VariantPoint] = Field(description="Long runs by name of the variant; empty without a plan.")


class GoodputReport(Spec):
    """What ``mofa goodput WORKLOAD CLUSTER --json`` prints."""

    schema_version: str = Field(default=SCHEMA_VERSION, description="Version of this contract.")
    workload: WorkloadSummary = Field(description="The training job.")
    node: str = Field(description="Name of the node type.")
    framework: FrameworkSummary = Field(description="The training framework.")
    faults: str = Field(description="Name of the fault profile.")
    weak: bool = Field(description="Whether the global batch grows with the GPUs.")
    replan: bool = Field(description="Whether every scale has a plan of its own; else dp of one is replicated.")
    points: tuple[ScalePoint, ...] = Field(min_length=1, description="By rising number of GPUs.")
    sensitivity: tuple[Sensitivity, ...] = Field(description="Key factors, the strongest first.")
    sensitivity_num_gpus: int = Field(gt=0, description="GPUs that sensitivity is of: the most that have a plan. [-]")
    sensitivity_ettr: float = Field(ge=0, le=1, description="The ETTR that the factors move. [-]")

    @model_validator(mode="after")
    def _check(self) -> Self:
        numbers = [point.num_gpus for point in self.points]
        if numbers != sorted(set(numbers)):
            raise ValueError("points: must rise in num_gpus")
        return self

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per scale and variant."""
        rows = []
        for point in self.points:
            for name, found in point.variants.items():
                fields = found.model_dump(exclude={"ledger", "num_gpus"})
                row = {"num_gpus": point.num_gpus, "variant": name, "job_gpus": found.num_gpus, **fields}
                rows.append({**row, **found.ledger.model_dump()})
        return rows


def goodput_by_scale(
    workload: WorkloadSpec, cluster: ClusterSpec, faults: FaultSpec, numbers: Sequence[int], framework: FrameworkSpec,
    *, strategy: object | None = None, weak: bool = False, replan: bool = False, progress: Progress | None = None,
) -> GoodputReport:  # fmt: skip
    """ETTR and effective throughput of a job at several numbers of GPUs.

    Parameters
    ----------
    cluster
        Gives the nodes; its number of GPUs is replaced.
    faults
        With reliability, restarts and storage. Its checkpoint mode and spares are what the sensitivity is of; the
        variants have their own.
    numbers
        GPUs of the cluster, spares included, rising. [-]
    strategy
        The plan at the first number; where absent the best there that can be replicated to the most GPUs.
    weak
        Whether the global batch grows with the GPUs; else it is fixed.
    replan
        Whether a plan is sought at every number; else the first one's dp is multiplied.

    Raises
    ------
    SpecError
        If the profile lacks what is needed.
    NothingFits
        If no number has a plan.
    """
    lacks = LongRuns(workload, cluster, framework, faults).missing()
    if "ettr" in lacks:
        raise SpecError(f"{faults.name}: {lacks['ettr']}")
    points, plans = [], []
    base: StrategySpec | None = None
    at = [_job_at(workload, cluster, number, numbers[0], weak) for number in numbers]
    for i, (job, machines) in enumerate(at):
        if i == 0 and strategy is None and not replan:
            plan, why = _replicable(at, framework)
        else:
            plan, why = _plan(job, machines, framework, base, strategy, numbers[0], replan)
        if plan is not None and base is None and not replan and i == 0:
            base = plan.strategy
        points.append(_point(job, machines, framework, faults, plan, why))
        plans.append((plan, job, machines))
        if progress is not None:
            progress(i + 1, len(numbers))
        if base is None and not replan:
            break  # nothing to replicate
    found = [(plan, job, machines) for plan, job, machines in plans if plan is not None]
    if not found:
        raise NothingFits(f"{workload.name}: {points[0].why}; give more GPUs, or --replan")
    plan, job, machines = found[-1]
    left = _Left(plan, job, machines, 0)
    if faults.spares:
        fewer = _fewer_replicas(left, framework, faults.spares)
        if fewer is None:
            raise SpecError(f"--spares: {faults.spares} leave no replica of the plan at {machines.num_gpus:,} GPUs; "
                            "take fewer, or more GPUs")  # fmt: skip
        left = fewer
    factors, ettr = sensitivities(LongRuns(left.job, left.machines, framework, faults, spares=left.spares), left.plan)
    return GoodputReport(
        workload=WorkloadSummary.of(workload), node=cluster.node.name, framework=FrameworkSummary.of(framework),
        faults=faults.name, weak=weak, replan=replan, points=tuple(points), sensitivity=factors,
        sensitivity_num_gpus=machines.num_gpus, sensitivity_ettr=ettr,
    )  # fmt: skip


def _job_at(
    workload: WorkloadSpec, cluster: ClusterSpec, number: int, first: int, weak: bool
) -> tuple[WorkloadSpec, ClusterSpec]:
    """The job and the machines at one scale."""
    machines = cluster.model_copy(update={"num_gpus": number})
    if not weak:
        return workload, machines
    batch = workload.batch.model_copy(update={"global_batch": workload.batch.global_batch * number // first})
    return workload.model_copy(update={"batch": batch}), machines


def _replicable(
    at: Sequence[tuple[WorkloadSpec, ClusterSpec]], framework: FrameworkSpec
) -> tuple[Plan | None, str | None]:
    """The best plan at the first scale among those whose replicas the framework runs at the most GPUs it can."""
    job, machines = at[0]
    found = find_plans(job, machines, framework=framework, top=1, replay=False)
    if not found.report.plans:
        return None, f"nothing fits {machines.num_gpus:,} GPUs"
    fits = np.flatnonzero(found.reasons[found.costed.rows] < 0)
    table = found.costed.table.take(fits)
    for larger_job, larger in reversed(at[1:]):
        wider = replace(table, dp=table.dp * larger.num_gpus // machines.num_gpus)
        runs = fits[check(Job(larger_job, larger, framework), wider).reason < 0]
        if len(runs):
            best = runs[np.argmin(found.costed.step_s[runs])]
            strategy = found.costed.table.row(int(best), framework.name)
            return estimate(job, machines, strategy, framework=framework, replay=False), None
    return found.report.plans[0], None


def _plan(
    job: WorkloadSpec, machines: ClusterSpec, framework: FrameworkSpec, base: StrategySpec | None,
    strategy: object | None, first: int, replan: bool,
) -> tuple[Plan | None, str | None]:  # fmt: skip
    """The plan at one scale, or why there is none."""
    try:
        if base is not None:
            wider = base.model_copy(update={"dp": base.dp * machines.num_gpus // first})
            plan = estimate(job, machines, wider, framework=framework, replay=False)
        elif strategy is not None and not replan:
            plan = estimate(job, machines, strategy, framework=framework, replay=False)
        else:
            plans = find_plans(job, machines, framework=framework, top=1, replay=False).report.plans
            if not plans:
                return None, f"nothing fits {machines.num_gpus:,} GPUs"
            plan = plans[0]
    except StrategyError as error:
        return None, str(error)
    if not plan.memory.fits:
        return None, f"the plan does not fit {machines.num_gpus:,} GPUs"
    return plan, None


@dataclass(frozen=True)
class _Left:
    """What computes when ``spares`` nodes stand by."""

    plan: Plan
    job: WorkloadSpec
    machines: ClusterSpec
    spares: int


def _fewer_replicas(whole: _Left, framework: FrameworkSpec, least: int) -> _Left | None:
    """The plan with as many data-parallel replicas as leave at least so many nodes to stand by; None if none is left.

    Every replica takes whole micro-batches, so that the global batch may fall below the one given, by less than one
    micro-batch per replica (as Megatron's ``--decrease-batch-size-if-needed`` has it); pipelines with virtual stages
    take them ``pp`` at a time.
    """
    s, node = whole.plan.strategy, whole.machines.node.gpus_per_node
    inner, by = s.tp * s.cp * s.pp, replicas_at_once(whole.plan, whole.machines)
    dp = (whole.machines.num_gpus - least * node) // inner // by * by
    if dp < 1:
        return None
    batch, at_once = whole.job.batch.global_batch, s.micro_batch * dp * (s.pp if s.vpp > 1 else 1)
    if batch < at_once:
        return None
    fewer = whole.job.batch.model_copy(update={"global_batch": batch // at_once * at_once})
    job = whole.job.model_copy(update={"batch": fewer})
    machines = whole.machines.model_copy(update={"num_gpus": dp * inner})
    try:
        plan = estimate(job, machines, s.model_copy(update={"dp": dp}), framework=framework, replay=False)
    except StrategyError:
        return None
    return _Left(plan, job, machines, (whole.machines.num_gpus - dp * inner) // node) if plan.memory.fits else None


def replicas_at_once(plan: Plan, machines: ClusterSpec) -> int:
    """Data-parallel replicas that a plan gives up together: whole nodes, and whole groups of experts. [-]"""
    s, node = plan.strategy, machines.node.gpus_per_node
    experts = s.ep * s.etp // math.gcd(s.ep * s.etp, s.tp * s.cp)
    return math.lcm(experts if s.ep > 1 else 1, node // math.gcd(node, s.tp * s.cp * s.pp))


def most_with_spares(runs: LongRuns, plan: Plan, most: int) -> list[tuple[int, float]]:
    """Nodes to take out of those of a plan, each with the most that they can give, the highest first. [tokens/s]

    Parameters
    ----------
    runs
        Of all nodes, none of which stands by yet.
    plan
        Its micro-batches and its pipeline's bubble are taken for those of fewer replicas, what comes once a step for
        nothing: a step of them takes at least as long.
    most
        Nodes that may stand by. [nodes]

    Notes
    -----
    The closed forms of every number at once, over all GPUs, spares included. A number whose replicas the batch does not
    fill is left out.
    """
    cluster, s = runs.cluster, plan.strategy
    node, inner, by = cluster.node.gpus_per_node, s.tp * s.cp * s.pp, replicas_at_once(plan, cluster)
    dp = np.arange(s.dp // by * by, 0, -by)
    spares = (cluster.num_gpus - dp * inner) // node
    batch, at_once = runs.workload.batch.global_batch, s.micro_batch * dp * (s.pp if s.vpp > 1 else 1)
    whole = batch // at_once * at_once
    mine = (spares > 0) & (spares <= most) & (whole > 0)
    dp, spares, whole = dp[mine], spares[mine], whole[mine]
    if len(dp) == 0:
        return []
    exposed = plan.time.exposed
    each = plan.step_s - sum(exposed[name] for name in ("bubble", "dp", "optimizer"))
    step_s = each * (whole / dp) / (batch / s.dp) + exposed["bubble"]
    found = runs.outlook(
        step_s, np.full(len(dp), plan.checkpoint_bytes or 0.0), spares=spares, num_gpus=dp * inner
    )  # fmt: skip
    bound = whole * runs.workload.batch.seq_len / step_s * found.ettr / cluster.num_gpus
    return [(int(spares[i]), float(bound[i])) for i in np.argsort(-bound, kind="stable")]


def _best_spares(
    whole: _Left, runs: LongRuns, most: int, fewer: Callable[[int], _Left | None]
) -> VariantPoint | None:  # fmt: skip
    """The number of spares with the most effective tokens per second; None where no replica can be left out.

    Numbers are costed from the highest bound on, until no other can give more.
    """
    best: VariantPoint | None = None
    for number, bound in most_with_spares(runs, whole.plan, most):
        if best is not None and bound <= best.effective_tokens_per_s_per_gpu:
            break
        left = fewer(number)
        if left is None:
            continue
        found = _variant(_runs_of(runs, left), left)
        if best is None or found.effective_tokens_per_s_per_gpu > best.effective_tokens_per_s_per_gpu:
            best = found
    return best


def _runs_of(runs: LongRuns, left: _Left) -> LongRuns:
    return LongRuns(left.job, left.machines, runs.framework, runs.faults, spares=left.spares)


def _point(
    job: WorkloadSpec, machines: ClusterSpec, framework: FrameworkSpec, faults: FaultSpec, plan: Plan | None,
    why: str | None,
) -> ScalePoint:  # fmt: skip
    variants: dict[str, VariantPoint] = {}
    mtbf: float | None = None
    if plan is not None:
        whole = _Left(plan, job, machines, 0)
        fewer = cache(partial(_fewer_replicas, whole, framework))  # the same plans under every mode of checkpoints
        for name, mode, stands_by in VARIANTS:
            checkpoint = faults.checkpoint.model_copy(update={"mode": mode})
            asked = faults.model_copy(update={"checkpoint": checkpoint})
            runs = LongRuns(job, machines, framework, asked)
            most = runs.num_nodes - (faults.checkpoint.copies if mode == "peer" else 1)
            if most < 0:
                why = f"{faults.checkpoint.copies} copies need as many nodes, not {runs.num_nodes}"
                continue
            course: VariantPoint | None
            if not stands_by:
                course = _variant(runs, whole)
            elif faults.spares is None:
                course = _best_spares(whole, runs, most, fewer)
            else:
                left = fewer(faults.spares) if faults.spares else whole
                course = None if left is None else _variant(_runs_of(runs, left), left)
            if course is None:
                nodes = f"{faults.spares} of {runs.num_nodes} nodes" if faults.spares else "any node"
                why = f"with {nodes} standing by no replicas of the plan are left that run and fit"
                continue
            variants[name] = course
            if not stands_by:
                reference = runs.outlook(np.array([plan.step_s]), np.array([plan.checkpoint_bytes or 0.0]))
                mtbf = None if np.isinf(reference.mtbf_s[0]) else float(reference.mtbf_s[0])
    return ScalePoint(
        num_gpus=machines.num_gpus, global_batch=job.batch.global_batch,
        strategy=None if plan is None else plan.strategy, step_s=None if plan is None else plan.step_s,
        tokens_per_s_per_gpu=None if plan is None else plan.tokens_per_s_per_gpu, mtbf_s=mtbf, why=why,
        variants=variants,
    )  # fmt: skip


def _variant(runs: LongRuns, left: _Left) -> VariantPoint:
    plan, bytes_ = left.plan, np.array([left.plan.checkpoint_bytes or 0.0])
    found = runs.outlook(np.array([plan.step_s]), bytes_)
    ettr, interval = float(found.ettr[0]), float(found.interval_s[0])
    all_gpus = runs.cluster.num_gpus + runs.spare_gpus
    return VariantPoint(
        mode=runs.faults.checkpoint.mode,
        spares=runs.spares,
        num_gpus=runs.cluster.num_gpus,
        global_batch=left.job.batch.global_batch,
        step_s=plan.step_s,
        ettr=ettr,
        checkpoint_interval_s=None if np.isinf(interval) else interval,
        effective_tokens_per_s_per_gpu=plan.tokens_per_s_per_gpu * ettr * runs.cluster.num_gpus / all_gpus,
        host_memory_fits=bool(runs.times(bytes_).host_bytes[0] <= runs.cluster.node.host_memory_bytes.value),
        ledger=Ledger(**{part: float(found.parts[part][0]) for part in PARTS}),
    )
