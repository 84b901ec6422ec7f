"""What a tenth less and more of each resource does to the best plan of a job, planned anew."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from mofa.report.figures.resource_changes import draw_less_and_more_bars
from mofa.report.figures.style import INK
from mofa.report.figures.waterfall import draw_waterfall
from mofa.report.phrases import count_and_noun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mofa.plan.factor_results import FactorPlan, KeyFactors


def plot_key_resources(factors: KeyFactors, *, ax: Axes | None = None) -> Axes:
    """Plot a bar to either side for each resource, the strongest on top; marks stand where the same plan would be.

    Parameters
    ----------
    factors
        With resources.
    ax
        Axes to draw on; new ones where absent.
    """

    def percent(plan: FactorPlan | None) -> float:
        change = factors.change_from_best_plan(plan)
        return math.nan if change is None else 100.0 * change

    resources = factors.resources
    ax = draw_less_and_more_bars(
        [resource.resource for resource in resources],
        [percent(resource.less.planned_again) for resource in resources],
        [percent(resource.more.planned_again) for resource in resources],
        (f"change of the {factors.objective} [%]", f"Planned anew with a tenth of each resource: {_job(factors)}"),
        ax=ax,
    )
    sides = [(row, side) for row, resource in enumerate(resources) for side in (resource.less, resource.more)]
    marked = [(percent(side.same_plan), row) for row, side in sides if side.same_plan_fits]
    at_percent, in_row = np.array(marked).reshape(-1, 2).T
    ax.scatter(at_percent, in_row, s=160, marker="|", color=INK, linewidths=1.5, label="the same plan", zorder=3)
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return ax


def plot_ablation(factors: KeyFactors, *, ax: Axes | None = None) -> Axes:
    """Plot a waterfall of the best plan without any optimisation to the one with all, in the order they are added up.

    Parameters
    ----------
    factors
        With an ablation of which a row has a plan. Where nothing fits without optimisations, the first that fits is
        where it begins.
    ax
        Axes to draw on; new ones where absent.
    """
    values = [("no optimisation", factors.without_optimisations)]
    values += [(row.optimisation, row.added_up) for row in factors.ablation]
    known = [(name, plan.value) for name, plan in values if plan is not None]
    first, begin = known[0]
    steps = [(name, value - before) for (name, value), (_, before) in zip(known[1:], known[:-1], strict=True)]
    name = first if factors.without_optimisations is not None else f"up to {first}"
    title = f"What optimisations bring: {_job(factors)}"
    return draw_waterfall(
        begin, steps, (name, "all"), f"{factors.objective} [{factors.value_unit}]", title=title, ax=ax
    )


def _job(factors: KeyFactors) -> str:
    return f"{factors.workload.name} on {count_and_noun(factors.cluster.num_gpus, 'GPU')}"
