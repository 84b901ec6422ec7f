"""A named check of legality, and the job that it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.strategy import StrategyTable
from mofa.specs.workload import WorkloadSpec

BoolN = NDArray[np.bool_]
FloatN = NDArray[np.float64]


@dataclass(frozen=True)
class Check:
    """One reason for rejection. ``short`` gives, per row, how far it is from passing: 0 passes. [unit]"""

    reason: str
    unit: str
    short: Callable[[Job, StrategyTable], FloatN]
    message: Callable[[Job, StrategyTable], str]
    """What is wrong with the one row of a table, with values, and what to do."""
    of_mode: bool = False
    """Whether it asks for the recomputation."""


@dataclass(frozen=True)
class Job:
    """What strategies are checked against."""

    workload: WorkloadSpec
    cluster: ClusterSpec
    framework: FrameworkSpec


def remainder(value: FloatN | NDArray[np.int64] | int, divisor: NDArray[np.int64]) -> FloatN:
    """How much is missing to the next multiple; 0 where it divides."""
    return np.asarray(-np.asarray(value) % np.maximum(divisor, 1), dtype=float)


def only(t: StrategyTable, *names: str) -> str:
    """Values of a row's degrees, in words."""
    return " x ".join(f"{name} ({int(getattr(t, name)[0])})" for name in names)
