"""Readings of a lab book that contradict each other, told by the table's columns alone, before any prediction."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from mofa.validate.architecture import Row

APART = ("id", "source_url_or_repo_path", "mbs", "gbs", "overlap_notes", "flops_convention_notes", "notes")
"""Columns in which two runs may differ that differ in their batches alone, beside what was measured; the global batch
changes no memory."""


def _setting(row: Row) -> tuple[tuple[str, str], ...]:
    return tuple((c, text) for c, text in row.items() if c not in APART and not c.startswith("measured_"))


def contradicted(rows: Sequence[Row]) -> dict[str, str]:
    """Which rows' memory another one contradicts: the smaller micro-batch, all else equal, is said to take more.

    One of the two readings is wrong and nothing says which, so that neither is used.

    Examples
    --------
    >>> pair = [{"id": n, "tp": "8", "mbs": n, "measured_peak_mem_gib": m} for n, m in (("2", "65"), ("4", "56"))]
    >>> contradicted(pair)
    {'2': '4', '4': '2'}
    >>> contradicted([pair[0], {**pair[1], "tp": "4"}])
    {}
    """
    settings: dict[tuple[tuple[str, str], ...], list[Row]] = {}
    for row in rows:
        if row["measured_peak_mem_gib"] and row["mbs"]:
            settings.setdefault(_setting(row), []).append(row)
    found: dict[str, str] = {}
    for alike in settings.values():
        for one, other in product(alike, alike):
            smaller = float(one["mbs"]) < float(other["mbs"])
            if smaller and float(one["measured_peak_mem_gib"]) > float(other["measured_peak_mem_gib"]):
                found[one["id"]], found[other["id"]] = other["id"], one["id"]
    return found
