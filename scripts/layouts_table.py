"""Bring the table of published layouts in docs/layouts.md up to date: what each takes, and what is found beside it.

python scripts/layouts_table.py
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import mofa
from mofa.errors import StrategyError
from mofa.plan.result import Plan
from mofa.units import GIB

PAGE = Path(__file__).resolve().parent.parent / "docs" / "layouts.md"
BEGIN, END = "<!-- published layouts: begin -->\n", "<!-- published layouts: end -->\n"
ENDS = "account-for-embedding-in-pipeline-split+account-for-loss-in-pipeline-split"


class Published(NamedTuple):
    """A layout that somebody published, with the job that it is for."""

    name: str
    workload: str
    gpus: int
    global_batch: int
    seq_len: int
    strategy: str
    layout: str
    source: str
    framework: dict[str, str] = {}
    hardware: str = "h100-hgx"


BRIDGE = "Megatron-Bridge scripts/performance/configs"
DEEPEP = {"dispatcher": "deepep", "allocator": "expandable"}
LAYOUTS = (
    Published(
        "DeepSeek-V3", "deepseek-v3", 1024, 8192, 4096,
        "tp=2 pp=8 vpp=4 ep=64 etp=1 recompute=selective:mla_up_proj+mlp", "Et|(tt|)*30mL",
        f"{BRIDGE}/deepseek", DEEPEP,
    ),
    Published(
        "DeepSeek-V3", "deepseek-v3", 1024, 8192, 4096, "pp=16 vpp=2 ep=64 etp=1 recompute=full", "Et*3|(tt|)*29m|L",
        "Megatron-LM docs, pipeline_parallel_layout.md (degrees; recomputation ours)", DEEPEP,
    ),
    Published(
        "Kimi K2", "kimi-k2", 1024, 8192, 4096, "tp=8 pp=16 vpp=2 ep=64 etp=1 recompute=selective:mla_up_proj+mlp",
        "Et|(tt|)*30L", f"{BRIDGE}/kimi", DEEPEP,
    ),
    Published(
        "Llama 3.1 405B", "llama3-405b", 1024, 512, 8192, "tp=8 pp=8 vpp=8 cp=2 recompute=full:1", ENDS,
        f"{BRIDGE}/llama (recomputation ours); one layer fewer at both ends as in arXiv 2407.21783, section 3.3.2",
    ),
    Published(
        "Qwen3 235B-A22B", "qwen3-235b-a22b", 256, 2048, 4096, "tp=2 pp=8 vpp=4 ep=32 etp=1 recompute=full", ENDS,
        f"{BRIDGE}/qwen (recomputation ours)", DEEPEP,
    ),
)  # fmt: skip
"""On H100s as mofa knows them. Layouts and degrees are the sources'; overlapped all-to-alls are not modelled."""


def main() -> None:
    """Rewrite the part between the markers."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    header = (
        "| model, GPUs and degrees | layout | step | peak | found beside it | step | peak | bound (gap) | source |\n"
    )
    lines = [header, "|---|---|---:|---:|---|---:|---:|---:|---|\n", *map(row, LAYOUTS)]
    PAGE.write_text("".join((before, BEGIN, *lines, END, after)), encoding="utf-8")


def row(published: Published) -> str:
    """A published layout, beside the framework's own split and what the search finds from it."""
    job = mofa.load_workload(published.workload, seq_len=published.seq_len, global_batch=published.global_batch)
    machines = mofa.load_cluster(published.hardware, published.gpus)
    framework = mofa.load_framework("megatron", overrides=published.framework)
    named = f"{published.strategy} layout={published.layout}"
    given = mofa.estimate(job, machines, named, framework=framework)
    plan = mofa.find_layout(job, machines, named, framework=framework)
    assert plan.layout is not None
    assert plan.layout.search is not None
    search = plan.layout.search
    cells = [
        f"{published.name}, {published.gpus:,}: {published.strategy}",
        f"`{_escaped(search.before)}`",
        f"{given.step_s:.2f} s{_beside_own(given, job, machines, framework, published.strategy)}",
        _peak(given),
        "itself" if plan.layout.by != "search" else f"`{_escaped(plan.layout.text)}`",
        f"{plan.step_s:.2f} s ({100.0 * (plan.step_s / given.step_s - 1.0):+.1f} %)",
        _peak(plan),
        f"{search.bound_s:.2f} s ({100.0 * search.gap_fraction:.1f} %)",
        published.source,
    ]
    return f"| {' | '.join(cells)} |\n"


def _beside_own(given: Plan, job: object, machines: object, framework: object, strategy: str) -> str:
    """By how much the published layout is slower or faster than the split without one."""
    try:
        own = mofa.estimate(job, machines, strategy, framework=framework)  # type: ignore[arg-type]
    except StrategyError:
        return ""
    return f" ({100.0 * (given.step_s / own.step_s - 1.0):+.1f} %)"


def _peak(plan: Plan) -> str:
    return f"{plan.memory.device_bytes / GIB:.1f} GiB" + ("" if plan.memory.fits else ", does not fit")


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
