"""A run on the host, with NumPy: the same interface as on a GPU."""

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from mofa.calibrate.bench.numpy_bench import NumpyBench
from mofa.calibrate.cases import Case, Sample
from mofa.calibrate.measurements import append_row, read_rows
from mofa.calibrate.run_cases import measure_cases, prepare_folder_and_list_measured_cases
from mofa.errors import SpecError


@pytest.fixture(autouse=True)
def small_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What NumPy times is of two megabytes at most: these tests ask how cases are kept, not how long they take."""
    monkeypatch.setattr("mofa.calibrate.bench.numpy_bench.MAX_ELEMENTS", 2**19)


def test_run_writes_rows_and_environment(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    counts = measure_cases(
        tmp_path, quick=True, families=["gemm", "copy"], device="cpu", progress=lambda *x: seen.append(x)
    )
    rows = read_rows(tmp_path)
    assert counts["measured"] == len(rows) > 10
    assert counts["unsupported"] > 0
    assert "too large" in (tmp_path / "unsupported.txt").read_text()
    assert json.loads((tmp_path / "environment.json").read_text())["gpu"] == "cpu"
    assert {row.host.startswith("host-") for row in rows} == {True}
    assert seen[0][0] == 0 and seen[-1][0] == seen[-1][1]


def test_fresh_only_measures_nothing_else(tmp_path: Path) -> None:
    """gemm has a second held-out set, and NumPy can time its smaller shapes."""
    measure_cases(tmp_path, full=True, families=["gemm", "copy"], device="cpu", fresh_only=True, limit_s=1.0)
    assert {row.case.split for row in read_rows(tmp_path)} == {"fresh"}
    assert not (tmp_path / "copy.csv").exists()


def test_interrupted_run_resumes_without_losing_rows(tmp_path: Path) -> None:
    first = measure_cases(tmp_path, quick=True, families=["copy"], device="cpu", limit_s=-1.0)
    assert first["measured"] == 0 and first["left"] > 0
    measure_cases(tmp_path, quick=True, families=["copy"], device="cpu")
    path = tmp_path / "copy.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:4]))  # as if killed after three rows
    again = measure_cases(tmp_path, quick=True, families=["copy"], device="cpu")
    assert again["kept"] == 3
    assert path.read_text().startswith("".join(lines[:4]))
    assert len(path.read_text().splitlines()) == len(lines)
    assert measure_cases(tmp_path, quick=True, families=["copy"], device="cpu")["measured"] == 0


def test_killed_in_the_middle_of_a_row_says_so_and_keeps_the_file(tmp_path: Path) -> None:
    measure_cases(tmp_path, quick=True, families=["copy"], device="cpu")
    path = tmp_path / "copy.csv"
    path.write_text(path.read_text()[:-10])
    before = path.read_text()
    with pytest.raises(SpecError, match="truncated"):
        measure_cases(tmp_path, quick=True, families=["copy"], device="cpu")
    assert path.read_text() == before


def test_folder_of_another_gpu_is_refused(tmp_path: Path) -> None:
    append_row(
        tmp_path,
        Case("copy", "h2d", "pinned", "bytes", "grid", {"bytes": 4096}),
        Sample(1e-5, 1e-5, 1e-5, 3),
        "X1",
        "h",
    )
    with pytest.raises(SpecError, match="holds rows of 'X1'"):
        prepare_folder_and_list_measured_cases(tmp_path, NumpyBench(), "h")


def test_without_torch_or_gpu_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def no_torch(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "torch":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_torch)
    with pytest.raises(SpecError, match="torch is not installed") as error:
        measure_cases(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"families": ["gem"]}, "unknown gem"),
        ({"quick": True, "full": True}, "exclude each other"),
        ({"device": "tpu"}, "tpu"),
    ],
)
def test_wrong_options(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        measure_cases(tmp_path, **options)
