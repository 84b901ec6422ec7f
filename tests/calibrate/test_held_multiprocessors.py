"""Layers beside a kernel that holds multiprocessors: what a fit makes of the rows, and a profile that has it."""

from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from mofa.calibrate.cases import Case, Sample
from mofa.calibrate.fits.fit import fit_curves
from mofa.calibrate.fits.fitted_curves import DeviceCurveFits
from mofa.calibrate.fits.profile import fitted_gpu_curves, held_multiprocessor_facts, merge_curves
from mofa.calibrate.fits.ratios import nondecreasing_least_squares, slowdown_by_held_multiprocessors
from mofa.calibrate.measurements import Row, append_row, read_rows
from mofa.calibrate.shapes.collective import HELD_MULTIPROCESSORS, LAYERS_BESIDE, TIMED_BESIDE_HELD
from mofa.specs.curves import GpuCurves
from mofa.specs.files import profile_as_yaml
from mofa.specs.hardware import GpuSpec
from mofa.specs.like_profiles import expanded_profile
from mofa.specs.scaling import gpu_curves_transferred_to_other
from tests.committed import read_yaml

Timed = tuple[tuple[int, int, int], ...]
WAITING: dict[int, Timed] = {
    1: ((8323, 8649, 4210), (22731, 23127, 11510), (13746, 14327, 6885), (11335, 11858, 5702), (34063, 34830, 17069),
        (26776, 27101, 13347)),
    2: ((8346, 8648, 4218), (22927, 23527, 11512), (13760, 14334, 6895), (11381, 11852, 5694), (33994, 34932, 17075),
        (26745, 27455, 13346)),
    4: ((8314, 8938, 4210), (22863, 23825, 11512), (13757, 14528, 6887), (11334, 12156, 5684), (34182, 35133, 17061),
        (26627, 27685, 13355)),
    8: ((8323, 8940, 4210), (23052, 23853, 11511), (13627, 14663, 6895), (11308, 12188, 5695), (34178, 35444, 17065),
        (26631, 27702, 13355)),
    16: ((8325, 9061, 4202), (22680, 24302, 11505), (13693, 14868, 6891), (11289, 12466, 5693), (34315, 36477, 17076),
         (26629, 28976, 13349)),
    24: ((8331, 9136, 4207), (22833, 24686, 11518), (13566, 14949, 6892), (11292, 12477, 5692), (33967, 36817, 17067),
         (26780, 28928, 13355)),
    32: ((8327, 9402, 4206), (22891, 25398, 11513), (13624, 15351, 6897), (11357, 12881, 5704), (34190, 38118, 17065),
         (26544, 29890, 13371)),
}  # fmt: skip
"""Layers alone, beside a kernel that waits, and for how long it held multiprocessors, by their number: the six layers
of :data:`LAYERS_BESIDE` on one H200, before `mofa calibrate` timed them (docs/evidence/fsdp1.md). [us]"""
COPYING: dict[int, Timed] = {
    4: ((8326, 8499, 2280), (22602, 23595, 8992), (13784, 14649, 8245), (11316, 12326, 6838), (34306, 35942, 27444),
        (26826, 27863, 16033)),
    8: ((8326, 8536, 2285), (22903, 23782, 8996), (13820, 14763, 8252), (11283, 12386, 6833), (34205, 36258, 27443),
        (26484, 28313, 16021)),
    16: ((8350, 8626, 2280), (22966, 24137, 9013), (13651, 15007, 8268), (11304, 12745, 6847), (34144, 37873, 27441),
         (26564, 28982, 16025)),
}  # fmt: skip
"""The same beside one that copies 45 GB/s. [us]"""
GPU = "NVIDIA H200"


def rows_of(
    timed_us: dict[int, Timed], op: str = "spin", layers: tuple[tuple[int, int, int], ...] = LAYERS_BESIDE
) -> list[Row]:
    """Three rows a number of multiprocessors and a layer."""
    rows = []
    for number, by_layer in timed_us.items():
        for (tokens, hidden, ffn), times_us in zip(layers, by_layer, strict=True):
            shape: dict[str, int | str] = {"multiprocessors": number, "m": tokens, "n": hidden, "k": ffn}
            for variant, time_us in zip(TIMED_BESIDE_HELD, times_us, strict=True):
                case = Case(HELD_MULTIPROCESSORS, op, variant, "bf16", "grid", shape)
                rows.append(Row(case, Sample(time_us / 1e6, time_us / 1e6, time_us / 1e6, 3), GPU, "host-a"))
    return rows


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    for row in rows_of(WAITING):
        append_row(tmp_path, row.case, row.sample, row.gpu, row.host)
    assert read_rows(tmp_path) == rows_of(WAITING)


def test_the_slowdown_is_the_middle_layers_loss_over_the_time_held() -> None:
    """1 and 4 s lost while four are held for 5 s, and 1 s for 10: 0.2, 0.8 and 0.1, of which 0.2 is the middle."""
    timed = {4: ((10, 11, 5), (10, 14, 5), (20, 21, 10))}
    rows = rows_of(timed, layers=LAYERS_BESIDE[:3])
    assert slowdown_by_held_multiprocessors(rows) == pytest.approx({4: 0.2})
    assert fit_curves(rows, num_sms=132, gpu=GPU).slowdown_by_held_multiprocessors == pytest.approx({4: 0.2})


def test_copies_and_shapes_with_a_row_missing_say_nothing() -> None:
    waiting = rows_of(WAITING)
    expected = slowdown_by_held_multiprocessors(waiting)
    assert slowdown_by_held_multiprocessors(waiting + rows_of(COPYING, "copy")) == expected
    assert slowdown_by_held_multiprocessors(rows_of(COPYING, "copy")) == {}
    for variant in TIMED_BESIDE_HELD:
        partial = [row for row in rows_of({48: ((9, 19, 1),) * 6}) if row.case.variant != variant]
        assert slowdown_by_held_multiprocessors(waiting + partial) == expected
    assert fit_curves([], num_sms=132, gpu=GPU).slowdown_by_held_multiprocessors == {}


def test_more_held_multiprocessors_cost_no_less() -> None:
    """0.3 with two, 0.1 with four: 0.2 with either. Whatever order rows come in; a gain is no loss."""
    timed: dict[int, Timed] = {8: ((10, 14, 10),), 4: ((10, 11, 10),), 2: ((10, 13, 10),), 1: ((10, 9, 10),)}
    slowdown = slowdown_by_held_multiprocessors(rows_of(timed, layers=LAYERS_BESIDE[:1]))
    assert list(slowdown) == [1, 2, 4, 8]
    assert list(slowdown.values()) == pytest.approx([0.0, 0.2, 0.2, 0.4])


@pytest.mark.parametrize(
    ("values", "monotone"),
    [([], []), ([3.0], [3.0]), ([3.0, 2.0, 1.0], [2.0] * 3), ([1.0, 5.0, 2.0, 2.0, 6.0], [1.0, 3.0, 3.0, 3.0, 6.0])],
)
def test_the_nearest_numbers_that_do_not_fall(values: list[float], monotone: list[float]) -> None:
    assert nondecreasing_least_squares(values) == pytest.approx(monotone)


def test_an_h200_loses_more_the_more_are_held() -> None:
    """The medians of the six layers, which rise by themselves."""
    slowdown = slowdown_by_held_multiprocessors(rows_of(WAITING))
    assert slowdown == pytest.approx(
        {1: 0.061, 2: 0.063, 4: 0.098, 8: 0.113, 16: 0.173, 24: 0.179, 32: 0.250}, abs=6e-4
    )


def test_a_copy_as_slow_as_a_port_costs_what_waiting_does() -> None:
    waiting = slowdown_by_held_multiprocessors(rows_of(WAITING))
    copying = slowdown_by_held_multiprocessors(rows_of(COPYING))
    for number, slowdown in copying.items():
        assert slowdown == pytest.approx(waiting[number], abs=0.035)


def test_a_layer_that_no_fit_saw_takes_what_the_others_say() -> None:
    """Each layer's time beside held multiprocessors by the other five's median (docs/calibration.md)."""
    errors, slowdown_errors = [], []
    for left_out in range(len(LAYERS_BESIDE)):
        others = {number: times[:left_out] + times[left_out + 1 :] for number, times in WAITING.items()}
        layers = LAYERS_BESIDE[:left_out] + LAYERS_BESIDE[left_out + 1 :]
        slowdown = slowdown_by_held_multiprocessors(rows_of(others, layers=layers))
        for number, times in WAITING.items():
            alone, beside, held_for = times[left_out]
            errors.append(abs((alone + slowdown[number] * held_for) / beside - 1.0))
            slowdown_errors.append(abs(slowdown[number] - (beside - alone) / held_for))
    assert median(errors) < 0.016 and max(errors) < 0.038
    assert median(slowdown_errors) < 0.034


def curves_of(measured: dict[int, float]) -> DeviceCurveFits:
    return DeviceCurveFits(gpu=GPU, num_sms=132, slowdown_by_held_multiprocessors=measured)


def test_the_profile_has_it_and_says_where_it_is_from(tmp_path: Path) -> None:
    base = expanded_profile("gpus", "h200-sxm")
    curves = fit_curves(rows_of(WAITING), num_sms=132, gpu=GPU)
    gpu: dict[str, Any] = {**base, "curves": fitted_gpu_curves(base["curves"], {}, curves, "mofa calibrate, a folder")}
    path = tmp_path / "gpu.yaml"
    path.write_text(profile_as_yaml(gpu), encoding="utf-8")
    facts = GpuSpec.model_validate(read_yaml(path)).curves.slowdown_by_held_multiprocessors
    assert list(facts) == list(WAITING)
    assert [fact.value for fact in facts.values()] == pytest.approx(
        list(slowdown_by_held_multiprocessors(rows_of(WAITING)).values()), rel=1e-3
    )
    assert {(fact.provenance, fact.source) for fact in facts.values()} == {
        (
            "measured",
            "mofa calibrate, a folder: what whole layers lose per second that so many multiprocessors are held",
        )
    }


def test_without_a_measurement_the_profile_keeps_the_bundled_one() -> None:
    base = expanded_profile("gpus", "h200-sxm")["curves"]
    made = fitted_gpu_curves(base, {}, curves_of({}), "a folder")
    assert made["slowdown_by_held_multiprocessors"] == base["slowdown_by_held_multiprocessors"]
    assert held_multiprocessor_facts(curves_of({}), "a folder") == {}


def test_a_later_folder_replaces_an_earlier_ones_and_one_without_keeps_it() -> None:
    first, second, without = curves_of({1: 0.1, 2: 0.2}), curves_of({4: 0.3}), curves_of({})
    folders = [Path("a"), Path("b"), Path("c")]
    merged = merge_curves([first, second, without], folders)
    assert merged.slowdown_by_held_multiprocessors == {4: 0.3}
    assert merge_curves([without, replace(first)], folders[:2]).slowdown_by_held_multiprocessors == {1: 0.1, 2: 0.2}


@pytest.mark.parametrize("exact", [True, False])
def test_another_gpu_takes_it_over_as_it_is(exact: bool) -> None:
    base = expanded_profile("gpus", "h200-sxm")["curves"]
    rates = dict.fromkeys(base["gemm"], 0.5)
    made = gpu_curves_transferred_to_other(
        base, rates=rates, bandwidth=0.5, sms=0.5, provenance="transferred", source="the H200's", exact=exact
    )
    facts = GpuCurves.model_validate(made).slowdown_by_held_multiprocessors
    known = base["slowdown_by_held_multiprocessors"]
    assert {number: fact.value for number, fact in facts.items()} == {n: fact["value"] for n, fact in known.items()}
    assert {(fact.provenance, fact.source) for fact in facts.values()} == {("transferred", "the H200's")}
