"""Results beside each other as text, a table and a figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mofa.plan.comparison import ComparedPart, Comparison
from mofa.report.phrases import component_words
from mofa.report.tables import Columns, print_paragraph, print_table
from mofa.units import GIB, format_bytes, format_seconds

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

SHOWN_FACTS = 24
"""Differing facts that are listed; more are counted. [-]"""


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print what differs, the totals, and where the seconds and bytes differ."""
    names = [result.name for result in comparison.results]
    facts = list(comparison.differs.items())
    rows = [[name, *(_shown(value) for value in values)] for name, values in facts[:SHOWN_FACTS]]
    if rows:
        print_table(console, "What differs", (("fact", "left"), *((name, "left") for name in names)), rows)
    if len(facts) > SHOWN_FACTS:
        print_paragraph(console, f"{len(facts) - SHOWN_FACTS} more facts differ; --json has them all.")
    if not rows:
        print_paragraph(console, "Nothing that was asked for differs.")
    print_table(console, "Totals", (("", "left"), *((name, "right") for name in names)), total_rows(comparison))
    of_time = format_seconds if comparison.time_unit == "s" else lambda seconds: f"{seconds:,.2f}"
    title = "Where the step goes" + ("" if comparison.time_unit == "s" else f" [{comparison.time_unit}]")
    print_table(console, title, part_columns(names), part_rows(comparison.time, of_time))
    print_table(console, "Memory of the fullest GPU", part_columns(names), part_rows(comparison.memory, format_bytes))
    if comparison.time_unit != "s":
        print_paragraph(
            console,
            "Batches or numbers of GPUs differ: steps are told by what a million tokens take all GPUs together.",
        )


def _shown(value: Any) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def total_rows(comparison: Comparison) -> list[list[str]]:
    """A row for each total; those that no result has are left out."""
    results = comparison.results
    rows = [
        ["step", *(format_seconds(each.step_s) for each in results)],
        ["GPUs", *(f"{each.num_gpus:,}" for each in results)],
        ["GPU s per million tokens", *(f"{each.gpu_s_per_million_tokens:,.2f}" for each in results)],
        ["  over the first", *(_change(each.gpu_s_per_million_tokens, results[0].gpu_s_per_million_tokens)
                               for each in results)],
        ["MFU", *(f"{each.mfu:.1%}" for each in results)],
        ["peak of the device", *(format_bytes(each.device_bytes) for each in results)],
        ["fits", *("yes" if each.fits else "NO" for each in results)],
    ]  # fmt: skip
    if any(each.days is not None for each in results):
        rows.append(["days", *("" if each.days is None else f"{each.days:,.1f}" for each in results)])
    if any(each.usd is not None for each in results):
        rows.append(["dollars", *("" if each.usd is None else f"{each.usd:,.0f}" for each in results)])
    return rows


def _change(value: float, first: float) -> str:
    return "" if value == first else f"{value / first - 1.0:+.1%}"


def part_columns(names: Sequence[str]) -> Columns:
    """Columns of parts: every result, and what each has more than the first."""
    return (
        ("part", "left"), *((name, "right") for name in names),
        *((f"{name} - {names[0]}" if len(names) == 2 else f"{name} more", "right") for name in names[1:]),
    )  # fmt: skip


def part_rows(parts: Sequence[ComparedPart], shown: Callable[[float], str]) -> list[list[str]]:
    """Rows of parts, the largest difference first, and their sum."""

    def cells(name: str, values: Sequence[float]) -> list[str]:
        more = [value - values[0] for value in values[1:]]
        signed = ["" if m == 0.0 else f"{'+' if m > 0 else '-'}{shown(abs(m))}" for m in more]
        return [name, *("" if value == 0.0 else shown(value) for value in values), *signed]

    ordered = sorted(parts, key=lambda part: -max(abs(more) for more in part.differences))
    total = [sum(part.by_result[i] for part in parts) for i in range(len(parts[0].by_result))]
    return [*(cells(component_words(part.name), part.by_result) for part in ordered), cells("sum", total)]


def comparison_to_frame(comparison: Comparison) -> pd.DataFrame:
    """A row for each part of each result: ``result``, ``of`` (time or memory), ``part``, ``value`` and its ``unit``."""
    import pandas as pd

    rows = [
        {"result": result.name, "of": of, "part": part.name, "value": value, "unit": unit}
        for of, unit, parts in (("time", comparison.time_unit, comparison.time), ("memory", "B", comparison.memory))
        for part in parts
        for result, value in zip(comparison.results, part.by_result, strict=True)
    ]
    return pd.DataFrame(rows)


def save_comparison(comparison: Comparison, directory: Path) -> list[Path]:
    """Write a waterfall of time and of memory for each result but the first, the table and the JSON."""
    from mofa.report.figures.waterfall import plot_waterfall
    from mofa.report.save import csv_bytes, figure_files, write_files

    files = {
        "compare.json": (comparison.model_dump_json(indent=2) + "\n").encode(),
        "compare.csv": csv_bytes(comparison_to_frame(comparison)),
    }
    for i in range(1, len(comparison.results)):
        last = "" if len(comparison.results) == 2 else f"_{i + 1}"
        pair = (comparison.results[0].name, comparison.results[i].name)
        files |= figure_files(f"time{last}", plot_waterfall(comparison.time, i, pair, comparison.time_unit))
        of_gib = [
            part.model_copy(update={"by_result": tuple(size / GIB for size in part.by_result)})
            for part in comparison.memory
        ]
        files |= figure_files(f"memory{last}", plot_waterfall(of_gib, i, pair, "GiB"))
    return write_files(directory, files)
