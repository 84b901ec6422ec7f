"""Closed form against replay on random jobs (:mod:`random_jobs`): shares of what was drawn, the worst, false fits."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

import numpy as np
from random_jobs import RandomJob, random_job

from mofa.cost.estimate import TableEstimator
from mofa.errors import MofaError
from mofa.replay.memory.rank_memory import play_memory
from mofa.replay.memory.shared_recordings import SharedRecordings
from mofa.replay.rank.from_estimator import describer_of_rank
from mofa.replay.replayer import Replayer
from mofa.schedules import SCHEDULE_NAMES
from mofa.search.job_setup import routing_loads_by_ep
from mofa.search.to_plan.builder import closed_form_margin_bytes, memory_limit_bytes
from mofa.specs.strategy import CP_KINDS

STEP_BAR, MEMORY_BAR = 0.03, 0.02
TIMES_CAPACITY = 4.0
"""Jobs that take more than so many times the memory of their GPUs in closed form are drawn anew, and counted. [-]"""
SMALL_GPUS = 8
RANKS_AT_ENDS, RANKS_BETWEEN = 2, 4
"""Of a long pipeline those ranks are played, and the fullest in closed form."""
SHOWN = 12


@dataclass(frozen=True)
class RandomAgreement:
    """A random job, and closed form over replay - 1 of it; ``refused`` is the error of a job that is refused.

    ``filled`` is what a GPU holds in closed form over what a plan may fill of it. [-]
    """

    number: int
    words: str
    framework: str
    kinds: frozenset[str]
    too_long: int = 0
    too_large: int = 0
    step: float = np.nan
    allocated: float = np.nan
    reserved: float = np.nan
    false_fit: str = ""
    refused: str = ""
    filled: float = np.nan


def compare_random(seed: int, *, memory: bool, number: int) -> RandomAgreement:
    """Both ways for the job of a seed and a number."""
    too_large = too_long = 0
    for again in range(1000):
        drawn = random_job(seed, number, again)
        too_long += drawn.skipped
        try:
            estimator = _estimator(drawn)
            closed = estimator.breakdown(detail=True)
        except MofaError as error:
            name = drawn.job.framework.name
            return RandomAgreement(number, _words(drawn), name, _kinds(drawn), too_long, too_large, refused=str(error))
        if closed.device_bytes[0] <= TIMES_CAPACITY * drawn.job.cluster.gpu.capacity_bytes.value:
            break
        too_large += 1
    replayer = Replayer(estimator)
    step = float(closed.step_s[0]) / replayer.replayed_time_without_spans().step_s - 1
    of_job = number, _words(drawn), drawn.job.framework.name, _kinds(drawn), too_long, too_large
    if not memory:
        return RandomAgreement(*of_job, step)
    detail = closed.detail
    assert detail is not None
    expandable = drawn.job.framework.allocator == "expandable"
    recordings, make = SharedRecordings(), describer_of_rank(estimator)
    ranks = [
        play_memory(make(r), expandable=expandable, recordings=recordings)
        for r in _ranks(detail.allocated_bytes[0], detail.reserved_bytes[0])
    ]
    allocated = float(detail.allocated_bytes[0].max()) / max(rank.allocated for rank in ranks) - 1
    reserved = float(detail.reserved_bytes[0].max()) / max(rank.peak_reserved for rank in ranks) - 1
    device, limit = float(detail.device_bytes[0].max()), memory_limit_bytes(drawn.job.cluster, drawn.job.framework)
    most_reserved = float(detail.reserved_bytes[0].max())
    more_bytes = closed_form_margin_bytes(drawn.job.framework, int(drawn.row.pp[0]), most_reserved)
    false_fit = ""
    if device + more_bytes <= limit < (played := replayer.fullest_rank_device_bytes()):
        closed_text = f"{device / 2**30:.2f} GiB and {more_bytes / 2**30:.2f} in doubt in closed form"
        false_fit = f"{closed_text}, {played / 2**30:.2f} played, {limit / 2**30:.2f} offered"
    return RandomAgreement(*of_job, step, allocated, reserved, false_fit, filled=device / limit)


def _estimator(drawn: RandomJob) -> TableEstimator:
    job = drawn.job
    return TableEstimator(
        job.workload, job.cluster, job.framework, drawn.row, routing_loads_by_ep(job.workload, drawn.row)
    )


def _ranks(*closed: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[int]:
    """Pipeline ranks at the ends, and those that hold most in closed form."""
    last = len(closed[0])
    ends = {*range(min(RANKS_AT_ENDS, last)), *range(max(last - RANKS_AT_ENDS, 0), last)}
    return sorted(ends.union(*(np.argsort(-values)[:RANKS_BETWEEN].tolist() for values in closed)))


def _kinds(drawn: RandomJob) -> frozenset[str]:
    job, row = drawn.job, drawn.row
    holds = {
        "small": job.cluster.num_gpus <= SMALL_GPUS, "experts": job.workload.model.moe is not None,
        "FSDP": job.framework.data_parallel in ("fsdp", "hsdp"), "pp > 1": row.pp[0] > 1, "cp > 1": row.cp[0] > 1,
        "ep > 1": row.ep[0] > 1, "recomputed": row.recompute_modes[int(row.recompute[0])].kind != "none",
    }  # fmt: skip
    return frozenset(name for name, value in holds.items() if value)


def _words(drawn: RandomJob) -> str:
    job, t = drawn.job, drawn.row.row(0, drawn.job.framework.name)
    numbers = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp", "micro_batch", "zero")
    parts = [f"{name}={value}" for name in numbers if (value := getattr(t, name)) != 1]
    parts += [f"{name}={value}" for name, value in t.options.chosen_options.items()]
    parts += [f"cp_kind={CP_KINDS[int(drawn.row.cp_kind[0])]}"] if t.cp > 1 else []
    parts += ["sp=true"] if t.sp else []
    parts += [f"recompute={t.recompute}", f"schedule={SCHEDULE_NAMES[int(drawn.row.schedule[0])]}"]
    parts += [f"token_chunks={t.token_chunks}"] if t.token_chunks > 1 else []
    parts += [f"balancing={t.balancing}"] if t.balancing != "none" else []
    batch, framework = job.workload.batch, job.framework
    return (
        f"{job.workload.name} {job.cluster.node.name} x {job.cluster.num_gpus}, {batch.global_batch} of "
        f"{batch.seq_len}, {framework.name} {framework.data_parallel} {framework.dp_replicate}: {' '.join(parts)}"
    )


def compare_all(num: int, seed: int, jobs: int, *, memory: bool) -> list[RandomAgreement]:
    """So many jobs of a seed, in so many processes."""
    call = partial(_compared, seed, memory)
    if jobs == 1:
        return list(_shown(map(call, range(num)), num))
    with get_context("spawn").Pool(jobs) as pool:
        return list(_shown(pool.imap_unordered(call, range(num)), num))


def _compared(seed: int, memory: bool, number: int) -> RandomAgreement:
    return compare_random(seed, memory=memory, number=number)


def _shown(results: Iterable[RandomAgreement], num: int) -> Iterable[RandomAgreement]:
    began = time.perf_counter()
    for i, result in enumerate(results):
        if sys.stderr.isatty() or i % 50 == 49:
            print(f"{i + 1} of {num}, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        yield result


def report(results: Sequence[RandomAgreement], seed: int, *, memory: bool, verbose: bool) -> str:
    """Shares, distributions, the worst and the false fits, as text."""
    played = [r for r in results if not r.refused]
    too_long, too_large = sum(r.too_long for r in results), sum(r.too_large for r in results)
    anew = f"{too_long} of too long a step, {too_large} of over {TIMES_CAPACITY:g} times their GPUs' memory"
    lines = [
        f"{len(played)} random jobs of seed {seed}; drawn anew: {anew}",
        "shares: " + ", ".join(
            f"{name} {np.mean([name in r.kinds for r in played]):.0%}"
            for name in ("small", "experts", "FSDP", "pp > 1", "cp > 1", "ep > 1", "recomputed")
        ),
    ]  # fmt: skip
    lines += [f"refused: {r.refused} [{r.number}: {r.words}]" for r in results if r.refused]
    bars = {"step": STEP_BAR, "allocated": MEMORY_BAR, "reserved": MEMORY_BAR} if memory else {"step": STEP_BAR}
    for name, bar in bars.items():
        x = np.array([getattr(r, name) for r in played])
        size = np.abs(x)
        lines.append(
            f"{name:10s} {np.mean(size <= bar):7.2%} within {bar:.0%}; median {np.median(size):.2%}, "
            f"90 % {np.quantile(size, 0.9):.2%}, 99 % {np.quantile(size, 0.99):.2%}; {x.min():+.1%} to {x.max():+.1%}"
        )
    for name, bar in bars.items():
        worst = sorted(played, key=lambda r: -abs(getattr(r, name)))
        shown = [r for r in worst if abs(getattr(r, name)) > bar]
        shown = shown if verbose else shown[: SHOWN if name != "reserved" else 0]
        lines += [f"  {name} {getattr(r, name):+.2%} [{r.number}] {r.words}" for r in shown]
    false_fits = [r for r in played if r.false_fit]
    lines.append(f"false fits: {len(false_fits)}")
    lines += [f"  {r.false_fit} [{r.number}] {r.words}" for r in false_fits]
    return "\n".join(lines)
