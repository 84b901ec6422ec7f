"""What runs of nccl-tests changed in a node's profile, and how far each is from what the planner says now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mofa.report.accuracy import as_percent
from mofa.report.tables import Columns, print_paragraph, print_table
from mofa.units import format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from mofa.calibrate.fits.nccl_import import NodeProfileChanges

ERROR_COLUMNS: Columns = (
    ("file", "left"), ("collective", "left"), ("GPUs", "right"), ("hosts", "right"), ("sizes", "right"),
    ("before", "right"), ("now", "right"), ("by the others", "right"),
)  # fmt: skip
ERROR_WORDS = """\
Median errors of a file's sizes from 16 KiB on: by the profile as it was, by the one written, and by one fitted to the
other files alone, which is what a collective that was not measured will be off by."""


def print_node_profile_changes(imported: NodeProfileChanges, console: Console) -> None:
    """Print the facts that changed, and where the network was fitted the errors of every file."""
    facts = [
        f"{name} = {format_seconds(value) if name.endswith('_s') else f'{value:.2g}'}"
        for name, value in imported.facts.items()
    ]
    facts += [f"collectives.{curve}" for curve in imported.curves]
    (_, first), *others = imported.runs
    what = f"{len(imported.runs)} files" if others else f"{first.op}, {len(first.points)} sizes"
    print_paragraph(console, f"{imported.profile}: {', '.join(facts)} ({what})")
    if not imported.errors:
        return
    rows = []
    for file, run in imported.runs:
        if (errors := imported.errors.get(str(file))) is not None:
            rows.append([
                file.name, run.op, str(run.group), str(run.hosts), str(len(run.points)),
                as_percent(errors.before),
                as_percent(errors.fitted), as_percent(errors.by_others),
            ])  # fmt: skip
    print_table(console, "Between nodes", ERROR_COLUMNS, rows, leaves=("sizes", "hosts"), under="collective")
    print_paragraph(console, ERROR_WORDS)
