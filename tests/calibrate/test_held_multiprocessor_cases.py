"""Layers beside a kernel that holds multiprocessors: which cases there are, and a machine that cannot time them."""

from pathlib import Path

import pytest

from mofa.calibrate.cases import Case, Sample, UnsupportedCase, UnsupportedFamily
from mofa.calibrate.run_cases import measure_cases
from mofa.calibrate.shapes.collective import HELD_MULTIPROCESSORS, TIMED_BESIDE_HELD
from mofa.calibrate.shapes.families import FAMILIES, ONE_GPU_FAMILIES, all_cases_of_family

GPU = "NVIDIA H200"


def test_one_gpu_times_the_layers_that_two_time_beside_collectives() -> None:
    assert HELD_MULTIPROCESSORS in ONE_GPU_FAMILIES and HELD_MULTIPROCESSORS in FAMILIES
    cases = all_cases_of_family(HELD_MULTIPROCESSORS, gpus=1)
    beside = {tuple(c.shape_size(x) for x in "mnk") for c in all_cases_of_family("overlap", gpus=2)
              if c.variant == "layer"}  # fmt: skip
    assert {tuple(c.shape_size(x) for x in "mnk") for c in cases} == beside
    numbers = {op: sorted({c.shape_size("multiprocessors") for c in cases if c.op == op}) for op in ("spin", "copy")}
    assert numbers == {"spin": [1, 2, 4, 8, 16, 24, 32], "copy": [4, 8, 16]}
    assert {c.shape["bytes_per_s"] for c in cases if c.op == "copy"} == {45 * 10**9}


def test_the_rows_of_a_shape_are_timed_one_after_the_other() -> None:
    """The bench times them in the same runs, and keeps those of the last shape alone."""
    cases = all_cases_of_family(HELD_MULTIPROCESSORS, full=False)
    assert cases == all_cases_of_family(HELD_MULTIPROCESSORS)
    for first in range(0, len(cases), 3):
        assert tuple(c.variant for c in cases[first : first + 3]) == TIMED_BESIDE_HELD
        assert len({(c.op, c.shape_text) for c in cases[first : first + 3]}) == 1


def test_a_quick_run_times_every_number_beside_two_layers() -> None:
    quick = all_cases_of_family(HELD_MULTIPROCESSORS, quick=True)
    assert {c.op for c in quick} == {"spin"} and len(quick) == 2 * 7 * len(TIMED_BESIDE_HELD)
    assert {c.shape_size("multiprocessors") for c in quick} == {1, 2, 4, 8, 16, 24, 32}


class _BenchWithout:
    """A bench that can time copies alone, and of held multiprocessors none."""

    gpu = GPU

    def __init__(self) -> None:
        self.asked: list[Case] = []

    def time_case(self, case: Case) -> Sample:
        self.asked.append(case)
        if case.family == HELD_MULTIPROCESSORS:
            raise UnsupportedFamily("this torch compiles no kernels")
        if case.op == "device_copy":
            raise UnsupportedCase("no room")
        return Sample(1e-3, 1e-3, 1e-3, 3)

    def environment(self) -> dict[str, object]:
        return {"gpu": self.gpu, "device": "cuda", "num_gpus": 1}


def test_a_family_that_cannot_be_timed_is_asked_for_once_and_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = _BenchWithout()
    monkeypatch.setattr("mofa.calibrate.run_cases.open_bench", lambda device: bench)
    counts = measure_cases(tmp_path, full=True, families=[HELD_MULTIPROCESSORS, "copy"])
    copies = all_cases_of_family("copy")
    without = sum(c.op == "device_copy" for c in copies)
    assert counts["measured"] == len(copies) - without
    assert counts["unsupported"] == len(all_cases_of_family(HELD_MULTIPROCESSORS)) + without
    assert sum(case.family == HELD_MULTIPROCESSORS for case in bench.asked) == 1
    said = (tmp_path / "unsupported.txt").read_text().splitlines()
    assert said.count("held_multiprocessors, all of it: this torch compiles no kernels") == 1
    assert len(said) == 1 + without
