"""The points of a sweep for people: a table of them, and which is cheapest and which fastest for each job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from mofa.report.scales_text import ComparedChoice, run_price_text, verdict_of_choices
from mofa.report.tables import print_paragraph, print_table
from mofa.units import GIB, format_seconds

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

MOST_ROWS = 40
"""Points in the table at most; of more than these, the cheapest and the fastest of each job. [-]"""
MOST_REASONS = 5
"""Reasons why points have no plan that are told below a table of the best. [-]"""
JOB = ("model", "seq_len", "global_batch", "tokens", "routing", "faults", "price_case")
"""Columns that say what is trained, under which failures, and which of several prices is assumed."""
CHOICE = ("cluster", "framework", "num_gpus", "usd_per_gpu_hour")
"""Columns that say on what: of points with one job, some are better than others."""
_HEADINGS = {
    "model": ("model", "left"), "seq_len": ("sequence", "right"), "global_batch": ("batch", "right"),
    "tokens": ("tokens", "right"), "routing": ("routing", "left"), "faults": ("failures", "left"),
    "cluster": ("cluster", "left"), "framework": ("framework", "left"), "num_gpus": ("GPUs", "right"),
    "usd_per_gpu_hour": ("USD/h", "right"), "price_case": ("prices", "left"),
}  # fmt: skip

Row = dict[str, Any]
CostColumn = Literal["usd", "gpu_hours", "gpu_seconds_per_million_tokens"]


def rows_of_sweep(table: pd.DataFrame) -> list[Row]:
    """Rows of a sweep's table; what is missing is None."""
    names = [str(name) for name in table.columns]
    return [
        {name: None if _is_missing(value) else value for name, value in zip(names, values, strict=True)}
        for values in table.itertuples(index=False, name=None)
    ]


def _is_missing(value: object) -> bool:
    import pandas as pd

    return value is None or value is pd.NA or value != value


def differing_columns(rows: list[Row], names: tuple[str, ...]) -> list[str]:
    """The columns in which rows differ.

    Examples
    --------
    >>> differing_columns([{"num_gpus": 8, "model": "a"}, {"num_gpus": 16, "model": "a"}], ("model", "num_gpus"))
    ['num_gpus']
    """
    return [name for name in names if len({row[name] for row in rows}) > 1]


def label_value_text(name: str, value: Any) -> str:
    """A value of a label in words.

    Examples
    --------
    >>> label_value_text("num_gpus", 512), label_value_text("tokens", 15e12), label_value_text("cluster", "h100-hgx")
    ('512 GPUs', '15T tokens', 'h100-hgx')
    """
    if value is None:
        return ""
    if name == "tokens":
        return f"{_short(value)} tokens"
    forms = {
        "num_gpus": "{:,} GPUs", "global_batch": "batch {:,}", "seq_len": "sequences of {:,}",
        "usd_per_gpu_hour": "{:g} USD a GPU-hour", "price_case": "prices {}",
        "faults": "failures {}", "routing": "routing {}",
    }  # fmt: skip
    return forms.get(name, "{}").format(value)


def _short(tokens: float) -> str:
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if tokens >= scale:
            return f"{tokens / scale:g}{letter}"
    return f"{tokens:g}"


def jobs_of_sweep(rows: list[Row]) -> Iterator[list[Row]]:
    """Planned points of each job, in the order of the table."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["status"] == "planned":
            groups.setdefault(tuple(row[name] for name in JOB), []).append(row)
    yield from groups.values()


def cost_of_point(row: Row, name: str) -> float:
    """What is compared of a point: dollars, GPU-hours or GPU seconds a million tokens, by the column's name."""
    return float(row[name])


def cost_column(group: list[Row]) -> CostColumn:
    """The column by which points of a job are compared: the first that all of them have."""
    names: tuple[CostColumn, ...] = ("usd", "gpu_hours", "gpu_seconds_per_million_tokens")
    return next(name for name in names if all(row[name] is not None for row in group))


def choices_of_job(group: list[Row]) -> list[ComparedChoice]:
    """The points of a job as they are compared."""
    column = cost_column(group)
    named = ["num_gpus", *(name for name in differing_columns(group, CHOICE) if name != "num_gpus")]
    has_days = all(row["days"] is not None for row in group)
    return [
        ComparedChoice(
            ", ".join(label_value_text(name, row[name]) for name in named),
            run_price_text(row["days"], row["gpu_hours"], row["usd"]),
            cost_of_point(row, column),
            float(row["days"] if has_days else row["step_s"]),
        )
        for row in group
    ]


def print_sweep(table: pd.DataFrame, console: Console, *, quiet: bool = False) -> None:
    """Print the points, and for each job which is cheapest and which fastest.

    Parameters
    ----------
    table
        Of :func:`mofa.search.sweeps.run_sweep.sweep`.
    console
        Where to.
    quiet
        Only the table and the verdicts.
    """
    rows = rows_of_sweep(table)
    varying = differing_columns(rows, (*JOB, *CHOICE))
    if "price_case" in varying:  # says the same
        varying.remove("price_case")
    if not quiet:
        fixed = [label_value_text(name, rows[0][name]) for name in (*JOB[:-1], *CHOICE) if name not in varying]
        print_paragraph(console, f"{len(rows):,} points: {', '.join(text for text in fixed if text)}")
        console.print()
    groups = list(jobs_of_sweep(rows))
    shown = rows if len(rows) <= MOST_ROWS else list(_best_of_jobs(groups))
    if shown:
        title = "The best plan of each point" if shown is rows else "The cheapest and the fastest point of each job"
        _print_points(console, title, shown, varying or ["num_gpus"])
    if shown is not rows:
        _print_reasons(console, rows)
    label_names = differing_columns([group[0] for group in groups], JOB)
    for group in groups[:MOST_ROWS]:
        head = ", ".join(label_value_text(name, group[0][name]) for name in label_names)
        for line in verdict_of_choices(choices_of_job(group)):
            print_paragraph(console, f"{head}: {line[0].lower()}{line[1:]}" if head else line, indent=4)


def best_of_job(group: list[Row]) -> tuple[Row, Row]:
    """The cheapest and the fastest point of a job, which may be the same."""
    choices = choices_of_job(group)
    cheapest = min(range(len(group)), key=lambda i: choices[i].cost)
    fastest = min(range(len(group)), key=lambda i: choices[i].seconds)
    return group[cheapest], group[fastest]


def _best_of_jobs(groups: list[list[Row]]) -> Iterator[Row]:
    for group in groups[:MOST_ROWS]:
        cheapest, fastest = best_of_job(group)
        yield from (cheapest,) if cheapest is fastest else (cheapest, fastest)


def _print_points(console: Console, title: str, rows: list[Row], varying: list[str]) -> None:
    columns = [
        *(_HEADINGS[name] for name in varying), ("strategy", "left"), ("step", "right"), ("tokens/s/GPU", "right"),
        ("MFU", "right"), ("peak GiB", "right"), ("days", "right"), ("GPU-hours", "right"), ("USD", "right"),
    ]  # fmt: skip
    cells = [[*(_cell(name, row[name]) for name in varying), *_figures(row)] for row in rows]
    used = [c for c in range(len(columns)) if any(row[c] for row in cells)]
    print_table(
        console, title, [columns[c] for c in used], [[row[c] for c in used] for row in cells],
        leaves=("peak GiB", "MFU", "GPU-hours", "tokens/s/GPU"), under="strategy",
    )  # fmt: skip


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "tokens":
        return _short(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def _figures(row: Row) -> list[str]:
    if row["status"] != "planned":
        return [row["reason"], *[""] * 7]
    return [
        row["strategy"], format_seconds(row["step_s"]), f"{row['tokens_per_s_per_gpu']:,.1f}", f"{row['mfu']:.1%}",
        f"{row['device_bytes'] / GIB:.2f}",
        *("" if row[name] is None else form.format(row[name])
          for name, form in (("days", "{:,.1f}"), ("gpu_hours", "{:,.0f}"), ("usd", "{:,.0f}"))),
    ]  # fmt: skip


def _print_reasons(console: Console, rows: list[Row]) -> None:
    """Why points have no plan, the most frequent reasons first."""
    counts: dict[str, int] = {}
    for row in rows:
        if row["status"] != "planned":
            counts[row["reason"]] = counts.get(row["reason"], 0) + 1
    if not counts:
        return
    print_paragraph(console, f"{sum(counts.values()):,} points have no plan:")
    for reason, count in sorted(counts.items(), key=lambda item: -item[1])[:MOST_REASONS]:
        print_paragraph(console, f"{count:,}: {reason}", indent=4)
    if len(counts) > MOST_REASONS:
        print_paragraph(console, f"and {len(counts) - MOST_REASONS:,} reasons more, in the table's column reason")
    console.print()
