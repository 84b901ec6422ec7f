"""What steps of an optimizer on a host reach, from their measured rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mofa.calibrate.measurements import Row
from mofa.specs.optimizer_offload import ADAM_MOVED_BYTES, COPIED_BYTES

LARGE_PARAMS = 2**24
"""Parameters from which a tensor lies in no cache. [params]"""


def host_optimizer_rates(rows: Sequence[Row]) -> dict[str, float]:
    """Rates of one thread, of a processor's memory and of copies from pageable memory. [B/s]

    A byte takes its thread's time and then its memory's; both add up
    (:func:`mofa.cost.host_optimizer.host_adam_bytes_per_s`): with the least relative errors over all numbers of
    threads.
    """
    large = [row for row in rows if row.case.shape_size("params") >= LARGE_PARAMS]
    steps = [row for row in large if row.case.op == "adam_step"]
    copies = [_rate(row, COPIED_BYTES) for row in large if row.case.op == "params_to_device"]
    rates: dict[str, float] = {}
    if len({row.case.shape_size("threads") for row in steps}) > 1:
        threads = np.array([row.case.shape_size("threads") for row in steps], dtype=float)
        measured = np.array([_rate(row, ADAM_MOVED_BYTES) for row in steps])
        columns = np.stack([measured / threads, measured], axis=1)
        of_thread_s, of_memory_s = np.linalg.lstsq(columns, np.ones(len(steps)), rcond=None)[0]
        if of_thread_s > 0 and of_memory_s > 0:
            rates |= {"thread": float(1.0 / of_thread_s), "memory": float(1.0 / of_memory_s)}
    if copies:
        rates["pageable"] = float(np.median(copies))
    return rates


def host_optimizer_facts(rates: dict[str, float], source: str) -> dict[str, Any]:
    """The facts of :class:`mofa.specs.optimizer_offload.HostOptimizerRates`; none unless all were measured."""
    words = {
        "thread": (
            "thread_bytes_per_s",
            "PyTorch's fused AdamW, 28 bytes a parameter, beside memory's time",
        ),
        "memory": ("memory_bytes_per_s", "what more and more threads tend to"),
        "pageable": ("pageable_bytes_per_s", "fp32 values from pageable memory over bf16 ones of the device"),
    }
    if set(rates) != set(words):
        return {}
    facts: dict[str, Any] = {
        field: {"value": f"{rates[name] / 1e9:.4g} GB/s", "provenance": "measured", "source": f"{source}: {said}"}
        for name, (field, said) in words.items()
    }
    said = "two, as NVIDIA's DGX H100 and H200 and HGX servers have; the machine that was measured shows a part of one"
    return {**facts, "processors": {"value": 2, "provenance": "assumed", "source": said}}


def _rate(row: Row, bytes_per_param: float) -> float:
    return bytes_per_param * row.case.shape_size("params") / row.sample.median_s
