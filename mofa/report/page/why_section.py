"""Why a plan wins: every choice changed by itself, and why other strategies were left out."""

from __future__ import annotations

from mofa.plan.plan_analysis import StrategyChange
from mofa.plan.result import PlanReport
from mofa.report.page.document_parts import DataTable, Number, Paragraph, Part, Piece, Section, paragraph
from mofa.report.page.facts import ReportFacts
from mofa.report.phrases import component_words, count_and_noun, quantity_text, strategy_text
from mofa.report.search_text import REASONS_IN_WORDS, has_experts
from mofa.specs.strategy import StrategySpec
from mofa.units import format_seconds


def why_section(facts: ReportFacts) -> Section:
    """What each other choice would bring, and what the search left out."""
    changes = facts.plan_analysis.changes
    parts: list[Part] = [_summary(changes, facts.constraints_words), _table(facts), _looked_through(facts)]
    if facts.report.rejected:
        parts.append(rejections_table(facts.report))
    return Section("why", "Why it wins", tuple(parts))


def _summary(changes: tuple[StrategyChange, ...], constraints_words: str) -> Paragraph:
    costed = [change for change in changes if change.step_change is not None]
    slower = [change for change in costed if change.step_change is not None and change.step_change > 0]
    too_big = [change for change in costed if change not in slower and not change.fits]
    others = len(costed) - len(slower) - len(too_big)
    said = [f"{len(slower)} would be slower"]
    said += [f"{len(too_big)} would be as fast or faster, and would not fit"] if too_big else []
    said += [f"{others} would be as fast or faster by closed forms alone"] if others else []
    said += [f"{len(changes) - len(costed)} cannot run"] if len(changes) > len(costed) else []
    of_user = f" You {constraints_words}: changes of that are left out." if constraints_words else ""
    return paragraph(
        f"Of {count_and_noun(len(changes), 'single change')} of the strategy ", ", ".join(said), ".", of_user,
    )  # fmt: skip


def _table(facts: ReportFacts) -> DataTable:
    strategy = facts.report.plans[0].strategy
    rows: list[tuple[Piece, ...]] = []
    for i, change in enumerate(facts.plan_analysis.changes):
        before = getattr(strategy, change.field)
        path = f"analysis.changes.{i}"
        if change.refused is not None:
            verdict = f"cannot run: {change.refused}"
        else:
            verdict = _because(change) if change.fits else f"does not fit; {_because(change)}"
        rows.append((
            f"{change.field} {before} → {change.value}{_beside(strategy, change)}",
            facts.shown_change(f"{path}.step_change"),
            facts.shown_gib(f"{path}.device_bytes"), verdict,
        ))  # fmt: skip
    columns = (("instead", "left"), ("step", "right"), ("memory", "right"), ("because", "left"))
    return DataTable(
        columns,
        rows,
        "Each choice changed by itself, data parallelism making up for it, with options that suit it; closed forms.",
    )


def _beside(strategy: StrategySpec, change: StrategyChange) -> str:
    """Options of the framework that change with it."""
    if change.refused is not None:
        return ""
    new, old = change.strategy.options, strategy.options
    pairs = zip(new._fields, new, old, strict=True)
    words = [
        f"{name}={'default' if value is None else str(value).lower()}" for name, value, was in pairs if value != was
    ]
    return f", {' '.join(words)}" if words else ""


def _because(change: StrategyChange) -> str:
    if change.most_changed is None or change.most_changed_s is None:
        return "nothing of the step changes"
    sign = "+" if change.most_changed_s > 0 else "-"
    return f"{component_words(change.most_changed)} {sign}{format_seconds(abs(change.most_changed_s))}"


def _looked_through(facts: ReportFacts) -> Paragraph:
    report = facts.report
    return paragraph(
        "The search looked at ", facts.shown_count("result.space"), " strategies and costed ",
        facts.shown_count("result.searched"), f" in full; {report.feasible:,} fit and were not ruled out as "
        f"slower. It took {format_seconds(report.elapsed_s)}.",
    )  # fmt: skip


def rejections_table(report: PlanReport) -> DataTable:
    """How many strategies each check left out, and which came closest."""
    moe = has_experts(report.workload)
    rows: list[tuple[Piece, ...]] = []
    for reason, count in report.rejected.items():
        miss = report.nearest_miss.get(reason)
        near = ("", "") if miss is None else (
            quantity_text(miss.short_by, miss.unit), strategy_text(miss.strategy, moe=moe),
        )  # fmt: skip
        rows.append(
            (REASONS_IN_WORDS.get(reason, reason), Number(f"{count:,}", f"result.rejected.{reason}", count), *near)
        )
    columns = (("reason", "left"), ("rejected", "right"), ("closest is short by", "right"), ("closest", "left"))
    return DataTable(columns, rows, folded="Why the others were left out")
