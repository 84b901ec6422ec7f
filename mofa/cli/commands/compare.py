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
            help="What plan or estimate wrote by --json; of a search its best plan, or its N-th. One alone is "
            "compared with the same job as this version of mofa says it.",
        ),
    ],
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", metavar="NODE", help="Of one result: its node type, where that is not bundled."),
    ] = None,
    memory_limit: opt.MemoryLimit = None,
    set_: opt.Set = None,
    host_issue: opt.HostIssue = None,
    host: opt.Host = None,
    jobs: opt.Jobs = None,
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
    plan.json:2. One result alone is compared with its own job today; say again what options changed of its machines.
    """
    from mofa.cli.numbers import parse_file_and_plan_number
    from mofa.cli.output import OutputOptions
    from mofa.errors import SpecError
    from mofa.plan.comparison import compare_results, numbered_duplicate_names, read_results, version_text
    from mofa.report.comparison_text import comparison_to_frame, print_comparison, save_comparison

    output = OutputOptions(json=json, json_file=json_file, csv=csv, out=out)
    places = [(file, 1 if number is None else number) for file, number in map(parse_file_and_plan_number, results)]
    output.refuse_unwritable_places("compare", [file for file, _ in places])
    loaded = [(text, each) for text, place in zip(results, places, strict=True) for each in read_results(*place)]
    several = {text for text, count in Counter(text for text, _ in loaded).items() if count > 1}
    machine_options = {
        "--cluster": cluster, "--memory-limit": memory_limit, "--set": set_, "--host-issue": host_issue, "--host": host,
    }  # fmt: skip
    if len(loaded) == 1:
        loaded.append(("today", _today(loaded[0], cluster, memory_limit, set_, host_issue, host, jobs)))
    elif given := [name for name, value in machine_options.items() if value is not None]:
        raise SpecError(f"{given[0]}: is of the machines of one result alone, and here are {len(loaded)}; leave it out")
    versions = [version_text(result) for _, result in loaded]
    texts = [_short_name(text, result, text in several) for text, result in loaded]
    if len(set(versions)) > 1 or loaded[-1][0] == "today":
        texts = [f"{text} ({version})" for text, version in zip(texts, versions, strict=True)]
    names = numbered_duplicate_names(texts)
    comparison = compare_results(dict(zip(names, (result for _, result in loaded), strict=True)))
    output.show_result(
        comparison.model_dump_json(indent=2) + "\n", lambda: comparison_to_frame(comparison),
        lambda folder: save_comparison(comparison, folder), lambda console: print_comparison(comparison, console),
    )  # fmt: skip


def _today(
    saved: tuple[str, dict[str, Any]], cluster: str | None, memory_limit: str | None, set_: list[str] | None,
    host_issue: str | None, host: str | None, jobs: int | None,
) -> dict[str, Any]:  # fmt: skip
    """The job of a saved result as this version says it."""
    from mofa.cli.parse import parse_host_issue, parse_overrides
    from mofa.cli.same_job import reestimate_saved_result
    from mofa.errors import SpecError
    from mofa.search.workers import usable_cores

    overrides = parse_overrides(set_)
    if others := [
        f"{section}.{path}" for section in ("workload", "framework", "strategy") for path in overrides[section]
    ]:
        raise SpecError(f"--set {others[0]}: the result says it; --set is of hardware here")
    where, result = saved
    host_issue_s = parse_host_issue(host_issue, overrides, host)
    return reestimate_saved_result(
        where, result, cluster, overrides, host_issue_s, memory_limit, jobs or usable_cores()
    )


def _short_name(text: str, result: dict[str, Any], is_of_list: bool) -> str:
    """A run's id, else the file's name without its folder, with the plan's number where it was given.

    Results of one file, as of several numbers of GPUs, are named by those too.
    """
    run, cluster = result.get("id"), result.get("cluster")
    gpus = cluster.get("num_gpus") if isinstance(cluster, dict) and is_of_list else None
    return str(run) if run else Path(text).name.replace(".json", "") + (f", {gpus} GPUs" if gpus else "")
