"""What was predicted before it was measured: whole, and of plans that hold runs unlike any record."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from mofa.calibrate.cases import Shape
from mofa.calibrate.shapes.chunked import CHUNKS, FRESH_SKEWS, chunked_layer_cases
from mofa.measure.expand import expand_run
from mofa.measure.runs import task_of_run
from mofa.specs.run_files import load_runs

REFERENCES = Path(__file__).parents[2] / "reference_runs"
PLANS = {
    "blind.csv": ("eighth", "ninth"),
    "blind_second.csv": ("tenth",),
    "blind_eighth.csv": ("seventeenth",),
    "blind_h100_second.csv": ("h100-second",),
    "blind_h100_third.csv": ("h100-third",),
    "blind_h100_host.csv": ("h100-host",),
}


def column(name: str, key: str) -> list[str]:
    with (REFERENCES / name).open(encoding="utf-8", newline="") as file:
        return [row[key] for row in csv.DictReader(file)]


@pytest.mark.parametrize("name", PLANS)
def test_every_planned_run_was_predicted_and_its_framework_can_run_it(name: str) -> None:
    plans = [REFERENCES / "plans" / f"{plan}.yaml" for plan in PLANS[name]]
    runs = [expand_run(run, path.parent) for path in plans for run in load_runs(path)]
    assert column(name, "id") == [run.run.id for run in runs]
    for run in runs:
        assert task_of_run(run, timeout_s=1.0).num_gpus == run.run.gpus


def test_every_fresh_layer_was_predicted() -> None:
    fresh = [
        c.shape_text
        for gpus in (1, 2, 4)
        for c in chunked_layer_cases(gpus)
        if c.split == "fresh" and c.shape_size("ep") == gpus
    ]
    assert column("blind_layers.csv", "shape") == fresh


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_fresh_layers_meet_every_skew_in_every_number_of_chunks(gpus: int) -> None:
    def key(shape: Shape) -> tuple[int, str]:
        return int(shape["chunks"]), str(shape["skew"])

    cases = [case for case in chunked_layer_cases(gpus) if case.split == "fresh"]
    assert {key(case.shape) for case in cases} == {(c, s) for c in CHUNKS for s in FRESH_SKEWS}
    held = {
        (c.shape_size("hidden"), c.shape_size("ffn"), c.shape_size("experts"))
        for c in chunked_layer_cases(gpus)
        if c.split == "heldout"
    }
    assert not held & {(c.shape_size("hidden"), c.shape_size("ffn"), c.shape_size("experts")) for c in cases}
    assert all(case.shape_size("tokens") % (8 * case.shape_size("ep")) == 0 for case in cases)
