"""Print every kind of table at several widths in a real terminal, and write down what its cells were.

``test_terminal`` starts it with a pseudo-terminal as its standard streams and reads both.
"""

from __future__ import annotations

import fcntl
import json
import struct
import sys
import termios
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mofa.report.tables as tables
from mofa.calibrate.check import TARGETS
from mofa.cli.commands.calibrate import _print_check
from mofa.cli.main import main
from mofa.report.accuracy import print_validation
from mofa.report.attribution_text import print_attribution
from mofa.report.chunked_layers import print_chunked_layers
from mofa.report.chunks import print_chunks
from mofa.report.goodput import print_goodput_by_scale
from mofa.report.long_run import print_long_runs
from mofa.report.plan_text import print_estimate, print_plan_report
from tests.report.fake import make_estimate, make_report
from tests.report.fake_checks import make_attribution, make_check, make_chunk_report, make_layers, make_validation
from tests.report.test_goodput import report as goodput_report
from tests.report.test_goodput import with_long_run

WIDTHS = (60, 80, 120, 160)
COMMANDS = (
    "show frameworks", "show frameworks megatron", "show strategy", "show schedules", "show models",
    "show hardware", "show hardware h20", "show faults", "show faults llama3",

    "show workload deepseek-v3", "show routing mixtral-8x7b --ep 4 --routing zipf:0.8 --iterations 1",
    "goodput --mtbf 6h --checkpoint 5min --restart 10min --runs 100",
    "goodput --mtbf 6h --checkpoint 1min,5min --restart 2min,10min --shares 0.5,0.5 --runs 100",
    "balance --experts 32 --gpus 8 --ep 4 --micro-batches 2",
)  # fmt: skip


def cases() -> dict[str, Callable[[], object]]:
    """Calls that print, by name."""
    plans, estimate, goodput = make_report(3), make_estimate("a-run", 100.0), goodput_report()
    prints: dict[str, Callable[[], object]] = {
        "plan": lambda: print_plan_report(plans, tables.make_console()),
        "estimate": lambda: print_estimate(estimate, tables.make_console()),
        "long runs": lambda: print_long_runs(tables.make_console(), [with_long_run()] * 2, asked=True),
        "goodput": lambda: print_goodput_by_scale(tables.make_console(), goodput),
        "calibrate check": lambda: _print_check(make_check(), TARGETS),
        "calibrate check, layers": lambda: print_chunked_layers(make_layers(), tables.make_console()),
        "chunks": lambda: print_chunks(make_chunk_report(), tables.make_console()),
        "validate": lambda: print_validation(make_validation(), tables.make_console()),
        "attribute": lambda: print_attribution(make_attribution(), tables.make_console()),
    }
    for command in COMMANDS:
        prints[command] = partial(main, command.split())
    return prints


def record(record_file: Path) -> None:
    """Print every case at every width, each after a line that names it; what takes long is computed at the first."""
    drawn: list[dict[str, Any]] = []
    again: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    fit, draw, case = tables.fit_columns, tables.print_table, {"name": "", "width": 0}

    def fit_and_record(columns: Any, rows: Any, width: int, leaves: Any = (), under: str = "") -> Any:
        layout = fit(columns, rows, width, leaves, under)
        left_out = layout.left_out if layout else ()
        beside = layout.shown if layout else range(len(columns))
        cells = {"columns": list(columns), "rows": [list(row) for row in rows]}
        drawn.append({**case, **cells, "left_out": left_out, "beside": list(beside)})
        return layout

    def draw_and_record(console: object, *arguments: Any, **options: Any) -> None:
        again.append((arguments, options))
        draw(tables.make_console(), *arguments, **options)

    tables.fit_columns, tables.print_table = fit_and_record, draw_and_record
    from mofa.report import balance, goodput, long_run

    for module in (balance, goodput, long_run):  # imported the function by its name
        module.print_table = draw_and_record
    for name, print_case in cases().items():
        again.clear()
        for width in WIDTHS:
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
            case.update(name=name, width=width)
            print(f"== {width} {name}", flush=True)
            if name not in COMMANDS or width == WIDTHS[0]:
                print_case()
            else:
                for arguments, options in again:
                    draw(tables.make_console(), *arguments, **options)
            sys.stdout.flush()
    record_file.write_text(json.dumps(drawn))


if __name__ == "__main__":
    record(Path(sys.argv[1]))
