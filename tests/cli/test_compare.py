"""``mofa compare``: tables, files, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from mofa.cli.main import main
from tests.cli.conftest import Cli

JOB = ("llama3-8b", "h100-hgx", "--no-replay", "--global-batch", "64", "--quiet")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an estimate, and a search with two plans."""
    folder = tmp_path_factory.mktemp("results")
    for command in (
        ("estimate", *JOB, "--gpus", "8", "--strategy", "tp=8 sp=true", "--json-file", str(folder / "mine.json")),
        ("plan", *JOB, "--gpus", "8", "--fix", "pp=1", "--fix", "cp=1", "--top", "2", "--json-file",
         str(folder / "found.json"), "--jobs", "1"),
    ):  # fmt: skip
        assert main(command) == 0
    return folder


@pytest.fixture
def two(written: Path, tmp_path: Path) -> tuple[str, str]:
    """Both in the folder that commands run in."""
    for file in written.iterdir():
        shutil.copy(file, tmp_path)
    return "mine.json", "found.json"


def test_tables_and_files_say_the_same(cli: Cli, two: tuple[str, str], tmp_path: Path) -> None:
    done = cli("compare", *two, "--json-file", "c.json", "--csv", "c.csv", "--out", "out")
    assert done.returncode == 0, done.stderr
    for words in ("What differs", "strategy.tp", "Totals", "Where the step goes", "Memory of the fullest GPU",
                  "found - mine"):  # fmt: skip
        assert words in done.stdout
    comparison = json.loads((tmp_path / "c.json").read_text())
    table = pd.read_csv(tmp_path / "c.csv")
    for result in comparison["results"]:
        of_time = table[(table["result"] == result["name"]) & (table["of"] == "time")]
        assert of_time["value"].sum() == pytest.approx(result["step_s"])
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"compare.json", "compare.csv", "time.png", "time.svg", "memory.png", "memory.svg"}
    assert json.loads(cli("compare", *two, "--json").stdout) == comparison


def test_plans_of_one_search_and_estimates_of_one_file(cli: Cli, two: tuple[str, str], tmp_path: Path) -> None:
    done = cli("compare", "found.json:1", "found.json:2", "mine.json", "--json")
    assert [result["name"] for result in json.loads(done.stdout)["results"]] == ["found:1", "found:2", "mine"]
    one = json.loads((tmp_path / "mine.json").read_text())
    (tmp_path / "list.json").write_text(json.dumps([one | {"id": "first"}, one | {"id": "second"}]))
    done = cli("compare", "list.json", "--json")
    assert [result["name"] for result in json.loads(done.stdout)["results"]] == ["first", "second"]


@pytest.mark.parametrize("columns", ["60", "80", "100"])
def test_narrow_terminals_cut_no_number(
    cli: Cli, two: tuple[str, str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    command = ("compare", "found.json:1", "found.json:2", "mine.json")
    monkeypatch.setenv("COLUMNS", "200")
    wide = cli(*command).stdout.split()
    monkeypatch.setenv("COLUMNS", columns)
    narrow = cli(*command).stdout
    assert max(map(len, narrow.splitlines())) <= int(columns)
    assert {word for word in wide if word[0].isdigit()} <= set(narrow.split())


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (("mine.json", "found.json:3"), "found.json: plan 3: is not there, the search has 2"),
        (("mine.json:2", "found.json"), "mine.json: plan 2: is not there, the result is of one strategy"),
        (("mine.json", "none.json"), "none.json"),
        (("mine.json", "text.json"), "is no JSON that can be read"),
        (("mine.json", "list.json"), "list.json: is no result of mofa"),
        (("mine.json", "half.json"), "is no whole result"),
    ],
)
def test_what_is_no_result_is_refused_in_a_line(
    cli: Cli, two: tuple[str, str], tmp_path: Path, files: tuple[str, ...], says: str
) -> None:
    (tmp_path / "text.json").write_text("hello")
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "half.json").write_text('{"schema_version": "2.15", "strategy": {}}')
    done = cli("compare", *files)
    assert done.returncode == 2
    assert says in done.stderr and done.stderr.count("\n") == 1


def saved_by_another_version(file: Path, **changes: object) -> dict[str, object]:
    """A saved estimate as a version that waited a second longer for its host would have written it."""
    saved = json.loads(file.read_text())
    saved["time"]["exposed"]["host_idle"] += 1.0
    saved["tokens_per_s_per_gpu"] *= saved["step_s"] / (saved["step_s"] + 1.0)
    saved["step_s"] += 1.0
    saved |= changes
    file.write_text(json.dumps({name: value for name, value in saved.items() if value is not None}))
    return dict(saved)


def test_one_result_is_compared_with_its_job_today(cli: Cli, two: tuple[str, str], tmp_path: Path) -> None:
    now = json.loads((tmp_path / "mine.json").read_text())
    assert now["schema_version"] == "2.15" and now["mofa_version"]
    same = json.loads(cli("compare", "mine.json", "--json").stdout)
    assert same["differs"] == {} and all(part["by_result"][0] == part["by_result"][1] for part in same["time"])
    assert [result["mofa_version"] for result in same["results"]] == [now["mofa_version"]] * 2
    saved_by_another_version(tmp_path / "mine.json", mofa_version="0.0.9", schema_version="2.13")
    done = cli("compare", "mine.json", "--json", "--out", "out")
    comparison = json.loads(done.stdout)
    assert [result["name"] for result in comparison["results"]] == [
        "mine (mofa 0.0.9)", f"today (mofa {now['mofa_version']})",
    ]  # fmt: skip
    assert comparison["differs"]["mofa_version"] == ["0.0.9", now["mofa_version"]]
    parts = {part["name"]: part["by_result"] for part in comparison["time"]}
    before_s, after_s = parts.pop("host_idle")
    assert before_s - after_s == pytest.approx(1.0)
    assert all(before == after for before, after in parts.values())
    assert comparison["results"][1]["step_s"] == now["step_s"]
    assert "today (mofa" in (tmp_path / "out" / "time.svg").read_text()
    assert "mine (mofa 0.0.9)" in cli("compare", "mine.json").stdout


def test_two_versions_stand_beside_each_other(cli: Cli, two: tuple[str, str], tmp_path: Path) -> None:
    shutil.copy(tmp_path / "mine.json", tmp_path / "old.json")
    saved_by_another_version(tmp_path / "old.json", mofa_version=None, schema_version="2.9")
    names = [
        result["name"] for result in json.loads(cli("compare", "old.json", "mine.json", "--json").stdout)["results"]
    ]
    assert names[0] == "old (JSON 2.9)" and names[1].startswith("mine (mofa ")


def test_a_plan_of_a_search_is_compared_with_its_job_today(cli: Cli, two: tuple[str, str]) -> None:
    comparison = json.loads(cli("compare", "found.json:2", "--json").stdout)
    assert comparison["differs"] == {}
    assert comparison["results"][0]["step_s"] == comparison["results"][1]["step_s"]
    assert comparison["memory"][0]["by_result"][0] == comparison["memory"][0]["by_result"][1]


def test_changed_machines_are_said_again(cli: Cli, tmp_path: Path) -> None:
    limit = ("--memory-limit", "70GB")
    command = ("estimate", *JOB, "--gpus", "8", "--strategy", "tp=8 sp=true", *limit, "--json-file", "limited.json")
    assert cli(*command).returncode == 0
    refused = cli("compare", "limited.json")
    assert refused.returncode == 2 and "say the same --memory-limit" in refused.stderr
    assert json.loads(cli("compare", "limited.json", *limit, "--json").stdout)["differs"] == {}


@pytest.mark.parametrize(
    ("changes", "options", "says"),
    [
        ({"schema_version": "1.4"}, (), "schema_version ('1.4') is of another major version than 2.15"),
        ({"schema_version": "3.0"}, (), "is of another major version"),
        ({"job": None}, (), "does not have its job whole, as results of before JSON 2.10"),
        ({"job": {"workload": {}, "framework": {}, "nvls": True}}, (), "mine.json"),
        ({"strategy": {"tp": 0}}, (), "mine.json"),
        ({}, ("--cluster", "a100-hgx"), "cluster.gpu is h100"), ({}, ("--cluster", "none"), "none"),
        ({}, ("--set", "workload.batch.seq_len=4096"), "--set workload.batch.seq_len: the result says it"),
        ({}, ("found.json", "--cluster", "h100-hgx"), "--cluster: is of the machines of one result alone"),
    ],
)  # fmt: skip
def test_jobs_that_cannot_be_said_again_are_refused_in_a_line(
    cli: Cli, two: tuple[str, str], tmp_path: Path, changes: dict[str, object], options: tuple[str, ...], says: str
) -> None:
    saved_by_another_version(tmp_path / "mine.json", **changes)
    done = cli("compare", "mine.json", *options)
    assert done.returncode == 2
    assert says in done.stderr and done.stderr.count("\n") == 1
