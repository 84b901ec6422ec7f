"""``mofa export``: a plan as the job of a framework."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mofa.cli import options as opt
from mofa.cli.searched_plans import REFINE_SECONDS, search_plans
from mofa.specs.shown_text import escape_file_text

if TYPE_CHECKING:
    from mofa.plan.result import Estimate, PlanReport


def export(
    workload: Annotated[
        str,
        typer.Argument(metavar="PLAN.json[:N]|WORKLOAD", help="What plan or estimate wrote by --json, or a workload."),
    ],
    cluster: Annotated[str | None, typer.Argument(help="A bundled node type or a node YAML; absent with JSON.")] = None,
    to: Annotated[
        str, typer.Option("--to", metavar="FRAMEWORK", help="megatron, megatron-bridge, torchtitan or torchtitan-0.3.")
    ] = "",
    number: Annotated[
        int | None,
        typer.Option("--number", min=1, help="Which of the plans, 1 the best; of a list of results which result."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where to write the files; else they are printed.")
    ] = None,
    gpus: opt.MaybeGpus = None,
    nodes: opt.Nodes = None,
    strategy: opt.Strategy = None,
    seq_len: opt.SeqLen = None,
    global_batch: opt.GlobalBatch = None,
    tokens: opt.Tokens = None,
    framework: opt.Framework = None,
    fix: Annotated[list[str] | None, typer.Option("--fix", metavar="NAME=N", help="As in plan. Repeatable.")] = None,
    maximum: Annotated[
        list[str] | None, typer.Option("--max", metavar="NAME=N", help="As in plan. Repeatable.")
    ] = None,
    with_: Annotated[list[str] | None, typer.Option("--with", metavar="WORD", help="As in plan.")] = None,
    without: Annotated[list[str] | None, typer.Option("--without", metavar="WORD", help="As in plan.")] = None,
    set_: opt.Set = None,
    host_issue: opt.HostIssue = None,
    host: opt.Host = None,
    replay: opt.Replay = True,
    jobs: opt.Jobs = None,
    quiet: opt.Quiet = False,
) -> None:
    """Write a plan as a job that Megatron-LM, Megatron-Bridge or torchtitan runs.

    The plan is one of a JSON, the one of a strategy, or the best of a search. A choice that the framework has no
    argument for is an error.
    """
    import mofa
    from mofa.cli.numbers import count_gpus, parse_file_and_plan_number
    from mofa.errors import SpecError
    from mofa.export.entry import job_file_makers, load_numbered_result
    from mofa.specs.files import did_you_mean
    from mofa.specs.write_files import check_writable

    if to not in job_file_makers():
        what = f"{to}: is no framework that jobs are written for" if to else "is missing: say for which framework"
        raise SpecError(f"--to {what}; {did_you_mean(to or '', job_file_makers())}")
    if out is not None:
        check_writable(out, directory=True)
    options: dict[str, Any] = {
        "--gpus": gpus, "--strategy": strategy, "--seq-len": seq_len, "--global-batch": global_batch,
        "--tokens": tokens, "--framework": framework, "--fix": fix, "--max": maximum, "--with": with_,
        "--without": without, "--nodes": nodes, "--set": set_, "--host-issue": host_issue,
        "--host": host,
    }  # fmt: skip
    given = [name for name, value in options.items() if value is not None]
    result: PlanReport | Estimate
    if cluster is None:
        if given:
            raise SpecError(
                f"{workload}: read as the JSON of a plan, because no cluster is named, but {given[0]} is given; name a "
                "cluster after the workload, or leave the option out"
            )
        file, named = parse_file_and_plan_number(workload)
        if number is not None and named not in (None, number):
            raise SpecError(f"--number: is {number}, but {workload} names plan {named}; keep one")
        result, number = load_numbered_result(file, number if named is None else named)
    else:
        options["--gpus"] = count_gpus(cluster, gpus, nodes)
        result = _predicted(workload, cluster, options, replay, jobs, quiet)
    exported = mofa.export(result, to=to, number=1 if number is None else number, out=out)
    if out is not None:
        print(f"wrote {', '.join(exported.files)} to {out}", file=sys.stderr)
        return
    for name, text in exported.files.items():
        if len(exported.files) > 1:
            print(f"# == {name}")
        sys.stdout.write(escape_file_text(text))


def _predicted(
    workload: str, cluster: str, options: dict[str, Any], replay: bool, jobs: int | None, quiet: bool
) -> PlanReport | Estimate:
    """What a search finds, or the estimate of one strategy."""
    from mofa.cli.commands.estimate import estimate_of_request
    from mofa.cli.jobs import estimate_requests_from_options, read_cluster, read_framework, read_workload
    from mofa.cli.parse import parse_degree_limits, parse_fixed, parse_host_issue, parse_overrides, split_words
    from mofa.cli.progress import progress_bar
    from mofa.errors import NothingFits, SpecError
    from mofa.search.workers import usable_cores

    searched = [name for name in ("--fix", "--max", "--with", "--without") if options[name] is not None]
    size = {"seq_len": options["--seq-len"], "global_batch": options["--global-batch"], "tokens": options["--tokens"]}
    if options["--strategy"] is not None:
        if searched:
            raise SpecError(f"{searched[0]}: is of a search, but --strategy names the one strategy; leave one out")
        with estimate_requests_from_options(
            workload, cluster, options["--gpus"], options["--strategy"], framework=options["--framework"],
            set_=options["--set"], host_issue=options["--host-issue"], host=options["--host"], **size,
        ) as asked:  # fmt: skip
            return estimate_of_request(asked[0], "causal", None, replay, jobs or usable_cores(), False)
    overrides = parse_overrides(options["--set"])
    host_issue_s = parse_host_issue(options["--host-issue"], overrides, options["--host"])
    job = read_workload(workload, overrides, **size)
    machines = read_cluster(cluster, options["--gpus"], overrides, host_issue_s)
    with progress_bar(f"{job.name} on {options['--gpus']:,} GPUs", enabled=not quiet) as progress:
        search: dict[str, Any] = {
            "framework": read_framework(options["--framework"], job, overrides),
            "fix": parse_fixed(options["--fix"], overrides["strategy"]),
            "maximum": parse_degree_limits(options["--max"]),
            "with_": split_words(options["--with"]), "without": split_words(options["--without"]),
            "progress": progress, "replay": replay, "jobs": jobs or usable_cores(),
        }  # fmt: skip
        report = search_plans(job, machines, search, REFINE_SECONDS, progress).report
    if not report.plans:
        raise NothingFits(f"{job.name} on {options['--gpus']:,} GPUs: nothing fits; mofa plan says how many would do")
    return report
