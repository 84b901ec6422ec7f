"""What parts of Megatron's layers take the host in real steps, as ``scripts/layer_segments.py`` times them."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mofa.calibrate.fits.te_host_facts import line_of_least_relative_errors

GROUPED = "grouped"
"""The part that is one grouped linear, forward."""


@dataclass(frozen=True)
class Segment:
    """A part of a run's layers in steps of one kind of pass."""

    run: str
    format: str
    """What its products compute in."""
    experts: int
    recompute: str
    """What its strategy computes again."""
    host_issue_s: float
    """A small op between its steps. [s]"""
    part: str
    """``layer``, ``attention``, ``moe``, ``experts`` or ``grouped`` forward, ``back`` or ``grouped_back``."""
    is_recorded: bool
    """Whether autograd records it."""
    in_first_micro_batch: bool
    """Whether it lies in a step's first micro-batch, in which fp8 weights are cast."""
    calls: float
    """A step. [-]"""
    seconds: float
    """A step's, less what the host waited for the device. [s]"""

    @property
    def call_s(self) -> float:
        """Of one call. [s]"""
        return self.seconds / self.calls


def read_segments(path: Path) -> list[Segment]:
    """Segments of a table, in its order."""
    with path.open(newline="") as file:
        return [
            Segment(
                row["run"],
                row["format"],
                int(row["experts"]),
                row["recompute"],
                float(row["host_issue_s"]),
                row["part"],
                row["autograd"] == "records",
                row["micro_batch"] == "first",
                float(row["calls"]),
                float(row["seconds"]) - float(row["waited_s"]),
            )
            for row in csv.DictReader(file)
        ]


def unrecorded_share_by_format(segments: Iterable[Segment]) -> dict[str, float]:
    """What each expert of a grouped linear takes forward without autograd's record, over the same with it. [-]

    By what it computes in, of lines over the number of experts of checkpointed runs: in their first passes, where no
    weight is cast, and in the repetitions. Of these the faster micro-batches count, as a full collection of Python's
    garbage falls into some of them.

    Examples
    --------
    >>> def timed(experts, records, first, seconds):
    ...     return Segment("a", "bf16", experts, "full", 1e-6, "grouped", records, first, 10.0, seconds)
    >>> runs = [(8, 16.0), (16, 24.0)]
    >>> again = [timed(n, True, first, 1e-5 * ops) for n, ops in runs for first in (True, False)]
    >>> once = [timed(n, False, False, 1e-5 * (ops - n / 2)) for n, ops in runs]
    >>> {name: round(share, 3) for name, share in unrecorded_share_by_format([*once, *again]).items()}
    {'bf16': 0.5}
    """
    by: dict[str, dict[int, dict[tuple[bool, bool], float]]] = defaultdict(lambda: defaultdict(dict))
    for one in segments:
        if one.part == GROUPED and one.recompute == "full":
            by[one.format][one.experts][one.is_recorded, one.in_first_micro_batch] = one.call_s / one.host_issue_s
    shares = {}
    for format_, runs in by.items():
        recorded = line_of_least_relative_errors({n: min(ops[True, True], ops[True, False]) for n, ops in runs.items()})
        unrecorded = line_of_least_relative_errors({n: ops[False, False] for n, ops in runs.items()})
        if recorded is not None and unrecorded is not None:
            shares[format_] = unrecorded[1] / recorded[1]
    return shares
