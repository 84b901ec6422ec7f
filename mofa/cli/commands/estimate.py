"""``mofa estimate``: one strategy, costed and explained, or the runs of a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mofa.cli import long_run
from mofa.cli import options as opt
from mofa.cli.jobs import estimate_requests_from_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mofa.cli.jobs import EstimateRequest
    from mofa.plan.result import Estimate, FlopsConvention, Plan
    from mofa.plan.summaries import WorkloadSummary
    from mofa.replay.time.time_replayed import ReplayedTime
    from mofa.specs.faults import FaultSpec


def estimate(
    workload: opt.RunsOrWorkload,
    cluster: opt.MaybeCluster = None,
    gpus: opt.MaybeGpus = None,
    nodes: opt.Nodes = None,
    strategy: opt.Strategy = None,
    seq_len: opt.SeqLen = None,
    global_batch: opt.GlobalBatch = None,
    tokens: opt.Tokens = None,
    framework: opt.Framework = None,
    job_of: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FRAMEWORK",
            help="WORKLOAD is a job on this framework: megatron (script or log) or torchtitan (TOML, Python config).",
        ),
    ] = None,
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
    memory_limit: opt.MemoryLimit = None,
    set_: long_run.Set = None,
    rank_order: opt.RankOrder = None,
    host_issue: opt.HostIssue = None,
    host: opt.Host = None,
    flops_convention: opt.Flops = opt.FlopsConventionChoice.causal,
    replay: opt.Replay = True,
    check: Annotated[
        bool, typer.Option("--check", help="End with status 3 where it does not fit, for scripts.")
    ] = False,
    find_layout: Annotated[
        bool, typer.Option("--find-layout", help="Search for the pipeline layout with the shortest step.")
    ] = False,
    jobs: opt.Jobs = None,
    json: opt.Json = False,
    json_file: opt.JsonFile = None,
    csv: opt.Csv = None,
    out: opt.Out = None,
    quiet: opt.Quiet = False,
) -> None:
    """Cost one strategy and say where its time and memory go, whether it fits or not.

    The record of a measured run is costed as it ran, as validate does: on its own host, with the tokens that its
    routers sent. What could be said before it ran is an estimate of its plan.
    """
    from mofa.cli.output import OutputOptions
    from mofa.cli.parse import settings_with_rank_order
    from mofa.search.workers import usable_cores

    output = OutputOptions(json=json, json_file=json_file, csv=csv, out=out, quiet=quiet)
    output.refuse_unwritable_places("estimate", [workload, cluster, faults, log, set_])
    convention: FlopsConvention = "full" if flops_convention is opt.FlopsConventionChoice.full else "causal"
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
    with estimate_requests_from_options(
        workload,
        cluster,
        gpus,
        strategy,
        seq_len,
        global_batch,
        tokens,
        framework,
        set_,
        host_issue,
        job_of,
        host,
        nodes,
        memory_limit,
    ) as asked:
        if spares is not None:
            from mofa.search.long_run.spare_nodes import without_spares

            asked = [job._replace(cluster=long_run.with_outside_spare_nodes(job.cluster, spares)) for job in asked]
            for job in asked:
                without_spares(job.cluster, long_run.parse_spares(spares)[0], "--spares")
        estimates = [
            estimate_of_request(job, convention, profile, replay, jobs or usable_cores(), find_layout) for job in asked
        ]
        if find_layout:
            asked = [job._replace(strategy=plan.strategy) for job, plan in zip(asked, estimates, strict=True)]
        output.show_estimates(estimates, lambda: [_step(job, profile) for job in asked])
        if check:
            _refuse_what_does_not_fit(estimates)


def _refuse_what_does_not_fit(estimates: Sequence[Estimate]) -> None:
    """Raise NothingFits of the first estimate that does not fit."""
    from mofa.errors import NothingFits
    from mofa.units import format_bytes

    for number, estimate in enumerate(estimates, start=1):
        memory = estimate.memory
        if not memory.fits:
            name = estimate.id or estimate.workload.name
            which = f" (run {number} of {len(estimates)})" if len(estimates) > 1 else ""
            raise NothingFits(
                f"{name}{which}: does not fit, {format_bytes(-memory.free_bytes)} over the limit of "
                f"{format_bytes(memory.limit_bytes)}; recompute more, or plan it by mofa plan"
            )


def _step(job: EstimateRequest, faults: FaultSpec | None) -> ReplayedTime:
    """The step of a job on its clocks, for the figures."""
    from mofa.replay.time.step import replay_step_time
    from mofa.search.strategy_estimator import strategy_estimator

    cluster = job.cluster
    if faults is not None:
        from mofa.search.long_run.spare_nodes import without_spares

        cluster = without_spares(cluster, faults.spares or 0, faults.name)
    return replay_step_time(strategy_estimator(job.workload, cluster, job.framework, job.strategy))


def estimate_of_request(
    job: EstimateRequest,
    convention: FlopsConvention,
    faults: FaultSpec | None,
    replay: bool,
    processes: int,
    find_layout: bool,
) -> Estimate:
    """The estimate of one strategy, with the job that it is for."""
    import mofa
    from mofa.errors import SpecError
    from mofa.plan.job_facts import JobFacts
    from mofa.plan.result import Estimate, Plan
    from mofa.plan.summaries import ClusterSummary, FrameworkSummary, WorkloadSummary

    workload, cluster, framework = job.workload, job.cluster, job.framework
    if find_layout:
        if faults is not None:
            raise SpecError("--find-layout: searches by the step, not by the run with its failures; leave --faults out")
        plan = mofa.find_layout(
            workload, cluster, job.strategy, framework=framework, flops_convention=convention, replay=replay
        )
    elif faults is None:
        plan = mofa.estimate(
            workload, cluster, job.strategy, framework=framework, flops_convention=convention, replay=replay,
            jobs=processes,
        )  # fmt: skip
    else:
        plan = mofa.estimate_long_run(
            workload, cluster, job.strategy, faults, framework=framework, flops_convention=convention, replay=replay,
            jobs=processes,
        )  # fmt: skip
    summary = WorkloadSummary.from_spec(workload)
    return Estimate(
        **{name: getattr(plan, name) for name in Plan.model_fields if name != "notes"},
        notes=_notes(job, plan),
        id=job.id,
        workload=summary,
        cluster=ClusterSummary.from_spec(cluster),
        framework=FrameworkSummary.from_spec(framework),
        job=JobFacts.from_specs(workload, framework, cluster),
        defaults=_defaults(plan, summary, job.fields_set_by_user),
    )


def _notes(job: EstimateRequest, plan: Plan) -> tuple[str, ...]:
    """What the prediction rests on: of a measured run first its host and routing, no file of its counts."""
    own = f"routing: {job.workload.routing}" if job.rests_on and job.workload.routing.kind == "counts" else None
    return (*job.rests_on, *(note for note in plan.notes if note != own))


def _defaults(plan: Plan, workload: WorkloadSummary, named: frozenset[str]) -> dict[str, str]:
    """What was taken where the user wrote nothing, in words."""
    from mofa.report.phrases import strategy_text

    words = strategy_text(plan.strategy, moe=workload.num_active_params < workload.num_params).split()
    return {
        "strategy": " ".join(word for word in words if word.split("=")[0] not in named),
        "framework": plan.strategy.framework,
        "gemm_format": workload.gemm_format,
        "routing": workload.routing,
        "flops_convention": plan.flops_convention,
    }
