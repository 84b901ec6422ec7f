"""Make records of jobs that `mofa export` wrote and their own trainers ran.

Before such a job runs, a folder with a ``sitecustomize.py`` of one line, ``from mofa.measure.runners.watch_trainer
import watch; watch()``, and this repository go on ``PYTHONPATH``, and ``MOFA_WATCHED`` names a folder. The job stays
unedited. Afterwards:

    python scripts/exported_jobs.py ID FRAMEWORK JOB LOG RANKS --version TEXT

ID is the record's name, FRAMEWORK is ``megatron`` or ``torchtitan``, JOB the exported script or TOML, LOG what the
trainer printed, and RANKS the folder of ``MOFA_WATCHED``. The record goes to ``reference_runs/exported``.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mofa.errors import SpecError
from mofa.export.read_job import read_job
from mofa.measure.expand import expand_run, token_copies_routed_per_step
from mofa.measure.records import RunEnvironment, RunRecord, write_record
from mofa.measure.results import merge_rank_results
from mofa.specs.load import load_framework
from mofa.specs.run import RunBatch, RunSpec

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 4
"""Steps that do not count, as in `mofa measure`, with those of the same line of a log."""
FEWEST = 4
"""Lines of a log that say what steps take once they count."""
TRAINERS = {"megatron": "Megatron-LM's pretrain_gpt.py", "torchtitan": "torchtitan's trainer"}


def megatron_steps(log: str) -> dict[int, float]:
    """Seconds of a step by each line of Megatron-LM's log, with the number of the last step that it is about.

    >>> megatron_steps(" iteration       10/      50 | elapsed time per iteration (ms): 1093.5 | learning rate")
    {10: 1.0935}
    """
    lines = re.findall(r"iteration +(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+)", log)
    return {int(step): float(ms) / 1e3 for step, ms in lines}


def torchtitan_steps(log: str, tokens_per_gpu: float) -> dict[int, float]:
    """The same of torchtitan's log, from its tokens per second and GPU.

    >>> torchtitan_steps("step:  2  loss: 12.0  memory: 20.1GiB(25.4%)  tps: 4,000  tflops: 12", 8000)
    {2: 2.0}
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", log)
    lines = re.findall(r"step:\s*(\d+) .*?tps: ([\d,]+)", plain)
    return {int(step): tokens_per_gpu / float(tps.replace(",", "")) for step, tps in lines}


def record_of_job(
    name: str, framework: str, job: Path, log: Path, ranks: Path, version: str, hardware: str
) -> RunRecord:
    """One job's record; GPUs are its ranks."""
    files = sorted(ranks.glob("rank*.json"))
    if not files:
        raise SpecError(f"{ranks}: holds no rank*.json; set MOFA_WATCHED to it where the job runs")
    ranks_left = sorted((json.loads(file.read_text()) for file in files), key=lambda rank: int(rank["rank"]))
    read = read_job(framework, job, len(files))
    run = expand_run(_run_spec(name, read, len(files), hardware), ROOT)
    text, batch = log.read_text(errors="replace"), run.run.batch
    tokens_per_gpu = batch.global_ * batch.seq_len / len(files)
    by_step = megatron_steps(text) if framework == "megatron" else torchtitan_steps(text, tokens_per_gpu)
    first = next((step for step in by_step if step >= WARM_UP), WARM_UP)
    warm_up, times = ([s for step, s in by_step.items() if (step <= first) == early] for early in (True, False))
    if len(times) < FEWEST:
        raise SpecError(f"{log}: has {len(times)} lines of steps behind warm-up, {FEWEST} are needed; make more steps")
    share = first / max(by_step)
    for rank in ranks_left:
        rank |= {"warmup_times_s": warm_up, "step_times_s": times}
        if "routed" in rank:
            rank["tokens_per_expert"] = tokens_in_a_step(rank.pop("routed"), share, token_copies_routed_per_step(run))
    if any("tokens_per_expert" in rank for rank in ranks_left):
        ranks_left[0]["facts"] = {"counted_step": (first + max(by_step)) // 2}
    of_rank: dict[str, Any] = {**ranks_left[0]["environment"], "framework": version}
    issues = max((rank["host_issues_s"] for rank in ranks_left), key=statistics.fmean)
    of_rank["host_issues_s"] = [round(s, 9) for s in issues]
    of_rank["host_issue_s"] = round(statistics.fmean(issues), 9)
    environment = RunEnvironment(num_gpus=len(files), **of_rank)
    trainer = TRAINERS[framework]
    source = (
        f"run by {trainer} as mofa export wrote it, on {len(files)} {environment.gpu}, PyTorch {environment.torch}, "
        f"{version}, {datetime.now(tz=UTC):%Y-%m-%d}"
    )
    return RunRecord(
        run=run.run_with_full_specs(), measured=merge_rank_results(ranks_left), environment=environment, source=source,
        split="judging", trainer=trainer,
    )  # fmt: skip


def tokens_in_a_step(routed: list[list[list[int]]], early_share: float, copies: int) -> list[list[int]]:
    """Tokens to each expert in a mean step of those that count, by layer.

    ``routed`` has one row for each pass of a layer's router, of which recomputation makes more; ``early_share`` of
    them, at the beginning, do not count. ``copies`` is what one step routes in a layer.

    >>> tokens_in_a_step([[[8, 0], [6, 2], [5, 3]]], 1 / 3, 16)
    [[11, 5]]
    """
    by_layer = []
    for passes in routed:
        counted = passes[round(early_share * len(passes)) :]
        totals = [sum(expert) for expert in zip(*counted, strict=True)]
        by_layer.append([round(tokens * copies / sum(totals)) for tokens in totals])
    return by_layer


def _run_spec(name: str, read: Any, num_gpus: int, hardware: str) -> RunSpec:
    profile = load_framework(read.framework.name).model_dump()
    options = {key: value for key, value in read.framework.model_dump().items() if profile[key] != value}
    strategy = dict(read.strategy)
    micro = strategy.pop("micro_batch")
    strategy.pop("dp", None)
    batch = read.workload.batch
    return RunSpec(
        id=name, model=read.workload.model, framework={"name": read.framework.name, **options}, hardware=hardware,
        gpus=num_gpus, strategy=strategy, precision=read.workload.precision, optimizer=read.workload.optimizer,
        routing=read.workload.routing,
        batch=RunBatch.model_validate({"seq_len": batch.seq_len, "micro": micro, "global": batch.global_batch}),
    )  # fmt: skip


def main() -> None:
    """Write one record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("framework", choices=sorted(TRAINERS))
    for path in ("job", "log", "ranks"):
        parser.add_argument(path, type=Path)
    parser.add_argument("--hardware", default="h100-hgx", help="the node type that it ran on")
    parser.add_argument("--version", required=True, help="the framework's version, in words")
    given = parser.parse_args()
    record = record_of_job(
        given.name, given.framework, given.job, given.log, given.ranks, given.version, given.hardware
    )
    print(write_record(record, ROOT / "reference_runs" / "exported"))


if __name__ == "__main__":
    main()
