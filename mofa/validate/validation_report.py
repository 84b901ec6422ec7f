"""What a validation returns: errors run by run and group by group, and the JSON of ``mofa validate --json``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from pydantic import Field

from mofa.calibrate.cases import Split
from mofa.measure.records import Split as HalfName
from mofa.plan.step_band import Band
from mofa.specs.base import Library, Provenance, Spec
from mofa.validate.attribute import Attribution
from mofa.validate.coverage import BandCoverage
from mofa.validate.reference import Switch

SCHEMA_VERSION: Final = "1.6"
TRACED = "-traced"
"""What the names of profiled runs end in."""
BY_RULE_SUFFIX = "-by-rule"
"""End of the groups of published rows of which a rule filled what their source leaves open."""
DEFAULT_RECOMPUTE = "-default-recompute"
"""What groups of published rows end in whose recomputation is blank."""


class ComparedQuantity(Spec):
    """One quantity, measured and predicted. [s] or [B]"""

    measured: float = Field(gt=0)
    predicted: float = Field(gt=0)
    error: float = Field(description="predicted / measured - 1. [-]")


class RepeatScore(Spec):
    """One measurement of a configuration that was measured several times, predicted on its host and with its tokens."""

    id: str
    host_op_s: float | None = Field(
        default=None, description="Issue of one small op on its host; null: the profile's. [s]"
    )
    step_time: ComparedQuantity | None = Field(
        default=None, description="Time of one step; null where it says nothing. [s]"
    )
    notes: tuple[str, ...] = ()


class RunScore(Spec):
    """One configuration of a run, predicted and compared with what was measured."""

    id: str
    group: str
    model: str
    gpu: str
    num_gpus: int
    framework: str
    strategy: str
    step_time: ComparedQuantity | None = Field(
        default=None, description="Time of one step; of repeats the median, and what is off by their median error. [s]"
    )
    peak_allocated: ComparedQuantity | None = Field(
        default=None, description="Peak of the live tensors, fullest rank. [B]"
    )
    peak_reserved: ComparedQuantity | None = Field(default=None, description="Peak of the allocator's segments. [B]")
    peak_device: ComparedQuantity | None = Field(default=None, description="Reserved, context and communicators. [B]")
    skewed: bool = Field(default=False, description="Whether tokens fall unevenly on experts.")
    ranks_allocated_errors: tuple[float, ...] = Field(
        default=(), description="Error of the peak allocated memory of every rank, by rank. [-]"
    )
    predicted_step_s: float = Field(gt=0)
    predicted_device_bytes: float = Field(gt=0)
    fits: bool = Field(description="Whether the prediction says that it fits.")
    out_of_memory: bool = Field(description="Whether the run went out of memory.")
    denied_by: str | None = Field(
        default=None,
        description="Run of the same source by whose reading it cannot have gone out of memory by itself: no verdict.",
    )
    provenance: dict[Provenance, float] = Field(description="Shares of the predicted step. [-]")
    weak_fraction: float = Field(description="Share that rests on assumed or extrapolated numbers. [-]")
    exposed: dict[str, float] = Field(description="Where the predicted step goes. [s]")
    played_out: bool = Field(description="Whether steps were played out, or closed forms were taken for a long one.")
    source: str
    notes: tuple[str, ...] = ()
    host_op_s: float | None = Field(
        default=None, description="Issue of one small op on the run's host; null: the profile's. [s]"
    )
    repeats: tuple[RepeatScore, ...] = Field(default=(), description="Every measurement, where there are several.")
    split: HalfName = Field(default="judging", description="Whether bands of steps may be learned from it.")
    num_nodes: int = Field(default=1, ge=1, description="Nodes that it ran on. [-]")
    band: Band | None = Field(default=None, description="The band of the step as predicted.")
    switches: tuple[Switch, ...] = Field(
        default=(), description="Switches that nothing was learned from on Transformer Engine."
    )
    gemm: str = Field(default="bf16", description="Precision of its products, as a workload writes it.")
    has_experts: bool = Field(default=False, description="Whether its model has experts.")
    library: Library | None = Field(default=None, description="The library of layers that its framework runs.")

    @property
    def false_fit(self) -> bool:
        """Went out of memory, which nothing denies, and was said to fit."""
        return self.fits and self.out_of_memory and self.denied_by is None

    @property
    def false_miss(self) -> bool:
        """Ran and was said not to fit."""
        return not self.fits and not self.out_of_memory

    @property
    def has_whole_configuration(self) -> bool:
        """Whether its source gives all that its step depends on; else a default was taken for what is blank."""
        return not self.group.endswith(DEFAULT_RECOMPUTE)

    @property
    def is_filled_by_rule(self) -> bool:
        """Whether a rule filled what its source leaves open: a group of its own, by which no band or set is judged."""
        return self.group.removesuffix(DEFAULT_RECOMPUTE).endswith(BY_RULE_SUFFIX)

    @property
    def source_name(self) -> str:
        """Its source: where published, whose table; else ``measured``."""
        return self.group.removesuffix(DEFAULT_RECOMPUTE) if self.group.startswith("published-") else "measured"

    @property
    def source_and_model(self) -> str:
        """Runs that hang together, of one source and model."""
        return f"{self.source_name} {self.model}"

    @property
    def framework_name(self) -> str:
        """The framework without its options."""
        return self.framework.split()[0]

    @property
    def ran_under_profiler(self) -> bool:
        """Whether a profiler ran beside it, which takes time and memory."""
        return self.id.endswith(TRACED)


class QuantityErrors(Spec):
    """Errors of one quantity over the runs of a group; null where no run says anything of it."""

    runs: int = Field(ge=0, description="Runs that say something of it. [-]")
    mean_abs_error: float | None = Field(default=None, description="Mean of the absolute errors. [-]")
    median_abs_error: float | None = Field(default=None, description="Their median. [-]")
    worst_abs_error: float | None = Field(default=None, description="The largest. [-]")
    worst_run: str | None = Field(default=None, description="Whose it is.")
    bias: float | None = Field(default=None, description="Mean of the signed errors. [-]")
    models: int | None = Field(default=None, description="Sources and models, where runs are averaged within first.")
    mean_abs_error_by_model: float | None = Field(
        default=None, description="Mean over sources and models of the mean within each. [-]"
    )


class GroupScore(Spec):
    """Errors of all runs of one group."""

    runs: int
    step_time: QuantityErrors
    peak_allocated: QuantityErrors
    peak_allocated_ranks: QuantityErrors = Field(description="Of every rank; the runs' means over ranks are averaged.")
    peak_reserved: QuantityErrors
    peak_device: QuantityErrors
    out_of_memory: int = Field(description="Runs that went out of memory, less those of which that is denied. [-]")
    denied: int = Field(description="Runs of which another one's reading denies that they went out of memory. [-]")
    false_fits: int = Field(description="Those of them that were said to fit. [-]")
    false_misses: int = Field(description="Runs that ran and were said not to fit. [-]")
    weak_fraction: float = Field(description="Mean share of the steps on assumed or extrapolated numbers. [-]")
    provenance: dict[Provenance, float] = Field(description="Mean shares of the predicted steps. [-]")


class RunNotScored(Spec):
    """A run that was not predicted."""

    id: str
    group: str
    reason: str
    gpu: str | None = Field(default=None, description="As its source names it; null of measured runs.")


class LayerComparison(Spec):
    """A MoE layer in token chunks, measured alone and predicted with the bundled profile."""

    shape: dict[str, int | str] = Field(description="Sizes by their names in the measurements.")
    folder: str = Field(description="Folder of measurements.")
    split: Split = Field(default="heldout", description="Its set of shapes; a second one is called fresh.")
    step_time: ComparedQuantity = Field(description="Forward and backward. [s]")
    peak_allocated: ComparedQuantity | None = Field(default=None, description="Of the fullest rank. [B]")
    peak_reserved: ComparedQuantity | None = Field(default=None, description="Of the allocator's segments. [B]")


class ScalePoint(Spec):
    """A run of a series over numbers of GPUs."""

    id: str
    num_gpus: int = Field(ge=1)
    sequences: int = Field(ge=1, description="Global batch. [sequences]")
    step_time: ComparedQuantity = Field(description="Time of one step. [s]")

    def sequences_per_s_per_gpu(self, *, predicted: bool) -> float:
        """Sequences a GPU and second. [1/s]"""
        step_s = self.step_time.predicted if predicted else self.step_time.measured
        return self.sequences / self.num_gpus / step_s


class ScaleSeries(Spec):
    """Published runs that differ in the number of GPUs alone, the fewest first."""

    group: str
    model: str
    gpu: str
    strategy: str = Field(description="Of the first of its source's rows.")
    points: tuple[ScalePoint, ...] = Field(min_length=2)

    def scaling_efficiencies(self, *, predicted: bool) -> tuple[float, ...]:
        """Rate of a GPU over that on the fewest GPUs, by point. [-]

        Examples
        --------
        Twice the GPUs take 0.51 s of half the work, predicted 0.5:

        >>> steps = [ComparedQuantity(measured=a, predicted=b, error=b / a - 1) for a, b in ((1.0, 1.0), (0.51, 0.5))]
        >>> points = [ScalePoint(id=str(n), num_gpus=n, sequences=64, step_time=s) for n, s in zip((8, 16), steps)]
        >>> series = ScaleSeries(group="published-x", model="m", gpu="h100", strategy="tp8", points=points)
        >>> [round(x, 3) for x in series.scaling_efficiencies(predicted=False)]
        [1.0, 0.98]
        """
        first = self.points[0].sequences_per_s_per_gpu(predicted=predicted)
        return tuple(point.sequences_per_s_per_gpu(predicted=predicted) / first for point in self.points)

    @property
    def step_error_drift(self) -> float:
        """Error of the step on the most GPUs less that on the fewest. [-]"""
        return self.points[-1].step_time.error - self.points[0].step_time.error


class ValidationReport(Spec):
    """What ``mofa validate --json`` prints."""

    schema_version: Literal["1.6"] = SCHEMA_VERSION
    groups: dict[str, GroupScore]
    false_fits: int = Field(description="Runs that went out of memory and were said to fit. [-]")
    runs: tuple[RunScore, ...]
    not_scored: tuple[RunNotScored, ...] = ()
    layers: tuple[LayerComparison, ...] = Field(default=(), description="MoE layers in token chunks, measured alone.")
    families: dict[str, Attribution] = Field(
        default={}, description="Profiled steps beside their predictions, per family of kernels, by run; rank 0."
    )
    bands: tuple[BandCoverage, ...] = Field(
        default=(), description="How often the bands of steps held what the judging halves measured, by group."
    )
    scale: tuple[ScaleSeries, ...] = Field(
        default=(), description="Published runs that differ in the number of GPUs alone."
    )
    elapsed_s: float = Field(ge=0)


@dataclass(frozen=True)
class SummaryQuantity:
    """One quantity of the summary: its field and how errors and words name it."""

    field: str
    name: str


QUANTITIES = (
    SummaryQuantity("step_time", "step time"),
    SummaryQuantity("peak_allocated", "peak allocated"),
    SummaryQuantity("peak_reserved", "peak reserved"),
    SummaryQuantity("peak_device", "peak device"),
)


def compare_with_measured(measured: float | None, predicted: float) -> ComparedQuantity | None:
    """A prediction beside its measurement; None without one.

    Examples
    --------
    >>> round(compare_with_measured(2.0, 2.1).error, 6)
    0.05
    """
    if measured is None:
        return None
    return ComparedQuantity(measured=measured, predicted=predicted, error=predicted / measured - 1)
