"""Steps that curves of a profile make impossible: not positive, or not finite."""

from __future__ import annotations

import numpy as np

from mofa.cost.breakdown import TIME_COMPONENTS, Breakdown
from mofa.errors import SpecError
from mofa.specs.hardware import ClusterSpec

CURVES = {
    "gemm": "gpu.curves.gemm", "grouped_gemm": "gpu.curves.grouped_gemm", "attention": "gpu.curves.attention",
    "memory_bound": "gpu.curves.stream", "optimizer": "gpu.curves.stream", "host_idle": "gpu.curves.host",
}  # fmt: skip
"""What the seconds of a component are of; of the others it is links and ``node.collectives``."""


def refuse_unphysical_steps(breakdown: Breakdown, cluster: ClusterSpec) -> None:
    """Refuse a breakdown that no machine can have, and name what is to blame.

    Raises
    ------
    SpecError
        If a step is not positive or not finite.
    """
    step_s = breakdown.step_s
    wrong = np.flatnonzero(~(np.isfinite(step_s) & (step_s > 0.0)))
    if not wrong.size:
        return
    row = int(wrong[0])
    seconds = breakdown.exposed_s[:, row]
    blamed = int(np.argmax(~np.isfinite(seconds) | (seconds < 0.0)))
    component = TIME_COMPONENTS[blamed]
    place = CURVES.get(component, "node.intra, node.nic or node.collectives")
    raise SpecError(
        f"{cluster.node.name}, {cluster.gpu.name}: a step would take {step_s[row]:g} s, of which {component} "
        f"{seconds[blamed]:g} s; correct {place}"
    )
