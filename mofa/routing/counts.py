"""Token counts per expert from a file, checked row by row before anything is computed from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mofa.errors import SpecError
from mofa.routing.count_columns import ColumnRequirements, first_repeated_row, read_count_columns
from mofa.specs.files import shown_value
from mofa.specs.model import ModelSpec

MAX_CELLS = 2**25
"""Largest array of iterations x layers x experts: 256 MiB of float64."""
_COLUMNS = ColumnRequirements("counts", ("iteration", "layer", "expert", "tokens"), ("source_rank",))


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
    by_source
        The same from each source rank, in ascending order of those of a layer; None where the file does not say, or it
        was not asked for. (I, L, E, S) [tokens]
    """

    iterations: NDArray[np.int64]
    layers: NDArray[np.int64]
    tokens: NDArray[np.float64]
    by_source: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class CountedModel:
    """Whose experts a file counts: what messages call it, and its layers with experts, any where None."""

    name: str
    num_experts: int
    layers: NDArray[np.int64] | None = None

    @classmethod
    def from_model(cls, model: ModelSpec) -> CountedModel:
        """A model's experts."""
        assert model.moe is not None
        return cls(model.name, model.moe.num_experts, moe_layer_indices(model))


def read_counts(file: str | Path, model: ModelSpec | CountedModel, *, sources: bool = False) -> RoutingCounts:
    """Token counts per iteration, layer and expert that a CSV or Parquet file holds.

    Parameters
    ----------
    file
        ``.csv`` or ``.parquet`` with columns ``iteration``, ``layer`` (index in the model, from 0), ``expert`` (from
        0), ``tokens`` (copies received) and optionally ``source_rank`` (where they came from), in any order of rows
        and columns. An expert without a row got no tokens in that iteration and layer.
    model
        The model whose experts were counted, or what is known of it.
    sources
        Whether to keep source ranks apart, too.

    Returns
    -------
    RoutingCounts
        The counts, summed over source ranks.

    Raises
    ------
    SpecError
        Naming the row (the first after a CSV's header is row 1) or the column: a missing or unknown column, a value
        that is missing, negative or no whole number, the same cell twice, an expert or layer that the model does not
        have, an expert that never occurs, an iteration without one of the model's layers, a layer without tokens,
        layers of different numbers of source ranks where those are asked for; a file that is missing, empty,
        unreadable or too large.

    Notes
    -----
    Every layer with experts must be there in every iteration, and every expert at least once in the file, so that a
    trace of another model is noticed. Layers of multi-token prediction do not belong in the file.
    """
    expected = model if isinstance(model, CountedModel) else CountedModel.from_model(model)
    where = f"routing.file {shown_value(str(file), 200)}"
    columns = read_count_columns(file, where, _COLUMNS)
    layers = np.unique(columns["layer"]) if expected.layers is None else expected.layers
    _check_known(columns, expected, layers, where)
    _check_unique(columns, where)
    counts = _tabulate(columns, layers, expected.num_experts, where)
    if not sources or "source_rank" not in columns:
        return counts
    return replace(counts, by_source=_by_source(columns, counts, where))


def _check_known(
    columns: dict[str, NDArray[np.int64]], model: CountedModel, layers: NDArray[np.int64], where: str
) -> None:
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


def _check_unique(columns: dict[str, NDArray[np.int64]], where: str) -> None:
    keys = tuple(name for name in ("iteration", "layer", "source_rank", "expert") if name in columns)
    row = first_repeated_row(columns, keys)
    if row is not None:
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


def _by_source(columns: dict[str, NDArray[np.int64]], counts: RoutingCounts, where: str) -> NDArray[np.float64]:
    """Counts of each source rank; those of a layer are numbered in ascending order, as pipeline stages have others."""
    layer = np.searchsorted(counts.layers, columns["layer"])
    pairs, inverse = np.unique(np.stack([layer, columns["source_rank"]]), axis=1, return_inverse=True)
    per_layer = np.bincount(pairs[0], minlength=counts.layers.size)
    odd = np.flatnonzero(per_layer != per_layer[0])
    if odd.size:
        raise SpecError(
            f"{where}: column source_rank: layer {counts.layers[odd[0]]} has {per_layer[odd[0]]} source ranks, layer "
            f"{counts.layers[0]} has {per_layer[0]}; write rows of all"
        )
    shape = (*counts.tokens.shape, int(per_layer[0]))
    if int(np.prod(shape)) > MAX_CELLS:
        raise SpecError(
            f"{where}: has {shape[3]} source ranks in {shape[0]} iterations, too many for memory; keep fewer"
        )
    source = (np.arange(pairs.shape[1]) - (np.cumsum(per_layer) - per_layer)[pairs[0]])[inverse]
    key = (np.searchsorted(counts.iterations, columns["iteration"]), layer, columns["expert"], source)
    sums = np.bincount(np.ravel_multi_index(key, shape), weights=columns["tokens"], minlength=int(np.prod(shape)))
    return np.asarray(sums.reshape(shape), dtype=np.float64)


def moe_layer_indices(model: ModelSpec) -> NDArray[np.int64]:
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
