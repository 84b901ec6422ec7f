"""A placement of one's own: which GPUs of a merged group hold which experts, from a file of rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mofa.errors import SpecError
from mofa.routing.count_columns import ColumnRequirements, first_repeated_row, read_count_columns
from mofa.routing.placement import Placement
from mofa.specs.files import shown_value

_COLUMNS = ColumnRequirements("placement", ("expert", "gpu"))


def read_placement(file: str | Path, num_experts: int, num_gpus: int, slots: int) -> Placement:
    """The placement that a CSV or Parquet file holds, a row for each replica.

    Parameters
    ----------
    file
        ``.csv`` or ``.parquet`` with columns ``expert`` and ``gpu``, both from 0, in any order of rows.
    num_experts, num_gpus, slots
        Experts of a layer, GPUs of the merged group and replicas that one of them can hold. [-]

    Raises
    ------
    SpecError
        Naming the row (the first after a CSV's header is row 1) or the expert: an expert or GPU that the group does not
        have, a replica that is there twice, a GPU with more replicas than fit, an expert without a GPU; and what
        :func:`mofa.routing.count_columns.read_count_columns` refuses.
    """
    where = f"placement {shown_value(str(file), 200)}"
    columns = read_count_columns(file, where, _COLUMNS)
    expert, gpu = columns["expert"], columns["gpu"]
    for name, values, count in (("expert", expert, num_experts), ("gpu", gpu, num_gpus)):
        wrong = np.flatnonzero(values >= count)
        if wrong.size:
            row = int(wrong[0])
            raise SpecError(
                f"{where}: row {row + 1}: {name} {values[row]} is unknown; the group has {count}, numbered from 0"
            )
    repeat = first_repeated_row(columns, ("expert", "gpu"))
    if repeat is not None:
        raise SpecError(
            f"{where}: row {repeat + 1}: expert {expert[repeat]} on GPU {gpu[repeat]} occurs twice; keep one row"
        )
    order = np.argsort(gpu, kind="stable")
    nth = np.empty_like(gpu)  # of its GPU, in the order of the file
    nth[order] = np.arange(len(gpu)) - np.searchsorted(gpu[order], gpu[order])
    beyond = np.flatnonzero(nth >= slots)
    if beyond.size:
        row = int(beyond[0])
        raise SpecError(
            f"{where}: row {row + 1}: GPU {gpu[row]} gets {nth[row] + 1} replicas, and a GPU holds {slots}; put expert "
            f"{expert[row]} on another GPU"
        )
    missing = np.setdiff1d(np.arange(num_experts), expert)
    if missing.size:
        raise SpecError(f"{where}: expert {missing[0]} has no GPU; write a row for it")
    copies = np.zeros((num_experts, num_gpus), dtype=np.int64)
    copies[expert, gpu] = 1
    return Placement(copies)


def placement_csv(placement: Placement) -> str:
    """The CSV that :func:`read_placement` reads.

    >>> print(placement_csv(Placement(np.array([[1, 0], [1, 1]]))), end="")
    expert,gpu
    0,0
    1,0
    1,1
    """
    rows = "".join(f"{expert},{gpu}\n" for expert, gpu in zip(*placement.experts_and_gpus, strict=True))
    return f"expert,gpu\n{rows}"
