"""The layouts of plans in words: which to launch with, whose each is, and what a search for shorter steps found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mofa.units import format_seconds

if TYPE_CHECKING:
    from mofa.plan.launch_layout import LayoutSearch
    from mofa.plan.result import Plan


def layout_lines(plans: Sequence[Plan]) -> list[str]:
    """A line for each layout, with the plans that have it, then one for each search."""
    numbers: dict[tuple[str, str], list[int]] = {}
    searches = []
    for number, plan in enumerate(plans, start=1):
        if plan.layout is None:
            continue
        option, name = plan.layout.launch.split(" ")[0], plan.strategy.framework
        whose = {
            "strategy": "as asked", "framework": f"{name}'s own", "mofa": f"{name} needs it: {option}",
            "search": f"found by search: {option}",
        }  # fmt: skip
        numbers.setdefault((plan.layout.text, whose[plan.layout.by]), []).append(number)
        if plan.layout.search is not None:
            of = f" of plan {number}" if len(plans) > 1 else ""
            is_own = plan.layout.by != "search"
            searches.append(f"Search of the layout{of}: {_outcome(plan.layout.search, plan.step_s, is_own)}.")
    lines = []
    for (text, whose_it_is), of_layout in numbers.items():
        several = "s" if len(of_layout) > 1 else ""
        which = f"plan{several} {', '.join(map(str, of_layout))}" if len(of_layout) < len(plans) else "all plans"
        plans_of = "" if len(plans) == 1 else f" of {which}"
        lines.append(f"Layout{plans_of}: {text} ({whose_it_is}).")
    return lines + searches


def _outcome(search: LayoutSearch, step_s: float, is_own: bool) -> str:
    """What a search found, with its bound and gap.

    >>> from mofa.plan.launch_layout import LayoutSearch
    >>> search = LayoutSearch(before="Ett|ttL", before_step_s=2.0, before_recompute="none", before_fits=True,
    ...                       pipeline_s=1.5, bound_s=1.2)
    >>> _outcome(search, 1.6, False)
    'step 20.0 % shorter than with Ett|ttL; no pipeline takes less than 1.20 s, this one 1.50 s (gap 20.0 %)'
    >>> _outcome(search.model_copy(update={"bound_s": 0.0}), 1.6, True)
    'none that was tried is shorter; how short a pipeline can be is not known'
    """
    if is_own:
        outcome = "none is shorter"
    elif search.before_fits:
        outcome = f"step {100.0 * (1.0 - step_s / search.before_step_s):.1f} % shorter than with {search.before}"
    else:
        outcome = f"{search.before} does not fit"
    if search.bound_s <= 0.0:  # the search ended ahead of its first bound
        outcome = "none that was tried is shorter" if is_own else outcome
        return f"{outcome}; how short a pipeline can be is not known"
    least, takes = format_seconds(search.bound_s), format_seconds(search.pipeline_s)
    return f"{outcome}; no pipeline takes less than {least}, this one {takes} (gap {100.0 * search.gap_fraction:.1f} %)"
