"""Published rows on Hopper that run Megatron-Core on Transformer Engine, as tables in Markdown."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from mofa.report.tables import Columns, markdown_table
from mofa.units import format_seconds

if TYPE_CHECKING:
    from mofa.validate.validation_report import RunScore, ValidationReport

COLUMNS: Columns = (
    ("set", "left"), ("run", "left"), ("model", "left"), ("GPUs", "right"), ("precision", "left"),
    ("strategy", "left"), ("step", "right"), ("predicted", "right"), ("error", "right"),
)  # fmt: skip
SUMMARY: Columns = (
    ("set", "left"), ("rows", "right"), ("mean", "right"), ("bias", "right"), ("worst", "right"), ("asked", "left"),
)  # fmt: skip
OUTSIDE_SETS: Columns = (
    ("run", "left"),
    ("model", "left"),
    ("error", "right"),
    ("why it is in no set", "left"),
)
LEFT_OUT: Columns = (("reason", "left"), ("rows", "left"))
WORDS = """\
Megatron-Core on Transformer Engine, from the tables of others; what their recipes say is in
[published.md](published.md). A row is in a set by its columns and its recipe alone: dense in bf16, dense in fp8, or
with experts. Rows with a switch that our own runs on Transformer Engine never had are in none. Of rows with experts
there are few: each stands for itself, and no mean is claimed."""


def hopper_section_lines(report: ValidationReport) -> list[str]:
    """The section: sums by set, every row of a set, rows with other switches, and rows that were not predicted."""
    from mofa.validate.hopper import SETS, hopper_set_of_run, is_hopper_row, why_in_no_hopper_set

    rows = [run for run in report.runs if is_hopper_row(run)]
    if not rows:
        return []
    members = {name: [run for run in rows if hopper_set_of_run(run) == name] for name in SETS}
    judged = [[name if i == 0 else "", *_cells(run)] for name in SETS for i, run in enumerate(members[name])]
    left_out = [
        [run.id, run.model, _percent(_error(run)), why_in_no_hopper_set(run)]
        for run in rows
        if hopper_set_of_run(run) is None
    ]
    return [
        "## Published Hopper rows on Transformer Engine", WORDS,
        markdown_table(SUMMARY, [_summary(name, runs) for name, runs in members.items() if runs]),
        markdown_table(COLUMNS, judged),
        "Not in a set, each with the switch that keeps it out:", markdown_table(OUTSIDE_SETS, left_out),
        "Not predicted, by a rule on their columns:", markdown_table(LEFT_OUT, _left_out(report)),
    ]  # fmt: skip


def _error(run: RunScore) -> float:
    assert run.step_time is not None
    return run.step_time.error


def _percent(value: float) -> str:
    return f"{value * 100:+.1f} %"


def _cells(run: RunScore) -> list[str]:
    step = run.step_time
    assert step is not None
    return [
        run.id, run.model, f"{run.num_gpus} {run.gpu}", run.gemm, run.strategy, format_seconds(step.measured),
        format_seconds(step.predicted), _percent(step.error),
    ]  # fmt: skip


def _summary(name: str, runs: list[RunScore]) -> list[str]:
    from mofa.validate.hopper import MEAN_AIM, ROW_AIM

    errors = [_error(run) for run in runs]
    worst = max(errors, key=abs)
    if name in ROW_AIM:
        within_aim = "yes" if abs(worst) <= ROW_AIM[name] else "NO"
        return [name, str(len(runs)), "–", "–", _percent(worst), f"each row {ROW_AIM[name]:.0%}: {within_aim}"]
    mean, aim = fmean(map(abs, errors)), MEAN_AIM[name]
    asked = f"mean {aim:.0%}: {'yes' if mean <= aim else 'NO'}"
    return [name, str(len(runs)), f"{mean * 100:.1f} %", _percent(fmean(errors)), _percent(worst), asked]


def _left_out(report: ValidationReport) -> list[list[str]]:
    """Hopper rows of the sources that were predicted from, by reason."""
    from mofa.validate.hopper import HOPPER, is_hopper_row

    sources = {run.source_name for run in report.runs if is_hopper_row(run)}
    reasons: dict[str, list[str]] = {}
    for item in report.not_scored:
        if item.group in sources and item.gpu and item.gpu.lower().startswith(HOPPER):
            reasons.setdefault(item.reason, []).append(item.id)
    return [[reason, ", ".join(ids)] for reason, ids in reasons.items()]
