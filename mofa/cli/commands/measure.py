"""``mofa measure``: the runs of a file, run for real on this machine's GPUs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mofa.cli import options as opt


def measure(
    runs: Annotated[Path, typer.Argument(metavar="RUNS.yaml", help="A file of runs, as estimate reads it.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of records; each run gets DIR/ID.yaml.")],
    parallel: Annotated[
        bool, typer.Option("--parallel", help="Runs that together fit the machine's GPUs go side by side.")
    ] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="A profile, allocations and ops of a step: DIR/../traces and ops.")
    ] = False,
    trace_beginning: Annotated[
        bool,
        typer.Option(
            "--trace-beginning",
            help="Also keep every allocation of building and the first steps, in DIR/../beginnings.",
        ),
    ] = False,
    beginning_steps: Annotated[
        int, typer.Option("--beginning-steps", metavar="N", min=1, max=16, help="How many, with --trace-beginning.")
    ] = 2,
    layer_segments: Annotated[
        bool, typer.Option("--layer-segments", help="Also time parts of Megatron's layers: DIR/../segments.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Runs that are bound by the host are not repeated.")] = False,
    timeout: Annotated[
        int,
        typer.Option(
            "--timeout", metavar="S", min=1, max=opt.MOST_RUN_S, help="Seconds after which a run is given up."
        ),
    ] = 300,
    logs: Annotated[
        Path | None, typer.Option("--logs", metavar="DIR", help="Keep there what runs without a result printed.")
    ] = None,
    quiet: opt.NoProgress = False,
) -> None:
    """Run real frameworks on this machine's GPUs and record step time and memory, one file a run.

    A run that has a record is skipped, so that a call can be repeated. Out of memory is a result.
    """
    from mofa.errors import MofaError
    from mofa.measure import KeptBesideRecords, measure_runs
    from mofa.report.save import check_writable

    for folder in (out, logs):
        if folder is not None:
            check_writable(folder, directory=True)
    summary = measure_runs(
        runs, out, parallel=parallel,
        beside_records=KeptBesideRecords(trace, beginning_steps if trace_beginning else 0, layer_segments),
        once=once, timeout_s=timeout, logs=logs, progress=_silent if quiet else _say,
    )  # fmt: skip
    print(f"{len(summary.written)} written to {out}, {len(summary.skipped)} there before, {len(summary.failed)} failed")
    if summary.failed:
        first, why = next(iter(summary.failed.items()))
        others = f" (and {len(summary.failed) - 1} more)" if len(summary.failed) > 1 else ""
        look = "" if logs is not None else "; --logs DIR keeps what it printed"
        raise MofaError(f"{first}: no result: {why}{others}{look}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _silent(line: str) -> None:
    pass
