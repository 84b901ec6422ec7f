"""The JSON Schema of all that commands print with ``--json``."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from mofa.faults.calculator import GoodputCalculation
from mofa.faults.failures.events import LogStatistics
from mofa.faults.level_calculator import LevelCalculation
from mofa.plan.goodput_by_scale import GoodputReport
from mofa.plan.result import SCHEMA_VERSION, Estimate, PlanReport
from mofa.specs.base import split_docstring_sections


def json_output_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of everything that ``mofa plan``, ``estimate`` and ``goodput`` print with ``--json``.

    Returns
    -------
    dict of str to object
        The schema, with a definition for each record.

    Examples
    --------
    >>> sorted(json_output_schema()["$defs"])[:3]
    ['Band', 'CheckpointLevel', 'Circumstances']
    """
    printed = (PlanReport, Estimate, GoodputReport, GoodputCalculation, LevelCalculation, LogStatistics)
    _, schema = models_json_schema([(model, "serialization") for model in printed])
    for described in schema["$defs"].values():
        if "description" in described:  # without the docstring's sections: fields have their own descriptions
            described["description"] = split_docstring_sections(described["description"])[0]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "mofa",
        "description": "mofa plan --json: a PlanReport; mofa estimate --json: an Estimate, of several runs a list; "
        "mofa goodput --json: a GoodputReport, without a workload a GoodputCalculation, of levels of checkpoints a "
        "LevelCalculation, of a log alone a LogStatistics.",
        "schema_version": SCHEMA_VERSION,
        "anyOf": [
            *({"$ref": f"#/$defs/{model.__name__}"} for model in printed),
            {"type": "array", "items": {"$ref": "#/$defs/Estimate"}},
        ],
        "$defs": schema["$defs"],
    }
