"""Put the plans on fewer GPUs among those on all: where they are faster, with what they leave idle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from mofa.plan.result import Plan, PlanReport
from mofa.units import format_seconds


def best_plans_of_all_gpu_counts(
    plans: Sequence[Plan], others: Iterator[Plan], fewer: Sequence[PlanReport], num_gpus: int, top: int
) -> list[Plan]:
    """The best plans of all numbers of GPUs, best first.

    Parameters
    ----------
    plans
        On all GPUs, best first.
    others
        Those behind them, made as they are asked for: no more than are wanted.
    fewer
        Reports of searches on fewer GPUs; their plans count where they are faster than every plan on all.
    num_gpus
        Of the cluster. [-]
    top
        How many plans are wanted. [-]
    """
    best_s = min((plan.step_s for plan in plans), default=float("inf"))
    on_all = f"the best plan on all takes {format_seconds(best_s)} a step" if plans else "no plan runs and fits on all"
    faster = [
        _leaving_idle(plan, num_gpus - report.cluster.num_gpus, _note(report.cluster.num_gpus, num_gpus, on_all))
        for report in fewer for plan in report.plans if plan.step_s < best_s
    ]  # fmt: skip
    plans = [*plans, *islice(others, max(top - len(faster) - len(plans), 0))]
    return sorted([*faster, *plans], key=lambda plan: round(plan.step_s, 12))[:top]


def with_idle_gpus(plan: Plan, before: Plan) -> Plan:
    """A plan that leaves as many GPUs idle as the one that it was made of, and says so."""
    return _leaving_idle(plan, before.idle_gpus, before.notes[0]) if before.idle_gpus > plan.idle_gpus else plan


def _leaving_idle(plan: Plan, idle_gpus: int, note: str) -> Plan:
    return plan.model_copy(update={"idle_gpus": idle_gpus, "notes": (note, *plan.notes)})


def _note(used: int, num_gpus: int, on_all: str) -> str:
    return f"uses {used:,} of {num_gpus:,} GPUs: {on_all}; those left idle are paid for all the same"


def report_counts_of_all_searches(
    report: PlanReport, plans: Sequence[Plan], fewer: Sequence[PlanReport]
) -> dict[str, Any]:
    """What a report has to say besides if some of its plans are on fewer GPUs: counts of all these searches."""
    used = {plan.idle_gpus for plan in plans if plan.idle_gpus}
    some = [other for other in fewer if report.cluster.num_gpus - other.cluster.num_gpus in used]
    rejected, nearest = dict(report.rejected), dict(report.nearest_miss)
    for other in some:
        for reason, count in other.rejected.items():
            rejected[reason] = rejected.get(reason, 0) + count
        nearest = {**other.nearest_miss, **nearest}
    return {
        "space": report.space + sum(other.space for other in some),
        "searched": report.searched + sum(other.searched for other in some),
        "rejected": rejected,
        "nearest_miss": {reason: nearest[reason] for reason in rejected if reason in nearest},
        "plans": tuple(plans),
    }
