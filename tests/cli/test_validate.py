"""``mofa validate`` as a user runs it, over a few of the reference runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from mofa.report.attribution_text import cancelling_errors_text
from mofa.validate.attribute import Attribution, FamilySeconds
from tests.cli.conftest import Cli, one_line_of
from tests.committed import read_yaml, yaml_text

REFERENCES = Path(__file__).parents[2] / "reference_runs"


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """Three measured runs, one of them out of memory, and two rows of one source."""
    folder = tmp_path / "few"
    (folder / "measured").mkdir(parents=True)
    (folder / "published").mkdir()
    for name in ("tt1-llama-8l", "mc1-llama-21l-fits", "tt1-llama-32l-full-oom"):
        shutil.copy(REFERENCES / "measured" / f"{name}.yaml", folder / "measured")
    shutil.copy(REFERENCES / "published" / "unusable.csv", folder / "published")
    rows = read_yaml(REFERENCES / "published" / "korth.yaml")
    rows["runs"] = rows["runs"][:2]  # its small models
    (folder / "published" / "korth.yaml").write_text(yaml_text(rows))
    return folder


def test_json(cli: Cli, few: Path) -> None:
    """The shape that the contract promises, and nothing but JSON."""
    result = cli("validate", "--references", str(few), "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert set(report["groups"]) == {"measured-fitting", "published-korth", "all-published"}
    fitting = report["groups"]["measured-fitting"]
    assert fitting["runs"] == 3
    for quantity in ("step_time", "peak_allocated", "peak_reserved"):
        assert fitting[quantity]["runs"] == 2
        assert 0 <= fitting[quantity]["mean_abs_error"] <= fitting[quantity]["worst_abs_error"] < 1
        assert abs(fitting[quantity]["bias"]) <= fitting[quantity]["mean_abs_error"]
    assert fitting["out_of_memory"] == 1
    assert report["false_fits"] == 0
    assert report["not_scored"]
    run = next(run for run in report["runs"] if run["id"] == "tt1-llama-8l")
    error = run["step_time"]["predicted"] / run["step_time"]["measured"] - 1
    assert run["step_time"]["error"] == pytest.approx(error)
    assert sum(run["provenance"].values()) == pytest.approx(1.0)


def test_text_and_files(cli: Cli, few: Path, tmp_path: Path) -> None:
    result = cli(
        "validate", "--references", str(few), "--group", "measured", "--out", "out", "--markdown", "accuracy.md",
        "--csv", "runs.csv", "--json-file", "report.json",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "tt1-llama-8l" in result.stdout
    assert "does not fit, out of memory" in result.stdout
    assert "Errors by group" in result.stdout
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"step_time.png", "step_time.svg", "peak_allocated.svg", "runs.csv", "validate.json"} <= names
    assert "| tt1-llama-8l |" in (tmp_path / "accuracy.md").read_text()
    assert (tmp_path / "runs.csv").read_text().startswith("id,")
    assert json.loads((tmp_path / "report.json").read_text())["false_fits"] == 0


def test_published_alone(cli: Cli, few: Path) -> None:
    result = cli("validate", "--references", str(few), "--group", "published", "--quiet")
    assert result.returncode == 0, result.stderr
    assert "published-korth" in result.stdout
    assert "measured" not in result.stdout


def test_no_references(cli: Cli) -> None:
    result = cli("validate", "--references", "nowhere")
    assert result.returncode == 2
    assert "no folder of reference runs" in one_line_of(result.stderr)


def test_attribute(cli: Cli) -> None:
    trace = REFERENCES / "traces" / "tt1-llama-2l-traced.0.json.gz"
    run = REFERENCES / "measured" / "tt1-llama-2l-traced.yaml"
    result = cli("attribute", str(trace), str(run))
    assert result.returncode == 0, result.stderr
    assert "matrix products" in result.stdout
    assert "waiting for the host" in result.stdout
    found = json.loads(cli("attribute", str(trace), str(run), "--json").stdout)
    assert found["predicted_step_s"] == pytest.approx(found["measured_step_s"], rel=0.25)
    missing = cli("attribute", "none.json", str(run))
    assert missing.returncode == 2
    assert "no such file" in one_line_of(missing.stderr)


def test_a_trace_of_another_run_is_refused(cli: Cli, tmp_path: Path) -> None:
    """By the name that mofa measure gives it; and a file of several runs, of which none is meant."""
    trace = REFERENCES / "traces" / "tt1-llama-2l-traced.0.json.gz"
    result = cli("attribute", str(trace), str(REFERENCES / "measured" / "tt1-llama-8l.yaml"))
    assert result.returncode == 2
    assert "is named after run tt1-llama-2l-traced, the run is tt1-llama-8l; name" in one_line_of(result.stderr)
    several = cli("attribute", str(trace), str(REFERENCES / "plans" / "eighth.yaml"))
    assert several.returncode == 2
    assert "holds 11 runs; name a file of one" in one_line_of(several.stderr)


SKEWED = ("mc2-tp2-granite3b-8l-skewed-traced", "tt2-ep2-qwen30b-4l-skewed-traced")
"""One whose steps load kernels, and one that has nothing of its host but the machine's speed."""


@pytest.mark.parametrize("name", SKEWED)
def test_a_record_has_one_prediction(cli: Cli, tmp_path: Path, name: str) -> None:
    """That of mofa validate, of its own host and its routers' counts: to the microsecond, by every command."""
    (tmp_path / "reference" / "measured").mkdir(parents=True)
    shutil.copy(REFERENCES / "hosts.yaml", tmp_path / "reference")
    (tmp_path / "reference" / "published").mkdir()
    record = Path(shutil.copy(REFERENCES / "measured" / f"{name}.yaml", tmp_path / "reference" / "measured"))
    validated = cli("validate", "--references", str(tmp_path / "reference"), "--group", "measured", "--json")
    (run,) = json.loads(validated.stdout)["runs"]
    expected = run["predicted_step_s"]
    estimated = json.loads(cli("estimate", str(record), "--json").stdout)
    trace = str(REFERENCES / "traces" / f"{name}.0.json.gz")
    attributed = json.loads(cli("attribute", trace, str(record), "--json").stdout)
    traced = cli("trace", str(record), "--out", "trace.json")
    other = json.loads((tmp_path / "trace.json").read_text())["otherData"]
    assert [estimated["step_s"], attributed["predicted_step_s"], other["step_s"]] == pytest.approx(
        [expected] * 3, abs=1e-9
    )
    for said in (estimated["notes"], attributed["notes"], [other["shown"]], [traced.stderr]):
        assert any("us an op, of its machine" in note for note in said)
        assert any("routing: the tokens that its own routers sent" in note for note in said)
    assert cli("attribute", trace, str(record)).stdout.count("routers sent") == 1
    assert not [note for note in estimated["notes"] if "counts of" in note]
    # as it was asked for, on the profile's host: what its plan says, and no record
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump(read_yaml(record)["run"]))
    planned = json.loads(cli("estimate", str(plan), "--json").stdout)
    assert planned["step_s"] < 0.98 * expected
    assert not any("routers" in note or note.startswith("host:") for note in planned["notes"])


def test_a_record_is_changed(cli: Cli) -> None:
    """What --set says of the host or the model comes before what was measured, and is told."""
    record = str(REFERENCES / "measured" / "tt2-ep2-qwen30b-4l-skewed-traced.yaml")
    for change, says in (
        ("workload.model.num_layers=3", "routing: as asked for, since --set changes it or the model"),
        ("workload.routing.s=1.2", "routing: zipf:1.2"),
        ('hardware.gpu.curves.host.eager_op_s="40 us"', "host: as --set says"),
        ("strategy.recompute=full", "host: 10.7 us an op"),
    ):
        estimated = cli("estimate", record, "--no-replay", "--json", "--set", change)
        assert estimated.returncode == 0, estimated.stderr
        assert any(note.startswith(says) for note in json.loads(estimated.stdout)["notes"]), change


def test_families_whose_errors_cancel_are_said() -> None:
    def attribution(**predicted_s: float) -> Attribution:
        families = tuple(
            FamilySeconds(family=name, kernels=1, measured_s=1.0, predicted_s=seconds)
            for name, seconds in predicted_s.items()
        )
        return Attribution(
            families=families, measured_step_s=10.0, predicted_step_s=10.0, recompute_s=0.0, bubble_s=0.0
        )

    text = cancelling_errors_text(attribution(gemm=1.5, attention=0.6, memory_bound=1.0))
    assert text.startswith("Errors of 4.0% of the step cancel: matrix products +5.0% against attention -4.0%.")
    assert cancelling_errors_text(attribution(gemm=1.5, attention=1.01)) == ""
    assert cancelling_errors_text(attribution(gemm=1.05, attention=0.95)) == ""
