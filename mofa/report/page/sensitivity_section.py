"""What a tenth more or less of each resource would do to the step."""

from __future__ import annotations

from typing import Any

from mofa.report.page.document_parts import Chart, DataTable, Piece, Section, paragraph
from mofa.report.page.facts import ReportFacts
from mofa.report.page.looks import plotly_figure


def sensitivity_section(facts: ReportFacts) -> Section:
    """A bar a resource, the strongest on top."""
    changes = facts.plan_analysis.resources
    names = [change.resource for change in changes]
    traces: list[dict[str, Any]] = [
        {
            "type": "bar", "orientation": "h", "name": words, "y": names, "x": values, "marker": {"color": colour},
            "hovertemplate": "%{y}, %{fullData.name}: step %{x:+.1%}<extra></extra>",
        }
        for words, values, colour in (
            ("10 % less", [change.step_change_less for change in changes], "#d96f2c"),
            ("10 % more", [change.step_change_more for change in changes], "#2a6fb8"),
        )
    ]  # fmt: skip
    chart = plotly_figure(
        traces, "change of the step", barmode="overlay", yaxis={"autorange": "reversed"}, xaxis={"tickformat": "+.1%"}
    )
    rows: list[tuple[Piece, ...]] = [
        (
            change.resource,
            facts.shown_change(f"analysis.resources.{i}.step_change_less") if change.fits_less else "does not fit",
            facts.shown_change(f"analysis.resources.{i}.step_change_more") if change.fits_more else "does not fit",
        )
        for i, change in enumerate(changes)
    ]  # fmt: skip
    strongest = changes[0]
    text = paragraph(
        f"10 % more of {strongest.resource} would change the step by ",
        facts.shown_change("analysis.resources.0.step_change_more"),
        ". The strategy stays as it is, in closed form; a new search may gain more: mofa factors makes one for each.",
    )
    columns = (("resource", "left"), ("10 % less", "right"), ("10 % more", "right"))
    caption = "The step with a tenth less and more of each resource"
    tornado = Chart("sensitivity", caption, chart, 120 + 44 * len(names), image="resources.png")
    return Section("sensitivity", "What would help", (text, tornado, DataTable(columns, rows)))
