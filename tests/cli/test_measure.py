"""``mofa measure`` as a user runs it, with runners that need no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mofa.cli.main import main
from mofa.measure import read_records
from tests.cli.conftest import Cli, one_line_of
from tests.measure.test_measure import STATE, fake_runners, raw_run, runs_file

__all__ = ["fake_runners"]

Captured = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("fake_runners")
def test_records_are_written_and_a_second_call_skips_them(tmp_path: Path, capsys: Captured) -> None:
    runs, out = runs_file(tmp_path, raw_run("ok-1"), raw_run("oom-1")), tmp_path / "reference" / "measured"
    assert main(["measure", str(runs), "--out", str(out), "--parallel"]) == 0
    printed, err = capsys.readouterr()
    assert printed == f"2 written to {out}, 0 there before, 0 failed\n"
    assert "2 runs to measure, 0 there before" in err
    assert err.splitlines()[-1].endswith("; 0 left")
    assert {r.run.id: r.measured.outcome for r in read_records(out)} == {"ok-1": "ok", "oom-1": "oom"}
    assert main(["measure", str(runs), "--out", str(out)]) == 0
    assert capsys.readouterr() == (f"0 written to {out}, 2 there before, 0 failed\n", "")


@pytest.mark.usefixtures("fake_runners")
def test_a_run_that_fails_is_one_line_and_the_others_are_kept(tmp_path: Path, capsys: Captured) -> None:
    runs, out, logs = runs_file(tmp_path, raw_run("crash-1"), raw_run("ok-1")), tmp_path / "out", tmp_path / "logs"
    assert main(["measure", str(runs), "--out", str(out), "--logs", str(logs), "--quiet"]) == 2
    printed, err = capsys.readouterr()
    assert printed == f"1 written to {out}, 0 there before, 1 failed\n"
    assert one_line_of(err) == "mofa: crash-1: no result: RuntimeError: broken on purpose"
    assert [path.name for path in out.iterdir()] == ["ok-1.yaml"]
    assert "broken on purpose" in (logs / "crash-1.rank0.log").read_text()


@pytest.mark.usefixtures("fake_runners")
def test_a_run_that_hangs_is_given_up(tmp_path: Path, capsys: Captured) -> None:
    runs = runs_file(tmp_path, raw_run("hang-1"))
    assert main(["measure", str(runs), "--out", str(tmp_path / "out"), "--timeout", "1", "--quiet"]) == 2
    assert "hang-1: no result: no end after 1 s" in one_line_of(capsys.readouterr().err)


@pytest.mark.usefixtures("fake_runners")
def test_an_interruption_keeps_whole_records_only(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.rename

    def interrupted(path: Path, target: Any) -> Path:
        if path.name.startswith("ok-2"):
            raise KeyboardInterrupt
        return real(path, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    runs = runs_file(tmp_path, raw_run("ok-1"), raw_run("ok-2"), raw_run("ok-3"))
    assert main(["measure", str(runs), "--out", str(tmp_path / "out"), "--quiet"]) == 130
    assert one_line_of(capsys.readouterr().err) == "mofa: interrupted; no file is half-written"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["ok-1.yaml"]


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"torch": None, "gpus": []}, "PyTorch is not installed; pip install 'mofa[gpu]'"),
        ({"gpus": []}, "no GPU is visible to PyTorch"),
        ({"torchtitan": None}, "torchtitan is not installed; pip install torchtitan==0.2.2"),
    ],
)
def test_a_machine_that_cannot_measure_is_one_line(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, state: dict[str, Any], says: str
) -> None:
    monkeypatch.setattr("mofa.measure.runs.machine_self_test", lambda: {**STATE, **state})
    assert main(["measure", str(runs_file(tmp_path, raw_run())), "--out", str(tmp_path / "out")]) == 2
    printed, err = capsys.readouterr()
    assert printed == ""
    assert says in one_line_of(err)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (raw_run(framework={"name": "megatron-2022"}), "cannot be measured"),
        (raw_run(precision={"gemm": "fp8"}), "cannot run precision.gemm (fp8)"),
        (raw_run(model="no-such-model"), "no-such-model"),
    ],
)
def test_a_run_that_cannot_be_expressed_is_one_line(
    tmp_path: Path, capsys: Captured, raw: dict[str, Any], says: str
) -> None:
    assert main(["measure", str(runs_file(tmp_path, raw)), "--out", str(tmp_path / "out")]) == 2
    assert says in one_line_of(capsys.readouterr().err)


@pytest.mark.usefixtures("committed_records_read_once")
def test_what_was_committed_needs_no_gpu_to_be_skipped(cli: Cli) -> None:
    plan, out = ROOT / "reference_runs" / "plans" / "first.yaml", ROOT / "reference_runs" / "measured"
    done = cli("measure", str(plan), "--out", str(out))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("0 written")


def test_a_truncated_record_is_one_line_and_kept(tmp_path: Path, capsys: Captured) -> None:
    whole = (ROOT / "reference_runs" / "measured" / "tt1-llama-8l.yaml").read_text()
    record = tmp_path / "out" / "tt1-llama-8l.yaml"
    record.parent.mkdir()
    runs = runs_file(tmp_path, raw_run())
    for length in (len(whole) // 3, len(whole) - 40, 0):
        record.write_text(whole[:length])
        assert main(["measure", str(runs), "--out", str(record.parent)]) == 2
        assert str(record) in one_line_of(capsys.readouterr().err)
        assert record.read_text() == whole[:length]
