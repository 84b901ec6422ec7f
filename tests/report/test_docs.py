"""docs/json.md names every field that the JSON has; docs/measure.md has the line of every record."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from mofa.measure import read_records
from mofa.report.measured_runs import with_table
from mofa.search.result import TIME_COMPONENTS, json_schema

ROOT = Path(__file__).parents[2]


def test_every_field_is_documented() -> None:
    text = (ROOT / "docs" / "json.md").read_text()
    fields = {field for definition in json_schema()["$defs"].values() for field in definition["properties"]}
    assert [field for field in sorted(fields | set(TIME_COMPONENTS)) if f"`{field}`" not in text] == []


def test_the_table_of_measured_runs_is_up_to_date() -> None:
    text = (ROOT / "docs" / "measure.md").read_text(encoding="utf-8")
    records = read_records(ROOT / "reference_runs" / "measured")
    assert text == with_table(text, records), "run python scripts/runs_table.py"
    assert len(records) >= 60


def test_the_table_of_published_goodput_is_up_to_date() -> None:
    script = ROOT / "scripts" / "published_goodput.py"
    spec = importlib.util.spec_from_file_location("published_goodput", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["published_goodput"] = module
    spec.loader.exec_module(module)
    text = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    assert text == module.with_table(text), "run python scripts/published_goodput.py --write"
    assert len(module.cases()) >= 8
