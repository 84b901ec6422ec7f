"""Which recomputation a framework runs, and under which schedules."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mofa.blocks.frameworks.recompute import why_recomputation_unsupported
from mofa.schedules import SCHEDULE_NAMES, SCHEDULES
from mofa.search.legality.layers import uses_framework_split
from mofa.search.legality.named_check import BoolN, FloatN, degrees_text
from mofa.search.legality.named_check import JobAndMachines as JobAndMachines
from mofa.specs.strategy import RecomputeSpec, StrategyTable


def _unsupported(job: JobAndMachines, spec: RecomputeSpec) -> str | None:
    return why_recomputation_unsupported(job.framework, spec, job.workload.model, job.workload.precision.fp8_recipe)


def recompute_shortfall(job: JobAndMachines, table: StrategyTable) -> FloatN:
    """Rows whose recomputation the framework refuses, or that recompute more layers than a chunk has. (n,)"""

    def refused(specs: Iterable[RecomputeSpec]) -> BoolN:
        return np.array([_unsupported(job, spec) is not None for spec in specs])

    def of_rows(by_mode: BoolN) -> BoolN | bool:
        """What is said of each mode, of the rows; most is said of none."""
        return by_mode[table.recompute] if by_mode.any() else False

    bad = of_rows(refused(table.recompute_modes))
    bad_numbered = of_rows(refused(spec.of_layers(1) for spec in table.recompute_modes))
    again = of_rows(np.array([_once_only(job, spec) for spec in table.recompute_modes]))
    every = np.array([spec.layers or 1 if spec.kind == "every" else 0 for spec in table.recompute_modes])
    out = np.zeros(len(table), dtype=bool)
    out |= bad
    if bad_numbered is not False:
        out |= bad_numbered & (table.recompute_layers >= 0)
    if again is not False:
        out |= again & _defers_weight_gradients(table)
    if every.any() or table.recompute_layers.max(initial=-1) > 0:
        num_layers = job.workload.model.num_layers
        chunk = np.where(
            uses_framework_split(table), -(-num_layers // np.maximum(table.pp * table.vpp, 1)) + 1, num_layers
        )
        out |= every[table.recompute] > np.where(table.pp > 1, chunk * table.vpp, num_layers)
        out |= table.recompute_layers > chunk
    return out.astype(float)


def _defers_weight_gradients(table: StrategyTable) -> BoolN:
    """Where the schedule defers weight gradients.

    PyTorch then differentiates a block once for its input and once more for each weight
    (:mod:`mofa.blocks.deferred_weight_gradients`). Checkpoints that keep some ops' outputs raise at the second
    (utils/checkpoint.py: "Trying to backward an extra time"). A compiled block is one node: each differentiation runs
    its whole backward. With a checkpoint that is not modelled.
    """
    return np.array([s.defers_weight_gradients for s in SCHEDULES.values()])[table.schedule]


def _once_only(job: JobAndMachines, spec: RecomputeSpec) -> bool:
    """Whether a recomputation cannot be repeated for each deferred weight gradient, or is not known to be
    repeatable."""
    return spec.kind == "ops" or (spec.kind != "none" and job.framework.compile)


def recompute_message(job: JobAndMachines, table: StrategyTable) -> str:
    """Why a row's recomputation is refused, and what to do."""
    spec = table.recompute_modes[int(table.recompute[0])]
    if (why := _unsupported(job, spec.of_layers(int(table.recompute_layers[0])))) is not None:
        return why
    if _defers_weight_gradients(table)[0] and _once_only(job, spec):
        schedule = SCHEDULE_NAMES[int(table.schedule[0])]
        if spec.kind == "ops":
            return (
                f"recompute {spec.text} with schedule {schedule}: PyTorch differentiates a block again for each weight "
                'whose gradient is put off, which op-level checkpoints refuse ("Trying to backward an extra time"); '
                "use recompute=none, full or schedule=interleaved"
            )
        return (
            f"recompute {spec.text} with schedule {schedule} of compiled blocks is not modelled; use recompute=none, "
            "compile=false or schedule=interleaved"
        )
    if spec.kind == "every":
        return (
            f"recompute {spec.text}: no stage of {degrees_text(table, 'pp')} has so many of the "
            f"{job.workload.model.num_layers} layers, none would be recomputed; lower it or use recompute=none"
        )
    return (
        f"recompute full:{int(table.recompute_layers[0])} is more than the layers that "
        f"{degrees_text(table, 'pp', 'vpp')} leaves a chunk; lower it"
    )
