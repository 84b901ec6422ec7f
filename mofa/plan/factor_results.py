"""Key factors of a job: the types of what ``mofa factors`` prints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import Field

from mofa.plan.result import Plan
from mofa.plan.run_costs import days_of_run
from mofa.plan.step_parts import TimeComponent
from mofa.plan.summaries import ClusterSummary, FrameworkSummary, WorkloadSummary
from mofa.specs.base import Spec
from mofa.specs.strategy import StrategySpec

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION: Final = "1.1"
RankedBy = Literal["step", "wall-clock time of a step", "energy of a step"]
COMPUTING: tuple[TimeComponent, ...] = ("gemm", "grouped_gemm", "attention", "memory_bound", "optimizer")
"""Parts of a step that do what a step is for: a bottleneck is what else takes longest."""


class FactorPlan(Spec):
    """A plan as factors are told by: what it takes, and the number that plans are ranked by."""

    strategy: StrategySpec
    value: float = Field(gt=0, description="What plans are ranked by, in value_unit of the whole; less is better.")
    step_s: float = Field(gt=0, description="Time of one step. [s]")
    device_bytes: float = Field(ge=0, description="Memory of the fullest GPU. [B]")
    ettr: float | None = Field(default=None, description="Productive over wall-clock time; null without failures. [-]")
    days: float | None = Field(default=None, description="Median days of the whole run; null where not known. [d]")
    usd: float | None = Field(default=None, description="Dollars of the whole run; null where not known. [$]")

    @classmethod
    def from_plan(cls, plan: Plan, value: float) -> FactorPlan:
        """The figures of a plan.

        Parameters
        ----------
        plan
            One strategy, costed.
        value
            What it is ranked by. [s, J]

        Returns
        -------
        FactorPlan
            Its strategy, and what of it factors compare.
        """
        return cls(
            strategy=plan.strategy, value=value, step_s=plan.step_s, device_bytes=plan.memory.device_bytes,
            ettr=plan.ettr, days=days_of_run(plan), usd=plan.usd,
        )  # fmt: skip


class ChangedMachines(Spec):
    """The job on machines with so many times of one resource."""

    factor: float = Field(gt=0, description="How much of the resource there is over what there was. [-]")
    same_plan: FactorPlan = Field(description="The plan of the machines as they are, costed on these.")
    same_plan_fits: bool = Field(description="Whether it fits there.")
    planned_again: FactorPlan | None = Field(description="The best plan of a search there; null where nothing fits.")

    @property
    def is_other_plan(self) -> bool:
        """Whether the search there found another strategy."""
        return self.planned_again is not None and self.planned_again.strategy != self.same_plan.strategy


class KeyResource(Spec):
    """What a tenth less and a tenth more of one resource does."""

    resource: str
    less: ChangedMachines
    more: ChangedMachines

    def relative_swing(self, base: float) -> float:
        """How far the values of plans made anew are apart, over what the job's own is; infinite where none fits.

        Parameters
        ----------
        base
            The value of the plan on the machines as they are. [s, J]

        Returns
        -------
        float
            [-]
        """
        values = [side.planned_again for side in (self.less, self.more)]
        known = [plan.value for plan in values if plan is not None]
        return (max(known) - min(known)) / base if len(known) == len(values) else float("inf")


class AblationRow(Spec):
    """One optimisation: the best plan with it alone, and with all up to it."""

    optimisation: str
    alone: FactorPlan | None = Field(description="With it and none of the others; null where nothing fits.")
    added_up: FactorPlan | None = Field(description="With it and all before it; null where nothing fits.")
    changes_numerics: bool = Field(description="Whether it changes what is computed: a run may train otherwise.")
    with_words: tuple[str, ...] = Field(
        default=(), description="Words of --with that bring it in, of fp8 products the recipe; empty where none does."
    )
    note: str = Field(default="", description="Why it is not to be had here; then both are those without it.")


class StageBottleneck(Spec):
    """What one pipeline stage waits for, played out."""

    stage: int = Field(ge=0, description="Index of the pipeline stage.")
    exposed: dict[TimeComponent, float] = Field(description="Where its step goes; sums to the played step. [s]")
    device_bytes: float | None = Field(description="Memory of its fullest GPU in closed form; null if not known. [B]")

    @property
    def bottleneck(self) -> TimeComponent:
        """The largest part that is not computing."""
        return max((name for name in self.exposed if name not in COMPUTING), key=lambda name: self.exposed[name])


class KeyFactors(Spec):
    """What ``mofa factors --json`` prints: what resources buy, what optimisations bring, where stages wait.

    Attributes
    ----------
    best, objective, value_unit
        The best plan on the machines as they are, and what all plans are ranked by.
    resources
        The strongest first.
    without_optimisations
        The best plan with none of the optimisations; null where nothing fits.
    ablation
        In the order in which optimisations are added up; empty where it was not asked for.
    stages
        Of the best plan.
    """

    schema_version: Literal["1.1"] = Field(default=SCHEMA_VERSION, description="Version of this contract.")
    workload: WorkloadSummary = Field(description="The training job.")
    cluster: ClusterSummary = Field(description="The cluster, GPUs that stand by included.")
    framework: FrameworkSummary = Field(description="The training framework.")
    faults: str | None = Field(default=None, description="The fault profile; null where nothing fails.")
    spare_nodes: int = Field(default=0, ge=0, description="Nodes that stand by in all plans. [nodes]")
    computing_gpus: int = Field(gt=0, description="GPUs that compute in all plans. [-]")
    idle_gpus: int = Field(
        default=0, ge=0, description="GPUs that neither compute nor stand by in any plan; they are paid for. [-]"
    )
    idle_note: str = Field(default="", description="Why GPUs are idle, in words; empty where none is.")
    costed_by: Literal["closed_form", "replay"] = Field(description="What predicted the numbers of all plans.")
    objective: RankedBy = Field(
        description="What plans are ranked by; wall-clock time and energy with what failures take of them."
    )
    value_unit: Literal["s", "J"] = Field(description="Of every value; the energy is that of all GPUs.")
    best: FactorPlan = Field(description="The best plan on the machines as they are.")
    resources: tuple[KeyResource, ...] = Field(description="The strongest first.")
    without_optimisations: FactorPlan | None = Field(default=None, description="The best plan with none of them.")
    ablation: tuple[AblationRow, ...] = Field(default=(), description="In the order in which they are added up.")
    stages: tuple[StageBottleneck, ...] = Field(description="Each pipeline stage of the best plan, played out.")
    played_step_s: float = Field(gt=0, description="The step of the best plan, played out: stages sum to it. [s]")

    def change_from_best_plan(self, plan: FactorPlan | None) -> float | None:
        """A plan's value over the best plan's, - 1; None where there is no plan.

        Parameters
        ----------
        plan
            One of the plans here.

        Returns
        -------
        float or None
            [-]
        """
        return None if plan is None else plan.value / self.best.value - 1.0

    def to_rows(self) -> list[dict[str, Any]]:
        """Every plan as a flat row.

        Returns
        -------
        list of dict
            ``table``, ``name`` and ``case`` say which plan it is, ``with`` which words of ``--with`` bring in its
            optimisation, ``change`` its value over the best plan's, - 1.
        """
        words = {row.optimisation: " ".join(row.with_words) for row in self.ablation}
        return [
            self._row({"table": table, "name": name, "case": case, "with": words.get(name, "")}, plan)
            for table, name, case, plan in self._plans()
        ]

    def to_frame(self) -> pd.DataFrame:
        """The rows of :meth:`to_rows` as a table.

        Returns
        -------
        pandas.DataFrame
            A row for each plan; where there is none its figures are absent.
        """
        import pandas as pd

        return pd.DataFrame(self.to_rows())

    def _plans(self) -> Iterator[tuple[str, str, str, FactorPlan | None]]:
        yield "best", "", "", self.best
        for resource in self.resources:
            for side, machines in (("less", resource.less), ("more", resource.more)):
                fits = "" if machines.same_plan_fits else ", does not fit"
                yield "resources", resource.resource, f"{side}, same plan{fits}", machines.same_plan
                yield "resources", resource.resource, f"{side}, planned again", machines.planned_again
        if self.ablation:
            yield "ablation", "none", "", self.without_optimisations
        for row in self.ablation:
            yield "ablation", row.optimisation, "alone", row.alone
            yield "ablation", row.optimisation, "added up", row.added_up

    def _row(self, which: dict[str, str], plan: FactorPlan | None) -> dict[str, Any]:
        figures = {} if plan is None else plan.model_dump(exclude={"strategy"})
        fields = {} if plan is None else plan.strategy.model_dump()
        return {**which, "change": self.change_from_best_plan(plan), **figures, **fields}
