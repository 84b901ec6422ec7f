"""A profiled step beside its prediction, by family of kernels: what ``mofa attribute`` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mofa.report.phrases import component_words
from mofa.report.tables import Columns, print_paragraph, print_table
from mofa.units import format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from mofa.validate.attribute import Attribution

FAMILY_COLUMNS: Columns = (
    ("family", "left"), ("kernels", "right"), ("trace", "right"), ("predicted", "right"), ("of the step", "right"),
)  # fmt: skip
FAMILY_WORDS = (
    "Overlapped kernels are counted in full, in the trace as in the prediction; a profiled step is slower than "
    "others. What is recomputed is in the trace's families and apart in the prediction."
)
CANCELLING = 0.01
"""Errors of families that cancel are said from this share of the step on. [-]"""


def print_attribution(attribution: Attribution, console: Console) -> None:
    """Print a profiled step beside its prediction, a line a family."""
    rows = attribution_rows(attribution)
    rows.append(["recomputation, predicted", "", "", format_seconds(attribution.recompute_s), ""])
    rows.append(["pipeline bubble, predicted", "", "", format_seconds(attribution.bubble_s), ""])
    if attribution.stragglers_s:
        rows.append(["waiting for stragglers, predicted", "", "", format_seconds(attribution.stragglers_s), ""])
    error = attribution.predicted_step_s / attribution.measured_step_s - 1
    total = [format_seconds(attribution.measured_step_s), format_seconds(attribution.predicted_step_s), f"{error:+.1%}"]
    rows.append(["step", "", *total])
    print_table(console, "One step", FAMILY_COLUMNS, rows)
    if words := cancelling_errors_text(attribution):
        print_paragraph(console, words)
    print_paragraph(console, FAMILY_WORDS)
    for note in attribution.notes:
        print_paragraph(console, f"- {note}", indent=2)


def cancelling_errors_text(given: Attribution) -> str:
    """Which families' errors hide others', in words; empty where errors have one sign or are small.

    What cancels is the smaller one of the sums of the families that are predicted too long and too short.
    """
    errors = {
        component_words(item.family): (item.predicted_s - item.measured_s) / given.measured_step_s
        for item in given.families
    }
    over = {name: error for name, error in errors.items() if error > 0}
    under = {name: error for name, error in errors.items() if error < 0}
    cancels = min(sum(over.values()), -sum(under.values()))
    if cancels < CANCELLING:
        return ""
    sides = [
        ", ".join(f"{name} {error:+.1%}" for name, error in sorted(side.items(), key=lambda x: -abs(x[1]))[:3])
        for side in (over, under)
    ]
    recomputed = " Recomputed kernels are in the trace's families alone." if given.recompute_s else ""
    return f"Errors of {cancels:.1%} of the step cancel: {sides[0]} against {sides[1]}.{recomputed}"


def attribution_rows(given: Attribution) -> list[list[str]]:
    """Rows under FAMILY_COLUMNS, one a family."""
    return [
        [
            component_words(item.family), str(item.kernels or ""), format_seconds(item.measured_s),
            format_seconds(item.predicted_s), f"{(item.predicted_s - item.measured_s) / given.measured_step_s:+.1%}",
        ]
        for item in given.families
    ]  # fmt: skip
