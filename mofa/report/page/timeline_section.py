"""The pipeline of a step: what every stage computes, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mofa.report.figures.gantt import LOOKS
from mofa.report.page.document_parts import Chart, Section, paragraph
from mofa.report.page.facts import ReportFacts
from mofa.report.page.looks import plotly_figure
from mofa.units import format_seconds

if TYPE_CHECKING:
    from mofa.replay.time.time_replayed import Computation

MOST_BARS = 8000
"""Computations that a chart shows: a browser draws so many without delay. [-]"""
COLOURS = {"F": "#7fb2e3", "B": "#2a6fb8", "I": "#2a6fb8", "W": "#9bc7a5", "O": "#3f9f5a"}


def timeline_section(facts: ReportFacts) -> Section | None:
    """A row a stage, a bar a computation; None where nothing was played."""
    played = facts.step
    if played is None or not any(played.spans):
        return None
    stages = len(played.spans)
    total = sum(map(len, played.spans))
    share = min(MOST_BARS / total, 1.0)
    end_s = max(spans[-1].end_s for spans in played.spans if spans)
    until = end_s if share == 1.0 else share * end_s
    chunks = max(span.chunk for spans in played.spans for span in spans) + 1
    traces: list[dict[str, Any]] = []
    for kind, (name, _, _) in LOOKS.items():
        bars = [
            (stage, span)
            for stage, spans in enumerate(played.spans)
            for span in spans
            if span.kind == kind and span.start_s < until
        ]
        if not bars:
            continue
        traces.append({
            "type": "bar", "orientation": "h", "name": name, "y": [stage for stage, _ in bars],
            "base": [round(span.start_s, 6) for _, span in bars],
            "x": [round(min(span.end_s, until) - span.start_s, 6) for _, span in bars],
            "text": [_label(span, chunks) for _, span in bars], "textposition": "none",
            "marker": {"color": COLOURS[kind], "line": {"width": 0}},
            "hovertemplate": "stage %{y}: %{fullData.name}%{text}, from %{base:.4g} s for %{x:.4g} s<extra></extra>",
        })  # fmt: skip
    chart = plotly_figure(
        traces, "seconds of the step", "stage", barmode="overlay", bargap=0.12,
        yaxis={"autorange": "reversed", "dtick": max(stages // 16, 1), "zeroline": False},
        xaxis={"range": [0.0, until]},
    )  # fmt: skip
    cut = "" if share == 1.0 else f", the first {format_seconds(until)} of it"
    caption = f"A step of {format_seconds(played.step_s)}, stage by stage{cut}"
    text = paragraph(
        "Gaps are where a stage waits: for its neighbours at both ends of the step, the bubble, or for communication. ",
        "Drag to zoom, double-click to come back.",
    )
    return Section(
        "timeline",
        "The pipeline over a step",
        (text, Chart("timeline", caption, chart, 170 + 26 * stages, image="pipeline.png")),
    )


def _label(span: Computation, chunks: int) -> str:
    """Which micro-batch it is of, and which chunk where a stage has several."""
    if span.kind == "O":
        return ""
    return f" of micro-batch {span.micro_batch}" + (f", chunk {span.chunk}" if chunks > 1 else "")
