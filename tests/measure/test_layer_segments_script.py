"""The table of layers' parts out of records and what their ranks left."""

from __future__ import annotations

import shutil
from pathlib import Path

from scripts.layer_segments import segment_rows
from tests.committed import MEASURED

HEADER = "host_issue_s,part,autograd,micro_batch,calls,seconds,waited_s\n"


def test_rows_tell_their_run_and_judging_runs_are_left_out(tmp_path: Path) -> None:
    records, segments = tmp_path / "measured", tmp_path / "segments"
    records.mkdir()
    segments.mkdir()
    for name in ("te1-moonlight-5l-tensorwise", "h200-te1-scout-1l-8k-delayed", "te1-qwen30b-4l-blockwise"):
        shutil.copy(MEASURED / f"{name}.yaml", records)
    for name in ("te1-moonlight-5l-tensorwise", "h200-te1-scout-1l-8k-delayed"):
        (segments / f"{name}.0.csv").write_text(HEADER + "8e-06,layer,records,first,5,0.01,0.001\n")
    rows, left_out = segment_rows(records)
    assert left_out == ["h200-te1-scout-1l-8k-delayed"]
    assert [(row["run"], row["format"], row["experts"], row["recompute"], row["part"]) for row in rows] == [
        ("te1-moonlight-5l-tensorwise", "fp8-tensorwise", "64", "none", "layer")
    ]
