"""Goodput against scale: the types of what ``mofa goodput WORKLOAD CLUSTER`` returns."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from mofa.faults.ledger import Ledger
from mofa.plan.result import SCHEMA_VERSION
from mofa.plan.summaries import FrameworkSummary, WorkloadSummary
from mofa.specs.base import Spec
from mofa.specs.faults import CheckpointMode, Recovery
from mofa.specs.strategy import StrategySpec


class Sensitivity(Spec):
    """ETTR with one factor halved and doubled."""

    factor: str = Field(description="What changes.")
    ettr_halved: float = Field(ge=0, le=1, description="With half of it. [-]")
    ettr_doubled: float = Field(ge=0, le=1, description="With twice of it. [-]")

    @property
    def swing(self) -> float:
        """How far the ETTR moves between the two. [-]"""
        return abs(self.ettr_doubled - self.ettr_halved)


class VariantPoint(Spec):
    """A long run at one scale with one way to keep checkpoints."""

    mode: CheckpointMode = Field(description="How checkpoints are kept.")
    recovery: Recovery = Field(description="From a checkpoint, or from the other replicas, which go on meanwhile.")
    spares: int = Field(ge=0, description="Nodes of the point's GPUs that stand by. [nodes]")
    num_gpus: int = Field(gt=0, description="GPUs that compute; the rest of the point's stands by. [-]")
    global_batch: int = Field(gt=0, description="Sequences per optimizer step, the point's. [-]")
    strategy: StrategySpec = Field(description="The plan on the GPUs that compute.")
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
            for name, variant in point.variants.items():
                fields = variant.model_dump(exclude={"ledger", "num_gpus", "strategy"})
                row = {"num_gpus": point.num_gpus, "variant": name, "job_gpus": variant.num_gpus, **fields}
                row |= {
                    name: getattr(variant.strategy, name) for name in ("tp", "cp", "pp", "vpp", "dp", "micro_batch")
                }
                rows.append({**row, **variant.ledger.model_dump()})
        return rows
