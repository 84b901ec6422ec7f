"""Physics of the forms: more work never takes less time, vectors agree with scalars, fits find what made the data."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mofa.calibrate.cases import Case, Sample
from mofa.calibrate.fits.fit import fit_curves, predict_row_times
from mofa.calibrate.measurements import Row
from mofa.cost.kernels.fitted_forms import (
    attention_s,
    balanced_grouped_gemm_s,
    collective_s,
    gemm_s,
    grouped_gemm_s,
    l2_miss_bytes,
    memory_bound_s,
)
from mofa.specs.curves import AttentionForm, CollectiveForm, GemmForm, GroupedGemmForm, MemoryBoundForm

GEMM = GemmForm(((128, 256, 8.5e14), (128, 128, 8.2e14), (64, 64, 5e14)), 130.0, 3e-6, 4e12, 3.2)
SIZE = st.integers(1, 40000)


@given(SIZE, SIZE, SIZE, st.integers(1, 5000))
@settings(max_examples=60, deadline=None)
def test_gemm_grows_with_its_rows_and_never_beats_its_rate(m: int, n: int, k: int, more: int) -> None:
    t = gemm_s([m, m + more], n, k, GEMM, element_bytes=2, num_sms=132)
    assert t[1] >= t[0] * (1 - 1e-12)
    assert 2 * m * n * k / t[0] <= 8.5e14
    assert t[0] >= ((m + n) * k + m * n) * 2 / 4e12


def test_a_partial_round_and_a_long_product_by_hand() -> None:
    """132 multiprocessors, a tile of 128 x 128 at 1 TFLOP/s each: a round of k = 6400 takes 209.7152 us.

    The 133rd tile begins a second round, of which 131/132 stays idle: with half of that saved it takes
    1 - 0.5 x 131/132 of a round. A product of 100 rounds takes 20.97 ms; gaining up to 10 %, half of it at 1 ms, it
    takes 0.1 x 20.97 / 21.97 longer.
    """
    round_s = 209.7152e-6
    plain = GemmForm(((128, 128, 132e12),), 0.0, 0.0, 1e30, 8.0, splits=(1,))
    partial = dataclasses.replace(plain, partial_round_saving=0.5)
    took = gemm_s([128 * 132, 128 * 133], 128, 6400, partial, element_bytes=2, num_sms=132)
    np.testing.assert_allclose(took, [round_s, round_s * (2 - 0.5 * 131 / 132)])
    slow = dataclasses.replace(plain, slowdown=0.1, slowdown_after_s=1e-3)
    long = gemm_s(128 * 132, 128 * 100, 6400, slow, element_bytes=2, num_sms=132)
    assert float(long) == pytest.approx(100 * round_s * (1 + 0.1 * 20.97152 / 21.97152))


@given(st.lists(st.tuples(SIZE, SIZE, SIZE), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_gemm_vector_is_scalar(shapes: list[tuple[int, int, int]]) -> None:
    m, n, k = np.array(shapes).T
    one_by_one = [float(gemm_s(*s, GEMM, element_bytes=2, num_sms=132)) for s in shapes]
    np.testing.assert_allclose(gemm_s(m, n, k, GEMM, element_bytes=2, num_sms=132), one_by_one)


@pytest.mark.parametrize("layout", [0, 1, 2])
def test_grouped_padding_of_experts_is_free_and_skew_never_helps(layout: int) -> None:
    form = GroupedGemmForm()
    even = grouped_gemm_s([[1024] * 8], 2048, 4096, layout, form, num_sms=132, groups=8)
    padded = grouped_gemm_s([[1024] * 8 + [0] * 5], 2048, 4096, layout, form, num_sms=132, groups=8)
    skewed = grouped_gemm_s([[1024 * 8 - 7, *[1] * 7]], 2048, 4096, layout, form, num_sms=132, groups=8)
    assert even == padded
    assert skewed >= even * 0.999


@given(st.integers(1, 200_000), st.integers(1, 64), st.integers(16, 8192), st.integers(16, 8192), st.booleans())
@settings(max_examples=60, deadline=None)
def test_balanced_experts_are_the_general_form(each: int, groups: int, n: int, k: int, wgrad: bool) -> None:
    each = max(each // groups, 1)
    loads, layout = np.full((1, groups), each), 2 if wgrad else 0
    whole = grouped_gemm_s(loads, n, k, layout, GroupedGemmForm(), num_sms=132, groups=groups)
    short = balanced_grouped_gemm_s(each * groups, groups, n, k, GroupedGemmForm(), num_sms=132, wgrad=wgrad)
    np.testing.assert_allclose(short, whole)


@given(SIZE, SIZE, SIZE, st.floats(0.5, 1.0))
@settings(max_examples=40, deadline=None)
def test_a_throttled_clock_and_a_batch_never_save_time(m: int, n: int, k: int, kept: float) -> None:
    alone = gemm_s(m, n, k, GEMM, element_bytes=2, num_sms=132)
    assert gemm_s(m, n, k, GEMM, element_bytes=2, num_sms=132, sustained=kept) >= alone * (1 - 1e-12)
    batch = gemm_s(m, n, k, GEMM, element_bytes=2, num_sms=132, count=3)
    assert alone <= batch <= 3 * alone + 1e-12


def test_attention_causal_is_between_half_and_full() -> None:
    form = AttentionForm(128, 132, 1e-6, 0.0, 1.0, 1.0, 1.0, 1e30)
    q = np.array([1024.0, 4096, 32768])
    full, causal = (attention_s(1, 32, 8, q, q, 128, 128, c, form, backward=False) for c in (0, 1))
    assert np.all(causal >= full / 2) and np.all(causal <= full)
    assert causal[-1] / full[-1] == pytest.approx(0.5, abs=0.02)


def test_stream_by_hand() -> None:
    # 16384 x 4096 bf16, read and written at 4 TB/s: 268 MB / 4e12 = 67.1 us, and 2 us of launch.
    form = MemoryBoundForm(2e-6, 4.0, 4e12)
    assert float(memory_bound_s(16384 * 4096, 16384, 4096, form)) == pytest.approx(69.1e-6, rel=1e-3)


def test_collective_start_grows_with_the_group() -> None:
    form = CollectiveForm(((8e-6, 1e11), (20e-6, 3e11)), 4)
    assert collective_s(4096.0, "all_gather", form, group=8) > 2 * collective_s(4096.0, "all_gather", form) * 0.99
    assert np.all(np.diff(collective_s(np.geomspace(4096, 2**30, 50), "all_reduce", form)) > 0)


def rows(cases: list[Case], times: np.ndarray) -> list[Row]:
    return [Row(c, Sample(float(t), float(t), float(t), 7), "G", "h") for c, t in zip(cases, times, strict=True)]


def test_fit_finds_the_gemm_that_made_the_data() -> None:
    random = np.random.default_rng(0)
    m, n, k = (np.exp(random.uniform(np.log(64), np.log(20000), 250)).astype(int) // 64 * 64 + 64 for _ in range(3))
    cases = [
        Case("gemm", "fwd", "x", "bf16", "grid", {"m": int(a), "n": int(b), "k": int(c)})
        for a, b, c in zip(m, n, k, strict=True)
    ]
    measured = rows(cases, gemm_s(m, n, k, GEMM, element_bytes=2, num_sms=132))
    curves = fit_curves(measured[:200], num_sms=132, gpu="G")
    predicted, outside = predict_row_times(curves, measured[200:])
    error = predicted / [r.sample.median_s for r in measured[200:]] - 1
    assert np.median(np.abs(error)) < 0.02
    assert outside.mean() < 0.1


def test_prediction_outside_the_range_is_marked_and_an_unknown_kernel_is_nan() -> None:
    form = MemoryBoundForm(2e-6, 6.0, 4e12)
    cases = [
        Case("memory_bound", "mul", "eager", "bf16", "grid", {"tokens": t, "width": 4096})
        for t in range(1024, 9000, 1024)
    ]
    times = memory_bound_s([c.shape_size("tokens") * 4096 for c in cases], 0, 0, form)
    curves = fit_curves(rows(cases, times), num_sms=132, gpu="G")
    near, far, other = (
        dataclasses.replace(cases[0], shape={"tokens": t, "width": 4096}, op=o)
        for t, o in ((2000, "mul"), (10**6, "mul"), (2000, "exp"))
    )
    predicted, outside = predict_row_times(curves, rows([near, far, other], np.ones(3)))
    assert predicted[0] == pytest.approx(2e-6 + 2000 * 4096 * 6 / 4e12, rel=1e-3)
    assert list(outside) == [False, True, False]
    assert np.isnan(predicted[2])


def test_held_out_rows_never_reach_the_fit() -> None:
    cases = [
        Case("memory_bound", "mul", "eager", "bf16", "grid", {"tokens": t, "width": 4096})
        for t in range(1024, 9000, 1024)
    ]
    grid = rows(cases, np.linspace(1e-5, 8e-5, len(cases)))
    held = rows(
        [dataclasses.replace(c, split="heldout", shape={**c.shape, "width": 5120}) for c in cases],
        np.full(len(cases), 1.0),
    )
    one, two = fit_curves(grid, num_sms=1, gpu="G"), fit_curves(grid + held, num_sms=1, gpu="G")
    assert one.as_dict() == two.as_dict()


UNEVEN = [(64, 1024, 2048, 0.5), (64, 1024, 2048, 1.2), (32, 1408, 2048, 0.7), (8, 4096, 14336, 0.5)]


@pytest.mark.parametrize(("experts", "n", "k", "s"), UNEVEN)
def test_uneven_weight_gradients_cost_what_orders_of_experts_do_on_average(
    experts: int, n: int, k: int, s: float
) -> None:
    """The closed form against 40 random orders of Zipf loads, whose tiles go round; other layouts stay even."""
    form, shares = GroupedGemmForm(), np.arange(1.0, experts + 1.0) ** -s
    loads = shares / shares.sum() * experts * 2048.0
    orders = np.random.default_rng(0).permuted(np.tile(loads, (40, 1)), axis=1)
    played = grouped_gemm_s(orders, n, k, 2, form, num_sms=132, groups=experts).mean()
    rows, uneven = experts * 2048.0, loads.std() / loads.mean()
    closed = [
        float(balanced_grouped_gemm_s(rows, experts, n, k, form, num_sms=132, wgrad=True, scattered=True, uneven=u))
        for u in (uneven, 0.0)
    ]
    assert closed[0] == pytest.approx(float(played), rel=0.05)
    assert closed[1] < 0.99 * closed[0] or experts * n * k > 3e8
    forward = [float(balanced_grouped_gemm_s(rows, experts, n, k, form, num_sms=132, uneven=u)) for u in (0.0, 1.0)]
    assert forward[0] == forward[1]


def test_gathers_of_more_than_the_cache_holds_are_found() -> None:
    """Rows read 8 times: from a source of up to half of the L2 at one rate, beyond it also from memory."""
    form = MemoryBoundForm(1e-6, 4.0, 5e12, missed_bytes_per_s=4e12)
    sizes = np.array([4096, 16384, 65536, 131072, 262144, 524288])
    cases = [Case("routed", "gather_copies", "eager", "bf16", "grid", {"tokens": int(t), "width": 2048}) for t in sizes]
    missed = l2_miss_bytes(sizes * 2048 * 4.0, sizes * 2048 * 2 / 8, 50e6)
    times = memory_bound_s(sizes * 2048, sizes, 2048, form, missed)
    assert (missed > 0).tolist() == [False, False, True, True, True, True]
    found = fit_curves(rows(cases, times), num_sms=1, gpu="G", l2_bytes=50e6).memory_bound["eager gather_copies"].form
    assert found.bytes_per_s == pytest.approx(5e12, rel=1e-3)
    assert found.missed_bytes_per_s == pytest.approx(4e12, rel=1e-3)


@pytest.mark.parametrize("each", [20, 128, 256, 300, 512, 1000, 1024, 2048])
def test_scattered_experts_cost_what_drawn_ones_do_on_average(each: int) -> None:
    """Tokens routed one by one: the closed form against the mean of 40 draws, each expert with its own count."""
    experts, n, k = 64, 1536, 2048
    form = GroupedGemmForm()
    draws = np.random.default_rng(each).multinomial(each * experts, np.full(experts, 1 / experts), size=40)
    drawn = grouped_gemm_s(draws, n, k, 0, form, num_sms=132, groups=experts).mean()
    closed = balanced_grouped_gemm_s(each * experts, experts, n, k, form, num_sms=132, scattered=True)
    assert float(closed) == pytest.approx(float(drawn), rel=0.03)
    exact = balanced_grouped_gemm_s(each * experts, experts, n, k, form, num_sms=132)
    assert float(exact) <= float(closed) * 1.001 or each % 128
