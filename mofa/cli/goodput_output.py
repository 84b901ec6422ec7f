"""Where goodput goes: standard output as text or JSON, files on request."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mofa.cli.output import OutputOptions
from mofa.specs.shown_text import escape_file_text

if TYPE_CHECKING:
    from mofa.faults.calculator import GoodputCalculation
    from mofa.faults.failures.events import LogStatistics
    from mofa.faults.level_calculator import LevelCalculation
    from mofa.plan.goodput_by_scale import GoodputReport


@dataclass(frozen=True)
class GoodputOutputOptions(OutputOptions):
    """What of goodput the user asked to be shown and written."""

    def show_calculation(self, calculation: GoodputCalculation, rate: LogStatistics | None) -> None:
        """Write and print what the calculator found."""
        from mofa.report.goodput import print_failure_rate, print_goodput_calculation
        from mofa.report.tables import make_console

        if self._json(calculation.model_dump_json(indent=2) + "\n"):
            return
        console = make_console()
        if rate is not None:
            print_failure_rate(console, rate)
        print_goodput_calculation(console, calculation, quiet=self.quiet)

    def show_checkpoint_levels(self, calculation: LevelCalculation, rate: LogStatistics | None) -> None:
        """Write and print what the calculator found of several levels."""
        from mofa.report.goodput import print_checkpoint_levels, print_failure_rate
        from mofa.report.tables import make_console

        if self._json(calculation.model_dump_json(indent=2) + "\n"):
            return
        console = make_console()
        if rate is not None:
            print_failure_rate(console, rate)
        print_checkpoint_levels(console, calculation, quiet=self.quiet)

    def show_failure_rate(self, rate: LogStatistics) -> None:
        """Write and print what a log says."""
        from mofa.report.goodput import print_failure_rate
        from mofa.report.tables import make_console

        if not self._json(rate.model_dump_json(indent=2) + "\n"):
            print_failure_rate(make_console(), rate)

    def show_goodput_by_scale(self, report: GoodputReport) -> None:
        """Write and print goodput against scale, with its figures where a directory is asked for."""
        import pandas as pd

        from mofa.report.goodput import print_goodput_by_scale
        from mofa.report.save import csv_bytes, figure_files, write_files

        rows, text = pd.DataFrame(report.to_rows()), report.model_dump_json(indent=2) + "\n"

        def save(out: Path) -> Sequence[Path]:
            from mofa.report.figures.goodput_curve import plot_goodput_curve
            from mofa.report.figures.tornado import plot_tornado

            files = {"goodput.json": text.encode(), "goodput.csv": csv_bytes(rows)}
            files |= figure_files("ettr", plot_goodput_curve(report, "ettr"))
            files |= figure_files("throughput", plot_goodput_curve(report, "throughput"))
            files |= figure_files("tornado", plot_tornado(report))
            return write_files(out, files)

        self.show_result(
            text, lambda: rows, save, lambda console: print_goodput_by_scale(console, report, quiet=self.quiet)
        )

    def _json(self, text: str) -> bool:
        """Write the JSON where it is asked for; whether it was printed."""
        self._write_json(text)
        if self.json:
            sys.stdout.write(escape_file_text(text))
        return self.json
