"""How long scheduling one micro-batch takes on this machine: the solver's own processor time and that of a whole call.

python benchmarks/balance_speed.py           # every case
python benchmarks/balance_speed.py --smoke   # that it runs

Every sequence of micro-batches is played several times, and each micro-batch counts with its fastest: what else the
machine does disturbs, and what a program takes does not depend on it. The first micro-batch, which starts cold, does
not count. ``same``: popular experts stay, as from one micro-batch of a layer to the next, and tokens are drawn anew;
``shuffled``: other experts are popular each time, so that nothing of the micro-batch before helps.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mofa.routing.balance.flow import FlowScheduler
from mofa.routing.balance.replica_lp import ReplicaScheduler
from mofa.routing.placement import Placement, symmetric_placement

IntA = NDArray[np.int64]
CASES = ((32, 8, 4), (128, 32, 16), (256, 64, 32), (256, 64, 16), (256, 64, 8))
"""Experts, GPUs of the merged group, ep."""
SKEWS = (0.25, 0.5, 0.9, 1.2)
MICRO_BATCHES, REPEATS, TOKENS_PER_GPU = 101, 3, 8192


def machine(micro_batches: int) -> str:
    """Processor and cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{cpu}, {os.cpu_count()} cores, one used; {REPEATS} repeats of {micro_batches - 1} micro-batches"


def draws(s: float, num_experts: int, num_gpus: int, micro_batches: int, *, shuffled: bool) -> IntA:
    """Loads of the micro-batches. (n, E)"""
    rng = np.random.default_rng(0)
    shares = np.arange(1.0, num_experts + 1) ** -s
    shares /= shares.sum()
    every = [rng.permutation(shares) if shuffled else shares for _ in range(micro_batches)]
    return np.asarray(rng.multinomial(TOKENS_PER_GPU * num_gpus, every))


def times(
    scheduler: type[ReplicaScheduler] | type[FlowScheduler], placement: Placement, loads: IntA
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Solver's and call's processor time of every micro-batch but the first. (n,), (n,) [s]"""
    solver, call = np.full((2, len(loads)), np.inf)
    for _ in range(REPEATS):
        made = scheduler(placement)
        for i, load in enumerate(loads):
            started = time.thread_time()
            schedule = made.schedule_micro_batch(load)
            call[i] = min(call[i], time.thread_time() - started)
            solver[i] = min(solver[i], schedule.solve_s)
    return solver[1:], call[1:]


def main() -> None:
    """Print median and 99th percentile for each case and solver, in milliseconds."""
    smoke = "--smoke" in sys.argv[1:]
    cases, micro_batches = (CASES[:1], 5) if smoke else (CASES, MICRO_BATCHES)
    print(machine(micro_batches))
    print("experts  GPUs  ep  program  routing   popular     solver: median     p99     max   call: median     p99")
    for experts, gpus, ep in cases:
        placement = symmetric_placement(experts, gpus, ep)
        for shuffled in (False, True):
            for s in SKEWS:
                loads = draws(s, experts, gpus, micro_batches, shuffled=shuffled)
                for name, scheduler in (("lp", ReplicaScheduler), ("flow", FlowScheduler)):
                    solver, call = (x * 1e3 for x in times(scheduler, placement, loads))
                    print(
                        f"{experts:7}  {gpus:4}  {ep:2}  {name:7}  zipf:{s:<4g} "
                        f"{'shuffled' if shuffled else 'same':9} {np.median(solver):16.3f} "
                        f"{np.quantile(solver, 0.99):7.3f} {solver.max():7.3f} {np.median(call):14.3f} "
                        f"{np.quantile(call, 0.99):7.3f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
