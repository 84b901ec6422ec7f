"""``mofa plan --gpus N..M``: the best plan of every number of GPUs, and which of them is cheapest."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest
import typer

from mofa.cli.plan_scales import parse_gpus_or_range
from mofa.report.scales_text import gpu_count_verdict_lines
from tests.cli.conftest import Cli, one_line_of
from tests.report.fake import make_report

JOB = (
    "plan", "llama3-8b", "h100-hgx", "--fast", "--global-batch", "64", "--fix", "cp=1", "--fix", "micro_batch=1",
    "--fix", "vpp=1", "--top", "2", "--quiet",
)  # fmt: skip


def without_time(report: dict[str, object]) -> dict[str, object]:
    """A report without what differs from run to run."""
    return {name: value for name, value in report.items() if name != "elapsed_s"}


def test_several_numbers_give_what_each_gives(cli: Cli, tmp_path: Path) -> None:
    done = cli(*JOB, "--gpus", "8..16", "--price", "2.5", "--json-file", "both.json", "--csv", "both.csv")
    assert done.returncode == 0, done.stderr
    both = json.loads((tmp_path / "both.json").read_text())
    for report in both:
        number = str(report["cluster"]["num_gpus"])
        single = json.loads(cli(*JOB, "--gpus", number, "--price", "2.5", "--json").stdout)
        assert without_time(report) == without_time(single)
    table = pd.read_csv(tmp_path / "both.csv")
    assert table["num_gpus"].tolist() == [8, 8, 16, 16]
    assert table["step_s"].tolist() == pytest.approx([plan["step_s"] for report in both for plan in report["plans"]])
    cheapest = min(both, key=lambda report: report["plans"][0]["usd"])
    usd, gpus = cheapest["plans"][0]["usd"], cheapest["cluster"]["num_gpus"]
    assert re.search(rf"^Cheapest: {gpus} GPUs, .* {usd:,.0f} USD\.$", done.stdout, re.MULTILINE)
    assert "Fastest: 16 GPUs" in done.stdout


def test_the_list_is_exported_and_compared_by_number(cli: Cli, tmp_path: Path) -> None:
    assert cli(*JOB, "--gpus", "8..16", "--json-file", "both.json").returncode == 0
    assert "has 2 results; name one by its place, from both.json:1 to :2" in one_line_of(
        cli("export", "both.json", "--to", "megatron").stderr
    )
    assert "has 2 results" in one_line_of(cli("export", "both.json:3", "--to", "megatron").stderr)
    (tmp_path / "second.json").write_text(json.dumps(json.loads((tmp_path / "both.json").read_text())[1]))
    of_list, alone = (cli("export", name, "--to", "megatron").stdout for name in ("both.json:2", "second.json"))
    assert of_list == alone != "" and of_list != cli("export", "both.json:1", "--to", "megatron").stdout
    compared = json.loads(cli("compare", "both.json", "--json").stdout)
    assert [result["name"] for result in compared["results"]] == ["both, 8 GPUs", "both, 16 GPUs"]


@pytest.mark.usefixtures("undrawn")
def test_files_go_to_a_folder_for_each_number(cli: Cli, tmp_path: Path) -> None:
    assert cli(*JOB, "--gpus", "8..16", "--out", "out").returncode == 0
    for number in ("8", "16"):
        names = {path.name for path in (tmp_path / "out" / number).iterdir()}
        assert {"report.html", "report.md", "plan.json", "plans.csv"} <= names
    assert cli("compare", "out/8/plan.json", "out/16/plan.json").returncode == 0


def test_a_number_on_which_nothing_fits_is_said(cli: Cli) -> None:
    done = cli(*JOB, "--gpus", "1..4")
    assert done.returncode == 0 and re.search(r"^ +1  nothing fits; \d+ GPUs would do", done.stdout, re.MULTILINE)
    nothing = cli(*JOB, "--gpus", "1..2", "--max", "pp=1")
    assert nothing.returncode == 3 and "nothing fits" in nothing.stderr


def test_ranges_double() -> None:
    assert parse_gpus_or_range("64..1K") == (64, 128, 256, 512, 1024)
    assert parse_gpus_or_range("24..96") == (24, 48, 96)
    assert parse_gpus_or_range("8..8") == (8,)
    for text, said in (
        ("64..96", "96 is not 64 times a power of two"),
        ("128..64", "128..256"),
        ("1..100K", "write 1..2048"),
    ):
        with pytest.raises(typer.BadParameter, match=re.escape(said)):
            parse_gpus_or_range(text)


def test_what_is_no_range_is_one_line(cli: Cli) -> None:
    for text in ("64..", "..64", "64..x", "0..8", "64,128", "64...128"):
        done = cli(*JOB, "--gpus", text)
        assert done.returncode == 2
        assert "--gpus" in one_line_of(done.stderr)


def test_of_equal_ones_one_is_cheapest_and_fastest() -> None:
    report = make_report(1)
    assert gpu_count_verdict_lines([report])[0].startswith(f"Cheapest and fastest: {report.cluster.num_gpus:,} GPUs")
    assert gpu_count_verdict_lines([make_report(0)]) == []
