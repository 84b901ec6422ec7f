"""``--rank-order``: which ranks are near each other, and what that changes of a step and of its job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli

JOB = ("llama3-8b", "h100-hgx", "--gpus", "32", "--global-batch", "64", "--no-replay")
ESTIMATE = ("estimate", *JOB, "--strategy", "tp=2 sp=true pp=4 micro_batch=1")
OTHER = "tp-cp-ep-pp-dp"


def told(cli: Cli, *command: str) -> Any:
    done = cli(*command, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_pipeline_comes_near_and_the_gradients_go_far(cli: Cli) -> None:
    """A node holds a whole pipeline of 8 ranks then: stages hand over by NVLink, gradients cross the network."""
    usual, near = told(cli, *ESTIMATE), told(cli, *ESTIMATE, "--rank-order", OTHER)
    assert near["time"]["exposed"]["pp"] < usual["time"]["exposed"]["pp"]
    assert near["time"]["exposed"]["dp"] > usual["time"]["exposed"]["dp"]
    assert any(note.startswith(f"ranks are numbered {OTHER}") for note in near["notes"])
    assert told(cli, *ESTIMATE, "--set", f"framework.rank_order={OTHER}")["time"] == near["time"]
    assert told(cli, *ESTIMATE, "--rank-order", "tp-cp-ep-dp-pp")["time"] == usual["time"]


def test_its_plans_are_launched_so(cli: Cli, tmp_path: Path) -> None:
    done = cli(
        "plan", *JOB, "--rank-order", OTHER, "--fix", "pp=4", "--top", "1", "--json-file", "plan.json", "--quiet"
    )
    assert done.returncode == 0, done.stderr
    assert "--use-tp-pp-dp-mapping" in cli("export", "plan.json", "--to", "megatron").stdout


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--rank-order", "tp-cp-ep-pp-pd"), "--rank-order tp-cp-ep-pp-pd: is no order; did you mean tp-cp-ep-pp-dp?"),
        (("--rank-order", OTHER, "--set", "framework.rank_order=tp-cp-ep-dp-pp"), "says it too; keep one"),
        (("--rank-order", OTHER, "--framework", "torchtitan"), "is an option of Megatron-Core, not of torchtitan"),
        (("--rank-order", OTHER, "--strategy", "cp=2 pp=4"), "needs as many ranks of tp (1) x cp (2) as of tp"),
    ],
)
def test_orders_that_cannot_be_are_refused_in_a_line(cli: Cli, more: tuple[str, ...], says: str) -> None:
    done = cli(*(ESTIMATE[:-2] if "--strategy" in more else ESTIMATE), *more)
    assert done.returncode == 2
    assert says in done.stderr and done.stderr.count("\n") == 1
