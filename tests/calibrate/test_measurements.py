"""The CSV of a run: what is written is read back, what is wrong is said and left alone."""

import os
import re
from pathlib import Path

import pytest

from mofa.calibrate.cases import Case, Sample
from mofa.calibrate.fits.nccl_tests import read_nccl_tests_output
from mofa.calibrate.measurements import (
    COLUMNS,
    DTYPES,
    FAMILIES_OF_ROWS,
    OPS,
    SHAPE_FIELDS,
    append_row,
    read_environment,
    read_rows,
    rows_of_first_folder_with_op,
)
from mofa.calibrate.shapes.families import FAMILIES, all_cases_of_family
from mofa.errors import SpecError

CASE = Case("gemm", "fwd", "cublas", "bf16", "grid", {"m": 4096, "n": 512, "k": 64})


def write(folder: Path, num: int = 3) -> Path:
    for i in range(num):
        case = Case("gemm", "fwd", "cublas", "bf16", "grid", {"m": 64 * (i + 1), "n": 512, "k": 64})
        append_row(folder, case, Sample(1.5e-5, 1.4e-5, 1.7e-5, 7, 1980.0, 512.5), "Some GPU", "host-1")
    return folder / "gemm.csv"


def test_row_comes_back_as_written(tmp_path: Path) -> None:
    append_row(tmp_path, CASE, Sample(1.2345678e-4, 1.1e-4, 1.3e-4, 7, 1980.0, None), "Some GPU", "host-1")
    (row,) = read_rows(tmp_path)
    assert row.case == CASE
    assert row.case.shape == CASE.shape
    assert row.sample.median_s == pytest.approx(1.2345678e-4, rel=1e-5)
    assert (row.sample.sm_mhz, row.sample.power_w, row.gpu, row.host) == (1980.0, None, "Some GPU", "host-1")


def test_the_first_folder_that_timed_an_op_says_it(tmp_path: Path) -> None:
    late, early = tmp_path / "late", tmp_path / "early"
    for folder, op in ((late, "fwd"), (early, "fwd"), (early, "dgrad")):
        folder.mkdir(exist_ok=True)
        append_row(
            folder,
            Case("gemm", op, "cublas", "bf16", "grid", CASE.shape),
            Sample(1e-4, 1e-4, 1e-4, 7),
            "G",
            folder.name,
        )
    found = rows_of_first_folder_with_op([late, early], families=(name for name in ["gemm"]))
    assert [(row.case.op, row.host) for row in found] == [("fwd", "late"), ("dgrad", "early")]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("15,14,17,us", "nan,14,17,us", "no positive, finite time"),
        ("15,14,17,us", "inf,14,17,us", "no positive, finite time"),
        ("15,14,17,us", "-3,14,17,us", "no positive, finite time"),
        ("15,14,17,us", "fast,14,17,us", "is no number"),
        ("15,14,17,us", "0.015,14,17,ms", "units are not to be mixed"),
        ("m=128 n=512", "m=128 n", "not 'name=value"),
        ("m=128 n=512", "m=128", "n is missing or no number above zero"),
        ("m=128 n=512", "m=128 n=0", "n is missing or no number above zero"),
        ("m=128 n=512", "m=128 n=wide", "n is missing or no number above zero"),
        ("15,14,17,us", "15,16,17,us", "median 15 is not between low 16 and high 17"),
        ("gemm,fwd", "attention,fwd", "in the file of 'gemm'"),
        ("bf16,grid", "bf16,both", "instead of grid, heldout, fresh"),
        (",Some GPU", "", "14 columns instead of 15"),
    ],
)
def test_corrupt_row_is_named_by_line_and_kept(tmp_path: Path, old: str, new: str, words: str) -> None:
    path = write(tmp_path)
    lines = path.read_text().splitlines(keepends=True)
    lines[2] = lines[2].replace(old, new)
    text = "".join(lines)
    path.write_text(text)
    with pytest.raises(SpecError, match="line 3") as error:
        read_rows(tmp_path)
    assert words in str(error.value)
    assert path.read_text() == text


def test_truncated_file(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_text(path.read_text()[:-25])
    with pytest.raises(SpecError, match="line 4: truncated"):
        read_rows(tmp_path)


def test_file_without_header_and_binary_file(tmp_path: Path) -> None:
    (tmp_path / "gemm.csv").write_text("1,2,3\n")
    with pytest.raises(SpecError, match="not the header"):
        read_rows(tmp_path)
    (tmp_path / "gemm.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="cannot be read as text"):
        read_rows(tmp_path)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("gemm,fwd,", "gemm,fwdx,", "line 2: op 'fwdx' is none of dgrad, fwd, wgrad"),
        (",bf16,", ",bf17,", "line 2: dtype 'bf17' is none of bf16, bytes"),
        ("m=64 n", "m=64 z=1 n", "line 2: shape 'm=64 z=1 n=512 k=64': z is no field of a shape"),
    ],
)
def test_cells_that_no_bench_writes_are_refused(before: str, after: str, says: str, tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_text(path.read_text().replace(before, after, 1))
    with pytest.raises(SpecError, match=re.escape(says)):
        read_rows(tmp_path)


def test_a_family_that_no_bench_times_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / "foo.csv").write_text(path.read_text().replace("gemm,", "foo,"))
    with pytest.raises(SpecError, match=r"foo\.csv: line 2: family 'foo' is none of attention, "):
        read_rows(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_bench_times_is_read(family: str) -> None:
    assert family in FAMILIES_OF_ROWS
    cases = [case for gpus in (1, 8) for case in all_cases_of_family(family, gpus=gpus)]
    assert {name for case in cases for name in case.shape} <= SHAPE_FIELDS
    assert {case.dtype for case in cases} <= DTYPES
    assert family not in OPS or {case.op for case in cases} <= OPS[family]


@pytest.mark.parametrize("name", ["gemm.csv", "environment.json"])
def test_a_named_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(SpecError, match=f"{name}: is a named pipe"):
        (read_rows if name.endswith("csv") else read_environment)(tmp_path)


def test_rows_of_two_gpus(tmp_path: Path) -> None:
    write(tmp_path)
    append_row(tmp_path, CASE, Sample(1e-5, 1e-5, 1e-5, 7), "Another GPU", "host-1")
    with pytest.raises(SpecError, match="Another GPU, Some GPU"):
        read_rows(tmp_path)


def test_missing_folder_and_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such folder"):
        read_rows(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(SpecError, match="file: is a file, no folder; give the folder"):
        read_rows(tmp_path / "file")
    with pytest.raises(SpecError, match="no measurements"):
        read_rows(tmp_path)


def test_environment_errors(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="missing"):
        read_environment(tmp_path)
    (tmp_path / "environment.json").write_text("{")
    with pytest.raises(SpecError, match="no valid JSON"):
        read_environment(tmp_path)
    (tmp_path / "environment.json").write_text("[]")
    with pytest.raises(SpecError, match="name of the device"):
        read_environment(tmp_path)


def test_committed_rows_are_whole() -> None:
    root = Path(__file__).parents[2] / "measurements"
    for folder in ("h200-1gpu", "h200-2gpu", "h200-4gpu"):
        rows = read_rows(root / folder)
        assert len({row.case.identity for row in rows if row.case.family != "overlap"}) >= 200
        assert {row.gpu for row in rows} == {"NVIDIA H200"}
        assert all(row.sample.low_s <= row.sample.median_s <= row.sample.high_s for row in rows)
    assert COLUMNS[9] == "unit"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"nccl_version": "1e400"}, "a number without bounds"),
        ({"nccl_version": '"new"'}, "a field holds another kind of value than nccl-tests writes"),
        ({"config": "{}"}, "devices is missing"),
    ],
)
def test_what_is_wrong_in_nccl_json_is_said_in_plain_words(change: dict[str, str], says: str, tmp_path: Path) -> None:
    parts = {"config": '{"devices": [{"hostname": "a", "device_info": "H100"}], "nthreads": 1, "ngpus": 8}',
             "results": "[]", "args": '["all_reduce_perf"]', **change}  # fmt: skip
    file = tmp_path / "all_reduce.json"
    file.write_text("{" + ", ".join(f'"{name}": {value}' for name, value in parts.items()) + "}")
    with pytest.raises(SpecError, match=says) as error:
        read_nccl_tests_output(file)
    assert "Error" not in str(error.value)
