"""Records and published rows hold what a run can give; what none can is refused where it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mofa.cli.main import main
from mofa.errors import SpecError
from mofa.measure.records import read_record
from mofa.specs.from_mapping import spec_from_mapping
from mofa.validate.published import PublishedFile
from tests.committed import read_yaml, yaml_text

ROOT = Path(__file__).resolve().parents[2]
RECORD = sorted((ROOT / "reference_runs/measured").glob("h100-mc1-ernie-3l*skewed.yaml"))[0]
PUBLISHED = ROOT / "reference_runs/published/korth.yaml"


def changed(facts: Any, path: str, value: object) -> Any:
    """Nested facts with the value at a dotted path replaced, whose numbers are places in lists."""
    inner = facts
    *before, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in before:
        inner = inner[part]
    inner[last] = value
    return facts


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("step_time_s", 1e300, "step_time_s (1e+300)"), ("step_time_s", 0, "step_time_s (0)"),
        ("step_time_s", True, "step_time_s (True) must be a number"),
        ("step_times_s.1", -0.5, "step_times_s[1] (-0.5)"), ("step_times_s.0", True, "step_times_s[0] (True)"),
        ("warmup_times_s.0", -1.0, "warmup_times_s[0] (-1.0)"),
        ("step_time_spread_s", -1.0, "step_time_spread_s (-1.0)"),
        ("grad_norms", [-1.0], "grad_norms[0] (-1.0)"), ("oom_tried_bytes", -1, "oom_tried_bytes (-1)"),
        ("tokens_per_expert", [[[-1]]], "tokens_per_expert[0][0][0] (-1)"),
        ("ranks.0.ready_allocated_bytes", -1, "ranks[0].ready_allocated_bytes (-1)"),
        ("ranks.0.between_steps_bytes", -1, "ranks[0].between_steps_bytes (-1)"),
        ("ranks.0.outside_allocator_bytes", -1, "ranks[0].outside_allocator_bytes (-1)"),
        ("ranks.0.alloc_retries", -1, "ranks[0].alloc_retries (-1)"),
        ("ranks.0.device_bytes", 0, "ranks[0].device_bytes (0)"),
        ("ranks.0.device_bytes", 10**14, "(100000000000000 B) must be at most device_total_bytes"),
        ("ranks.0.peak_allocated_bytes", 10**14, "must be at most peak_reserved_bytes"),
        ("ranks.0.peak_reserved_bytes", 10**14, "must be at most device_total_bytes"),
        ("ranks.0.peak_reserved_bytes", 10**30, "ranks[0].peak_reserved_bytes"),
        ("ranks.0.device_busy_s", -1.0, "ranks[0].device_busy_s (-1.0)"),
        ("ranks.0.host_issues_s", [0.0], "ranks[0].host_issues_s[0] (0.0)"),
    ],
)  # fmt: skip
def test_measured_values_of_a_record(path: str, value: object, said: str, tmp_path: Path) -> None:
    record = changed(read_yaml(RECORD), f"measured.{path}", value)
    (tmp_path / "r.yaml").write_text(yaml_text(record))
    with pytest.raises(SpecError) as error:
        read_record(tmp_path / "r.yaml")
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [("num_gpus", 0, "num_gpus (0)"), ("cpu_cores", -1, "cpu_cores (-1)"), ("host_issue_s", 1e300, "host_issue_s")],
)
def test_the_environment_of_a_record(path: str, value: object, said: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(yaml_text(changed(read_yaml(RECORD), f"environment.{path}", value)))
    with pytest.raises(SpecError) as error:
        read_record(tmp_path / "r.yaml")
    assert said in str(error.value)


@pytest.mark.parametrize("value", [1e300, -1.0, 0, True])
def test_a_published_step(value: object) -> None:
    rows = changed(read_yaml(PUBLISHED), "runs.0.measured.step_s", value)
    with pytest.raises(SpecError, match=r"runs\[0\]\.measured\.step_s"):
        spec_from_mapping(PublishedFile, rows, "published")


def test_validation_refuses_such_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "measured").mkdir()
    record = changed(read_yaml(RECORD), "measured.step_times_s.0", -0.5)
    (tmp_path / "measured/r.yaml").write_text(yaml_text(record))
    assert main(["validate", "--group", "measured", "--references", str(tmp_path), "--quiet"]) == 2
    assert "measured.step_times_s[0] (-0.5)" in capsys.readouterr().err
