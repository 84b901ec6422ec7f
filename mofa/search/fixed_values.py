"""Values that ``--fix`` gives a field and that no strategy which runs has."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mofa.search.costing import CostedSpace
from mofa.search.legality.masks import CHECKS, JobAndMachines
from mofa.search.space import values_of_fixed_field

DEGREES = ("tp", "pp", "vpp", "cp", "ep", "etp", "micro_batch")
"""Fields of a strategy that are a number of ranks, chunks or sequences."""


def fixed_values_that_run_nowhere(job: JobAndMachines, searched: CostedSpace, fix: Mapping[str, object]) -> str:
    """Which of several values of a degree no strategy that runs has, each with what stopped those that came furthest;
    empty where there is none."""
    space, num_modes = searched.space, len(searched.space.recompute)
    runs = np.zeros(len(space), dtype=bool)
    runs[searched.costed.rows] = True
    says = []
    for name, given in fix.items():
        values = values_of_fixed_field(given)
        if name not in DEGREES or len(values) == 1:
            continue
        column = np.repeat(getattr(space.degrees, name), num_modes)
        for value in values:
            rows = np.flatnonzero(column == value)
            if np.any(runs[rows]):
                continue
            why = ""
            if len(rows):
                check = int(searched.reason[rows].max())
                row = space.select_rows(rows[searched.reason[rows] == check][:1])
                why = f": {CHECKS[check].message(job.with_options(row.common_options), row)}"
            says.append(f"{name}={value} runs nowhere{why}")
    return "; ".join(says)
