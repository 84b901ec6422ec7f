"""What a search or an estimate returns, and the JSON contract of ``mofa plan`` and ``mofa estimate``.

Every number is SI. The parts of a step sum to the step and the parts of a rank's memory to the rank's memory; a result
that breaks this cannot be built. ``docs/json.md`` describes the JSON field by field,
:mod:`mofa.plan.schema` formally.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from pydantic import Field, model_validator

from mofa.plan.job_facts import JobFacts
from mofa.plan.launch_layout import LaunchLayout
from mofa.plan.long_run import LongRunFields
from mofa.plan.memory import REL_TOL, CostedBy, Memory, refuse_negative_parts, refuse_wrong_sum
from mofa.plan.step_band import Band
from mofa.plan.step_parts import TIME_COMPONENTS as TIME_COMPONENTS
from mofa.plan.step_parts import StageTime as StageTime
from mofa.plan.step_parts import Time
from mofa.plan.step_parts import TimeComponent as TimeComponent
from mofa.plan.summaries import ClusterSummary, FrameworkSummary, WorkloadSummary
from mofa.plan.summary import USUAL_COLUMNS, plan_line, plan_text, report_text
from mofa.plan.version import installed_version
from mofa.schedules import SCHEDULES
from mofa.specs.base import Provenance, Spec
from mofa.specs.strategy import StrategySpec

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION: Final = "2.15"

FlopsConvention = Literal["causal", "full"]


class Plan(LongRunFields):
    """One strategy, costed: its step, its memory, and over a long run its days and cost.

    Raises
    ------
    pydantic.ValidationError
        If a field is missing, unknown or out of bounds, or parts do not sum to their whole; it is a ``ValueError``.

    Notes
    -----
    time.exposed sums to step_s, memory.by_component to the fullest rank's device_bytes, provenance to 1.

    Examples
    --------
    >>> import math, mofa
    >>> job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
    >>> plan = mofa.estimate(job, machines, "tp=2 recompute=full", replay=False)
    >>> math.isclose(sum(plan.time.exposed.values()), plan.step_s)
    True
    >>> plan == Plan.model_validate_json(plan.model_dump_json())
    True
    """

    strategy: StrategySpec = Field(description="The strategy; tp * cp * pp * dp are the GPUs that compute.")
    layout: LaunchLayout | None = Field(
        default=None, description="The layout of the pipeline that was costed; null without a pipeline."
    )
    step_s: float = Field(gt=0, description="Time of one optimizer step of the slowest rank. [s]")
    step_s_band: tuple[float, float] | None = Field(
        default=None, description="Within which 8 of 10 measured steps like it would lie; what says so is in band. [s]"
    )
    band: Band | None = Field(
        default=None, description="The runs that step_s_band rests on, and which hosts it covers; null without one."
    )
    tokens_per_s_per_gpu: float = Field(
        gt=0, description="Tokens of the global batch per second and GPU that computes. [tokens/s]"
    )
    tflops_per_gpu: float = Field(ge=0, description="Model TFLOP/s per GPU; recomputation is not counted. [TFLOP/s]")
    mfu: float = Field(ge=0, description="Model FLOP/s over the dense peak of the GEMM format used. [-]")
    hfu: float = Field(ge=0, description="As mfu, with the FLOPs of recomputation counted. [-]")
    memory: Memory = Field(description="Memory of the fullest rank.")
    time: Time = Field(description="Where the step of the slowest rank goes.")
    provenance: dict[Provenance, float] = Field(
        description="Fraction of the step that rests on numbers of each provenance; sums to 1. [-]"
    )
    library_fraction: dict[str, float] | None = Field(
        default=None,
        description="Fraction of the step that rests on kernels and hosts measured under the framework's library of "
        "layers (Transformer Engine), by component; what is absent does not. Null where it runs none. [-]",
    )
    idle_gpus: int = Field(
        default=0, ge=0, description="GPUs of the cluster that the plan leaves idle, as it is faster on fewer. [-]"
    )
    costed_by: CostedBy = Field(description="What predicted the numbers.")
    flops_convention: FlopsConvention = Field(
        default="causal",
        description="causal halves the FLOPs of causal attention in tflops_per_gpu, mfu, hfu; full does not.",
    )
    notes: tuple[str, ...] = Field(default=(), description="Assumptions that this prediction rests on, in words.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse_wrong_sum("time.exposed", self.time.exposed.values(), self.step_s, "s")
        refuse_negative_parts("provenance", self.provenance)
        refuse_wrong_sum("provenance", self.provenance.values(), 1.0, "(fractions)")
        if self.hfu < self.mfu * (1 - REL_TOL):
            raise ValueError(f"hfu ({self.hfu:.6g}) must be at least mfu ({self.mfu:.6g})")
        return self

    @property
    def assumed_fraction(self) -> float:
        """Share of the step that rests on assumed numbers. [-]"""
        return self.provenance.get("assumed", 0.0)

    @property
    def layers_by_chunk(self) -> tuple[int, ...]:
        """Layers of each chunk in the order in which a micro-batch passes them: over the stages, vpp times. [-]

        Every other time back where the schedule places them so. Empty where the result does not say.
        """
        stages, back = self.memory.by_stage, SCHEDULES[self.strategy.schedule].placement == "v"
        if any(len(stage.layers_by_chunk) != self.strategy.vpp for stage in stages):
            return ()
        chunk_stages = (stages[::-1] if back and turn % 2 else stages for turn in range(self.strategy.vpp))
        return tuple(stage.layers_by_chunk[turn] for turn, passed in enumerate(chunk_stages) for stage in passed)

    def to_row(self) -> dict[str, Any]:
        """The plan as one flat row: strategy columns, results, ``memory_*``, ``exposed_*`` and ``hidden_*`` parts."""
        memory = self.memory
        return {
            **self.strategy.model_dump(),
            "layout": "" if self.layout is None else self.layout.text,
            **{
                name: getattr(self, name)
                for name in ("step_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "hfu")
            },
            **self.long_run_columns(),
            "idle_gpus": self.idle_gpus,
            **{
                name: getattr(memory, name)
                for name in (
                    "allocated_bytes", "reserved_bytes", "device_bytes", "margin_bytes", "capacity_bytes", "fits"
                )
            },
            **{f"exposed_{name}_s": value for name, value in self.time.exposed.items()},
            **{f"hidden_{name}_s": value for name, value in self.time.hidden.items()},
            **{f"memory_{name}_bytes": value for name, value in memory.by_component.items()},
            "assumed_fraction": self.assumed_fraction,
            "library_fraction": None if self.library_fraction is None else math.fsum(self.library_fraction.values()),
            "costed_by": self.costed_by,
            "flops_convention": self.flops_convention,
        }  # fmt: skip

    def to_frame(self, *, all: bool = False) -> pd.DataFrame:
        """The plan as a table of one row, with the twenty columns that people want, or with all.

        Parameters
        ----------
        all
            Whether with every column.

        Returns
        -------
        pandas.DataFrame
            Columns as in docs/json.md, parts joined by underscores.

        Examples
        --------
        >>> import mofa
        >>> job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
        >>> plan = mofa.estimate(job, machines, "tp=2 recompute=full", replay=False)
        >>> plan.to_frame().shape[0]
        1
        """
        return plans_to_frame([self], all=all)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({plan_line(self)})"

    def __str__(self) -> str:
        return plan_text(self, self.time.exposed)


def plans_to_frame(plans: Iterable[Plan], *, all: bool = True) -> pd.DataFrame:
    """Plans as a table, one row each, in order; a part that a plan does not have is 0.

    Parameters
    ----------
    plans
        The plans.
    all
        Whether the table has every column, or the twenty that people want.

    Returns
    -------
    pandas.DataFrame
        A row a plan; empty without any.

    Examples
    --------
    >>> plans_to_frame([]).empty
    True
    """
    import pandas as pd

    frame = pd.DataFrame([plan.to_row() for plan in plans])
    parts = [c for c in frame.columns if c.startswith(("exposed_", "hidden_", "memory_"))]
    frame = frame.fillna(dict.fromkeys(parts, 0.0))
    return frame if all or frame.empty else frame[list(USUAL_COLUMNS)]


class NearestMiss(Spec):
    """The strategy that came closest to passing one reason for rejection."""

    strategy: StrategySpec = Field(description="The strategy that was rejected.")
    short_by: float = Field(ge=0, description="How far it is from passing, in unit.")
    unit: str = Field(min_length=1, description="Unit of short_by: B for memory, else the thing counted.")


class NumericsOffer(Spec):
    """What one word of ``--with`` would change of the best plan, its strategy as it is, in closed form."""

    word: str = Field(description="The word of --with.")
    step_change: float = Field(description="Step with it over step without, - 1. [-]")
    device_bytes_change: float = Field(description="Memory of the fullest GPU with it less that without. [B]")


def _check_consistent(plan: Plan, workload: WorkloadSummary, cluster: ClusterSummary) -> None:
    """Refuse a plan whose ranks or tokens do not match the job and the cluster it was made for."""
    s, gpus = plan.strategy, cluster.num_gpus - plan.spare_gpus - plan.idle_gpus
    if s.tp * s.cp * s.pp * s.dp != gpus:
        less = f", without {plan.spare_gpus} that stand by" if plan.spare_gpus else ""
        less += f", without {plan.idle_gpus} that are idle" if plan.idle_gpus else ""
        raise ValueError(f"tp * cp * pp * dp ({s.tp * s.cp * s.pp * s.dp}) must be the GPUs ({gpus}{less})")
    tokens = plan.tokens_per_s_per_gpu * plan.step_s * gpus
    refuse_wrong_sum("tokens of one step", [tokens], workload.seq_len * workload.global_batch, "tokens")


class Estimate(Plan):
    """One strategy, costed, with the job, the cluster and the framework: what ``mofa estimate --json`` prints."""

    schema_version: Literal["2.15"] = Field(default=SCHEMA_VERSION, description="Version of this contract.")
    mofa_version: str = Field(default_factory=installed_version, description="Version of mofa that says it.")
    id: str | None = Field(default=None, description="The run's id; null where the strategy came from options.")
    workload: WorkloadSummary = Field(description="The training job.")
    cluster: ClusterSummary = Field(description="The cluster.")
    framework: FrameworkSummary = Field(description="The training framework.")
    job: JobFacts | None = Field(
        default=None, description="The workload and the framework whole, from which mofa export writes a job."
    )
    defaults: dict[str, str] = Field(default_factory=dict, description="What was not asked for and taken by default.")

    def to_row(self) -> dict[str, Any]:
        """The row of the plan, after the run's id."""
        return {"id": self.id, **super().to_row()}

    @model_validator(mode="after")
    def _check_whole(self) -> Self:
        _check_consistent(self, self.workload, self.cluster)
        return self


class PlanReport(Spec):
    """What a search found: what ``mofa plan --json`` prints.

    Raises
    ------
    pydantic.ValidationError
        If a field is missing, unknown or out of bounds, counts do not add up, or a plan is not of this job and
        cluster; it is a ``ValueError``.

    Notes
    -----
    Every rejected strategy has one reason, the first check that it fails; space - sum(rejected) are feasible.

    Examples
    --------
    >>> import mofa
    >>> job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
    >>> report = mofa.find_plans(job, machines, fix={"tp": 2, "pp": 2, "vpp": 1, "cp": 1}, top=1, replay=False).report
    >>> report.space - sum(report.rejected.values()) == report.feasible >= len(report.plans)
    True
    """

    schema_version: Literal["2.15"] = Field(default=SCHEMA_VERSION, description="Version of this contract.")
    mofa_version: str = Field(default_factory=installed_version, description="Version of mofa that says it.")
    workload: WorkloadSummary = Field(description="The training job.")
    cluster: ClusterSummary = Field(description="The cluster.")
    framework: FrameworkSummary = Field(description="The training framework.")
    job: JobFacts | None = Field(
        default=None, description="The workload and the framework whole, from which mofa export writes a job."
    )
    objective: str = Field(
        default="tokens_per_s_per_gpu", description="What is maximised; ties go to the smaller memory."
    )
    space: int = Field(
        ge=0,
        description="Strategies before any mask: of all GPUs, and of the fewer that plans are on. [-]",
    )
    searched: int = Field(ge=0, description="Strategies whose time and memory were fully costed. [-]")
    rejected: dict[str, int] = Field(
        default_factory=dict,
        description="Strategies per reason, in the order of the checks; each has one, its first. [-]",
    )
    nearest_miss: dict[str, NearestMiss] = Field(
        default_factory=dict, description="Per reason the strategy that came closest to passing."
    )
    min_gpus: int | None = Field(
        default=None, gt=0,
        description="Where nothing fits: the smallest number of GPUs that would do, spares included; else null. [-]",
    )  # fmt: skip
    min_gpus_note: str | None = Field(default=None, description="What min_gpus means here, or why there is none.")
    elapsed_s: float = Field(ge=0, description="Duration of the search, without imports and loading. [s]")
    plans: tuple[Plan, ...] = Field(default=(), description="The best plans that fit, best first.")
    numerics_offers: tuple[NumericsOffer, ...] = Field(
        default=(), description="What numerics that were not asked for would bring to the best plan."
    )
    defaults: dict[str, str] = Field(default_factory=dict, description="What was not asked for and taken by default.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        rejected = sum(self.rejected.values())
        if self.searched > self.space:
            raise ValueError(f"searched ({self.searched}) must be at most space ({self.space})")
        if rejected + len(self.plans) > self.space:
            raise ValueError(
                f"rejected ({rejected}) and plans ({len(self.plans)}) must be at most space ({self.space})"
            )
        if unknown := set(self.nearest_miss) - set(self.rejected):
            raise ValueError(f"nearest_miss has reasons that rejected nothing: {', '.join(sorted(unknown))}")
        for plan in self.plans:
            _check_consistent(plan, self.workload, self.cluster)
        return self

    @property
    def feasible(self) -> int:
        """Strategies that no reason rejected. [-]"""
        return self.space - sum(self.rejected.values())

    @property
    def num_tied(self) -> int:
        """Leading plans that the model cannot tell from the best, which counts too: ``band.tie_margin``. [-]"""
        if not self.plans:
            return 0
        values = [self._objective_value(plan) for plan in self.plans]
        margin = self.plans[0].band.tie_margin if self.plans[0].band is not None else None
        if margin is None or values[0] is None:
            return 1
        behind = (n for n, value in enumerate(values) if value is None or value > values[0] * (1.0 + margin))
        return next(behind, len(values))

    def _objective_value(self, plan: Plan) -> float | None:
        """What plans are ranked by, such that less is better."""
        if self.objective == "days":
            return None if plan.days is None else plan.days.p50
        if self.objective in ("usd", "kwh"):
            value: float | None = getattr(plan, self.objective)
            return value
        per_s = plan.effective_tokens_per_s_per_gpu if self.objective.startswith("effective") else None
        return plan.step_s if per_s is None else 1.0 / per_s

    def to_frame(self, *, all: bool = False) -> pd.DataFrame:
        """The plans as a table, one row each, best first, with the twenty columns that people want, or with all.

        Parameters
        ----------
        all
            Whether with every column.

        Returns
        -------
        pandas.DataFrame
            A row a plan; empty without any.
        """
        return plans_to_frame(self.plans, all=all)

    def __repr__(self) -> str:
        best = f", best {plan_line(self.plans[0])}" if self.plans else ", nothing fits"
        return f"PlanReport({self._job_on_machines}: {len(self.plans)} plans{best})"

    def __str__(self) -> str:
        return report_text(f"{self._job_on_machines}, {self.framework.name}", self.plans, self.min_gpus)

    @property
    def _job_on_machines(self) -> str:
        return f"{self.workload.name} on {self.cluster.num_gpus:,} x {self.cluster.gpu}"

    def rejected_to_frame(self) -> pd.DataFrame:
        """One row per reason: reason, count, the nearest miss's short_by and unit and its strategy columns."""
        import pandas as pd

        rows: list[dict[str, Any]] = []
        for reason, count in self.rejected.items():
            row: dict[str, Any] = {"reason": reason, "count": count}
            if (miss := self.nearest_miss.get(reason)) is not None:
                row |= {"short_by": miss.short_by, "unit": miss.unit, **miss.strategy.model_dump()}
            rows.append(row)
        return pd.DataFrame(rows)
