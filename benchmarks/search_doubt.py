"""Whether a search loses plans that it finds too full: rows in doubt, played, and a sample of the others.

python benchmarks/search_doubt.py           # six searches; some minutes
python benchmarks/search_doubt.py --smoke   # that it runs
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray

from mofa.cost.estimate import TableEstimator
from mofa.search.borderline import borderline_rows
from mofa.search.costing import MEMORY, CostedSpace
from mofa.search.entry_points import find_plans
from mofa.search.job_setup import routing_loads_by_ep
from mofa.search.space import OPTIONS
from mofa.search.to_plan.builder import CandidatePlan, memory_limit_bytes
from mofa.specs.load import load_cluster, load_framework, load_workload

SEARCHES = (
    ("llama3-70b", "h100-hgx", 64, "torchtitan"),
    ("deepseek-v3", "h800-hgx", 2048, "megatron"),
    ("llama3-70b", "h100-hgx", 64, "megatron"),
    ("qwen3-30b-a3b", "h100-hgx", 64, "torchtitan"),
    ("mixtral-8x22b", "h200-hgx", 64, "megatron"),
    ("gpt-oss-120b", "h100-hgx", 64, "torchtitan"),
)
NEAR = 0.04
"""How far above what a plan may fill the least that a sampled row takes is, as a share: the likeliest to be wrong."""


def look(workload: str, cluster: str, gpus: int, framework: str, sample: int) -> None:
    """Print what a search rejects by memory, and what playing says of rows in doubt and of a sample beyond them."""
    job, machines, profile = load_workload(workload), load_cluster(cluster, gpus), load_framework(framework)
    search = find_plans(job, machines, framework=profile, without=OPTIONS, replay=False, every_row=True)
    facts, costed = (search.workload, search.cluster, search.framework), search.costed
    limit, loads = (
        memory_limit_bytes(search.cluster, search.framework),
        routing_loads_by_ep(search.workload, search.combinations.degrees),
    )

    def fitting(positions: NDArray[np.intp]) -> int:
        """How many fit."""
        rows = (costed.table.select_rows(positions[i : i + 1]) for i in range(len(positions)))
        return sum(CandidatePlan(*facts, row, loads, "causal").replayed_device_bytes(limit) <= limit for row in rows)

    rejected = search.reasons[costed.rows] == MEMORY
    doubtful = rejected & np.isfinite(costed.step_s)
    found = CostedSpace(search.combinations, costed, search.reasons, search.short)
    asked = borderline_rows(found, costed.step_s)
    others = np.flatnonzero(rejected & ~doubtful)
    table = costed.table.select_rows(others)
    least = (
        TableEstimator(*facts, table, loads).memory_of_rows(np.arange(len(others)), table.recompute_layers).least_bytes
    )
    near = others[least <= (1.0 + NEAR) * limit]
    some = np.random.default_rng(0).choice(near, min(sample, len(near)), replace=False)
    print(
        f"{framework}, {workload} on {gpus} {cluster}: {np.sum(rejected):,} of {len(costed.rows):,} rows too full, "
        f"{np.sum(doubtful):,} of them allocate no more than fits; {len(asked)} would be among the best, of which "
        f"{fitting(asked)} fit; of the others {len(near):,} are near, of {len(some)} of these {fitting(some)} fit",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="one search, few rows: only that it runs")
    chosen = parser.parse_args()
    for one in SEARCHES[:1] if chosen.smoke else SEARCHES:
        look(*one, sample=2 if chosen.smoke else 60)
