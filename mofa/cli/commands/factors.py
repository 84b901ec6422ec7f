"""``mofa factors``: what a tenth of each resource buys, what each optimisation brings, and where stages wait."""

from __future__ import annotations

from typing import Annotated

import typer

from mofa.cli import long_run
from mofa.cli import options as opt


def factors(
    workload: opt.Workload,
    cluster: opt.Cluster,
    gpus: opt.Gpus = None,
    nodes: opt.Nodes = None,
    seq_len: opt.SeqLen = None,
    global_batch: opt.GlobalBatch = None,
    tokens: opt.Tokens = None,
    framework: opt.Framework = None,
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
    replay: Annotated[
        bool, typer.Option("--replay", help="Play the best plans of every search out op by op: some minutes.")
    ] = False,
    ablation: Annotated[
        bool, typer.Option("--ablation/--no-ablation", help="Take optimisations out and add them up, or leave that.")
    ] = True,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            min=1,
            max=opt.MOST_PROCESSES,
            help="Processes that search; by default as many as cores may be used, up to 4.",
        ),
    ] = None,
    json: opt.Json = False,
    json_file: opt.JsonFile = None,
    csv: opt.Csv = None,
    out: opt.Out = None,
    quiet: opt.Quiet = False,
) -> None:
    """Say what would help a job: 10 % of each resource, each optimisation, and what its stages wait for.

    For each resource the best plan is costed on machines with a tenth less and more of it, and another is searched for
    there. Optimisations are taken out, allowed alone, and added up. Plans are in closed form, as of mofa plan --fast.
    Exit status 3 where nothing fits.
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
    from mofa.report.factors_text import print_factors, save_factors
    from mofa.report.phrases import count_and_noun
    from mofa.search.workers import usable_cores

    output = OutputOptions(json=json, json_file=json_file, csv=csv, out=out, quiet=quiet)
    output.refuse_unwritable_places("factors", [workload, cluster, faults, log, set_])
    set_, changes = long_run.split_fault_settings(settings_with_rank_order(set_, rank_order))
    profile = long_run.LongRunOptions(
        faults, storage, price, spares, checkpoint_mode, checkpoint_interval, log, log_nodes, log_days, recovery,
        changes,
    ).fault_profile()  # fmt: skip
    long_run.refuse_objective_without_failures(objective, profile)
    overrides = parse_overrides(set_)
    host_issue_s = parse_host_issue(host_issue, overrides, host)
    fixed, bounds = parse_fixed(fix, overrides["strategy"]), parse_degree_limits(maximum)
    job = read_workload(workload, overrides, seq_len=seq_len, global_batch=global_batch, tokens=tokens)
    machines = read_cluster(cluster, count_gpus(cluster, gpus, nodes), overrides, host_issue_s, memory_limit)
    if spares is not None:
        machines = long_run.with_checked_spares(machines, spares)
    with progress_bar(f"{job.name} on {count_and_noun(machines.num_gpus, 'GPU')}", enabled=not quiet) as progress:
        result = mofa.key_factors(
            job, machines, framework=read_framework(framework, job, overrides), faults=profile,
            objective=objective.value, fix=fixed, maximum=bounds, with_=split_words(with_),
            without=split_words(without), replay=replay, optimisations=ablation, jobs=jobs or usable_cores(),
            progress=progress,
        )  # fmt: skip
    output.show_result(
        result.model_dump_json(indent=2) + "\n", lambda: result.to_frame(), lambda folder: save_factors(result, folder),
        lambda console: print_factors(result, console, quiet=quiet),
    )  # fmt: skip
