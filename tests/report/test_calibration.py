"""The figure of a family: every point above and below, clipped where it is far off."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mofa.report.figures.calibration import plot_calibration, work_size


def point(
    shape: str, split: str = "grid", family: str = "gemm", error: float = 0.1, far: bool = False
) -> dict[str, Any]:
    return {
        "family": family, "op": "fwd", "variant": "x", "dtype": "bf16", "split": split, "shape": shape,
        "measured_s": 1e-3, "predicted_s": 1e-3 * (1 + error), "error": error, "extrapolated": far,
    }  # fmt: skip


def offsets(axes: Any) -> list[Any]:
    return [np.asarray(collection.get_offsets()) for collection in axes.collections]


def test_every_point_of_the_family_is_drawn() -> None:
    shapes = ["m=1024 n=1024 k=1024", "m=2048 n=1024 k=1024", "m=4096 n=1024 k=1024"]
    points = [point(shapes[0]), point(shapes[1], "heldout", error=-0.2), point(shapes[2], error=3.0, far=True)]
    other = point("bytes=4096 group=2", family="collective")
    top = plot_calibration([*points, other], "gemm")
    fitted, held, predicted = offsets(top)
    assert (len(fitted), len(held), len(predicted)) == (2, 1, 3)
    assert held[0] == pytest.approx([2 * 2048 * 2**20, 2 * 2048 * 2**20 / 1e-3 / 1e12])
    bottom = top.figure.axes[1]
    assert sorted(float(y) for group in offsets(bottom) for _, y in group) == pytest.approx([-20.0, 10.0, 40.0])
    assert top.get_xlabel().endswith("[FLOP]")


def test_collectives_have_a_line_per_collective_and_group() -> None:
    sizes = [2**k for k in range(12, 20)]
    points = [point(f"bytes={size} group={group}", family="collective") for size in sizes for group in (2, 4)]
    top = plot_calibration(points, "collective")
    lines = [np.asarray(line.get_xdata(), dtype=float) for line in top.lines]
    assert [list(x) for x in lines] == [[float(size) for size in sizes]] * 2


def test_an_optimizer_is_counted_by_its_parameters() -> None:
    assert work_size("memory_bound", "params=1000 tensors=3") == 1000.0
