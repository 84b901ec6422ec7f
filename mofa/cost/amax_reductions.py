"""The largest elements of fp8 tensors under delayed scaling, which all ranks of a stage reduce behind every pass."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.frameworks.megatron.fp8 import AMAX_BYTES
from mofa.cost.kernels.collectives import collective_s
from mofa.cost.rows import GatheredRows
from mofa.specs.workload import WorkloadSpec

ArrayN = NDArray[np.float64]

TENSORS_A_WEIGHT = 3.0
"""Places for largest elements that a product has: of its input, its weight and its output. [-]"""


def reduces_amaxes(workload: WorkloadSpec) -> bool:
    """Whether a pass ends with a reduction of largest elements: delayed scaling alone looks at those of other ranks."""
    return workload.precision.fp8_recipe == "delayed"


def amax_reduction_seconds(rows: GatheredRows) -> ArrayN:
    """Reductions of the largest elements on a step's critical path. (n,) [s]

    One behind the forward pass of every chunk and micro-batch and one in its backward, by maximum over tensor, context
    and data parallelism together; with the pipeline's fill ``m vpp + pp - 1`` of each. What they take is latency.

    Sources: transformer_engine 2.20.2, pytorch/quantization.py, ``reduce_and_update_fp8_tensors`` and
    ``autocast_exit``; megatron_core 0.16.1, fp8_utils.py, ``get_fp8_context`` (one for all layers of a chunk) and
    parallel_state.py, ``get_amax_reduction_group``. Not counted: kernels that put new scales in place.
    """
    if not reduces_amaxes(rows.workload):
        return np.zeros(len(rows.table))
    stages, model = rows.stage_layers.stages, rows.workload.model
    experts = np.zeros(len(rows.grids)) if model.moe is None else 2.0 * model.moe.num_experts / rows.grids.ep
    weights = (4.0 + experts) * model.num_layers / (stages.pp * stages.vpp)
    nbytes = AMAX_BYTES * TENSORS_A_WEIGHT * weights
    each = collective_s("all_reduce", nbytes, rows.groups["tp_dp_cp"], rows.costs.machine.network_fabric)[
        rows.grid_index
    ]
    return np.asarray(2.0 * (rows.num_micro_batches * stages.vpp + stages.pp - 1) * each)
