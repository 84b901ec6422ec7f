"""How far a search is, as ``find_plans(on_progress=...)`` tells it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mofa.plan.result import Plan


class SearchProgress(NamedTuple):
    """A step of a search."""

    phase: str
    """``costing`` strategies in closed form, then ``playing`` the best ones out."""
    done: int
    """Strategies, then plans, that are through. [-]"""
    total: int
    """Of so many. [-]"""
    best: Plan | None
    """The best plan so far, by closed form; None while strategies are costed."""


OnProgress = Callable[[SearchProgress], None]
