"""``mofa validate``: predictions beside what real runs measured."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mofa.cli import options as opt

MAX_PAGE_BYTES = 2**24


class RunGroupChoice(StrEnum):
    """Which groups of runs are validated."""

    measured = "measured"
    measured_drawn = "measured-drawn"
    measured_switches = "measured-switches"
    published = "published"


def validate(
    group: Annotated[
        RunGroupChoice | None,
        typer.Option(
            "--group", help="Only measured or only published runs, those drawn at random, or with switches of recipes."
        ),
    ] = None,
    references: Annotated[
        Path | None,
        typer.Option("--references", metavar="DIR", help="Reference runs; by default those of the repository."),
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option("--markdown", metavar="FILE", help="Write the report as docs/accuracy.md, its figures beside it."),
    ] = None,
    readme: Annotated[
        Path | None,
        typer.Option("--readme", metavar="FILE", help="Make the table between a page's accuracy markers anew."),
    ] = None,
    json: opt.Json = False,
    json_file: opt.JsonFile = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write the table of runs to a file.")
    ] = None,
    out: opt.Out = None,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes", min=1, max=opt.MOST_PROCESSES, help="Runs predicted at once; by default one a core."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar, and only the table of groups.")] = False,
) -> None:
    """Predict every reference run from its configuration and compare with what it measured."""
    import mofa.validate
    from mofa.cli.output import OutputOptions
    from mofa.cli.progress import progress_bar
    from mofa.report.accuracy import print_validation, runs_to_frame
    from mofa.report.accuracy_page import (
        accuracy_page_figures,
        accuracy_page_markdown,
        save_validation,
        with_readme_table,
    )
    from mofa.specs.write_files import all_files_or_none, make_directory, write_file_atomically

    output = OutputOptions(json=json, json_file=json_file, csv=csv, out=out, quiet=quiet)
    page = _page(readme) if readme is not None else ""
    output.refuse_unwritable_places("validate", [references], {"--markdown": markdown, "--readme": readme})
    with progress_bar("predicting", enabled=not quiet and not json) as progress:
        report = mofa.validate.validate_runs(
            references, group=group.value if group else None, processes=processes, progress=progress
        )
    with all_files_or_none():
        if markdown is not None:
            write_file_atomically(markdown, accuracy_page_markdown(report, references).encode())
            for place, figure in accuracy_page_figures(report).items():
                make_directory(markdown.parent / place.parent)
                write_file_atomically(markdown.parent / place, figure)
        if readme is not None:
            write_file_atomically(readme, with_readme_table(page, report).encode(), replaces_input=True)
        output.write_result(
            report.model_dump_json(indent=2) + "\n", lambda: runs_to_frame(report),
            lambda folder: save_validation(report, folder),
        )  # fmt: skip
    output.print_result(
        report.model_dump_json(indent=2) + "\n", lambda console: print_validation(report, console, quiet=quiet)
    )


def _page(path: Path) -> str:
    """A page that has a place for the table."""
    from mofa.errors import SpecError
    from mofa.report.accuracy_page import README_MARKERS
    from mofa.specs.limited_reads import read_bytes, utf8_text

    where = f"--readme {path}"
    text = utf8_text(read_bytes(path, where, MAX_PAGE_BYTES, "name a page of text"), where)
    if any(marker not in text for marker in README_MARKERS):
        begin, end = (marker.strip() for marker in README_MARKERS)
        raise SpecError(f"--readme {path}: has no table to make anew; put {begin} and {end} on lines of their own")
    return text
