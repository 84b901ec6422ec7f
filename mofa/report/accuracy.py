"""How accurate predictions are: tables of runs, groups, verdicts, bands and scales, printed or as a frame."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from mofa.report.search_text import shares_text
from mofa.report.tables import Columns, print_paragraph, print_table
from mofa.units import GIB, format_seconds

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from mofa.validate.validation_report import ComparedQuantity, QuantityErrors, RunScore, ValidationReport

RUN_COLUMNS: Columns = (
    ("run", "left"), ("GPUs", "right"), ("strategy", "left"), ("step", "right"), ("predicted", "right"),
    ("error", "right"), ("allocated GiB", "right"), ("predicted", "right"), ("error", "right"), ("reserved", "right"),
    ("device", "right"), ("verdict", "left"), ("weak", "right"),
)  # fmt: skip
_HEADINGS_ALONE = {4: "predicted step", 5: "step error", 7: "predicted GiB", 8: "allocated error"}
TERMINAL_RUN_COLUMNS: Columns = tuple(
    (_HEADINGS_ALONE.get(c, name), side) for c, (name, side) in enumerate(RUN_COLUMNS)
)
"""RUN_COLUMNS whose headings say what they are of where the column before them has left."""
RUN_COLUMNS_LEAVE = (12, 9, 10, 7, 6, 1, 4)
"""Numbers of the columns that a narrow terminal leaves out, first things first."""
GROUP_COLUMNS: Columns = (
    ("group", "left"), ("quantity", "left"), ("runs", "right"), ("mean", "right"), ("median", "right"),
    ("worst", "right"), ("bias", "right"), ("mean by model", "right"), ("worst run", "left"),
)  # fmt: skip
FIELDS = (
    ("step_time", "step time"), ("peak_allocated", "peak allocated"), ("peak_allocated_ranks", "every rank"),
    ("peak_reserved", "peak reserved"), ("peak_device", "peak device"),
)  # fmt: skip
WEAK_WORDS = "weak is the share of the predicted step that rests on assumed or extrapolated numbers"


def as_percent(value: float | None, *, signed: bool = False) -> str:
    """A fraction as percent; a dash where there is none.

    Examples
    --------
    >>> as_percent(0.0123), as_percent(-0.5, signed=True), as_percent(None)
    ('1.2 %', '-50.0 %', '–')
    """
    if value is None:
        return "–"
    return f"{value * 100:+.1f} %" if signed else f"{value * 100:.1f} %"


def run_cells(run: RunScore) -> list[str]:
    """One run as cells under RUN_COLUMNS."""

    def error(value: ComparedQuantity | None) -> str:
        return as_percent(value.error, signed=True) if value else "–"

    step, allocated = run.step_time, run.peak_allocated
    return [
        run.id, f"{run.num_gpus} {run.gpu}", run.strategy,
        format_seconds(step.measured) if step else "–", format_seconds(run.predicted_step_s), error(step),
        f"{allocated.measured / GIB:.2f}" if allocated else "–",
        f"{allocated.predicted / GIB:.2f}" if allocated else "–", error(allocated),
        error(run.peak_reserved), error(run.peak_device), memory_verdict_text(run), f"{run.weak_fraction:.0%}",
    ]  # fmt: skip


def memory_verdict_text(run: RunScore) -> str:
    """What was predicted of the memory and what came."""
    said = "fits" if run.fits else "does not fit"
    if run.false_fit:
        return "FALSE: said to fit, went out of memory"
    if run.false_miss:
        return "said not to fit, ran"
    denied = f", which {run.denied_by} denies" if run.denied_by else ""
    return f"{said}, out of memory{denied}" if run.out_of_memory else said


def repeat_rows(report: ValidationReport) -> list[list[str]]:
    """Rows under REPEAT_COLUMNS: every measurement of a configuration that was measured several times."""
    rows = []
    for run in report.runs:
        for repeat in run.repeats:
            step = repeat.step_time
            rows.append([
                repeat.id, "the profile's" if repeat.host_op_s is None else format_seconds(repeat.host_op_s),
                format_seconds(step.measured) if step else "–", format_seconds(step.predicted) if step else "–",
                as_percent(step.error, signed=True) if step else "–", run.group, "; ".join(repeat.notes),
            ])  # fmt: skip
    return rows


REPEAT_COLUMNS: Columns = (
    ("run", "left"), ("an op of its host", "right"), ("step", "right"), ("predicted", "right"), ("error", "right"),
    ("group", "left"), ("notes", "left"),
)  # fmt: skip
REPEAT_WORDS = """\
Every measurement of a configuration that was measured several times, each predicted on its own host and with its own
tokens. The tables above have such a configuration once, with the median of what was measured and the median of the
errors."""


def error_rows_of_groups(report: ValidationReport) -> list[list[str]]:
    """Rows of errors under GROUP_COLUMNS: each group's quantities that some run says something of."""
    rows = []
    for name, group in report.groups.items():
        shown = name
        for field, words in FIELDS:
            errors: QuantityErrors = getattr(group, field)
            if not errors.runs:
                continue
            by_model = errors.mean_abs_error_by_model if name.partition("-")[0] != "measured" else None
            rows.append([
                shown, words, str(errors.runs), as_percent(errors.mean_abs_error),
                as_percent(errors.median_abs_error),
                as_percent(errors.worst_abs_error), as_percent(errors.bias, signed=True),
                as_percent(by_model),
                errors.worst_run or "",
            ])  # fmt: skip
            shown = ""
    return rows


def memory_verdict_rows(report: ValidationReport) -> list[list[str]]:
    """One row a group: runs, those out of memory, wrong verdicts, weak share."""
    return [
        [
            name,
            str(g.runs),
            str(g.out_of_memory),
            str(g.false_fits),
            str(g.denied),
            str(g.false_misses),
            as_percent(g.weak_fraction),
            shares_text({name: share for name, share in g.provenance.items() if share >= 0.005}),
        ]
        for name, g in report.groups.items()
    ]


VERDICT_COLUMNS: Columns = (
    ("group", "left"), ("runs", "right"), ("out of memory", "right"), ("of them said to fit", "right"),
    ("denied", "right"), ("ran, said not to fit", "right"), ("weak", "right"), ("the steps rest on", "left"),
)  # fmt: skip


def print_validation(report: ValidationReport, console: Console, *, quiet: bool = False) -> None:
    """Print every run, then every group.

    Parameters
    ----------
    report
        What was scored.
    console
        Where to.
    quiet
        Only the tables of groups.
    """
    if not quiet:
        groups = list(dict.fromkeys(run.group for run in report.runs))
        for name in groups:
            rows = [run_cells(run) for run in report.runs if run.group == name]
            print_table(console, name, TERMINAL_RUN_COLUMNS, rows, leaves=RUN_COLUMNS_LEAVE, under="strategy")
        if rows := repeat_rows(report):
            print_table(console, "Repeats", REPEAT_COLUMNS, rows, leaves=("group", "predicted"), under="notes")
        print_paragraph(console, f"{WEAK_WORDS}.\n")
    print_table(
        console, "Errors by group", GROUP_COLUMNS, error_rows_of_groups(report), leaves=("median", "mean by model"),
        under="worst run",
    )  # fmt: skip
    rows = memory_verdict_rows(report)
    print_table(
        console, "Verdicts by group", VERDICT_COLUMNS, rows, under="the steps rest on", names_under=True,
    )  # fmt: skip
    if report.bands:
        leaves = ("8 in 10 by chance", "70 to 90 %", "median band", "families", "fitted on", "median width")
        print_table(console, "Bands of steps", BAND_COLUMNS, band_rows(report), leaves=leaves)
    if report.scale:
        print_table(
            console, "Efficiency against scale", SCALE_COLUMNS, scaling_efficiency_rows(report), leaves=("source",)
        )
    if report.layers:
        step = [abs(layer.step_time.error) for layer in report.layers]
        peak = [abs(layer.peak_allocated.error) for layer in report.layers if layer.peak_allocated]
        print_paragraph(
            console,
            f"{len(step)} MoE layers in token chunks: step {as_percent(fmean(step))}, "
            f"peak allocated {as_percent(fmean(peak) if peak else None)} (mean).",
        )
    if not quiet:
        print_paragraph(
            console,
            f"{len(report.runs)} runs predicted in {report.elapsed_s:.1f} s, {len(report.not_scored)} left out by a "
            f"rule, {report.false_fits} out of memory but said to fit.",
        )


BAND_COLUMNS: Columns = (
    ("runs alike in", "left"), ("fitted on", "right"), ("families", "right"), ("tested on", "right"),
    ("inside", "right"), ("faster", "right"), ("slower", "right"), ("median band", "right"),
    ("median width", "right"), ("8 in 10 by chance", "right"), ("70 to 90 %", "left"),
)  # fmt: skip
BAND_WORDS = """\
The band of a step is where 8 in 10 runs like it would lie. It is fitted on the fitting halves and tested here on the
judging ones, of ours and of published runs; runs of one source and model (a family) are in one half.

Groups of fewer
than 20 tested runs are pooled with those next wider; each run keeps the band of its own group. *inside* should be 70 to
90 % where 20 runs or more say; between the shares under *8 in 10 by chance* lie 95 of 100 tests of bands that hold 8 in
10, were so many runs independent. *median band* is over the predicted step. Runs of which something was never measured
(their GPU, their framework, so many nodes) have the smallest and the largest residual of all.

They are wide and say so; no share is claimed of them. Of rows that leave recomputation blank, a residual is of the
guess as much as of the model: they count only where fewer than nine others have their nodes and layers. Of others no
band is fitted, and none is claimed. The last two lines say how often such steps lie inside all the same."""


def band_rows(report: ValidationReport) -> list[list[str]]:
    """Rows under BAND_COLUMNS: how often bands held, by group."""
    return [
        [
            item.group, str(item.fitted_runs), str(item.families), str(item.runs),
            as_percent(item.share_inside_bands),
            str(item.below), str(item.above),
            f"{as_percent(item.median_low, signed=True)} to {as_percent(item.median_high, signed=True)}",
            as_percent(item.median_width), " to ".join(map(as_percent,
            item.chance_interval_of_share)),
            item.verdict_text,
        ]
        for item in report.bands
    ]  # fmt: skip


SCALE_COLUMNS: Columns = (
    ("model", "left"), ("source", "left"), ("GPUs", "right"), ("measured", "right"), ("predicted", "right"),
    ("step error", "right"), ("drift", "right"),
)  # fmt: skip
SCALE_WORDS = """\
Published runs that differ in the number of GPUs alone, with as many sequences a GPU or as many in all. The rate of a
GPU is over that on the fewest GPUs of the series. *drift* is the error of the step on the most GPUs less that on the
fewest: what is not known of scale, whatever else is off."""


def scaling_efficiency_rows(report: ValidationReport) -> list[list[str]]:
    """Rows under SCALE_COLUMNS: every point of every series over numbers of GPUs."""
    rows = []
    for series in report.scale:
        measured, predicted = (series.scaling_efficiencies(predicted=which) for which in (False, True))
        for i, point in enumerate(series.points):
            name = [f"{series.model}, {series.gpu}", series.group.removeprefix("published-")] if i == 0 else ["", ""]
            last = i == len(series.points) - 1
            rows.append([
                *name, f"{point.num_gpus:,}", as_percent(measured[i]), as_percent(predicted[i]),
                as_percent(point.step_time.error, signed=True),
                f"{series.step_error_drift * 100:+.1f} points" if last else "",
            ])  # fmt: skip
    return rows


def runs_to_frame(report: ValidationReport) -> pd.DataFrame:
    """One row a run: identity, measured, predicted and error of each quantity."""
    import pandas as pd

    rows = []
    for run in report.runs:
        row = run.model_dump(include={"id", "group", "model", "gpu", "num_gpus", "framework", "strategy", "fits"})
        row["out_of_memory"], row["weak_fraction"] = run.out_of_memory, run.weak_fraction
        for field, _ in FIELDS:
            value = getattr(run, field, None)
            if value is not None:
                row |= {f"{field}_{key}": number for key, number in value.model_dump().items()}
        row |= {f"exposed_{name}_s": value for name, value in run.exposed.items()}
        rows.append(row)
    return pd.DataFrame(rows)
