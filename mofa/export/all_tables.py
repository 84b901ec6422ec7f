"""The table of each framework that plans are exported to, by the name that ``--to`` takes: a list to add to."""

from __future__ import annotations

from collections.abc import Mapping

from mofa.export.arguments import Table
from mofa.export.megatron.megatron_table import MEGATRON

TABLES: Mapping[str, Table] = {"megatron": MEGATRON}
"""Each says every field of a job, by test."""
