"""Token counts per expert from a file, checked row by row before anything is computed from them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mofa.errors import SpecError
from mofa.specs.files import did_you_mean, short
from mofa.specs.model import ModelSpec

if TYPE_CHECKING:
    import pandas as pd

MAX_FILE_BYTES = 2**27
MAX_ROWS = 10_000_000
MAX_CELLS = 2**25
"""Largest array of iterations x layers x experts: 256 MiB of float64."""
MAX_COUNT = 10**12
MAX_HEADER_BYTES = 4096

_REQUIRED = ("iteration", "layer", "expert", "tokens")
_OPTIONAL = ("source_rank",)


@dataclass(frozen=True)
class RoutingCounts:
    """Counted token copies per expert.

    Parameters
    ----------
    iterations
        The file's iteration numbers, ascending. (I,) [-]
    layers
        Indices of the model's layers with experts, from 0, ascending. (L,) [-]
    tokens
        Token copies that an expert received, from all source ranks together. (I, L, E) [tokens]
    """

    iterations: NDArray[np.int64]
    layers: NDArray[np.int64]
    tokens: NDArray[np.float64]


@dataclass(frozen=True)
class Expected:
    """Whose experts a file counts: what messages call it, and its layers with experts, any where None."""

    name: str
    num_experts: int
    layers: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, model: ModelSpec) -> Expected:
        """A model's experts."""
        assert model.moe is not None
        return cls(model.name, model.moe.num_experts, moe_layers(model))


def read_counts(file: str | Path, model: ModelSpec | Expected) -> RoutingCounts:
    """Token counts per iteration, layer and expert that a CSV or Parquet file holds.

    Parameters
    ----------
    file
        ``.csv`` or ``.parquet`` with columns ``iteration``, ``layer`` (index in the model, from 0), ``expert`` (from
        0), ``tokens`` (copies received) and optionally ``source_rank`` (where they came from), in any order of rows
        and columns. An expert without a row got no tokens in that iteration and layer.
    model
        The model whose experts were counted, or what is known of it.

    Returns
    -------
    RoutingCounts
        The counts, summed over source ranks.

    Raises
    ------
    SpecError
        Naming the row (the first after a CSV's header is row 1) or the column: a missing or unknown column, a value
        that is missing, negative or no whole number, the same cell twice, an expert or layer that the model does not
        have, an expert that never occurs, an iteration without one of the model's layers, a layer without tokens;
        a file that is missing, empty, unreadable or too large.

    Notes
    -----
    Every layer with experts must be there in every iteration, and every expert at least once in the file, so that a
    trace of another model is noticed. Layers of multi-token prediction do not belong in the file.
    """
    expected = model if isinstance(model, Expected) else Expected.of(model)
    where = f"routing.file {short(str(file), 200)}"
    frame = _read_frame(Path(file), where)
    _check_columns([str(c) for c in frame.columns], where)
    columns = {str(name): _whole_numbers(frame[name], str(name), where) for name in frame.columns}
    layers = np.unique(columns["layer"]) if expected.layers is None else expected.layers
    _check_known(columns, expected, layers, where)
    _check_unique(frame, columns, where)
    return _tabulate(columns, layers, expected.num_experts, where)


def _read_frame(path: Path, where: str) -> pd.DataFrame:
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".parquet"):
        raise SpecError(f"{where}: is neither .csv nor .parquet; write the counts as one of the two")
    try:
        if not path.is_file():
            raise SpecError(f"{where}: no such file; check the path")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise SpecError(f"{where}: larger than {MAX_FILE_BYTES // 2**20} MiB; keep fewer iterations")
        frame = _read_csv(path, where) if suffix == ".csv" else _read_parquet(path, where)
    except SpecError:
        raise
    except Exception as error:  # pandas and pyarrow raise a dozen unrelated types for a file that is not theirs
        reason = short(getattr(error, "strerror", None) or str(error), 100)
        raise SpecError(f"{where}: cannot be read as {suffix[1:]} ({reason}); check the file") from None
    if frame.empty:
        raise SpecError(f"{where}: has no rows; write columns {', '.join(_REQUIRED)}")
    if len(frame) > MAX_ROWS:
        raise SpecError(f"{where}: has {len(frame)} rows, more than {MAX_ROWS}; keep fewer iterations")
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


def _read_parquet(path: Path, where: str) -> pd.DataFrame:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    with pq.ParquetFile(path) as file:
        rows = file.metadata.num_rows  # before decompressing: a small file can hold billions of equal rows
        if rows > MAX_ROWS:
            raise SpecError(f"{where}: has {rows} rows, more than {MAX_ROWS}; keep fewer iterations")
        _check_columns(file.schema_arrow.names, where)
        for field in file.schema_arrow:
            if not (pa.types.is_integer(field.type) or pa.types.is_floating(field.type)):
                raise SpecError(f"{where}: column {field.name} holds {short(str(field.type))}; write whole numbers")
        frame: pd.DataFrame = file.read(use_pandas_metadata=False).to_pandas(ignore_metadata=True)
        return frame


def _check_columns(names: list[str], where: str) -> None:
    for name in _REQUIRED:
        if name not in names:
            raise SpecError(f"{where}: column {name} is missing; the columns are {', '.join(_REQUIRED)}[, source_rank]")
    for i, name in enumerate(names):
        if name not in _REQUIRED + _OPTIONAL:
            raise SpecError(f"{where}: unknown column {short(name)}; {did_you_mean(name, _REQUIRED + _OPTIONAL)}")
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
        numeric = None if column.dtype.kind in "bmM" else pd.to_numeric(column, errors="coerce")
        values = np.full(len(column), np.nan) if numeric is None else numeric.to_numpy(dtype=float, na_value=np.nan)
        bad = ~((values >= 0) & (values <= MAX_COUNT) & (values == np.floor(values)))
    if bad.any():
        row = int(np.argmax(bad))
        raise SpecError(f"{where}: row {row + 1}: {name} {_complaint(column.iloc[row], float(values[row]))}")
    return np.asarray(values, dtype=np.int64)


def _complaint(raw: object, value: float) -> str:
    shown = short(f"{raw:.15g}" if isinstance(raw, float) else str(raw))
    if np.isnan(value):
        missing = raw is None or shown in ("nan", "None", "<NA>", "NaT", "")
        return "is missing; write a whole number" if missing else f"({shown}) is no number; write a whole number"
    if value < 0:
        return f"({shown}) is negative; write a whole number of at least 0"
    if value > MAX_COUNT:
        return f"({shown}) is more than {MAX_COUNT}; check the file"
    return f"({shown}) is fractional; write a whole number"


def _check_known(columns: dict[str, NDArray[np.int64]], model: Expected, layers: NDArray[np.int64], where: str) -> None:
    num_experts = model.num_experts
    unknown = columns["expert"] >= num_experts
    if unknown.any():
        row = int(np.argmax(unknown))
        raise SpecError(
            f"{where}: row {row + 1}: expert {columns['expert'][row]} is unknown; {model.name} has "
            f"{num_experts} experts, numbered from 0 to {num_experts - 1}"
        )
    unknown = ~np.isin(columns["layer"], layers)
    if unknown.any():
        row = int(np.argmax(unknown))
        raise SpecError(
            f"{where}: row {row + 1}: layer {columns['layer'][row]} of {model.name} has no experts; "
            f"the {len(layers)} layers that have, counted from 0, are {_listed(layers)}"
        )
    missing = np.setdiff1d(np.arange(num_experts), columns["expert"])
    if missing.size:
        raise SpecError(
            f"{where}: column expert holds {num_experts - missing.size} experts, but {model.name} has {num_experts}; "
            f"expert {missing[0]} never occurs, write its 0 tokens once if it got none"
        )


def _check_unique(frame: pd.DataFrame, columns: dict[str, NDArray[np.int64]], where: str) -> None:
    keys = [name for name in ("iteration", "layer", "source_rank", "expert") if name in columns]
    twice = frame.duplicated(subset=keys).to_numpy()
    if twice.any():
        row = int(np.argmax(twice))
        cell = ", ".join(f"{name} {columns[name][row]}" for name in keys)
        raise SpecError(f"{where}: row {row + 1}: {cell} occurs twice; keep one row for each")


def _tabulate(
    columns: dict[str, NDArray[np.int64]], layers: NDArray[np.int64], num_experts: int, where: str
) -> RoutingCounts:
    iterations, i = np.unique(columns["iteration"], return_inverse=True)
    shape = (iterations.size, layers.size, num_experts)
    if iterations.size * layers.size * num_experts > MAX_CELLS:
        raise SpecError(f"{where}: has {iterations.size} iterations, too many for memory; keep fewer")
    cell = i * layers.size + np.searchsorted(layers, columns["layer"])
    rows = np.bincount(cell, minlength=shape[0] * shape[1]).reshape(shape[:2])
    if not rows.all():
        iteration, layer = np.argwhere(rows == 0)[0]
        raise SpecError(
            f"{where}: iteration {iterations[iteration]}: layer {layers[layer]} is missing; "
            f"write all layers with experts, counted from 0: {_listed(layers)}"
        )
    key = cell * shape[2] + columns["expert"]
    sums = np.bincount(key, weights=columns["tokens"], minlength=int(np.prod(shape)))
    tokens = np.asarray(sums.reshape(shape), dtype=np.float64)
    empty = tokens.sum(axis=-1) == 0
    if empty.any():
        iteration, layer = np.argwhere(empty)[0]
        raise SpecError(
            f"{where}: iteration {iterations[iteration]}, layer {layers[layer]}: the tokens of all experts are 0; "
            "leave the iteration out"
        )
    return RoutingCounts(iterations, layers, tokens)


def moe_layers(model: ModelSpec) -> NDArray[np.int64]:
    """Indices of the layers with experts, from 0. (L,)"""
    return np.array([i for i in range(model.num_layers) if model.is_moe_layer(i)], dtype=np.int64)


def _listed(layers: NDArray[np.int64]) -> str:
    """Layers in a few words.

    >>> _listed(np.array([3, 4, 5])), _listed(np.array([1, 3, 5, 7, 9]))
    ('3 to 5', '1, 3, ..., 9')
    """
    if layers.size > 1 and np.all(np.diff(layers) == 1):
        return f"{layers[0]} to {layers[-1]}"
    if layers.size <= 4:
        return ", ".join(map(str, layers))
    return f"{layers[0]}, {layers[1]}, ..., {layers[-1]}"
