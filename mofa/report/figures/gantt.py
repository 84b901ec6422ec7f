"""A pipeline's step as a Gantt chart: what every rank computes, sends and waits for, told apart in print too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mofa.report.figures.style import INK, given_or_new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mofa.replay.time.time_replayed import Computation, ReplayedTime

LOOKS = {
    "F": ("forward", "#9ecae1", ""),
    "B": ("backward", "#3182bd", ""),
    "I": ("backward by inputs", "#3182bd", ""),
    "W": ("backward by weights", "#c7e9c0", "////"),
    "O": ("gradient norm and optimizer", "#31a354", "xx"),
}
"""Name, colour and hatch of each kind of computation: light, dark and hatched tell them apart without colour."""
TRANSFER = ("sends and receives", "#e6550d", "||||")
BUBBLE = ("bubble", "#ffffff", "....")
MAX_COMPUTATIONS = 96
"""Of a rank; of a longer step the beginning is drawn."""


def plot_pipeline(played: ReplayedTime, *, label: str | None = None, ax: Axes | None = None) -> Axes:
    """Plot a row per pipeline rank: computations, sends and receives beneath, and what is left over, the bubble.

    Parameters
    ----------
    played
        The step.
    label
        What it is of, for the title.
    ax
        Axes to draw on; new ones where absent.
    """
    from matplotlib.patches import Patch

    ranks = len(played.spans)
    ax = given_or_new_axes(ax, 11.0, 1.8 + 0.45 * ranks)
    busiest = max(played.spans, key=len)
    cut = len(busiest) > MAX_COMPUTATIONS
    until = busiest[MAX_COMPUTATIONS - 1].end_s if cut else max(spans[-1].end_s for spans in played.spans)
    kinds = [
        kind for kind in LOOKS if any(s.kind == kind and s.start_s < until for spans in played.spans for s in spans)
    ]
    for row, spans in enumerate(played.spans):
        ax.broken_barh([(0.0, until)], (row - 0.36, 0.72), facecolor=BUBBLE[1], edgecolor="#bdbdbd", linewidth=0.3,
                       hatch=BUBBLE[2])  # fmt: skip
        for kind in kinds:
            _, colour, hatch = LOOKS[kind]
            bars = [(s.start_s, min(s.end_s, until) - s.start_s) for s in spans if s.kind == kind and s.start_s < until]
            if bars:
                ax.broken_barh(bars, (row - 0.36, 0.56), facecolor=colour, edgecolor=INK, linewidth=0.3, hatch=hatch)
        _numbers(ax, spans, row, until)
    sent = False
    for row, transfers in enumerate(played.transfers):
        bars = [(t.start_s, min(t.end_s, until) - t.start_s) for t in transfers if t.start_s < until < float("inf")]
        if bars:
            sent = True
            ax.broken_barh(bars, (row + 0.22, 0.14), facecolor=TRANSFER[1], edgecolor="white", linewidth=0.2,
                           hatch=TRANSFER[2])  # fmt: skip
    looks = [*(LOOKS[kind] for kind in kinds), *([TRANSFER] if sent else []), BUBBLE]
    seen: dict[str, Patch] = {}
    for name, colour, hatch in looks:
        seen.setdefault(name, Patch(facecolor=colour, edgecolor=INK, linewidth=0.4, hatch=hatch, label=name))
    ax.legend(handles=list(seen.values()), loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    ax.set_yticks(range(ranks))
    ax.set_ylim(ranks - 0.5, -0.5)
    ax.set_xlim(0.0, until)
    ax.set_ylabel("pipeline rank")
    ax.set_xlabel("time in the step [s]; numbers: micro-batches")
    extent = f"the first {until:.3g} of {played.step_s:.3g} s" if cut else f"a step of {played.step_s:.3g} s"
    ax.set_title(f"{label}: {extent}" if label else f"The pipeline: {extent}", loc="left", fontsize=10)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.tick_params(length=0)
    return ax


def _numbers(ax: Axes, spans: tuple[Computation, ...], row: int, until: float) -> None:
    """The micro-batch in every computation that is wide enough to be read."""
    for span in spans:
        if span.kind != "O" and span.end_s <= until and span.end_s - span.start_s > 0.012 * until:
            ax.text((span.start_s + span.end_s) / 2, row - 0.08, str(span.micro_batch), ha="center", va="center",
                    fontsize=6, color="white" if span.kind in ("B", "I") else INK)  # fmt: skip
