"""``python -m mofa.calibrate.bench OUT [FAMILY ...] [--quick]``: the run where nothing but torch is installed."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from mofa.calibrate.run_cases import measure_cases

_started = time.monotonic()


def _show(done: int, total: int, what: str) -> None:
    if done % 100 == 0 or done == total:
        print(f"{time.monotonic() - _started:6.1f} s  {done}/{total}  {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--fresh-only", action="store_true")
    parser.add_argument("--limit", type=float)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    options = {
        "quick": given.quick,
        "full": given.full,
        "fresh": given.fresh,
        "fresh_only": given.fresh_only,
        "device": given.device,
        "limit_s": given.limit,
    }
    print(measure_cases(given.out, families=given.families or None, progress=_show, **options))
