"""What limits a plan: the parts of its step, by stage, its roofline and its checkpoints."""

from __future__ import annotations

from typing import Any

from mofa.plan.plan_analysis import RooflinePoint
from mofa.plan.step_parts import TimeComponent
from mofa.report.long_run import LEDGER_WORDS
from mofa.report.page.document_parts import Chart, DataTable, Paragraph, Part, Piece, Section, paragraph
from mofa.report.page.facts import BEST, ReportFacts
from mofa.report.page.looks import ACCENT, COMPONENT_COLOURS, plotly_figure
from mofa.report.phrases import component_words
from mofa.units import format_bytes, format_seconds

GROUPS: dict[str, tuple[TimeComponent, ...]] = {
    "computing": ("gemm", "grouped_gemm", "attention", "memory_bound"),
    "computing again": ("recompute",),
    "communication": ("tp", "cp", "ep", "pp", "dp"),
    "waiting for other stages": ("bubble",),
    "waiting for the host": ("host_idle",),
    "waiting for stragglers": ("stragglers",),
    "the optimizer": ("optimizer",),
}
TERA = 1e12


def limits_section(facts: ReportFacts) -> Section:
    """Where the step goes and what holds it back."""
    parts: list[Part] = [*step_section(facts).parts]
    if len(facts.explained.time.by_stage) > 1:
        parts.append(_stage_chart(facts))
    parts += [*_roofline(facts), _checkpoint(facts)]
    return Section("limits", "What limits it", tuple(parts))


def step_section(facts: ReportFacts) -> Section:
    """Where the step goes, without its roofline and its stages."""
    return Section("limits", "What limits it", (_summary(facts), _step_chart(facts), _step_table(facts)))


def _summary(facts: ReportFacts) -> Paragraph:
    exposed = facts.report.plans[0].time.exposed
    step_s = facts.report.plans[0].step_s
    sums = {group: sum(exposed[name] for name in names) for group, names in GROUPS.items()}
    shares = [f"{group} {seconds / step_s:.1%}" for group, seconds in sums.items() if seconds / step_s >= 0.0005]
    lost = {name: seconds for name, seconds in exposed.items() if name not in GROUPS["computing"]}
    most = max(lost, key=lambda name: lost[name])
    largest = f" The largest part that is not computing: {component_words(most)}, {lost[most] / step_s:.1%}."
    return paragraph(f"Of the step: {', '.join(shares)}.{largest}", tone="lead")


def _step_chart(facts: ReportFacts) -> Chart:
    """The plans' steps by part, the best on top."""
    plans = facts.plans
    names = [name for name in plans[0].time.exposed if any(plan.time.exposed[name] for plan in plans)]
    labels = [f"plan {number}" for number in range(1, len(plans) + 1)]
    traces = [
        {
            "type": "bar", "orientation": "h", "name": component_words(name), "y": labels,
            "x": [plan.time.exposed[name] for plan in plans], "marker": {"color": COMPONENT_COLOURS[name]},
            "hovertemplate": "%{y}, %{fullData.name}: %{x:.4g} s<extra></extra>",
        }
        for name in names
    ]  # fmt: skip
    chart = plotly_figure(traces, "seconds of a step", yaxis={"autorange": "reversed"}, barmode="stack")
    height_px = 190 + 26 * len(plans)
    return Chart("step", "Where the step goes, of all plans shown", chart, height_px, image="time_breakdown.png")


def _step_table(facts: ReportFacts) -> DataTable:
    time, step_s = facts.report.plans[0].time, facts.report.plans[0].step_s
    names = [*time.exposed, *(name for name in time.hidden if name not in time.exposed)]
    rows: list[tuple[Piece, ...]] = []
    for name in names:
        exposed, hidden = time.exposed.get(name, 0.0), time.hidden.get(name, 0.0)  # type: ignore[call-overload]
        if exposed or hidden:
            rows.append((
                component_words(name), facts.shown_seconds(f"{BEST}.time.exposed.{name}") if exposed else "",
                f"{exposed / step_s:.1%}", facts.shown_seconds(f"{BEST}.time.hidden.{name}") if hidden else "",
            ))  # fmt: skip
    rows.append(("step", facts.shown_seconds(f"{BEST}.step_s"), "100.0%", ""))
    columns = (("part", "left"), ("the step waits", "right"), ("of the step", "right"), ("hidden behind", "right"))
    return DataTable(columns, rows)


def _stage_chart(facts: ReportFacts) -> Chart:
    stages = facts.explained.time.by_stage
    labels = [stage.stage for stage in stages]
    names = [name for name in stages[0].exposed if any(stage.exposed[name] for stage in stages)]
    traces = [
        {
            "type": "bar",
            "name": component_words(name),
            "x": labels,
            "y": [stage.exposed[name] for stage in stages],
            "marker": {"color": COMPONENT_COLOURS[name]},
            "hovertemplate": "stage %{x}, %{fullData.name}: %{y:.4g} s<extra></extra>",
        }
        for name in names
    ]
    chart = plotly_figure(
        traces, "pipeline stage", "seconds of a step", barmode="stack", xaxis={"dtick": max(len(labels) // 16, 1)}
    )
    return Chart("stages", "Where each stage's time goes: the stage with the least bubble sets the pace", chart, 380)


def _roofline(facts: ReportFacts) -> list[Part]:
    """Products and attention against the roof, and memory-bound kernels against the memory's bandwidth."""
    roofline = facts.plan_analysis.roofline
    bandwidth = roofline.memory_bandwidth_bytes_per_s
    peak = max(point.peak_flops_per_s for point in roofline.points)
    ridge = peak / bandwidth
    columns = (
        ("kernels", "left"), ("FLOP/B", "right"), ("reached", "right"), ("of the peak", "right"), ("moved", "right"),
        ("limited by", "left"),
    )  # fmt: skip
    rows = [_roofline_row(point, bandwidth) for point in roofline.points]
    computing = [point for point in roofline.points if point.flops]
    parts: list[Part] = []
    if computing:
        xs = [ridge / 64, ridge, max(64 * ridge, 2 * max(point.flops_per_byte for point in computing))]
        roof = {
            "type": "scatter", "mode": "lines", "name": "roof of the datasheet", "x": xs,
            "y": [min(peak, x * bandwidth) / TERA for x in xs], "line": {"color": ACCENT}, "hoverinfo": "skip",
        }  # fmt: skip
        dots = [
            {
                "type": "scatter", "mode": "markers", "name": component_words(point.kind),
                "x": [point.flops_per_byte], "y": [point.flops_per_s / TERA],
                "marker": {"size": 14, "color": COMPONENT_COLOURS[point.kind]},
                "hovertemplate": "%{fullData.name}: %{y:.0f} TFLOP/s at %{x:.0f} FLOP/B<extra></extra>",
            }
            for point in computing
        ]  # fmt: skip
        log: dict[str, Any] = {"type": "log", "dtick": 1}
        chart = plotly_figure([roof, *dots], "FLOP per byte", "TFLOP/s", xaxis=log, yaxis=log)
        caption = "Roofline: kernels of a micro-batch on one GPU"
        parts.append(Chart("roofline", caption, chart, 380, image="roofline.png"))
    words = "Bytes are each operand and result once. A kernel far below its roof is short of size, or of power."
    return [*parts, DataTable(columns, rows, words)]


def _roofline_row(point: RooflinePoint, bandwidth: float) -> tuple[Piece, ...]:
    moved = f"{point.bytes_per_s / TERA:.2f} TB/s"
    if not point.flops:
        return (
            component_words(point.kind),
            "",
            "",
            "",
            moved,
            f"memory, {point.bytes_per_s / bandwidth:.0%} of its rate",
        )
    roof = min(point.peak_flops_per_s, point.flops_per_byte * bandwidth)
    by = "computing" if roof == point.peak_flops_per_s else "memory"
    return (
        component_words(point.kind), f"{point.flops_per_byte:,.0f}", f"{point.flops_per_s / TERA:,.0f} TFLOP/s",
        f"{point.flops_per_s / point.peak_flops_per_s:.0%}", moved, f"{by}, {point.flops_per_s / roof:.0%} of the roof",
    )  # fmt: skip


def _checkpoint(facts: ReportFacts) -> Paragraph:
    plan = facts.report.plans[0]
    if plan.long_run is not None and plan.ettr is not None:
        every = (
            ""
            if plan.checkpoint_interval_s is None
            else f", a checkpoint every {format_seconds(plan.checkpoint_interval_s)}"
        )
        lost = ", ".join(
            f"{LEDGER_WORDS.get(name, name)} {share:.1%}"
            for name, share in plan.long_run.ledger.model_dump().items()
            if isinstance(share, float) and share >= 0.0005
        )
        return paragraph(
            "Over the whole run ", facts.shown_share(f"{BEST}.ettr"), f" of the time is productive{every}: {lost}."
        )
    if plan.checkpoint_bytes is None:
        return paragraph("What checkpoints and failures take is not counted; --faults does.", tone="note")
    size = format_bytes(plan.checkpoint_bytes)
    return paragraph(
        f"A checkpoint is {size} of the heaviest rank. What it and failures take is not counted; --faults does.",
        tone="note",
    )
