"""Experts' products on several streams: by hand, bounds, the closed form, and a fit that finds what made the data."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mofa
from mofa.calibrate.cases import Case, Sample
from mofa.calibrate.fits.fit import fit_curves, predict_row_times
from mofa.calibrate.measurements import Row
from mofa.calibrate.shapes.families import all_cases_of_family
from mofa.cost.kernels.compute import grouped_gemm_s
from mofa.cost.kernels.multi_stream import balanced_multi_stream_products_s, multi_stream_products_s
from mofa.cost.provenance import component_provenance
from mofa.specs.curves import GemmForm
from mofa.specs.load import load_cluster
from mofa.specs.multi_stream import MultiStreamForm

SINGLE = GemmForm(((128, 256, 8.5e14), (128, 128, 8.2e14), (64, 64, 5e14)), 130.0, 3e-6, 3e12, 3.0)
FORM = MultiStreamForm(1e-5, 2e-6, 1.0, 3e12, 2e12, 2.4)
TILE = GemmForm(((128, 128, 132 * 128 * 128 * 2 * 1024 / 10e-6),), 0.0, 0.0, 1e30, 8.0, splits=(1,))
"""A tile of 1024 along k takes 10 us on one of 132 multiprocessors."""
SHARP = MultiStreamForm(5e-6, 1e-6, 1.0, 1e30, 1e30, 256.0)
"""5 us around, 1 us between the starts of two products."""


@pytest.mark.parametrize(
    ("loads", "expected_us"),
    [
        ([128] * 4, 10.0),  # a tile each, side by side: as long as one
        ([128] * 132, 10.0 + 132.0),  # a wave of tiles, whose products start one after the other
        ([128 * 33] * 8, 20.0 + 8.0),  # four fill a wave
        ([128 * 33, 0, 0, 128 * 33], 10.0),  # those without rows take nothing
        ([128 * 132] * 8, 80.0 + 8.0),
    ],
)
def test_products_by_hand(loads: list[int], expected_us: float) -> None:
    took = multi_stream_products_s([loads], 128, 1024, 0, SHARP, TILE, num_sms=132)
    assert float(took[0]) * 1e6 == pytest.approx(5.0 + expected_us, rel=1e-2)


def test_a_weight_gradient_reduces_over_its_experts_rows_and_is_added() -> None:
    """1024 and 2048 rows of one tile each: the longer one's 20 us; adding moves 6 bytes an element at 1 TB/s more."""
    took = multi_stream_products_s([[1024, 2048]], 128, 128, 2, SHARP, TILE, num_sms=132)
    assert float(took[0]) * 1e6 == pytest.approx(5.0 + 20.0, rel=1e-2)
    adding = MultiStreamForm(5e-6, 1e-6, 1.0, 1e30, 1e9, 256.0)
    added = multi_stream_products_s([[1024, 2048]], 128, 128, 2, adding, TILE, num_sms=132, added_bytes=6.0)
    assert float(added[0]) * 1e6 == pytest.approx(5.0 + 2 * 128 * 128 * 6 / 1e3, rel=1e-2)
    forward = multi_stream_products_s([[1024, 2048]], 128, 128, 0, adding, TILE, num_sms=132, added_bytes=6.0)
    assert float(forward[0]) < 30e-6


@given(st.lists(st.integers(0, 4000), min_size=1, max_size=40), st.integers(64, 8192), st.integers(64, 8192),
       st.sampled_from([0, 1, 2]))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_never_beats_its_rate_or_its_bytes_and_more_rows_never_help(
    loads: list[int], n: int, k: int, layout: int
) -> None:
    took, more = (
        float(multi_stream_products_s([x], n, k, layout, FORM, SINGLE, num_sms=132)[0]) for x in (loads, [*loads, 64])
    )
    assert took <= more
    assert 2.0 * sum(loads) * n * k / took <= 8.5e14
    active = sum(load > 0 for load in loads)
    assert took >= 2.0 * (sum(loads) * (n + k) + active * n * k) / 3e12
    assert took >= 1e-5 + 2e-6 * active


@given(st.integers(64, 8192), st.integers(2, 128), st.integers(128, 8192), st.integers(128, 8192), st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_closed_form_is_within_a_tile_of_even_loads(each: int, groups: int, n: int, k: int, wgrad: bool) -> None:
    """It counts on average half a tile of rows, or half a step along k, more than what fits by chance; a tile has 256
    rows at most. Of one group that half may begin another wave."""
    even = float(multi_stream_products_s([[each] * groups], n, k, 2 if wgrad else 0, FORM, SINGLE, num_sms=132)[0])
    closed = float(
        balanced_multi_stream_products_s(each * groups, groups, n, k, FORM, SINGLE, num_sms=132, wgrad=wgrad)
    )
    assert 0.6 * even < closed < even * (1.0 + 256 / each) + 1e-6


def test_a_fit_finds_what_made_the_data() -> None:
    """On the shapes of the bench, weights' gradients with the fp32 ones that they are added to."""
    layouts = {"fwd": 0, "dgrad": 1, "wgrad": 2}

    def took(case: Case) -> float:
        loads = [int(x) for x in str(case.shape["loads"]).split(",")]
        shape = case.shape_size("n"), case.shape_size("k"), layouts[case.op]
        return float(multi_stream_products_s([loads], *shape, FORM, SINGLE, num_sms=132, added_bytes=6.0)[0])

    rows = [
        Row(c, Sample(t := took(c), t, t, 7), "G", "h") for c in all_cases_of_family("te_experts") if c.split == "grid"
    ]
    fitted = fit_curves(rows[::2], num_sms=132, gpu="G", single=SINGLE)
    predicted, _ = predict_row_times(fitted, rows[1::2])
    error = np.abs(predicted / [r.sample.median_s for r in rows[1::2]] - 1)
    assert np.median(error) < 0.01 and np.quantile(error, 0.9) < 0.03
    assert not fit_curves(rows, num_sms=132, gpu="G").multi_stream  # without single products to build on


def test_until_it_is_measured_a_gpu_assumes_starts_around_single_products() -> None:
    gpu = mofa.load_cluster("h100-hgx", 8).gpu
    curves = gpu.curves.model_copy(update={"multi_stream": {}})
    curves.__dict__.pop("multi_stream_curves", None)  # a copy has what was derived before
    assert {curve.provenance for curve in curves.multi_stream_curves.values()} == {"assumed"}
    assert curves.multi_stream_curves["bf16"].form.bytes_per_s == curves.gemm["bf16"].form.bytes_per_s
    took = [float(grouped_gemm_s(64 * 1024, 64, 2816, 2048, gpu, kernel=kernel)) for kernel in ("one", "multi-stream")]  # type: ignore[arg-type]
    assert 0.7 < took[0] / took[1] < 1.3
    assert float(grouped_gemm_s(0, 64, 2816, 2048, gpu, kernel="multi-stream")) == 0.0


@pytest.mark.parametrize("node", ["h100-hgx", "h200-hgx"])
def test_fp8_weight_gradients_are_bound_by_what_they_add_to(node: str) -> None:
    """Eight experts as wide as Mixtral 8x22B's: a quarter of the tokens takes hardly less, an H200 less than an H100 by
    most of what its memory is faster. 2.9 ps an element on an H200 (h200-te1-mixtral22b-1l-2k-blockwise-traced)."""
    gpu = load_cluster(node, 1).gpu
    widths = 8, 32768, 6144
    few, many = (
        float(grouped_gemm_s(rows, *widths, gpu, "fp8_block_rows", wgrad=True, kernel="multi-stream", added_bytes=6))
        for rows in (1024, 4096)
    )
    assert 0.85 < few / many < 1.0
    wanted_s = {"h100-hgx": 4.0e-12, "h200-hgx": 2.9e-12}[node]
    assert many / (8 * 32768 * 6144) == pytest.approx(wanted_s, rel=0.12)


def test_a_gpu_whose_fp8_was_not_measured_has_products_of_experts_all_the_same() -> None:
    """By PyTorch's fp8 products and an H100's starts, and it says so: weights' gradients are only assumed then."""
    cluster = load_cluster("h100-hgx", 8)
    curves, own = cluster.gpu.curves, ("bf16", "fp8", "fp32")
    kept = {
        family: {kind: curve for kind, curve in getattr(curves, family).items() if kind in own}
        for family in ("gemm", "grouped_gemm", "multi_stream")
    }
    fields = {name: getattr(curves, name) for name in type(curves).model_fields}
    gpu = cluster.gpu.model_copy(update={"curves": type(curves)(**{**fields, **kept})})
    cluster = cluster.model_copy(update={"gpu": gpu})
    job = mofa.load_workload("qwen3-30b-a3b", overrides={"precision.gemm": "fp8-tensorwise", "model.num_layers": 4})
    plan = mofa.estimate(job, cluster, "ep=8 micro_batch=1", replay=False)
    assert plan.time.exposed["grouped_gemm"] > 0.0
    said = component_provenance(cluster, {"fp8_split"}, {})["grouped_gemm"]
    assert said == component_provenance(cluster, {"fp8_block_rows"}, {})["grouped_gemm"] == "assumed"
