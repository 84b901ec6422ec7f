"""A named legality check, and the job that it checks strategies against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mofa.errors import StrategyError
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.model import ModelSpec
from mofa.specs.strategy import FrameworkOptions, StrategyTable
from mofa.specs.workload import WorkloadSpec

BoolN = NDArray[np.bool_]
FloatN = NDArray[np.float64]
Verdicts = NDArray[np.int8]
"""Of each row the index of the check that rejects it, or of a reason behind all checks; -1 for none. A byte each: of
millions of rows, pages that are written for the first time take as long as what is written. (n,)"""


@dataclass(frozen=True)
class LegalityCheck:
    """One reason for rejection. ``shortfall`` gives by how much each row misses: 0 passes. [unit]"""

    reason: str
    unit: str
    shortfall: Callable[[JobAndMachines, StrategyTable], FloatN]
    message: Callable[[JobAndMachines, StrategyTable], str]
    """Message for a table of one row: what is wrong, with values, and what to do."""
    depends_on_recompute_mode: bool = False
    """Whether it depends on the recomputation mode."""


@dataclass(frozen=True)
class JobAndMachines:
    """The job and machines that strategies are checked against."""

    workload: WorkloadSpec
    cluster: ClusterSpec
    framework: FrameworkSpec
    counts_gpus_by_row: bool = False
    """Whether each strategy has the GPUs that its degrees make, of which the cluster's are the most."""
    is_judged_in_closed_form: bool = False
    """Whether no replay follows the search's verdicts on memory, which leave free what it may reserve beyond them."""

    def with_options(self, options: FrameworkOptions) -> JobAndMachines:
        """The job with the framework's options that some strategies choose."""
        return replace(self, framework=self.framework.with_options(options))


def refuse_idle_dispatcher(model: ModelSpec, dispatcher: object) -> None:
    """Refuse a dispatcher that a strategy chooses for a model without experts.

    Raises
    ------
    StrategyError
        If the model has none.
    """
    if dispatcher is not None and model.moe is None:
        raise StrategyError(
            f"strategy: dispatcher ({dispatcher}) needs experts, and {model.name} has none; leave it out"
        )


def shortfall_to_multiple(value: FloatN | NDArray[np.int64] | int, divisor: NDArray[np.int64]) -> FloatN:
    """How much a number lacks to the next multiple; 0 where it is one."""
    return np.asarray(-np.asarray(value) % np.maximum(divisor, 1), dtype=float)


def micro_batches_per_step(job: JobAndMachines, table: StrategyTable) -> NDArray[np.int64]:
    """Micro-batches of a step on each pipeline. (n,)"""
    return np.asarray(job.workload.batch.global_batch // np.maximum(table.dp * table.micro_batch, 1))


def degrees_text(table: StrategyTable, *names: str) -> str:
    """Values of a row's degrees as text, such as ``tp (4) x pp (2)``."""
    return " x ".join(f"{name} ({int(getattr(table, name)[0])})" for name in names)
