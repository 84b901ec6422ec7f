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
