"""Bring the tables of docs/published.md up to date: rows predicted by source, and why others are left out.

python scripts/published_coverage.py
"""

from __future__ import annotations

from pathlib import Path

from mofa.validate.published_coverage import BEGIN, END, published_rows_coverage_text

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "published.md"

if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, behind = rest.partition(END)
    PAGE.write_text(
        before + BEGIN + published_rows_coverage_text(ROOT / "reference_runs" / "published") + END + behind, "utf-8"
    )
