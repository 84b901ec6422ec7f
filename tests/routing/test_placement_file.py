"""Placements from files: what is read comes out again, and what is wrong is named by its row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mofa.errors import SpecError
from mofa.routing.placement import shuffled_placement
from mofa.routing.placement_file import placement_csv, read_placement

SMALL = "expert,gpu\n0,0\n1,0\n0,1\n1,1\n"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    placement = shuffled_placement(12, 6, 3, seed=5)
    (tmp_path / "p.csv").write_text(placement_csv(placement))
    assert np.array_equal(read_placement(tmp_path / "p.csv", 12, 6, 4).copies, placement.copies)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (SMALL + "2,0\n", "row 5: expert 2 is unknown; the group has 2, numbered from 0"),
        (SMALL + "1,2\n", "row 5: gpu 2 is unknown; the group has 2, numbered from 0"),
        (SMALL + "1,1\n", "row 5: expert 1 on GPU 1 occurs twice; keep one row"),
        ("expert,gpu\n0,0\n0,1\n", "expert 1 has no GPU; write a row for it"),
        ("expert,gpu\n0,0\n1,-1\n", r"row 2: gpu \(-1\) is negative"),
        ("expert,gpu\n0,0\n1,x\n", r"row 2: gpu \(x\) is no number"),
        ("expert,rank\n0,0\n", "column gpu is missing; the columns are expert, gpu"),
        ("expert,gpu\n", "has no rows; write columns expert, gpu"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "p.csv").write_text(content)
    with pytest.raises(SpecError, match=says) as caught:
        read_placement(tmp_path / "p.csv", 2, 2, 2)
    assert str(caught.value).startswith("placement ") and "p.csv" in str(caught.value)


def test_more_replicas_than_fit_are_named_by_their_row(tmp_path: Path) -> None:
    """GPU 1 has one slot: its second replica in the order of the file is row 3."""
    (tmp_path / "p.csv").write_text("expert,gpu\n0,1\n0,0\n1,1\n1,0\n")
    with pytest.raises(SpecError, match="row 3: GPU 1 gets 2 replicas, and a GPU holds 1; put expert 1 on another GPU"):
        read_placement(tmp_path / "p.csv", 2, 2, 1)
