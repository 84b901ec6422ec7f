"""How far a search is, as ``find_plans(on_progress=...)`` tells it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mofa.plan.result import Plan
    from mofa.search.to_plan.builder import CandidatePlan


class SearchProgress(NamedTuple):
    """How far a search is: its phase, what is done of how much, and the best plan so far."""

    phase: str
    """``costing`` strategies in closed form, then ``playing`` the best ones out."""
    done: int
    """Strategies, then plans, that are through. [-]"""
    total: int
    """Of so many. [-]"""
    best: Plan | None
    """The best plan so far, by closed form; None while strategies are costed."""


OnProgress = Callable[[SearchProgress], None]
ReportDone = Callable[[int, int], None]


def progress_callback_with_best_row(
    progress: ReportDone | None,
    on_progress: OnProgress | None,
    best: NDArray[np.intp],
    candidate: Callable[[int], CandidatePlan],
) -> ReportDone | None:
    """Tell the best row of the closed forms; a callback of (done, total) that goes on telling it."""
    if on_progress is None or not len(best):
        return progress
    plan = candidate(int(best[0])).plan_in_closed_form(banded=False)
    on_progress(SearchProgress("playing", 0, 0, plan))
    return progress_callback(progress, on_progress, "playing", plan)


def progress_callback(
    progress: ReportDone | None, on_progress: OnProgress | None, phase: str, best: Plan | None
) -> ReportDone | None:
    """A callback of (done, total) that tells the other one too."""
    if on_progress is None:
        return progress

    def tell(done: int, total: int) -> None:
        if progress is not None:
            progress(done, total)
        on_progress(SearchProgress(phase, done, total, best))

    return tell
