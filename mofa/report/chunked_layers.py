"""Measured MoE layers in token chunks beside their predictions: errors by group, and every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mofa.report.tables import Columns, markdown_table, print_paragraph, print_table
from mofa.units import GIB, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from mofa.calibrate.chunked_check import MeasuredAndPredictedLayer
    from mofa.validate.validation_report import LayerComparison

QUANTITIES = (("peak_bytes", "peak allocated"), ("reserved_bytes", "reserved"), ("step", "step"),
              ("forward", "forward"), ("backward", "backward"))  # fmt: skip
GROUP_COLUMNS: Columns = (
    ("layers", "left"), ("number", "right"), *((words, "right") for _, words in QUANTITIES)
)  # fmt: skip
LAYER_COLUMNS: Columns = (
    ("ranks", "right"), ("hidden", "right"), ("tokens a rank", "right"), ("Zipf", "right"), ("chunks", "right"),
    ("peak GiB", "right"), ("predicted", "right"), ("error", "right"), ("reserved", "right"), ("step", "right"),
    ("predicted", "right"), ("error", "right"),
)  # fmt: skip


def layer_group_cells(groups: Sequence[tuple[str, int, Mapping[str, float]]]) -> list[list[str]]:
    """Rows under GROUP_COLUMNS: mean absolute errors."""
    return [
        [name, str(n), *(f"{errors[q]:.1%}" if q in errors else "–" for q, _ in QUANTITIES)]
        for name, n, errors in groups
    ]


def layer_cells(score: MeasuredAndPredictedLayer) -> list[str]:
    """One layer under LAYER_COLUMNS."""
    s, values = score.shape, score.values

    def pair(quantity: str, scale: float) -> list[str]:
        if quantity not in values:
            return ["–", "–", "–"]
        measured, predicted = values[quantity]
        shown = [format_seconds(x) if scale == 0 else f"{x / scale:.2f}" for x in (measured, predicted)]
        return [*shown, f"{predicted / measured - 1:+.1%}"]

    return [
        str(s["ep"]), str(s["hidden"]), str(s["tokens"]), str(s["skew"]), str(s["chunks"]), *pair("peak_bytes", GIB),
        pair("reserved_bytes", GIB)[2], *pair("step", 0),
    ]  # fmt: skip


LAYER_WORDS = """\
One MoE layer of plain PyTorch, forward and backward, whose tokens go through dispatch, experts and combine in chunks,
each recomputed in the backward pass (`mofa calibrate run --families chunked_moe`, [calibration.md](calibration.md)).
Experts are loaded by a Zipf law, the popular ones on the first rank. Predicted by the planner's own form: the tape with
its chunks, the bundled profile's curves, the tensors' lives; nothing is fitted on these layers. The second
set was predicted before it was measured, and how far off that was is in [moe.md](moe.md). Peaks are the fullest rank's,
weights and main gradients included; steps the slowest rank's. Errors are mean absolute ones by group, then signed."""


def chunked_layer_tables(layers: Sequence[LayerComparison]) -> list[str]:
    """The Markdown tables of a report's layers: groups, then every layer."""
    from mofa.calibrate.chunked_check import MeasuredAndPredictedLayer, summarise_layer_errors

    scores = []
    for layer in layers:
        by_quantity = {
            "step": layer.step_time,
            "peak_bytes": layer.peak_allocated,
            "reserved_bytes": layer.peak_reserved,
        }
        values = {name: (of.measured, of.predicted) for name, of in by_quantity.items() if of is not None}
        scores.append(MeasuredAndPredictedLayer(layer.folder, layer.shape, values, layer.split))
    groups = [row[:-2] for row in layer_group_cells(summarise_layer_errors(scores))]  # phases are not in the report
    return [markdown_table(GROUP_COLUMNS[:-2], groups), markdown_table(LAYER_COLUMNS, [layer_cells(s) for s in scores])]


def print_chunked_layers(scores: Sequence[MeasuredAndPredictedLayer], console: Console) -> None:
    """Errors by group, mean of the absolute ones."""
    from mofa.calibrate.chunked_check import TARGETS, summarise_layer_errors

    groups = summarise_layer_errors(scores)
    print_table(console, "MoE layers in token chunks: mean absolute error", GROUP_COLUMNS, layer_group_cells(groups),
                leaves=("backward", "forward"))  # fmt: skip
    wanted = ", ".join(f"{dict(QUANTITIES)[q]} {bar:.0%}" for q, bar in TARGETS.items())
    print_paragraph(console, f"wanted of all: {wanted}; profile: bundled, nothing fitted on these layers")
