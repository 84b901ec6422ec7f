"""``mofa schema``: the JSON Schema of what plan, estimate and goodput print."""

from __future__ import annotations


def schema() -> None:
    """Print the JSON Schema (2020-12) of what plan, estimate and goodput print with --json.

    docs/json.md says the same in words, field by field.
    """
    import json
    import sys

    from mofa.plan.schema import json_output_schema

    json.dump(json_output_schema(), sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")
