"""Columns of whole numbers from a CSV or Parquet file, checked row by row."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mofa.errors import SpecError
from mofa.specs.files import did_you_mean, shown_value
from mofa.specs.limited_reads import read_bytes

if TYPE_CHECKING:
    import pandas as pd

MAX_FILE_BYTES = 2**27
MAX_ROWS = 10_000_000
MAX_COUNT = 10**12
MAX_HEADER_BYTES = 4096


@dataclass(frozen=True)
class ColumnRequirements:
    """What a table must have, and may have; ``what`` is what messages call its rows."""

    what: str
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()


def read_count_columns(file: str | Path, where: str, columns: ColumnRequirements) -> dict[str, NDArray[np.int64]]:
    """Columns of a ``.csv`` or ``.parquet`` file, each of whole numbers of at least 0. name -> (rows,)

    Raises
    ------
    SpecError
        Beginning with ``where``: a file that is missing, empty, unreadable or too large; a column that is missing,
        unknown or there twice; the first row (1 is the one after a CSV's header) whose value is missing, negative or no
        whole number.
    """
    plain = _plain_csv(Path(file), columns)
    if plain is not None:
        return plain
    frame = _read_frame(Path(file), where, columns)
    _check_columns([str(c) for c in frame.columns], where, columns)
    return {str(name): _whole_numbers(frame[name], str(name), where) for name in frame.columns}


def first_repeated_row(columns: dict[str, NDArray[np.int64]], keys: tuple[str, ...]) -> int | None:
    """The first row whose values in some columns occurred before, or None.

    >>> first_repeated_row({"a": np.array([1, 2, 1]), "b": np.array([0, 0, 0])}, ("a", "b"))
    2
    """
    rows = np.stack([columns[name] for name in keys])
    order = np.lexsort(rows)  # of equal rows the earlier is in front
    again = np.all(rows[:, order[1:]] == rows[:, order[:-1]], axis=0)
    return int(order[1:][again].min()) if again.any() else None


def _plain_csv(path: Path, columns: ColumnRequirements) -> dict[str, NDArray[np.int64]] | None:
    """The columns of a CSV file of digits alone, in which nothing is wrong; None of any other.

    pandas, which takes half a second to load, reads those.
    """
    try:
        if path.suffix.lower() != ".csv" or not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
            return None
        head, *lines = read_bytes(path, "", MAX_FILE_BYTES).replace(b"\r\n", b"\n").removesuffix(b"\n").split(b"\n")
        names = head.decode("ascii").split(",")
        known = columns.required + columns.optional
        if len(set(names)) < len(names) or not set(columns.required) <= set(names) <= set(known):
            return None
        commas, cells = len(names) - 1, b",".join(lines)
        if not 0 < len(lines) <= MAX_ROWS or any(line.count(b",") != commas for line in lines):
            return None
        if cells.translate(None, b"0123456789,"):
            return None
        values = np.array(cells.split(b",")).astype(np.int64).reshape(len(lines), len(names))
    except (OSError, ValueError, OverflowError):  # a SpecError is a ValueError: the slow way says it in words
        return None
    if values.max() > MAX_COUNT:
        return None
    return {name: np.ascontiguousarray(values[:, i]) for i, name in enumerate(names)}


def _read_frame(path: Path, where: str, columns: ColumnRequirements) -> pd.DataFrame:
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".parquet"):
        raise SpecError(f"{where}: is neither .csv nor .parquet; write the {columns.what} as one of the two")
    try:
        read_bytes(path, where, MAX_FILE_BYTES, "keep fewer rows")
        frame = _read_csv(path, where) if suffix == ".csv" else _read_parquet(path, where, columns)
    except SpecError:
        raise
    except Exception as error:  # pandas and pyarrow raise a dozen unrelated types for a file that is not theirs
        reason = shown_value(getattr(error, "strerror", None) or str(error), 100)
        raise SpecError(f"{where}: cannot be read as {suffix[1:]} ({reason}); check the file") from None
    if frame.empty:
        raise SpecError(f"{where}: has no rows; write columns {', '.join(columns.required)}")
    if len(frame) > MAX_ROWS:
        raise SpecError(f"{where}: has {len(frame)} rows, more than {MAX_ROWS}; keep fewer")
    return frame


def _read_csv(path: Path, where: str) -> pd.DataFrame:
    import pandas as pd

    with path.open("rb") as file:
        if len(file.readline(MAX_HEADER_BYTES + 1)) > MAX_HEADER_BYTES:
            raise SpecError(f"{where}: its first line is longer than {MAX_HEADER_BYTES} bytes; check the file")
    with warnings.catch_warnings():
        # A row with a field too many: without index_col=False it would turn the first column into an index, unsaid.
        warnings.simplefilter("error", pd.errors.ParserWarning)
        return pd.read_csv(path, index_col=False, skipinitialspace=True, low_memory=False, encoding="utf-8-sig")


def _read_parquet(path: Path, where: str, columns: ColumnRequirements) -> pd.DataFrame:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    with pq.ParquetFile(path) as file:
        rows = file.metadata.num_rows  # before decompressing: a small file can hold billions of equal rows
        if rows > MAX_ROWS:
            raise SpecError(f"{where}: has {rows} rows, more than {MAX_ROWS}; keep fewer")
        _check_columns(file.schema_arrow.names, where, columns)
        for field in file.schema_arrow:
            if not (pa.types.is_integer(field.type) or pa.types.is_floating(field.type)):
                raise SpecError(
                    f"{where}: column {field.name} holds {shown_value(str(field.type))}; write whole numbers"
                )
        frame: pd.DataFrame = file.read(use_pandas_metadata=False).to_pandas(ignore_metadata=True)
        return frame


def _check_columns(names: list[str], where: str, columns: ColumnRequirements) -> None:
    known = columns.required + columns.optional
    for name in columns.required:
        if name not in names:
            optional = "".join(f"[, {other}]" for other in columns.optional)
            listed = ", ".join(columns.required) + optional
            raise SpecError(f"{where}: column {name} is missing; the columns are {listed}")
    for i, name in enumerate(names):
        if name not in known:
            raise SpecError(f"{where}: unknown column {shown_value(name)}; {did_you_mean(name, known)}")
        if name in names[:i]:
            raise SpecError(f"{where}: column {name} occurs twice; keep one")


def _whole_numbers(column: pd.Series, name: str, where: str) -> NDArray[np.int64]:
    """Values of a column as integers between 0 and :data:`MAX_COUNT`, or an error that names the first bad row."""
    import pandas as pd

    if column.dtype.kind in "iu":
        values = column.to_numpy()
        bad = (values < 0) | (values > MAX_COUNT)
    else:
        # Booleans and dates convert to numbers, but mean that a column is not what its name says.
        try:
            numeric = None if column.dtype.kind in "bmM" else pd.to_numeric(column, errors="coerce")
            values = np.full(len(column), np.nan) if numeric is None else numeric.to_numpy(dtype=float, na_value=np.nan)
        except OverflowError:
            raise SpecError(f"{where}: {name} holds a number of hundreds of digits; check the file") from None
        bad = ~((values >= 0) & (values <= MAX_COUNT) & (values == np.floor(values)))
    if bad.any():
        row = int(np.argmax(bad))
        raise SpecError(f"{where}: row {row + 1}: {name} {_complaint(column.iloc[row], float(values[row]))}")
    return np.asarray(values, dtype=np.int64)


def _complaint(raw: object, value: float) -> str:
    shown = shown_value(f"{raw:.15g}" if isinstance(raw, float) else str(raw))
    if np.isnan(value):
        missing = raw is None or shown in ("nan", "None", "<NA>", "NaT", "")
        return "is missing; write a whole number" if missing else f"({shown}) is no number; write a whole number"
    if value < 0:
        return f"({shown}) is negative; write a whole number of at least 0"
    if value > MAX_COUNT:
        return f"({shown}) is more than {MAX_COUNT}; check the file"
    return f"({shown}) is fractional; write a whole number"
