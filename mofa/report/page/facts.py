"""What a report is about, and its numbers by their places in the JSON that it carries."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from mofa.report.page.document_parts import Number
from mofa.units import GIB, format_count, format_seconds

if TYPE_CHECKING:
    import pandas as pd

    from mofa.plan.plan_analysis import PlanAnalysis
    from mofa.plan.result import Estimate, Plan, PlanReport
    from mofa.replay.time.time_replayed import ReplayedTime

MOST_PLANS = 20
"""Plans that a report shows; plan.json has all. [-]"""
BEST = "result.plans.0"
"""The plan that a report is about."""


class HardwareRow(NamedTuple):
    """A fact of the machines in words; a curve has no single value."""

    name: str
    value: str
    provenance: str
    source: str


@dataclass(frozen=True)
class ReportFacts:
    """All that a report shows, as results of the search, the estimate, the replay and the export."""

    report: PlanReport
    explained: Plan
    """The best plan with the memory of every stage, what is alive at each peak and memory over time."""
    analysed: PlanAnalysis | None
    """What is said of the plan besides; None of an answer at once, which shows nothing of it."""
    strategies: pd.DataFrame
    """Strategies that were costed, with the columns of :meth:`mofa.search.search_result.Search.table`."""
    step: ReplayedTime | None
    """The best plan's step, played."""
    constraints_words: str = ""
    """What the user asked of the search's space, as a clause; empty where nothing."""
    hardware: tuple[HardwareRow, ...] = ()
    """Facts of the machines that the numbers rest on."""
    own: Estimate | None = None
    """The user's own configuration, where there is one."""
    own_name: str = ""
    launch: Mapping[str, str] = field(default_factory=dict)
    """Files of the job that runs the plan, by name."""
    launch_note: str = ""
    """For which framework they are, or why there are none."""
    command: str = ""
    """What was typed to make the report."""
    given: frozenset[str] = frozenset()
    """Settings that options gave, as ``defaults`` of the result names them."""
    made_on: str = ""
    """The day, as 2026-11-30; empty where it is not to be said."""

    @property
    def plan_analysis(self) -> PlanAnalysis:
        """What is said of the plan besides, which a whole report has."""
        assert self.analysed is not None
        return self.analysed

    @cached_property
    def page_json(self) -> dict[str, Any]:
        """The page's JSON, as Python values: ``result`` is what ``--json`` prints, beside it what the report adds."""
        parts = {"result": self.report, "best": self.explained, "analysis": self.analysed, "own": self.own}
        shown: dict[str, Any] = {
            name: None if part is None else part.model_dump(mode="json") for name, part in parts.items()
        }
        shown["result"]["plans"] = shown["result"]["plans"][:MOST_PLANS]
        for name in ("best", "own"):
            for stage in [] if shown[name] is None else shown[name]["memory"]["by_stage"]:
                stage["curve"] = None  # drawn, and in plan.json of mofa estimate
        return shown

    @property
    def plans(self) -> Sequence[Plan]:
        """The plans that a report shows, best first."""
        return self.report.plans[:MOST_PLANS]

    @cached_property
    def page_json_text(self) -> str:
        """The page's JSON (:attr:`page_json`) as text."""
        return json.dumps(self.page_json, separators=(",", ":"), allow_nan=False)

    def value_at_path(self, path: str) -> Any:
        """What stands in the document under keys and positions, None where nothing does."""
        node: Any = self.page_json
        for key in path.split("."):
            if node is None:
                return None
            node = node[int(key)] if isinstance(node, list) else node.get(key)
        return node

    def shown_number(self, path: str, shown_as: Callable[[float], str]) -> Number | str:
        """A number as it is shown; a dash where the result has none."""
        value = self.value_at_path(path)
        return "–" if value is None else Number(shown_as(value), path, value)

    def shown_seconds(self, path: str) -> Number | str:
        """Seconds with their unit."""
        return self.shown_number(path, format_seconds)

    def shown_gib(self, path: str) -> Number | str:
        """Bytes as GiB, two decimals, as the terminal's tables have them."""
        return self.shown_number(path, gib_text)

    def shown_share(self, path: str) -> Number | str:
        """A fraction as percent."""
        return self.shown_number(path, lambda value: f"{value:.1%}")

    def shown_change(self, path: str) -> Number | str:
        """A change as percent with its sign."""
        return self.shown_number(path, change_text)

    def shown_count(self, path: str) -> Number | str:
        """A whole number with commas, or a large one with a letter."""
        return self.shown_number(path, lambda value: f"{value:,}" if value < 1e7 else format_count(value))

    def shown_token_rate(self, path: str) -> Number | str:
        """Tokens a second."""
        return self.shown_number(path, lambda value: f"{value:,.1f}")


def change_text(change: float) -> str:
    """A change as percent with its sign, without one where it rounds to nothing.

    Examples
    --------
    >>> change_text(-0.012), change_text(-0.0001)
    ('-1.2%', '0.0%')
    """
    text = f"{change:+.1%}"
    return text[1:] if text in ("+0.0%", "-0.0%") else text


def gib_text(value_bytes: float) -> str:
    """Bytes as GiB.

    Examples
    --------
    >>> gib_text(2.0**31)
    '2.00 GiB'
    """
    return f"{value_bytes / GIB:.2f} GiB"
