"""Where results go: standard output as text or JSON, files on request."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mofa.specs.shown_text import escape_file_text

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from mofa.plan.result import Estimate, PlanReport
    from mofa.replay.time.time_replayed import ReplayedTime
    from mofa.report.page.facts import ReportFacts


@dataclass(frozen=True)
class OutputOptions:
    """What of a result the user asked to be shown and written."""

    json: bool = False
    json_file: Path | None = None
    csv: Path | None = None
    out: Path | None = None
    quiet: bool = False

    def refuse_unwritable_places(
        self, command: str, inputs: Iterable[object] = (), files: Mapping[str, Path | None] | None = None
    ) -> None:
        """Refuse places before the work is done: those that cannot be written, two that are one, and what is read.

        ``inputs`` are what the other arguments of ``command`` name, ``files`` more places, by option.
        """
        from mofa.specs.write_files import NAMES_BY_COMMAND, check_result_places

        check_result_places(
            {"--json-file": self.json_file, "--csv": self.csv, **(files or {})}, {"--out": self.out}, inputs,
            NAMES_BY_COMMAND.get(command, ()),
        )  # fmt: skip

    def show_result(
        self,
        text: str,
        table: Callable[[], pd.DataFrame],
        save: Callable[[Path], Sequence[Path]],
        print_: Callable[[Console], None],
    ) -> None:
        """Write and print a result: its JSON, its table, the files that go to a directory, and what people read."""
        self.write_result(text, table, save)
        self.print_result(text, print_)

    def write_result(
        self, text: str, table: Callable[[], pd.DataFrame], save: Callable[[Path], Sequence[Path]]
    ) -> None:
        """Write the files of a result, all of them or none."""
        from mofa.specs.write_files import all_files_or_none

        saved: Sequence[Path] = ()
        with all_files_or_none():
            self._write_json(text)
            if self.csv is not None:
                from mofa.report.save import write_table

                write_table(self.csv, table())
            if self.out is not None:
                saved = save(self.out)
        if self.out is not None:
            self._say_saved(saved, self.out)

    def print_result(self, text: str, print_: Callable[[Console], None]) -> None:
        """Print a result, as JSON or as people read it."""
        if self.json:
            sys.stdout.write(escape_file_text(text))
            return
        from mofa.report.tables import make_console

        print_(make_console())

    def show_report(
        self,
        report: PlanReport,
        table: Callable[[], pd.DataFrame],
        page: Callable[[pd.DataFrame], ReportFacts] | None = None,
    ) -> None:
        """Write and print what a search found; ``table`` makes the table of all costed strategies, ``page`` of it what
        the report that people forward is about."""
        from mofa.report.save import json_text, save_plan_report

        def print_all(console: Console) -> None:
            from mofa.report.plan_text import print_plan_report

            print_plan_report(report, console, quiet=self.quiet)

        def save(out: Path) -> list[Path]:
            costed = table()
            return save_plan_report(report, out, costed, page(costed) if page and report.plans else None)

        self.show_result(json_text(report) + "\n", lambda: report.to_frame(all=True), save, print_all)

    def show_estimates(self, estimates: Sequence[Estimate], steps: Callable[[], Sequence[ReplayedTime]]) -> None:
        """Write and print estimates: one as an object, several as a list; ``steps`` plays them for the figures."""
        from mofa.plan.result import plans_to_frame
        from mofa.report.save import estimates_json, save_estimates

        def print_all(console: Console) -> None:
            from mofa.report.plan_text import print_estimate

            for estimate in estimates:
                print_estimate(estimate, console, quiet=self.quiet)

        self.show_result(
            estimates_json(estimates), lambda: plans_to_frame(estimates),
            lambda out: save_estimates(estimates, out, steps()), print_all,
        )  # fmt: skip

    def _write_json(self, text: str) -> None:
        if self.json_file is not None:
            from mofa.report.save import write_file_atomically

            write_file_atomically(self.json_file, text.encode())

    def _say_saved(self, files: Sequence[Path], directory: Path) -> None:
        if not self.quiet:
            print(f"wrote {len(files)} files to {directory}", file=sys.stderr)
