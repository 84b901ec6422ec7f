"""What ``--fix`` names and nothing runs, near-misses of words, and what few columns still say."""

from __future__ import annotations

import json

import pytest

import mofa
from tests.cli.conftest import Cli, one_line_of

PLAN = ("plan", "llama3-8b", "h100-hgx", "--gpus", "8", "--fast", "--quiet", "--top", "1")


def test_a_fixed_value_that_runs_nowhere_is_told_with_the_reason() -> None:
    job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
    report = mofa.find_plans(job, machines, fix={"tp": (4, 3)}, top=1, replay=False).report
    assert report.plans[0].strategy.tp == 4
    assert report.defaults["fixed values"].startswith("of --fix, tp=3 runs nowhere: gpus (8) must be a multiple of tp")
    both = mofa.find_plans(job, machines, fix={"tp": (4, 2)}, top=1, replay=False).report
    assert "fixed values" not in both.defaults


def test_the_command_says_so_under_its_plans(cli: Cli) -> None:
    assert "Of --fix, tp=3 runs nowhere: gpus (8)" in cli(*PLAN, "--fix", "tp=4,3").stdout


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--fix", "tensor_paralel=4"), "did you mean tp?"),
        (("--fix", "pipeline_paralel_size=4"), "did you mean pp?"),
        (("--set", "workload.pruning=true"), "pruning and distillation are not modelled"),
        (("--set", "workload.distillation=true"), "pruning and distillation are not modelled"),
        (("--set", "workload.galore=true"), "another optimizer than AdamW is not modelled"),
    ],
)
def test_words_that_are_nearly_known(cli: Cli, option: tuple[str, ...], said: str) -> None:
    done = cli(*PLAN, *option)
    assert done.returncode == 2
    assert said in one_line_of(done.stderr)


def test_a_price_gives_dollars_in_the_table_alone(cli: Cli) -> None:
    assert "dollars" in cli(*PLAN, "--price", "2.5").stdout
    assert "dollars" not in cli(*PLAN).stdout


def test_gpus_are_listed_with_their_peaks_and_nodes(cli: Cli) -> None:
    listed = json.loads(cli("show", "gpus", "--json").stdout)
    (h200,) = (gpu for gpu in listed if gpu["name"] == "h200-sxm")
    assert h200["nodes"] == ["h200-hgx"]
    assert h200["peak_bf16_flops_per_s"] == pytest.approx(989.4e12)
    assert "datasheet" in cli("show", "gpus", "h200-sxm").stdout


def test_a_cluster_prints_a_few_lines() -> None:
    text = str(mofa.load_cluster("h100-hgx", 16))
    assert text.splitlines()[0] == "cluster   h100-hgx: 16 x h100-sxm, 8 a node"
    assert len(text.splitlines()) == 4


def test_a_plan_of_a_dense_model_says_nothing_of_experts() -> None:
    machines = mofa.load_cluster("h100-hgx", 8)
    dense, experts = (
        mofa.estimate(mofa.load_workload(name), machines, strategy, replay=False)
        for name, strategy in (("llama3-8b", "tp=2 dp=4"), ("mixtral-8x7b", "tp=2 pp=2 dp=2"))
    )
    assert "etp" not in str(dense)
    assert "etp" in str(experts)
