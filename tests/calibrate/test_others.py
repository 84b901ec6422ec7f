"""Figures of others: the committed rows of SimuMax's B200 are what the profile's curves are made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mofa.calibrate.measurements import read_rows
from mofa.calibrate.others import fit_others
from mofa.specs.load import load_cluster

ROOT = Path(__file__).parents[2]
ROWS = read_rows(ROOT / "measurements" / "b200-simumax")
KEPT = {"gemm bf16": 0.5, "attention_cudnn_fwd bf16": 0.5, "attention_cudnn_bwd bf16": 0.5}


def test_the_rows_are_efficiencies_of_a_known_peak() -> None:
    """An efficiency of SimuMax's file is at most one of 2250 TFLOP/s."""
    for row in (r for r in ROWS if r.case.family == "gemm"):
        size = row.case.size
        assert 0 < 2 * size("m") * size("n") * size("k") / row.sample.median_s < 2250e12


def test_full_clock_and_the_power_limit() -> None:
    """Long products and long contexts lose a quarter; half of that is kept between memory-bound kernels."""
    curves = fit_others(ROWS, num_sms=148, kept=KEPT)
    for name in ("gemm bf16", "attention_cudnn_fwd bf16", "attention_cudnn_bwd bf16"):
        alone, between = curves.sustained[f"{name} alone"], curves.sustained[f"{name} between_memory"]
        assert 0.6 < alone <= 1.0
        assert 1.0 - between == pytest.approx((1.0 - alone) / 2)


def test_the_profile_holds_them() -> None:
    profile = yaml.safe_load((ROOT / "hardware_profiles" / "gpus" / "b200.yaml").read_text(encoding="utf-8"))
    known = profile["curves"]["gemm"]["bf16"]
    assert known["provenance"] == "measured"
    assert "SimuMax" in known["source"]
    assert load_cluster("b200-hgx", 8).gpu.curves.gemm["bf16"].median_abs_error < 0.06
