"""One search of a study of key factors: the best plan of a job on some machines with some of its optimisations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mofa.errors import SpecError
from mofa.plan.factor_results import FactorPlan
from mofa.plan.result import Plan
from mofa.search.entry_points import find_plans
from mofa.search.goodput import LongRunObjective
from mofa.search.job_setup import with_numerics
from mofa.search.one_plan import estimate, plan_in_closed_form
from mofa.search.space import StrategySpace, default_space
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.strategy import StrategySpec
from mofa.specs.workload import WorkloadSpec


@dataclass(frozen=True)
class FactorSearch:
    """A job whose plans are looked for on the GPUs that compute, all of which take part.

    What differs from one search of a study to the next is a field, so that a process can be given a search.
    """

    workload: WorkloadSpec
    cluster: ClusterSpec
    """The GPUs that compute."""
    framework: FrameworkSpec
    judge: LongRunObjective | None = None
    """What ranks plans by the whole run; by their steps where absent."""
    fix: Mapping[str, object] = field(default_factory=dict)
    maximum: Mapping[str, int] = field(default_factory=dict)
    with_: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    replay: bool = False
    """Whether plans are played out, and the best are ranked by that; else closed forms say all."""
    idle_gpus: int = 0
    """GPUs that no plan computes with, and that do not stand by: they are paid for. [-]"""

    def on_machines(self, cluster: ClusterSpec) -> FactorSearch:
        """The same search on other machines."""
        return replace(self, cluster=cluster)

    def best_plan(self) -> FactorPlan | None:
        """The best plan of the search; None where nothing fits.

        Returns
        -------
        FactorPlan or None
            The same as of ``mofa plan --without fewer_gpus`` with these options.

        Raises
        ------
        SpecError
            If the GPU, the framework or the model lacks what ``with_`` names, or the constraints leave nothing.
        """
        search = find_plans(
            self.workload, self.cluster, framework=self.framework, top=1, fix=self.fix, maximum=self.maximum,
            with_=self.with_, without=self.without, replay=self.replay, judge=self._judge, space=self._space(),
            banded=False,
        )  # fmt: skip
        return self._figures(search.report.plans[0]) if search.report.plans else None

    def plan_of_strategy(self, strategy: StrategySpec) -> tuple[FactorPlan, bool]:
        """One strategy on these machines, and whether it fits.

        Parameters
        ----------
        strategy
            Of as many GPUs.

        Returns
        -------
        FactorPlan, bool
            Costed as the search would: played out with ``replay``, else in closed form, with the margins of either.

        Raises
        ------
        StrategyError
            If the framework cannot run it.
        """
        workload, cluster, framework = with_numerics(self.workload, self.cluster, self.framework, self.with_)
        if self.replay:
            plan = estimate(workload, cluster, strategy, framework=framework, explain=False, over_time=False)
        else:
            plan = plan_in_closed_form(workload, cluster, strategy, framework, closed_form_margin=True)
        return self._figures(plan), plan.memory.fits

    def _space(self) -> StrategySpace:
        """All that the framework offers: named, so that no search looks at fewer GPUs or for more."""
        return default_space(*with_numerics(self.workload, self.cluster, self.framework, self.with_))

    @property
    def _judge(self) -> LongRunObjective | None:
        return None if self.judge is None else replace(self.judge, cluster=self.cluster)

    def _figures(self, plan: Plan) -> FactorPlan:
        judge = self._judge
        if judge is None:
            return FactorPlan.from_plan(plan, plan.step_s)
        workload, _, framework = with_numerics(self.workload, self.cluster, self.framework, self.with_)
        judge = replace(judge, workload=workload, framework=framework)
        figures = FactorPlan.from_plan(
            judge.with_long_run_figures(plan), judge.plan_ranking_key(plan) / judge.key_of_one_unit
        )
        if figures.usd is None or not self.idle_gpus:
            return figures
        return figures.model_copy(update={"usd": figures.usd * (1.0 + self.idle_gpus / self.cluster.num_gpus)})


def best_plan_or_refusal(search: FactorSearch) -> FactorPlan | str | None:
    """The best plan of a search, None where nothing fits, or why the search cannot be made: what a process is given.

    Parameters
    ----------
    search
        The search.

    Returns
    -------
    FactorPlan, str or None
        As said.
    """
    try:
        return search.best_plan()
    except SpecError as error:
        return str(error)
