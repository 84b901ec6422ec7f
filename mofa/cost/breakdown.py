"""The one type that physics returns: seconds and bytes per component, for every candidate at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mofa.specs.strategy import StrategyTable

FloatN = NDArray[np.float64]

TIME_COMPONENTS = (
    "gemm", "grouped_gemm", "attention", "memory_bound", "recompute", "host_idle", "tp", "cp", "ep", "pp", "dp",
    "bubble", "stragglers", "optimizer",
)  # fmt: skip
HIDDEN_COMPONENTS = ("tp", "cp", "ep", "pp", "dp")
LIVE_COMPONENTS = (
    "parameters", "gradients", "optimizer_states", "activations", "weight_copies", "buffers", "temporaries",
)  # fmt: skip
MEMORY_COMPONENTS = (*LIVE_COMPONENTS, "allocator_slack", "cuda_context", "communicators")


@dataclass(frozen=True)
class StageDetail:
    """Per pipeline stage, for one or few candidates; arrays (n, pp) or (parts, n, pp)."""

    time_s: FloatN
    allocated_bytes: FloatN
    reserved_bytes: FloatN
    device_bytes: FloatN
    components_bytes: FloatN
    instant: NDArray[np.int64]
    in_flight: FloatN
    layers: NDArray[np.int64]
    recomputed_layers: NDArray[np.int64]


@dataclass(frozen=True)
class Breakdown:
    """Seconds and bytes of n candidates.

    ``exposed_s`` (len(TIME_COMPONENTS), n) sums to ``step_s``; ``memory_bytes`` (len(MEMORY_COMPONENTS), n) of the
    fullest rank sums to ``device_bytes``. ``instant`` (n,) indexes ``instant_names``. ``flops`` are those that run,
    with recomputation, of all ranks together. ``checkpoint_bytes`` (n,) is what a rank of the heaviest stage saves.
    """

    table: StrategyTable
    step_s: FloatN
    exposed_s: FloatN
    hidden_s: FloatN
    allocated_bytes: FloatN
    reserved_bytes: FloatN
    device_bytes: FloatN
    memory_bytes: FloatN
    hardware_flops: FloatN
    instant: NDArray[np.int64]
    fullest_stage: NDArray[np.int64]
    slowest_stage: NDArray[np.int64]
    instant_names: tuple[str, ...]
    checkpoint_bytes: FloatN
    detail: StageDetail | None = None

    def __len__(self) -> int:
        return len(self.step_s)
