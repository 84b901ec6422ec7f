"""One table of what parts of layers take the host, from runs measured with ``mofa measure --layer-segments``.

    python scripts/layer_segments.py RECORDS --out measurements/NAME/segments.csv

RECORDS is a folder of records, beside which ``segments`` holds a table for each rank of each run. Of runs over several
ranks the first rank's is taken. Runs of the judging half are left out and named: nothing is learned from them.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from mofa.measure.expand import expand_run
from mofa.measure.records import RunRecord, read_records

OF_RUN = ("run", "format", "experts", "recompute")
"""Columns that tell of the run; those behind them are the runner's."""


def values_of_run(record: RunRecord) -> tuple[str, str, int, str]:
    """The columns that tell of a run."""
    run = expand_run(record.run)
    experts = run.model.moe.num_experts if run.model.moe is not None else 0
    return record.run.id, run.run.precision.gemm, experts, str(run.strategy.recompute)


def segment_rows(records: Path) -> tuple[list[dict[str, str]], list[str]]:
    """Rows of all runs that have a table of their first rank, and the runs of the judging half."""
    rows: list[dict[str, str]] = []
    left_out = []
    for record in read_records(records):
        path = records.parent / "segments" / f"{record.run.id}.0.csv"
        if not path.is_file():
            continue
        if record.split == "judging":
            left_out.append(record.run.id)
            continue
        of_run = dict(zip(OF_RUN, map(str, values_of_run(record)), strict=True))
        with path.open(newline="") as file:
            rows += [{**of_run, **row} for row in csv.DictReader(file)]
    return rows, left_out


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows, left_out = segment_rows(options.records)
    if not rows:
        raise SystemExit(
            f"{options.records}: no run of the fitting half has a table in {options.records.parent}/segments"
        )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", newline="") as file:
        table = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    print(f"{len(rows)} rows of {len({row['run'] for row in rows})} runs written to {options.out}")
    if left_out:
        print(f"left out, of the judging half: {', '.join(left_out)}")


if __name__ == "__main__":
    main()
