"""The bundled node that a node of another GPU is written like."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mofa.specs.files import bundled_names, gpus_of_nodes
from mofa.specs.like_profiles import expanded_profile
from mofa.units import parse_quantity

FACTS = {
    ("peak_flops_per_s", "bf16"): "FLOP/s",
    ("memory_bytes",): "B",
    ("memory_bandwidth_bytes_per_s",): "B/s",
}  # fmt: skip
"""What GPUs are compared by, and the unit of each."""


def bundled_node_for_gpu(gpu: Mapping[str, Any]) -> str:
    """The bundled node that fits a GPU's file: that of the GPU that it is like, else of the nearest by its datasheet.

    Parameters
    ----------
    gpu
        What the file says, checked or not.

    Returns
    -------
    str
        Name of the node.

    Examples
    --------
    >>> bundled_node_for_gpu({"like": "a100-pcie"}), bundled_node_for_gpu(expanded_profile("gpus", "mi300x"))
    ('a100-pcie-pairs', 'mi300x-oam')
    >>> peak = {"bf16": {"value": "312 TFLOP/s"}}
    >>> bundled_node_for_gpu({"peak_flops_per_s": peak, "memory_bytes": {"value": "48 GiB"}})
    'a100-40gb-hgx'
    """
    node_of = {name: node for node, name in reversed(gpus_of_nodes().items())}
    own, software = _facts(gpu), gpu.get("software")
    for name in (gpu.get("name"), gpu.get("like")):
        if isinstance(name, str) and name in node_of:
            other = expanded_profile("gpus", name).get("software", "cuda")
            if software in (None, other):  # a GPU of AMD's may have kernels like one of NVIDIA's, in no node of these
                return node_of[name]
    software = software or "cuda"
    distances = {}
    for name in bundled_names("gpus"):
        other = expanded_profile("gpus", name)
        if name in node_of and other.get("software", "cuda") == software:
            theirs = _facts(other)
            distances[name] = sum(abs(math.log(own[path] / theirs[path])) for path in own if path in theirs)
    return node_of[min(distances, key=distances.__getitem__)] if own and distances else "h100-hgx"


def _facts(gpu: Mapping[str, Any]) -> dict[tuple[str, ...], float]:
    """Those of a file's numbers that can be read."""
    out = {}
    for path, unit in FACTS.items():
        value: Any = gpu
        for key in (*path, "value"):
            value = value.get(key) if isinstance(value, Mapping) else value
        try:
            number = parse_quantity(value, unit)
        except ValueError:
            continue
        if number > 0:
            out[path] = number
    return out
