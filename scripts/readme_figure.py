"""Draw the README's figure and write its excerpt of the output, both from a real run of `mofa plan`.

    python scripts/readme_figure.py

docs/figures/plan.png, left: every plan that fits, its memory against its throughput, the front and the best plan
marked; right: where the step of the best plans goes. README.md, between its output markers: the plans and the time.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
WORKLOAD, CLUSTER, GPUS = "deepseek-v3", "h800-hgx", 2048
FIGURE = ROOT / "docs" / "figures" / "plan.png"


def draw(path: Path, workload: str = WORKLOAD, cluster: str = CLUSTER, gpus: int = GPUS) -> None:
    """Search, and write the figure as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    import mofa
    from mofa.report.figures.pareto import plot_pareto
    from mofa.report.figures.time_breakdown import plot_time_breakdown
    from mofa.report.phrases import strategy_in_two_lines

    job, machines = mofa.load_workload(workload), mofa.load_cluster(cluster, gpus)
    search = mofa.find_plans(job, machines, top=5)
    plans, table = search.report.plans, search.table()
    best = plans[0]
    figure = Figure(figsize=(13.0, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.15))
    plot_pareto(
        table[table["fits"]],
        capacity_bytes=best.memory.capacity_bytes,
        margin_bytes=best.memory.margin_bytes,
        chosen=best,
        ax=left,
    )
    left.legend(loc="upper left", bbox_to_anchor=(0.0, -0.13), ncols=2, frameon=False, fontsize=8)
    plot_time_breakdown(plans, labels=[strategy_in_two_lines(plan.strategy) for plan in plans], ax=right)
    right.set_xlim(right=1.12 * max(plan.step_s for plan in plans))
    right.set_xlabel("time per step [s]; hatched: hidden behind computing")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    draw(FIGURE)
