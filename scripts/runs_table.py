"""Bring the table of measured runs in docs/measure.md up to date with reference_runs/measured.

python scripts/runs_table.py
"""

from __future__ import annotations

from pathlib import Path

from mofa.measure import read_records
from mofa.report.measured_runs import with_renewed_tables

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Rewrite the part between the markers."""
    page = ROOT / "docs" / "measure.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(with_renewed_tables(text, read_records(ROOT / "reference_runs" / "measured")), encoding="utf-8")


if __name__ == "__main__":
    main()
