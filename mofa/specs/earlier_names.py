"""Earlier spellings of a GPU's facts, which files and options of users may still have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GPU_NAMES = {"usable_memory_bytes": "capacity_bytes"}
"""The earlier name of a GPU's fact, and its name today."""


def with_current_gpu_names(gpu: Mapping[str, Any]) -> dict[str, Any]:
    """A GPU's mapping with earlier names of facts replaced; a fact with both names keeps both, which is refused later.

    >>> with_current_gpu_names({"name": "x", "usable_memory_bytes": "79 GiB"})
    {'name': 'x', 'capacity_bytes': '79 GiB'}
    """
    return {_today(key, gpu): value for key, value in gpu.items()}


def with_current_override_names(overrides: Mapping[str, object]) -> dict[str, object]:
    """What a cluster's facts are set to, with earlier names of its GPU's facts replaced.

    >>> changes = {"gpu.usable_memory_bytes.value": "79 GiB", "gpu": {"usable_memory_bytes": "79 GiB"}}
    >>> with_current_override_names(changes)
    {'gpu.capacity_bytes.value': '79 GiB', 'gpu': {'capacity_bytes': '79 GiB'}}
    """
    out: dict[str, object] = {}
    for path, value in overrides.items():
        keys = str(path).split(".")
        if keys[0] == "gpu" and len(keys) > 1:
            keys[1] = GPU_NAMES.get(keys[1], keys[1])
        whole_gpu = keys == ["gpu"] and isinstance(value, Mapping)
        out[".".join(keys)] = with_current_gpu_names(value) if whole_gpu and isinstance(value, Mapping) else value
    return out


def _today(key: str, gpu: Mapping[str, Any]) -> str:
    name = GPU_NAMES.get(key, key)
    return key if name in gpu else name
