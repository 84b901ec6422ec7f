"""Goodput against scale: one plan replicated, or planned anew, under several ways to keep checkpoints; key factors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
from pydantic import Field, model_validator

from mofa.errors import NothingFits, SpecError, StrategyError
from mofa.faults.ledger import PARTS, Ledger
from mofa.faults.outlook import failures_per_node_day
from mofa.faults.spares import poisson_spares
from mofa.search.find import estimate, find_plans
from mofa.search.goodput import LongRuns
from mofa.search.result import SCHEMA_VERSION, FrameworkSummary, Plan, WorkloadSummary
from mofa.specs.base import Spec
from mofa.specs.faults import CheckpointMode, CheckpointSpec, FaultSpec
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.strategy import StrategySpec
from mofa.specs.workload import WorkloadSpec
from mofa.units import SECONDS_PER_DAY

SPARE_QUANTILE = 0.99
VARIANTS: tuple[tuple[str, CheckpointMode, bool], ...] = (
    ("blocking", "blocking", False), ("async", "async", False), ("async, spares", "async", True),
    ("peer replicas", "peer", False), ("peer replicas, spares", "peer", True),
)  # fmt: skip
"""Name, mode of the checkpoints, and whether nodes stand by: as many as the profile says, or suffice with 99 %."""
Progress = Callable[[int, int], None]


class VariantPoint(Spec):
    """A long run at one scale with one way to keep checkpoints."""

    mode: CheckpointMode = Field(description="How checkpoints are kept.")
    spares: int = Field(ge=0, description="Nodes that stand by, besides num_gpus. [nodes]")
    ettr: float = Field(ge=0, le=1, description="Productive over wall-clock time. [-]")
    checkpoint_interval_s: float | None = Field(description="Compute time between checkpoints; null if never. [s]")
    effective_tokens_per_s_per_gpu: float = Field(ge=0, description="Over all GPUs, spares included. [tokens/s]")
    host_memory_fits: bool = Field(description="Whether the nodes' memory holds what the mode keeps there.")
    ledger: Ledger = Field(description="Shares of the wall-clock time; they sum to 1.")


class ScalePoint(Spec):
    """A plan at one number of GPUs."""

    num_gpus: int = Field(gt=0, description="GPUs of the job. [-]")
    global_batch: int = Field(gt=0, description="Sequences per optimizer step. [-]")
    strategy: StrategySpec | None = Field(description="The plan; null where there is none.")
    step_s: float | None = Field(description="Time of a step; null without a plan. [s]")
    tokens_per_s_per_gpu: float | None = Field(description="Without failures; null without a plan. [tokens/s]")
    mtbf_s: float | None = Field(description="Mean time between failures of the job; null where nothing fails. [s]")
    why: str | None = Field(description="Why there is no plan; null where there is one.")
    variants: dict[str, VariantPoint] = Field(description="Long runs by name of the variant; empty without a plan.")


class Sensitivity(Spec):
    """ETTR with one factor halved and doubled."""

    factor: str = Field(description="What changes.")
    ettr_halved: float = Field(ge=0, le=1, description="With half of it. [-]")
    ettr_doubled: float = Field(ge=0, le=1, description="With twice of it. [-]")

    @property
    def swing(self) -> float:
        """How far the ETTR moves between the two. [-]"""
        return abs(self.ettr_doubled - self.ettr_halved)


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
                row = {"num_gpus": point.num_gpus, "variant": name, **found.model_dump(exclude={"ledger"})}
                rows.append({**row, **found.ledger.model_dump(), "step_s": point.step_s})
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
        GPUs of the job, rising. [-]
    strategy
        The plan at the first number; the best one where absent.
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
    for i, number in enumerate(numbers):
        machines = cluster.model_copy(update={"num_gpus": number})
        job = workload
        if weak:
            batch = workload.batch.model_copy(
                update={"global_batch": workload.batch.global_batch * number // numbers[0]}
            )
            job = workload.model_copy(update={"batch": batch})
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
    own = LongRuns(job, machines, framework, faults, spares=faults.spares or 0)
    factors, ettr = sensitivities(own, plan)
    return GoodputReport(
        workload=WorkloadSummary.of(workload), node=cluster.node.name, framework=FrameworkSummary.of(framework),
        faults=faults.name, weak=weak, replan=replan, points=tuple(points), sensitivity=factors,
        sensitivity_num_gpus=machines.num_gpus, sensitivity_ettr=ettr,
    )  # fmt: skip


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


def _point(
    job: WorkloadSpec, machines: ClusterSpec, framework: FrameworkSpec, faults: FaultSpec, plan: Plan | None,
    why: str | None,
) -> ScalePoint:  # fmt: skip
    variants: dict[str, VariantPoint] = {}
    mtbf: float | None = None
    if plan is not None:
        for name, mode, stands_by in VARIANTS:
            checkpoint = faults.checkpoint.model_copy(update={"mode": mode})
            spares = enough_spares(machines, faults) if stands_by else 0
            if stands_by and faults.spares is not None:
                spares = faults.spares
            runs = LongRuns(
                job, machines, framework, faults.model_copy(update={"checkpoint": checkpoint}), spares=spares
            )
            variants[name] = _variant(runs, plan)
            found = runs.outlook(np.array([plan.step_s]), np.array([plan.checkpoint_bytes or 0.0]))
            mtbf = None if np.isinf(found.mtbf_s) else found.mtbf_s
    return ScalePoint(
        num_gpus=machines.num_gpus, global_batch=job.batch.global_batch,
        strategy=None if plan is None else plan.strategy, step_s=None if plan is None else plan.step_s,
        tokens_per_s_per_gpu=None if plan is None else plan.tokens_per_s_per_gpu, mtbf_s=mtbf, why=why,
        variants=variants,
    )  # fmt: skip


def enough_spares(machines: ClusterSpec, faults: FaultSpec) -> int:
    """Spares that suffice with 99 %; 0 where no failure takes a node. [nodes]"""
    reliability, restart = faults.reliability, faults.restart
    assert reliability is not None and restart is not None
    node = machines.node.gpus_per_node
    gone = sum(kind.share.value for kind in reliability.kinds if kind.path == "node")
    rate = failures_per_node_day(reliability, node) * max(machines.num_gpus // node, 1) * gone / SECONDS_PER_DAY
    return int(poisson_spares(rate, restart.repair_s.value, SPARE_QUANTILE))


def _variant(runs: LongRuns, plan: Plan) -> VariantPoint:
    bytes_ = np.array([plan.checkpoint_bytes or 0.0])
    found = runs.outlook(np.array([plan.step_s]), bytes_)
    ettr, interval = float(found.ettr[0]), float(found.interval_s[0])
    all_gpus = runs.cluster.num_gpus + runs.spare_gpus
    return VariantPoint(
        mode=runs.faults.checkpoint.mode,
        spares=runs.spares,
        ettr=ettr,
        checkpoint_interval_s=None if np.isinf(interval) else interval,
        effective_tokens_per_s_per_gpu=plan.tokens_per_s_per_gpu * ettr * runs.cluster.num_gpus / all_gpus,
        host_memory_fits=bool(runs.times(bytes_).host_bytes[0] <= runs.cluster.node.host_memory_bytes.value),
        ledger=Ledger(**{part: float(found.parts[part][0]) for part in PARTS}),
    )


FACTORS: dict[str, tuple[str, ...]] = {
    "failure rate": ("reliability.failures_per_node_day", "reliability.components.mttf_s"),
    "noticing and isolating failures": ("reliability.kinds.detect_s", "reliability.kinds.isolate_s"),
    "restarting processes": ("restart.process_s", "restart.reroute_s"),
    "replacing a node": ("restart.hot_spare_s", "restart.reschedule_s"),
    "setting up and warming up": ("restart.initialise_s", "restart.initialise_per_rank_s", "restart.warm_up_s"),
    "repairing nodes": ("restart.repair_s",),
    "storage write rate": ("storage.write_bytes_per_s",),
    "storage read rate": ("storage.read_bytes_per_s",),
    "bytes of a checkpoint": (),
}
"""Facts that each key factor multiplies; a mean time to failure is divided."""


def sensitivities(runs: LongRuns, plan: Plan) -> tuple[tuple[Sensitivity, ...], float]:
    """ETTR with each factor halved and doubled, at the best interval of each, the strongest first; and as it is. [-]"""

    def ettr(faults: FaultSpec, by_bytes: float = 1.0) -> float:
        changed = replace(runs, faults=faults)
        bytes_ = np.array([plan.checkpoint_bytes or 0.0])
        # the whole checkpoint grows as a rank's share does: as storage that is so much slower, and host links
        storage = faults.storage
        if by_bytes != 1.0 and storage is not None:
            slower = {
                name: getattr(storage, name).model_copy(update={"value": getattr(storage, name).value / by_bytes})
                for name in ("write_bytes_per_s", "read_bytes_per_s")
            }
            changed = replace(runs, faults=faults.model_copy(update={"storage": storage.model_copy(update=slower)}))
        return float(changed.outlook(np.array([plan.step_s]), bytes_ * by_bytes).ettr[0])

    out = []
    for factor, paths in FACTORS.items():
        if paths:
            low, high = (ettr(_scaled(runs.faults, paths, by)) for by in (0.5, 2.0))
        else:
            low, high = ettr(runs.faults, 0.5), ettr(runs.faults, 2.0)
        out.append(Sensitivity(factor=factor, ettr_halved=low, ettr_doubled=high))
    out.sort(key=lambda item: -item.swing)
    return tuple(out), ettr(runs.faults)


def _scaled(faults: FaultSpec, paths: Sequence[str], by: float) -> FaultSpec:
    raw = faults.model_dump()
    for path in paths:
        _scale(raw, path.split("."), 1 / by if path.endswith("mttf_s") else by)
    return _rebuilt(faults, raw)


def _scale(raw: Any, keys: list[str], by: float) -> None:
    if raw is None:
        return
    if isinstance(raw, (list, tuple)):
        for item in raw:
            _scale(item, keys, by)
    elif keys:
        _scale(raw.get(keys[0]), keys[1:], by)
    else:
        raw["value"] *= by


def _rebuilt(faults: FaultSpec, raw: Mapping[str, Any]) -> FaultSpec:
    """The profile of changed facts, whose values are SI already."""
    from mofa.specs.base import Fact

    def merged(old: Any, new: Any) -> Any:
        if isinstance(old, Fact):
            return old.model_copy(update={"value": new["value"]})
        if isinstance(old, Spec):
            return old.model_copy(
                update={name: merged(getattr(old, name), new[name]) for name in type(old).model_fields}
            )
        if isinstance(old, tuple):
            return tuple(merged(a, b) for a, b in zip(old, new, strict=True))
        return old

    changed = merged(faults, raw)
    assert isinstance(changed, FaultSpec) and isinstance(changed.checkpoint, CheckpointSpec)
    return changed
