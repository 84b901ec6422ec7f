"""``mofa report``: the best plan of a workload as a page that people forward."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mofa.cli import long_run
from mofa.cli import options as opt
from mofa.cli.searched_plans import REFINE_SECONDS, search_plans

if TYPE_CHECKING:
    from mofa.cli.jobs import EstimateRequest, Overrides


def report(
    workload: Annotated[
        str, typer.Argument(metavar="WORKLOAD|JOB", help="A workload as in plan, or with --from a job of a framework.")
    ],
    cluster: opt.Cluster,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where to write report.html, report.md, figures and tables.")
    ],
    gpus: opt.MaybeGpus = None,
    nodes: opt.Nodes = None,
    job_of: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FRAMEWORK",
            help="WORKLOAD is your own job on this framework: megatron or torchtitan. The page leads with it.",
        ),
    ] = None,
    seq_len: opt.SeqLen = None,
    global_batch: opt.GlobalBatch = None,
    tokens: opt.Tokens = None,
    framework: opt.Framework = None,
    top: Annotated[int, typer.Option("--top", min=1, max=20, help="How many plans to show.")] = 10,
    fix: opt.Fix = None,
    maximum: opt.Maximum = None,
    with_: opt.With = None,
    without: opt.Without = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="FRAMEWORK", help="Write its launch command for: as of mofa export; else the plan's own."
        ),
    ] = None,
    memory_limit: opt.MemoryLimit = None,
    set_: long_run.Set = None,
    rank_order: opt.RankOrder = None,
    host_issue: opt.HostIssue = None,
    host: opt.Host = None,
    refine_seconds: Annotated[
        float,
        typer.Option(
            "--refine-seconds",
            min=0.0,
            max=opt.MOST_SEARCH_S,
            help="About how long the layouts of the best plans are searched.",
        ),
    ] = REFINE_SECONDS,
    jobs: opt.Jobs = None,
    json: opt.Json = False,
    json_file: opt.JsonFile = None,
    csv: opt.Csv = None,
    quiet: opt.Quiet = False,
) -> None:
    """Write the best plan as one HTML page to forward, with Markdown, figures and tables beside it.

    The page says what to run, why it wins, what limits it, and how sure that is; it loads nothing. Long runs with
    failures are in the page of mofa plan --faults NAME --out DIR.
    """
    from mofa.cli.output import OutputOptions
    from mofa.cli.parse import parse_degree_limits, parse_fixed, parse_overrides, settings_with_rank_order, split_words
    from mofa.cli.progress import progress_bar
    from mofa.cli.report_page import given_settings, report_facts_of_search
    from mofa.cli.searched_plans import best_plan_printer, enough_gpus_text
    from mofa.errors import NothingFits
    from mofa.search.workers import usable_cores

    output = OutputOptions(json=json, json_file=json_file, csv=csv, out=out, quiet=True)
    output.refuse_unwritable_places("report", [workload, cluster, set_])
    settings = settings_with_rank_order(set_, rank_order)
    overrides = parse_overrides(settings)
    fixed, bounds = parse_fixed(fix, {} if job_of else overrides["strategy"]), parse_degree_limits(maximum)
    _check_target(to)
    given = {"seq_len": seq_len, "global_batch": global_batch, "tokens": tokens, "framework": framework}
    request, own = _job(
        workload, cluster, gpus, nodes, job_of, given, settings, overrides, host_issue, host, memory_limit,
        jobs or usable_cores(),
    )  # fmt: skip
    name = f"{request.workload.name} on {request.cluster.num_gpus:,} GPUs"
    with progress_bar(name, enabled=not quiet) as progress:
        options: dict[str, Any] = {
            "framework": request.framework, "top": top, "fix": fixed, "maximum": bounds, "with_": split_words(with_),
            "without": split_words(without), "progress": progress, "jobs": jobs or usable_cores(),
            "replay_progress": lambda done, of: progress(done, of, "playing the best plans out"),
            "on_progress": best_plan_printer(progress),
        }  # fmt: skip
        search = search_plans(request.workload, request.cluster, options, refine_seconds, progress)
    if not search.report.plans:
        raise NothingFits(f"{name}: nothing fits; {enough_gpus_text(search.report)}")
    output.show_report(
        search.report, search.costed_table,
        lambda table: report_facts_of_search(
            search, table, own=own, own_name=Path(workload).name, target=to, jobs=jobs or usable_cores(),
            given=given_settings({"framework": framework, "job_of": job_of}, settings or [], split_words(with_)),
        ),
    )  # fmt: skip
    if not quiet:
        print(f"wrote {out / 'report.html'}, for any browser, with report.md and figures", file=sys.stderr)


def _check_target(to: str | None) -> None:
    """Refuse a framework that no jobs are written for, before the search."""
    from mofa.errors import SpecError
    from mofa.export.entry import job_file_makers
    from mofa.specs.files import did_you_mean

    if to is not None and to not in job_file_makers():
        raise SpecError(f"--to {to}: is no framework that jobs are written for; {did_you_mean(to, job_file_makers())}")


def _job(
    workload: str, cluster: str, gpus: int | None, nodes: int | None, job_of: str | None, given: dict[str, Any],
    settings: list[str] | None, overrides: Overrides, host_issue: str | None, host: str | None,
    memory_limit: str | None, processes: int,
) -> tuple[EstimateRequest, Any]:  # fmt: skip
    """What is planned, and of a job of the user's own its estimate."""
    from mofa.cli.commands.estimate import estimate_of_request
    from mofa.cli.jobs import (
        EstimateRequest,
        estimate_requests_from_options,
        read_cluster,
        read_framework,
        read_workload,
    )
    from mofa.cli.numbers import count_gpus
    from mofa.cli.parse import parse_host_issue

    if job_of is not None:
        with estimate_requests_from_options(
            workload, cluster, gpus, set_=settings, host_issue=host_issue, host=host, nodes=nodes, job_of=job_of,
            memory_limit=memory_limit, **given,
        ) as asked:  # fmt: skip
            return asked[0], estimate_of_request(asked[0], "causal", None, True, processes, False)
    size = {name: value for name, value in given.items() if name != "framework"}
    job = read_workload(workload, overrides, **size)
    host_issue_s = parse_host_issue(host_issue, overrides, host)
    machines = read_cluster(cluster, count_gpus(cluster, gpus, nodes), overrides, host_issue_s, memory_limit)
    facts = read_framework(given["framework"], job, overrides)
    return EstimateRequest(None, job, machines, {}, facts, frozenset()), None
