"""The accuracy of predictions as files: ``docs/accuracy.md``, the README's table, figures and CSV."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mofa.report.accuracy import (
    BAND_COLUMNS,
    BAND_WORDS,
    FIELDS,
    GROUP_COLUMNS,
    REPEAT_COLUMNS,
    REPEAT_WORDS,
    RUN_COLUMNS,
    SCALE_COLUMNS,
    SCALE_WORDS,
    VERDICT_COLUMNS,
    as_percent,
    band_rows,
    error_rows_of_groups,
    memory_verdict_rows,
    repeat_rows,
    run_cells,
    runs_to_frame,
    scaling_efficiency_rows,
)
from mofa.report.attribution_text import FAMILY_COLUMNS, FAMILY_WORDS, attribution_rows
from mofa.report.chunked_layers import LAYER_WORDS, chunked_layer_tables
from mofa.report.hopper import hopper_section_lines
from mofa.report.tables import Columns, markdown_table

if TYPE_CHECKING:
    from mofa.validate.validation_report import ValidationReport

README_GROUPS = (
    "measured-judging", "measured-fitting", "measured-h100", "measured-te-judging", "measured-te-fitting",
    "measured-fsdp1-judging", "measured-exported", "measured-drawn", "measured-switches", "all-published-hopper-bf16",
    "published-hopper-te-dense-bf16", "published-hopper-te-dense-fp8", "published-korth", "published-simumax",
    "all-published",
)  # fmt: skip
README_QUANTITIES = ("peak_allocated", "peak_reserved", "peak_device")
README_COLUMNS: Columns = (
    ("runs", "left"), ("step, mean / worst / bias", "right"), ("allocated, mean / worst", "right"),
    ("reserved", "right"), ("device", "right"), ("out of memory, said to fit", "right"),
    ("ran, said not to fit", "right"),
)  # fmt: skip
README_MARKERS = ("<!-- accuracy -->\n", "<!-- /accuracy -->")


def readme_accuracy_table(report: ValidationReport) -> str:
    """The README's table: errors of a few groups, the step's with its sign too, and their wrong verdicts."""
    rows = []
    for name in README_GROUPS:
        if name in report.groups:
            group = report.groups[name]
            step = group.step_time
            errors = [getattr(group, quantity) for quantity in README_QUANTITIES]
            rows.append([
                f"{name} ({group.runs})",
                (
                    f"{as_percent(step.mean_abs_error)} / {as_percent(step.worst_abs_error)} / "
                    f"{as_percent(step.bias, signed=True)}"
                ),
                *(f"{as_percent(e.mean_abs_error)} / {as_percent(e.worst_abs_error)}" if e.runs
                else "–" for e in errors),
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
    return f"{before}{begin}{readme_accuracy_table(report)}\n{end}{after}"


def accuracy_page_markdown(report: ValidationReport, references: Path | None = None) -> str:
    """``docs/accuracy.md``: the tables and a hash of what they rest on."""
    from mofa.validate.report_hash import inputs_hash
    from mofa.validate.score import MAX_PLAYED

    parts = [INTRODUCTION.format(
        runs=len(report.runs), left_out=len(report.not_scored), false_fits=report.false_fits,
        denied=sum(run.denied_by is not None for run in report.runs),
        closed=sum(not run.played_out for run in report.runs), limit=MAX_PLAYED,
    ), "## Errors by group", markdown_table(GROUP_COLUMNS, error_rows_of_groups(report)), "## Verdicts",
        markdown_table(VERDICT_COLUMNS, memory_verdict_rows(report))]  # fmt: skip
    if report.bands:
        parts += ["## Bands of steps", BAND_WORDS, markdown_table(BAND_COLUMNS, band_rows(report))]
    if report.scale:
        figure = f"![Efficiency of published runs against the number of GPUs]({SCALE_FIGURE.as_posix()})"
        table = markdown_table(SCALE_COLUMNS, scaling_efficiency_rows(report))
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
        parts += ["## Chunked MoE layer", LAYER_WORDS, *chunked_layer_tables(report.layers)]
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
- `measured-fsdp1-judging` and `measured-fsdp1-fitting` are those of PyTorch's first FSDP on two H200, halved alike (see
  [fsdp1.md](evidence/fsdp1.md)).
- `measured-exported` are jobs that `mofa export` wrote and Megatron-LM's or torchtitan's own trainer ran, unedited
  (see [exported_jobs.md](evidence/exported_jobs.md)).
- `measured-drawn` are runs that nobody chose: each field was drawn at random, on two H200 (see
  [drawn_runs.md](evidence/drawn_runs.md)). They only judge.
- `measured-switches` are runs of Megatron-Core with [CUDA graphs](evidence/cuda_graphs.md), an optimizer
  [on hosts](evidence/optimizer_offload.md) or [activations](evidence/activation_offload.md) there, on one H200, and
  `measured-beside-switches` those beside them without. What graphs and offloaded activations reserve, and that tensors
  go to hosts whole, was read in the source after they ran. PyTorch's allocated memory lacks what graphs wrote, and is
  not compared.
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


def accuracy_page_figures(report: ValidationReport) -> dict[Path, bytes]:
    """Figures that :func:`accuracy_page_markdown` shows, by their places beside the page."""
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
