"""``mofa plan --gpus 256..1024``: the best plan of every number of GPUs, beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from mofa.cli.output import OutputOptions
    from mofa.search.search_result import Search


def parse_gpus_or_range(text: str | int) -> tuple[int, ...]:
    """One number of GPUs, or all from the first to the last, each twice the one before.

    Examples
    --------
    >>> parse_gpus_or_range("64"), parse_gpus_or_range("256..1K")
    ((64,), (256, 512, 1024))
    """
    from mofa.cli.numbers import size_of_cluster_parser
    from mofa.specs.written_counts import doubled_counts

    is_range = ".." in str(text)
    parse = size_of_cluster_parser("256..1K" if is_range else "64 or 1K, or 256..1K for several")
    try:
        return doubled_counts(str(text), parse)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def show_plans_by_gpu_count(
    output: OutputOptions, searches: Sequence[Search], jobs: int, given: frozenset[str] = frozenset()
) -> None:
    """Write and print what was found at each number of GPUs: as JSON a list, as files a folder each."""
    from mofa.report.save import json_text, save_plan_report
    from mofa.report.scales_text import print_scales, scales_to_frame

    reports = [search.report for search in searches]

    def save(out: Path) -> list[Path]:
        from mofa.cli.report_page import report_facts_of_search

        files = []
        for search in searches:
            table = search.costed_table()
            page = report_facts_of_search(search, table, jobs=jobs, given=given) if search.report.plans else None
            files += save_plan_report(search.report, out / str(search.report.cluster.num_gpus), table, page)
        return files

    def print_all(console: Console) -> None:
        print_scales(reports, console, quiet=output.quiet)

    text = "[" + ",\n".join(map(json_text, reports)) + "]\n"
    output.show_result(text, lambda: scales_to_frame(reports), save, print_all)
