"""The plans side by side."""

from __future__ import annotations

from mofa.report.page.document_parts import DataTable, Part, Piece, Section, paragraph
from mofa.report.page.facts import ReportFacts
from mofa.report.phrases import component_words, strategy_text
from mofa.report.search_text import has_experts, numerics_offers_line

MOST_BESIDE = 5
"""Plans whose parts stand beside each other: more columns are no comparison that people read. [-]"""


def alternatives_section(facts: ReportFacts) -> Section | None:
    """All plans in a table, and the parts of the first ones beside each other; None where there is one plan."""
    report = facts.report
    if len(report.plans) < 2:
        return None
    moe = has_experts(report.workload)
    rows: list[tuple[Piece, ...]] = []
    for i, plan in enumerate(facts.plans):
        path = f"result.plans.{i}"
        behind = "" if i == 0 else f"{plan.step_s / report.plans[0].step_s - 1.0:+.1%}"
        rows.append((
            str(i + 1), strategy_text(plan.strategy, moe=moe), facts.shown_seconds(f"{path}.step_s"), behind,
            facts.shown_token_rate(f"{path}.tokens_per_s_per_gpu"), facts.shown_share(f"{path}.mfu"),
            facts.shown_gib(f"{path}.memory.device_bytes"),
        ))  # fmt: skip
    columns = (
        ("#", "right"), ("strategy", "left"), ("step", "right"), ("behind", "right"), ("tokens/s/GPU", "right"),
        ("MFU", "right"), ("memory", "right"),
    )  # fmt: skip
    parts: list[Part] = [DataTable(columns, rows), _side_by_side(facts)]
    if report.numerics_offers:
        parts.append(paragraph(numerics_offers_line(report).strip()))
    return Section("alternatives", "Alternatives side by side", tuple(parts))


def _side_by_side(facts: ReportFacts) -> DataTable:
    plans = facts.plans[:MOST_BESIDE]
    paths = [f"result.plans.{i}" for i in range(len(plans))]
    rows: list[tuple[Piece, ...]] = []
    for name in plans[0].time.exposed:
        if any(plan.time.exposed[name] for plan in plans):
            rows.append(
                (component_words(name), *(facts.shown_seconds(f"{path}.time.exposed.{name}") for path in paths))
            )
    for kind in dict.fromkeys(kind for plan in plans for kind in plan.memory.by_component):
        if any(plan.memory.by_component.get(kind) for plan in plans):
            cells = (facts.shown_gib(f"{path}.memory.by_component.{kind}") for path in paths)
            rows.append((f"memory: {component_words(kind)}", *cells))
    for field in plans[0].strategy.model_dump():
        values = [getattr(plan.strategy, field) for plan in plans]
        if len({str(value) for value in values}) > 1:
            rows.append((field, *(str(value) for value in values)))
    columns = (("part", "left"), *((f"plan {i}", "right") for i in range(1, len(plans) + 1)))
    return DataTable(columns, rows, folded=f"Seconds, bytes and choices of the first {len(plans)} beside each other")
