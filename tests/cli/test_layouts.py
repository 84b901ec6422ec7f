"""Layouts of pipelines on the command line, asked for and told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli


@pytest.mark.parametrize("layout", ["Et*14|,t*18L", "decoder-last-pipeline-num-layers:18"])
def test_a_layout_is_asked_for(cli: Cli, tmp_path: Path, layout: str) -> None:
    """In Megatron's words, with commas for the eye, or by its options."""
    arguments = ["estimate", "llama3-8b", "h100-hgx", "--gpus", "8", "--no-replay", "--json-file", "plan.json"]
    done = cli(*arguments, "--strategy", f"tp=2 layout={layout} pp=2 micro_batch=1")
    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["layout"]["text"], plan["layout"]["by"]) == ("Et*14|t*18L", "strategy")
    assert "Layers per stage: 14, 18." in done.stdout
    assert "Layout: Et*14|t*18L (as asked)." in done.stdout


def test_a_plan_says_the_layouts_of_all_plans(cli: Cli, tmp_path: Path) -> None:
    arguments = ["plan", "llama3-8b", "h100-hgx", "--gpus", "8", "--fix", "pp=4 vpp=2 layout=E|(t*5|)*6ttL"]
    done = cli(*arguments, "--no-replay", "--top", "3", "--json-file", "plans.json")
    assert done.returncode == 0, done.stderr
    assert "Layout of all plans: E|(t*5|)*6ttL (as asked)." in done.stdout
    plans = json.loads((tmp_path / "plans.json").read_text())["plans"]
    assert {plan["layout"]["text"] for plan in plans} == {"E|(t*5|)*6ttL"}


def test_a_wrong_layout_is_one_line(cli: Cli) -> None:
    arguments = ["estimate", "llama3-8b", "h100-hgx", "--gpus", "8", "--strategy"]
    for layout, words in (
        ("Et*14|x*18L", "layout ('Et*14|x*18L'): at character 7: 'x' is no module"),
        ("Et*14|t*17L", "layout Et*14|t*17L with pp (2) x vpp (1): at character 12: it has 31 t (decoder layer)"),
    ):
        done = cli(*arguments, f"pp=2 layout={layout}")
        assert (done.returncode, done.stdout) == (2, "")
        assert words in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_layout_is_searched_for_and_told_with_its_bound(cli: Cli, tmp_path: Path) -> None:
    arguments = [
        "llama3-8b",
        "h100-hgx",
        "--gpus",
        "8",
        "--global-batch",
        "64",
        "--no-replay",
        "--json-file",
        "out.json",
    ]
    done = cli("estimate", *arguments, "--strategy", "tp=2 pp=4 recompute=full", "--find-layout")
    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "out.json").read_text())
    layout = plan["layout"]
    assert layout["by"] == "search"
    assert plan["strategy"]["layout"] == layout["text"]
    assert layout["search"]["bound_s"] <= layout["search"]["pipeline_s"]
    assert plan["step_s"] < layout["search"]["before_step_s"]
    assert f"Layout: {layout['text']} (found by search: --pipeline-model-parallel-layout)." in done.stdout
    assert "shorter than with Et*8|t*8|t*8|t*8L; no pipeline takes less than" in done.stdout
    done = cli("plan", *arguments, "--fix", "tp=2 pp=4 vpp=1", "--top", "2")
    assert done.returncode == 0, done.stderr
    assert "Search of the layout of plan 1: step" in done.stdout
    done = cli("plan", *arguments, "--fix", "tp=2 pp=4 vpp=1", "--top", "2", "--refine-seconds", "0")
    assert "Search of the layout" not in done.stdout


def test_a_layout_is_not_searched_for_where_there_is_none(cli: Cli) -> None:
    arguments = ["estimate", "llama3-8b", "h100-hgx", "--gpus", "8", "--no-replay", "--find-layout", "--strategy"]
    done = cli(*arguments, "tp=8")
    assert done.returncode == 2
    assert "there is no layout to search for" in done.stderr
