"""The tables of docs/published.md are those of the committed rows."""

from __future__ import annotations

import csv
from pathlib import Path

from mofa.validate.published import UNUSABLE, published_reference_runs
from mofa.validate.published_coverage import BEGIN, END, published_rows_coverage_text, reason_without_details

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "reference_runs" / "published"


def test_the_page_has_the_tables() -> None:
    """``python scripts/published_coverage.py`` writes them."""
    page = (ROOT / "docs" / "published.md").read_text(encoding="utf-8")
    assert page.count(BEGIN) == page.count(END) == 1
    assert page.partition(BEGIN)[2].partition(END)[0] == published_rows_coverage_text(PUBLISHED)


def test_every_row_is_counted_once() -> None:
    runs, left_out = published_reference_runs(PUBLISHED)
    by_source, _, by_reason = published_rows_coverage_text(PUBLISHED).partition("\n\n")
    cells = [line.strip("| ").split(" | ") for line in by_source.splitlines()[2:]]
    assert cells[-1] == ["all", str(len(runs)), cells[-1][2], str(len(left_out))]
    for column in (1, 2, 3):
        assert sum(int(row[column]) for row in cells[:-1]) == int(cells[-1][column])
    rows = [int(line.split(" | ")[1]) for line in by_reason.splitlines()[2:]]
    assert sum(rows) == len(left_out)
    assert rows == sorted(rows, reverse=True)


def test_reasons_of_one_kind_are_one_line() -> None:
    with (PUBLISHED / UNUSABLE).open(newline="") as file:
        reasons = {row["reason"] for row in csv.DictReader(file)}
    text = published_rows_coverage_text(PUBLISHED)
    assert all(f"| {reason_without_details(reason)} |" in text for reason in reasons)
    assert text.count("| framework is not modelled |") == 1
