"""Write reference_runs/published from a table of published runs: ``python scripts/import_published.py TABLE.csv``."""

from __future__ import annotations

import sys
from pathlib import Path

from mofa.validate.published_rows import write_published_runs

if __name__ == "__main__":
    usable, unusable = write_published_runs(
        Path(sys.argv[1]), Path(__file__).parents[1] / "reference_runs" / "published"
    )
    print(f"{usable} usable rows, {unusable} left out")
