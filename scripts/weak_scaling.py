"""Write the tables of docs/scale.md: the best plan on 1,024 to 131,072 GPUs with as much work a GPU on each.

python scripts/weak_scaling.py

Each point is searched anew by closed forms (``--no-replay``). What limits a point is what of its step is not computing,
the largest parts first, beside what the same part was on the fewest GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import mofa
from mofa.report.phrases import component_words, strategy_short
from mofa.report.tables import Columns, markdown_table
from mofa.units import format_seconds

if TYPE_CHECKING:
    from mofa.plan.result import Plan

PAGE = Path(__file__).resolve().parent.parent / "docs" / "scale.md"
CLUSTER = "h100-hgx"
NUM_GPUS = tuple(1024 * 2**k for k in range(8))
WORKLOADS = {"llama3-405b": 1 / 8, "deepseek-v3": 7.5}
"""Sequences a GPU in a step: what Llama 3 had on 16,384 GPUs, and DeepSeek-V3 on 2,048."""
COMPUTING = ("gemm", "grouped_gemm", "attention", "memory_bound", "optimizer")
"""Parts of a step that do what a step is for."""
SHOWN = 3
COLUMNS: Columns = (
    ("GPUs", "right"), ("sequences", "right"), ("best plan", "left"), ("step", "right"), ("MFU", "right"),
    ("of the rate on the fewest", "right"), ("what limits it, of the step", "left"),
)  # fmt: skip


def best_plans(name: str, sequences_per_gpu: float) -> Iterator[Plan]:
    """The best plan on each number of GPUs."""
    for num_gpus in NUM_GPUS:
        workload = mofa.load_workload(name, global_batch=round(num_gpus * sequences_per_gpu))
        found = mofa.find_plans(workload, mofa.load_cluster(CLUSTER, num_gpus), top=1, replay=False, jobs=1)
        yield found.report.plans[0]


def limits_text(plan: Plan) -> str:
    """What of a step is not computing, the largest parts first."""
    parts = {name: s for name, s in plan.time.exposed.items() if name not in COMPUTING and s > 0.0}
    largest = sorted(parts, key=lambda name: -parts[name])[:SHOWN]
    return ", ".join(f"{component_words(name)} {parts[name] / plan.step_s:.1%}" for name in largest)


def table(name: str, sequences_per_gpu: float) -> str:
    """The table of one workload."""
    rows, first = [], None
    for num_gpus, plan in zip(NUM_GPUS, best_plans(name, sequences_per_gpu), strict=True):
        rate = plan.tokens_per_s_per_gpu
        first = first or rate
        rows.append([
            f"{num_gpus:,}", f"{round(num_gpus * sequences_per_gpu):,}", strategy_short(plan.strategy),
            format_seconds(plan.step_s), f"{plan.mfu:.1%}", f"{rate / first:.1%}", limits_text(plan),
        ])  # fmt: skip
        print(" | ".join(rows[-1]), flush=True)
    return markdown_table(COLUMNS, rows)


def main() -> None:
    """Rewrite what is between each workload's markers."""
    text = PAGE.read_text(encoding="utf-8")
    for name, sequences_per_gpu in WORKLOADS.items():
        begin, end = f"<!-- weak scaling of {name} -->\n", f"<!-- /weak scaling of {name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}{table(name, sequences_per_gpu)}\n{end}{rest.partition(end)[2]}"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
