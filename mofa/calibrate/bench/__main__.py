"""``python -m mofa.calibrate.bench OUT [FAMILY ...] [--quick] [--limit SECONDS]``: the run where only torch is there."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from mofa.calibrate.run import run

_started = time.monotonic()


def _show(done: int, total: int, what: str) -> None:
    if done % 100 == 0 or done == total:
        print(f"{time.monotonic() - _started:6.1f} s  {done}/{total}  {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--limit", type=float)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    print(run(given.out, quick=given.quick, families=given.families or None, device=given.device, progress=_show,
              limit_s=given.limit))  # fmt: skip
