"""How accurate predictions are: a table of runs and one of groups, as text, Markdown, CSV and figures."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from mofa.report.chunked_layers import LAYER_WORDS, layer_tables
from mofa.report.hopper import hopper_section_lines
from mofa.report.phrases import component_name
from mofa.report.search_text import shares_text
from mofa.report.tables import Columns, markdown_table, print_paragraph, print_table
from mofa.units import GIB, format_seconds

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from mofa.validate.attribute import Attribution
    from mofa.validate.validation_report import Compared, Errors, RunScore, ValidationReport

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


def percent(value: float | None, *, signed: bool = False) -> str:
    """A fraction as percent; a dash where there is none.

    Examples
    --------
    >>> percent(0.0123), percent(-0.5, signed=True), percent(None)
    ('1.2 %', '-50.0 %', '–')
    """
    if value is None:
        return "–"
    return f"{value * 100:+.1f} %" if signed else f"{value * 100:.1f} %"


def run_cells(run: RunScore) -> list[str]:
    """One run as cells under RUN_COLUMNS."""

    def error(value: Compared | None) -> str:
        return percent(value.error, signed=True) if value else "–"

    step, allocated = run.step_time, run.peak_allocated
    return [
        run.id, f"{run.num_gpus} {run.gpu}", run.strategy,
        format_seconds(step.measured) if step else "–", format_seconds(run.predicted_step_s), error(step),
        f"{allocated.measured / GIB:.2f}" if allocated else "–",
        f"{allocated.predicted / GIB:.2f}" if allocated else "–", error(allocated),
        error(run.peak_reserved), error(run.peak_device), verdict_text(run), f"{run.weak_fraction:.0%}",
    ]  # fmt: skip


def verdict_text(run: RunScore) -> str:
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
                percent(step.error, signed=True) if step else "–", run.group, "; ".join(repeat.notes),
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


def group_rows(report: ValidationReport) -> list[list[str]]:
    """Rows under GROUP_COLUMNS: each group's quantities that some run says something of."""
    rows = []
    for name, group in report.groups.items():
        shown = name
        for field, words in FIELDS:
            errors: Errors = getattr(group, field)
            if not errors.runs:
                continue
            by_model = errors.mean_abs_error_by_model if name.partition("-")[0] != "measured" else None
            rows.append([
                shown, words, str(errors.runs), percent(errors.mean_abs_error), percent(errors.median_abs_error),
                percent(errors.worst_abs_error), percent(errors.bias, signed=True), percent(by_model),
                errors.worst_run or "",
            ])  # fmt: skip
            shown = ""
    return rows


def verdict_rows(report: ValidationReport) -> list[list[str]]:
    """One row a group: runs, those out of memory, wrong verdicts, weak share."""
    return [
        [
            name,
            str(g.runs),
            str(g.out_of_memory),
            str(g.false_fits),
            str(g.denied),
            str(g.false_misses),
            percent(g.weak_fraction),
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
        console, "Errors by group", GROUP_COLUMNS, group_rows(report), leaves=("median", "mean by model"),
        under="worst run",
    )  # fmt: skip
    rows = verdict_rows(report)
    print_table(
        console, "Verdicts by group", VERDICT_COLUMNS, rows, under="the steps rest on", names_under=True,
    )  # fmt: skip
    if report.bands:
        leaves = ("8 in 10 by chance", "70 to 90 %", "median band", "families", "fitted on", "median width")
        print_table(console, "Bands of steps", BAND_COLUMNS, band_rows(report), leaves=leaves)
    if report.scale:
        print_table(console, "Efficiency against scale", SCALE_COLUMNS, scale_rows(report), leaves=("source",))
    if report.layers:
        step = [abs(layer.step_time.error) for layer in report.layers]
        peak = [abs(layer.peak_allocated.error) for layer in report.layers if layer.peak_allocated]
        print_paragraph(
            console,
            f"{len(step)} MoE layers in token chunks: step {percent(fmean(step))}, "
            f"peak allocated {percent(fmean(peak) if peak else None)} (mean).",
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
(their GPU, their framework, so many nodes) have the smallest and the largest residual of all."""


def band_rows(report: ValidationReport) -> list[list[str]]:
    """Rows under BAND_COLUMNS: how often bands held, by group."""
    return [
        [
            item.group, str(item.fitted_runs), str(item.families), str(item.runs), percent(item.coverage),
            str(item.below), str(item.above),
            f"{percent(item.median_low, signed=True)} to {percent(item.median_high, signed=True)}",
            percent(item.median_width), " to ".join(map(percent, item.chance_interval)),
            ("yes" if item.meets_claim else "NO") if item.tested else "too few to say",
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


def scale_rows(report: ValidationReport) -> list[list[str]]:
    """Rows under SCALE_COLUMNS: every point of every series over numbers of GPUs."""
    rows = []
    for series in report.scale:
        measured, predicted = (series.efficiencies(predicted=which) for which in (False, True))
        for i, point in enumerate(series.points):
            name = [f"{series.model}, {series.gpu}", series.group.removeprefix("published-")] if i == 0 else ["", ""]
            last = i == len(series.points) - 1
            rows.append([
                *name, f"{point.num_gpus:,}", percent(measured[i]), percent(predicted[i]),
                percent(point.step_time.error, signed=True), f"{series.drift * 100:+.1f} points" if last else "",
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


README_GROUPS = (
    "measured-judging", "measured-fitting", "measured-h100", "measured-te-judging", "measured-te-fitting",
    "measured-exported", "measured-drawn", "all-published-hopper-bf16", "published-hopper-te-dense-bf16",
    "published-hopper-te-dense-fp8", "published-korth", "published-simumax", "all-published",
)  # fmt: skip
README_QUANTITIES = ("peak_allocated", "peak_reserved", "peak_device")
README_COLUMNS: Columns = (
    ("runs", "left"), ("step, mean / worst / bias", "right"), ("allocated, mean / worst", "right"),
    ("reserved", "right"), ("device", "right"), ("out of memory, said to fit", "right"),
    ("ran, said not to fit", "right"),
)  # fmt: skip
README_MARKERS = ("<!-- accuracy -->\n", "<!-- /accuracy -->")


def readme_table(report: ValidationReport) -> str:
    """The README's table: errors of a few groups, the step's with its sign too, and their wrong verdicts."""
    rows = []
    for name in README_GROUPS:
        if name in report.groups:
            group = report.groups[name]
            step = group.step_time
            errors = [getattr(group, quantity) for quantity in README_QUANTITIES]
            rows.append([
                f"{name} ({group.runs})",
                f"{percent(step.mean_abs_error)} / {percent(step.worst_abs_error)} / {percent(step.bias, signed=True)}",
                *(f"{percent(e.mean_abs_error)} / {percent(e.worst_abs_error)}" if e.runs else "–" for e in errors),
                f"{group.false_fits} of {group.out_of_memory}", str(group.false_misses),
            ])  # fmt: skip
    return markdown_table(README_COLUMNS, rows)


def with_readme_table(text: str, report: ValidationReport) -> str:
    """A page with the table between its markers made anew.

    Raises
    ------
    ValueError
        If the page has no markers.
    """
    begin, end = README_MARKERS
    before, opened, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not opened or not closed:
        raise ValueError(f"has no table to make anew; put {begin.strip()} and {end} on lines of their own")
    return f"{before}{begin}{readme_table(report)}\n{end}{after}"


def markdown_report(report: ValidationReport, references: Path | None = None) -> str:
    """``docs/accuracy.md``: the tables and a hash of what they rest on."""
    from mofa.validate.report_hash import inputs_hash
    from mofa.validate.score import MAX_PLAYED

    parts = [INTRODUCTION.format(
        runs=len(report.runs), left_out=len(report.not_scored), false_fits=report.false_fits,
        denied=sum(run.denied_by is not None for run in report.runs),
        closed=sum(not run.played_out for run in report.runs), limit=MAX_PLAYED,
    ), "## Errors by group", markdown_table(GROUP_COLUMNS, group_rows(report)), "## Verdicts",
        markdown_table(VERDICT_COLUMNS, verdict_rows(report))]  # fmt: skip
    if report.bands:
        parts += ["## Bands of steps", BAND_WORDS, markdown_table(BAND_COLUMNS, band_rows(report))]
    if report.scale:
        figure = f"![Efficiency of published runs against the number of GPUs]({SCALE_FIGURE.as_posix()})"
        table = markdown_table(SCALE_COLUMNS, scale_rows(report))
        parts += ["## Efficiency against scale", SCALE_WORDS, figure, table]
    parts += hopper_section_lines(report)
    for name in dict.fromkeys(run.group for run in report.runs):
        rows = [run_cells(run) for run in report.runs if run.group == name]
        parts += [f"## {name}", markdown_table(RUN_COLUMNS, rows)]
    if rows := repeat_rows(report):
        parts += ["## Repeats", REPEAT_WORDS, markdown_table(REPEAT_COLUMNS, rows)]
    if report.families:
        rows = [
            [name if i == 0 else "", *cells]
            for name, attribution in report.families.items()
            for i, cells in enumerate(attribution_rows(attribution))
        ]
        parts += ["## By family of kernels", FAMILY_WORDS, markdown_table((("run", "left"), *FAMILY_COLUMNS), rows)]
    if report.layers:
        parts += ["## Chunked MoE layer", LAYER_WORDS, *layer_tables(report.layers)]
    reasons: dict[str, list[str]] = {}
    for item in report.not_scored:
        reasons.setdefault(f"{item.group}: {item.reason}", []).append(item.id)
    parts += ["## Left out", "By a rule on a run's columns, before any prediction.",
              markdown_table((("group: reason", "left"), ("rows", "right")),
                             [[reason, str(len(ids))] for reason, ids in reasons.items()])]  # fmt: skip
    parts.append(f"<!-- inputs {inputs_hash(references)} -->")
    return "\n\n".join(parts) + "\n"


INTRODUCTION = """\
# How accurate predictions are

Written by `mofa validate --markdown docs/accuracy.md --readme README.md`; a test fails when it is stale. Each run is
predicted from its configuration by `mofa.estimate`; where routing is skewed, with the tokens per expert that its own
routers counted. Steps are played out, {closed} of more than {limit} passes are told by closed forms.

An error is predicted / measured − 1, of the step and of the memory of the
fullest rank. {runs} runs, {left_out} more left out by a rule on their columns. Said to fit, although they went out of
memory: {false_fits}. Where a table says of a run that it went out of memory, and by its own reading of another one, in
proportion to their layers, it takes less than its GPU has, one of the two is wrong: neither is used ({denied}, *denied*
below).

- `measured-judging` and `measured-fitting` are our own runs on H200 (see [measure.md](measure.md)). Facts and curves
  may be learned from the fitting half; the judging half only judges.
- `measured-h100` are our runs on H100, of which the planner knows its own kernels and collectives; whatever else was
  learned is the H200's, and all of them only judge; of their fitting half the bands of steps alone are learned.
- `measured-te-judging` and `measured-te-fitting` are our runs of Megatron-Core on Transformer Engine, most on H100,
  halved by their model: no judging run's model is in the fitting half.
- `measured-exported` are jobs that `mofa export` wrote and Megatron-LM's or torchtitan's own trainer ran, unedited
  (see [exported_jobs.md](evidence/exported_jobs.md)).
- `measured-drawn` are runs that nobody chose: each field was drawn at random, on two H200 (see
  [drawn_runs.md](evidence/drawn_runs.md)). They only judge.
- `measured-skewed` are those of both halves whose tokens fall unevenly on experts.
- `published-SOURCE` are rows of other people's tables (see [published.md](published.md)), which hang together within a
  source and model: *mean by model* averages within those first. Blank recomputation is the framework's default, in a
  group `-default-recompute`.
- *reserved* and *device* are the errors of the allocator's segments and of all memory of the device.
- Hosts of one kind differ by a factor of two in how fast they issue ops, which moves small steps as much. A run is
  predicted on its own host: every host time of the GPU's profile in proportion to what one small eager op took there.
  Calls of Transformer Engine's modules go by a small layer of it instead, where its ranks timed one (`layer_issues_s`).
- A small op's time is the mean of what was timed among a run's steps (`environment.host_issues_s`);
  in earlier records the median of what runs on as many GPUs of its machine measured right after
  their steps (`environment.host_issue_s`), else the run's own. Runs of before that was recorded take what their machine
  was learned to be from fitting runs alone (machines are told apart by the processor's name and cores), and where it
  has too few of those, the profile's. `python scripts/hosts.py` writes both to `reference_runs/hosts.yaml`.
- *weak* is the share of the predicted step that rests on assumed or extrapolated numbers. H200 and H100
  have measured profiles; the others' rest on datasheets and on curves transferred from them."""


SCALE_FIGURE = Path("figures") / "scale.png"
"""Beside the page that shows it."""


def page_figures(report: ValidationReport) -> dict[Path, bytes]:
    """Figures that :func:`markdown_report` shows, by their places beside the page."""
    from mofa.report.figures.scale import plot_scale
    from mofa.report.save import figure_files

    if not report.scale:
        return {}
    return {SCALE_FIGURE: figure_files("scale", plot_scale(report.scale))[SCALE_FIGURE.name]}


def save_validation(report: ValidationReport, directory: Path) -> list[Path]:
    """Write figures, the table of runs and the JSON."""
    from mofa.report.figures.accuracy_plot import plot_accuracy
    from mofa.report.figures.scale import plot_scale
    from mofa.report.save import csv_bytes, figure_files, write_files

    files = {
        "validate.json": (report.model_dump_json(indent=2) + "\n").encode(),
        "runs.csv": csv_bytes(runs_to_frame(report)),
    }
    for field, _ in FIELDS:
        if field != "peak_allocated_ranks" and any(getattr(run, field) is not None for run in report.runs):
            files |= figure_files(field, plot_accuracy(report.runs, field))
    if report.scale:
        files |= figure_files("scale", plot_scale(report.scale))
    return write_files(directory, files)


def print_attribution(attribution: Attribution, console: Console) -> None:
    """Print a profiled step beside its prediction, a line a family."""
    rows = attribution_rows(attribution)
    rows.append(["recomputation, predicted", "", "", format_seconds(attribution.recompute_s), ""])
    rows.append(["pipeline bubble, predicted", "", "", format_seconds(attribution.bubble_s), ""])
    error = attribution.predicted_step_s / attribution.measured_step_s - 1
    total = [format_seconds(attribution.measured_step_s), format_seconds(attribution.predicted_step_s), f"{error:+.1%}"]
    rows.append(["step", "", *total])
    print_table(console, "One step", FAMILY_COLUMNS, rows)
    if words := cancelling_text(attribution):
        print_paragraph(console, words)
    print_paragraph(console, FAMILY_WORDS)
    for note in attribution.notes:
        print_paragraph(console, f"- {note}", indent=2)


CANCELLING = 0.01
"""Errors of families that cancel are said from this share of the step on. [-]"""


def cancelling_text(given: Attribution) -> str:
    """Which families' errors hide others', in words; empty where errors have one sign or are small.

    What cancels is the smaller one of the sums of the families that are predicted too long and too short.
    """
    errors = {
        component_name(item.family): (item.predicted_s - item.measured_s) / given.measured_step_s
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


FAMILY_COLUMNS: Columns = (
    ("family", "left"), ("kernels", "right"), ("trace", "right"), ("predicted", "right"), ("of the step", "right"),
)  # fmt: skip
FAMILY_WORDS = (
    "Overlapped kernels are counted in full, in the trace as in the prediction; a profiled step is slower than "
    "others. What is recomputed is in the trace's families and apart in the prediction."
)


def attribution_rows(given: Attribution) -> list[list[str]]:
    """Rows under FAMILY_COLUMNS, one a family."""
    return [
        [
            component_name(item.family), str(item.kernels or ""), format_seconds(item.measured_s),
            format_seconds(item.predicted_s), f"{(item.predicted_s - item.measured_s) / given.measured_step_s:+.1%}",
        ]
        for item in given.families
    ]  # fmt: skip
