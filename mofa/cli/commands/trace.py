"""``mofa trace``: one strategy's step as a timeline that Perfetto opens, or as graphs that simulators read."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from mofa.cli import options as opt
from mofa.cli.jobs import estimate_requests_from_options

if TYPE_CHECKING:
    from mofa.cli.jobs import EstimateRequest
    from mofa.cost.estimate import TableEstimator
    from mofa.replay.time.time_replayed import ReplayedTime

MAX_RANKS, MAX_MICRO_BATCHES = 8, 2
STRETCHES = 2000


class TraceFormat(StrEnum):
    """What reads a trace."""

    perfetto = "perfetto"
    chakra = "chakra"


class _Played(NamedTuple):
    """A step that was played, and what of it is shown."""

    estimator: TableEstimator
    step: ReplayedTime
    step_s: float
    """On average over steps that load kernels or run again. [s]"""
    shown: list[int]
    note: str


def trace(
    workload: opt.RunsOrWorkload,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            help="The trace, a JSON file; ui.perfetto.dev opens it. Of chakra what the files begin with: OUT.RANK.et.",
        ),
    ],
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
        int | None,
        typer.Option(
            "--micro-batches",
            min=0,
            help=f"Of so many micro-batches every op is shown; else of {MAX_MICRO_BATCHES}, in chakra of all.",
        ),
    ] = None,
    format_: Annotated[
        TraceFormat,
        typer.Option("--format", help="perfetto: a timeline; chakra: MLCommons' execution traces, a file a rank."),
    ] = TraceFormat.perfetto,
    jitter: Annotated[
        float,
        typer.Option("--jitter", min=0.0, max=1.0, help="Standard deviation of the logarithm of computations' times."),
    ] = 0.0,
    draw_stragglers: Annotated[
        bool,
        typer.Option(
            "--draw-stragglers",
            help="Draw the pace of every GPU by --seed, and play the pipeline for which all others wait; else all GPUs "
            "are as slow as the slowest is expected to be.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the jitter, and of drawn stragglers.")] = 0,
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

    In chakra what each op computes or sends, how long, and what it waits for; it needs pip install 'mofa[chakra]'.
    The record of a measured run is played as it ran: on its own host, with the tokens that its routers sent.
    """
    from mofa.errors import SpecError
    from mofa.specs.write_files import check_result_places, write_all_or_none

    is_chakra = format_ is TraceFormat.chakra
    if is_chakra:
        from mofa.export.chakra import refuse_without_chakra

        refuse_without_chakra()
        if jitter:
            raise SpecError("--jitter: moves computations off the ops that follow from them; leave it out with chakra")
    check_result_places({"--out": out}, {}, [workload, cluster, set_])
    wanted = micro_batches if micro_batches is not None or is_chakra else MAX_MICRO_BATCHES
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
        played = _played(
            _single_job(jobs, run, workload), ranks, wanted, jitter, seed if draw_stragglers else None, seed
        )
    num, files = _chakra_files(played, out) if is_chakra else _perfetto_file(played, out)
    write_all_or_none(files)
    if not quiet:
        size = sum(map(len, files.values())) / 1e6
        names, what = ", ".join(map(str, files)), "nodes" if is_chakra else "events"
        print(f"wrote {names}: {num:,} {what}, {size:.1f} MB; {played.note}", file=sys.stderr)


def _played(
    job: EstimateRequest, ranks: str | None, micro_batches: int | None, jitter: float, drawn: int | None, seed: int
) -> _Played:
    """A job's step, with every op of the first micro-batches, or of all; ``drawn`` is the seed of its stragglers."""
    from mofa.replay.rank.from_estimator import gathered_row_of_strategy
    from mofa.replay.replayer import mean_step_of_run
    from mofa.replay.time.drawn_stragglers import estimators_at_drawn_paces, expected_step_of_draws_s
    from mofa.replay.time.perfetto import evenly_spread_indices
    from mofa.replay.time.step import replay_step_time
    from mofa.search.strategy_estimator import strategy_estimator

    estimator = strategy_estimator(job.workload, job.cluster, job.framework, job.strategy)
    pp = int(estimator.table.pp[0])
    shown = _ranks(ranks, pp) if ranks is not None else evenly_spread_indices(pp, MAX_RANKS)
    of_step = int(gathered_row_of_strategy(estimator).num_micro_batches[0])
    detailed = of_step if micro_batches is None else min(micro_batches, of_step)
    watched = frozenset((r, i) for r in shown for i in range(detailed))
    paced = () if drawn is None else estimators_at_drawn_paces(estimator, drawn)
    step = replay_step_time(estimator, watched=watched, jitter=jitter, seed=seed, paced=paced)
    num = max(span.micro_batch for rank in step.spans for span in rank) + 1
    step_s = mean_step_of_run(estimator, step).step_s if jitter == 0 and drawn is None else step.step_s
    mean = f" ({step_s:.6g} s on average over steps that load kernels or run again)"
    draws: tuple[str, ...] = ()
    if drawn is not None:
        at_slowest = replay_step_time(estimator, detail=False, spans=False)
        expected_s = expected_step_of_draws_s(estimator, at_slowest)
        mean_of_draws = "" if expected_s is None else f"{expected_s:.6g} s in the mean of draws, "
        by_default = f"{at_slowest.step_s:.6g} s with all stages at the expected pace of the slowest"
        draws = (f"stragglers drawn by seed {drawn}: {mean_of_draws}{by_default}",)
    note = "; ".join((
        f"{len(shown)} of {pp} pipeline ranks",
        f"every computation of {num} micro-batches, every op of the first {min(detailed, num)}",
        f"step {step.step_s:.6g} s" + (mean if step_s != step.step_s else ""),
        *draws, *job.rests_on,
    ))  # fmt: skip
    return _Played(estimator, step, step_s, shown, note)


def _perfetto_file(played: _Played, out: Path) -> tuple[int, Mapping[Path, bytes]]:
    """How many events there are, and the file of them."""
    import json

    from mofa.replay.memory_curve import memory_over_last_step
    from mofa.replay.replayer import Replayer
    from mofa.replay.time.perfetto import trace_events

    replayer = Replayer(played.estimator)

    def counter(rank: int) -> list[tuple[float, int, int]]:
        curve = memory_over_last_step(replayer.rank_memory(rank).journal, played.step.spans[rank], STRETCHES)
        allocated = curve.alive.sum(axis=1)
        return [(float(t), int(a), int(r)) for t, a, r in zip(curve.time_s, allocated, curve.reserved, strict=True)]

    events = trace_events(played.step, played.shown, counter)
    text = json.dumps(
        {
            "traceEvents": events, "displayTimeUnit": "ms",
            "otherData": {"shown": played.note, "step_s": played.step_s},
        },
        separators=(",", ":"), allow_nan=False,
    )  # fmt: skip
    return len(events), {out: text.encode()}


def _chakra_files(played: _Played, out: Path) -> tuple[int, Mapping[Path, bytes]]:
    """How many nodes there are, and a file for each rank."""
    from mofa.cost.step_time.step import hand_over_bytes
    from mofa.export.chakra import Value, chakra_trace
    from mofa.replay.rank.from_estimator import gathered_row_of_strategy
    from mofa.replay.time.trace_graph import rank_graph

    rows = gathered_row_of_strategy(played.estimator)
    stages, sizes = rows.stage_layers.stages, {name: int(group.size[0]) for name, group in rows.groups.items()}
    graphs = {rank: rank_graph(played.step, rank, stages.rank_of_each_chunk) for rank in played.shown}
    begin_s = min(node.start_s for graph in graphs.values() for node in graph)
    files = {}
    for rank, graph in graphs.items():
        facts: dict[str, Value] = {
            "made_by": "mofa", "shown": played.note, "step_s": played.step.step_s, "pipeline_rank": rank,
        }  # fmt: skip
        files[out.with_name(f"{out.name}.{rank}.et")] = chakra_trace(
            graph, rank, sizes, float(hand_over_bytes(rows)[0]), begin_s=begin_s, facts=facts
        )
    return sum(map(len, graphs.values())), files


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
