"""Memory per stage: what fills it, when it peaks, what is alive then, and how it goes over a step."""

from __future__ import annotations

from typing import Any

from mofa.plan.memory import StageMemory
from mofa.report.page.document_parts import Chart, DataTable, Part, Piece, Section, paragraph
from mofa.report.page.facts import BEST, ReportFacts, gib_text
from mofa.report.page.looks import ACCENT, escaped_for_plotly, memory_colour, plotly_figure
from mofa.report.phrases import component_words
from mofa.units import GIB, format_bytes

MOST_TENSORS = 15
MOST_POINTS = 400
"""Points of a curve that a chart shows. [-]"""


def memory_section(facts: ReportFacts) -> Section:
    """The memory of every stage against the limit."""
    memory = facts.explained.memory
    fullest = max(memory.by_stage, key=lambda stage: stage.device_bytes)
    of = f" of {len(memory.by_stage)}" if len(memory.by_stage) > 1 else ""
    parts: list[Part] = [
        paragraph(
            "The fullest GPU, of stage ", str(fullest.stage), of, ", takes ",
            facts.shown_gib(f"{BEST}.memory.device_bytes"),
            f" of {gib_text(memory.limit_bytes)}: {gib_text(memory.capacity_bytes)} less a margin of "
            f"{gib_text(memory.margin_bytes)} for errors of the prediction.",
            tone="lead",
        ),
        _stage_chart(facts), _stage_table(facts),
    ]  # fmt: skip
    if fullest.curve is not None:
        parts.append(_over_time(facts, fullest))
    if fullest.tensors:
        parts.append(_alive(facts, fullest))
    return Section("memory", "Memory", tuple(parts))


def _stage_chart(facts: ReportFacts) -> Chart:
    memory = facts.explained.memory
    stages = memory.by_stage
    names = [name for name in stages[0].by_component if any(stage.by_component.get(name) for stage in stages)]
    traces: list[dict[str, Any]] = [
        {
            "type": "bar", "name": component_words(name), "x": [stage.stage for stage in stages],
            "y": [stage.by_component.get(name, 0.0) / GIB for stage in stages],
            "marker": {"color": memory_colour(name, number)},
            "hovertemplate": "stage %{x}, %{fullData.name}: %{y:.2f} GiB<extra></extra>",
        }
        for number, name in enumerate(names)
    ]  # fmt: skip
    lines = [
        {
            "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": value / GIB, "y1": value / GIB,
            "line": {"color": ACCENT, "dash": dash, "width": 2},
        }
        for value, dash in ((memory.limit_bytes, "dash"), (memory.capacity_bytes, "solid"))
    ]  # fmt: skip
    chart = plotly_figure(
        traces, "pipeline stage", "GiB of a GPU", barmode="stack", shapes=lines,
        xaxis={"dtick": max(len(stages) // 16, 1)}, yaxis={"range": [0, 1.04 * memory.capacity_bytes / GIB]},
    )  # fmt: skip
    caption = "What fills each stage's GPU at its peak; dashed the limit, solid the capacity"
    return Chart("memory", caption, chart, 400, image="stage_memory.png")


def _stage_table(facts: ReportFacts) -> DataTable:
    rows: list[tuple[Piece, ...]] = []
    for i, stage in enumerate(facts.explained.memory.by_stage):
        path = f"best.memory.by_stage.{i}"
        rows.append((
            str(stage.stage), str(stage.num_layers), facts.shown_gib(f"{path}.allocated_bytes"),
            facts.shown_gib(f"{path}.reserved_bytes"), facts.shown_gib(f"{path}.device_bytes"), stage.instant or "",
        ))  # fmt: skip
    columns = (
        ("stage", "right"), ("layers", "right"), ("allocated", "right"), ("reserved", "right"), ("device", "right"),
        ("peaks at", "left"),
    )  # fmt: skip
    return DataTable(columns, rows, folded="" if len(rows) <= 4 else f"All {len(rows)} stages and their peak instants")


def _over_time(facts: ReportFacts, stage: StageMemory) -> Chart:
    curve = stage.curve
    assert curve is not None
    every = max(len(curve.time_s) // MOST_POINTS, 1)
    shown = sorted({*range(0, len(curve.time_s), every), curve.peak, len(curve.time_s) - 1})
    times = [curve.time_s[i] for i in shown]
    names = [name for name, values in curve.kinds.items() if any(values)]
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter", "mode": "lines", "stackgroup": "alive", "name": component_words(name), "x": times,
            "y": [curve.kinds[name][i] / GIB for i in shown], "line": {"width": 0.5, "color": memory_colour(name, n)},
            "fillcolor": memory_colour(name, n), "hovertemplate": "%{fullData.name}: %{y:.2f} GiB<extra></extra>",
        }
        for n, name in enumerate(names)
    ]  # fmt: skip
    traces.append({
        "type": "scatter", "mode": "lines", "name": "reserved", "x": times,
        "y": [curve.reserved_bytes[i] / GIB for i in shown], "line": {"color": ACCENT, "dash": "dot"},
        "hovertemplate": "reserved: %{y:.2f} GiB<extra></extra>",
    })  # fmt: skip
    top = sum(values[curve.peak] for values in curve.kinds.values()) / GIB
    mark = {
        "x": curve.time_s[curve.peak], "y": top, "text": f"peak {top:.2f} GiB", "showarrow": True, "ay": -28, "ax": 0,
    }  # fmt: skip
    chart = plotly_figure(traces, "seconds of the step", "GiB", hovermode="x unified", annotations=[mark])
    caption = (
        f"Stage {stage.stage} over a step; it peaks at: {escaped_for_plotly(stage.instant or 'an instant of no name')}"
    )
    of = f"_stage{stage.stage}" if len(facts.explained.memory.by_stage) > 1 else ""
    return Chart("memory-over-time", caption, chart, 400, image=f"memory_over_time{of}.png")


def _alive(facts: ReportFacts, stage: StageMemory) -> DataTable:
    path = f"best.memory.by_stage.{facts.explained.memory.by_stage.index(stage)}.tensors"
    total = stage.allocated_bytes
    rows: list[tuple[Piece, ...]] = [
        (
            tensors.name, component_words(tensors.kind), facts.shown_count(f"{path}.{i}.count"),
            facts.shown_number(f"{path}.{i}.bytes", format_bytes), f"{tensors.bytes / total:.1%}",
        )
        for i, tensors in enumerate(stage.tensors[:MOST_TENSORS])
    ]  # fmt: skip
    rest = stage.tensors[MOST_TENSORS:]
    if rest:
        others = sum(tensors.bytes for tensors in rest)
        rows.append((f"{len(rest)} others", "", f"{sum(tensors.count for tensors in rest):,}", format_bytes(others),
                     f"{others / total:.1%}"))  # fmt: skip
    columns = (
        ("tensors", "left"),
        ("kind", "left"),
        ("number", "right"),
        ("bytes", "right"),
        ("of allocated", "right"),
    )
    return DataTable(columns, rows, f"Alive at the peak of stage {stage.stage}: {stage.instant}")
