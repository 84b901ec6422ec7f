"""What a layer of a framework costs the host, forward, back and in the optimizer, beside what a small op does.

python scripts/host_layers.py RUNS.yaml OUT.csv [SECONDS]

Runs of a plan on one GPU (reference_runs/plans/host-layers.yaml: a width at which nothing but the host takes time),
each in a process of its own: its step is timed in three parts, from its beginning to autograd's engine, in the engine,
and from there to its end, in rounds before each of which one small op is timed as records have it. A row is a round:
hosts change within seconds, so that only what was timed beside each other is told apart. Two numbers of layers make a
layer.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

COLUMNS = ("run", "layers", "round", "host_issue_s", "forward_s", "backward_s", "rest_s", "kernels")
ROUNDS, STEPS, WARMUP = 24, 3, 6


def main(plan: Path, out: Path, seconds: float) -> None:
    """Every run of the plan that the time allows."""
    from mofa.measure.expand import expand_run
    from mofa.measure.runs import task_of_run
    from mofa.specs.run_files import load_runs

    deadline = time.monotonic() + seconds
    with out.open("w", newline="") as file, tempfile.TemporaryDirectory() as scratch:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for run in map(expand_run, load_runs(plan)):
            task = task_of_run(run, timeout_s=60)
            job = Path(scratch) / "job.json"
            job.write_text(json.dumps(task.job))
            left = deadline - time.monotonic()
            if left < 15:
                print(f"{run.run.id}: no time left")
                break
            environment = {
                **os.environ, **task.environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0",
                "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_ERROR_FILE": "",
            }  # fmt: skip
            command = [sys.executable, "-W", "ignore", __file__, "--child", task.module, str(job)]
            try:
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, timeout=min(left, 80), check=False
                )
            except subprocess.TimeoutExpired:
                print(f"{run.run.id}: took too long")
                continue
            rows = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("row: ")]
            writer.writerows([run.run.id, run.model.num_layers, *row] for row in rows)
            file.flush()
            middle = sorted(row[2] + row[3] for row in rows)[len(rows) // 2] if rows else None
            print(f"{run.run.id}: {len(rows)} rounds, {middle}; {done.stderr.strip().splitlines()[-1:]}", flush=True)


def child(module: str, job_path: str) -> None:
    """One run: rows on standard output."""
    import importlib

    import torch

    from mofa import host_pace

    torch.cuda.set_device(0)
    runner = importlib.import_module(module)
    training = runner.build(json.loads(Path(job_path).read_text()))
    marks: list[float] = []
    engine = torch.autograd.Variable._execution_engine

    class Marked:
        """The engine, whose outermost call marks its beginning and end."""

        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            if len(marks) != 1:
                return engine.run_backward(*args, **kwargs)
            marks.append(time.perf_counter())
            result = engine.run_backward(*args, **kwargs)
            marks.append(time.perf_counter())
            return result

        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

    torch.autograd.Variable._execution_engine = Marked()

    def step() -> tuple[float, float, float]:
        torch.cuda.synchronize()
        marks[:] = [time.perf_counter()]
        training.step()
        start, back, behind = marks[:3]
        return back - start, behind - back, time.perf_counter() - behind

    for _ in range(WARMUP):
        step()
    rows = []
    for _ in range(ROUNDS):
        issue_s = host_pace.small_op_s(60)
        parts = [step() for _ in range(STEPS)]
        rows.append((issue_s, *(sorted(values)[STEPS // 2] for values in zip(*parts, strict=True))))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        training.step()
        torch.cuda.synchronize()
    kernels = sum(e.device_type() == torch.autograd.DeviceType.CUDA for e in profile.profiler.kineto_results.events())
    for i, row in enumerate(rows):
        print("row: " + json.dumps([i, *(round(value, 9) for value in row), kernels]))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        child(*sys.argv[2:4])
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 3600.0)
