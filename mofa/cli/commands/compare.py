"""``mofa compare``: where the seconds and bytes of results differ."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from mofa.cli import options as opt


def compare(
    results: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE[:N]...",
            help="What plan or estimate wrote by --json, two or more; of a search its best plan, or its N-th.",
        ),
    ],
    json: opt.Json = False,
    json_file: opt.JsonFile = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write the parts of every result to a file.")
    ] = None,
    out: opt.Out = None,
) -> None:
    """Put strategies, clusters, workloads, frameworks or versions of mofa beside each other.

    What differs of what was asked for, and where the seconds of the step and the bytes of the fullest GPU do. The first
    is what the others are compared with. Estimates of one file each, or several plans of one search: plan.json:1
    plan.json:2.
    """
    from mofa.cli.numbers import parse_file_and_plan_number
    from mofa.cli.output import OutputOptions
    from mofa.plan.comparison import compare_results, numbered_duplicate_names, read_results
    from mofa.report.comparison_text import comparison_to_frame, print_comparison, save_comparison

    output = OutputOptions(json=json, json_file=json_file, csv=csv, out=out)
    places = [(file, 1 if number is None else number) for file, number in map(parse_file_and_plan_number, results)]
    output.refuse_unwritable_places([file for file, _ in places])
    loaded = [(text, each) for text, place in zip(results, places, strict=True) for each in read_results(*place)]
    several = {text for text, count in Counter(text for text, _ in loaded).items() if count > 1}
    names = numbered_duplicate_names([_short_name(text, result, text in several) for text, result in loaded])
    comparison = compare_results(dict(zip(names, (result for _, result in loaded), strict=True)))
    output.show_result(
        comparison.model_dump_json(indent=2) + "\n", lambda: comparison_to_frame(comparison),
        lambda folder: save_comparison(comparison, folder), lambda console: print_comparison(comparison, console),
    )  # fmt: skip


def _short_name(text: str, result: dict[str, Any], is_of_list: bool) -> str:
    """A run's id, else the file's name without its folder, with the plan's number where it was given.

    Results of one file, as of several numbers of GPUs, are named by those too.
    """
    run, cluster = result.get("id"), result.get("cluster")
    gpus = cluster.get("num_gpus") if isinstance(cluster, dict) and is_of_list else None
    return str(run) if run else Path(text).name.replace(".json", "") + (f", {gpus} GPUs" if gpus else "")
