"""docs/json.md names every field that the JSON has."""

from __future__ import annotations

from pathlib import Path

from mofa.search.result import TIME_COMPONENTS, json_schema


def test_every_field_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
    fields = {field for definition in json_schema()["$defs"].values() for field in definition["properties"]}
    assert [field for field in sorted(fields | set(TIME_COMPONENTS)) if f"`{field}`" not in text] == []
