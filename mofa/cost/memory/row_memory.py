"""All of the memory that a search asks for of rows of a table."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class RowMemory:
    """Memory of rows of a table, without their time. (n,) each [B]"""

    device_bytes: NDArray[np.float64]
    """Of the fullest rank."""
    least_bytes: NDArray[np.float64]
    """The least that this can be: what is allocated, less what that may be off, and nothing cached beside it."""
    allocated_bytes: NDArray[np.float64]
    """Peak of the live tensors of the fullest rank."""
    checkpoint_bytes: NDArray[np.float64]
    """What a rank of the heaviest stage saves."""
    reserved_bytes: NDArray[np.float64]
    """What the allocator of the fullest rank reserves."""

    def select_rows(self, rows: NDArray[np.intp] | slice) -> RowMemory:
        """The memory of some rows.

        Parameters
        ----------
        rows
            Their places, or a slice of them. (k,) [-]

        Returns
        -------
        RowMemory
            Of k rows.
        """
        return RowMemory(*(getattr(self, column.name)[rows] for column in fields(self)))
