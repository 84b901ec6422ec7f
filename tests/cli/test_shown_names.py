"""Names of users with characters that act on a terminal, a spreadsheet or an editor are shown and written escaped."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from mofa.report.save import csv_bytes
from mofa.report.tables import make_console, markdown_table, print_table
from tests.cli.conftest import Cli
from tests.committed import read_yaml

ROOT = Path(__file__).resolve().parents[2]
ODD = "evil\x1b[31m\x1b]0;title\x07 \u202egnp\u2066"
JOB = ("h100-hgx", "--gpus", "8", "--strategy", "tp=2", "--no-replay")


def test_odd_names_are_shown_escaped(cli: Cli, tmp_path: Path) -> None:
    raw = read_yaml(ROOT / "workloads/llama3-8b.yaml")
    (tmp_path / "odd.yaml").write_text(yaml.safe_dump({**raw, "name": ODD}))
    ran = cli("estimate", str(tmp_path / "odd.yaml"), *JOB)
    assert ran.returncode == 0
    assert r"evil\x1b[31m\x1b]0;title" in ran.stdout
    assert r"\u202egnp\u2066" in ran.stdout
    assert not set("\x1b\x07\u202e\u2066") & set(ran.stdout + ran.stderr)


def test_tables_escape_what_acts_on_a_terminal_or_a_spreadsheet() -> None:
    text = csv_bytes(pd.DataFrame({"name": [ODD, "=1+1", "@x", "-1.5", "tp=8"], "x": np.arange(5.0)})).decode()
    cells = [row[0] for row in csv.reader(io.StringIO(text))][1:]
    assert cells == [r"evil\x1b[31m\x1b]0;title\x07 \u202egnp\u2066", "'=1+1", "'@x", "-1.5", "tp=8"]
    assert "\x1b" not in markdown_table((("a", "left"),), [[ODD]])
    file = io.StringIO()
    print_table(make_console(file), ODD, (("a", "left"),), [[ODD]])
    assert not set("\x1b\x07\u202e") & set(file.getvalue())


def test_written_files_hold_no_character_that_acts(cli: Cli, tmp_path: Path) -> None:
    """Reports, launch scripts and JSON; what JSON says is the name as it is."""
    raw, name = read_yaml(ROOT / "workloads/llama3-8b.yaml"), f"{ODD} \x7f\x85\U000e0041\r\0 模型"
    (tmp_path / "odd.yaml").write_text(yaml.safe_dump({**raw, "name": name}))
    result, report, job = tmp_path / "odd.json", tmp_path / "report", tmp_path / "job"
    planned = cli("plan", str(tmp_path / "odd.yaml"), "h100-hgx", "--gpus", "8", "--fix", "tp=2 pp=1 micro_batch=1",
                  "--top", "1", "--fast", "--json", "--json-file", str(result), "--out", str(report))  # fmt: skip
    assert planned.returncode == 0, planned.stderr
    for more in (("--out", str(job)), ()):
        exported = cli("export", str(result), "--to", "megatron", *more)
        assert exported.returncode == 0, exported.stderr
    texts = [p.read_text() for p in (result, *report.iterdir(), *job.iterdir()) if p.suffix != ".png"]
    for text in (*texts, planned.stdout, exported.stdout):
        assert not {c for c in text if not c.isprintable() and unicodedata.category(c) != "Zs"} - set("\n\t")
    assert json.loads(result.read_text())["workload"]["name"] == json.loads(planned.stdout)["workload"]["name"] == name


def test_drawings_hold_no_control_characters() -> None:
    from matplotlib.figure import Figure

    from mofa.report.save import figure_files

    axes = Figure().subplots()
    axes.set_title(ODD)
    assert not set(b"\x1b\x07") & set(figure_files("x", axes)["x.svg"])


def test_characters_that_the_encoding_lacks_are_escaped(tmp_path: Path) -> None:
    raw = read_yaml(ROOT / "workloads/llama3-8b.yaml")
    (tmp_path / "cn.yaml").write_text(yaml.safe_dump({**raw, "name": "模型"}, allow_unicode=True))
    run = subprocess.run(
        [sys.executable, "-m", "mofa", "estimate", str(tmp_path / "cn.yaml"), *JOB], capture_output=True, check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert rb"\u6a21\u578b" in run.stdout
