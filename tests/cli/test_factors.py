"""``mofa factors``: what stands in its tables is what stands in its JSON; what is wrong is one line."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import mofa
from mofa.cli.main import main
from mofa.plan.factor_results import KeyFactors
from mofa.plan.summaries import FrameworkSummary
from mofa.report.factors_text import percent_text, print_factors, strategy_changes_text
from mofa.report.figures.key_resources import plot_ablation, plot_key_resources
from mofa.report.tables import make_console
from mofa.search.key_factors import changed_machines
from mofa.specs.changed_resources import RESOURCES
from mofa.specs.overrides import parse_strategy
from mofa.specs.strategy import StrategySpec
from mofa.units import format_seconds

JOB = ["factors", "llama3-8b", "h100-hgx", "--gpus", "8", "--global-batch", "32", "--tokens", "1T", "--jobs", "1"]
SMALL = ["--fix", "pp=1", "--fix", "cp=1", "--max", "micro_batch=1", "--max", "tp=2"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study with a price, and its text in ``text``."""
    folder = tmp_path_factory.mktemp("factors")
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        status = main([*JOB, *SMALL, "--price", "2", "--out", str(folder), "--csv", str(folder / "table.csv")])
    assert status == 0
    (folder / "text").write_text(shown.getvalue(), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def text(written: Path) -> str:
    return (written / "text").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def document(written: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((written / "factors.json").read_text())
    return document


def cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def test_the_tables_have_the_numbers_of_the_json(text: str, document: dict[str, Any]) -> None:
    lines = text.splitlines()
    best = document["best"]
    assert f"{format_seconds(best['step_s'])} a step, {best['days']:,.1f} days, {best['usd']:,.0f} dollars." in lines
    for resource in document["resources"]:
        place = next(i for i, line in enumerate(lines) if line.startswith(f"{resource['resource']} "))
        for line, side in ((lines[place], "less"), (lines[place + 1], "more")):
            machines = resource[side]
            same = percent_text(machines["same_plan"]["value"] / best["value"] - 1)
            planned = machines["planned_again"]
            wanted = [
                f"10 % {side}", same if machines["same_plan_fits"] else "does not fit",
                percent_text(planned["value"] / best["value"] - 1), format_seconds(planned["step_s"]),
                f"{planned['days']:,.1f}", f"{planned['usd']:,.0f}",
            ]  # fmt: skip
            assert cells(line)[cells(line).index(wanted[0]) :][: len(wanted)] == wanted
    before = document["without_optimisations"]
    for row in document["ablation"]:
        line = next(line for line in lines if line.startswith(row["optimisation"]))
        numbers = [format_seconds(row["alone"]["value"]), format_seconds(row["added_up"]["value"])]
        gains = [percent_text(row["alone"]["value"] / document["without_optimisations"]["value"] - 1),
                 percent_text(row["added_up"]["value"] / before["value"] - 1)]  # fmt: skip
        if row["note"]:
            assert cells(line)[1:] == [numbers[1], row["note"]]
        else:
            assert cells(line)[1:5] == [numbers[0], gains[0], numbers[1], gains[1]]
        before = row["added_up"]
    assert "needs pp above 1: --fix pp=1" in text


def test_text_table_and_json_say_which_recipe_of_fp8_it_is(written: Path, text: str, document: dict[str, Any]) -> None:
    """Those of the GPU and the framework differ by a tenth of the step."""
    words = {row["optimisation"]: row["with_words"] for row in document["ablation"]}
    (recipe,) = words.pop("fp8 products")
    assert recipe.startswith("fp8-") and set(map(tuple, words.values())) == {()}
    assert f"fp8 products (--with {recipe}, other numerics)" in text
    table = pd.read_csv(written / "factors.csv", keep_default_na=False)
    assert set(table[table["name"] == "fp8 products"]["with"]) == {recipe}
    assert set(table[table["name"] != "fp8 products"]["with"]) == {""}


def test_files_are_figures_and_tables(written: Path, document: dict[str, Any]) -> None:
    names = {path.name for path in written.iterdir()} - {"text", "table.csv"}
    assert names == {
        "factors.json", "factors.csv", "resources.png", "resources.svg", "optimisations.png", "optimisations.svg"
    }  # fmt: skip
    table = pd.read_csv(written / "factors.csv")
    assert table.equals(pd.read_csv(written / "table.csv"))
    assert len(table) == 1 + 4 * len(document["resources"]) + 1 + 2 * len(document["ablation"])
    best = table[table["table"] == "best"].iloc[0]
    assert (best["step_s"], best["tp"]) == (document["best"]["step_s"], document["best"]["strategy"]["tp"])


def test_figures_show_the_numbers_of_the_json(document: dict[str, Any]) -> None:
    factors = KeyFactors.model_validate(document)
    widths = [bar.get_width() for bar in plot_key_resources(factors).patches]
    changes = [
        factors.change_from_best_plan(side.planned_again)
        for pick in ("less", "more") for side in (getattr(resource, pick) for resource in factors.resources)
    ]  # fmt: skip
    assert widths == pytest.approx([100 * change for change in changes if change is not None])
    ends = [bar.get_width() for bar in plot_ablation(factors).patches]
    assert ends[0] == document["without_optimisations"]["value"]
    assert ends[1] == pytest.approx(document["ablation"][-1]["added_up"]["value"])
    assert sum(ends[2:]) == pytest.approx(ends[1] - ends[0])


@pytest.fixture
def two_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two resources alone are changed, where a test asks nothing of them."""
    two = ("memory bandwidth", "host")
    monkeypatch.setattr(changed_machines, "RESOURCES", {name: RESOURCES[name] for name in two})


@pytest.mark.usefixtures("two_resources")
def test_json_alone_is_printed_and_versioned(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ["--fix", "tp=2", "--fix", "pp=1", "--fix", "cp=1", "--no-ablation", "--without", "tp_overlap"]
    assert main([*JOB, *fixed, "--json", "--faults", "llama3", "--spares", "0"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["schema_version"] == "1.1" and document["ablation"] == [] and captured.err == ""
    assert (document["objective"], document["faults"]) == ("wall-clock time of a step", "llama3")


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (["--objective", "usd"], 2, "--objective usd: needs failures"),
        (
            ["--objective", "usd", "--price", "2"],
            2,
            "--objective usd: needs failures, storage and tokens",
        ),
        (["--without", "seqpar"], 2, "--without: seqpar is unknown"),
        (["--framework", "megatrn"], 2, "did you mean megatron"),
        (["--fix", "tp=3"], 2, "tp"),
        (["--jobs", "0"], 2, "--jobs"),
        (["--memory-limit", "10GB"], 3, "nothing fits"),
    ],
)
def test_what_is_wrong_is_one_line(
    options: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*JOB, *options, "--quiet"]) == status
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and captured.err.startswith("mofa: ")
    assert captured.out == ""


def test_places_are_checked_before_the_searches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main([*JOB, "--out", str(tmp_path / "file" / "x"), "--quiet"]) == 2
    assert capsys.readouterr().err.endswith("is a file, not a directory; name another directory\n")


def last_line(factors: KeyFactors) -> str:
    shown = io.StringIO()
    print_factors(factors, make_console(shown))
    return shown.getvalue().splitlines()[-1]


def test_what_goes_the_other_way_is_said(document: dict[str, Any]) -> None:
    """Errors of closed forms."""
    factors = KeyFactors.model_validate(document)
    assert last_line(factors).endswith("--replay plays out all plans.")
    first = factors.resources[0]
    swapped = first.model_copy(update={"less": first.more, "more": first.less})
    odd = factors.model_copy(update={"resources": (swapped, *factors.resources[1:])})
    assert last_line(odd).endswith(f"by an error of closed forms (docs/factors.md): {first.resource}.")
    assert last_line(odd.model_copy(update={"value_unit": "J"})).endswith("--replay plays out all plans.")
    played = factors.model_copy(update={"costed_by": "replay"})
    assert last_line(played) == "Plans are played out. Stages are of the best plan."


def test_idle_gpus_and_spares_are_said(document: dict[str, Any]) -> None:
    factors = KeyFactors.model_validate(document)
    shown = io.StringIO()
    print_factors(factors, make_console(shown))
    assert "idle" not in shown.getvalue() and "standing by" not in shown.getvalue()
    print_factors(factors.model_copy(update={"computing_gpus": 4, "spare_nodes": 1}), make_console(shown))
    assert "Of 8 GPUs 4 compute; standing by: 1 node." in shown.getvalue()
    some_idle = {"computing_gpus": 3, "spare_nodes": 1, "idle_gpus": 1, "idle_note": "uses 3 of 4 GPUs: why"}
    print_factors(factors.model_copy(update=some_idle), make_console(shown))
    assert "Of 8 GPUs 3 compute, 1 idle; standing by: 1 node." in shown.getvalue()


@pytest.mark.usefixtures("two_resources")
def test_idle_gpus_are_said_as_a_plan_says_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """24 GPUs do not divide a batch of 64: 8 are idle and paid for."""
    job = ["llama3-8b", "h100-hgx", "--gpus", "24", "--global-batch", "64", "--max", "pp=1", "--without", "cp"]
    job += ["--fix", "tp=2", "--max", "micro_batch=1"]
    assert main(["plan", *job, "--fast", "--top", "1"]) == 0
    planned = capsys.readouterr().out.splitlines()
    said = [line for line in planned if line.startswith(("Plan 1 uses 16 of 24 GPUs", "The batch of 64 keeps 8 GPUs"))]
    assert len(said) == 2
    assert main(["factors", *job, "--no-ablation", "--jobs", "1", "--json-file", str(tmp_path / "factors.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line in said:
        assert line.replace("Plan 1", "The best plan").replace("plan 1", "the best plan") in lines
    document = json.loads((tmp_path / "factors.json").read_text())
    assert (document["computing_gpus"], document["idle_gpus"]) == (16, 8)
    assert f"Plan 1 {document['idle_note']}." in said


def test_one_gpu_is_no_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["factors", "llama3-70b", "h100-hgx", "--gpus", "1", "--quiet"]) == 3
    assert "llama3-70b on 1 GPU: nothing fits; " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"tp_overlap": True}),
        ({"tp_overlap": True}, {}),
        ({"tp_overlap": True}, {"dispatcher": "deepep", "overlap_param_gather": False}),
        ({"dispatcher": "deepep"}, {"dp_replicate": 2}),
    ],
)
def test_changes_of_options_are_values_that_strategies_have(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Also where an option goes back to the framework's own."""
    framework = mofa.load_framework("megatron")
    summary = FrameworkSummary.from_spec(framework)
    text = strategy_changes_text(StrategySpec(**before), StrategySpec(**after), summary)
    changed = [change.partition(" not ")[0] for change in text.split(", ")]
    read = StrategySpec.model_validate(parse_strategy(" ".join(changed)))
    for name in {*before, *after}:
        assert getattr(read, name) == after.get(name, getattr(framework, name))
