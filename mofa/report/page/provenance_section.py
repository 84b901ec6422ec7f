"""Where the numbers of a report come from, what was assumed, and how to launch the plan."""

from __future__ import annotations

from mofa.report.page.document_parts import Code, DataTable, Part, Piece, Section, paragraph
from mofa.report.page.facts import BEST, ReportFacts
from mofa.report.search_text import library_share_line

MEANINGS = {
    "measured": "timed on that hardware", "interpolated": "between sizes that were measured",
    "transferred": "measured on other hardware and scaled by datasheets",
    "extrapolated": "beyond the sizes that were measured", "datasheet": "as the maker says",
    "read": "read in a framework's source", "assumed": "nobody measured it",
}  # fmt: skip
PLACES = (
    ("result", "what `mofa plan --json` prints of this job; plan.json beside this page is the same"),
    ("best", "the best plan played out once more, with the memory of every stage"),
    ("analysis", "closed forms of the same strategy on changed machines and with changed choices; nearest runs"),
    ("own", "what `mofa estimate --from` says of your configuration"),
)


def provenance_section(facts: ReportFacts) -> Section:
    """Shares of the step by provenance, the facts of the machines, and where each number of the page stands."""
    plan = facts.report.plans[0]
    order = sorted(plan.provenance, key=lambda name: -plan.provenance[name])
    shares: list[tuple[Piece, ...]] = [
        (name, facts.shown_share(f"{BEST}.provenance.{name}"), MEANINGS[name])
        for name in order
        if plan.provenance[name]
    ]
    weak = sum(share for name, share in plan.provenance.items() if name in ("assumed", "extrapolated"))
    parts: list[Part] = [
        paragraph(f"{1 - weak:.0%} of the step rests on facts that are neither assumed nor extrapolated.", tone="lead"),
        DataTable((("the step rests on facts that are", "left"), ("share", "right"), ("meaning", "left")), shares),
    ]
    if plan.library_fraction is not None:
        parts.append(paragraph(library_share_line(plan.library_fraction)))
    columns = (("fact", "left"), ("value", "right"), ("provenance", "left"), ("source", "left"))
    if facts.hardware:
        parts.append(
            DataTable(
                columns, facts.hardware, folded=f"{len(facts.hardware)} facts of the machines, with their sources"
            )
        )
    places = [place for place in PLACES if facts.page_json[place[0]] is not None]
    if facts.step is None:
        places[1] = ("best", "the best plan again, in closed form; nothing was played out")
    parts.append(DataTable(
        (("in the page's JSON", "left"), ("what stands there", "left")), places,
        folded="Where every number of this page stands",
    ))  # fmt: skip
    parts.append(paragraph(
        "Each number is marked with its place in the JSON that the page carries; point at it to see the place.",
        tone="note",
    ))  # fmt: skip
    return Section("provenance", "Where the numbers come from", tuple(parts))


def assumptions_section(facts: ReportFacts) -> Section:
    """Notes of the plan, and defaults that nobody asked for."""
    notes: list[tuple[Piece, ...]] = [(note,) for note in facts.report.plans[0].notes]
    given = facts.given | {"fixed"}
    asked: list[tuple[Piece, ...]] = [(name, text) for name, text in facts.report.defaults.items() if name in given]
    defaults: list[tuple[Piece, ...]] = [
        (name, text) for name, text in facts.report.defaults.items() if text and name not in given
    ]
    parts: list[Part] = [DataTable((("the prediction assumes", "left"),), notes)] if notes else []
    if asked:
        parts.append(DataTable((("asked for", "left"), ("as", "left")), asked))
    if defaults:
        parts.append(DataTable((("not asked for", "left"), ("taken by default", "left")), defaults))
    return Section("assumptions", "Assumptions", tuple(parts))


def launch_section(facts: ReportFacts) -> Section:
    """The files that run the plan, and what made the report."""
    parts: list[Part] = [paragraph(facts.launch_note)] if facts.launch_note else []
    parts += [Code(name, text) for name, text in facts.launch.items()]
    if facts.command:
        parts += [paragraph("This report was made by:"), Code("command", facts.command)]
    return Section("launch", "How to launch it", tuple(parts))
