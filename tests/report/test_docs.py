"""docs/json.md names every field that the JSON has; docs/measure.md has the line of every record."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import mofa
from mofa.cost.breakdown import HIDDEN_COMPONENTS, MEMORY_COMPONENTS
from mofa.plan.schema import json_output_schema
from mofa.plan.step_parts import TIME_COMPONENTS
from mofa.replay.time.pipeline import CAUSES
from mofa.report.measured_runs import with_renewed_tables
from tests.committed import measured_records

ROOT = Path(__file__).parents[2]


def test_every_field_is_documented() -> None:
    text = (ROOT / "docs" / "json.md").read_text()
    fields = {field for definition in json_output_schema()["$defs"].values() for field in definition["properties"]}
    assert [field for field in sorted(fields | set(TIME_COMPONENTS)) if f"`{field}`" not in text] == []


def documented(section: str, heading: str = "field") -> set[str]:
    """First columns of a section's tables under a heading; ``section`` is its title."""
    text = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    body = re.split(r"^#+ ", text.split(f"# {section}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    out: set[str] = set()
    for table in re.findall(rf"^\| {re.escape(heading)} \|.*\n\|[-|:]+\n((?:\|.*\n)+)", body, flags=re.MULTILINE):
        for row in table.splitlines():
            out |= set(re.findall(r"`([^`]+)`", row.split("|")[1]))
    return out


@pytest.fixture(scope="module")
def estimated() -> dict[str, Any]:
    """One estimate that was played out, as its JSON; of few micro-batches, which have all its keys."""
    job, machines = mofa.load_workload("qwen3-30b-a3b", global_batch=64), mofa.load_cluster("h100-hgx", 16)
    plan = mofa.estimate(job, machines, "tp=2 pp=2 vpp=2 ep=4 cp=2 recompute=full")
    raw: dict[str, Any] = json.loads(plan.model_dump_json())
    return raw


def test_every_key_of_a_plan_is_documented_and_every_documented_key_is_there(estimated: dict[str, Any]) -> None:
    assert set(estimated) == documented("Plan (`Plan`)") | documented("The whole run")
    assert set(estimated["strategy"]) == documented("`strategy`")
    assert set(estimated["layout"]) == documented("`layout`")
    assert set(estimated["band"]) == documented("`band`")
    time, memory = estimated["time"], estimated["memory"]
    stage, fullest = time["by_stage"][0], memory["by_stage"][0]
    assert set(time) | set(stage) == documented("`time`")
    assert set(time["exposed"]) == set(stage["exposed"]) == documented("`time`", "key of `exposed`")
    assert set(time["hidden"]) == set(HIDDEN_COMPONENTS) <= documented("`time`", "key of `exposed`")
    idle = {cause for stage in time["by_stage"] for cause in stage["idle"]}
    assert idle <= documented("`time`", "key of `idle`")
    assert {*CAUSES, *HIDDEN_COMPONENTS, "host_idle"} == documented("`time`", "key of `idle`")
    assert set(memory) | set(fullest) == documented("`memory`")
    assert set(memory["by_component"]) <= set(MEMORY_COMPONENTS)
    assert set(MEMORY_COMPONENTS) == documented("`memory`", "key of `by_component`")


def test_every_key_of_a_report_is_documented_and_every_documented_key_is_there() -> None:
    job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
    report = mofa.find_plans(job, machines, maximum={"pp": 2, "cp": 1}, top=1, replay=False).report
    raw = json.loads(report.model_dump_json())
    assert set(raw) == documented("Report (`PlanReport`)")
    for part in ("workload", "cluster", "framework"):
        assert set(raw[part]) == documented(f"`{part}`"), part


def test_the_table_of_measured_runs_is_up_to_date() -> None:
    text = (ROOT / "docs" / "measure.md").read_text(encoding="utf-8")
    records = measured_records()
    assert text == with_renewed_tables(text, records), "run python scripts/runs_table.py"
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
