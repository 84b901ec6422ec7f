"""The longest path of :mod:`mofa.cost.step_time.critical_path` by ``native_longest_path.c``, where that is compiled."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mofa.compiled_parts import Signature, load_compiled_part
from mofa.cost.step_time.dependency_levels import DependencyLevels

ArrayN = NDArray[np.float64]
IntA = NDArray[np.intp]

SOURCE = Path(__file__).with_name("native_longest_path.c")
LIBRARY = SOURCE.with_suffix(".so")
BLOCK = 64
"""Plans that are walked together, as there. [-]"""


class _Walk(ctypes.Structure):
    """As ``Walk`` in the compiled part."""

    _fields_ = (
        ("size", c_int64), ("first_wait", c_void_p), ("waits", c_void_p), ("first_sent", c_void_p), ("sent", c_void_p),
        ("before", c_void_p), ("num_ends", c_int64), ("num_steady", c_int64), ("ends", c_void_p),
        ("last_steady", c_void_p), ("round_before", c_void_p), ("num_ranks", c_int64), ("rank", c_void_p),
        ("in_last_round", c_void_p),
    )  # fmt: skip


SIGNATURES: dict[str, Signature] = {
    "source": (c_char_p, []),
    "longest_path": (None, [POINTER(_Walk), *([c_void_p] * 6), c_int64, *([c_void_p] * 5)]),
}


@lru_cache(maxsize=1)
def c_library() -> ctypes.PyDLL | None:
    """The compiled part in C; None where there is none of this source, for this machine."""
    return load_compiled_part(SOURCE, LIBRARY, SIGNATURES) if np.intp().itemsize == ctypes.sizeof(c_int64) else None


def longest_path(
    compiled: ctypes.PyDLL, walk: DependencyLevels, rows: IntA, durations: ArrayN, hosts: tuple[ArrayN, ...] | None
) -> tuple[ArrayN, ArrayN, ArrayN]:
    """When the last computation ends, the longest of all last rounds, (n,) each, and what the device of each rank waits
    for its own host, in all and in the last round, (2, pp, n). [s]

    Parameters
    ----------
    rows
        The row of ``durations`` that each node takes. (N,)
    durations, hosts
        As :meth:`mofa.cost.step_time.critical_path.ComputationDurations.seconds_by_level_node` and
        ``host_clock_tables`` have
        them; each rank's lead is the last of ``hosts``.
    """
    num_plans = durations.shape[1]
    arrays = [np.ascontiguousarray(array, dtype=np.float64) for array in (durations, *(hosts or ()))]
    given = [array.ctypes.data for array in arrays] + [None] * (5 - len(arrays))
    size = walk.size * min(num_plans, BLOCK)
    ends = np.empty(size if hosts is None else 2 * size)
    issued = None if hosts is None else ends[size:].ctypes.data
    latest_end, round_s = np.empty((2, num_plans))
    waited_s = np.zeros((2, len(walk.last_steady), num_plans))
    compiled.longest_path(
        _walk_of(walk), rows.ctypes.data, *given, num_plans, ends.ctypes.data, issued, latest_end.ctypes.data,
        round_s.ctypes.data, waited_s.ctypes.data,
    )  # fmt: skip
    return latest_end, round_s, waited_s


def _walk_of(walk: DependencyLevels) -> _Walk:
    """Where its arrays are, which it keeps."""
    *lists, last_nodes, last_steady, round_before, rank, in_last_round = walk.array_addresses
    return _Walk(walk.size, *lists, len(walk.last_nodes), len(walk.last_steady), last_nodes, last_steady, round_before,
                 len(walk.last_steady), rank, in_last_round)  # fmt: skip
