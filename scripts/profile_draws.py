"""Power at full clock of memory-bound kernels that an H200 ran alone, for the bundled profiles."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

READ = Path(__file__).resolve().parent.parent / "measurements" / "h200-1gpu-draws" / "draws.csv"
LIMIT_W = 700.0
"""Of that H200, as nvidia-smi says it. [W]"""
OWN_DRAWS: dict[str, tuple[str, ...]] = {
    "megatron loss_fwd": ("loss eager forward",), "megatron loss_bwd": ("loss eager both", "loss eager forward"),
    "megatron compiled_loss_fwd": ("loss compiled forward",),
    "megatron compiled_loss_bwd": ("loss compiled both", "loss compiled forward"),
    "megatron zero_buffer": ("zero one buffer",),
}  # fmt: skip
"""Memory-bound kernels whose power was read: what ran in measurements/h200-1gpu-draws, and what of it was another."""


def with_own_draws(stream: dict[str, Any]) -> dict[str, Any]:
    """Memory-bound curves with the power at full clock that was read of some, over the limit."""
    with READ.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    largest = {}
    for row in sorted(rows, key=lambda row: int(row["m"]) * int(row["n"] or 1)):
        largest[row["kernel"]] = float(row["loaded_us"]), float(row["power_w"])
    made = dict(stream)
    for key, (ran, *others) in OWN_DRAWS.items():
        took, power = largest[ran]
        energy = took * power - sum(largest[other][0] * largest[other][1] for other in others)
        seconds = took - sum(largest[other][0] for other in others)
        made[key] = {**made[key], "draw": round(energy / seconds / LIMIT_W, 3)}
    return made
