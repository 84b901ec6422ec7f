"""The table of each framework that plans are exported to, by the name that ``--to`` takes: a list to add to."""

from __future__ import annotations

from collections.abc import Mapping

from mofa.export.arguments import ArgumentTable
from mofa.export.megatron.megatron_table import MEGATRON
from mofa.export.torchtitan.python_table import TORCHTITAN_PYTHON
from mofa.export.torchtitan.torchtitan_table import TORCHTITAN

TABLES: Mapping[str, ArgumentTable] = {
    "megatron": MEGATRON, "megatron-bridge": MEGATRON, "torchtitan": TORCHTITAN, "torchtitan-0.3": TORCHTITAN_PYTHON,
}  # fmt: skip
"""Each says every field of a job, by test."""
