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
        (("mine.json",), "results: 1 cannot be compared; give 2 to 12"),
        (("mine.json", "found.json:3"), "found.json: plan 3: is not there, the search has 2"),
        (("mine.json:2", "found.json"), "mine.json: plan 2: is not there, the result is of one strategy"),
        (("mine.json", "none.json"), "none.json"),
        (("mine.json", "text.json"), "is no JSON that can be read"),
        (("mine.json", "list.json"), "list.json: is no result of mofa"),
        (("mine.json", "half.json"), "half: is no whole result"),
    ],
)
def test_what_is_no_result_is_refused_in_a_line(
    cli: Cli, two: tuple[str, str], tmp_path: Path, files: tuple[str, ...], says: str
) -> None:
    (tmp_path / "text.json").write_text("hello")
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "half.json").write_text('{"schema_version": "2.13", "strategy": {}}')
    done = cli("compare", *files)
    assert done.returncode == 2
    assert says in done.stderr and done.stderr.count("\n") == 1
