"""How many published rows are predicted, by source, and why the others are not: the tables of docs/published.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from mofa.validate.published import published_reference_runs
from mofa.validate.row_groups import is_group_of_its_own

BEGIN, END = "<!-- published rows: begin -->\n", "<!-- published rows: end -->\n"
COMPLETE = ("refused", "attention or layers")
"""Reasons whose colon is not followed by what tells rows of one reason apart."""


def published_rows_coverage_text(folder: Path) -> str:
    """Both tables in Markdown: rows by source, and those left out by reason, most rows first.

    Parameters
    ----------
    folder
        Of the published runs and the rows that were left out.
    """
    runs, left_out = published_reference_runs(folder)
    sources = Counter(_source(run.id) for run in runs)
    others = Counter(_source(run.id) for run in left_out)
    own = Counter(_source(run.id) for run in runs if is_group_of_its_own(run.group))
    names = sorted({*sources, *others}, key=lambda name: (-sources[name], -others[name], name))
    rows = [(name, sources[name], own[name], others[name]) for name in names]
    total = ("all", sum(sources.values()), sum(own.values()), sum(others.values()))
    reasons: dict[str, list[str]] = {}
    for run in left_out:
        reasons.setdefault(reason_without_details(run.reason), []).append(_source(run.id))
    by_reason = sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0]))
    return "\n".join([
        *_table(("source", "predicted", "of these in groups of their own", "left out"), [*rows, total]), "",
        *_table(("why a row is left out", "rows", "sources"),
                [(reason, len(ids), _counted(ids)) for reason, ids in by_reason]),
    ]) + "\n"  # fmt: skip


def reason_without_details(reason: str) -> str:
    """A row's reason without what tells it from others of the same kind.

    Examples
    --------
    >>> reason_without_details("framework is not modelled: nanotron")
    'framework is not modelled'
    >>> reason_without_details("the same row as bloom-041")
    'the same row as another'
    >>> reason_without_details("refused: batch.global (8) must be a multiple of dp (16); change one of them")
    'refused: batch.global (8) must be a multiple of dp (16)'
    """
    if reason.startswith("the same row as"):
        return "the same row as another"
    if reason.startswith(COMPLETE):
        return reason.partition(";")[0]
    return reason.partition(":")[0]


def _source(id_: str) -> str:
    return id_.rpartition("-")[0]


def _counted(names: Iterable[str]) -> str:
    return ", ".join(f"{name} {rows}" for name, rows in sorted(Counter(names).items(), key=lambda n: (-n[1], n[0])))


def _table(head: Sequence[str], rows: Iterable[Sequence[str | int]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join('---:' if name in NUMBERS else '---' for name in head)}|"]
    return lines + [f"| {' | '.join(map(str, row))} |" for row in rows]


NUMBERS = ("predicted", "of these in groups of their own", "left out", "rows")
"""Columns of numbers."""
