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
from mofa.calibrate.fits.ratios import slowdown_by_held_multiprocessors
from mofa.calibrate.measurements import Row, append_row, read_rows
from mofa.calibrate.shapes.collective import HELD_MULTIPROCESSORS, LAYERS_BESIDE, TIMED_BESIDE_HELD
from mofa.specs.curves import GpuCurves
from mofa.specs.files import profile_as_yaml
from mofa.specs.hardware import GpuSpec
from mofa.specs.like_profiles import expanded_profile
from mofa.specs.profiles import load_gpu
from mofa.specs.scaling import gpu_curves_transferred_to_other
from tests.committed import ROOT, read_yaml

Timed = tuple[tuple[int, int, int], ...]
WAITING: dict[int, Timed] = {4: ((10, 11, 5), (20, 22, 9)), 16: ((10, 12, 5), (20, 23, 9))}
"""Layers alone, beside a kernel that waits, and for how long it held multiprocessors, by their number. [us]"""
MEASURED = ROOT / "measurements" / "h200-1gpu-held"
GPU = "NVIDIA H200"


def rows_of(
    timed_us: dict[int, Timed], op: str = "spin", layers: tuple[tuple[int, int, int], ...] = LAYERS_BESIDE[:2]
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


def test_the_slowdown_is_what_all_layers_lose_over_the_time_held() -> None:
    """1 and 4 s lost while four are held for 5 s, and 1 s for 10: 6 s of 20."""
    timed = {4: ((10, 11, 5), (10, 14, 5), (20, 21, 10))}
    rows = rows_of(timed, layers=LAYERS_BESIDE[:3])
    assert slowdown_by_held_multiprocessors(rows) == pytest.approx({4: 0.3})
    assert fit_curves(rows, num_sms=132, gpu=GPU).slowdown_by_held_multiprocessors == pytest.approx({4: 0.3})


def test_copies_and_shapes_with_a_row_missing_say_nothing() -> None:
    waiting = rows_of(WAITING)
    expected = slowdown_by_held_multiprocessors(waiting)
    assert slowdown_by_held_multiprocessors(waiting + rows_of(WAITING, "copy")) == expected
    assert slowdown_by_held_multiprocessors(rows_of(WAITING, "copy")) == {}
    for variant in TIMED_BESIDE_HELD:
        partial = [row for row in rows_of({48: ((9, 19, 1),) * 2}) if row.case.variant != variant]
        assert slowdown_by_held_multiprocessors(waiting + partial) == expected
    assert fit_curves([], num_sms=132, gpu=GPU).slowdown_by_held_multiprocessors == {}


def test_more_held_multiprocessors_cost_no_less() -> None:
    """0.3 with two, 0.1 with four: 0.2 with either. Whatever order rows come in; a gain is no loss."""
    timed: dict[int, Timed] = {8: ((10, 14, 10),), 4: ((10, 11, 10),), 2: ((10, 13, 10),), 1: ((10, 9, 10),)}
    slowdown = slowdown_by_held_multiprocessors(rows_of(timed, layers=LAYERS_BESIDE[:1]))
    assert list(slowdown) == [1, 2, 4, 8]
    assert list(slowdown.values()) == pytest.approx([0.0, 0.2, 0.2, 0.4])


def shape_of(row: Row) -> tuple[int, ...]:
    return tuple(row.case.shape_size(name) for name in "mnk")


def test_bundled_profiles_have_what_was_measured() -> None:
    """Written by `scripts/bundled_profiles.py`, and the same on what else was not measured."""
    slowdown = slowdown_by_held_multiprocessors(read_rows(MEASURED))
    for name in ("h200-sxm", "h100-sxm", "h800", "h20", "a100-80gb", "b200", "gb200"):
        bundled = load_gpu(name).curves.slowdown_by_held_multiprocessors
        assert {number: fact.value for number, fact in bundled.items()} == pytest.approx(slowdown, rel=1e-3)


def test_a_copy_as_slow_as_a_port_costs_what_waiting_does() -> None:
    rows = read_rows(MEASURED)
    waiting = slowdown_by_held_multiprocessors(rows)
    copying = [replace(row, case=replace(row.case, op="spin")) for row in rows if row.case.op == "copy"]
    assert copying
    for number, slowdown in slowdown_by_held_multiprocessors(copying).items():
        assert slowdown == pytest.approx(waiting[number], abs=0.03)


def test_a_layer_that_no_fit_saw_takes_what_the_others_say() -> None:
    """Each layer's time beside held multiprocessors by the other five (docs/calibration.md)."""
    rows = [row for row in read_rows(MEASURED) if row.case.op == "spin"]
    errors, slowdown_errors = [], []
    for left_out in sorted({shape_of(row) for row in rows}):
        slowdown = slowdown_by_held_multiprocessors([row for row in rows if shape_of(row) != left_out])
        own: dict[int, dict[str, float]] = {}
        for row in rows:
            if shape_of(row) == left_out:
                own.setdefault(row.case.shape_size("multiprocessors"), {})[row.case.variant] = row.sample.median_s
        for number, by_variant in own.items():
            alone, beside, held_for = (by_variant[variant] for variant in TIMED_BESIDE_HELD)
            errors.append(abs((alone + slowdown[number] * held_for) / beside - 1.0))
            slowdown_errors.append(abs(slowdown[number] - (beside - alone) / held_for))
    assert len(errors) == 42
    assert median(errors) < 0.0125 and max(errors) < 0.039
    assert median(slowdown_errors) < 0.026


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
