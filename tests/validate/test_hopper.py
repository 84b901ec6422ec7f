"""The sets of published Hopper rows on Transformer Engine, and how the accuracy page shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mofa.report.hopper import hopper_section_lines
from mofa.validate.hopper import hopper_set_of_run
from mofa.validate.published import published_reference_runs
from mofa.validate.score import score_run
from mofa.validate.validation_report import RunNotScored, RunScore, ValidationReport

PUBLISHED = Path(__file__).parents[2] / "reference_runs" / "published"


@pytest.fixture(scope="module")
def scored() -> RunScore:
    """A dense row in fp8 on 8 H100."""
    references, _ = published_reference_runs(PUBLISHED)
    return score_run(next(reference for reference in references if reference.id == "nemo-005"))


def _row(scored: RunScore, **changes: Any) -> RunScore:
    return scored.model_copy(update=changes)


def test_columns_and_switches_say_which_set_a_row_is_in(scored: RunScore) -> None:
    assert scored.library == "transformer-engine" and scored.gemm == "fp8-delayed"
    for changes, wanted in (
        ({}, "dense fp8"),
        ({"gemm": "bf16"}, "dense bf16"),
        ({"has_experts": True}, "with experts"),
        ({"switches": ("tp_overlap",)}, None),
        ({"switches": ("layout",)}, None),
        ({"gpu": "b200"}, None),
        ({"library": None}, None),
        ({"group": "measured-te-judging"}, None),
        ({"group": "published-nemo-by-rule-default-recompute"}, None),
        ({"step_time": None}, None),
    ):
        assert hopper_set_of_run(_row(scored, **changes)) == wanted


def test_the_error_says_nothing_of_the_set(scored: RunScore) -> None:
    assert scored.step_time is not None
    far_off = scored.step_time.model_copy(update={"error": 3.0})
    assert hopper_set_of_run(_row(scored, step_time=far_off)) == hopper_set_of_run(scored)


def test_the_section_has_every_row_once_and_why_others_are_in_none(scored: RunScore) -> None:
    assert scored.step_time is not None
    few = scored.step_time.model_copy(update={"error": -0.2})
    runs = (
        scored, _row(scored, id="bridge-1", has_experts=True, step_time=few),
        _row(scored, id="nemo-2", switches=("tp_overlap",)), _row(scored, id="b200-3", gpu="b200"),
        _row(scored, id="nemo-4", group="published-nemo-by-rule"),
    )  # fmt: skip
    out = (
        RunNotScored(id="nemo-9", group="published-nemo", reason="LoRA is not modelled", gpu="H100"),
        RunNotScored(id="nemo-8", group="published-nemo", reason="GPU has no profile: GB300", gpu="GB300"),
        RunNotScored(id="korth-7", group="published-korth", reason="no step", gpu="A100 80GB"),
    )
    report = ValidationReport(groups={}, false_fits=0, runs=runs, not_scored=out, elapsed_s=0)
    text = "\n".join(hopper_section_lines(report))
    assert "| dense fp8 | 1 |" in text and "each row 10%: NO" in text
    assert text.count("bridge-1") == 1 and "| with experts | 1 | – | – | -20.0 % |" in text
    assert "nemo-2" in text.partition("Not in a set")[2] and "user buffers" in text
    assert "nemo-4" in text.partition("Not in a set")[2] and "a rule fills" in text
    assert "nemo-9" in text and not any(name in text for name in ("b200-3", "nemo-8", "korth-7"))
    assert hopper_section_lines(report.model_copy(update={"runs": ()})) == []
