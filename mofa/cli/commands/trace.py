"""``mofa trace``: one strategy's step as a timeline that Perfetto opens."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mofa.cli import options as opt
from mofa.cli.jobs import estimate_requests_from_options

if TYPE_CHECKING:
    from mofa.cli.jobs import EstimateRequest

MAX_RANKS, MAX_MICRO_BATCHES = 8, 2
STRETCHES = 2000


def trace(
    workload: opt.RunsOrWorkload,
    out: Annotated[Path, typer.Option("--out", help="The trace, a JSON file; ui.perfetto.dev opens it.")],
    cluster: opt.MaybeCluster = None,
    gpus: opt.MaybeGpus = None,
    nodes: opt.Nodes = None,
    strategy: opt.Strategy = None,
    run: Annotated[str | None, typer.Option("--run", help="Which run of a file of several.")] = None,
    ranks: Annotated[
        str | None,
        typer.Option("--ranks", help=f"Pipeline ranks shown, such as 0,1,15; else up to {MAX_RANKS}, evenly spread."),
    ] = None,
    micro_batches: Annotated[
        int, typer.Option("--micro-batches", min=0, help="Of so many micro-batches every op is shown.")
    ] = MAX_MICRO_BATCHES,
    jitter: Annotated[
        float,
        typer.Option("--jitter", min=0.0, max=1.0, help="Standard deviation of the logarithm of computations' times."),
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the jitter.")] = 0,
    seq_len: opt.SeqLen = None,
    global_batch: opt.GlobalBatch = None,
    tokens: opt.Tokens = None,
    framework: opt.Framework = None,
    set_: opt.Set = None,
    host_issue: opt.HostIssue = None,
    host: opt.Host = None,
    quiet: opt.Quiet = False,
) -> None:
    """Play one strategy's step and write it as a trace: ranks, streams, hand-overs and memory over time.

    The record of a measured run is played as it ran: on its own host, with the tokens that its routers sent.
    """
    from mofa.specs.write_files import check_result_places, write_file_atomically

    check_result_places({"--out": out}, {}, [workload, cluster, set_])
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
        host=host,
        nodes=nodes,
    ) as jobs:
        num, text, note = _played(_single_job(jobs, run, workload), ranks, micro_batches, jitter, seed)
    write_file_atomically(out, text.encode())
    if not quiet:
        print(f"wrote {out}: {num:,} events, {len(text) / 1e6:.1f} MB; {note}", file=sys.stderr)


def _played(
    job: EstimateRequest, ranks: str | None, micro_batches: int, jitter: float, seed: int
) -> tuple[int, str, str]:
    """A job's step as a trace: how many events it has, its text, and what it shows."""
    import json

    from mofa.replay.memory_curve import memory_curve
    from mofa.replay.rank.from_estimator import gathered_row_of_strategy
    from mofa.replay.replayer import Replayer, mean_step_of_run
    from mofa.replay.time.perfetto import evenly_spread_indices, trace_events
    from mofa.replay.time.step import replay_time
    from mofa.search.strategy_estimator import strategy_estimator

    estimator = strategy_estimator(job.workload, job.cluster, job.framework, job.strategy)
    pp = int(estimator.table.pp[0])
    shown = _ranks(ranks, pp) if ranks is not None else evenly_spread_indices(pp, MAX_RANKS)
    of_step = gathered_row_of_strategy(estimator).num_micro_batches[0]
    watched = frozenset((r, i) for r in shown for i in range(min(micro_batches, int(of_step))))
    played = replay_time(estimator, watched=watched, jitter=jitter, seed=seed)
    replayer = Replayer(estimator)

    def counter(rank: int) -> list[tuple[float, int, int]]:
        curve = memory_curve(replayer.rank_memory(rank).journal, played.spans[rank], STRETCHES)
        allocated = curve.alive.sum(axis=1)
        return [(float(t), int(a), int(r)) for t, a, r in zip(curve.time_s, allocated, curve.reserved, strict=True)]

    events = trace_events(played, shown, counter)
    num = max(span.micro_batch for rank in played.spans for span in rank) + 1
    step_s = mean_step_of_run(estimator, played).step_s if jitter == 0 else played.step_s
    mean = f" ({step_s:.6g} s on average over steps that load kernels or run again)"
    note = "; ".join((
        f"{len(shown)} of {pp} pipeline ranks",
        f"every computation of {num} micro-batches, every op of the first {min(micro_batches, num)}",
        f"step {played.step_s:.6g} s" + (mean if step_s != played.step_s else ""),
        *job.rests_on,
    ))  # fmt: skip
    text = json.dumps(
        {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"shown": note, "step_s": step_s}},
        separators=(",", ":"), allow_nan=False,
    )  # fmt: skip
    return len(events), text, note


def _single_job(jobs: list[EstimateRequest], run: str | None, file: str) -> EstimateRequest:
    from mofa.errors import SpecError

    names = ", ".join(str(job.id) for job in jobs)
    if run is not None:
        jobs = [job for job in jobs if job.id == run]
        if not jobs and names == "None":  # one job, that options said
            raise SpecError(f"--run: names a run of a file, and {file} is a workload; leave it out")
        if not jobs:
            raise SpecError(f"--run: {file} has no run {run}; its runs are {names}")
    if len(jobs) > 1:
        raise SpecError(f"{file}: has {len(jobs)} runs; name one with --run: {names}")
    return jobs[0]


def _ranks(text: str, pp: int) -> list[int]:
    from mofa.errors import SpecError

    try:
        ranks = sorted({int(word) for word in text.replace(" ", "").split(",")})
    except ValueError:
        raise SpecError(f"--ranks: {text!r} is no list of numbers; write it as 0,1,15") from None
    if ranks[0] < 0 or ranks[-1] >= pp:
        raise SpecError(f"--ranks: {text} is outside 0 to {pp - 1}, the pipeline ranks of the strategy")
    return ranks
