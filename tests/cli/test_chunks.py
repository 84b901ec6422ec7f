"""``mofa chunks``: what it prints and writes, and one line for whatever is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mofa.cli.main import main
from tests.cli.conftest import one_line_of

COMMAND = ("chunks", "memfine-model-2", "h100-hgx", "--gpus", "32", "--strategy", "ep=32 micro_batch=1 recompute=full")


def test_chunks_of_a_preset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    options = ("--routing", "memfine-iteration-7", "--iterations", "2", "--set", "hardware.gpu.memory_bytes=84 GB")
    assert main((*COMMAND, *options, "--bins", "1,4", "--out", str(out), "--quiet")) == 0
    shown = capsys.readouterr().out
    assert "mact" in shown and "fixed 4" in shown
    figures = {f"{name}.{kind}" for name in ("chunks", "throughput", "memory") for kind in ("png", "svg")}
    assert {f.name for f in out.iterdir()} == {"chunks.json", "chunks.csv", *figures}
    found = json.loads((out / "chunks.json").read_text())
    for policy in found["policies"]:
        assert len(policy["steps_s"]) == len(policy["peaks_bytes"]) == 2
        assert max(policy["peaks_bytes"]) == policy["peak_bytes"]
        assert sum(policy["steps_s"]) / 2 == pytest.approx(policy["step_s"])
    assert found["bins"] == [1, 4] and len(found["chunks"]) == 2 and len(found["layers"]) == 5


def test_a_trace_has_its_own_iterations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        f"{i},{layer},{e},{8 * (1 + 30 * (e < 8) * i)}" for i in (0, 1) for layer in range(3, 8) for e in range(256)
    ]
    trace = tmp_path / "t.csv"
    trace.write_text("iteration,layer,expert,tokens\n" + "\n".join(rows) + "\n")
    assert main((*COMMAND, "--trace", str(trace), "--json", "--set", "hardware.gpu.memory_bytes=88 GB")) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["chunks"]) == 2
    assert found["chunks"][0] == [1] * 5 and min(found["chunks"][1]) > 1  # even at first, then all on one rank


def test_what_fits_and_that_no_joint_choice_does_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--routing", "memfine-iteration-7", "--iterations", "1", "--bins", "1", "--joint")
    assert main((*COMMAND, *options, "--set", "hardware.gpu.memory_bytes=40 GB")) == 0
    shown = capsys.readouterr().out
    assert "chosen together: none fits" in shown and "fullest rank of all layers and iterations gets" in shown
    assert shown.split("rows that fit, by chunks")[1].split()[2:4] == ["1", "none"]
    assert main((*COMMAND, *options, "--set", "hardware.gpu.memory_bytes=400 GB")) == 0
    shown = capsys.readouterr().out
    assert "none fits)" in shown and "together: none fits" not in shown
    assert shown.split("rows that fit, by chunks")[1].split()[2:4] == ["1", "all"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--bins", "1,x"), "--bins: '1,x'"),
        (("--bins", "0"), "bins (0)"),
        (("--routing", "zipf:-1"), "--routing zipf:-1"),
        (("--routing", "zipf:nan"), "--routing zipf:nan: s (nan) must be a finite number; write it like zipf:1"),
        (("--routing", "lognormal:50"), "sigma (50.0) must be less than or equal to 10; write it like lognormal:1"),
        (("--trace", "none.csv"), "no such file"),
        (("--routing", "zipf:1", "--trace", "none.csv"), "leave one out"),
        (("--iterations", "0"), "iterations (0)"),
        (("--window", "0"), "window (0)"),
        (("--headroom", "nan"), "headroom"),
        (("--set", "strategy.tp=2"), "--set strategy"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], options: tuple[str, ...], says: str) -> None:
    assert main((*COMMAND, *options)) == 2
    assert says in one_line_of(capsys.readouterr().err)
