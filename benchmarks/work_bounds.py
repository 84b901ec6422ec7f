"""Whether work has bounds: plan, estimate, balance, trace and goodput of jobs each of which is large in one way.

python benchmarks/work_bounds.py                       # the table of docs/scale.md
python benchmarks/work_bounds.py --only layers:trace   # one of its cells

A job is done within a minute and 2 GiB on two cores, or is refused at once with the limit that it passes. Seconds of
processors are those of all processes of a command, memory that of the largest one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
JOB = ("qwen3-30b-a3b", "h100-hgx")
SIZES = {
    "layers": ("1,000 layers", 1024, "tp=2 pp=8 ep=8 recompute=full", ("--set", "workload.model.num_layers=1000")),
    "experts": ("10,000 experts", 1024, "pp=8 ep=16 recompute=full", ("--set", "workload.model.moe.num_experts=10000")),
    "micro_batches": ("10^6 micro-batches", 64, "pp=8 ep=8", ("--global-batch", "8000000")),
    "gpus": ("131,072 GPUs", 131_072, "pp=2 ep=8", ("--global-batch", "131072")),
}
"""What is large, on how many GPUs, the strategy of estimate, balance and trace, and the options that make it so."""
COMMANDS = ("plan", "estimate", "balance", "trace", "goodput")


def words(command: str, size: str, folder: str) -> list[str]:
    """The arguments of a command."""
    _, gpus, strategy, options = SIZES[size]
    more = {
        "plan": [], "goodput": ["--faults", "llama3"], "trace": ["--out", f"{folder}/trace.json"],
    }.get(command, [])  # fmt: skip
    given = [] if command in ("plan", "goodput") else ["--strategy", f"{strategy} micro_batch=1"]
    return [command, *JOB, "--gpus", str(gpus), *options, *given, *more]


def cell(command: str, size: str) -> str:
    """Runs a command; its seconds by the clock and of processors, its memory, and why it was refused, as a row."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as said:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "mofa", *words(command, size, folder)], env=env, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=said,
        )  # fmt: skip
        _, status, usage = os.wait4(process.pid, 0)
        took_s = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()
    busy_s, peak_bytes = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    answer = {0: "answers", 3: "answers: nothing fits"}.get(process.returncode, "")
    answer = answer or f"refused: {lines[-1].removeprefix('mofa: ') if lines else process.returncode}"
    return f"| {SIZES[size][0]} | `{command}` | {took_s:.1f} | {busy_s:.1f} | {peak_bytes / 2**20:,.0f} | {answer} |"


def main() -> None:
    """Print a row per cell."""
    parser = argparse.ArgumentParser(description="Bounds of mofa's work.")
    parser.add_argument("--only", default="", metavar="SIZE:COMMAND", help="one cell, or layers: for a size of it")
    wanted, _, command = parser.parse_args().only.partition(":")
    print("| large in | command | by the clock [s] | processors [s] | largest process [MiB] | |")
    print("|---|---|---:|---:|---:|---|")
    for size in SIZES:
        for each in COMMANDS:
            if wanted in ("", size) and command in ("", each):
                print(cell(each, size), flush=True)


if __name__ == "__main__":
    main()
