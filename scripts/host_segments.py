"""What the parts of Megatron's step on Transformer Engine take the host, timed by its own clock without a profiler.

python scripts/host_segments.py RUNS.yaml OUT.csv [SECONDS]

Runs of a plan on one GPU, each in a process of its own: layers each way, the reads that the host waits for, and the
methods of the optimizer, in steps like those of ``mofa measure``. A row is a part of a run: calls a step, seconds a
step, what of it the host waited for the device, beside a small op as records have it and the tensors that are stepped.
"""

from __future__ import annotations

import csv
import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COLUMNS = ("run", "host_issue_s", "tensors", "part", "calls", "seconds", "waited_s")
STEPS, WARMUP = 9, 6
READS = {"Stream": "synchronize", "Event": "synchronize", "Tensor": "item"}
"""Where the host waits for the device, by class."""


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
            environment = {
                **os.environ, **task.environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512", "RANK": "0",
                "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_ERROR_FILE": "",
            }  # fmt: skip
            left = deadline - time.monotonic()
            if left < 15:
                print(f"{run.run.id}: no time left")
                break
            command = [sys.executable, "-W", "ignore", __file__, "--child", str(job)]
            try:
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, timeout=min(left, 100), check=False
                )
            except subprocess.TimeoutExpired:
                print(f"{run.run.id}: took too long")
                continue
            rows = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("row: ")]
            writer.writerows([run.run.id, *row] for row in rows)
            file.flush()
            print(f"{run.run.id}: {len(rows)} parts; {done.stderr.strip().splitlines()[-1:]}", flush=True)


class PartTimes:
    """Host seconds of named functions, and what of them passes while the host waits for the device."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        self.parts: dict[str, list[float]] = {}

    def time(self, owner: Any, name: str, part: str, *, waits: bool = False) -> None:
        """Time every call of a function of a class or a module from now on, as ``part``."""
        inner: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            waited, begin = self.waited_s, time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                taken = time.perf_counter() - begin
                if waits:
                    self.waited_s += taken
                totals = self.parts.setdefault(part, [0, 0.0, 0.0])
                for i, more in enumerate((1, taken, self.waited_s - waited)):
                    totals[i] += more

        setattr(owner, name, timed)


def child(job_path: str) -> None:
    """One run: rows on standard output."""
    import torch
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import distrib_optimizer, optimizer
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from transformer_engine.pytorch.optimizers import FusedAdam

    from mofa import host_pace
    from mofa.measure.runners.megatron import build_megatron_training

    torch.cuda.set_device(0)
    training = build_megatron_training(json.loads(Path(job_path).read_text()))
    for _ in range(WARMUP):
        training.step()
    times = PartTimes()
    for kind, name in READS.items():
        times.time(torch.Tensor if kind == "Tensor" else getattr(torch.cuda, kind), name, "wait", waits=True)
    chained, mixed, sharded = (
        optimizer.ChainedOptimizer, optimizer.MixedPrecisionOptimizer, distrib_optimizer.DistributedOptimizer,
    )  # fmt: skip
    for owner, name, part in (
        (TransformerLayer, "forward", "layer"),
        (schedules, "forward_step", "forward"),
        (schedules, "backward_step", "backward"),
        (chained, "step", "optimizer"),
        (chained, "prepare_grads", "prepare"),
        (chained, "get_grad_norm", "norm"),
        (mixed, "step_with_ready_grads", "ready"),
        (sharded, "_copy_main_params_to_model_params", "copy"),
        (sharded, "zero_grad", "zero_grad"),
        (FusedAdam, "step", "adam"),
        (DistributedDataParallel, "zero_grad_buffer", "zero_buffer"),
    ):
        times.time(owner, name, part)
    training.step()
    torch.cuda.synchronize()
    times.parts.clear()
    issues = [host_pace.small_op_s()]
    for _ in range(STEPS):
        training.step()
    torch.cuda.synchronize()
    issues.append(host_pace.small_op_s())
    adams = [some for some in gc.get_objects() if isinstance(some, FusedAdam)]
    tensors = sum(len(group["params"]) for adam in adams for group in adam.param_groups)
    for part, (calls, taken, waited) in times.parts.items():
        row = [sum(issues) / 2, tensors, part, calls / STEPS, taken / STEPS, waited / STEPS]
        print("row: " + json.dumps(row))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        child(sys.argv[2])
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 3600.0)
