"""Readings of a lab book that contradict each other, told by the table's columns alone, before any prediction."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product

from mofa.validate.architecture import Row

APART = ("id", "source_url_or_repo_path", "mbs", "gbs", "overlap_notes", "flops_convention_notes", "notes")
"""Columns in which two runs may differ that differ in their batches alone, beside what was measured; the global batch
changes no memory."""

SIZES = ("params_b", "layers", "hidden", "ffn", "heads")
"""Columns of a model's size: every tensor of a rank is a weight, an activation or attention's scores, and grows by no
more than the largest of their ratios, or that of the layers that the fullest stage has."""
DEVICE = 81.251
"""What a device of the lab book has: 81 251 MiB of nvidia-smi, in its thousands of MiB (79.3 GiB)."""
WITNESSES = 2
"""Readings that must stand against a run's going out of memory."""
OUT_OF_MEMORY = r"\bOOM\b"
SAID = r'section |measured at|memory =|OOM|step time|heading says|"?FLOPs'
"""How parts of the notes begin that say nothing of what ran."""


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


def _ran_with(row: Row) -> tuple[object, ...]:
    """What ran, but for the model's size."""
    apart = (*APART[1:], "id", "model", "head_dim", "kv_heads", *SIZES)
    columns = tuple((c, text) for c, text in row.items() if c not in apart and not c.startswith("measured_"))
    ran = frozenset(part for part in row["notes"].split("; ") if part and not re.match(SAID, part))
    return (*columns, row["mbs"], ran)


def _growth(small: Row, large: Row) -> float:
    """By how much a tensor of a rank of ``large`` is larger, at most."""
    stage = [-(-(int(row["layers"]) + 2) // int(row["pp"])) for row in (small, large)]
    return max(stage[1] / stage[0], *(float(large[c]) / float(small[c]) for c in SIZES))


def fits_by_others(rows: Sequence[Row], device: float = DEVICE) -> dict[str, list[str]]:
    """Runs said to have gone out of memory against which other readings of the book stand.

    A run of the same GPUs, degrees, micro-batch and optimizer took so little that even if every tensor grew by the
    largest ratio of the sizes, it would be less than the ``device`` has. That the two differ by something that no
    column says is likelier than that several readings which agree are wrong: the outcome is not used.

    Examples
    --------
    >>> sizes = {"params_b": "10", "layers": "10", "hidden": "8", "ffn": "32", "heads": "4", "pp": "2", "mbs": "1"}
    >>> one, two = ({**sizes, "id": n, "measured_peak_mem_gib": m, "notes": ""} for n, m in (("1", "60"), ("2", "70")))
    >>> full = {**sizes, "params_b": "11", "id": "3", "measured_peak_mem_gib": "", "notes": "OOM"}
    >>> fits_by_others([one, two, full], 80.0)
    {'3': ['1', '2']}
    >>> fits_by_others([one, two, full], 70.0)
    {}
    """
    found: dict[str, list[str]] = {}
    sized = [row for row in rows if all(row[c] for c in SIZES)]
    for full in sized:
        against = [
            row["id"] for row in sized
            if row["measured_peak_mem_gib"] and _ran_with(row) == _ran_with(full)
            and float(row["measured_peak_mem_gib"]) * _growth(row, full) < device
        ]  # fmt: skip
        if re.search(OUT_OF_MEMORY, full["notes"]) and len(against) >= WITNESSES:
            found[full["id"]] = against
    return found
