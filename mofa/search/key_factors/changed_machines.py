"""What a tenth less and more of each resource buys: the same plan costed there, and a plan searched for there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mofa.plan.factor_results import ChangedMachines, FactorPlan, KeyResource
from mofa.search.analysis.analyse import LESS, MORE
from mofa.search.key_factors.factor_search import FactorSearch
from mofa.specs.changed_resources import RESOURCES, cluster_with_resource

BestPlans = Callable[[Sequence[FactorSearch]], Sequence[FactorPlan | str | None]]
"""Makes the searches that it is given, in as many processes as there may be."""


def resource_sensitivities(search: FactorSearch, best: FactorPlan, best_plans: BestPlans) -> tuple[KeyResource, ...]:
    """How the best step changes with a tenth less and a tenth more of each resource, the strongest first.

    Parameters
    ----------
    search
        The job on its machines.
    best
        Its best plan there.
    best_plans
        Makes the searches.

    Returns
    -------
    tuple of KeyResource
        Of :data:`~mofa.specs.changed_resources.RESOURCES`, which a report changes as well
        (:func:`mofa.search.analysis.analyse.resource_changes`).

    Notes
    -----
    A plan searched for is never worse than the same plan costed there, if that fits: the search ranks both. Where more
    memory changes no rate, all that fitted before fits, so that more memory never takes longer.
    """
    cases = [(name, factor) for name in RESOURCES for factor in (LESS, MORE)]
    searches = [search.on_machines(cluster_with_resource(search.cluster, name, factor)) for name, factor in cases]
    planned = dict(zip(cases, best_plans(searches), strict=True))
    sides: Mapping[tuple[str, float], ChangedMachines] = {
        case: _changed(case[1], changed, best, planned[case]) for case, changed in zip(cases, searches, strict=True)
    }
    resources = [KeyResource(resource=name, less=sides[name, LESS], more=sides[name, MORE]) for name in RESOURCES]
    return tuple(sorted(resources, key=lambda resource: -resource.relative_swing(best.value)))


def _changed(
    factor: float, search: FactorSearch, best: FactorPlan, planned: FactorPlan | str | None
) -> ChangedMachines:
    same, fits = search.plan_of_strategy(best.strategy)
    return ChangedMachines(
        factor=factor, same_plan=same, same_plan_fits=fits,
        planned_again=None if isinstance(planned, str) else planned,
    )  # fmt: skip
