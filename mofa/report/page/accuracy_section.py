"""How accurate predictions of jobs like this are: the nearest measured and published runs with their errors."""

from __future__ import annotations

from statistics import median
from typing import Any

from mofa.report.page.document_parts import Chart, DataTable, Part, Piece, Section, paragraph
from mofa.report.page.facts import ReportFacts
from mofa.report.page.looks import QUIET, STRONG, escaped_for_plotly, plotly_figure
from mofa.report.search_text import step_band_lines


def accuracy_section(facts: ReportFacts) -> Section:
    """The nearest runs, their errors, and the band that residuals of runs alike give."""
    runs = facts.plan_analysis.near_runs
    errors = [abs(run.error) for run in runs]
    same = sum(run.differs_in == () for run in runs)
    alike = f"{same} of them differ in nothing compared" if same else "none of them is alike in all that is compared"
    parts: list[Part] = [
        paragraph(
            f"Of the {len(runs)} runs nearest to this job the median error of a step is {median(errors):.1%}, the "
            f"largest {max(errors):.1%}; {alike}.",
            tone="lead",
        )
    ]
    band = facts.report.plans[0].band
    if band is not None:
        parts += [
            paragraph(line, tone="warning" if band.unmeasured and line.startswith("Never") else "plain")
            for line in step_band_lines(band)
        ]
    parts += [_chart(facts), _table(facts), paragraph(
        "Errors are predicted over measured, less one; all runs are in docs/accuracy.md. Compared are the model, the "
        "GPU, the framework, and what residuals go by: nodes, layers, experts, pace and products.",
        tone="note",
    )]  # fmt: skip
    return Section("accuracy", "How accurate such predictions are", tuple(parts))


def _chart(facts: ReportFacts) -> Chart:
    runs = facts.plan_analysis.near_runs
    trace: dict[str, Any] = {
        "type": "bar", "orientation": "h", "y": [escaped_for_plotly(run.id) for run in runs],
        "x": [run.error for run in runs],
        "marker": {"color": [STRONG if run.is_judging else QUIET for run in runs]},
        "hovertemplate": "%{y}: %{x:+.1%}<extra></extra>",
    }  # fmt: skip
    ticks = {"tickformat": "+.0%", "zeroline": True}
    chart = plotly_figure([trace], "error of the step", yaxis={"autorange": "reversed"}, xaxis=ticks, showlegend=False)
    caption = "Errors of the nearest runs, the nearest on top; dark: nothing was learned from it"
    return Chart("accuracy", caption, chart, 120 + 24 * len(runs))


def _table(facts: ReportFacts) -> DataTable:
    rows: list[tuple[Piece, ...]] = []
    for i, run in enumerate(facts.plan_analysis.near_runs):
        path = f"analysis.near_runs.{i}"
        rows.append((
            run.id, run.source.removeprefix("published-"), run.model, f"{run.num_gpus:,} {run.gpu}", run.strategy,
            facts.shown_seconds(f"{path}.measured_s"), facts.shown_change(f"{path}.error"),
            facts.shown_change(f"{path}.memory_error"),
            ", ".join(run.differs_in) or "nothing",
        ))  # fmt: skip
    columns = (
        ("run", "left"), ("source", "left"), ("model", "left"), ("GPUs", "right"), ("strategy", "left"),
        ("measured", "right"), ("step error", "right"), ("memory error", "right"), ("differs in", "left"),
    )  # fmt: skip
    return DataTable(columns, rows, folded=f"The {len(rows)} nearest runs")
