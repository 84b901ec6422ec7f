"""Dotted paths of all numbers that ``--set`` reaches, with what each is now: from the bundled profiles themselves."""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path
from typing import Any

from mofa.specs.load import load_framework, load_workload
from tests.committed import read_yaml
from tests.fuzz.mutations import extreme

ROOT = Path(__file__).resolve().parents[2]
NOT_IN_PROFILE = {
    "hardware.gpu.curves.step_jitter": "0.02", "hardware.node.slow_nodes.share": "0.05",
    "hardware.node.slow_nodes.slowdown": "0.2", "hardware.node.nic.communicator_bytes_per_s": "50 GB/s",
}  # fmt: skip
"""Of facts that an H100's profile leaves out."""
OF_FAULTS = {
    "faults.reliability.failures_per_node_day": "0.0065", "faults.restart.repair_s": "2 h",
    "faults.storage.write_bytes_per_s": "2 TB/s", "faults.price.usd_per_gpu_hour": "2.5", "faults.power.pue": "1.1",
    "faults.checkpoint.interval_s": "600 s", "faults.checkpoint.copies": "2", "faults.spares": "2",
}  # fmt: skip


@lru_cache(maxsize=1)
def number_paths() -> dict[str, str]:
    """Each path and the text of its value."""
    found = dict(NOT_IN_PROFILE)
    for prefix, facts in (
        ("hardware.gpu", read_yaml(ROOT / "hardware_profiles/gpus/h100-sxm.yaml")),
        ("hardware.node", read_yaml(ROOT / "hardware_profiles/nodes/h100-hgx.yaml")),
        ("framework", load_framework("megatron").model_dump()),
        ("workload", load_workload("mixtral-8x7b").model_dump()),
    ):
        _add_numbers(found, prefix, facts)
    return found


def _add_numbers(found: dict[str, str], path: str, value: Any) -> None:
    if isinstance(value, dict):
        if {"value", "provenance", "source"} <= set(value):
            found[path] = str(value["value"])
            return
        for key, item in value.items():
            if "." not in str(key):
                _add_numbers(found, f"{path}.{key}", item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        found[path] = str(value)


def drawn_setting(draw: random.Random, root: str = "") -> tuple[str, str]:
    """A path of a number, at all depths alike, and an extreme value for it."""
    paths = [path for path in number_paths() if path.startswith(root)]
    shallow = [path for path in paths if path.count(".") < 4]
    path = draw.choice(shallow if draw.random() < 0.5 else paths)
    number, _, unit = number_paths()[path].partition(" ")
    if draw.random() < 0.6:
        return path, extreme(draw, unit)
    return path, f"{float(number) * 10.0 ** draw.uniform(-4, 4):.6g} {unit}".rstrip()
