"""docs/accuracy.md is not stale: its inputs are those of today, and five runs predicted anew say what it says."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from mofa.cli.main import main
from mofa.report.accuracy import run_cells
from mofa.report.accuracy_page import README_GROUPS, README_MARKERS
from mofa.validate.all_runs import reference_dir, reference_runs
from mofa.validate.report_hash import inputs_hash
from mofa.validate.score import score_run

TEXT = (Path(__file__).parents[2] / "docs" / "accuracy.md").read_text(encoding="utf-8")
COMMAND = "mofa validate --markdown docs/accuracy.md --readme README.md"


def test_its_inputs_are_those_of_today() -> None:
    assert f"<!-- inputs {inputs_hash()} -->" in TEXT, f"docs/accuracy.md is stale; run {COMMAND}"


@pytest.mark.usefixtures("committed_records_read_once")
def test_five_runs_predicted_anew(tmp_path: Path) -> None:
    found, left_out = reference_runs(reference_dir(), tmp_path)
    assert f"{len(found)} runs, {len(left_out)} more left out" in TEXT
    chosen = sorted(found, key=lambda reference: hashlib.sha256(reference.id.encode()).hexdigest())[:5]
    for reference in chosen:
        row = "| " + " | ".join(run_cells(score_run(reference))) + " |"
        assert row in TEXT, f"docs/accuracy.md is stale at {reference.id}; run {COMMAND}"


@pytest.mark.parametrize(
    "group", ["measured-judging", "measured-fitting", "measured-drawn", "published-korth", "published-bloom"]
)
def test_every_group_has_its_table(group: str) -> None:
    assert f"\n## {group}\n" in TEXT
    assert re.search(rf"\| {group} \| step time \| \d+ \|", TEXT)


def test_the_readme_says_the_same() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    table = readme.split(README_MARKERS[0])[1].split(README_MARKERS[1])[0]
    errors: dict[tuple[str, str], str] = {}
    group = ""
    for line in TEXT.split("## Errors by group")[1].split("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 9:
            group = cells[0] or group
            bias = f" / {cells[6]}" if cells[1] == "step time" else ""
            errors[group, cells[1]] = f"{cells[3]} / {cells[5]}{bias}"
    verdicts = {
        cells[0]: [f"{cells[3]} of {cells[2]}", cells[5]]
        for line in TEXT.split("## Verdicts")[1].split("\n## ")[0].splitlines()
        if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 8
    }
    for name in README_GROUPS:
        row = next(line for line in table.splitlines() if line.startswith(f"| {name} ("))
        said = [cell.strip() for cell in row.strip("|").split("|")][1:]
        quantities = ("step time", "peak allocated", "peak reserved", "peak device")
        assert said == [*(errors.get((name, q), "–") for q in quantities), *verdicts[name]]


def test_a_page_without_markers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("no table\n")
    assert main(["validate", "--readme", str(page)]) == 2
    assert "has no table to make anew" in capsys.readouterr().err
    assert page.read_text() == "no table\n"
