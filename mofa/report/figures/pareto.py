"""Memory against throughput of every feasible plan, with the front that no other plan beats in both."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mofa.report.figures.style import ACCENT, INK, MUTED, given_or_new_axes, remove_clutter
from mofa.units import GIB

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from mofa.plan.result import Plan


def pareto_front(device_bytes: NDArray[np.float64], tokens_per_s_per_gpu: NDArray[np.float64]) -> NDArray[np.intp]:
    """Rows that no other row beats in memory and throughput at once, by rising memory.

    Parameters
    ----------
    device_bytes
        Memory of the fullest rank. [B]
    tokens_per_s_per_gpu
        Throughput. [tokens/s]

    Returns
    -------
    NDArray
        Indices of the front. [-]

    Examples
    --------
    >>> pareto_front(np.array([2.0, 1.0, 3.0, 2.0]), np.array([5.0, 4.0, 5.0, 3.0]))
    array([1, 0])
    """
    order = np.lexsort((-tokens_per_s_per_gpu, device_bytes))
    throughput = tokens_per_s_per_gpu[order]
    best_before = np.concatenate(([-np.inf], np.maximum.accumulate(throughput)[:-1]))
    return order[throughput > best_before]


def plot_pareto(
    table: pd.DataFrame,
    *,
    capacity_bytes: float,
    margin_bytes: float = 0.0,
    chosen: Plan | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot every feasible plan as a dot, the front, the chosen plan and the capacity.

    Parameters
    ----------
    table
        Feasible plans with the columns ``device_bytes`` [B] and ``tokens_per_s_per_gpu`` [tokens/s]; those whose
        ``costed_by``, if there is one, is ``replay`` are told apart.
    capacity_bytes
        Memory that the device offers. [B]
    margin_bytes
        What a plan must not fill of the capacity. [B]
    chosen
        The plan to mark.
    ax
        Axes to draw on; new ones where absent.
    """
    ax = given_or_new_axes(ax, 9.0, 5.0)
    memory = table["device_bytes"].to_numpy(dtype=np.float64)
    throughput = table["tokens_per_s_per_gpu"].to_numpy(dtype=np.float64)
    front = pareto_front(memory, throughput)
    size = 14.0 if len(table) < 2000 else 4.0
    ax.scatter(
        memory / GIB,
        throughput,
        s=size,
        color=MUTED,
        linewidths=0,
        rasterized=True,
        label=f"{len(table):,} plans that fit",
    )
    played = table["costed_by"].to_numpy() == "replay" if "costed_by" in table.columns else np.zeros(len(table), bool)
    if played.any():
        label = f"{played.sum():,} of them played out"
        ax.scatter(memory[played] / GIB, throughput[played], s=20.0, facecolors="none", edgecolors=ACCENT, label=label)
    ax.step(memory[front] / GIB, throughput[front], where="post", color=INK, linewidth=1.2)
    ax.plot(memory[front] / GIB, throughput[front], "o", color=INK, markersize=3.5, label=f"front ({len(front)})")
    if chosen is not None:
        x, y = chosen.memory.device_bytes / GIB, chosen.tokens_per_s_per_gpu
        ax.plot([x], [y], "*", color=ACCENT, markersize=15, markeredgecolor="white", label="chosen plan", zorder=5)
    ax.axvline(capacity_bytes / GIB, color=ACCENT, linewidth=1.2, label=f"capacity {capacity_bytes / GIB:.1f} GiB")
    if margin_bytes:
        limit = (capacity_bytes - margin_bytes) / GIB
        ax.axvline(limit, color=ACCENT, linewidth=1.0, linestyle="--", label=f"limit {limit:.1f} GiB")
    ax.set_xlim(left=0.0)
    ax.set_ylim(bottom=0.0)
    ax.set_xlabel("memory of the fullest rank [GiB]")
    ax.set_ylabel("throughput [tokens/s/GPU]")
    ax.set_title("Memory and throughput of the plans that fit", loc="left")
    remove_clutter(ax, grid_axis="both")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return ax
