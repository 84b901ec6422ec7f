"""Readings of a lab book that contradict each other, told by the table's columns alone, before any prediction."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product
from math import ceil

from mofa.validate.architecture import Row

OWN_COLUMNS = ("id", "source_url_or_repo_path", "mbs", "gbs", "overlap_notes", "flops_convention_notes", "notes")
"""Columns in which two runs may differ that differ in their batches alone, beside what was measured; the global batch
changes no memory."""


DEPTH = ("model", "params_b", "layers")
"""Columns in which two runs may differ, further, that differ in their layers."""


def _setting(row: Row, own_columns: Sequence[str] = OWN_COLUMNS) -> tuple[tuple[str, str], ...]:
    return tuple((c, text) for c, text in row.items() if c not in own_columns and not c.startswith("measured_"))


def contradictory_memory_rows(rows: Sequence[Row]) -> dict[str, str]:
    """Which rows' memory another one contradicts: the smaller micro-batch, all else equal, is said to take more.

    One of the two readings is wrong and nothing says which, so that neither is used.

    Examples
    --------
    >>> pair = [{"id": n, "tp": "8", "mbs": n, "measured_peak_mem_gib": m} for n, m in (("2", "65"), ("4", "56"))]
    >>> contradictory_memory_rows(pair)
    {'2': '4', '4': '2'}
    >>> contradictory_memory_rows([pair[0], {**pair[1], "tp": "4"}])
    {}
    """
    settings: dict[tuple[tuple[str, str], ...], list[Row]] = {}
    for row in rows:
        if row["measured_peak_mem_gib"] and row["mbs"]:
            settings.setdefault(_setting(row), []).append(row)
    contradictions: dict[str, str] = {}
    for alike in settings.values():
        for first, other in product(alike, alike):
            smaller = float(first["mbs"]) < float(other["mbs"])
            if smaller and float(first["measured_peak_mem_gib"]) > float(other["measured_peak_mem_gib"]):
                contradictions[first["id"]], contradictions[other["id"]] = other["id"], first["id"]
    return contradictions


def implausible_out_of_memory(out_of_memory: Sequence[Row], rows: Sequence[Row]) -> dict[str, tuple[str, float]]:
    """Which rows that went out of memory another one's reading denies: by it, they take less than their GPU has.

    The other run differs in its layers and batches alone, and its micro-batch is no smaller. What a layer takes it
    takes in each, and what is in none does not grow with them, so that memory grows at most in proportion to the layers
    of the fullest stage. One of the two is wrong, or something else was on the GPU, and nothing says which: neither is
    used.

    Parameters
    ----------
    out_of_memory
        Rows that went out of memory.
    rows
        Of the same table, with readings in units of the GPU's name, such as whole GB.

    Returns
    -------
    dict
        Id to the id of the row whose reading denies it, and the most that it can take by that. [unit of the reading]

    Examples
    --------
    >>> ran = {"id": "a", "gpu": "A100 80GB", "pp": "2", "mbs": "1", "layers": "20", "measured_peak_mem_gib": "60"}
    >>> denied = implausible_out_of_memory([{**ran, "id": "b", "layers": "24"}], [ran])
    >>> {id: (by, round(most)) for id, (by, most) in denied.items()}
    {'b': ('a', 73)}
    >>> implausible_out_of_memory([{**ran, "id": "b", "layers": "28"}], [ran])
    {}
    """
    denials: dict[str, tuple[str, float]] = {}
    for short in out_of_memory:
        holds = re.search(r"(\d+) ?GB", short["gpu"])
        most = min(_most(short, rows), default=None)
        if holds and most and most[0] <= float(holds[1]):
            denials[short["id"]] = most[1], most[0]
    return denials


def _most(short: Row, rows: Sequence[Row]) -> Iterator[tuple[float, str]]:
    """By each row that says so, the most that a run can take, and that row's id."""
    same = _setting(short, OWN_COLUMNS + DEPTH)
    for row in rows:
        given = row["measured_peak_mem_gib"] and row["layers"] and short["layers"] and row["mbs"] and short["mbs"]
        if not given or _setting(row, OWN_COLUMNS + DEPTH) != same or float(row["mbs"]) < float(short["mbs"]):
            continue
        layers, stages = (float(short["layers"]), float(row["layers"])), float(row["pp"] or 1)
        fullest = ceil(layers[0] / stages) / ceil(layers[1] / stages)
        reading = float(row["measured_peak_mem_gib"]) + 0.5  # as it was rounded
        yield reading * max(1.0, fullest, layers[0] / layers[1]), row["id"]
