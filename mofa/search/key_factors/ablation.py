"""What each optimisation brings: alone, and added to those before it; each row the best plan of a restricted search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from mofa.errors import SpecError
from mofa.plan.factor_results import AblationRow, FactorPlan
from mofa.search.key_factors.changed_machines import BestPlans
from mofa.search.key_factors.factor_search import FactorSearch
from mofa.search.key_factors.optimisations import (
    FP8,
    OPTIMISATIONS,
    Optimisation,
    fastest_fp8_recipe,
    framework_without_overlap,
    why_optimisation_unavailable,
)
from mofa.specs.strategy import StrategySpec


class Ablation(NamedTuple):
    """The best plan with no optimisation, and a row for each."""

    without_optimisations: FactorPlan | None
    rows: tuple[AblationRow, ...]


class _Asked(NamedTuple):
    """An optimisation with the searches that its row needs."""

    optimisation: Optimisation
    note: str
    alone: tuple[FactorSearch, ...] = ()
    added_up: tuple[FactorSearch, ...] = ()


def ablation(search: FactorSearch, best: FactorPlan, best_plans: BestPlans) -> Ablation:
    """The best plan with none of the optimisations, with each alone, and with all up to each.

    Parameters
    ----------
    search
        The job with all that the user asked for. What that fixes or leaves out is so in all rows.
    best
        Its best plan.
    best_plans
        Makes the searches.

    Returns
    -------
    Ablation
        Rows in the order of :data:`~mofa.search.key_factors.optimisations.OPTIMISATIONS`; those about experts are left
        out of a dense model.

    Notes
    -----
    An optimisation that is allowed need not be used: a row has the plans of all rows before it and those with it alone,
    so that what is added up never gets worse. Those that change the plans of a search, as words of ``--with`` do, are
    searched for with and without, together with all before them. What is no optimisation here stays free in all rows:
    degrees, micro-batches, dispatchers, schedules.
    """
    asked = _asked(search, best.strategy)
    none = _without_all(search, asked)
    wanted = [none, *(each for row in asked for each in (*row.alone, *row.added_up))]
    distinct = [each for i, each in enumerate(wanted) if each not in wanted[:i]]
    results = best_plans(distinct)

    def best_of(searches: Sequence[FactorSearch], before: FactorPlan | None) -> FactorPlan | None:
        found_plans = [results[distinct.index(each)] for each in searches]
        plans = [before, *(plan for plan in found_plans if isinstance(plan, FactorPlan))]
        return min((plan for plan in plans if plan is not None), key=lambda plan: plan.value, default=None)

    without = best_of([none], None)
    rows, before = [], without
    for optimisation, note, alone, added_up in asked:
        refusals = [text for each in alone if isinstance(text := results[distinct.index(each)], str)]
        before = best_of([*added_up, *alone], before)
        rows.append(
            AblationRow(
                optimisation=optimisation.name,
                alone=best_of(alone, without),
                added_up=before,
                changes_numerics=optimisation.changes_numerics,
                with_words=() if note else optimisation.with_,
                note=note or (refusals[0] if refusals else ""),
            )
        )
    return Ablation(without, tuple(rows))


def _asked(search: FactorSearch, strategy: StrategySpec) -> list[_Asked]:
    """Every optimisation with its searches, or why it has none."""
    described: list[tuple[Optimisation, str]] = []
    for optimisation in OPTIMISATIONS:
        if optimisation.needs_experts and search.workload.model.moe is None:
            continue
        note = why_optimisation_unavailable(optimisation, search)
        if optimisation.name == FP8 and not note:
            try:
                optimisation = replace(optimisation, with_=(fastest_fp8_recipe(search, strategy),))
            except SpecError as error:
                note = str(error)
        described.append((optimisation, note))
    usable = [optimisation for optimisation, note in described if not note]
    asked = []
    variants: tuple[tuple[str, ...], ...] = ((),)  # words of --with of the searches whose best is the row's
    for optimisation, note in described:
        if note:
            asked.append(_Asked(optimisation, note))
            continue
        off = [other for other in usable if other is not optimisation]
        alone = _restricted(search, off, optimisation.with_)
        more = tuple((*words, *optimisation.with_) for words in variants)
        later = usable[usable.index(optimisation) + 1 :]
        added_up = tuple(_restricted(search, later, words) for words in more)
        asked.append(_Asked(optimisation, "", (alone,), added_up))
        variants = (*variants, *more) if optimisation.replaces_plans else more
    return asked


def _without_all(search: FactorSearch, asked: Sequence[_Asked]) -> FactorSearch:
    return _restricted(search, [row.optimisation for row in asked if not row.note], ())


def _restricted(search: FactorSearch, off: Sequence[Optimisation], with_: tuple[str, ...]) -> FactorSearch:
    """A search without some optimisations, and with words of others."""
    framework = search.framework
    for optimisation in off:
        if optimisation.framework_off:
            framework = framework_without_overlap(framework, optimisation.framework_off) or framework
    without = tuple(word for optimisation in off for word in optimisation.without)
    return replace(
        search, framework=framework, with_=(*search.with_, *with_), without=tuple(sorted({*search.without, *without}))
    )
