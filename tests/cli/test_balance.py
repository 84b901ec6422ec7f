"""``mofa balance``: both forms, its files, and one line for whatever is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mofa.cli.main import main
from tests.cli.conftest import Cli, one_line_of

GROUP = ("balance", "--experts", "32", "--gpus", "8", "--ep", "4")


def test_a_group_of_experts(cli: Cli) -> None:
    done = cli(*GROUP, "--routing", "zipf:0.9", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    ratio = found["max_over_mean"]
    assert ratio["micro_moe"] == pytest.approx(ratio["lower_bound"], abs=8 / 65_536)
    assert ratio["plain"] > 2 and ratio["lower_bound"] >= 1
    assert found["group"]["micro_batches"] == 100 and found["group"]["assignments"] == 65_536
    assert 0 < found["solve_s"]["median"] <= found["solve_s"]["p99"]


def test_the_seed_repeats(capsys: pytest.CaptureFixture[str]) -> None:
    def loads(seed: str) -> dict[str, float]:
        assert main((*GROUP, "--micro-batches", "5", "--routing", "zipf:1", "--seed", seed, "--json")) == 0
        return dict(json.loads(capsys.readouterr().out)["max_over_mean"])

    assert loads("3") == loads("3") != loads("4")


def test_a_workload_on_a_cluster(cli: Cli, tmp_path: Path) -> None:
    done = cli(
        "balance", "mixtral-8x7b", "h100-hgx", "--gpus", "32", "--strategy", "pp=4 ep=4 micro_batch=1", "--routing",
        "zipf:0.8", "--micro-batches", "2", "--out", "out", "--csv", "layers.csv", "--json-file", "b.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "scheduled replicas" in done.stdout and "+" in done.stdout
    assert {f.name for f in (tmp_path / "out").iterdir()} == {
        "balance.json",
        "layers.csv",
        "balance.png",
        "balance.svg",
    }
    assert len((tmp_path / "layers.csv").read_text().splitlines()) == 33
    step = json.loads((tmp_path / "b.json").read_text())["step"]
    assert step["after_s"] < step["before_s"]


def test_a_trace(cli: Cli, tmp_path: Path) -> None:
    rows = [f"{i},{layer},{e},{100 * (e < 2) + 10}" for i in range(3) for layer in (0, 5) for e in range(8)]
    (tmp_path / "t.csv").write_text("iteration,layer,expert,tokens\n" + "\n".join(rows) + "\n")
    done = cli("balance", "--experts", "8", "--gpus", "8", "--ep", "4", "--trace", "t.csv", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["group"]["layers"] == 2 and found["group"]["micro_batches"] == 3
    assert found["group"]["assignments"] == 8 * 10 + 200
    # both heavy experts lie on the same rank of every group
    assert found["max_over_mean"]["plain"] > 2.9
    wrong = cli("balance", "--experts", "16", "--gpus", "8", "--ep", "4", "--trace", "t.csv")
    assert wrong.returncode == 2 and "has 16" in one_line_of(wrong.stderr)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((*GROUP[:-1], "3"), "ep (3) must divide experts (32)"),
        ((*GROUP, "--routing", "zipf:-1"), "--routing zipf:-1: s"),
        ((*GROUP, "--routing", "zipf:nan"), "finite"),
        ((*GROUP, "--routing", "even"), "'even'"),
        ((*GROUP, "--seed", "-1"), "--seed: -1"),
        ((*GROUP, "--micro-batches", "0"), "micro-batches (0)"),
        ((*GROUP, "--interval", "0"), "interval (0)"),
        ((*GROUP, "--threshold", "nan"), "threshold (nan)"),
        ((*GROUP, "--trace", "none.csv"), "no such file"),
        ((*GROUP, "--strategy", "ep=4"), "--strategy: is given, but needs a workload"),
        (GROUP[:-2], "--ep: is missing"),
        (("balance", "--experts", "4", "--gpus", "8", "--ep", "4"), "a GPU holds one of 4 experts"),
        (("balance", "llama3-8b", "--gpus", "8", "--ep", "4"), "has no experts"),
        (("balance", "mixtral-8x7b", "--gpus", "8"), "--ep: is missing"),
        (
            ("balance", "mixtral-8x7b", "h100-hgx", "--gpus", "32", "--strategy", "pp=4 ep=8"),
            "balancing micro_moe needs",
        ),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str) -> None:
    assert main(arguments) == 2
    assert says in one_line_of(capsys.readouterr().err)


def test_an_empty_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("iteration,layer,expert,tokens\n")
    assert main((*GROUP, "--trace", str(tmp_path / "t.csv"))) == 2
    assert "has no rows" in one_line_of(capsys.readouterr().err)
