"""docs/accuracy.md is not stale: its inputs are those of today, and ten runs predicted anew say what it says."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from mofa.report.accuracy import run_cells
from mofa.validate.run import reference_dir, references
from mofa.validate.score import score_run
from mofa.validate.stale import inputs_hash

TEXT = (Path(__file__).parents[2] / "docs" / "accuracy.md").read_text(encoding="utf-8")
COMMAND = "mofa validate --markdown docs/accuracy.md"


def test_its_inputs_are_those_of_today() -> None:
    assert f"<!-- inputs {inputs_hash()} -->" in TEXT, f"docs/accuracy.md is stale; run {COMMAND}"


def test_ten_runs_predicted_anew(tmp_path: Path) -> None:
    found, left_out = references(reference_dir(), tmp_path)
    assert f"{len(found)} runs, {len(left_out)} more left out" in TEXT
    chosen = sorted(found, key=lambda reference: hashlib.sha256(reference.id.encode()).hexdigest())[:10]
    for reference in chosen:
        row = "| " + " | ".join(run_cells(score_run(reference))) + " |"
        assert row in TEXT, f"docs/accuracy.md is stale at {reference.id}; run {COMMAND}"


@pytest.mark.parametrize("group", ["measured-judging", "measured-fitting", "published-korth", "published-bloom"])
def test_every_group_has_its_table(group: str) -> None:
    assert f"\n## {group}\n" in TEXT
    assert re.search(rf"\| {group} \| step time \| \d+ \|", TEXT)
