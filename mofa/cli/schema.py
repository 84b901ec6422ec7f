"""``mofa schema``: the JSON Schema of what plan and estimate print."""

from __future__ import annotations


def schema() -> None:
    """Print the JSON Schema of what plan --json and estimate --json print."""
    import json
    import sys

    from mofa.search.result import json_schema

    json.dump(json_schema(), sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")
