"""What a report says of a plan beyond its own numbers: its roofline, neighbours, resources and the runs near it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mofa.specs.base import Spec
from mofa.specs.strategy import StrategySpec

KernelKind = Literal["gemm", "grouped_gemm", "attention", "memory_bound"]


class RooflinePoint(Spec):
    """Kernels of one kind on one GPU: a forward and a backward of every layer, of one micro-batch."""

    kind: KernelKind
    flops: float = Field(ge=0, description="What they compute; 0 of memory-bound ones, which is not counted. [FLOP]")
    bytes: float = Field(ge=0, description="What they move at least: every operand and result once. [B]")
    seconds: float = Field(gt=0, description="Their own time on the device. [s]")
    peak_flops_per_s: float = Field(gt=0, description="Dense peak of their format; of several the highest. [FLOP/s]")

    @property
    def flops_per_byte(self) -> float:
        """Arithmetic intensity. [FLOP/B]"""
        return self.flops / self.bytes

    @property
    def flops_per_s(self) -> float:
        """What they reach. [FLOP/s]"""
        return self.flops / self.seconds

    @property
    def bytes_per_s(self) -> float:
        """What they move a second, at least. [B/s]"""
        return self.bytes / self.seconds


class Roofline(Spec):
    """The kernels of a step against what the GPU can do."""

    points: tuple[RooflinePoint, ...]
    memory_bandwidth_bytes_per_s: float = Field(gt=0, description="Of the GPU's memory, by its datasheet. [B/s]")


class ResourceChange(Spec):
    """The step of the same strategy with a tenth less and a tenth more of one resource, in closed form."""

    resource: str
    step_change_less: float = Field(description="Step with 10 % less over the step, - 1. [-]")
    step_change_more: float = Field(description="Step with 10 % more over the step, - 1. [-]")
    fits_less: bool = Field(default=True, description="Whether the strategy fits with 10 % less.")
    fits_more: bool = Field(default=True, description="Whether it fits with 10 % more.")

    @property
    def swing(self) -> float:
        """How far apart the two are. [-]"""
        return abs(self.step_change_less - self.step_change_more)


class StrategyChange(Spec):
    """The plan's strategy with one choice changed, in closed form: what it would bring, or why it cannot be."""

    field: str = Field(description="What is changed.")
    value: str = Field(description="To what.")
    strategy: StrategySpec
    step_change: float | None = Field(default=None, description="Its step over the plan's, - 1; null: illegal. [-]")
    device_bytes: float | None = Field(default=None, description="Memory of its fullest GPU; null: illegal. [B]")
    fits: bool = Field(default=False, description="Whether that is within the limit.")
    most_changed: str | None = Field(
        default=None, description="The part of the step that grows most; of a shorter step: that shrinks most."
    )
    most_changed_s: float | None = Field(default=None, description="By how much. [s]")
    refused: str | None = Field(default=None, description="Why it is illegal; null where it is not.")


class NearRun(Spec):
    """A measured or published run like the job: what it took and what was predicted of it."""

    id: str
    source: str = Field(description="Whose: measured ones are ours.")
    model: str
    gpu: str
    num_gpus: int = Field(ge=1)
    strategy: str
    measured_s: float = Field(gt=0, description="A step of it. [s]")
    error: float = Field(description="Predicted over measured step - 1. [-]")
    memory_error: float | None = Field(description="The same of its peak allocated memory; null: not measured. [-]")
    is_judging: bool = Field(description="Whether nothing was learned from it.")
    differs_in: tuple[str, ...] = Field(description="In which of the compared traits it differs from the job.")


class PlanAnalysis(Spec):
    """What a report says of a plan besides."""

    roofline: Roofline
    resources: tuple[ResourceChange, ...] = Field(description="The strongest first.")
    changes: tuple[StrategyChange, ...]
    near_runs: tuple[NearRun, ...] = Field(description="The nearest first.")
