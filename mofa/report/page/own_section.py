"""The user's own configuration beside the plan: where the seconds and the bytes differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mofa.plan.comparison import ComparedPart, Comparison, compare
from mofa.report.page.document_parts import Chart, DataTable, Paragraph, Part, Piece, Section, Tile, Tiles, paragraph
from mofa.report.page.facts import BEST, ReportFacts, change_text, gib_text
from mofa.report.page.looks import ACCENT, STRONG, escaped_for_plotly, plotly_figure
from mofa.report.phrases import component_words, strategy_text
from mofa.report.search_text import has_experts
from mofa.units import GIB, format_seconds

if TYPE_CHECKING:
    from mofa.plan.result import Estimate


def user_strategy_section(facts: ReportFacts) -> Section | None:
    """What the user runs today beside the plan; None where there is nothing."""
    own = facts.own
    if own is None:
        return None
    moe = has_experts(facts.report.workload)
    plan = facts.report.plans[0]
    comparison = compare(own, facts.report, names=[facts.own_name, "the plan"])
    change = own.step_s / plan.step_s - 1.0
    beside = f"{change_text(change)} against the plan's" if own.memory.fits else ""
    parts: list[Part] = [] if own.memory.fits else [_does_not_fit(own)]
    parts += [
        paragraph("Today: ", strategy_text(own.strategy, moe=moe), ".", tone="lead"),
        paragraph("The plan: ", strategy_text(plan.strategy, moe=moe), _brought(own, change), tone="lead"),
        Tiles((
            Tile("your step", facts.shown_seconds("own.step_s"), beside),
            Tile("the plan's step", facts.shown_seconds(f"{BEST}.step_s")),
            Tile("your MFU", facts.shown_share("own.mfu")),
            Tile("the plan's MFU", facts.shown_share(f"{BEST}.mfu")),
            Tile("your memory", facts.shown_gib("own.memory.device_bytes"), "" if own.memory.fits else "does not fit"),
            Tile("the plan's memory", facts.shown_gib(f"{BEST}.memory.device_bytes")),
        )),
    ]  # fmt: skip
    margin = None if plan.band is None else plan.band.tie_margin
    if own.memory.fits and margin is not None and abs(change) <= margin:
        parts.append(paragraph(f"They differ by no more than {margin:.1%}, which mofa cannot tell apart.", tone="note"))
    parts += [_waterfall(comparison), _parts_table(facts), _differences(comparison)]
    return Section("yours", "Your configuration beside the plan", tuple(parts))


def _does_not_fit(own: Estimate) -> Paragraph:
    needed, limit = own.memory.device_bytes / GIB, gib_text(own.memory.limit_bytes)
    return paragraph(f"Yours does not fit: its fullest GPU needs {needed:.2f} of {limit}.", tone="warning")


def _brought(own: Estimate, change: float) -> str:
    """What the plan brings, by the own step over the plan's; a step that cannot run is not compared."""
    if not own.memory.fits:
        return ". It fits."
    if change > 0:
        return f". It brings {change:.1%} more tokens a second."
    return f". It brings nothing: your step against the plan's is {change_text(change)}."


def _waterfall(comparison: Comparison) -> Chart:
    """From the own step to the plan's, part by part."""
    steps = sorted((part for part in comparison.time if _more(part)), key=lambda part: -abs(_more(part)))
    unit = comparison.time_unit
    names = [
        escaped_for_plotly(comparison.results[0].name),
        *(component_words(part.name) for part in steps),
        "the plan",
    ]
    first = sum(part.by_result[0] for part in comparison.time)
    trace = {
        "type": "waterfall", "orientation": "h", "y": names, "x": [first, *map(_more, steps), 0.0],
        "measure": ["absolute", *["relative"] * len(steps), "total"],
        "text": [f"{first:.4g}", *(f"{_more(part):+.3g}" for part in steps), ""], "textposition": "outside",
        "increasing": {"marker": {"color": ACCENT}}, "decreasing": {"marker": {"color": "#3f9f5a"}},
        "totals": {"marker": {"color": STRONG}}, "hovertemplate": "%{y}: %{x:.4g} " + unit + "<extra></extra>",
        "cliponaxis": False,
    }  # fmt: skip
    chart = plotly_figure(
        [trace], "seconds of a step" if unit == "s" else unit, yaxis={"autorange": "reversed"}, showlegend=False
    )
    caption = "From your step to the plan's, by what changes"
    return Chart("own", caption, chart, 120 + 34 * len(names), image="own.png")


def _more(part: ComparedPart) -> float:
    return part.differences[1]


def _parts_table(facts: ReportFacts) -> DataTable:
    own, plan = facts.own, facts.report.plans[0]
    assert own is not None
    rows: list[tuple[Piece, ...]] = []
    for name in own.time.exposed:
        before, after = own.time.exposed[name], plan.time.exposed[name]
        if before or after:
            rows.append((
                component_words(name), facts.shown_seconds(f"own.time.exposed.{name}"),
                facts.shown_seconds(f"{BEST}.time.exposed.{name}"), _signed(after - before),
            ))  # fmt: skip
    for part in dict.fromkeys([*own.memory.by_component, *plan.memory.by_component]):
        before, after = (each.memory.by_component.get(part, 0.0) for each in (own, plan))
        if before or after:
            rows.append((
                f"memory: {component_words(part)}", facts.shown_gib(f"own.memory.by_component.{part}"),
                facts.shown_gib(f"{BEST}.memory.by_component.{part}"), f"{(after - before) / GIB:+.2f} GiB",
            ))  # fmt: skip
    columns = (("part", "left"), ("yours", "right"), ("the plan", "right"), ("change", "right"))
    return DataTable(columns, rows, folded="Seconds and bytes part by part")


def _signed(seconds: float) -> str:
    return "" if not seconds else f"{'+' if seconds > 0 else '-'}{format_seconds(abs(seconds))}"


def _differences(comparison: Comparison) -> DataTable:
    rows = [
        (name, *("–" if value is None else str(value) for value in values))
        for name, values in comparison.differs.items()
        if name not in ("schema_version", "costed_by")
    ]
    columns = (("fact", "left"), ("yours", "left"), ("the plan", "left"))
    return DataTable(columns, rows, folded="What differs between the two")
