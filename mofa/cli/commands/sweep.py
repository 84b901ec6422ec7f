"""``mofa sweep``: every combination of models, clusters, GPUs, batches, failures and prices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mofa.cli import options as opt


def sweep(
    file: Annotated[
        str, typer.Argument(metavar="SWEEP.yaml", help="Lists of models, clusters, gpus and more (docs/sweep.md).")
    ],
    scheduler: Annotated[
        str | None,
        typer.Option(
            "--scheduler", metavar="ADDRESS", help="Plan on a Dask cluster that runs already, at tcp://HOST:PORT."
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", min=1, max=opt.MOST_PROCESSES, help="Processes here; by default one for each core."),
    ] = None,
    json: opt.Json = False,
    json_file: opt.JsonFile = None,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the table as CSV too.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Folder of the table, the figures and finished points; else named as the file."
        ),
    ] = None,
    quiet: opt.Quiet = False,
) -> None:
    """Plan models x clusters x GPUs x batches x failures x prices into one table.

    Run again after it was killed, or with longer lists, it plans what is missing. A point that fails says why in its
    row, and the others go on. Exit status 3 where nothing fits anywhere, 2 where every point failed.
    """
    import mofa
    from mofa.cli.output import OutputOptions
    from mofa.cli.progress import progress_bar
    from mofa.errors import SpecError
    from mofa.report.sweep_files import save_sweep, sweep_report
    from mofa.report.sweep_text import print_sweep
    from mofa.search.workers import usable_cores

    if scheduler is not None and jobs is not None:
        raise SpecError("--jobs: is about this machine, and --scheduler plans on others; leave one of them out")
    folder = Path(Path(file).stem) if out is None else out
    output = OutputOptions(json=json, json_file=json_file, csv=csv, out=folder, quiet=quiet)
    output.refuse_unwritable_places("sweep", [file])
    with progress_bar(f"points of {Path(file).name}", enabled=not quiet) as progress:
        table = mofa.sweep(
            file, out=folder, scheduler=scheduler, jobs=jobs or usable_cores(opt.MOST_PROCESSES), progress=progress
        )
    text = sweep_report(table).model_dump_json(indent=2) + "\n" if json or json_file is not None else ""
    output.show_result(
        text, lambda: table, lambda place: save_sweep(table, place),
        lambda console: print_sweep(table, console, quiet=quiet),
    )  # fmt: skip
    _fail_without_plans(file, table["status"].tolist(), table["reason"].tolist())


def _fail_without_plans(file: str, statuses: list[str], reasons: list[str]) -> None:
    """Raise where no point has a plan."""
    from mofa.errors import NothingFits, SpecError

    if "planned" in statuses:
        return
    words = f"{file}: none of {len(statuses):,} points has a plan; the first: {reasons[0]}"
    raise NothingFits(words) if "nothing fits" in statuses else SpecError(words)
