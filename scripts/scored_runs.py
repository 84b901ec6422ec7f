"""Errors of all runs, written to hardware_profiles/scored_runs.csv, from which reports name those nearest to a job.

mofa validate --json-file validate.json, then python scripts/scored_runs.py validate.json
"""

from __future__ import annotations

import sys
from pathlib import Path

from mofa.report.save import write_file_atomically
from mofa.specs.scored_runs import FILE
from mofa.validate.scored_runs import scored_runs_csv
from mofa.validate.validation_report import ValidationReport

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Write the file anew."""
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/scored_runs.py VALIDATE.json, as mofa validate --json-file wrote it")
    report = ValidationReport.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    write_file_atomically(ROOT / "hardware_profiles" / FILE, scored_runs_csv(report.runs).encode())


if __name__ == "__main__":
    main()
