"""The sections of a report in their order, and its files."""

from __future__ import annotations

from collections.abc import Collection

from mofa.plan.result import PlanReport
from mofa.report.page.accuracy_section import accuracy_section
from mofa.report.page.alternatives_section import alternatives_section
from mofa.report.page.document_parts import Section, paragraph
from mofa.report.page.facts import ReportFacts
from mofa.report.page.front_section import front_section
from mofa.report.page.html import page_html
from mofa.report.page.limits_section import limits_section, step_section
from mofa.report.page.markdown import page_markdown
from mofa.report.page.memory_section import memory_section
from mofa.report.page.own_section import user_strategy_section
from mofa.report.page.provenance_section import assumptions_section, launch_section, provenance_section
from mofa.report.page.question_section import answer_section, question_section
from mofa.report.page.sensitivity_section import sensitivity_section
from mofa.report.page.timeline_section import timeline_section
from mofa.report.page.why_section import rejections_table, why_section

HTML, MARKDOWN = "report.html", "report.md"


def report_sections(facts: ReportFacts) -> list[Section]:
    """What a report shows, in order; the user's own configuration leads where there is one."""
    sections = [
        user_strategy_section(facts), question_section(facts), answer_section(facts), why_section(facts),
        limits_section(facts),
        memory_section(facts), front_section(facts), alternatives_section(facts), timeline_section(facts),
        sensitivity_section(facts), accuracy_section(facts), provenance_section(facts), assumptions_section(facts),
        launch_section(facts),
    ]  # fmt: skip
    return [section for section in sections if section is not None and section.parts]


def closed_form_sections(facts: ReportFacts) -> list[Section]:
    """What an answer at once shows: the sections of a report that rest on closed forms alone."""
    sections = [answer_section(facts), step_section(facts), front_section(facts), alternatives_section(facts)]
    return [section for section in sections if section is not None]


def nothing_fits_sections(report: PlanReport) -> list[Section]:
    """What an answer shows where nothing fits: how many GPUs would do, and what came closest."""
    words = f"{report.min_gpus:,} GPUs would do." if report.min_gpus else f"{report.min_gpus_note or 'Add GPUs'}."
    parts = (paragraph("Nothing fits. ", words[0].upper() + words[1:], tone="warning"), rejections_table(report))
    return [Section("plan", "The plan", parts)]


def report_title(facts: ReportFacts) -> str:
    """The page's title: the job on its machines."""
    cluster = facts.report.cluster
    return f"{facts.report.workload.name} on {cluster.num_gpus:,} x {cluster.gpu}"


def report_files(facts: ReportFacts, images: Collection[str] = ()) -> dict[str, bytes]:
    """The page and the Markdown by name; ``images`` are figures that stand beside them."""
    sections, title = report_sections(facts), report_title(facts)
    return {
        HTML: page_html(facts, sections, title).encode(),
        MARKDOWN: page_markdown(sections, title, images, facts.made_on).encode(),
    }
