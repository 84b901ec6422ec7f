"""Figures of others: the committed rows of SimuMax's B200 are what the profile's curves are made of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mofa.calibrate.fits.published_kernels import fit_published_kernel_curves
from mofa.calibrate.measurements import read_rows
from mofa.specs.load import load_cluster
from mofa.specs.power import clock_at_power_draw
from tests.committed import read_yaml

ROOT = Path(__file__).parents[2]
ROWS = read_rows(ROOT / "measurements" / "b200-simumax")
KEPT = {"gemm bf16": 1.05, "attention_cudnn_fwd bf16": 1.01, "attention_cudnn_bwd bf16": 2.0}


def test_the_rows_are_efficiencies_of_a_known_peak() -> None:
    """An efficiency of SimuMax's file is at most one of 2250 TFLOP/s."""
    for row in (r for r in ROWS if r.case.family == "gemm"):
        size = row.case.shape_size
        assert 0 < 2 * size("m") * size("n") * size("k") / row.sample.median_s < 2250e12


def test_full_clock_and_the_power_limit() -> None:
    """Products are 5 % faster between memory-bound kernels, forward attention 1 %; none beyond full clock."""
    curves = fit_published_kernel_curves(ROWS, num_sms=148, power_shares=KEPT)
    for name, ratio in KEPT.items():
        alone, between = curves.sustained[f"{name} alone"], curves.sustained[f"{name} between_memory"]
        assert 0.6 < alone <= 1.0
        assert between == pytest.approx(min(alone * ratio, 1.0))
    assert curves.sustained["attention_cudnn_bwd bf16 between_memory"] == 1.0


@pytest.mark.parametrize("clock", [0.6, 0.75, 0.85])
def test_the_two_limited_clocks_differ_by_the_same_factor_wherever_the_limit_is(clock: float) -> None:
    """Memory-bound kernels draw 0.7 of the limit at the products' clock and take 0.39: (0.61 + 0.39 x 0.7)^-1/2."""
    between = clock_at_power_draw(np.array([(0.61 + 0.39 * 0.7) * clock**-2]))
    assert float(between[0]) / clock == pytest.approx(0.883**-0.5)


def test_the_profile_holds_them() -> None:
    profile = read_yaml(ROOT / "hardware_profiles" / "gpus" / "b200.yaml")
    known = profile["curves"]["gemm"]["bf16"]
    assert known["provenance"] == "measured"
    assert "SimuMax" in known["source"]
    assert load_cluster("b200-hgx", 8).gpu.curves.gemm["bf16"].median_abs_error < 0.06
