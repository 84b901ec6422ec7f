"""Measured chunked MoE layers beside what the planner's forms say of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from mofa.calibrate.cases import Shape, Split
from mofa.calibrate.chunked_layer import ChunkedLayerPrediction, predict_bench_layer
from mofa.calibrate.fits.folder import bundled_gpu_and_node_of_device
from mofa.calibrate.measurements import Row, read_rows_of_file
from mofa.calibrate.shapes.chunked import FAMILY, ISSUE, OPS
from mofa.specs.limited_reads import exists
from mofa.specs.load import load_cluster, load_framework

QUANTITIES = {"step": "step_s", "forward": "forward_s", "backward": "backward_s", "peak_bytes": "peak_bytes",
              "reserved_bytes": "reserved_bytes"}  # fmt: skip
"""Row of a layer to the field of its prediction."""
TARGETS = {"peak_bytes": 0.03, "step": 0.08}
"""Mean absolute error that a good model stays under. [-]"""


SETS: dict[Split, str] = {"heldout": "first set", "fresh": "second set"}


@dataclass(frozen=True)
class MeasuredAndPredictedLayer:
    """One layer: where it was measured, its shape, and quantity to measured and predicted. [s, B]"""

    folder: str
    shape: Shape
    values: dict[str, tuple[float, float]]
    split: Split = "heldout"

    def relative_error(self, quantity: str) -> float:
        """Predicted / measured - 1. [-]"""
        measured, predicted = self.values[quantity]
        return predicted / measured - 1


def predict_measured_layers(
    folders: Sequence[Path], *, split: Split | None = None, hosts: Mapping[str, float] | None = None,
    quantities: Collection[str] = tuple(QUANTITIES),
) -> list[MeasuredAndPredictedLayer]:  # fmt: skip
    """Every layer of the folders that was measured whole, predicted with the bundled profile of its GPU.

    On its own host: by the speed measured beside the layer, else by ``hosts``, mark of a machine to the issue of one
    small op [s], else the profile's. ``split`` chooses one held-out set, ``quantities`` what of :data:`QUANTITIES`
    is predicted.

    Raises
    ------
    SpecError
        If a file is corrupt, or no bundled profile knows the GPU.
    """
    framework = load_framework("torchtitan")  # only which communicators share: a layer of plain PyTorch has one
    scores = []
    for folder in folders:
        for rows in rows_by_layer(folder):
            last = rows[OPS[-1]]
            shape = last.case.shape
            if split not in (None, last.case.split):
                continue
            cluster = load_cluster(bundled_gpu_and_node_of_device(last.gpu, folder)[1], int(shape["ep"]))
            issue_s = rows[ISSUE].sample.median_s if ISSUE in rows else (hosts or {}).get(last.host)
            said = predict_bench_layer(shape, cluster.on_hosts("shared").with_host_speed(issue_s), framework)
            scores.append(
                MeasuredAndPredictedLayer(folder.name, shape, _beside(rows, said, quantities), last.case.split)
            )
    return scores


def rows_by_layer(folder: Path) -> list[dict[str, Row]]:
    """The rows of each layer of a folder by op; a layer whose last row is missing was interrupted."""
    path = folder / f"{FAMILY}.csv"
    layers: dict[str, dict[str, Row]] = {}
    for row in read_rows_of_file(path) if exists(path) else ():
        layers.setdefault(row.case.shape_text, {})[row.case.op] = row
    return [ops for ops in layers.values() if OPS[-1] in ops]


def _beside(
    rows: dict[str, Row], said: ChunkedLayerPrediction, quantities: Collection[str]
) -> dict[str, tuple[float, float]]:  # fmt: skip
    return {
        op: (rows[op].sample.median_s, float(getattr(said, field)))
        for op, field in QUANTITIES.items()
        if op in rows and op in quantities
    }


def summarise_layer_errors(scores: Sequence[MeasuredAndPredictedLayer]) -> list[tuple[str, int, dict[str, float]]]:
    """Groups of layers with their number and each quantity's mean absolute error: all, by width and ranks, by chunks.

    Examples
    --------
    >>> shape = {"hidden": 64, "ep": 2, "chunks": 4, "skew": "0.0"}
    >>> scores = [MeasuredAndPredictedLayer("a", shape, {"step": (1.0, value)}) for value in (1.1, 0.9)]
    >>> [(name, n, round(errors["step"], 3)) for name, n, errors in summarise_layer_errors(scores)][:2]
    [('all', 2, 0.1), ('2 ranks, hidden 64', 2, 0.1)]
    """
    groups: dict[str, list[MeasuredAndPredictedLayer]] = {"all": list(scores)}
    for score in scores:
        s = score.shape
        ranks = f"{s['ep']} rank{'s' if int(s['ep']) > 1 else ''}"
        sets = [f"{SETS[score.split]}, {ranks}"] if len({other.split for other in scores}) > 1 else []
        for name in (*sets, f"{ranks}, hidden {s['hidden']}", f"chunks {s['chunks']}", f"Zipf {s['skew']}"):
            groups.setdefault(name, []).append(score)
    order = sorted(
        groups, key=lambda name: (name != "all", "set" not in name, "rank" not in name, "chunks" not in name, name)
    )
    out = []
    for name in order:
        of = groups[name]
        errors = {
            q: fmean(abs(s.relative_error(q)) for s in of if q in s.values)
            for q in QUANTITIES
            if any(q in s.values for s in of)
        }
        out.append((name, len(of), errors))
    return out
