"""How long a step may be: every computation of a pipeline is put in order, walked and played."""

from __future__ import annotations

import numpy as np

from mofa.schedules import SCHEDULE_NAMES, SCHEDULES
from mofa.search.legality.named_check import FloatN, JobAndMachines, degrees_text, micro_batches_per_step
from mofa.specs.strategy import StrategyTable

MOST_COMPUTATIONS = 400_000
"""Forwards and backwards of all ranks in a step: putting them in order and playing them takes up to ten seconds and
half a GiB. A trillion-parameter job of 64 stages and 2,048 micro-batches has 262,144. [computations]"""
MOST_UNREPEATED = 100_000
"""The same of schedules whose steps have no steady state that is played once for many rounds. [computations]"""
_MOST = np.array(
    [MOST_COMPUTATIONS if SCHEDULES[name].steady_state_unit else MOST_UNREPEATED for name in SCHEDULE_NAMES]
)
_SPLITS = np.array([SCHEDULES[name].defers_weight_gradients for name in SCHEDULE_NAMES])


def computations_per_step(job: JobAndMachines, table: StrategyTable) -> FloatN:
    """Forwards and backwards of a step on all ranks of a pipeline; split backwards count twice. (n,)"""
    parts = np.where(_SPLITS[table.schedule], 3.0, 2.0)
    return np.asarray(parts * table.pp * table.vpp * micro_batches_per_step(job, table), dtype=float)


def step_length_excess(job: JobAndMachines, table: StrategyTable) -> FloatN:
    """Computations beyond what is played. (n,)"""
    return np.asarray(np.maximum(computations_per_step(job, table) - _MOST[table.schedule], 0.0), dtype=float)


def step_length_message(job: JobAndMachines, table: StrategyTable) -> str:
    """Words for a row whose step is too long."""
    return (
        f"{int(micro_batches_per_step(job, table)[0]):,} micro-batches over {degrees_text(table, 'pp', 'vpp')} are "
        f"{int(computations_per_step(job, table)[0]):,} computations, more than the "
        f"{int(_MOST[table.schedule[0]]):,} that are "
        "played; raise micro_batch or dp, or lower global_batch"
    )
