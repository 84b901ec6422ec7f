"""``mofa plan``: the best training plans of a workload on a cluster."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mofa.cli import long_run
from mofa.cli import options as opt
from mofa.cli.plan_scales import parse_gpus_or_range, show_plans_by_gpu_count
from mofa.cli.searched_plans import REFINE_SECONDS, search_plans

MOST_PLANS = 200
"""Plans that are shown: each takes up to 0.15 s, most of it for its stages and its band. [-]"""


def _refuse_too_many_plans(top: int) -> int:
    if top > MOST_PLANS:
        raise typer.BadParameter(
            f"{top:,} plans are more than {MOST_PLANS}, and each is costed in detail; take fewer, and --out DIR for a "
            "row of every strategy that fits (feasible.csv)"
        )
    return top


def plan(
    workload: opt.Workload,
    cluster: opt.Cluster,
    gpus: Annotated[
        Any,
        typer.Option(
            "--gpus",
            metavar="N|N..M",
            parser=parse_gpus_or_range,
            help="Number of GPUs, such as 64 or 1K (1024); or all from N to M, each twice the one before.",
        ),
    ] = None,
    nodes: opt.Nodes = None,
    seq_len: opt.SeqLen = None,
    global_batch: opt.GlobalBatch = None,
    tokens: opt.Tokens = None,
    framework: opt.Framework = None,
    top: Annotated[
        int, typer.Option("--top", min=1, callback=_refuse_too_many_plans, help="How many plans to show; at most 200.")
    ] = 10,
    fix: opt.Fix = None,
    maximum: opt.Maximum = None,
    with_: opt.With = None,
    without: opt.Without = None,
    faults: long_run.Faults = None,
    storage: long_run.Storage = None,
    price: long_run.Price = None,
    spares: long_run.Spares = None,
    checkpoint_mode: long_run.CheckpointMode = None,
    recovery: long_run.Recovery = None,
    checkpoint_interval: long_run.CheckpointInterval = None,
    log: long_run.Log = None,
    log_nodes: long_run.LogNodes = None,
    log_days: long_run.LogDays = None,
    objective: long_run.Objective = long_run.ObjectiveChoice.tokens,
    memory_limit: opt.MemoryLimit = None,
    set_: long_run.Set = None,
    rank_order: opt.RankOrder = None,
    host_issue: opt.HostIssue = None,
    host: opt.Host = None,
    flops_convention: opt.Flops = opt.FlopsConventionChoice.causal,
    replay: opt.Replay = True,
    refine_seconds: Annotated[
        float,
        typer.Option(
            "--refine-seconds",
            min=0.0,
            max=opt.MOST_SEARCH_S,
            help="About how long the layouts of the best plans are searched for shorter steps; not with --faults.",
        ),
    ] = REFINE_SECONDS,
    fast: Annotated[
        bool,
        typer.Option("--fast", help="Stop at the closed forms: no plan is played out, no layout is searched. Seconds."),
    ] = False,
    jobs: opt.Jobs = None,
    json: opt.Json = False,
    json_file: opt.JsonFile = None,
    csv: opt.Csv = None,
    out: opt.Out = None,
    quiet: opt.Quiet = False,
) -> None:
    """Find the best training plans that fit.

    Exit status 3 and the smallest number of GPUs that would do where nothing fits.
    """
    import mofa
    from mofa.cli.jobs import read_cluster, read_framework, read_workload
    from mofa.cli.numbers import count_gpus
    from mofa.cli.output import OutputOptions
    from mofa.cli.parse import (
        parse_degree_limits,
        parse_fixed,
        parse_host_issue,
        parse_overrides,
        settings_with_rank_order,
        split_words,
    )
    from mofa.cli.progress import progress_bar
    from mofa.cli.report_page import given_settings, report_facts_of_search
    from mofa.cli.searched_plans import best_plan_printer, enough_gpus_text, print_why_not_launchable
    from mofa.errors import NothingFits
    from mofa.search.workers import usable_cores

    output = OutputOptions(json=json, json_file=json_file, csv=csv, out=out, quiet=quiet)
    output.refuse_unwritable_places("plan", [workload, cluster, faults, log, set_])
    set_, changes = long_run.split_fault_settings(settings_with_rank_order(set_, rank_order))
    profile = long_run.LongRunOptions(
        faults,
        storage,
        price,
        spares,
        checkpoint_mode,
        checkpoint_interval,
        log,
        log_nodes,
        log_days,
        recovery,
        changes,
    ).fault_profile()
    overrides = parse_overrides(set_)
    host_issue_s = parse_host_issue(host_issue, overrides, host)
    long_run.refuse_objective_without_failures(objective, profile)
    fixed, bounds = parse_fixed(fix, overrides["strategy"]), parse_degree_limits(maximum)
    job = read_workload(workload, overrides, seq_len=seq_len, global_batch=global_batch, tokens=tokens)
    several = tuple(gpus or ())[1:]
    sizes = (count_gpus(cluster, gpus[0] if gpus else None, nodes), *several)
    clusters = [read_cluster(cluster, number, overrides, host_issue_s, memory_limit) for number in sizes]
    facts = read_framework(framework, job, overrides)
    if spares is not None:
        clusters = [long_run.with_checked_spares(machines, spares) for machines in clusters]
    if fast:
        replay, refine_seconds = False, 0.0
    searches = []
    for number, machines in zip(sizes, clusters, strict=True):
        with progress_bar(f"{job.name} on {number:,} GPUs", enabled=not quiet) as progress:
            options: dict[str, Any] = {
                "framework": facts,
                "top": top,
                "fix": fixed,
                "maximum": bounds,
                "with_": split_words(with_),
                "without": split_words(without),
                "flops_convention": flops_convention.value,
                "progress": progress,
                "replay": replay,
                "jobs": jobs or usable_cores(),
                "replay_progress": lambda done, of, show=progress: show(done, of, "playing the best plans out"),
                "on_progress": best_plan_printer(progress),
            }
            if profile is None:
                searches.append(search_plans(job, machines, options, refine_seconds, progress))
            else:
                searches.append(mofa.find_long_runs(job, machines, profile, objective=objective.value, **options))
    given = given_settings(
        {
            "framework": framework, "faults": faults, "log": log, "spares": spares, "storage": storage,
            "checkpoint_mode": checkpoint_mode,
            "objective": None if objective is long_run.ObjectiveChoice.tokens else objective,
            "flops_convention": None if flops_convention is opt.FlopsConventionChoice.causal else flops_convention,
        },
        set_ or [], split_words(with_),
    )  # fmt: skip
    if several:
        show_plans_by_gpu_count(output, searches, jobs or usable_cores(), given)
    else:
        output.show_report(
            searches[0].report, searches[0].costed_table,
            lambda table: report_facts_of_search(searches[0], table, jobs=jobs or usable_cores(), given=given),
        )  # fmt: skip
        print_why_not_launchable(searches[0].report)
    if not any(search.report.plans for search in searches):
        words = f"{job.name} on {sizes[-1]:,} x {clusters[-1].gpu.name}"
        raise NothingFits(f"{words}: nothing fits; {enough_gpus_text(searches[-1].report)}")
