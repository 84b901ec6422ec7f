"""Readings of a lab book that contradict each other, told by the table's columns alone, before any prediction."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from mofa.validate.architecture import Row

SETTING = (
    "date", "layers", "hidden", "heads", "vocab", "seq_len", "gpu", "n_gpus", "precision", "tp", "pp", "dp",
    "zero_stage", "recompute",
)  # fmt: skip
"""What two runs share that differ in their batches alone; the global batch changes no memory."""


def contradicted(rows: Sequence[Row]) -> dict[str, str]:
    """Which rows' memory another one contradicts: the smaller micro-batch, all else equal, is said to take more.

    One of the two readings is wrong and nothing says which, so that neither is used.

    Examples
    --------
    >>> row = {c: "" for c in SETTING}
    >>> pair = [{**row, "id": f"run-{n}", "mbs": n, "measured_peak_mem_gib": m} for n, m in (("2", "65"), ("4", "56"))]
    >>> contradicted(pair)
    {'run-2': 'run-4', 'run-4': 'run-2'}
    """
    settings: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row["measured_peak_mem_gib"] and row["mbs"]:
            settings.setdefault(tuple(row[c] for c in SETTING), []).append(row)
    found: dict[str, str] = {}
    for alike in settings.values():
        for one, other in product(alike, alike):
            smaller = float(one["mbs"]) < float(other["mbs"])
            if smaller and float(one["measured_peak_mem_gib"]) > float(other["measured_peak_mem_gib"]):
                found[one["id"]], found[other["id"]] = other["id"], one["id"]
    return found
