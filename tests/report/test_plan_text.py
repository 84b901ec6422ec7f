"""Text reports: what the issue asks to be printed is there, and a pipe gets plain text."""

from __future__ import annotations

import io

from mofa.report.plan_text import print_estimate, print_plan_report
from mofa.report.tables import make_console
from tests.report.fake import make_estimate, make_report


def _report_text(num_plans: int = 3, *, quiet: bool = False) -> str:
    file = io.StringIO()
    print_plan_report(make_report(num_plans), make_console(file), quiet=quiet)
    return file.getvalue()


def test_a_report_says_what_was_found_and_why_the_others_fell() -> None:
    text = _report_text()
    for words in (
        "tp=2 sp=true pp=4 ep=8 etp=1 dp=8 micro_batch=1 zero=1 recompute=selective",
        "8.00 s",
        "2,048.0",
        "125.0",
        "12.5%",
        "70.00",
        "88.3",
        "Where the step of the best plan goes",
        "pipeline bubble",
        "What fills the memory",
        "allocator slack",
        "1,000 strategies",
        "costed 600",
        "3 that fit",
        "batch is not divisible",
        "3.10 GiB",
        "assumed 75.0 %",
        "efficiencies of toy are assumed",
        "Defaults",
        "causal attention halved",
    ):
        assert words in text, words


def test_where_nothing_fits_the_reasons_and_the_gpus_that_would_do_are_said() -> None:
    text = _report_text(0)
    assert "Nothing fits." in text
    assert "smallest number of GPUs that would do: 128 (over whole nodes)" in text
    assert "memory" in text
    assert "3.10 GiB" in text


def test_a_pipe_gets_no_colour_and_one_line_per_plan() -> None:
    text = _report_text()
    assert "\x1b" not in text
    lines = [line for line in text.splitlines() if "recompute=selective" in line and "GiB" not in line]
    assert len(lines) == 3


def test_quiet_is_the_plans_alone() -> None:
    text = _report_text(quiet=True)
    assert len(text.splitlines()) == 6
    assert "Defaults" not in text


def test_an_estimate_that_is_too_big_says_by_how_much() -> None:
    file = io.StringIO()
    print_estimate(make_estimate("a-run", 100.0), make_console(file))
    text = file.getvalue()
    assert "a-run" in text
    assert "Does not fit: 23.27 GiB over the limit" in text  # 100 - 0.97 * 79.1
    assert "Memory per pipeline stage" in text
