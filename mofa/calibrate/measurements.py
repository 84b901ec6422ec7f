"""The CSV of a calibration run: one row per timing, appended as it is measured, checked when it is read.

Plain Python, so that the bench can write it on a machine that has torch and nothing else of mofa's needs.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mofa.calibrate.cases import SPLITS, Case, Sample, Shape
from mofa.errors import SpecError
from mofa.specs.limited_reads import is_plain_file
from mofa.specs.regular_files import refuse_special_file

COLUMNS = ("family", "op", "variant", "dtype", "split", "shape", "median", "low", "high", "unit", "samples", "sm_mhz",
           "power_w", "gpu", "host")  # fmt: skip
UNIT, BYTES = "us", "B"
BYTES_END = "_bytes"
"""Ops whose names end so are no timings but bytes, and their rows say so in the unit."""
SIZES: dict[str, tuple[str, ...]] = {
    "gemm": ("m", "n", "k"), "grouped_gemm": ("n", "k"), "attention": ("b", "hq", "hkv", "q", "kv", "dqk", "dv"),
    "compiled": ("tokens", "width"), "routed": ("tokens", "width"), "copy": ("bytes",),
    "host": ("ops",), "autograd": ("ops",), "te_host": ("ops",), "sequence": (), "sustained": ("m", "n", "k"),
    "unaligned_gemm": ("m", "n", "k"), "te_experts": ("n", "k"), "te_wgrad": ("m", "n", "k"),
    "te_expert_host": ("groups",),
    "te_attention": ("b", "hq", "hkv", "q", "kv", "dqk", "dv"),
    "te_gemm": ("m", "n", "k"), "te_grouped": ("n", "k"), "te_cast": ("tokens", "width"),
    "te_sustained": ("m", "n", "k"),
    "collective": ("bytes", "group"), "overlap": ("bytes", "group", "m", "n"),
    "dependent_collective": ("bytes", "group"), "held_multiprocessors": ("multiprocessors", "m", "n", "k"),
    "throttled": ("tokens", "width"), "te_throttled": (),
    "chunked_moe": ("tokens", "hidden", "ffn", "experts", "top_k", "ep", "chunks"),
}  # fmt: skip
"""Whole numbers above zero that a shape of each family must hold."""
FAMILIES_OF_ROWS = frozenset(SIZES) | {"memory_bound", "te_ops", "host_optimizer"}
_PRODUCTS, _PASSES = frozenset({"fwd", "dgrad", "wgrad"}), frozenset({"fwd", "bwd"})
_COLLECTIVES = frozenset({"all_gather", "all_reduce", "all_to_all", "all_to_all_uneven", "reduce_scatter", "send_recv"})
OPS: dict[str, frozenset[str]] = {
    "gemm": _PRODUCTS, "grouped_gemm": _PRODUCTS, "unaligned_gemm": _PRODUCTS, "te_gemm": _PRODUCTS,
    "te_grouped": _PRODUCTS, "te_experts": _PRODUCTS, "te_wgrad": frozenset({"wgrad"}),
    "attention": _PASSES, "te_attention": _PASSES,
    "collective": _COLLECTIVES, "dependent_collective": _COLLECTIVES, "overlap": _COLLECTIVES,
}  # fmt: skip
"""Ops of the families that have few; the others' come from their shapes and the libraries' modules."""
DTYPES = frozenset({
    "bf16", "fp32", "fp8", "bytes", "fp8_block", "fp8_block_rows", "fp8_fast", "fp8_split", "fp8-blockwise",
    "fp8-delayed", "fp8-tensorwise",
})  # fmt: skip
SHAPE_FIELDS = frozenset({
    "b", "bytes", "bytes_per_s", "calls", "causal", "chunks", "dqk", "dv", "ep", "experts", "ffn", "first", "fresh",
    "fused", "group", "groups", "heads", "hidden", "hkv", "hq", "inner", "k", "kv", "layers", "loads", "m",
    "micro_batches", "multiprocessors", "n", "numel", "ops", "parameters", "params", "q", "ranks", "rows", "skew",
    "spread", "tensors", "threads", "tokens", "top_k", "width",
})  # fmt: skip
"""Fields of the shapes of all families."""
ENVIRONMENT = "environment.json"
MAX_FILE_BYTES = 2**26
MAX_SIZE = 10**15
"""Of a whole number in a shape; products of several stay below what floats hold. [-]"""
LEAST_TIME, MOST_TIME = 1e-12, 1e15
"""Of a time, or a size in bytes, of a row. [s] or [B]"""
MAX_GROUPS = 65_536
"""Loads of one row: rows are padded to the longest. [-]"""


@dataclass(frozen=True)
class Row:
    """One timing as read back, in seconds; of an op that ends in ``_bytes`` the sample holds bytes."""

    case: Case
    sample: Sample
    gpu: str
    host: str


def append_row(folder: Path, case: Case, sample: Sample, gpu: str, host: str) -> None:
    """Add a row to the family's CSV, on disk before this returns, so that an interruption loses nothing."""
    path = folder / f"{case.family}.csv"
    new = not path.exists() or path.stat().st_size == 0
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(COLUMNS)
        unit, scale, digits = unit_of_op_row(case.op)
        times = [f"{t * scale:.{digits}g}" for t in (sample.median_s, sample.low_s, sample.high_s)]
        more = ["" if v is None else f"{v:.4g}" for v in (sample.sm_mhz, sample.power_w)]
        writer.writerow([case.family, case.op, case.variant, case.dtype, case.split, case.shape_text, *times, unit,
                         sample.num_samples, *more, gpu, host])  # fmt: skip


def unit_of_op_row(op: str) -> tuple[str, float, int]:
    """The unit of an op's row, how many of it are one in SI, and the digits that the row holds.

    Examples
    --------
    >>> unit_of_op_row("all_reduce"), unit_of_op_row("peak_bytes")
    (('us', 1000000.0, 6), ('B', 1.0, 12))
    """
    return (BYTES, 1.0, 12) if op.endswith(BYTES_END) else (UNIT, 1e6, 6)


def read_rows(folder: Path, *, families: Iterable[str] | None = None) -> list[Row]:
    """All rows of a folder's CSV files.

    Raises
    ------
    SpecError
        If a file is missing, truncated or corrupt, a time is no positive number, units or GPUs are mixed. The file
        is left as it is.
    """
    if not _is_folder(folder):
        what = "is a file, no folder" if is_plain_file(folder) else "no such folder"
        raise SpecError(f"{folder}: {what}; give the folder that `mofa calibrate run --out` wrote")
    wanted = None if families is None else set(families)
    paths = sorted(p for p in folder.glob("*.csv") if wanted is None or p.stem in wanted)
    if not paths:
        raise SpecError(f"{folder}: no measurements (*.csv); run `mofa calibrate run --out {folder}` first")
    rows = [row for path in paths for row in read_rows_of_file(path)]
    gpus = sorted({row.gpu for row in rows})
    if len(gpus) > 1:
        raise SpecError(f"{folder}: rows of different GPUs ({', '.join(gpus)}); keep one folder per kind of GPU")
    return rows


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # no permission, or a name that is too long
        return False


def rows_of_first_folder_with_op(folders: Iterable[Path], *, families: Iterable[str]) -> list[Row]:
    """Rows of several folders: each op's from the first of them that has any."""
    wanted, rows = tuple(families), list[Row]()
    for folder in folders:
        timed = {row.case.op for row in rows}
        rows += [row for row in read_rows(folder, families=wanted) if row.case.op not in timed]
    return rows


def read_rows_of_file(path: Path) -> list[Row]:
    """The rows of one CSV; see `read_rows`."""
    text = _text(path, "restore it or move it away")
    lines = text.splitlines()
    if not lines or tuple(next(_cells(path, lines[:1]), ())) != COLUMNS:
        raise SpecError(f"{path}: line 1: not the header of a calibration CSV; expected {','.join(COLUMNS)}")
    if not text.endswith("\n"):
        raise SpecError(
            f"{path}: line {len(lines)}: truncated (no line end); delete that line, then run again to resume"
        )
    return [_parse(path, number, cells) for number, cells in enumerate(_cells(path, lines[1:]), start=2)]


def _cells(path: Path, lines: list[str]) -> Iterator[list[str]]:
    """Cells of each line of a CSV."""
    try:
        yield from csv.reader(lines)
    except csv.Error as error:
        raise SpecError(f"{path}: is no CSV ({error}); restore it or move it away") from None


def _text(path: Path, advice: str) -> str:
    """What a file of measurements says; the bench has nothing of mofa but this."""
    refuse_special_file(path, str(path))
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise SpecError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB; {advice}")
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read as text ({error}); {advice}") from None


def _parse(path: Path, number: int, cells: list[str]) -> Row:
    def fail(what: str) -> SpecError:
        return SpecError(f"{path}: line {number}: {what}; delete that line, then run again to measure it anew")

    if len(cells) != len(COLUMNS):
        raise fail(f"{len(cells)} columns instead of {len(COLUMNS)}")
    cell = dict(zip(COLUMNS, cells, strict=True))
    unit, scale, _ = unit_of_op_row(cell["op"])
    if cell["unit"] != unit:
        raise fail(f"unit {cell['unit']!r} instead of {unit!r}; units are not to be mixed")
    if cell["family"] != path.stem:
        raise fail(f"family {cell['family']!r} in the file of {path.stem!r}")
    if cell["split"] not in SPLITS:
        raise fail(f"split {cell['split']!r} instead of {', '.join(SPLITS)}")
    known = {"family": FAMILIES_OF_ROWS, "op": OPS.get(cell["family"], frozenset()), "dtype": DTYPES}
    for name, words in known.items():
        if words and cell[name] not in words:
            raise fail(f"{name} {cell[name][:40]!r} is none of {', '.join(sorted(words))}")
    times = []
    for name in ("median", "low", "high"):
        try:
            value = float(cell[name])
        except ValueError:
            raise fail(f"{name} {cell[name]!r} is no number") from None
        if not LEAST_TIME <= value / scale <= MOST_TIME:
            raise fail(f"{name} {cell[name]} {unit} is no positive, finite {'size' if unit == BYTES else 'time'}")
        times.append(value / scale)
    try:
        more = [_reading(cell[name]) for name in ("sm_mhz", "power_w")]
        num = _whole_number(cell["samples"])
        shape = parse_shape(cell["shape"])
    except ValueError as error:
        raise fail(str(error)) from None
    if unknown := sorted(shape.keys() - SHAPE_FIELDS):
        raise fail(f"shape {cell['shape'][:60]!r}: {unknown[0][:40]} is no field of a shape")
    if wrong := _wrong_size(cell["family"], shape):
        raise fail(f"shape {cell['shape'][:60]!r}: {wrong}")
    if not times[1] <= times[0] <= times[2]:
        raise fail(f"median {cell['median']} is not between low {cell['low']} and high {cell['high']}")
    case = Case(cell["family"], cell["op"], cell["variant"], cell["dtype"], cell["split"], shape)
    return Row(case, Sample(times[0], times[1], times[2], num, *more), cell["gpu"], cell["host"])


def _wrong_size(family: str, shape: Shape) -> str:
    """What a shape lacks, or nothing.

    Examples
    --------
    >>> _wrong_size("gemm", {"m": 64, "n": 64}), _wrong_size("grouped_gemm", {"n": 8, "k": 8, "loads": "16,x"})
    ('k is missing or no number above zero', 'loads are not whole numbers above zero')
    """
    names = SIZES.get(family, ())
    if family in ("memory_bound", "te_ops"):
        names = ("params", "tensors") if "params" in shape else ("tokens", "width")
    for name in names:
        value = shape.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            return f"{name} is missing or no number above zero"
    loads = str(shape.get("loads", "")).split(",")
    if len(loads) > MAX_GROUPS:
        return f"loads are of more than {MAX_GROUPS} groups"
    if family in ("grouped_gemm", "te_grouped") and not all(_is_whole_number(load) and int(load) > 0 for load in loads):
        return "loads are not whole numbers above zero"
    counted = all(_is_whole_number(load) for load in loads)
    if family == "te_experts" and not (counted and any(int(load) for load in loads)):
        return "loads are not whole numbers, one above zero"
    return ""


def _is_whole_number(text: str) -> bool:
    """Whether a text is a whole number of a size that shapes have."""
    return text.isascii() and text.isdigit() and len(text) <= 16 and int(text) <= MAX_SIZE


def _whole_number(text: str) -> int:
    """A whole number; raises ValueError where a text is none, or is larger than sizes are."""
    if not _is_whole_number(text):
        raise ValueError(f"{text[:40]!r} is no whole number from 0 to {MAX_SIZE}")
    return int(text)


def _reading(text: str) -> float | None:
    """A clock or a power that was read beside a time; None where it was not."""
    if not text:
        return None
    value = float(text)
    if not 0.0 <= value <= 1e6:
        raise ValueError(f"{text[:40]!r} is no clock in MHz and no power in W")
    return value


def parse_shape(text: str) -> Shape:
    """Read a shape such as ``m=4096 n=512`` back.

    Examples
    --------
    >>> parse_shape("m=4096 loads=16,32")
    {'m': 4096, 'loads': '16,32'}
    """
    shape: Shape = {}
    for part in text.split():
        name, equals, value = part.partition("=")
        if not (name.isidentifier() and equals and value):
            raise ValueError(f"shape {text[:60]!r} is not 'name=value ...'")
        shape[name] = _whole_number(value) if value.isdigit() else value
    return shape


def read_environment(folder: Path) -> dict[str, Any]:
    """What environment.json says of the machine."""
    path = folder / ENVIRONMENT
    if not os.access(path, os.F_OK):
        raise SpecError(f"{path}: missing; it is written by `mofa calibrate run`")
    text = _text(path, "restore it or run again")
    try:
        environment = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path}: no valid JSON ({error}); restore it or run again") from None
    if not isinstance(environment, dict) or not isinstance(environment.get("gpu"), str):
        raise SpecError(f"{path}: gpu (the name of the device) is missing; restore it or run again")
    return environment
