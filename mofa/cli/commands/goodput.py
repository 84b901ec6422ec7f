"""``mofa goodput``: what failures leave of a job's time, as a calculator or against scale."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mofa.cli import long_run
from mofa.cli import options as opt

if TYPE_CHECKING:
    from mofa.cli.goodput_output import GoodputOutputOptions
    from mofa.faults.failures.events import LogStatistics
    from mofa.plan.goodput_by_scale import GoodputReport
    from mofa.specs.faults import FaultSpec

MOST_GPUS = 1_048_576
ARGUMENTS = {"interval_s": "--checkpoint-interval", "days": "--days", "shape": "--shape", "shares": "--shares",
             "checkpoint_s": "--checkpoint"}  # fmt: skip
"""Options by the arguments of the calculator that they are."""


def goodput(
    workload: Annotated[str | None, typer.Argument(help="As in plan; absent: the plain calculator.")] = None,
    cluster: Annotated[str | None, typer.Argument(help="A bundled node type or a node YAML.")] = None,
    gpus: Annotated[
        str | None,
        typer.Option("--gpus", metavar="N|N..M|N,M", help="GPUs, doubling from N to M, or as listed; 1K is 1024."),
    ] = None,
    mtbf: Annotated[str | None, typer.Option("--mtbf", help="Mean time between failures of the job, as 6h.")] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", metavar="TIME[,..]", help="How long a checkpoint blocks, as 5min; of each level."),
    ] = None,
    persist: Annotated[
        str | None, typer.Option("--persist", metavar="TIME", help="From then until it can be restored; 0s by default.")
    ] = None,
    restart: Annotated[
        str | None,
        typer.Option("--restart", metavar="TIME[,..]", help="From a failure to computing again, as 10min; of each."),
    ] = None,
    shares: Annotated[
        str | None,
        typer.Option("--shares", metavar="P,P[,..]", help="Of failures that each level is the lowest to survive."),
    ] = None,
    checkpoint_interval: long_run.CheckpointInterval = None,
    log: long_run.Log = None,
    nodes: Annotated[
        int | None, typer.Option("--log-nodes", "--nodes", min=1, help="Nodes that the log is of.")
    ] = None,
    log_days: long_run.LogDays = None,
    shape: Annotated[
        float | None, typer.Option("--shape", help="Weibull shape of the time between failures; 1, exponential.")
    ] = None,
    days: Annotated[float | None, typer.Option("--days", help="Productive days of the simulated runs; 54.")] = None,
    runs: Annotated[int | None, typer.Option("--runs", min=2, max=1_000_000, help="Simulated runs; 10,000.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Of the simulation; 0.")] = None,
    faults: long_run.Faults = None,
    storage: long_run.Storage = None,
    spares: long_run.Spares = None,
    checkpoint_mode: long_run.CheckpointMode = None,
    recovery: long_run.Recovery = None,
    strategy: Annotated[
        str | None, typer.Option("--strategy", help="The plan at the fewest GPUs; else the best.")
    ] = None,
    weak: Annotated[bool, typer.Option("--weak", help="The global batch grows with the GPUs.")] = False,
    replan: Annotated[bool, typer.Option("--replan", help="A plan of its own at every scale.")] = False,
    seq_len: opt.SeqLen = None,
    global_batch: opt.GlobalBatch = None,
    framework: opt.Framework = None,
    set_: long_run.Set = None,
    json: opt.Json = False,
    json_file: opt.JsonFile = None,
    csv: opt.Csv = None,
    out: opt.Out = None,
    quiet: opt.Quiet = False,
) -> None:
    """Say what failures leave of a job's time: intervals and ETTR of three times, or of a workload against scale."""
    from mofa.cli.goodput_output import GoodputOutputOptions
    from mofa.errors import SpecError

    show = GoodputOutputOptions(json=json, json_file=json_file, csv=csv, out=out, quiet=quiet)
    show.refuse_unwritable_places("goodput", [workload, cluster, faults, log, set_])
    own = {"--mtbf": mtbf, "--checkpoint": checkpoint, "--restart": restart, "--persist": persist, "--days": days,
           "--shares": shares, "--shape": shape, "--runs": runs, "--seed": seed}  # fmt: skip
    scaling = {"--strategy": strategy, "--storage": storage, "--spares": spares, "--checkpoint-mode": checkpoint_mode,
               "--recovery": recovery, "--weak": weak or None, "--replan": replan or None, "--seq-len": seq_len,
               "--framework": framework, "--global-batch": global_batch, "--set": set_ or None, "--csv": csv,
               "--out": out}  # fmt: skip
    if workload is None:
        if given := [name for name, value in scaling.items() if value is not None]:
            raise SpecError(f"{given[0]}: belongs to a workload and a cluster, which are missing; name them first")
        if log is None and (nodes is not None or log_days is not None):
            option = "--log-nodes" if nodes is not None else "--log-days"
            raise SpecError(f"{option}: belongs to --log, which is missing")
        rate = None if log is None else _record(log, nodes, log_days)
        others = (
            mtbf,
            checkpoint,
            restart,
            persist,
            shares,
            gpus,
            faults,
            checkpoint_interval,
            days,
            runs,
            seed,
            shape,
        )
        if rate is not None and all(value is None for value in others):
            show.show_failure_rate(rate)
            return
        profile = None if faults is None else long_run.LongRunOptions(faults).fault_profile()
        runs, seed = 10_000 if runs is None else runs, seed or 0
        days = 54.0 if days is None else days
        job_s = _job_mtbf_s(mtbf, rate, profile, gpus)
        if shares is not None or "," in f"{checkpoint}{restart}":
            if given := [name for name, value in (("--persist", persist), ("--shape", shape)) if value is not None]:
                raise SpecError(f"{given[0]}: belongs to one level of checkpoints; leave it or the levels out")
            _levels(show, job_s, checkpoint, restart, shares, checkpoint_interval, rate, days, runs, seed)
            return
        _calculator(
            show, job_s, checkpoint, persist or "0s", restart, checkpoint_interval, rate, days, runs, seed,
            1.0 if shape is None else shape,
        )  # fmt: skip
        return
    if given := [name for name, value in own.items() if value is not None]:
        raise SpecError(f"{given[0]}: belongs to the calculator without a workload; leave one of the two out")
    if cluster is None or gpus is None:
        raise SpecError("goodput: a workload needs a cluster and --gpus, such as h100-hgx --gpus 1K..16K")
    if replan and strategy is not None:
        raise SpecError("--strategy: is the plan that is replicated; leave it or --replan out")
    if long_run.parse_spares(spares)[1]:
        raise SpecError("--spares outside: belongs to plan and estimate; here spares are nodes of --gpus, leave it out")
    set_, changes = long_run.split_fault_settings(set_)
    profile = long_run.LongRunOptions(
        faults, storage, None, spares, checkpoint_mode, checkpoint_interval, log, nodes, log_days, recovery, changes
    ).fault_profile()
    if profile is None or profile.reliability is None:
        raise SpecError("--faults: is missing; name a fault profile, such as llama3 (mofa show faults lists them)")
    numbers = parse_gpu_counts(gpus)
    if "," in gpus and not quiet:
        print(f"mofa: --gpus {gpus} is read as {len(numbers)} scales: {_listed(numbers)} GPUs", file=sys.stderr)
    show.show_goodput_by_scale(
        _by_scale(
            workload, cluster, numbers, profile, seq_len, global_batch, framework, set_, strategy, weak, replan, quiet
        )
    )


def _by_scale(
    workload: str, cluster: str, numbers: list[int], profile: FaultSpec, seq_len: int | None, global_batch: str | None,
    framework: str | None, set_: list[str] | None, strategy: str | None, weak: bool, replan: bool, quiet: bool,
) -> GoodputReport:  # fmt: skip
    from mofa.cli.jobs import read_cluster, read_framework, read_workload
    from mofa.cli.parse import parse_overrides
    from mofa.cli.progress import progress_bar
    from mofa.search.long_run.goodput_by_scale import goodput_by_scale
    from mofa.search.long_run.spare_nodes import without_spares

    overrides = parse_overrides(set_)
    job = read_workload(workload, overrides, seq_len=seq_len, global_batch=global_batch)
    machines, facts = read_cluster(cluster, numbers[0], overrides), read_framework(framework, job, overrides)
    without_spares(machines, profile.spares or 0, "--spares")
    wanted: object | None = None
    if strategy is not None or overrides["strategy"]:
        from mofa.specs.overrides import parse_strategy

        wanted = {**(parse_strategy(strategy) if strategy else {}), **overrides["strategy"]}
    with progress_bar(f"{job.name} at {len(numbers)} scales", enabled=not quiet) as progress:
        return goodput_by_scale(
            job, machines, profile, numbers, facts, strategy=wanted, weak=weak, replan=replan, progress=progress
        )


def _job_mtbf_s(mtbf: str | None, rate: LogStatistics | None, profile: FaultSpec | None, gpus: str | None) -> float:
    """Mean time between failures of the job, from whichever of the three it was given by. [s]"""
    from mofa.errors import SpecError

    sources = [name for name, value in (("--mtbf", mtbf), ("--log", rate), ("--faults", profile)) if value is not None]
    if len(sources) != 1:
        got = f"{' and '.join(sources)} are given" if sources else "none is"
        raise SpecError(f"goodput: give one of --mtbf, --log and --faults for how often a job fails; {got}")
    if mtbf is not None and gpus is not None:
        raise SpecError("--gpus: --mtbf is the whole job's already; leave --gpus out")
    return long_run.parse_duration_s("--mtbf", mtbf) if mtbf is not None else _mtbf_s(rate, profile, gpus)


def _calculator(
    show: GoodputOutputOptions, mtbf_s: float, checkpoint: str | None, persist: str, restart: str | None,
    interval: str | None, rate: LogStatistics | None, days: float, runs: int, seed: int, shape: float,
) -> None:  # fmt: skip
    from mofa.faults.calculator import calculate_goodput

    times = [long_run.parse_duration_s(option, text, zero=True) for option, text in
             (*_both(checkpoint, restart), ("--persist", persist))]  # fmt: skip
    at_s = None if interval is None else long_run.parse_duration_s("--checkpoint-interval", interval)
    with _arguments():
        calculation = calculate_goodput(
            mtbf_s, times[0], times[1], persist_s=times[2], interval_s=at_s, days=days, num_runs=runs, seed=seed,
            shape=shape,
        )  # fmt: skip
    show.show_calculation(calculation, rate)


def _levels(
    show: GoodputOutputOptions, mtbf_s: float, checkpoint: str | None, restart: str | None, shares: str | None,
    interval: str | None, rate: LogStatistics | None, days: float, runs: int, seed: int,
) -> None:  # fmt: skip
    from mofa.errors import SpecError
    from mofa.faults.level_calculator import calculate_checkpoint_levels

    times = [
        [long_run.parse_duration_s(option, part.strip(), zero=True) for part in text.split(",")]
        for option, text in _both(checkpoint, restart)
    ]
    if shares is None:
        raise SpecError("--shares: is missing; give each level's share of the failures, such as --shares 0.75,0.25")
    try:
        parts = [float(part) for part in shares.split(",")]
    except ValueError:
        raise SpecError(f"--shares: {shares[:40]!r} are no numbers; write them as 0.75,0.25") from None
    at_s = None if interval is None else long_run.parse_duration_s("--checkpoint-interval", interval)
    with _arguments():
        calculation = calculate_checkpoint_levels(
            mtbf_s, times[0], times[1], parts, interval_s=at_s, days=days, num_runs=runs, seed=seed
        )
    show.show_checkpoint_levels(calculation, rate)


def _both(checkpoint: str | None, restart: str | None) -> tuple[tuple[str, str], tuple[str, str]]:
    """The two times that a calculation needs, by their options."""
    from mofa.errors import SpecError

    for name, value in (("--checkpoint", checkpoint), ("--restart", restart)):
        if value is None:
            raise SpecError(f"{name}: is missing; give a time, such as {name} 5min")
    return ("--checkpoint", checkpoint or ""), ("--restart", restart or "")


@contextmanager
def _arguments() -> Iterator[None]:
    """What is wrong with an argument, said of its option."""
    from mofa.errors import SpecError

    try:
        yield
    except SpecError as error:
        where, colon, what = str(error).partition(":")
        raise SpecError(f"{ARGUMENTS.get(where, where)}{colon}{what}") from None


def _mtbf_s(rate: LogStatistics | None, profile: FaultSpec | None, gpus: str | None) -> float:
    """Of a job of so many GPUs, out of a log's rate or a profile's."""
    from mofa.errors import SpecError
    from mofa.faults.failures.rates import job_mtbf_s
    from mofa.faults.outlook import failures_per_node_day

    if gpus is None:
        raise SpecError("--gpus: is missing; say how many GPUs the job has, 8 a node")
    number, *others = parse_gpu_counts(gpus)
    if others:
        raise SpecError(f"--gpus: {gpus[:40]} are several scales, and the calculator is of one job; give one number")
    if rate is not None:
        per_node = rate.rate_per_node_day
    elif profile is not None and profile.reliability is not None:
        per_node = failures_per_node_day(profile.reliability, 8)
    else:
        raise SpecError("--faults: the profile has no reliability; add the section, or give --mtbf")
    if per_node <= 0:
        raise SpecError("goodput: nothing fails at this rate, so no checkpoint is needed; give a rate above 0")
    return float(job_mtbf_s(per_node, max(number / 8, 1.0)))


def _record(log: Path, nodes: int | None, days: float | None) -> LogStatistics:
    from mofa.errors import SpecError
    from mofa.faults.failures.events import read_failure_log

    if nodes is None:
        raise SpecError("--log-nodes: is missing; say how many nodes the log is of, those that never failed included")
    long_run.check_log_watch(nodes, days)
    return read_failure_log(log).statistics(nodes, days)


def parse_gpu_counts(text: str) -> list[int]:
    """Numbers of GPUs, doubling, or each by itself where every further one is the first times a power of two.

    A comma stands between two numbers, as in every option that takes several, and never between digits of one.

    Raises
    ------
    SpecError
        If they are none, or fall.

    Examples
    --------
    >>> parse_gpu_counts("1K..4K"), parse_gpu_counts("512"), parse_gpu_counts("1_024")
    ([1024, 2048, 4096], [512], [1024])
    >>> parse_gpu_counts("256,512"), parse_gpu_counts("64,256,1K"), parse_gpu_counts("1,512")
    ([256, 512], [64, 256, 1024], [1, 512])
    """
    from mofa.errors import SpecError

    parts = [part.strip() for part in text.split(",")]
    if len(parts) > 1:
        if ".." in text:
            raise SpecError(f"--gpus: {text[:40]} has commas and '..'; write numbers with commas, or one range")
        alone = "".join(parts)[:20]
        is_number = re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+", text.strip()) is not None
        instead = f"; a comma stands between two scales, and one of {alone} is written {alone}" if is_number else ""
        if leading := next((part for part in parts if part.startswith("0") and part.strip("0")), None):
            raise SpecError(f"--gpus: {leading[:20]} in {text[:40]} begins with 0{instead}")
        numbers = [parse_gpu_count(part) for part in parts]
        if numbers != sorted(set(numbers)):
            raise SpecError(f"--gpus: {text[:40]} does not rise; write smaller numbers first{instead}")
        times = [number / numbers[0] for number in numbers]
        if other := next((n for n, t in zip(numbers, times, strict=True) if not _is_power_of_two(t)), None):
            raise SpecError(f"--gpus: {other:,} is not {numbers[0]:,} times a power of two{instead}")
        return numbers
    first, dots, last = text.partition("..")
    low = parse_gpu_count(first)
    high = parse_gpu_count(last) if dots else low
    if high < low:
        raise SpecError(f"--gpus: {text} falls; write the smaller number first")
    out = [low]
    while out[-1] * 2 <= high:
        out.append(out[-1] * 2)
    if out[-1] != high:
        raise SpecError(f"--gpus: {high:,} is not {low:,} times a power of two; {out[-1]:,} and {out[-1] * 2:,} are")
    return out


def _listed(numbers: list[int]) -> str:
    """Numbers as a sentence has them.

    >>> _listed([1, 512]), _listed([64, 256, 1024])
    ('1 and 512', '64, 256 and 1024')
    """
    return " and ".join([", ".join(map(str, numbers[:-1])), str(numbers[-1])])


def _is_power_of_two(number: float) -> bool:
    return number.is_integer() and int(number) & (int(number) - 1) == 0


def parse_gpu_count(text: str) -> int:
    """A number of GPUs; 1K is 1024."""
    from mofa.cli.numbers import parse_count
    from mofa.errors import SpecError

    try:
        number = parse_count(text, "512 or 1K..16K")
    except ValueError:
        number = 0
    if not 1 <= number <= MOST_GPUS:
        raise SpecError(f"--gpus: {text[:20]!r} is no number of GPUs from 1 to 1024K; write it as 512 or 1K..16K")
    return number
