"""``mofa sweep``: a table, a Parquet file, figures, exit statuses, and on where it was killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

import mofa
from mofa.report.sweep_text import MOST_ROWS, print_sweep
from mofa.report.tables import make_console
from tests.cli.conftest import Cli, one_line_of

SWEEP = """
models: llama3-8b
clusters: [h100-hgx, h800-hgx]
gpus: 8..16
global_batch: [64, "8 per gpu"]
tokens: 1T
prices: {h100-hgx: 2.5, h800-hgx: 2}
search: {fast: true, fix: {tp: 2, pp: 2, vpp: 1, cp: 1, micro_batch: 1, recompute: none}}
"""


def test_a_sweep_says_what_is_cheapest_and_writes_a_table(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "scales.yaml").write_text(SWEEP)
    done = cli("sweep", "scales.yaml", "--csv", "scales.csv")
    assert done.returncode == 0, done.stderr
    table = pd.read_parquet(tmp_path / "scales" / "sweep.parquet")
    assert len(table) == table["key"].nunique() == 6 and set(table["status"]) == {"planned"}
    read = pd.read_csv(tmp_path / "scales.csv")
    assert read["usd"].tolist() == pytest.approx(table["usd"].tolist(), rel=1e-12)
    same = table[table["global_batch"] == 64]
    cheapest = same.loc[same["usd"].idxmin()]
    assert re.search(
        rf"^batch 64: cheapest: {cheapest['num_gpus']} GPUs, {cheapest['cluster']}, .* {cheapest['usd']:,.0f} USD\.$",
        done.stdout, re.MULTILINE,
    )  # fmt: skip
    names = {path.name for path in (tmp_path / "scales").iterdir()}
    figures = {f"{name}.{kind}" for name in ("cost_front", "strong_scaling", "weak_scaling") for kind in ("png", "svg")}
    assert names == {"points", "sweep.parquet", *figures}
    before = {path: path.read_bytes() for path in (tmp_path / "scales").rglob("*.*")}
    assert cli("sweep", "scales.yaml", "--quiet").stdout in done.stdout
    assert before == {path: path.read_bytes() for path in (tmp_path / "scales").rglob("*.*")}


@pytest.mark.usefixtures("undrawn")
def test_json_says_what_the_table_says(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(SWEEP.replace("8..16", "[8, 12, 16]"))
    done = cli("sweep", "s.yaml", "--json", "--json-file", "s.json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed == json.loads((tmp_path / "s.json").read_text()) and printed["schema_version"] == "1.0"
    table = pd.read_parquet(tmp_path / "s" / "sweep.parquet")
    points = printed["points"]
    assert [list(point) for point in points] == [list(table.columns)] * len(table)
    for name in table.columns:
        assert [point[name] for point in points] == [None if pd.isna(each) else each for each in table[name]], name
    assert {point["status"] for point in points} == {"planned", "failed"}
    for job in printed["jobs"]:
        own = [points[number] for number in job["points"]]
        assert len({point["global_batch"] for point in own}) == 1 and job["compared_by"] == "usd"
        assert points[job["cheapest"]]["usd"] == min(point["usd"] for point in own)
        assert points[job["fastest"]]["days"] == min(point["days"] for point in own)
    assert sorted(number for job in printed["jobs"] for number in job["points"]) == [
        number for number, point in enumerate(points) if point["status"] == "planned"
    ]


@pytest.mark.usefixtures("undrawn")
def test_a_plan_by_scales_and_a_sweep_say_the_same(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(SWEEP.replace("[h100-hgx, h800-hgx]", "h100-hgx").replace(", h800-hgx: 2", ""))
    cli("sweep", "s.yaml")
    table = pd.read_parquet(tmp_path / "s" / "sweep.parquet")
    plan = cli(
        "plan", "llama3-8b", "h100-hgx", "--gpus", "8..16", "--fast", "--global-batch", "64", "--tokens", "1T",
        "--price", "2.5", "--fix", "tp=2", "--fix", "pp=2", "--fix", "vpp=1", "--fix", "cp=1",
        "--fix", "micro_batch=1", "--fix", "recompute=none", "--csv", "p.csv", "--top", "1",
    )  # fmt: skip
    assert plan.returncode == 0, plan.stderr
    planned, swept = pd.read_csv(tmp_path / "p.csv"), table[table["global_batch"] == 64]
    for name in ("step_s", "usd", "gpu_hours", "device_bytes"):
        assert swept[name].tolist() == pytest.approx(planned[name].tolist(), rel=1e-12), name


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_is_killed_goes_on_where_it_was(cli: Cli, tmp_path: Path) -> None:
    text = SWEEP.replace('[64, "8 per gpu"]', "[16, 32, 48]").replace("[h100-hgx, h800-hgx]", "h100-hgx")
    (tmp_path / "s.yaml").write_text(text.replace(", h800-hgx: 2", ""))
    environment = {**os.environ, "PYTHONPATH": str(Path(mofa.__file__).parents[1])}
    points = tmp_path / "s" / "points"
    process = subprocess.Popen(
        [sys.executable, "-m", "mofa.cli.main", "sweep", "s.yaml", "--jobs", "1"], cwd=tmp_path, env=environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while len(list(points.glob("*.json"))) < 2 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it ended before it was killed"
    finished = {path: path.stat().st_mtime_ns for path in points.glob("*.json")}
    assert 2 <= len(finished) < 6
    assert cli("sweep", "s.yaml").returncode == 0
    assert finished.items() <= {path: path.stat().st_mtime_ns for path in points.glob("*.json")}.items()
    table = pd.read_parquet(tmp_path / "s" / "sweep.parquet")
    assert len(table) == table["key"].nunique() == len(list(points.glob("*.json"))) == 6
    uninterrupted = mofa.sweep(tmp_path / "s.yaml")
    assert (
        table["key"].tolist() == uninterrupted["key"].tolist()
        and table["usd"].tolist() == uninterrupted["usd"].tolist()
    )


@pytest.mark.usefixtures("undrawn")
def test_exit_statuses_say_when_nothing_is_planned(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "none.yaml").write_text(
        "models: llama3-70b\nclusters: h100-hgx\ngpus: 8\nsearch: {fast: true, fix: {cp: 1, recompute: none}}\n"
    )
    done = cli("sweep", "none.yaml", "--quiet", "--json")
    assert done.returncode == 3 and one_line_of(done.stderr).startswith("mofa: none.yaml: none of 1 points has a plan")
    report = json.loads(done.stdout)
    assert report["points"][0]["status"] == "nothing fits" and report["jobs"] == []
    (tmp_path / "bad.yaml").write_text(SWEEP.replace("8..16", "[12, 20]"))
    done = cli("sweep", "bad.yaml", "--quiet")
    assert done.returncode == 2 and "not whole nodes" in one_line_of(done.stderr)
    assert len(pd.read_parquet(tmp_path / "bad" / "sweep.parquet")) == 8
    (tmp_path / "half.yaml").write_text(SWEEP.replace("8..16", "[8, 12]"))
    done = cli("sweep", "half.yaml", "--quiet")
    assert done.returncode == 0 and "not whole nodes" in done.stdout


def test_what_is_wrong_is_one_line(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(SWEEP)
    (tmp_path / "odd.yaml").write_text(SWEEP.replace("models:", "modls:"))
    (tmp_path / "large.yaml").write_text("#" * 2**21)
    (tmp_path / "taken.yaml").write_text(SWEEP)
    (tmp_path / "taken").write_text("")
    for arguments, said in (
        (("nowhere.yaml",), "nowhere.yaml"),
        (("odd.yaml",), "odd.yaml: modls is no field here; did you mean models?"),
        (("large.yaml",), "large.yaml"),
        (("taken.yaml",), "taken: is a file, not a directory"),
        (("s.yaml", "--jobs", "0"), "--jobs"),
        (("s.yaml", "--jobs", "2", "--scheduler", "tcp://h:1"), "--jobs: is about this machine"),
        (("s.yaml", "--csv", "s.yaml"), "s.yaml: is the file s.yaml that is read"),
        (("s.yaml", "--json-file", "s.yaml"), "s.yaml: is the file s.yaml that is read"),
    ):
        done = cli("sweep", *arguments)
        assert done.returncode == 2 and said in one_line_of(done.stderr), arguments


def test_a_large_sweep_shows_the_best_of_each_job(capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"models": "llama3-8b", "clusters": "h100-hgx", "gpus": [8, 16], "global_batch": 64, "tokens": "1T",
             "search": {"fast": True, "fix": {"tp": 2, "pp": 2, "vpp": 1, "cp": 1, "micro_batch": 1}}}  # fmt: skip
    few = mofa.sweep(asked)
    failed = mofa.sweep({**asked, "gpus": list(range(9, 9 + MOST_ROWS, 2))})
    print_sweep(pd.concat([few, failed, failed.assign(global_batch=32)], ignore_index=True), make_console())
    out = capsys.readouterr().out
    assert "The cheapest and the fastest point of each job" in out
    assert f"{2 * len(failed)} points have no plan:" in out and "reasons more" in out
    for name in few["strategy"]:
        assert name in out
