"""How long playing plans out takes, and what leaving out rounds changes.

python benchmarks/replay_speed.py            # seconds of this process's CPU
python benchmarks/replay_speed.py --rounds   # what leaving rounds out changes in plans of many micro-batches
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from unittest import mock

import numpy as np

from mofa.replay.memory.rank_memory import play_memory
from mofa.replay.rank.from_estimator import describer_of_rank
from mofa.replay.replayer import Replayer
from mofa.search.entry_points import find_plans
from mofa.search.rerank import REPLAYED, replay_best_rows
from mofa.search.strategy_estimator import strategy_estimator
from mofa.search.to_plan.builder import CandidatePlan
from mofa.search.workers import WorkerProcesses, usable_cores
from mofa.specs.load import load_cluster, load_framework, load_workload

DENSE = "tp=4 sp=true pp=16 vpp=4 micro_batch=1 recompute=selective"
SEARCHES = (("deepseek-v3", "h800-hgx", 2048), ("llama3-405b", "h100-hgx", 512))
"""Whose best plans are played: many GPUs, and 2,048 micro-batches on few."""
MOE = "tp=2 sp=true pp=16 ep=16 micro_batch=1 recompute=selective:core_attn+layernorm+mla_up_proj+mlp+moe_act"


def replayer(workload: str, gpus: int, batch: int, strategy: str, layers: int | None = None) -> Replayer:
    """A plan of Megatron's, to be played."""
    changes = {"model": {"num_layers": layers}} if layers else None
    job = load_workload(workload, global_batch=batch, overrides=changes)
    return Replayer(strategy_estimator(job, load_cluster("h200-hgx", gpus), load_framework("megatron"), strategy))


def whole(one: Replayer) -> None:
    """Its time, and the memory of every rank."""
    one.replayed_time  # noqa: B018
    for r in range(one.num_ranks):
        one.rank_memory(r)


def best_plans(workload: str, cluster: str, gpus: int) -> list[CandidatePlan]:
    """The rows that a search would play."""
    found: list[CandidatePlan] = []

    def keep(rows: list[int], candidate: Callable[[int], CandidatePlan], *_: object) -> None:
        found.extend(map(candidate, rows))
        raise StopIteration

    with mock.patch("mofa.search.entry_points.replay_best_rows", keep), suppress(StopIteration):
        find_plans(load_workload(workload), load_cluster(cluster, gpus))
    return found


def seconds(action: Callable[[], object]) -> tuple[float, float]:
    """CPU and wall seconds of an action in this process."""
    cpu, wall = time.process_time(), time.perf_counter()
    action()
    return time.process_time() - cpu, time.perf_counter() - wall


def speed(*, smoke: bool) -> None:
    """Print what playing takes."""
    print(f"Python {sys.version.split()[0]}; CPU seconds of this process and wall seconds")
    cases: list[tuple[str, Callable[[], object]]] = [
        (
            "64 dense layers, pp 16 x vpp 4, 256 micro-batches, every rank",
            lambda: whole(replayer("llama3-70b", 64, 256, DENSE, 64)),
        ),
        ("DeepSeek-V3, pp 16, 60 micro-batches, every rank", lambda: whole(replayer("deepseek-v3", 512, 960, MOE))),
        ("DeepSeek-V3, pp 16, 240 micro-batches, every rank", lambda: whole(replayer("deepseek-v3", 512, 3840, MOE))),
    ]
    for name, action in cases[1:2] if smoke else cases:
        cpu, wall = seconds(action)
        print(f"{name}: {cpu:.2f} s, {wall:.2f} s")
    if smoke:
        return
    for job in SEARCHES:
        plans = best_plans(*job)
        for jobs in sorted({1, usable_cores()}):
            ones = [CandidatePlan(*one.job, one.loads, one.convention) for one in plans]
            with WorkerProcesses(jobs) as workers:
                cpu, wall = seconds(partial(replay_best_rows, range(len(ones)), ones.__getitem__, 10, workers=workers))
            print(
                f"the best {REPLAYED} plans of {' '.join(map(str, job))}, {jobs} processes: {cpu:.2f} s, {wall:.2f} s"
            )


def rounds() -> None:
    """Print what leaving out rounds changes, on ranks of plans of many micro-batches."""
    changed: list[tuple[float, float]] = []
    spent = np.zeros(2)
    for one in best_plans(*SEARCHES[0])[:REPLAYED]:
        make = describer_of_rank(one.estimator)
        pp = int(one.job[3].pp[0])
        for r in sorted({0, 1, pp // 2, pp - 1}):
            rank = make(r)
            begun = time.process_time()
            short = play_memory(rank)
            between = time.process_time()
            all_ = play_memory(rank, skip_rounds=False)
            spent += between - begun, time.process_time() - between
            changed.append((short.allocated / all_.allocated - 1, short.peak_reserved / all_.peak_reserved - 1))
    table = np.abs(np.array(changed))
    print(f"{len(table)} ranks, {spent[0]:.1f} s with rounds left out, {spent[1]:.1f} s without")
    for name, column in zip(("allocated", "reserved"), table.T, strict=True):
        print(
            f"{name}: {np.sum(column == 0)} the same, {np.sum(column > 1e-4)} differ by more than 0.01 %, "
            f"{np.sum(column > 1e-3)} by more than 0.1 %, worst {column.max():.3%}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", action="store_true", help="what leaving out rounds changes, in place of seconds")
    parser.add_argument("--smoke", action="store_true", help="one short case: only that it runs")
    chosen = parser.parse_args()
    if chosen.rounds:
        rounds()
    else:
        speed(smoke=chosen.smoke)
