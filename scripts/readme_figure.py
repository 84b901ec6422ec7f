"""Draw the README's figure, docs/figures/plan.png, from a real run of `mofa plan`.

    python scripts/readme_figure.py [FILE]

Left: every plan that fits, its memory against its throughput, the front and the best plan marked. Right: where the
step of the best plans goes.
"""

from __future__ import annotations

import sys
from pathlib import Path

WORKLOAD, CLUSTER, GPUS = "deepseek-v3", "h800-hgx", 2048
ROOT = Path(__file__).resolve().parent.parent


def draw(path: Path, workload: str = WORKLOAD, cluster: str = CLUSTER, gpus: int = GPUS) -> None:
    """Search, and write the figure as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    import mofa
    from mofa.report.pareto import plot_pareto
    from mofa.report.time_breakdown import plot_time_breakdown

    job, machines = mofa.load_workload(workload), mofa.load_cluster(cluster, gpus)
    search = mofa.find_plans(job, machines, top=5)
    plans, table = search.report.plans, search.table()
    best = plans[0]
    figure = Figure(figsize=(15.0, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.0))
    plot_pareto(
        table[table["fits"]],
        capacity_bytes=best.memory.capacity_bytes,
        margin_bytes=best.memory.margin_bytes,
        chosen=best,
        ax=left,
    )
    plot_time_breakdown(plans, ax=right)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "figures" / "plan.png")
