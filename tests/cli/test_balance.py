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
        "placement.csv",
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


def test_source_ranks_of_a_trace_are_the_gpus(cli: Cli, tmp_path: Path) -> None:
    """Every GPU's tokens are for an expert of its own: as counted nothing is sent, dealt out at random much is."""
    held = {0: (0, 2), 1: (1, 3)}  # GPUs 0 and 2 are rank 0 of their groups and hold experts 0 and 1
    rows = [
        f"{i},0,{2 * rank + k},100,{gpu}" for i in range(2) for rank, gpus in held.items() for k, gpu in enumerate(gpus)
    ]
    (tmp_path / "known.csv").write_text("iteration,layer,expert,tokens,source_rank\n" + "\n".join(rows) + "\n")
    unknown = [row.rpartition(",")[0] for row in rows]
    (tmp_path / "unknown.csv").write_text("iteration,layer,expert,tokens\n" + "\n".join(unknown) + "\n")
    group = ("balance", "--experts", "4", "--gpus", "4", "--ep", "2", "--json", "--trace")
    sent = {}
    for name in ("known", "unknown"):
        found = json.loads(cli(*group, f"{name}.csv").stdout)
        sent[name] = found["sent_over_mean"]["plain"]
        assert any("source" in note for note in found["notes"])
    assert sent["known"] == 0.0 < 0.3 < sent["unknown"]
    wrong = cli("balance", "--experts", "4", "--gpus", "6", "--ep", "2", "--trace", "known.csv")
    assert wrong.returncode == 2 and "4 ranks are no multiple and no part" in one_line_of(wrong.stderr)


def test_a_trace_of_a_workload_says_whose_tokens_they_are(cli: Cli, tmp_path: Path) -> None:
    """Mixtral's 8 experts on 8 GPUs: GPU g's tokens are for the two experts of its own rank."""
    rows = [
        f"0,{layer},{e},{100 * (e // 2 == gpu % 4)},{gpu}" for layer in range(32) for gpu in range(8) for e in range(8)
    ]
    (tmp_path / "t.csv").write_text("iteration,layer,expert,tokens,source_rank\n" + "\n".join(rows) + "\n")
    done = cli("balance", "mixtral-8x7b", "--gpus", "8", "--ep", "4", "--trace", "t.csv", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["sent_over_mean"]["plain"] == 0.0


def test_a_placement_of_ones_own(cli: Cli, tmp_path: Path) -> None:
    """The file that --out writes is read again; without replicas that overlap, scheduling evens out EP groups alone."""
    done = cli(*GROUP, "--routing", "zipf:1.2", "--micro-batches", "3", "--out", "out", "--json")
    symmetric = json.loads(done.stdout)["max_over_mean"]
    again = cli(*GROUP, "--routing", "zipf:1.2", "--micro-batches", "3", "--placement", "out/placement.csv", "--json")
    found = json.loads(again.stdout)
    assert found["max_over_mean"] == symmetric and found["group"]["placement"] == "given"
    plain = "".join(f"{e},{g}\n" for e in range(32) for g in (e // 8, e // 8 + 4))
    (tmp_path / "plain.csv").write_text("expert,gpu\n" + plain)
    pairs = cli(*GROUP, "--routing", "zipf:1.2", "--micro-batches", "3", "--placement", "plain.csv", "--json")
    ratio = json.loads(pairs.stdout)["max_over_mean"]
    assert symmetric["micro_moe"] < ratio["micro_moe"] == pytest.approx(ratio["plain"], rel=0.02)
    (tmp_path / "plain.csv").write_text("expert,gpu\n" + plain + "31,0\n")
    wrong = cli(*GROUP, "--placement", "plain.csv")
    assert wrong.returncode == 2 and "row 65: GPU 0 gets 9 replicas, and a GPU holds 8" in one_line_of(wrong.stderr)


def test_it_says_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """Skewed Mixtral with its experts' activation recomputed: the fullest rank fits with scheduling alone."""
    wide = ("balance", "mixtral-8x7b", "h100-hgx", "--gpus", "32", "--routing", "zipf:0.8", "--micro-batches", "3")
    assert main((*wide, "--strategy", "pp=4 ep=4 recompute=selective:moe_act")) == 0
    shown = capsys.readouterr().out
    assert "Plain does not fit: " in shown and "Scheduled does not fit" not in shown
    assert main((*wide, "--strategy", "pp=4 ep=4 recompute=selective:moe_act", "--json")) == 0
    step = json.loads(capsys.readouterr().out)["step"]
    assert not step["fits_before"] and step["fits_after"]
    assert step["after_bytes"] < step["limit_bytes"] < step["before_bytes"]


def test_popular_experts_stay_unless_redrawn(capsys: pytest.CaptureFixture[str]) -> None:
    """Placements by past loads follow what stays, and cannot follow what is drawn anew."""
    small = (
        "balance",
        "mixtral-8x7b",
        "--gpus",
        "8",
        "--ep",
        "4",
        "--routing",
        "zipf:1",
        "--micro-batches",
        "6",
        "--json",
    )
    assert main(small) == 0
    stays = json.loads(capsys.readouterr().out)["max_over_mean"]
    assert main((*small, "--redraw")) == 0
    redrawn = json.loads(capsys.readouterr().out)["max_over_mean"]
    assert stays["micro_moe_adaptive"] < 1.02 < stays["micro_moe"] and stays["eplb"] < 1.2
    assert redrawn["micro_moe_adaptive"] > 1.2 and redrawn["eplb"] > 1.2


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
        ((*GROUP, "--redraw"), "--redraw: is given, but needs a workload"),
        ((*GROUP, "--placement", "none.csv"), "placement none.csv: no such file"),
        ((*GROUP, "--strategy", "ep=4"), "--strategy: is given, but needs a workload"),
        (GROUP[:-2], "--ep: is missing"),
        (("balance", "--experts", "4", "--gpus", "8", "--ep", "4"), "a GPU holds one of 4 experts"),
        (("balance", "llama3-8b", "--gpus", "8", "--ep", "4"), "has no experts"),
        (("balance", "mixtral-8x7b", "--gpus", "8"), "--ep: is missing"),
        (
            ("balance", "mixtral-8x7b", "h100-hgx", "--gpus", "32", "--strategy", "pp=4 ep=8"),
            "--strategy 'pp=4 ep=8': its experts cannot be balanced: ep is 8, it takes at least 2 and at most half of",
        ),
        (  # 32 / 8 stages is a dp of 4: one group of 4
            ("balance", "mixtral-8x7b", "h100-hgx", "--gpus", "32", "--strategy", "pp=8 ep=4"),
            "tp (1) x cp (1) x dp (4) over ep (4) x etp (1) makes 1 expert-parallel group, it takes a multiple of 2",
        ),
        (
            (
                "balance",
                "mixtral-8x7b",
                "h100-hgx",
                "--gpus",
                "32",
                "--strategy",
                "pp=4 ep=4",
                "--framework",
                "torchtitan",
            ),
            "framework is torchtitan with dispatcher",
        ),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str) -> None:
    assert main(arguments) == 2
    error = one_line_of(capsys.readouterr().err)
    assert says in error
    assert "leave balancing out" not in error


def test_an_empty_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("iteration,layer,expert,tokens\n")
    assert main((*GROUP, "--trace", str(tmp_path / "t.csv"))) == 2
    assert "has no rows" in one_line_of(capsys.readouterr().err)
