"""Whether a search that bounds rows has the same best rows as one that costs them all, and how many it costs.

python benchmarks/search_bounds.py           # some 40 searches, each both ways; half an hour
python benchmarks/search_bounds.py --smoke   # that it runs
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))

import numpy as np

import mofa
from mofa.plan.long_run import Objective
from mofa.search import branch_and_bound
from mofa.search.costing import NEEDLESS
from mofa.search.objective import ranking_keys_and_missing_host_bytes
from mofa.search.search_result import Search

WANTED = 60
"""The best rows that are compared: as many as a search with replay asks for. [-]"""


class Job(NamedTuple):
    """A workload on so many GPUs of a cluster under a framework, words of ``--with``, and what is made smallest."""

    workload: str
    cluster: str
    gpus: int
    framework: str
    words: tuple[str, ...] = ()
    objective: Objective | None = None

    @property
    def name(self) -> str:
        """What tells it from others."""
        objective = f" by {self.objective}" if self.objective else ""
        return " ".join([self.workload, f"{self.gpus} x {self.cluster}", self.framework, *self.words]) + objective


JOBS = (
    Job("deepseek-v3", "h800-hgx", 2048, "megatron"),
    Job("deepseek-v3", "h800-hgx", 16384, "megatron"),
    Job("kimi-k2", "h100-hgx", 2048, "megatron"),
    Job("llama3-405b", "h100-hgx", 16384, "megatron"),
    Job("llama3-405b", "h100-hgx", 1024, "megatron", ("fp8-blockwise",)),
    Job("qwen3-235b-a22b", "h100-hgx", 1024, "megatron", ("deepep",)),
    Job("gpt3-175b", "h100-hgx", 1024, "megatron"),
    Job("deepseek-v3", "h100-hgx", 1024, "megatron", (), "days"),
    Job("deepseek-v3", "h100-hgx", 1024, "megatron", (), "usd"),
    Job("deepseek-v3", "h100-hgx", 1024, "megatron", (), "kwh"),
    Job("llama3-8b", "h100-hgx", 8, "megatron"),
    Job("llama3-8b", "h100-hgx", 64, "megatron"),
    Job("llama3-70b", "h100-hgx", 64, "megatron"),
    Job("llama3-70b", "h100-hgx", 256, "megatron", ("bf16_moments",)),
    Job("mixtral-8x22b", "h200-hgx", 64, "megatron"),
    Job("qwen3-30b-a3b", "h100-hgx", 64, "megatron", ("token_chunks",)),
    Job("qwen3-30b-a3b", "h100-hgx", 16, "megatron", (), "kwh"),
    Job("llama3-8b", "h100-hgx", 8, "megatron-local"),
    Job("llama3-70b", "h100-hgx", 64, "megatron-local"),
    Job("mixtral-8x7b", "h100-hgx", 64, "megatron-local"),
    Job("qwen3-30b-a3b", "h100-hgx", 32, "megatron-local", (), "days"),
    Job("llama3-8b", "h100-hgx", 64, "torchtitan"),
    Job("llama3-70b", "h100-hgx", 256, "torchtitan"),
    Job("llama3-405b", "h100-hgx", 1024, "torchtitan"),
    Job("qwen3-30b-a3b", "h100-hgx", 64, "torchtitan"),
    Job("gpt-oss-120b", "h100-hgx", 64, "torchtitan", (), "usd"),
    Job("llama3-8b", "h100-hgx", 8, "fsdp1"),
    Job("llama3-8b", "h100-hgx", 64, "fsdp1"),
    Job("llama3-70b", "h100-hgx", 64, "fsdp1"),
    Job("llama3-70b", "h100-hgx", 256, "fsdp1", (), "days"),
    Job("llama3-8b", "h100-hgx", 32, "megatron-2022"),
    Job("llama3-70b", "h100-hgx", 128, "megatron-2022"),
    Job("gpt3-175b", "h100-hgx", 512, "megatron-2022"),
    Job("gpt3-175b", "h100-hgx", 256, "megatron-2022", (), "kwh"),
)
"""At least four of each framework, more than six on 1,024 GPUs or more, all objectives."""


def searched(job: Job, *, every_row: bool) -> tuple[Search, float]:
    """A search and its seconds of processor time."""
    given: dict[str, Any] = {
        "framework": mofa.load_framework(job.framework), "with_": job.words, "top": WANTED, "replay": False,
        "every_row": every_row,
    }  # fmt: skip
    tokens = None if job.objective is None else "1T"
    workload, machines = mofa.load_workload(job.workload, tokens=tokens), mofa.load_cluster(job.cluster, job.gpus)
    begun = time.process_time()
    if job.objective is None:
        search = mofa.find_plans(workload, machines, banded=False, **given)
    else:
        price = {"value": 2.0, "provenance": "assumed", "source": "an example"}
        faults = mofa.load_faults("llama3", {"spares": 0, "price.usd_per_gpu_hour": price})
        search = mofa.find_long_runs(workload, machines, faults, objective=job.objective, **given)
    return search, time.process_time() - begun


def best(search: Search) -> Iterator[tuple[int, float]]:
    """The best rows with their keys, in order."""
    key, _ = ranking_keys_and_missing_host_bytes(search.objective, search.costed)
    fits = np.flatnonzero((search.reasons[search.costed.rows] < 0) & np.isfinite(key))
    order = fits[np.lexsort((search.costed.device_bytes[fits], np.round(key[fits], 12)))][:WANTED]
    yield from zip(search.costed.rows[order].tolist(), key[order].tolist(), strict=True)


def compare(job: Job) -> bool:
    """Print both searches of a job side by side, and say whether their best rows are the same."""
    (bounded, bounded_s), (every, every_s) = (searched(job, every_row=every_row) for every_row in (False, True))
    ours, theirs = list(best(bounded)), list(best(every))
    legal = int(np.count_nonzero((every.reasons < 0) | (every.reasons >= NEEDLESS)))
    same = ours == theirs
    apart = max((abs(a[1] / b[1] - 1.0) for a, b in zip(ours, theirs, strict=False)), default=0.0)
    rows = [row for row, _ in ours] == [row for row, _ in theirs]
    print(
        f"{job.name}: {len(theirs)} best rows {'the same' if rows else 'DIFFERENT'}, keys "
        f"{'bit-equal' if same else f'apart by {apart:.1e}'}; costed {bounded.report.searched:,} of {legal:,} legal "
        f"rows ({bounded.report.searched / max(legal, 1):.2%}) in {bounded_s:.2f} s, all in {every_s:.2f} s",
        flush=True,
    )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="two small searches: only that it runs")
    branch_and_bound.FEW_ROWS = 0
    chosen = [job for job in JOBS if job.gpus <= 8][:2] if parser.parse_args().smoke else JOBS
    verdicts = [compare(job) for job in chosen]
    if not all(verdicts):
        sys.exit("some best rows differ")
