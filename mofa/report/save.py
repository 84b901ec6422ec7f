"""Results into files. Every file is written beside its place and renamed into it, so none is ever half there."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mofa.specs.shown_text import escape_invisible, escape_spreadsheet_formula
from mofa.specs.write_files import all_files_or_none, make_directory
from mofa.specs.write_files import check_writable as check_writable
from mofa.specs.write_files import write_file_atomically as write_file_atomically

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from mofa.plan.result import Estimate, Plan, PlanReport
    from mofa.replay.time.time_replayed import ReplayedTime
    from mofa.report.page.facts import ReportFacts

MAX_STAGE_FIGURES = 10
MAX_STAGE_CURVES = 4


def write_table(path: Path, table: pd.DataFrame) -> None:
    """Write a table as CSV."""
    write_file_atomically(path, csv_bytes(table))


def save_plan_report(
    report: PlanReport, directory: Path, table: pd.DataFrame | None = None, page: ReportFacts | None = None
) -> list[Path]:
    """Write the figures and tables of a search, and its report as one HTML page and as Markdown.

    Parameters
    ----------
    report
        What the search found.
    directory
        Where to; made if absent.
    table
        Every costed strategy with the columns ``device_bytes`` [B], ``tokens_per_s_per_gpu`` [tokens/s] and,
        unless all do, ``fits``; without it there is no Pareto figure.
    page
        What the report is about; without it there is none.

    Returns
    -------
    list[Path]
        The files.
    """
    from mofa.report.figures.pareto import plot_pareto

    files = {"plan.json": (json_text(report) + "\n").encode()}
    files["rejected.csv"] = csv_bytes(report.rejected_to_frame())
    if report.plans:
        files["plans.csv"] = csv_bytes(report.to_frame(all=True))
    if table is not None:
        feasible = with_replayed_rows(
            table[table["fits"].astype(bool)] if "fits" in table.columns else table, report.plans
        )
        files["feasible.csv"] = csv_bytes(feasible)
        if report.plans and len(feasible):
            best = report.plans[0]
            memory = best.memory
            axes = plot_pareto(
                feasible, capacity_bytes=memory.capacity_bytes, margin_bytes=memory.margin_bytes, chosen=best
            )
            files |= figure_files("pareto", axes)
    if report.plans:
        files |= _breakdowns(report.plans, None, num_stage_figures=1)
    if page is not None:
        from mofa.report.page.images import report_figure_axes
        from mofa.report.page.write import report_files

        for name, axes in report_figure_axes(page).items():
            files |= figure_files(name, axes)
        files |= report_files(page, tuple(files))
    return write_files(directory, files)


PLAYED = ("step_s", "tokens_per_s_per_gpu", "allocated_bytes", "device_bytes")
"""What a plan that was played out says otherwise than its closed form."""


def with_replayed_rows(table: pd.DataFrame, plans: Sequence[Plan]) -> pd.DataFrame:
    """Costed strategies with a column ``costed_by``, those of the plans that were played out with what that said.

    Parameters
    ----------
    table
        A row for each strategy, with columns of its degrees.
    plans
        The best of them, in closed form or played out.

    Returns
    -------
    pd.DataFrame
        The table, with a column more.
    """
    out = table.assign(costed_by="closed_form")
    keys = [name for name in plans[0].strategy.model_dump() if name in table.columns] if plans else []
    if not keys:
        return out
    place = {row: i for i, row in enumerate(zip(*(out[name].tolist() for name in keys), strict=True))}
    columns = {name: out[name].tolist() for name in (*PLAYED, "mfu", "costed_by") if name in out.columns}
    for plan in plans:
        place_of_plan = place.get(tuple(plan.strategy.model_dump()[name] for name in keys))
        if place_of_plan is None or plan.costed_by != "replay":
            continue
        values = plan.to_row()
        if "mfu" in columns:  # whose FLOPs are counted is the table's affair
            columns["mfu"][place_of_plan] *= plan.tokens_per_s_per_gpu / columns["tokens_per_s_per_gpu"][place_of_plan]
        for name in columns.keys() - {"mfu"}:
            columns[name][place_of_plan] = values[name]
    return out.assign(**columns)


def json_text(result: Plan | PlanReport) -> str:
    """A result as indented JSON, with arrays of numbers on one line.

    Examples
    --------
    >>> _NUMBERS.sub(_on_one_line, "[\\n  1.5,\\n  -2e9\\n]")
    '[1.5,-2e9]'
    """
    return _NUMBERS.sub(_on_one_line, result.model_dump_json(indent=2))


_NUMBERS = re.compile(r"\[\s*(?:-?\d[-+.eE\d]*,\s*)+-?\d[-+.eE\d]*\s*\]")


def _on_one_line(numbers: re.Match[str]) -> str:
    return "".join(numbers.group().split())


def estimates_json(estimates: Sequence[Estimate]) -> str:
    """Estimates as JSON text: one as an object, several as a list."""
    texts = [json_text(estimate) for estimate in estimates]
    return texts[0] + "\n" if len(texts) == 1 else "[" + ",\n".join(texts) + "]\n"


def save_estimates(
    estimates: Sequence[Estimate], directory: Path, steps: Sequence[ReplayedTime] = ()
) -> list[Path]:  # fmt: skip
    """Write the figures and tables of estimates; ``steps`` are their played steps, for the pipelines' charts.

    Returns
    -------
    list[Path]
        The files.
    """
    from mofa.plan.result import plans_to_frame

    files = {"estimate.json": estimates_json(estimates).encode(), "plans.csv": csv_bytes(plans_to_frame(estimates))}
    labels = [e.id for e in estimates if e.id is not None]
    files |= _breakdowns(
        estimates, labels if len(labels) == len(estimates) else None, num_stage_figures=MAX_STAGE_FIGURES
    )
    files |= _pipelines(estimates, steps)
    return write_files(directory, files)


def _pipelines(estimates: Sequence[Estimate], steps: Sequence[ReplayedTime]) -> dict[str, bytes]:
    """A chart of each pipeline, and a table of where each stage's time goes."""
    import pandas as pd

    from mofa.report.figures.gantt import plot_pipeline

    files: dict[str, bytes] = {}
    keys = [e.id if e.id is not None else str(i) for i, e in enumerate(estimates, start=1)]
    for i, (key, step) in enumerate(list(zip(keys, steps, strict=False))[:MAX_STAGE_FIGURES]):
        axes = plot_pipeline(step, label=key if estimates[i].id is not None else None)
        files |= figure_files("pipeline" if i == 0 else f"pipeline_{key}", axes)
    tables = {key: e.time.stages_to_frame() for key, e in zip(keys, estimates, strict=True) if e.time.by_stage}
    if tables:
        stacked = pd.concat(tables, names=["plan", "row"]).reset_index("plan")
        files["stage_times.csv"] = csv_bytes(stacked.fillna(0.0))
    return files


def save_calibration(report: Mapping[str, Any], points: Sequence[Mapping[str, Any]], directory: Path) -> list[Path]:
    """Write how well fitted curves predict what was measured.

    Parameters
    ----------
    report
        Errors per family, as :func:`mofa.calibrate.check.fit_errors_on_held_out_rows` gives them.
    points
        Every predicted row, as :func:`mofa.calibrate.check.rows_with_predicted_times` gives them.
    directory
        Where to; made if absent.

    Returns
    -------
    list[Path]
        The files: ``check.json``, ``points.csv`` and a figure per family.
    """
    import pandas as pd

    from mofa.report.figures.calibration import plot_calibration

    files = {"check.json": (json.dumps(report, indent=2, allow_nan=False) + "\n").encode()}
    files["points.csv"] = csv_bytes(pd.DataFrame(list(points)))
    for family in sorted({str(point["family"]) for point in points}):
        files |= figure_files(family, plot_calibration(points, family))
    return write_files(directory, files)


def _breakdowns(plans: Sequence[Plan], labels: Sequence[str] | None, num_stage_figures: int) -> dict[str, bytes]:
    """Figures and tables of where the time and the memory of plans go."""
    import pandas as pd

    from mofa.report.figures.memory_breakdown import plot_memory_breakdown
    from mofa.report.figures.memory_over_time import plot_memory_over_time
    from mofa.report.figures.stage_memory import plot_stage_memory
    from mofa.report.figures.time_breakdown import plot_time_breakdown

    keys = list(labels) if labels is not None else [str(i) for i in range(1, len(plans) + 1)]
    files = figure_files("time_breakdown", plot_time_breakdown(plans, labels=labels))
    files |= figure_files("memory_breakdown", plot_memory_breakdown(plans, labels=labels))
    staged = {key: plan for key, plan in zip(keys, plans, strict=True) if plan.memory.by_stage}
    for i, (key, plan) in enumerate(list(staged.items())[:num_stage_figures]):
        name = "stage_memory" if i == 0 else f"stage_memory_{key}"
        files |= figure_files(name, plot_stage_memory(plan, label=key if labels is not None else None))
    timed = {key: plan for key, plan in staged.items() if any(stage.curve for stage in plan.memory.by_stage)}
    for i, (key, plan) in enumerate(list(timed.items())[:num_stage_figures]):
        name = "memory_over_time" if i == 0 else f"memory_over_time_{key}"
        for stage in _shown(plan):
            ax = plot_memory_over_time(plan, stage, label=key if labels is not None else None)
            files |= figure_files(name if len(plan.memory.by_stage) == 1 else f"{name}_stage{stage}", ax)

    def stacked(tables: Mapping[str, pd.DataFrame]) -> bytes:
        return csv_bytes(pd.concat(tables, names=["plan", "row"]).reset_index("plan"))

    files["time.csv"] = stacked({key: plan.time.to_frame() for key, plan in zip(keys, plans, strict=True)})
    files["memory.csv"] = stacked({key: plan.memory.to_frame() for key, plan in zip(keys, plans, strict=True)})
    if staged:
        files["stages.csv"] = stacked({key: plan.memory.stages_to_frame() for key, plan in staged.items()})
    return files


def _shown(plan: Plan) -> list[int]:
    """The stages whose memory over time is drawn where it is known: all of a few, else the first, the fullest and the
    last."""
    stages = plan.memory.by_stage
    fullest = max(stages, key=lambda stage: stage.device_bytes).stage
    some = stages if len(stages) <= MAX_STAGE_CURVES else [stages[0], stages[fullest], stages[-1]]
    return sorted({stage.stage for stage in some if stage.curve is not None})


def figure_files(name: str, ax: Axes) -> dict[str, bytes]:
    """A figure as PNG and SVG, the same bytes for the same data."""
    import matplotlib as mpl
    from matplotlib.text import Text

    figure = ax.figure
    for text in figure.findobj(Text):  # names of users may hold what no drawing can
        text.set_text(escape_invisible(text.get_text(), lines=True))
    png, svg = io.BytesIO(), io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "mofa"}):
        figure.savefig(png, format="png", dpi=160, metadata={"Software": None})  # type: ignore[union-attr]
        figure.savefig(svg, format="svg", metadata={"Date": None})  # type: ignore[union-attr]
    return {f"{name}.png": png.getvalue(), f"{name}.svg": svg.getvalue()}


def csv_bytes(table: pd.DataFrame) -> bytes:
    """A table as CSV, in which no text of a user is a formula or acts on a terminal."""
    import pandas as pd

    texts = {name: _plain_cells(table[name]) for name in table.columns if table[name].dtype.kind in "OUS"}
    shown = table.copy(deep=False)
    for name, cells in texts.items():
        shown[name] = pd.Series(cells, index=shown.index, dtype=object)
    return shown.to_csv(index=False, lineterminator="\n").encode()


def _plain_cells(column: pd.Series) -> pd.Series:
    return column.map(
        lambda cell: escape_spreadsheet_formula(escape_invisible(cell)) if isinstance(cell, str) else cell
    )


def write_files(directory: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Write named files into a directory, made if absent."""
    make_directory(directory)
    with all_files_or_none():
        for name, content in files.items():
            write_file_atomically(directory / name, content)
    return [directory / name for name in files]
