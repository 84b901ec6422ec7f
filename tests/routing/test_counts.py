"""Counts from a file: what they say, and one line for whatever is wrong with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mofa.errors import SpecError
from mofa.routing.counts import CountedModel, read_counts
from mofa.routing.rank_load import rank_loads, routing_loads
from mofa.specs.routing import RoutingSpec
from tests.routing.test_rank_load import moe_model

MODEL = moe_model(num_experts=4, top_k=2, num_layers=3, dense=1)  # layers 1 and 2 have experts
TOKENS = np.array([[[40, 30, 20, 10], [25, 25, 25, 25]], [[10, 10, 40, 40], [0, 50, 50, 0]]])  # iterations 7 and 9


def frame() -> pd.DataFrame:
    i, layer, e = np.indices(TOKENS.shape).reshape(3, -1)
    return pd.DataFrame(
        {"iteration": np.array([7, 9])[i], "layer": layer + 1, "expert": e, "tokens": TOKENS.reshape(-1)}
    )


def write(data: pd.DataFrame, path: Path) -> Path:
    if path.suffix == ".csv":
        data.to_csv(path, index=False)
    else:
        data.to_parquet(path, index=False)
    return path


def counts(path: Path, **kwargs: float) -> RoutingSpec:
    return RoutingSpec.model_validate({"kind": "counts", "file": str(path), **kwargs})


@pytest.mark.parametrize("name", ["c.csv", "c.parquet"])
def test_any_order_of_rows_and_columns(tmp_path: Path, name: str) -> None:
    shuffled = frame().sample(frac=1, random_state=0)[["tokens", "expert", "layer", "iteration"]]
    read = read_counts(write(shuffled, tmp_path / name), MODEL)
    assert read.iterations.tolist() == [7, 9] and read.layers.tolist() == [1, 2]
    assert np.array_equal(read.tokens, TOKENS)


def test_experts_without_a_row_got_nothing_and_sources_add_up(tmp_path: Path) -> None:
    data = frame()
    data = data[data["tokens"] > 0]
    halves = [data.assign(source_rank=r, tokens=data["tokens"] * (r + 1)) for r in (0, 1)]
    read = read_counts(write(pd.concat(halves), tmp_path / "c.parquet"), MODEL)
    assert np.array_equal(read.tokens, 3 * TOKENS)


def test_loads_by_hand(tmp_path: Path) -> None:
    """Two ranks of two experts: 70/30, 50/50, 20/80 and 50/50 of 100; slowest over mean 1.4, 1, 1.6, 1."""
    path = write(frame(), tmp_path / "c.csv")
    loads = routing_loads(counts(path), MODEL, [1, 2, 4])
    assert loads.slowest_rows_over_mean == pytest.approx({1: 1.0, 2: 1.25, 4: (1.6 + 1 + 1.6 + 2) / 4})
    # of each layer the larger of both iterations: 70 and 20, 30 and 80 of 50; 50 both times
    assert loads.by_layer[2] == pytest.approx(np.array([[1.4, 1.6], [1.0, 1.0]]))
    assert loads.by_layer[1] == pytest.approx(np.ones((2, 1)))
    assert loads.quantile_rows_over_mean == pytest.approx({1: 1.0, 2: 1.6, 4: 2.0})
    # Of the eight ratios 0.4 0.6 1 1 1 1 1.4 1.6, seven eighths are at most 1.4.
    assert routing_loads(counts(path, memory_quantile=0.875), MODEL, [2]).quantile_rows_over_mean[2] == pytest.approx(
        1.4
    )
    # A tenth of the tokens of the file: 10 rows a rank instead of 50.
    rows = rank_loads(counts(path), MODEL, 2, tokens=5)
    assert rows == pytest.approx(np.array([[[14, 6], [10, 10]], [[4, 16], [10, 10]]]))
    assert rank_loads(counts(path), MODEL, 2, tokens=5, iterations=1).shape == (1, 2, 2)
    with pytest.raises(SpecError, match=r"iterations \(3\): routing.file .* holds 2"):
        rank_loads(counts(path), MODEL, 2, tokens=5, iterations=3)


def test_counts_that_no_router_gives_are_capped(tmp_path: Path) -> None:
    """All copies on one expert: with top 2 it gets half, the others, of which none is ahead, a sixth each."""
    data = frame().assign(tokens=lambda d: np.where(d["expert"] == 0, 90, 0))
    loads = routing_loads(counts(write(data, tmp_path / "c.csv")), MODEL, [4])
    assert loads.slowest_rows_over_mean[4] == loads.quantile_rows_over_mean[4] == 2.0


def edited(row: int, column: str, value: object) -> pd.DataFrame:
    data = frame()
    cells: list[object] = data[column].tolist()
    cells[row] = value
    return data.assign(**{column: pd.Series(cells, dtype=object)})


BAD = {
    "negative": (edited(4, "tokens", -3), r"row 5: tokens \(-3\) is negative"),
    "fraction": (edited(4, "tokens", 2.5), r"row 5: tokens \(2.5\) is fractional"),
    "missing value": (edited(4, "tokens", None), r"row 5: tokens is missing"),
    "nan": (edited(4, "expert", float("nan")), r"row 5: expert is missing"),
    "infinite": (edited(4, "tokens", float("inf")), r"row 5: tokens \(inf\) is more than"),
    "text": (edited(4, "layer", "one"), r"row 5: layer \(one\) is no number"),
    "huge": (edited(4, "tokens", 10**30), r"row 5: tokens \(.*\) is more than 1000000000000"),
    "unknown expert": (edited(4, "expert", 4), r"row 5: expert 4 is unknown; small has 4 experts, numbered from 0"),
    "dense layer": (edited(4, "layer", 0), r"row 5: layer 0 of small has no experts; .* are 1 to 2"),
    "twice": (edited(4, "expert", 1), r"row 6: iteration 7, layer 2, expert 1 occurs twice"),
    "layer missing": (frame().drop(index=range(4, 8)), r"iteration 7: layer 2 is missing"),
    "fewer experts": (frame().query("expert < 3"), r"holds 3 experts, but small has 4; expert 3 never occurs"),
    "no column": (frame().drop(columns="tokens"), r"column tokens is missing"),
    "unknown column": (frame().assign(source_rnk=0), r"unknown column source_rnk; did you mean source_rank"),
    "no rows": (frame().head(0), r"has no rows"),
    "no tokens": (frame().assign(tokens=lambda d: d["tokens"] * (d["layer"] != 2)), r"layer 2: the tokens of all"),
    "booleans": (frame().assign(tokens=True), r"tokens \(True\) is no number"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_rows_of_a_csv_are_named(tmp_path: Path, what: str) -> None:
    data, message = BAD[what]
    path = write(data, tmp_path / "c.csv")
    with pytest.raises(SpecError, match=message) as caught:
        routing_loads(counts(path), MODEL, [2])
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("what", ["negative", "fraction", "missing value", "nan", "infinite", "unknown expert"])
def test_bad_rows_of_a_parquet_file_are_named(tmp_path: Path, what: str) -> None:
    data, message = BAD[what]
    with pytest.raises(SpecError, match=message):
        read_counts(write(data.astype(float), tmp_path / "c.parquet"), MODEL)


def test_parquet_columns_that_hold_no_numbers(tmp_path: Path) -> None:
    columns: list[list[object]] = [["3"] * 16, [[1, 2]] * 16, [True] * 16]
    for tokens in columns:
        path = write(frame().assign(tokens=pd.Series(tokens, dtype=object)), tmp_path / "c.parquet")
        with pytest.raises(SpecError, match=r"column tokens holds (large_string|string|list|bool)"):
            read_counts(path, MODEL)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.txt", b"", "is neither .csv nor .parquet"),
        ("c.csv", b"", "cannot be read as csv"),
        ("c.csv", b"\xff\xfe\x00\x01", "cannot be read as csv"),
        ("c.csv", b"iteration,layer,expert,tokens\n1,1,1,1,1\n", "cannot be read as csv"),
        ("c.csv", b"a," * 10_000, "first line is longer"),
        ("c.csv", b"iteration,layer,expert,tokens,tokens\n1,1,1,1,1\n", "unknown column tokens.1"),
        ("c.parquet", b"PAR1 no parquet", "cannot be read as parquet"),
    ],
)
def test_files_that_hold_something_else(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(SpecError, match=message) as caught:
        read_counts(path, MODEL)
    assert "\n" not in str(caught.value)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "d.csv").mkdir()
    for path in (tmp_path / "none.csv", tmp_path / "d.csv", "nul\0.csv", "http://example.org/c.csv"):
        with pytest.raises(SpecError, match=r"no such file|cannot be read|is a folder"):
            read_counts(path, MODEL)


def test_large_files_are_refused_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    csv, parquet = write(frame(), tmp_path / "c.csv"), write(frame(), tmp_path / "c.parquet")
    for name, file, message in (
        ("count_columns.MAX_FILE_BYTES", csv, "larger than"),
        ("count_columns.MAX_ROWS", csv, "has 16 rows, more than 10"),
        ("count_columns.MAX_ROWS", parquet, "has 16 rows, more than 10"),
        ("counts.MAX_CELLS", csv, "has 2 iterations, too many"),
    ):  # fmt: skip
        with monkeypatch.context() as patch, pytest.raises(SpecError, match=message):
            patch.setattr(f"mofa.routing.{name}", 10)
            read_counts(file, MODEL)


def test_source_ranks_are_kept_apart_where_asked(tmp_path: Path) -> None:
    """Ranks of a layer are numbered in ascending order: pipeline stages have others."""
    rows = ["0,0,0,5,4", "0,0,1,2,9", "0,1,0,3,1", "0,1,1,1,2"]
    (tmp_path / "s.csv").write_text("iteration,layer,expert,tokens,source_rank\n" + "\n".join(rows) + "\n")
    expected = CountedModel("two", 2)
    assert read_counts(tmp_path / "s.csv", expected).by_source is None
    found = read_counts(tmp_path / "s.csv", expected, sources=True)
    assert found.by_source is not None
    assert found.by_source.tolist() == [[[[5, 0], [0, 2]], [[3, 0], [0, 1]]]]
    assert np.array_equal(found.by_source.sum(axis=-1), found.tokens)
    (tmp_path / "s.csv").write_text("iteration,layer,expert,tokens,source_rank\n" + "\n".join(rows[:3]) + "\n")
    with pytest.raises(SpecError, match="column source_rank: layer 1 has 1 source ranks, layer 0 has 2"):
        read_counts(tmp_path / "s.csv", expected, sources=True)
